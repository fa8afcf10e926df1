"""Predicted beside measured, at a run's end: what is said of it, and when."""

from __future__ import annotations

import pytest
import torch
from project import ROOT
from runs import DIGITS

from ds_vit.config import parse
from ds_vit.launching.process import Process
from ds_vit.training.memory import estimate
from ds_vit.training.plan import prepare
from ds_vit.training.truth import Truth


@pytest.fixture
def plan():
    words = [*DIGITS, "--val-split", "", "--max-steps", "2", "--warmup-steps", "0", "-b", "4"]
    words += ["--model-kwargs", "depth=2", "--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]
    config, explicit = parse(words)
    return prepare(config, explicit, Process("env", 0, 1, 0, 1), on_cpu=True)


@pytest.mark.parametrize(("share", "said"), [(1.1, ""), (1.3, "+30%; the largest part predicted is "), (0.7, "-30%")])
def test_a_large_deviation_is_said(plan, share, said):
    # Catches: a verdict on rounding, silence about a third, a deviation the wrong way round.
    truth = Truth(plan, torch.device("cpu"))
    truth.device = torch.device("cuda")  # only what is said of it: no driver is asked
    [truth.memory] = estimate(plan)
    predicted = truth.memory.together
    figures = {
        "memory": {"predicted_bytes": predicted, "measured_bytes": round(share * predicted)},
        "step_seconds": {"predicted": 1.0, "measured": share},
    }
    (_, memory), (_, step) = truth.end_rows(figures)
    assert said in memory
    assert ("%" in memory) == ("%" in step) == bool(said)
    # A CPU's growth holds more than the step's memory.
    on_cpu = Truth(plan, torch.device("cpu"))
    on_cpu.memory = truth.memory
    assert "%" not in on_cpu.end_rows(figures)[0][1]


def fill_memory(megabytes):
    """On a rank: what it is told of the fullest rank's memory, after taking some and after giving it back."""
    import torch.distributed as dist

    truth = Truth(None, torch.device("cpu"))
    held = torch.ones(megabytes[dist.get_rank()] * 2**18)
    full = truth.memory_bytes()
    del held
    truth.memory_bytes()  # of the moment in which it was given back
    return full, truth.memory_bytes(), truth.figures(None)["memory"]["measured_bytes"]


def test_memory_is_of_the_fullest_rank_and_of_a_row(ranks):
    # Catches: rank 0's own memory, or the run's highest in each of its rows; a run's highest that a row forgets.
    first, second = ranks.run(2, fill_memory, (0, 200))
    assert first == second
    full, emptied, of_the_run = first
    assert full > 200 * 2**20 > 100 * 2**20 > emptied
    assert of_the_run >= full


def test_the_time_of_a_known_accelerator_is_predicted(plan):
    # Catches: a cut, a type or a batch that the planner takes otherwise than the run has it.
    from ds_vit.planner.hardware import accelerator_of_device
    from ds_vit.training.truth import _seconds

    fast, slow = (_seconds(plan, accelerator_of_device(name)) for name in ("NVIDIA B200", "NVIDIA A100-SXM4-80GB"))
    assert 0 < fast <= slow < 1
    assert accelerator_of_device("NVIDIA GeForce GTX 1080") is None


def test_forms_of_one_chip_are_told_apart():
    # Catches: an H100 on a PCIe card that is taken for the faster one of a board.
    from ds_vit.monitoring.throughput import _PEAK_TFLOPS
    from ds_vit.planner.hardware import accelerator_of_device

    for name in ("H100 PCIe", "H100 NVL", "H100", "H200", "B200", "A100"):
        found = accelerator_of_device(f"NVIDIA {name}")
        assert (found.bf16_tflops, found.fp32_tflops) == _PEAK_TFLOPS[name]


def test_a_prediction_that_fails_ends_no_run(plan, monkeypatch):
    # Catches: a traceback for the sake of a figure on the screen.
    def broken(_):
        raise RuntimeError("no meta kernel\nsecond line")

    monkeypatch.setattr("ds_vit.training.truth.estimate", broken)
    truth = Truth(plan, torch.device("cpu"))
    truth.predict()
    assert truth.start_rows() == [("predicted", "warning: could not be worked out: RuntimeError: no meta kernel")]
    assert (
        truth.end_rows({"memory": {"predicted_bytes": 0, "measured_bytes": 1}, "step_seconds": {"predicted": None}})
        == []
    )
