"""The layout matrix: pipeline, data and tensor parallelism, ZeRO, recomputation, accumulation, optimizers, precision
and a resume in another layout leave the curve and the weights alone.

"plain" runs are compared with a loop of timm and torch in one process (tests/support/oracle.py), "random" ones, with
all augmentation, mixing and drop-path, with one rank of ours. A selection in which every pair of choices occurs
always runs; `pytest --exhaustive` runs the full product.
"""

import functools
import itertools
import json

import oracle
import pytest
import torch
from curves import assert_same_curve, evals, largest_deviation, read_rows, train_in, train_rows
from oracle import Curve
from pairwise import cover, pairs
from PIL import Image
from runs import run_quietly
from safetensors.torch import load_file
from torchvision.transforms.functional import normalize, to_tensor

from ds_vit.data.sampler import SampleOrder
from ds_vit.data.sources.datasets import open_source

# A wrong factor shows in the first step or, in the optimizer's state, in the second or third.
GLOBAL_BATCH, STEPS = 24, 4
RTOL = 1e-5
# 8 layers and 6 heads: split by 2, 3 and 4 stages and by 2 and 3 tensor-parallel ranks.
KWARGS = {"patch_size": 8, "embed_dim": 48, "depth": 6, "num_heads": 6}
# name: (pp, dp, tp, further flags)
LAYOUTS = {
    "1 rank": (1, 1, 1, ()),
    "dp2": (1, 2, 1, ()),
    "dp4": (1, 4, 1, ()),
    "pp2": (2, 1, 1, ()),
    "pp4": (4, 1, 1, ()),
    "pp2 dp2": (2, 2, 1, ()),
    "pp3 uneven": (3, 1, 1, ("--pp-partition", "0,2,6,8")),
    "tp2": (1, 1, 2, ()),
    "tp3": (1, 1, 3, ()),
    "tp2 dp2": (1, 2, 2, ()),
    "pp2 tp2": (2, 1, 2, ()),
    "tp2 sequence": (1, 1, 2, ("--sequence-parallel",)),
    "pp2 tp2 sequence": (2, 1, 2, ("--sequence-parallel",)),
    "tp3 classes": (1, 1, 3, ("--class-parallel", "on")),
    "pp2 dp2 tp2": (2, 2, 2, ()),
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
FACTORS = {
    "layout": list(LAYOUTS),
    "stage": [0, 1, 2, 3],
    "recompute": ["", "2", "full", "selective"],
    "accumulation": [1, 3, 6],
    "optimizer": list(OPTIMIZERS),
    "run": ["plain", "random"],
    "precision": ["fp32", "bf16"],
    "then": ["", "dp2 ZeRO-3", "pp2 tp2 ZeRO-1"],
}
# Where an interrupted run is resumed: ranks, ZeRO stage, flags.
THEN = {
    "dp2 ZeRO-3": (2, 3, ["--pp", 1, "--tp", 1]),
    "pp2 tp2 ZeRO-1": (4, 1, ["--pp", 2, "--tp", 2]),
}
# 103 training and 53 validation images, which a global batch of 24 does not divide; an epoch is four steps.
RANDOM = [
    *("--aa", "rand-m9-mstd0.5-inc1", "--mixup", 0.8, "--cutmix", 1.0, "--reprob", 0.5, "--smoothing", 0.1),
    *("--drop", 0.1, "--drop-path", 0.3, "--epochs", 2, "--max-steps", 6, "--warmup-steps", 2),
]
DROPS = {"proj_drop_rate": 0.1, "pos_drop_rate": 0.1}


def legal(case):
    """Whether a combination can run and says something."""
    pp, dp, _, _ = LAYOUTS[case["layout"]]
    if case["stage"] > 1 and pp > 1:  # pipeline stages need whole gradients
        return False
    if case["precision"] == "bf16":  # compared with fp32, and in the loss only
        return (
            case["optimizer"] == "adamw" and case["run"] == "plain" and not case["then"] and (pp == 1 or case["stage"])
        )
    return GLOBAL_BATCH % (dp * case["accumulation"]) == 0


def full_product():
    """Every legal combination."""
    cases = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [case for case in cases if legal(case)]


def features(case):
    """What a combination covers: pairs of choices, degrees and flags apart, and its layout."""
    pp, dp, tp, words = LAYOUTS[case["layout"]]
    rest = {factor: choice for factor, choice in case.items() if factor != "layout"}
    return pairs({"pp": pp, "dp": dp, "tp": tp, "flags": words[:1], **rest}) | {case["layout"]}


@functools.cache  # asked for in each process of pytest
def selection():
    """Combinations in which every layout and every legal pair of choices occurs."""

    def seconds(case):
        pp, dp, tp, _ = LAYOUTS[case["layout"]]
        pass_ = 0.04 * (2 if tp > 1 else 1) * (2.5 if case["stage"] == 3 else 1) * (1.5 if case["recompute"] else 1)
        return pp * dp * tp * (0.6 + STEPS * pass_ * case["accumulation"]) * (2 if case["then"] else 1)

    return cover(full_product()[::7], seconds, features)  # a seventh has all pairs


def name(case):
    """A test's id."""
    stage, recompute, rest = f"ZeRO-{case['stage']}", case["recompute"] or "keep", (case["run"], case["precision"])
    then = [f"then {case['then']}"] if case["then"] else []
    return ", ".join([case["layout"], stage, recompute, f"x{case['accumulation']}", case["optimizer"], *rest, *then])


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = full_product() if metafunc.config.getoption("--exhaustive") else selection()
        metafunc.parametrize("case", [pytest.param(case, id=name(case)) for case in cases])


@pytest.fixture(scope="module")
def folders(tmp_path_factory, real_images):
    """CIFAR-10 and random initial weights, by kind of run."""
    made = {}
    for run, train_images in (("plain", GLOBAL_BATCH), ("random", 103)):
        made[run] = tmp_path_factory.mktemp(run)
        oracle.cifar_folder(real_images / "cifar10" / "train.tar", made[run], train_images, "train")
        oracle.write_weights(made[run] / "weights.safetensors", num_classes=10, **KWARGS)
    oracle.cifar_folder(real_images / "cifar10" / "test.tar", made["random"], 53, "val")
    return made


def precision_blocks(case):
    """The JSON's blocks for bf16 at a ZeRO stage."""
    if case["precision"] == "fp32":
        return {}
    if case["stage"] == 0:
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if case["stage"] == 1 else {}
    return {"bf16": {"enabled": True}, **sums}


def train(ranks, folders, case, output, *words, params=None, blocks=None):
    """A combination's rows, final weights and moving average."""
    pp, dp, tp, flags = LAYOUTS[case["layout"]]
    kind, own_params, *_ = OPTIMIZERS[case["optimizer"]]
    pieces = case["accumulation"]
    asked = ["--max-steps", STEPS] if case["run"] == "plain" else []
    asked += ["--workers", 2 if case["run"] == "random" and pieces == 3 else 0]
    asked += [*flags, "-b", GLOBAL_BATCH // dp // pieces, "--grad-accum-steps", pieces]
    asked += ["--grad-checkpointing", case["recompute"]] if case["recompute"] else []
    asked += ["--check-replicas", 1] if dp * tp > 1 and case["stage"] < 3 else []
    asked += [*words, *(["--max-steps", 3, "--checkpoint-interval", 3] if case["then"] else [])]
    argv = oracle.command(
        *(folders[case["run"]], kind, (pp, dp, tp, case["stage"]), output, *asked),
        recipe=oracle.PLAIN if case["run"] == "plain" else RANDOM,
        params={**own_params, **(params or {})},
        blocks={**precision_blocks(case), **(blocks or {})},
        model_kwargs=KWARGS if case["run"] == "plain" else KWARGS | DROPS,
    )
    rows = train_in(ranks, pp * dp * tp, argv)
    if case["then"]:
        rows = resume(ranks, output, case)
    return Curve(rows, *(load_file(str(output / f"{what}.safetensors")) for what in ("model", "ema")))


def resume(ranks, output, case):
    """Train the rest by the run's own recipe, in another layout."""
    world, stage, flags = THEN[case["then"]]
    data = json.loads((output.parent / f"{output.name}.json").read_text())
    path = output.parent / f"{output.name}-then.json"
    path.write_text(json.dumps(data | {"zero_optimization": {"stage": stage}}))
    steps = STEPS if case["run"] == "plain" else 6
    argv = ["--recipe", output / "config.yaml", "--resume", "auto", "--output", output, "--deepspeed_config", path]
    off = ["--no-sequence-parallel"] if "--tp" in flags and flags[flags.index("--tp") + 1] == 1 else []
    return train_in(ranks, world, [*argv, *flags, *off, "--check-replicas", 0, "--max-steps", steps])


ONE_RANK = {**dict.fromkeys(FACTORS, ""), "layout": "1 rank", "stage": 1, "accumulation": 1, "precision": "fp32"}


@pytest.fixture(scope="module")
def reference(ranks, folders, tmp_path_factory):
    """Of a kind of run and an optimizer: the plain loop, or one rank that takes the whole batch at once."""

    @functools.cache
    def get(run, optimizer):
        kind, params, *_ = OPTIMIZERS[optimizer]
        if run == "plain":
            return oracle.train_plainly(folders[run], kind, steps=STEPS, model_kwargs=KWARGS, **params)
        case = {**ONE_RANK, "run": run, "optimizer": optimizer}
        output = tmp_path_factory.mktemp(optimizer.replace(" ", "-")) / "run"
        return train(ranks, folders, case, output)

    return get


def assert_same(expected, found, optimizer, rtol=RTOL):
    """Curve, evaluation, weights and their average."""
    *_, norm_rtol, weight_rtol = OPTIMIZERS[optimizer]
    assert_same_curve(expected.rows, found.rows, rtol=rtol, keys=("loss",))
    assert_same_curve(expected.rows, found.rows, rtol=norm_rtol, keys=("grad_norm",))
    evaluated = [row["step"] for row in evals(expected.rows)]  # an interrupted run was, before it stopped, too
    rows = [row for row in found.rows if row["step"] in evaluated]
    assert evals(rows) == evals(expected.rows)
    losses = [[row["loss"] for row in run if row["kind"] == "eval"] for run in (expected.rows, rows)]
    assert losses[1] == pytest.approx(losses[0], rel=rtol)
    for a, b in zip(found[1:], expected[1:], strict=True):
        part, tensor = oracle.furthest(a, b)
        assert part <= weight_rtol, f"the weights part: {tensor} by {part:.2e} of its norm"


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
def test_same_curve(ranks, folders, reference, case, tmp_path):
    """A wrong average, norm, clip, decay, order, cast, draw, trust ratio, slice or state in any of these layouts."""
    found = train(ranks, folders, case, tmp_path / "run")
    expected = reference(case["run"], case["optimizer"])
    if case["precision"] == "fp32":
        assert_same(expected, found, case["optimizer"])
        return
    # A loss quantised to bf16, or norms summed in it, would leave this.
    assert_same_curve(expected.rows, found.rows, rtol=3e-3, keys=("loss",))
    assert largest_deviation(expected.rows, found.rows, "loss") > 1e-6, "it did run in bf16"


def test_the_selection_covers_every_pair():
    """A choice, or a pair of choices, that no test runs."""
    assert set().union(*map(features, selection())) == set().union(*map(features, full_product()))
    assert len(selection()) < 55


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_reference_moves_and_is_clipped(folders, reference, optimizer):
    """A reference that stands still, or whose clipping does nothing, would let a wrong factor through."""
    rows, weights, average = reference("plain", optimizer)
    assert min(row["grad_norm"] for row in rows) > 3 * oracle.CLIP
    assert abs(rows[-1]["loss"] / rows[0]["loss"] - 1) > 0.01
    begun = load_file(str(folders["plain"] / "weights.safetensors"))
    assert oracle.furthest(weights, begun)[0] > 0.005
    assert oracle.furthest(weights, average)[0] > 0.005


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
    expected = oracle.train_plainly(
        folders["plain"], optimizer, steps=STEPS, model_kwargs=KWARGS, layer_decay=layer_decay, **params
    )
    words = ["--layer-decay", layer_decay] if layer_decay else []
    words += ["--pp-partition", "0,4,8", "--checkpoint-interval", 2] if layout == "pp2 dp2" else []
    case = {**ONE_RANK, "layout": layout, "accumulation": 3, "optimizer": optimizer, "run": "plain"}
    given = {**oracle.BLOCKS[optimizer]["params"], **params}
    found = train(ranks, folders, case, tmp_path / "run", *words, params=given)
    assert_same(expected, found, "lamb")
    if layout == "pp2 dp2":  # what one stage has is written too
        files = sorted(path.stem for path in (tmp_path / "run" / "checkpoints" / "step-00000002").glob("optimizer-*"))
        assert files == ["optimizer-exp_avg", "optimizer-exp_avg_sq", "optimizer-momentum_buffer"]


OFFLOADED = [
    ("adamw", 1, "dp2 ZeRO-3"),
    ("adamw", 2, "pp2 tp2 ZeRO-1"),
    ("adamw", 3, "pp2 tp2 ZeRO-1"),
    ("lamb", 1, ""),
    ("lamb", 3, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "stage", "then"), OFFLOADED)
def test_offloaded(ranks, folders, reference, optimizer, stage, then, tmp_path):
    """An offloaded optimizer that does not know where parameters lie; offloaded parameters too at stage 3.

    A checkpoint without the offloaded state, by a resume in a layout that offloads nothing.
    """
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 100_000}
    zero |= {"offload_param": {"device": "cpu"}} if (optimizer, stage) == ("adamw", 3) else {}
    case = {**ONE_RANK, "layout": "dp2", "stage": stage, "optimizer": optimizer, "run": "plain", "then": then}
    found = train(ranks, folders, case, tmp_path / "run", blocks={"zero_optimization": zero})
    assert_same(reference("plain", optimizer), found, optimizer)


def test_bf16_iterations_stay_near(ranks, folders, reference, tmp_path):
    """An ns_dtype without effect; more than the rounding of bf16, which the iteration makes larger."""
    params = {"ns_dtype": "bfloat16"}
    expected = oracle.train_plainly(folders["plain"], "muon", steps=STEPS, model_kwargs=KWARGS, **params).rows
    case = {**ONE_RANK, "layout": "tp2 dp2", "optimizer": "muon", "run": "plain"}
    found = train(ranks, folders, case, tmp_path / "run", params=params).rows
    assert_same_curve(expected, found, rtol=5e-3, keys=("loss",))
    # In the second step the iteration in fp32 is 1.3e-4 away.
    assert_same_curve(expected[:2], found[:2], rtol=5e-5, keys=("loss",))
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(reference("plain", "muon").rows[:2], found[:2], rtol=5e-5, keys=("loss",))


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
    expected = oracle.train_on([batch(step) for step in range(STEPS)], weights, "sgd", model_kwargs=KWARGS, **lr)
    case = {**ONE_RANK, "layout": "dp2", "stage": 2, "accumulation": 3, "optimizer": "sgd", "run": "plain"}
    found = train(ranks, folders, case, tmp_path / "run", "--dataset", "digits")
    assert_same(expected, found, "sgd")


# ---- the recipe that a run writes ------------------------------------------------------------------------------------


def test_a_recipe_keeps_the_global_batch_and_says_where_values_come_from(ranks, folders, reference, tmp_path):
    """A recipe that fixes what belongs to the number of ranks; a number that looks like the JSON's and is a flag's."""
    case = {**ONE_RANK, "run": "plain", "optimizer": "sgd"}
    words = ["--set", f"optimizer.params.lr={oracle.SGD_LR}"]
    train(ranks, folders, case, tmp_path / "run", *words, "--max-steps", 1, params={"lr": 9.0})
    derived = json.loads((tmp_path / "run" / "deepspeed.derived.json").read_text())
    assert derived["train_micro_batch_size_per_gpu"] == "--batch-size"
    assert derived["optimizer.params.lr"] == "--set"
    recipe = ["--recipe", str(tmp_path / "run" / "config.yaml")]
    argv = [*recipe, "--output", str(tmp_path / "two"), "--max-steps", "2"]
    [(code, said, wrong), _] = ranks.run(2, run_quietly, argv)
    assert code == 0, wrong
    assert "24 = 2 ranks × 12 images × 1 micro-batch" in said
    assert_same_curve(reference("plain", "sgd").rows[:2], train_rows(read_rows(tmp_path / "two")), rtol=RTOL)
    written = json.loads((tmp_path / "two" / "deepspeed.json").read_text())
    assert (written["train_batch_size"], written["train_micro_batch_size_per_gpu"]) == (24, 12)
    [(code, _, wrong)] = ranks.run(1, run_quietly, [*recipe, "--pp", "2", "--tp", "2"])
    assert code == 2
    assert "start 4 ranks, or give --pp 1 --tp 1" in wrong


# ---- the comparison can fail -----------------------------------------------------------------------------------------


def train_naively(argv):
    """On a rank: LAMB without the map, one trust ratio for everything that an optimizer sees (DeepSpeed #88)."""
    from ds_vit.optim.segmented import SegmentedTensors
    from ds_vit.train import main

    def flat_norms(self, *lists):
        norms = [torch.linalg.vector_norm(torch.cat([t.view(-1) for t in tensors])) for tensors in lists]
        return torch.stack(norms)[:, None].expand(-1, len(self.names))

    SegmentedTensors.norms = flat_norms
    return main(argv)


def train_slices_apart(argv):
    """On a rank: Muon where each tensor-parallel rank orthogonalizes its own shard."""
    from ds_vit.optim.muon import WholeMatrices
    from ds_vit.train import main

    def apply_(self, tensors, work):
        for segment in self._own:
            own = segment.of(tensors[self._number[segment.block]].view(-1))
            own.copy_(work(own.view(segment.tp_slice.local_shape)).reshape(-1))

    WholeMatrices.apply_ = apply_
    return main(argv)


def train_counting_one_shard(argv):
    """On a rank: shards taken for copies, so that the norm counts those of one rank of a group only."""
    from unittest import mock

    from ds_vit.engine.base import Engine
    from ds_vit.parallel.tensor.slices import Segment
    from ds_vit.train import main

    adapt = Engine._adapt_the_optimizer

    def adapt_with_copies(engine):
        with mock.patch.object(Segment, "replicated", True):
            adapt(engine)

    with mock.patch.object(Engine, "_adapt_the_optimizer", adapt_with_copies):
        return main(argv)


# name: (what differs from one rank's plain SGD run, arguments of the optimizer, blocks of the JSON, a rank's program)
BREAKAGES = {
    "no clipping": ({}, {}, {"gradient_clipping": 0.0}, None),
    "clipping off by 0.1 %": ({}, {}, {"gradient_clipping": 1.001 * oracle.CLIP}, None),
    "weight decay off by 2 %": ({}, {"weight_decay": 1.02 * oracle.WEIGHT_DECAY}, {}, None),
    "nesterov": ({}, {"nesterov": True}, {}, None),
    "a flat trust ratio": ({"optimizer": "lamb"}, {}, {}, train_naively),
    "a flat trust ratio in ZeRO-0": ({"optimizer": "lamb", "stage": 0}, {}, {}, train_naively),
    **{
        f"shards counted as copies, ZeRO-{stage}": ({"layout": "tp2", "stage": stage}, {}, {}, train_counting_one_shard)
        for stage in (0, 1, 3)
    },
    "orthogonal slices": ({"optimizer": "muon", "layout": "tp2"}, {}, {}, train_slices_apart),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_broken_is_seen(ranks, folders, reference, breakage, tmp_path, monkeypatch):
    """A comparison that passes although the arithmetic is wrong by little."""
    changes, params, blocks, program = BREAKAGES[breakage]
    case = {**ONE_RANK, "optimizer": "sgd", "run": "plain", **changes}
    if program is not None:
        monkeypatch.setattr("curves.train_main", program)
    found = train(ranks, folders, case, tmp_path / "run", params=params, blocks=blocks)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same(reference("plain", case["optimizer"]), found, case["optimizer"])


OFF = ["--seed 43", "--drop-path 0", "--mixup 0", "--cutmix 0", "--reprob 0", "--aa none", "--scale 1 1"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("off", OFF)
def test_every_random_part_is_felt(ranks, folders, reference, off, tmp_path):
    """A switch without effect, with which the matrix would prove less than it says."""
    case = {**ONE_RANK, "optimizer": "sgd", "run": "random"}
    found = train(ranks, folders, case, tmp_path / "run", *off.split(), "--max-steps", 2).rows
    expected = [row for row in reference("random", "sgd").rows if row["step"] <= 2]
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(expected, found, rtol=1e-4)
