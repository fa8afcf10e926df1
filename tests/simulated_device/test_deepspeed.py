"""DeepSpeed on the simulated device: the losses of plain torch on the CPU, at each ZeRO stage, on one and two ranks."""

from __future__ import annotations

import deepspeed
import pytest
import simulated_device
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

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


def device_losses(library, stage: int, config: dict) -> dict:
    """On the device, by DeepSpeed: each rank takes its part of the batch."""
    simulated_device.start(library)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = small_vit()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
            "gradient_clipping": 1.0,
            **config,
        },
    )
    losses, skipped, syncs = [], [], []
    dtype = torch.float16 if "fp16" in config else torch.float32
    for images, targets in batches():
        part = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
        images, targets = images[part].pin_memory(), targets[part].pin_memory()
        simulated_device.reset()
        images = images.to(engine.device, dtype, non_blocking=True)
        loss = cross_entropy(engine(images).float(), targets.to(engine.device, non_blocking=True))
        engine.backward(loss)
        engine.step()
        syncs.append(simulated_device.host_synchronisations())
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
        skipped.append(engine.skipped_steps)
    return {"losses": losses, "skipped": skipped, "syncs": syncs, "device": str(engine.device)}


@pytest.fixture(scope="module")
def expected(ranks) -> list[float]:
    return ranks.run(1, plain_losses)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_of_the_cpu(ranks, device_library, expected, stage, world_size):
    results = ranks.run(world_size, device_losses, device_library, stage, {})
    assert [r["device"] for r in results] == [f"sim:{rank}" for rank in range(world_size)]
    print(results[0])
    for result in results:
        assert result["losses"] == pytest.approx(expected, rel=1e-5)
