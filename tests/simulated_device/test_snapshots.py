"""Checkpoints of a run on the simulated device: copied late, killed in between, resumed there and on the CPU."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from curves import assert_same_curve, checkpoints_in_time, read_rows
from ranks import RankFailure
from safetensors.torch import load_file

from ds_vit.checkpoint import snapshot
from simulated_device.test_whole_runs import MIXUP, Planted, train, words_of

SAVING = (*MIXUP, "--checkpoint-interval", 2, "--sched", "constant", "--max-steps", 4)


def in_place_of_synchronize(function: Callable[[torch.device], None]) -> ExitStack:
    """A save does this where it should wait for its copies; each is written before training continues."""
    stack = ExitStack()
    start = snapshot.Saver.start

    def start_and_write(self, save):
        start(self, save)
        self.wait()

    stack.enter_context(mock.patch.object(snapshot.Saver, "start", start_and_write))
    stack.enter_context(mock.patch.object(snapshot, "synchronize", function))
    return stack


def not_awaited() -> AbstractContextManager:
    """The planted defect: a save that does not wait for its copies."""
    return in_place_of_synchronize(lambda device: None)


def killed_while_copying() -> AbstractContextManager:
    """The second save's copies are under way."""
    saves, wait = itertools.count(1), snapshot.synchronize

    def synchronize(device: torch.device) -> None:
        if next(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(device)

    return in_place_of_synchronize(synchronize)


@pytest.fixture
def run(ranks, tmp_path) -> Callable[..., Path]:
    """Train on so many ranks with a global batch of 16; the run's folder."""

    def run(
        name: str, library: Path | None, world_size: int, *more: object, planted: Planted = checkpoints_in_time
    ) -> Path:
        output = tmp_path / name
        words = words_of("cpu_zero1_fp32.json", *SAVING, "-b", 16 // world_size, "--output", output, *more)
        done = ranks.run(world_size, train, library, words, planted)
        assert [code for code, _ in done] == [0] * world_size, done
        return output

    return run


@pytest.fixture
def whole(run) -> Path:
    """Six steps on the CPU, not interrupted."""
    return run("whole", None, 1, "--max-steps", 6)


def weights(output: Path) -> dict[str, torch.Tensor]:
    """After the fourth step."""
    return load_file(output / "checkpoints" / "step-00000004" / "model.safetensors")


def last_rows(output: Path, after: int) -> list[dict]:
    return [row for row in read_rows(output) if row["kind"] == "train" and row["step"] > after]


def test_a_snapshot_is_of_values_that_have_landed(run, device_library, whole):
    """Catches: a snapshot without its synchronisation, which a CPU's copies do not need."""
    expected = weights(whole)  # Adam scales rounding in the keys' biases up to the rate, 1e-3 a step
    for library, planted, is_right in (
        (device_library, checkpoints_in_time, True),
        (device_library, not_awaited, False),
        (None, not_awaited, True),
    ):
        saved = weights(run(f"{planted.__name__}, {library is None}", library, 2, planted=planted))
        right = [torch.allclose(saved[name], value, atol=4e-3) for name, value in expected.items()]
        assert all(right) if is_right else not any(right)


def test_a_kill_between_a_snapshots_copies_costs_no_more_than_that_snapshot(run, device_library, whole, tmp_path):
    """Catches: a checkpoint that is named before it has landed, and state that only one kind of device can use."""
    with pytest.raises(RankFailure, match="SIGKILL"):
        run("killed", device_library, 1, planted=killed_while_copying)
    for name, library in (("device", device_library), ("cpu", None)):
        resumed = run(name, library, 2, "--max-steps", 6, "--resume", tmp_path / "killed")
        assert_same_curve(last_rows(whole, after=2), last_rows(resumed, after=2), rtol=1e-4)
