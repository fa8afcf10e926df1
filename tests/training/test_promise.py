"""The promise: with everything random switched on, the layout does not change the curve."""

import oracle
import pytest
from curves import assert_same_curve, train_in
from project import ROOT

RTOL = 1e-5
# 103 training and 53 validation images; a global batch of 24 divides neither.
EVERYTHING = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", oracle.IMG_SIZE, "--drop-path", 0.2),
    *("--aa", "rand-m9-mstd0.5-inc1", "--mixup", 0.8, "--cutmix", 1.0, "--reprob", 0.5, "--smoothing", 0.1),
    *("--epochs", 2, "--warmup-steps", 2, "--lr", 2e-3, "--log-interval", 1),
]
# world, workers, micro-batch, accumulation, ZeRO stage, recomputation
LAYOUTS = [
    (1, 2, 24, 1, 1, ""),
    (1, 0, 3, 8, 2, "2"),
    (2, 0, 12, 1, 0, ""),
    (2, 2, 4, 3, 3, "selective"),
    (2, 0, 3, 4, 1, ""),
    (4, 0, 6, 1, 1, ""),
    (4, 0, 3, 2, 3, ""),
    (4, 2, 1, 6, 2, "full"),
]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """CIFAR-10 in sizes that nothing divides."""
    folder = tmp_path_factory.mktemp("promise")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, 103, "train")
    oracle.cifar_folder(real_images / "cifar10" / "test.tar", folder, 53, "val")
    return folder


def train(ranks, folder, world, workers, micro, accumulation, stage, recompute, *words):
    """Two epochs with everything on."""
    argv = [*EVERYTHING, "--data-dir", folder, "--workers", workers, "-b", micro, "--grad-accum-steps", accumulation]
    argv += ["--deepspeed_config", ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"]
    return train_in(ranks, world, [*argv, *(["--grad-checkpointing", recompute] if recompute else []), *words])


@pytest.fixture(scope="module")
def reference(ranks, cifar):
    """One rank, no workers, the whole batch at once."""
    return train(ranks, cifar, 1, 0, 24, 1, 1, "")


def evals(rows):
    """What evaluation counted."""
    return [{k: row[k] for k in ("step", "top1", "top5", "images")} for row in rows if row["kind"] == "eval"]


def test_the_reference_is_random_and_complete(ranks, cifar, reference):
    """Two epochs of 103 // 24 steps, every validation image counted, and another seed is another curve."""
    assert [row["step"] for row in reference if row["kind"] == "train"] == list(range(1, 9))
    assert [row["images"] for row in reference if row["kind"] == "eval"] == [53, 53]
    other = train(ranks, cifar, 1, 0, 24, 1, 1, "", "--seed", 43)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(reference, other, rtol=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_layout_does_not_change_the_curve(ranks, cifar, reference, layout):
    """A draw, an order, a partner or a count that depends on rank, worker, micro-batch, stage or recomputation."""
    rows = train(ranks, cifar, *layout)
    assert_same_curve(reference, rows, rtol=RTOL)
    assert evals(rows) == evals(reference)
    losses = [[r["loss"] for r in run if r["kind"] == "eval"] for run in (reference, rows)]
    assert losses[1] == pytest.approx(losses[0], rel=RTOL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("off", ["--drop-path 0", "--mixup 0", "--cutmix 0", "--reprob 0", "--aa none", "--scale 1 1"])
def test_every_random_part_is_felt(ranks, cifar, reference, off):
    """A switch that does nothing would make the test above prove less than it says."""
    rows = train(ranks, cifar, 1, 0, 24, 1, 1, "", *off.split(), "--max-steps", 2)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve([r for r in reference if r["step"] <= 2], rows, rtol=1e-4)
