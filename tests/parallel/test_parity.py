"""The parity matrix: stages, slices, ZeRO stages, recomputation and accumulation leave the curve alone."""

import functools
import itertools
import json

import oracle
import pytest
import torch
from curves import assert_same_curve, train_in
from pairwise import cover, pairs
from project import ROOT
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RTOL = 1e-5
# Three steps are an epoch. A wrong factor shows in the first step or, in the optimizer's state, in the second or third.
GLOBAL_BATCH, STEPS = 32, 4
# 7 blocks, 6 heads: cut by 2 and by 3. Clipping is tight: the norm is far above it.
KWARGS = {"patch_size": 8, "embed_dim": 48, "depth": 7, "num_heads": 6}
BASE = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(KWARGS), "--img-size", oracle.IMG_SIZE, "--workers", 0),
    *("--sched", "constant", "--warmup-epochs", 0, "--max-steps", STEPS, "--log-interval", 1, "--no-aug"),
    *("--drop-path", 0.2, "--mixup", 0.8, "--check-replicas", 1),
]
OPTIMIZERS = {
    "sgd": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05}},
    "adamw": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.05, "eps": 1e-6}},
}
# name: (pp, dp, tp, further flags)
LAYOUTS = {
    "dp2": (1, 2, 1, ()),
    "pp2": (2, 1, 1, ()),
    "pp4": (4, 1, 1, ()),
    "pp2 dp2": (2, 2, 1, ()),
    "pp3 uneven": (3, 1, 1, ("--pp-partition", "0,2,7,9")),
    "tp2": (1, 1, 2, ()),
    "tp3": (1, 1, 3, ()),
    "tp2 dp2": (1, 2, 2, ()),
    "pp2 tp2": (2, 1, 2, ()),
    "pp2 dp2 tp2": (2, 2, 2, ()),
    "tp2 sequence": (1, 1, 2, ("--sequence-parallel",)),
    "pp2 tp2 sequence": (2, 1, 2, ("--sequence-parallel",)),
    "tp3 classes": (1, 1, 3, ("--class-parallel", "on")),
}


def stages(pp):
    """The ZeRO stages that are legal with this many pipeline stages."""
    return (0, 1) if pp > 1 else (0, 1, 2, 3)


FACTORS = {
    "layout": list(LAYOUTS),
    "stage": [0, 1, 2, 3],
    "recompute": ["", "full", "selective"],
    "accumulation": [1, 4, 8],
    "optimizer": list(OPTIMIZERS),
}


def legal(case):
    """Whether a combination can run: ZeRO stage with the pipeline, and at least one image a micro-batch."""
    pp, dp, _, _ = LAYOUTS[case["layout"]]
    return case["stage"] in stages(pp) and GLOBAL_BATCH % (dp * case["accumulation"]) == 0


def full_product():
    """Every legal combination."""
    cases = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [case for case in cases if legal(case)]


@functools.cache  # asked for once a combination, and in each process of pytest
def pairwise_cover():
    """A selection of combinations in which every legal pair of choices occurs."""

    def seconds(case):
        pp, dp, tp, _ = LAYOUTS[case["layout"]]
        pass_ = 0.04 * (2 if tp > 1 else 1) * (2.5 if case["stage"] == 3 else 1) * (1.5 if case["recompute"] else 1)
        return pp * dp * tp * (0.6 + STEPS * pass_ * case["accumulation"])

    return cover(full_product(), seconds)


def name(case):
    """A test's id."""
    recompute = case["recompute"] or "keep"
    return (
        f"{case['layout']}, ZeRO-{case['stage']}, {recompute}, accumulation {case['accumulation']}, {case['optimizer']}"
    )


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """96 CIFAR-10 images and random initial weights."""
    folder = tmp_path_factory.mktemp("parity")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, 96, "train")
    oracle.write_weights(folder / "weights.safetensors", num_classes=10, **KWARGS)
    return folder


def train(ranks, folder, case, output):
    """Some steps of a combination; gives the rows and the final weights."""
    pp, dp, tp, words = LAYOUTS[case["layout"]] if case["layout"] else (1, 1, 1, ())
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{case['stage']}_fp32.json").read_text())
    data |= {"gradient_clipping": 0.1, "optimizer": OPTIMIZERS[case["optimizer"]]}
    config = folder / f"{case['stage']}-{case['optimizer']}.json"
    config.write_text(json.dumps(data))
    micro = GLOBAL_BATCH // dp // case["accumulation"]
    argv = [*BASE, "--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors", "--val-split", ""]
    argv += ["--deepspeed_config", config, "--pp", pp, "--tp", tp, "-b", micro, "--output", output, *words]
    argv += ["--grad-accum-steps", case["accumulation"]]
    argv += ["--grad-checkpointing", case["recompute"]] if case["recompute"] else []
    if dp * tp == 1 or case["stage"] == 3:
        argv[argv.index("--check-replicas") + 1] = 0
    return train_in(ranks, pp * dp * tp, argv), load_file(str(output / "model.safetensors"))


@pytest.fixture(scope="module")
def reference(ranks, cifar, tmp_path_factory):
    """One rank, everything at once, per optimizer."""
    folder = tmp_path_factory.mktemp("reference")
    base = {"layout": "", "stage": 1, "recompute": "", "accumulation": 1}
    return {o: train(ranks, cifar, {**base, "optimizer": o}, folder / o) for o in OPTIMIZERS}


def assert_same_weights(a, b, rtol):
    """Every tensor, relative to its norm."""
    assert a.keys() == b.keys()
    parts = {n: (torch.linalg.norm(a[n] - b[n]) / torch.linalg.norm(a[n]).clamp_min(1e-12)).item() for n in a}
    worst = max(parts, key=parts.get)
    assert parts[worst] <= rtol, f"{worst}: {parts[worst]:.2e} relative"


def check(ranks, cifar, reference, case, output):
    """The combination's curve and weights are the one-rank run's."""
    rows, weights = train(ranks, cifar, case, output)
    expected_rows, expected_weights = reference[case["optimizer"]]
    assert_same_curve(expected_rows, rows, rtol=RTOL)
    # AdamW scales rounding in gradients that are zero in exact arithmetic (the key bias) up to the learning rate.
    assert_same_weights(expected_weights, weights, rtol=RTOL if case["optimizer"] == "sgd" else 1e-4)


def test_the_reference_is_clipped_and_learns(reference):
    """A reference that does not move, or is not clipped, proves nothing."""
    for rows, _ in reference.values():
        assert min(row["grad_norm"] for row in rows) > 3 * 0.1


@pytest.mark.parametrize("case", pairwise_cover(), ids=name)
def test_pairwise(ranks, cifar, reference, case, tmp_path):
    """Every pair of choices that can be made together occurs in one of these."""
    check(ranks, cifar, reference, case, tmp_path / "run")


@pytest.fixture(scope="module")
def plain(cifar):
    """A plain loop of timm and torch on the same images, all at once: 96 are one batch."""
    return oracle.train_plainly(cifar, cifar / "weights.safetensors", num_classes=10, steps=STEPS, **KWARGS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_timm(ranks, cifar, plain, layout):
    """Without anything random, every layout against timm itself, which knows nothing of layouts."""
    pp, dp, tp, words = LAYOUTS[layout]
    data = json.loads((ROOT / "ds_configs" / "cpu_zero1_fp32.json").read_text())
    data |= {"gradient_clipping": oracle.CLIP}
    data["optimizer"]["params"]["weight_decay"] = oracle.WEIGHT_DECAY
    config = cifar / "plain.json"
    config.write_text(json.dumps(data))
    argv = [*BASE, "--drop-path", 0, "--mixup", 0, "--smoothing", 0, "--check-replicas", 0, "--lr", oracle.LR, *words]
    argv += ["--data-dir", cifar, "--initial-checkpoint", cifar / "weights.safetensors", "--val-split", ""]
    argv += ["--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--deepspeed_config", config, "--pp", pp, "--tp", tp]
    rows = train_in(ranks, pp * dp * tp, [*argv, "-b", 24 // dp, "--grad-accum-steps", 4])
    assert_same_curve(plain, rows, rtol=RTOL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [c for c in full_product() if c not in pairwise_cover()], ids=name)
def test_full_product(ranks, cifar, reference, case, tmp_path):
    """All the others; `pytest --exhaustive` runs them."""
    check(ranks, cifar, reference, case, tmp_path / "run")


def test_every_legal_pair_is_covered():
    """The selection must cover what it says."""
    covered = set().union(*(pairs(case) for case in pairwise_cover()))
    assert covered == set().union(*(pairs(case) for case in full_product()))
