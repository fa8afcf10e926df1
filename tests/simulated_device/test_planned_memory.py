"""Memory on the simulated device, whose allocator counts and limits it: the planner's peak and `--auto-batch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import resolved

import simulated_device
from ds_vit.training.auto_batch import legal
from ds_vit.training.build import engine_config
from ds_vit.training.cost import Cost
from simulated_device.test_whole_runs import MIXUP, buckets, train, words_of

WIDE = (*MIXUP, "--model-kwargs", "patch_size=4", "embed_dim=128", "depth=4", "num_heads=4", "--checkpoint-interval", 0)
PLANNED = {
    **{f"ZeRO-{stage}, 2 ranks": (f"cpu_zero{stage}_fp32.json", 2, ("-b", 16)) for stage in range(4)},
    "one rank": ("cpu_zero1_fp32.json", 1, ("-b", 16)),
    "accumulated": ("cpu_zero2_fp32.json", 2, ("-b", 8, "--grad-accum-steps", 2)),
    "recomputed, average": ("cpu_zero1_fp32.json", 2, ("-b", 16, "--grad-checkpointing", "--model-ema")),
    "bf16": ("zero1_bf16.json", 2, ("-b", 16, *buckets(500_000))),
    "tp 2": ("cpu_zero1_fp32.json", 2, ("-b", 16, "--tp", 2)),
    "pp 2": ("cpu_zero1_fp32.json", 2, ("-b", 8, "--pp", 2, "--grad-accum-steps", 4)),
}


@pytest.mark.parametrize("case", PLANNED)
def test_the_peak_is_what_was_planned(ranks, device_library, tmp_path, case):
    """A tenth either way, as tests/planner/test_memory.py allows for a peak of all storages on a CPU."""
    config, world_size, more = PLANNED[case]
    done = ranks.run(world_size, train, device_library, words_of(config, *WIDE, *more, "--output", tmp_path))
    assert [code for code, _ in done] == [0] * world_size, done
    memory = json.loads((tmp_path / "summary.json").read_text())["memory"]
    assert memory["measured_bytes"] == pytest.approx(memory["predicted_bytes"], rel=0.1)


def train_within(library: Path, limit: int, words: list[str]) -> tuple[int, str]:
    """On a rank: a run on a device of so much memory."""
    simulated_device.start(library)
    simulated_device.set_memory_limit(limit)
    return train(None, words)


def test_auto_batch_finds_the_edge(ranks, device_library, tmp_path):
    """Catches: a trial that needs another memory than training, and an error that is not caught."""
    more = (*WIDE, "--set", "train_batch_size=24")
    config = engine_config(resolved(words_of("cpu_zero1_fp32.json", *more, "--auto-batch")))
    needs = {batch.micro_batch: Cost(config).fullest(batch).together for batch in legal(config)}
    limit = round((needs[6] + needs[8]) / 2 / 0.95)  # a twentieth stays free
    codes, errors = {}, {}
    for name, size in {"found": "--auto-batch", "fits": "-b 6", "too large": "-b 12"}.items():
        words = words_of("cpu_zero1_fp32.json", *more, *size.split(), "--output", tmp_path / name)
        [(codes[name], errors[name])] = ranks.run(1, train_within, device_library, limit, words)
    assert codes == {"found": 0, "fits": 0, "too large": 1}, errors
    found = json.loads((tmp_path / "found" / "deepspeed.json").read_text())
    assert found["train_micro_batch_size_per_gpu"] == 6
    assert "Tried to allocate" in errors["too large"]
