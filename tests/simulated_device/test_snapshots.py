"""Checkpoints of a run on the simulated device: copied late, resumed on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from curves import assert_same_curve, checkpoints_in_time, read_rows, train_rows
from safetensors.torch import load_file

from ds_vit.checkpoint import snapshot
from simulated_device.test_whole_runs import MIXUP, Planted, train, words_of

SAVING = (*MIXUP, "--checkpoint-interval", 2, "--sched", "constant", "--max-steps", 4)


@contextlib.contextmanager
def not_awaited() -> Iterator[None]:
    """The planted defect: a save that does not wait for its copies."""
    with checkpoints_in_time(), mock.patch.object(snapshot, "synchronize"):
        yield


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


@pytest.mark.slow
def test_a_snapshot_is_of_values_that_have_landed(run, device_library, whole):
    """Catches: a snapshot without its synchronisation, which a CPU's copies do not need; state that only one kind of
    device can use."""
    expected = weights(whole)  # Adam scales rounding in the keys' biases up to the rate, 1e-3 a step
    for library, planted, is_right in (
        (None, not_awaited, True),
        (device_library, not_awaited, False),
        (device_library, checkpoints_in_time, True),
    ):
        output = run(f"{planted.__name__}, {library is None}", library, 2, planted=planted)
        saved = weights(output)
        right = [torch.allclose(saved[name], value, atol=4e-3) for name, value in expected.items()]
        assert all(right) if is_right else not any(right)
    resumed = train_rows(read_rows(run("cpu", None, 1, "--max-steps", 6, "--resume", output)))
    assert_same_curve(train_rows(read_rows(whole))[4:], resumed, rtol=1e-4)
