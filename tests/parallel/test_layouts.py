"""The layout matrix: pipeline, data and tensor parallelism, ZeRO, recomputation, accumulation, optimizers, tasks and a
resume in another layout leave the curve and the weights alone.

Of "plain" the reference is a loop of timm and torch in one process (tests/support/oracle.py), of every other row one
rank of ours, which each task's own tests compare with a plain loop. A selection in which every pair of choices occurs
always runs; `pytest --exhaustive` draws others:

    pytest tests/parallel/test_layouts.py -k same_curve --exhaustive --layout-seed 7 --layout-count 100
"""

import contextlib
import functools
import json
import random
from typing import Any, NamedTuple
from unittest import mock

import oracle
import pytest
import timm
import torch
import tp_models
from bridge_towers import write_folder
from curves import assert_same_curve, checkpoints_in_time, read_rows, train_rows
from pairwise import cover, pairs
from PIL import Image
from project import write_config
from runs import unpredicted
from safetensors.torch import load_file
from timm.models import save_for_hf
from torchvision.transforms.functional import normalize, to_tensor

from ds_vit.data.sampler import SampleOrder
from ds_vit.data.sources.datasets import open_source

# A wrong factor shows in the first step or, in the optimizer's state, in the second or third.
GLOBAL_BATCH, STEPS, STOP = 24, 4, 3
SMALL_STEPS = 5  # of the rows with an epoch of four steps: the last one is in another
RTOL = 1e-5
# 8 layers and 6 heads: split by 2, 3 and 4 stages and by 2 and 3 tensor-parallel ranks.
KWARGS = {"patch_size": 8, "embed_dim": 48, "depth": 6, "num_heads": 6}
# name: (pp, dp, tp, a further flag)
LAYOUTS = {
    "1 rank": (1, 1, 1, ""),
    "dp2": (1, 2, 1, ""),
    "dp4": (1, 4, 1, ""),
    "pp2": (2, 1, 1, ""),
    "pp4": (4, 1, 1, ""),
    "pp2 dp2": (2, 2, 1, ""),
    "pp2, head apart": (2, 1, 1, "--pp-partition"),
    "pp3 uneven": (3, 1, 1, "--pp-partition"),
    "tp2": (1, 1, 2, ""),
    "tp3": (1, 1, 3, ""),
    "tp2 dp2": (1, 2, 2, ""),
    "pp2 tp2": (2, 1, 2, ""),
    "tp2 sequence": (1, 1, 2, "--sequence-parallel"),
    "pp2 tp2 sequence": (2, 1, 2, "--sequence-parallel"),
    "tp3 classes": (1, 1, 3, "--class-parallel"),
    "pp2 dp2 tp2": (2, 2, 2, ""),
}
# name: (row of oracle.BLOCKS, arguments that differ, tolerance of the gradient norm, of weights and their average).
# AdamW scales rounding in gradients that are zero in exact arithmetic (the key bias) up to the learning rate; trust
# ratios and orthogonalization carry the rounding of the weights on to the norm.
OPTIMIZERS = {
    "sgd": ("sgd", {"lr": oracle.SGD_LR}, RTOL, RTOL),
    "adamw": ("adamw", {"eps": 1e-6}, RTOL, 1e-4),
    "layer decay": ("layer decay", {}, RTOL, 1e-4),
    "lamb": ("lamb", {}, 1e-4, 1e-4),
    "lars": ("lars", {}, 1e-4, 1e-4),
    "muon": ("muon", {}, 1e-4, 1e-4),
}
# What a stage of ZeRO is asked beside.
ZERO = {
    "": {},
    "small buckets": {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "sub_group_size": 1000},
    "offloaded": {"offload_optimizer": {"device": "cpu"}},
    "none persists": {"stage3_param_persistence_threshold": 0},
    "all persist": {"stage3_param_persistence_threshold": 10**9},
}
# Where an interrupted run is resumed: ranks, ZeRO stage, pp, tp.
THEN = {"": (), "dp2 ZeRO-3": (2, 3, 1, 1), "pp2 tp2 ZeRO-1": (4, 1, 2, 2)}


class Row(NamedTuple):
    """What is trained.

    Attributes:
        words: of the command line; names of `folders` in braces.
        cannot: parts of a layout's name, or "recompute", that it does not go with.
        layers: of its model.
        is_kind: a kind of block or a setting, which needs fewer layouts than a task.
    """

    words: list[Any]
    cannot: str = ""
    layers: int = 4
    is_kind: bool = False


DROPS = {"proj_drop_rate": 0.1, "pos_drop_rate": 0.1}
# 103 training and 53 validation images, which a global batch of 24 does not divide; an epoch is four steps.
IMAGES = ["--data-dir", "{images}", "--epochs", 2, "--max-steps", SMALL_STEPS, "--warmup-steps", 2]
SMALL_KWARGS = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 6}
SMALL = ["--model", oracle.MODEL, "--img-size", 16, *oracle.kwargs_words(SMALL_KWARGS)]
PAIRS = ["--dataset", "glyphs", "--val-split", "", "--context-length", 24, "--epochs", 1, "--max-steps", SMALL_STEPS]
PAIRS += ["--warmup-steps", 2]
TEXT = [*PAIRS, *SMALL, "--drop-path", 0.2, "--text-width", 24, "--text-depth", 2, "--text-heads", 6]
SCENES = ["--dataset", "scenes", "--val-split", "", "--epochs", 1, "--max-steps", SMALL_STEPS, "--warmup-steps", 2]
MIXED = [*IMAGES, *SMALL, "--drop-path", 0.2, "--mixup", 0.8]
TAUGHT = [*MIXED, "--kd-model-name", "local-dir:{teacher}"]
DINO = [
    *("--task", "dino", *IMAGES, *SMALL, "--drop-path", 0.1, "--initial-checkpoint", "{images}/small.safetensors"),
    *("--local-crops-size", 8, "--local-crops-number", 2, "--prototypes", 48, "--head-hidden-dim", 96),
    *("--head-bottleneck-dim", 12, "--weight-decay-end", 0.2, "--warmup-teacher-temp-epochs", 1, "--eval-knn", 5),
]


def of_kind(kind, *words, **more):
    """A row of a kind of block."""
    name, kwargs = tp_models.KINDS[kind]
    kwargs = {"patch_size": 4, **tp_models.WIDTH, **kwargs, **more}
    weights = ("--initial-checkpoint", f"{{images}}/{kind}.safetensors")
    return Row([*MIXED, "--model", name, *oracle.kwargs_words(kwargs), *weights, *words], is_kind=True)


KINDS = ["differential, norms", "parallel scaling, bias", "Eva, fused qkv, RoPE", "Eva, q and v biases"]
KINDS += ["norms over features", "learned rotary frequencies"]
FREEZE = ("--freeze", "patch_embed", "cls_token", "pos_embed")
ROWS = {
    "plain": Row(["--data-dir", "{plain}", *oracle.PLAIN, "--max-steps", STEPS], layers=8),
    "random": Row(
        [
            *(*IMAGES, "--aa", "rand-m9-mstd0.5-inc1", "--mixup", 0.8, "--cutmix", 1.0, "--reprob", 0.5),
            *("--smoothing", 0.1, "--drop", 0.1, "--drop-path", 0.3),
        ],
        layers=8,
    ),
    "mae": Row(
        [
            *("--task", "mae", *IMAGES, *SMALL, "--drop-path", 0.1, "--norm-pix-loss"),
            *("--decoder-dim", 24, "--decoder-depth", 2, "--decoder-heads", 6),
        ],
        "classes",
        7,
    ),
    "clip": Row(["--task", "clip", *TEXT, "--embed-dim", 16], "classes", 8),
    "siglip": Row(["--task", "siglip", *TEXT, "--embed-dim", 16], "classes", 8),
    "dino": Row([*DINO, "--centering", "ema"], "pp classes"),
    "dino, sinkhorn": Row([*DINO, "--centering", "sinkhorn"], "pp classes"),
    "segmentation": Row(["--task", "segmentation", *SCENES, *SMALL, "--seg-head", "conv"], "classes"),
    "distillation": Row([*TAUGHT, "--kd-temperature", 3.0, "--task-loss-weight", 0.3], "pp"),
    "distillation, features": Row([*TAUGHT, "--kd-distill-type", "feature"], "pp"),
    "distillation, token": Row(
        [*TAUGHT, "--kd-distill-type", "token", "--model", "deit_tiny_distilled_patch16_224"], "pp"
    ),
    "bridgetower": Row(
        ["--task", "bridgetower", "--model", "local-dir:{tower}", "--pretrained", *PAIRS], "pp tp classes recompute"
    ),
    "two towers": Row(["--task", "seam_tasks:TwoTowers", *MIXED, "--mixup", 0], "classes", 7),
    "teacher": Row(["--task", "seam_tasks:WithTeacher", *MIXED, "--mixup", 0], "pp classes"),
    "state": Row(["--task", "seam_tasks:WithState", *MIXED, "--mixup", 0], "pp classes"),
    "differential": of_kind("differential, norms"),
    "parallel scaling": of_kind("parallel scaling, bias"),
    "rotary tables": of_kind("Eva, fused qkv, RoPE", patch_drop_rate=0.25),
    "q and v biases": of_kind("Eva, q and v biases"),
    "norms over features": of_kind("norms over features"),
    "frequencies": of_kind("learned rotary frequencies"),
    "frozen frequencies": of_kind("learned rotary frequencies", "--freeze", "rope"),
    "frequencies only": of_kind("learned rotary frequencies", *FREEZE),
    "binary cross-entropy": Row([*MIXED, "--bce-loss", "--bce-sum"], is_kind=True),
    "frozen blocks": Row([*MIXED, *FREEZE, "blocks.0"], "pp", is_kind=True),
    "linear probe": Row([*MIXED, "--linear-probe"], "pp", is_kind=True),
    "locked tower": Row(
        ["--task", "clip", *TEXT, "--embed-dim", 16, "--lock-image", "--lock-image-unlocked-groups", 1],
        "classes pp3 pp4 apart",
        8,
        is_kind=True,
    ),
}
FACTORS = {
    "row": list(ROWS),
    "layout": list(LAYOUTS),
    "stage": [0, 1, 2, 3],
    "zero": list(ZERO),
    "recompute": ["", "2", "full", "selective"],
    "accumulation": [1, 3, 6],
    "optimizer": list(OPTIMIZERS),
    "then": list(THEN),
}
ONE_RANK = {**dict.fromkeys(FACTORS, ""), "layout": "1 rank", "stage": 1, "accumulation": 1, "optimizer": "sgd"}


def legal(case):
    """Whether a combination can run and says something."""
    pp, dp, _, _ = LAYOUTS[case["layout"]]
    uses = f"{case['layout']} {case['then']} {'recompute' if case['recompute'] else ''}"
    return (
        GLOBAL_BATCH % (dp * case["accumulation"]) == 0
        and not any(word in uses for word in ROWS[case["row"]].cannot.split())
        and (case["optimizer"] == "sgd" or case["row"] in ("plain", "random"))
        and (case["stage"] < 2 or pp == 1)  # pipeline stages need whole gradients
        and (case["stage"] == 3 or "persist" not in case["zero"])
        and (case["stage"] > 0 or not case["zero"])
        and (case["zero"] != "offloaded" or (pp == 1 and case["optimizer"] in ("adamw", "lamb")))
    )


def drawn(seed, count):
    """So many legal combinations; "plain" and "random", which have more choices, as often as all other rows."""
    draw, cases = random.Random(seed), {}
    while len(cases) < count:
        row = draw.choice(["plain", "random", *draw.choices(FACTORS["row"], k=2)])
        while not legal(case := {factor: draw.choice(choices) for factor, choices in FACTORS.items()} | {"row": row}):
            pass
        cases[name(case)] = case
    return [*cases.values()]


def features(case):
    """What a combination covers: its layout, each pair of choices of how to train, and each of these for its row."""
    pp, dp, tp, flag = LAYOUTS[case["layout"]]
    how = {factor: case[factor] for factor in ("stage", "zero", "recompute", "accumulation", "then")}
    found = pairs({"pp": pp, "dp": dp, "tp": tp, "flag": flag, **how}) | {case["layout"]}
    sharded = dp * tp > 1  # on one rank ZeRO has nothing to share
    own = {"pp": pp > 1, "tp": tp > 1, "stage 3": sharded and case["stage"] == 3}
    if not ROWS[case["row"]].is_kind:
        own |= {"dp": dp > 1, "stage 0": case["stage"] == 0, "stage 1 or 2": sharded and 0 < case["stage"] < 3}
        own |= {"stage 3, several": own["stage 3"] and case["accumulation"] > 1 and case["zero"] == "none persists"}
        own |= {"several": case["accumulation"] > 1, "recompute": bool(case["recompute"]), "then": bool(case["then"])}
    own |= {"zero": case["zero"]} if case["row"] in ("plain", "random") else {}
    return found | {(of, *one) for of in (case["row"], case["optimizer"]) for one in own.items() if one[1]}


@functools.cache  # asked for in each process of pytest
def selection():
    """Combinations in which every layout and every legal pair of choices occurs."""

    def seconds(case):  # fitted to the durations of a whole run on two cores
        pp, dp, tp, _ = LAYOUTS[case["layout"]]
        of_row = {"plain": 0.4, "random": 1.8}.get(case["row"], 2.8 if "dino" in case["row"] else 1.3)
        resumed_on = THEN[case["then"]][0] if case["then"] else 0
        return pp * dp * tp * (of_row + (case["stage"] == 3) + 0.2 * case["accumulation"]) + 1.7 * resumed_on

    return cover(drawn(0, 6000), seconds, features)


def name(case):
    """A test's id."""
    zero = f"ZeRO-{case['stage']} {case['zero']}".strip()
    row = case["row"] if case["row"] not in ("plain", "random") else f"{case['row']} {case['optimizer']}"
    then = [f"then {case['then']}"] if case["then"] else []
    return ", ".join([row, case["layout"], zero, case["recompute"] or "keep", f"x{case['accumulation']}", *then])


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        option = metafunc.config.getoption
        draws = option("--exhaustive") and drawn(option("--layout-seed"), option("--layout-count"))
        metafunc.parametrize("case", [pytest.param(case, id=name(case)) for case in draws or selection()])


@pytest.fixture(scope="module")
def folders(tmp_path_factory, real_images):
    """CIFAR-10 with random initial weights, a teacher and a BridgeTower, by the names that rows use."""
    made = {key: tmp_path_factory.mktemp(key) for key in ("plain", "images", "teacher", "tower")}
    for key, train_images in (("plain", GLOBAL_BATCH), ("images", 103)):
        oracle.cifar_with_weights(real_images, made[key], train_images, **KWARGS)
    oracle.cifar_folder(real_images / "cifar10" / "test.tar", made["images"], 53, "val")
    small = {"img_size": 16, "spread": 0.2}
    oracle.write_weights(made["images"] / "small.safetensors", num_classes=0, **small, **SMALL_KWARGS)
    for kind in KINDS:
        name, kwargs = tp_models.KINDS[kind]
        path = made["images"] / f"{kind}.safetensors"
        oracle.write_weights(path, num_classes=10, name=name, **small, **{"patch_size": 4, **tp_models.WIDTH, **kwargs})
    torch.manual_seed(0)
    teacher = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 6, "proj_drop_rate": 0.3}
    model = timm.create_model(oracle.MODEL, num_classes=10, **teacher)
    torch.nn.init.normal_(model.head.weight, std=0.7)
    save_for_hf(model, made["teacher"], safe_serialization=True, model_args=teacher)
    write_folder(made["tower"], dropout=0.2)
    return made


def train_on_rank(argv, breakage=None):
    """On a rank: the exit code of a run; `breakage` names one of `BREAKAGES`."""
    from ds_vit.train import main

    with checkpoints_in_time(), BREAKAGES[breakage][1]() if breakage else contextlib.nullcontext():
        return main([str(word) for word in argv])


def resume_on_rank(argv, breakage=None):
    """As above; the memory is predicted where the run begins."""
    with unpredicted():
        return train_on_rank(argv, breakage)


def train(ranks, folders, case, output, *words, params=None, blocks=None, breakage=None):
    """A combination's rows and the tensors of all files that it writes, by file and name."""
    pp, dp, tp, flag = LAYOUTS[case["layout"]]
    kind, own_params, *_ = OPTIMIZERS[case["optimizer"]]
    row, is_small = ROWS[case["row"]], case["row"] not in ("plain", "random")
    block = oracle.BLOCKS[kind]
    optimizer = {**block["params"], **own_params, **({"lr": 0.1} if is_small else {}), **(params or {})}
    blocks = {"optimizer": {**block, "params": optimizer}, "gradient_clipping": oracle.CLIP, **(blocks or {})}
    argv = ["--deepspeed_config", write_config(output.with_name(f"{output.name}.json"), case["stage"], **blocks)]
    if not is_small:
        argv += ["--model", oracle.MODEL, "--img-size", oracle.IMG_SIZE, "--initial-checkpoint"]
        argv += [folders["plain"] / "weights.safetensors", "--model-ema", "--model-ema-decay", oracle.EMA_DECAY]
        argv += oracle.kwargs_words(KWARGS if case["row"] == "plain" else KWARGS | DROPS)
    argv += [str(word).format(**folders) for word in row.words]
    zero = ZERO[case["zero"]] | ({"offload_param": {"device": "cpu"}} if offloads_parameters(case) else {})
    argv += ["--set", *(f"zero_optimization.{key}={json.dumps(value)}" for key, value in zero.items())] if zero else []
    argv += ["--layer-decay", oracle.LAYER_DECAY] if kind == "layer decay" else []
    argv += ["--pp", pp, "--tp", tp, "--workers", 2 if case["row"] == "random" and case["accumulation"] == 3 else 0]
    argv += {
        "--pp-partition": [
            flag,
            f"0,1,{row.layers - 2},{row.layers}" if pp > 2 else f"0,{row.layers - 1},{row.layers}",
        ],
        "--class-parallel": [flag, "on"],
    }.get(flag, [flag] if flag else [])
    pieces = case["accumulation"]
    argv += ["-b", GLOBAL_BATCH // dp // pieces, "--grad-accum-steps", pieces, "--log-interval", 1]
    argv += ["--grad-checkpointing", case["recompute"]] if case["recompute"] else []
    argv += ["--check-replicas", 1] if dp * tp > 1 and case["stage"] < 3 else []
    argv += ["--output", output, "--checkpoint-interval", STOP if case["then"] else 0, *words]
    argv += ["--max-steps", STOP] if case["then"] else []
    run(ranks, pp * dp * tp, argv, None if case["then"] else breakage)
    if case["then"]:
        resume(ranks, output, case, breakage)
    files = [path for path in output.glob("*.safetensors") if not path.name.startswith("best")]
    tensors = {f"{path.stem}: {key}": value for path in files for key, value in load_file(str(path)).items()}
    return read_rows(output), tensors


def offloads_parameters(case):
    """Stage 3 with AdamW offloads parameters too."""
    return case["zero"] == "offloaded" and (case["stage"], case["optimizer"]) == (3, "adamw")


def run(ranks, world, argv, breakage=None, main=train_on_rank):
    """Run a command line."""
    assert ranks.run(world, main, argv, breakage, timeout=400.0) == [0] * world, " ".join(map(str, argv))


def resume(ranks, output, case, breakage):
    """Train the rest by the run's own recipe, in another layout that offloads nothing."""
    world, stage, pp, tp = THEN[case["then"]]
    data = json.loads((output.parent / f"{output.name}.json").read_text())
    path = output.parent / f"{output.name}-then.json"
    path.write_text(json.dumps(data | {"zero_optimization": {"stage": stage}}))
    argv = ["--recipe", output / "config.yaml", "--resume", "auto", "--output", output, "--deepspeed_config", path]
    argv += ["--pp", pp, "--tp", tp, *(["--no-sequence-parallel"] if tp == 1 else []), "--check-replicas", 0]
    argv += ["--max-steps", STEPS if case["row"] == "plain" else SMALL_STEPS]
    run(ranks, world, argv, breakage, resume_on_rank)


@pytest.fixture(scope="module")
def reference(ranks, folders, tmp_path_factory):
    """Of a row and an optimizer: the plain loop, or one rank that takes the whole batch at once."""

    @functools.cache
    def get(row, optimizer):
        kind, params, *_ = OPTIMIZERS[optimizer]
        if row == "plain":
            curve = plainly(folders, kind, **params)
        else:
            case = {**ONE_RANK, "row": row, "optimizer": optimizer}
            curve = train(ranks, folders, case, tmp_path_factory.mktemp("reference") / "run")
        # A reference that stands still, or whose clipping does nothing, would let a wrong factor through.
        rows = train_rows(curve[0])
        assert min(row["grad_norm"] for row in rows) > 2 * oracle.CLIP
        assert len({row["loss"] for row in rows}) == len(rows)
        return curve

    return get


def plainly(folders, kind, steps=STEPS, **how):
    """The plain loop's rows and tensors, as `train` gives them."""
    rows, weights, ema = oracle.train_plainly(folders["plain"], kind, steps=steps, model_kwargs=KWARGS, **how)
    files = {"model": weights, "ema": ema}
    return rows, {f"{file}: {key}": value for file, of in files.items() for key, value in of.items()}


def assert_same(expected, found, optimizer, rtol=RTOL):
    """Curve, evaluation and every tensor that is written."""
    *_, norm_rtol, weight_rtol = OPTIMIZERS[optimizer]
    assert_same_curve(expected[0], found[0], rtol=rtol, keys=("loss",))
    assert_same_curve(expected[0], found[0], rtol=norm_rtol, keys=("grad_norm",))
    evaluated = evals(found[0])  # an interrupted run was evaluated before it stopped, too
    for which, row in evals(expected[0]).items():
        assert evaluated.get(which) == pytest.approx(row, rel=10 * rtol), f"the evaluation parts: {which}"
    part, tensor = oracle.furthest(found[1], expected[1])
    assert part <= weight_rtol, f"the weights part: {tensor} by {part:.2e} of its norm"


def evals(rows):
    """What evaluation found, of the average too, by kind and step."""
    texts = ("kind", "wall_seconds", "epoch")
    found = ((row["kind"], row["step"], {k: v for k, v in row.items() if k not in texts}) for row in rows)
    return {(kind, step): figures for kind, step, figures in found if kind.startswith("eval")}


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(48)
def test_same_curve(ranks, folders, reference, case, tmp_path):
    """A wrong average, norm, clip, decay, order, cast, draw, trust ratio, slice or state in any of these layouts.

    A loss over the samples of one rank or micro-batch; a teacher or a task's state that lags or is not in a checkpoint.
    """
    found = train(ranks, folders, case, tmp_path / "run")
    assert_same(reference(case["row"], case["optimizer"]), found, case["optimizer"])


def test_the_selection_covers_every_pair():
    """A choice, or a pair of choices, that no test runs."""
    assert set().union(*map(features, selection())) >= set().union(*map(features, drawn(1, 12000)))
    assert len(selection()) < 100


# A layout, an optimizer of `oracle.BLOCKS`, its arguments, --layer-decay. Two ranks show an argument read wrong.
OPTIONS = [
    ("dp2", "lamb", {"trust_clip": True, "always_adapt": True, "lr": 0.05}, None),
    ("dp2", "lamb", {"decoupled_decay": True, "bias_correction": False}, None),
    ("tp2", "lamb", {"decoupled_decay": True, "betas": [0.8, 0.95], "grad_averaging": False}, 0.7),
    ("dp2", "lars", {"nesterov": True}, None),
    ("dp2", "lars", {"momentum": 0.0, "always_adapt": True}, None),
    ("tp2", "lars", {"trust_clip": True, "trust_coeff": 2.0, "lr": 0.1, "dampening": 0.3}, 0.7),
    ("tp2", "sgd", {"nesterov": True}, 0.7),
    ("tp2", "muon", {"nesterov": True, "momentum": 0.8}, 0.7),
    ("tp2", "muon", {"conv_mode": "batched", "adjust_lr_fn": "original", "fallback_lr_scale": 0.1}, None),
    ("tp2", "muon", {"fallback_list": ["head.*", "blocks.1.*"], "betas": [0.8, 0.9], "scale_eps": True}, None),
    (
        "tp2",
        "muon",
        {"ns_coefficients": "polar_express", "ns_steps": 3, "safety_factor": 1.01, "adjust_lr_fn": None},
        0.7,
    ),
    # Pipeline stages with different groups: decayed weights that AdamW updates are on the second stage only; in the
    # second row it has no momentum of Muon's.
    ("pp2 dp2", "muon", {"fallback_list": ["head.*", "blocks.[45].*"], "fallback_lr_scale": 0.1}, None),
    ("pp2 dp2", "muon", {"fallback_list": ["head.*", "blocks.[345].*"], "fallback_lr_scale": 0.1}, None),
]


@pytest.mark.one_in(2)
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("layout", "optimizer", "params", "layer_decay"), OPTIONS, ids=str)
def test_options_equal_timm(ranks, folders, layout, optimizer, params, layer_decay, tmp_path):
    """An argument that is read otherwise than timm reads it; stages that wait for each other in a group's norm."""
    expected = plainly(folders, optimizer, layer_decay=layer_decay, **params)
    words = ["--layer-decay", layer_decay] if layer_decay else []
    words += ["--pp-partition", "0,4,8", "--checkpoint-interval", 2] if layout == "pp2 dp2" else []
    case = {**ONE_RANK, "layout": layout, "accumulation": 3, "optimizer": optimizer, "row": "plain"}
    given = {**oracle.BLOCKS[optimizer]["params"], **params}
    found = train(ranks, folders, case, tmp_path / "run", *words, params=given)
    assert_same(expected, found, "lamb")
    if layout == "pp2 dp2":  # what one stage has is written too
        files = sorted(path.stem for path in (tmp_path / "run" / "checkpoints" / "step-00000002").glob("optimizer-*"))
        assert files == ["optimizer-exp_avg", "optimizer-exp_avg_sq", "optimizer-momentum_buffer"]


@pytest.mark.slow
def test_offloaded_stages_with_other_groups(ranks, folders, tmp_path):
    """A norm that waits for a group that a stage lacks, or counts one twice: the first stage decays nothing."""
    frozen = ("--freeze", "patch_embed.proj.weight", "blocks.[012].*.weight", "cls_token", "pos_embed")
    case = {**ONE_RANK, "row": "plain", "optimizer": "adamw", "accumulation": 3}
    expected = train(ranks, folders, case, tmp_path / "one", *frozen)
    found = train(ranks, folders, case | {"layout": "pp2", "zero": "offloaded"}, tmp_path / "two", *frozen)
    assert_same(expected, found, "adamw")


@pytest.mark.slow
def test_bf16_iterations_stay_near(ranks, folders, reference, tmp_path):
    """An ns_dtype without effect; more than the rounding of bf16, which the iteration makes larger."""
    params = {"ns_dtype": "bfloat16"}
    expected, _ = plainly(folders, "muon", **params)
    case = {**ONE_RANK, "layout": "tp2 dp2", "optimizer": "muon", "row": "plain"}
    found, _ = train(ranks, folders, case, tmp_path / "run", params=params)
    assert_same_curve(expected, found, rtol=5e-3, keys=("loss",))
    # In the second step the iteration in fp32 is 1.3e-4 away.
    assert_same_curve(expected[:2], found[:2], rtol=5e-5, keys=("loss",))
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(reference("plain", "muon")[0][:2], found[:2], rtol=5e-5, keys=("loss",))


def test_digits_equal_plain_timm(ranks, folders, tmp_path):
    """The embedded data set's pixels, labels and order."""
    source = open_source("digits", None, "train")
    order = SampleOrder(len(source), GLOBAL_BATCH, seed=42)

    def batch(step):
        indices, _ = order.rows(step, range(GLOBAL_BATCH))
        images = [source.image(int(i)).resize((32, 32), Image.Resampling.BICUBIC) for i in indices]
        pixels = torch.stack([normalize(to_tensor(image), [0.5] * 3, [0.5] * 3) for image in images])
        return pixels, torch.tensor([source.target(int(i)) for i in indices])

    weights = folders["plain"] / "weights.safetensors"
    lr = {"lr": oracle.SGD_LR}
    rows, *_ = oracle.train_on([batch(step) for step in range(STEPS)], weights, "sgd", model_kwargs=KWARGS, **lr)
    case = {**ONE_RANK, "layout": "dp2", "stage": 2, "accumulation": 3, "optimizer": "sgd", "row": "plain"}
    found, _ = train(ranks, folders, case, tmp_path / "run", "--dataset", "digits", "--data-dir", "")
    assert_same_curve(rows, found, rtol=RTOL)


# ---- the comparison can fail -----------------------------------------------------------------------------------------


def flat_trust_ratio():
    """LAMB without the map: one trust ratio for everything that an optimizer sees (DeepSpeed #88)."""
    from ds_vit.optim.segmented import SegmentedTensors

    def flat_norms(self, *lists):
        norms = [torch.linalg.vector_norm(torch.cat([t.view(-1) for t in tensors])) for tensors in lists]
        return torch.stack(norms)[:, None].expand(-1, len(self.names))

    return mock.patch.object(SegmentedTensors, "norms", flat_norms)


def orthogonal_slices():
    """Muon where each tensor-parallel rank orthogonalizes its own shard."""
    from ds_vit.optim.muon import WholeMatrices

    def apply_(self, tensors, work):
        for segment in self._own:
            own = segment.of(tensors[self._number[segment.block]].view(-1))
            own.copy_(work(own.view(segment.tp_slice.local_shape)).reshape(-1))

    return mock.patch.object(WholeMatrices, "apply_", apply_)


def shards_counted_as_copies():
    """The norm counts the shards of one rank of a group only."""
    from ds_vit.engine.base import Engine
    from ds_vit.parallel.tensor.slices import Segment

    adapt = Engine._adapt_the_optimizer

    def adapt_with_copies(engine):
        with mock.patch.object(Segment, "replicated", True):
            adapt(engine)

    return mock.patch.object(Engine, "_adapt_the_optimizer", adapt_with_copies)


def loss_factor():
    """The loss is larger by a ten-thousandth."""
    from ds_vit.tasks.classification.task import Classification

    made = Classification.loss
    return mock.patch.object(Classification, "loss", lambda *args: lambda *batch: made(*args)(*batch) * 1.0001)


def own_samples_only():
    """A coupled loss is over the samples of one rank (transformers #41874)."""
    from ds_vit.engine.plain import PlainContext

    return mock.patch.object(PlainContext, "gather", lambda self, rows: rows)


def gather_without_gradient():
    """Rows of the other ranks have no gradient, as with torch's own `all_gather` (lightly #1528)."""
    import torch.distributed as dist

    from ds_vit.parallel import groups

    def own_part(ctx, gradient):
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None

    return mock.patch.object(groups._GatherRows, "backward", staticmethod(own_part))


def samples_by_rank():
    """The last rank trains on its neighbour's samples."""
    import torch.distributed as dist

    rows = SampleOrder.rows

    def shifted(self, step, asked):
        return rows(self, step, [(row + dist.get_rank()) % self.global_batch for row in asked])

    return mock.patch.object(SampleOrder, "rows", shifted)


def draws_by_rank():
    """Drop-path depends on the rank."""
    import torch.distributed as dist

    from ds_vit import randomness

    mix = randomness.mix_tensor
    return mock.patch.object(randomness, "mix_tensor", lambda keys, value: mix(keys + dist.get_rank(), value))


def draws_anew_when_recomputed():
    """Drop-path is another where activations are recomputed."""
    from ds_vit.models.sequential import BlockRun

    forward = BlockRun.forward

    def second_otherwise(run, *inputs):
        *inputs, bits = inputs
        again, run.__dict__["has_run"] = run.__dict__.get("has_run", False), True
        return forward(run, *inputs, ~bits if again else bits)

    return mock.patch.object(BlockRun, "forward", second_otherwise)


def momentum_lost():
    """A resumed run begins with a momentum of zero."""
    from ds_vit.checkpoint import load

    return mock.patch.object(load, "_state", lambda zero_map, shard, key: torch.zeros_like(shard.parameter))


def state_not_restored():
    """A resumed run begins with the task's initial state."""
    from seam_tasks import WithState

    return mock.patch.object(WithState, "load_state_dict")


def teacher_before_the_step():
    """The teacher moves towards the weights of the step before."""
    from ds_vit.engine.plain import PlainContext
    from ds_vit.tasks.dino.task import SelfDistillation

    step = SelfDistillation.step

    def update_first(task, context, *args):
        PlainContext.update_teachers(context, context.schedules["teacher_momentum"])
        return step(task, context, *args)

    return mock.patch.object(SelfDistillation, "step", update_first)


def image_counted_twice():
    """Evaluation counts an image too many."""
    from ds_vit.training.evaluation import Evaluation

    run = Evaluation.run

    def one_more(evaluation):
        figures = run(evaluation)
        return {**figures, "images": figures["images"] + 1}

    return mock.patch.object(Evaluation, "run", one_more)


# What is broken: (how the combination differs from a plain one of one rank, where, what `train` is given).
BREAKAGES = {
    "clipping off by 0.1 %": ({}, None, {"blocks": {"gradient_clipping": 1.001 * oracle.CLIP}}),
    "weight decay off by 2 %": ({}, None, {"params": {"weight_decay": 1.02 * oracle.WEIGHT_DECAY}}),
    "nesterov": ({}, None, {"params": {"nesterov": True}}),
    "a factor of 1.0001": ({"row": "random"}, loss_factor, {}),
    "a flat trust ratio": ({"optimizer": "lamb"}, flat_trust_ratio, {}),
    "a flat trust ratio in ZeRO-0": ({"optimizer": "lamb", "stage": 0}, flat_trust_ratio, {}),
    "orthogonal slices": ({"optimizer": "muon", "layout": "tp2"}, orthogonal_slices, {}),
    "a dropped shard": ({"layout": "tp2"}, shards_counted_as_copies, {}),
    "a dropped shard in ZeRO-3": ({"layout": "tp2", "stage": 3}, shards_counted_as_copies, {}),
    "a mean per rank": ({"row": "two towers", "layout": "dp2"}, own_samples_only, {}),
    "a gradient per rank": ({"row": "siglip", "layout": "dp2"}, gather_without_gradient, {}),
    "another order": ({"row": "random", "layout": "dp2"}, samples_by_rank, {}),
    "draws by rank": ({"row": "random", "layout": "dp2"}, draws_by_rank, {}),
    "draws anew": ({"row": "random", "recompute": "full"}, draws_anew_when_recomputed, {}),
    "a lost momentum": ({"then": "dp2 ZeRO-3"}, momentum_lost, {}),
    "a lost state": ({"row": "state", "then": "dp2 ZeRO-3"}, state_not_restored, {}),
    "a teacher that lags": ({"row": "dino"}, teacher_before_the_step, {}),
    "an image counted twice": ({"row": "random"}, image_counted_twice, {}),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_broken_is_seen(ranks, folders, reference, breakage, tmp_path):
    """A comparison that passes although the arithmetic is wrong by little."""
    changes, program, settings = BREAKAGES[breakage]
    case = ONE_RANK | {"row": "plain"} | changes
    found = train(ranks, folders, case, tmp_path / "run", **settings, breakage=breakage if program else None)
    with pytest.raises(AssertionError, match=r"the curves part|the weights part|the evaluation parts"):
        assert_same(reference(case["row"], case["optimizer"]), found, case["optimizer"])


OFF = ["--seed 43", "--drop-path 0", "--mixup 0", "--cutmix 0", "--reprob 0", "--aa none", "--scale 1 1"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("off", OFF)
def test_every_random_part_is_felt(ranks, folders, reference, off, tmp_path):
    """A switch without effect, with which the matrix would prove less than it says."""
    case = {**ONE_RANK, "optimizer": "sgd", "row": "random"}
    found, _ = train(ranks, folders, case, tmp_path / "run", *off.split(), "--max-steps", 2)
    expected = [row for row in reference("random", "sgd")[0] if row["step"] <= 2]
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(expected, found, rtol=1e-4)
