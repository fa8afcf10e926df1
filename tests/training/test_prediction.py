"""Predicted and measured memory of a run, and the time of a step."""

from __future__ import annotations

import pytest
import torch
from project import ROOT
from runs import DIGITS, resolved

from ds_vit.config.batch import BatchSizes
from ds_vit.training.cost import Cost, PeakMemory


@pytest.fixture
def engine():
    words = [*DIGITS, "--val-split", "", "--max-steps", "2", "--warmup-steps", "0", "-b", "4"]
    words += ["--model-kwargs", "depth=2", "--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]
    return resolved(words)


def test_a_coupled_step_holds_the_inputs_of_all_micro_batches():
    words = [*DIGITS, "--val-split", "", "--task", "dino", "--local-crops-number", "3", "--local-crops-size", "8"]
    words += ["--max-steps", "2", "--warmup-steps", "0", "-b", "4", "--model-kwargs", "depth=1", "patch_size=4"]
    words += ["--prototypes", "8", "--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]
    config = resolved(words)
    cost, size = Cost(config), config.model.whole.patch_embed.img_size[0]
    few, many = (cost.fullest(BatchSizes(4 * n, 4, n, 1)) for n in (2, 12))
    crops, masks = 4 * 3 * (2 * size**2 + 3 * 8**2), 2 * (size // 4) ** 2
    inputs = 10 * 4 * (crops + masks)
    assert many.going_back - few.going_back == many.updating - few.updating == inputs


def fill_memory(megabytes):
    """On a rank: the fullest rank's memory, after allocating some and after freeing it."""
    import torch.distributed as dist

    peak = PeakMemory(None, torch.device("cpu"))
    held = torch.ones(megabytes[dist.get_rank()] * 2**18)
    full = peak.measured_bytes()
    del held
    peak.measured_bytes()  # of the moment in which it was freed
    return full, peak.measured_bytes(), peak.figures()["measured_bytes"]


def test_memory_is_of_the_fullest_rank_and_of_a_row(ranks):
    # Catches: rank 0's own memory, or the run's highest in each of its rows; a run's highest that a row forgets.
    first, second = ranks.run(2, fill_memory, (0, 200))
    assert first == second
    full, emptied, of_the_run = first
    assert full > 200 * 2**20 > 100 * 2**20 > emptied
    assert of_the_run >= full


def test_the_time_of_a_known_accelerator_is_predicted(engine):
    # Catches: stages, types or a batch in the planner that differ from the run's.
    from ds_vit.planner.hardware import accelerator_of_device

    cost = Cost(engine)
    fast, slow = (cost.step_time(accelerator_of_device(name)) for name in ("NVIDIA B200", "NVIDIA A100-SXM4-80GB"))
    assert 0 < fast.seconds <= slow.seconds < 1
    assert accelerator_of_device("NVIDIA GeForce GTX 1080") is None


def test_a_chip_has_one_peak_for_each_form(monkeypatch):
    # Catches: an H100 on a PCIe card that is taken for the faster one of a board, a chip with figures in two places.
    from ds_vit.monitoring.metrics import _UNPLANNED_TFLOPS, peak_tflops
    from ds_vit.planner.hardware import accelerator_of_device

    def peak(name, precision):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
        return peak_tflops(torch.device("cuda"), precision)

    for name, half, single in (
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H20", 148, 44),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A10G", 125, 31.2),
        ("NVIDIA L40S", 362, 91.6),
        ("AMD Instinct MI300X", 1307, 163.4),
        ("NVIDIA GeForce GTX 1080", None, None),
    ):
        assert (peak(name, "bf16"), peak(name, "fp32")) == (half, single), name
    assert [name for name in _UNPLANNED_TFLOPS if accelerator_of_device(name)] == []


def test_a_prediction_that_fails_ends_no_run(engine, monkeypatch):
    # Catches: a run that ends because of a figure on the screen.
    def broken(*_):
        raise RuntimeError("no meta kernel\nsecond line")

    monkeypatch.setattr(Cost, "fullest", broken)
    peak = PeakMemory(engine, torch.device("cpu"))
    assert peak.start_rows() == [("predicted", "warning: failed: RuntimeError: no meta kernel")]
    assert peak.predicted_bytes == 0

    def mistaken(self, batch):
        return self.no_such_attribute

    monkeypatch.setattr(Cost, "fullest", mistaken)
    with pytest.raises(AttributeError, match="no_such_attribute"):  # ours, and no property of the model
        peak.start_rows()


def test_matrices_that_are_not_multiples_of_8_are_named():
    # Catches: silence in 16 bits, a row in fp32, and one of the small head's 10 classes.
    words = [*DIGITS, "--val-split", "", "--max-steps", "2", "--warmup-steps", "0", "-b", "4", "--model-kwargs"]
    words += ["depth=1", "num_heads=3", "embed_dim=192", "mlp_ratio=3.51", "--deepspeed_config"]
    words += [str(ROOT / "ds_configs" / "cpu_zero1_fp32.json"), "--set"]
    for types, said in (("false", None), ("true", "blocks.mlp.fc1 673 x 192, blocks.mlp.fc2 192 x 673")):
        config = resolved([*words, f"bf16.enabled={types}"])
        row = dict(PeakMemory(config, torch.device("cpu")).start_rows()).get("matrix sizes")
        assert row == (said and f"{said}: no multiples of 8, which slows 16-bit products")
