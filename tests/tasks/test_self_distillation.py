"""DINO with iBOT in every layout against one plain process (tests/support/plain_dino.py)."""

import functools

import plain_dino
import pytest
from curves import assert_same_curve, checkpoints_in_time, read_rows, train_rows
from safetensors.torch import load_file

RTOL = 1e-5
# Ranks, ZeRO stage, accumulation, further flags.
LAYOUTS = {
    "1 rank": (1, 0, 1),
    "accumulation": (1, 1, 4),
    "dp 2, ZeRO-3, accumulation": (2, 3, 4),
    "dp 3, ZeRO-2": (3, 2, 1),
    "dp 4, ZeRO-0, accumulation": (4, 0, 4),
    "tp 2": (2, 1, 4, "--tp", 2),
    "tp 2, sequence, recomputed": (2, 0, 1, "--tp", 2, "--sequence-parallel", "--grad-checkpointing"),
}


def train_on_rank(argv):
    """On a rank: the exit code of a run."""
    from ds_vit.train import main

    with checkpoints_in_time():
        return main(argv)


def train(ranks, folder, output, centering, world, stage, accumulation, *words):
    """Run a layout; its rows."""
    tp = words[words.index("--tp") + 1] if "--tp" in words else 1
    micro_batch = plain_dino.GLOBAL_BATCH * tp // world // accumulation
    words = ("--centering", centering, "-b", micro_batch, "--grad-accum-steps", accumulation, *words)
    argv = plain_dino.words_of(folder, stage, output, *words)
    assert ranks.run(world, train_on_rank, argv) == [0] * world
    return train_rows(read_rows(output))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return plain_dino.write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def plain(folder):
    return functools.cache(functools.partial(plain_dino.train, folder))


def assert_same_run(plain, output):
    """Loss and norm of each step, and the teacher and the centres of the end."""
    assert_same_curve(plain.rows, train_rows(read_rows(output)), rtol=RTOL)
    weights = {f"teacher.{name}": tensor for name, tensor in load_file(str(output / "teacher.safetensors")).items()}
    of_head = load_file(str(output / "teacher_head.safetensors"))
    weights |= {name.replace("dino_head.", "teacher_head."): tensor for name, tensor in of_head.items()}
    deviation, name = plain_dino.teacher_deviation(plain.teacher, weights)
    assert deviation < RTOL, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("centering", ["ema", "sinkhorn"])
def test_each_layout_trains_as_one_plain_process(ranks, tmp_path, folder, plain, centering, layout):
    train(ranks, folder, tmp_path / "run", centering, *LAYOUTS[layout])
    assert_same_run(plain(centering), tmp_path / "run")
