"""DeepSpeed on the simulated device: the losses of plain torch on the CPU, at each ZeRO stage, on one and two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import timm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn.functional import cross_entropy

import simulated_device

GLOBAL_BATCH, STEPS = 4, 4


def small_vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, GLOBAL_BATCH, 3, 32, 32, generator=generator)
    return list(zip(images, torch.randint(10, (STEPS, GLOBAL_BATCH), generator=generator), strict=True))


def plain_losses() -> list[float]:
    """On the CPU, by torch."""
    model = small_vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for images, targets in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(images), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@dataclass(frozen=True)
class Run:
    """What a rank saw of a run, a row a step."""

    device: str
    losses: list[float]
    skipped: list[int]
    host_synchronisations: list[dict[str, int]]


def run_deepspeed(library: Path | None, stage: int, config: dict) -> Run:
    """Train with DeepSpeed, on the device or (without a library) on the CPU; each rank takes its part of the batch."""
    if library:
        simulated_device.start(library)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        engine, _, _, _ = deepspeed.initialize(
            model=small_vit(),
            config={
                "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
                "gradient_clipping": 1.0,
                **config,
            },
        )
    run = Run(str(engine.device), [], [], [])
    part = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
    for images, targets in batches():
        if library:
            images, targets = images.pin_memory(), targets.pin_memory()
            simulated_device.reset()
        images = images[part].to(engine.device, non_blocking=True).to(next(engine.module.parameters()).dtype)
        loss = cross_entropy(engine(images).float(), targets[part].to(engine.device, non_blocking=True))
        engine.backward(loss)
        engine.step()
        run.host_synchronisations.append(simulated_device.host_synchronisations() if library else {})
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        run.losses.append(loss.item() / world_size)
        run.skipped.append(engine.skipped_steps)
    return run


@pytest.fixture(scope="module")
def expected(ranks) -> list[float]:
    return ranks.run(1, plain_losses)[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_the_cpu(ranks, device_library, expected, stage, world_size):
    runs = ranks.run(world_size, run_deepspeed, device_library, stage, {})
    assert [run.device for run in runs] == [f"sim:{rank}" for rank in range(world_size)]
    for run in runs:
        assert run.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_overflows_skip_the_same_steps_as_on_the_cpu(ranks, device_library, stage, world_size):
    config = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    on_device = ranks.run(world_size, run_deepspeed, device_library, stage, config)
    on_cpu = ranks.run(world_size, run_deepspeed, None, stage, config)
    for run, other in zip(on_device, on_cpu, strict=True):
        assert run.losses == pytest.approx(other.losses, rel=1e-3)
        assert run.skipped == other.skipped
        assert 0 < run.skipped[0] <= run.skipped[-1] < STEPS, "some steps overflow, and some do not"


def test_bf16_gives_the_losses_of_the_cpu(ranks, device_library):
    config = {"bf16": {"enabled": True}}
    on_device = ranks.run(2, run_deepspeed, device_library, 1, config)
    on_cpu = ranks.run(2, run_deepspeed, None, 1, config)
    assert on_device[0].losses == pytest.approx(on_cpu[0].losses, rel=1e-2)


def test_overlapped_collectives_do_not_race(ranks, device_library, expected):
    config = {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 10_000}}
    for run in ranks.run(2, run_deepspeed, device_library, 2, config):
        assert run.losses == pytest.approx(expected, rel=1e-5)
