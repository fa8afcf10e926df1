"""ds_vit on the simulated device: whole runs, with the curves of the CPU and no wait of the host in a step."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from curves import assert_same_curve, read_rows
from project import ROOT
from runs import DIGITS, run_quietly

import simulated_device

STEPS = 3
RUN = [
    *(*DIGITS, "--model-kwargs", "patch_size=4", "depth=4", "embed_dim=48", "num_heads=2"),
    *("--max-steps", str(STEPS), "--log-interval", "1", "--drop-path", "0.2", "--mixup", "0.8", "-b", "8"),
    *("--warmup-epochs", "0", "--val-split", ""),
]


def train(library: Path | None, words: list[str]) -> tuple[int, str, str]:
    """On a rank: a run of ds_vit, on the device or (without a library) on the CPU."""
    if library:
        simulated_device.start(library)
    code, said, errors = run_quietly(words)
    assert code == 0, errors
    if library:
        assert torch.accelerator.max_memory_allocated() > 0
    return code, said, errors


@pytest.mark.parametrize(
    ("config", "world_size", "more"),
    [
        ("cpu_zero0_fp32.json", 1, ()),
        ("cpu_zero1_fp32.json", 1, ()),
        ("cpu_zero1_fp32.json", 2, ()),
        ("cpu_zero2_fp32.json", 2, ()),
        ("cpu_zero3_fp32.json", 2, ()),
        ("cpu_zero1_fp32.json", 2, ("--tp", "2")),
        ("cpu_zero1_fp32.json", 2, ("--pp", "2")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_curve_of_the_cpu(ranks, device_library, tmp_path, config, world_size, more):
    words = [*RUN, "--deepspeed_config", str(ROOT / "ds_configs" / config), *more]
    for library, name in ((device_library, "device"), (None, "cpu")):
        ranks.run(world_size, train, library, [*words, "--output", str(tmp_path / name)])
    assert_same_curve(read_rows(tmp_path / "cpu"), read_rows(tmp_path / "device"), rtol=1e-4)


def count_waits(library: Path, words: list[str]) -> list[dict[str, int]]:
    """On a rank: the host synchronisations of each step of a run."""
    from ds_vit.engine.plain import PlainEngine

    take_step, waits = PlainEngine.train_step, []

    def counted(self, *args):
        simulated_device.reset()
        result = take_step(self, *args)
        waits.append(simulated_device.host_synchronisations())
        return result

    with mock.patch.object(PlainEngine, "train_step", counted):
        train(library, words)
    return waits


@pytest.mark.parametrize(
    ("stage", "more"), [(0, ()), (1, ()), (2, ()), (1, ("--augment-on", "device", "--reprob", "0.5"))], ids=str
)
def test_the_host_never_waits_in_a_step(ranks, device_library, tmp_path, stage, more):
    """Catches: a hidden `.item()`, a copy from memory that is not pinned. The first step may make what others keep."""
    words = [*RUN, *more, "--deepspeed_config", str(ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json")]
    words += ["--max-steps", "6", "--log-interval", "100", "--output", str(tmp_path)]
    waits = ranks.run(1, count_waits, device_library, words)[0]
    assert not any(waits[1:]), waits
