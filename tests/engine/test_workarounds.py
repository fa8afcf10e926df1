"""Patches of DeepSpeed that can be tested without several ranks."""

from types import SimpleNamespace

import torch
from curves import train_main
from project import ROOT
from runs import ONE_BLOCK

from ds_vit.engine.patches import hold_scheduler_on_skipped_steps


def test_a_scheduler_waits_for_a_step_that_was_turned_down():
    # Catches: learning rates of two layouts that part after a skipped step; a resume that cannot set the scheduler.
    steps, applied = [], True
    scheduler = SimpleNamespace(step=lambda at=None: steps.append(at))
    hold_scheduler_on_skipped_steps(scheduler, lambda: applied)
    scheduler.step()
    applied = False
    scheduler.step()
    scheduler.step(7)
    assert steps == [None, 7]


def test_a_version_of_deepspeed_that_was_not_tested(monkeypatch):
    import deepspeed

    from ds_vit.engine.patches import version_warnings

    assert version_warnings() == []
    monkeypatch.setattr(deepspeed, "__version__", "0.20.1+abc")
    [line] = version_warnings()
    assert "DeepSpeed 0.20.1 " in line
    assert "pip install deepspeed==0.19.8" in line


def test_tf32_ends_with_the_run():
    # Catches: a second run in the same process that multiplies in TF32 without --tf32.
    from ds_vit.device import matmul_precision

    with matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def linear_maps_after(argv):
    """On a rank: whether a ZeRO-3 run that ends by an error restores torch's linear map."""
    from unittest import mock

    from ds_vit.fault_tolerance.errors import UserError
    from ds_vit.training.trainer import Trainer

    before = torch.nn.functional.linear
    with mock.patch.object(Trainer, "train", side_effect=UserError("as if an image were damaged")):
        assert train_main(argv) == 2
    return torch.nn.functional.linear is before


def test_a_run_that_fails_restores_the_process(ranks, tmp_path):
    argv = [*ONE_BLOCK, "--max-steps", "1", "--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero3_fp32.json")]
    argv += ["--output", str(tmp_path / "run")]
    assert ranks.run(1, linear_maps_after, argv) == [True]
