"""DINOv3's drawn rotary coordinates, separate norms and a backbone that is held at first, against one plain process
(tests/support/plain_dino.py)."""

import functools

import plain_dino
import pytest
from curves import assert_same_curve, checkpoints_in_time, read_rows, train_rows

RTOL = 1e-5
DINOV3 = plain_dino.DINOV3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images and weights."""
    return plain_dino.write_images(tmp_path_factory.mktemp("images"), DINOV3)


@pytest.fixture(scope="module")
def plain(folder):
    """The plain loop, by its centering."""
    return functools.cache(functools.partial(plain_dino.train, folder, variant=DINOV3))


def train(ranks, folder, output, layout, *words):
    """Train in a layout (dp, tp, ZeRO stage, micro-batches); the loss and norm of each step."""
    dp, tp, stage, accumulation = layout
    batch = ("-b", plain_dino.GLOBAL_BATCH // dp // accumulation, "--grad-accum-steps", accumulation, "--tp", tp)
    argv = plain_dino.words_of(folder, stage, output, *batch, *words, variant=DINOV3)
    assert ranks.run(dp * tp, train_on_rank, argv, timeout=400.0) == [0] * (dp * tp)
    return train_rows(read_rows(output))


def train_on_rank(argv):
    """On a rank: the exit code of a run."""
    from ds_vit.train import main

    with checkpoints_in_time():
        return main(argv)


def assert_same_run(plain, output):
    """Loss and norm of each step, and the teacher's tensors at the end."""
    assert_same_curve(plain.rows, read_rows(output), rtol=RTOL)
    deviation, tensor = plain_dino.teacher_deviation(plain.teacher, plain_dino.read_teacher(output))
    assert deviation < RTOL, f"{tensor} of the teacher deviates by {deviation:.1e} of its norm"


# Centering, layout, recomputation: each pair of values of two of them at least once.
CASES = [
    ("ema", (1, 1, 0, 1), ""),
    ("sinkhorn", (2, 1, 3, 4), "full"),
    ("ema", (3, 1, 2, 4), ""),
    ("sinkhorn", (3, 1, 1, 1), "selective"),
    ("ema", (1, 2, 3, 1), "2"),
    ("sinkhorn", (1, 2, 0, 4), ""),
    ("ema", (2, 1, 1, 4), "2"),
    ("sinkhorn", (1, 1, 2, 4), "full"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("centering", "layout", "recompute"), CASES)
def test_trains_as_one_plain_process(ranks, tmp_path, folder, plain, centering, layout, recompute):
    words = ("--grad-checkpointing", recompute) if recompute else ()
    train(ranks, folder, tmp_path / "run", layout, "--centering", centering, *words)
    assert_same_run(plain(centering), tmp_path / "run")
