"""Benchmarks that print ratios against a peer measured in the same run.

    ds-vit bench step --against timm --model vit_tiny_patch16_224 --deepspeed_config ds_configs/cpu_zero1_fp32.json

Machines are noisy: the two sides take turns, and the fastest turn of each counts. Beside the times stand counts of what
one step asks of the hardware, which no other program disturbs (counting.py).
"""

from __future__ import annotations

import inspect
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ds_vit import config as flags
from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process, discover, rendezvous
from ds_vit.tools.counting import StepCounts, count_step

if TYPE_CHECKING:
    from ds_vit.engine.base import Engine
    from ds_vit.tasks import Batch
    from ds_vit.training.plan import Plan


@dataclass(frozen=True)
class StepBench:
    """Training steps on one rank, ours against a plain loop of timm and torch.

    Attributes:
        plain_images_per_second, ours_images_per_second: of the fastest turn.
        plain_counts, ours_counts: of one step.
    """

    model: str
    batch_size: int
    drop_path: float
    drop_path_compute: str
    deepspeed_config: str
    device: str
    threads: int
    versions: dict[str, str]
    plain_images_per_second: float
    ours_images_per_second: float
    plain_counts: StepCounts
    ours_counts: StepCounts

    @property
    def ratio(self) -> float:
        """Ours over the peer's, of the rates."""
        return self.ours_images_per_second / self.plain_images_per_second

    @property
    def operations_ratio(self) -> float:
        """Ours over the peer's, of the operations a step; less is better."""
        return self.ours_counts.operations / self.plain_counts.operations

    @property
    def allocated_ratio(self) -> float:
        """Ours over the peer's, of the bytes allocated in a step; less is better."""
        return self.ours_counts.allocated_bytes / self.plain_counts.allocated_bytes


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), **{n: version(n) for n in ("torch", "timm", "deepspeed")}}


def _seconds_a_step(step: Callable[[], object], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def bench_step(
    *,
    model: str,
    batch_size: int,
    deepspeed_config: str,
    turns: int = 12,
    steps: int = 3,
    img_size: int | None = None,
    drop_path: float = 0.0,
    drop_path_compute: str = "auto",
) -> StepBench:
    """Time and count optimizer steps on fixed random pixels: forward, loss, backward, clipping by the JSON, AdamW.

    Args:
        model: timm name.
        batch_size: images a step, one micro-batch.
        deepspeed_config: JSON file with AdamW; its precision is the plain loop's too (autocast for 16-bit files).
        turns: how often each side is measured; the two alternate.
        steps: steps a turn.
        img_size: image side, the model's own where None.
        drop_path: rate of stochastic depth, of both sides.
        drop_path_compute: as the flag of train.py, of our side.

    Raises:
        UserError: more than one rank, or what training with these settings would raise.
    """
    process = discover()
    if process.world_size != 1:
        raise UserError(f"bench step measures one rank, and the launcher started {process.world_size}")
    words = ["--deepspeed_config", deepspeed_config, "--dataset", "digits", "--model", model, "-b", str(batch_size)]
    words += ["--num-classes", "1000", "--max-steps", "10", *(["--img-size", str(img_size)] if img_size else [])]
    words += ["--drop-path", str(drop_path), "--drop-path-compute", drop_path_compute] if drop_path else []
    plan, engine, made_group = _start(words, process)
    device = engine.device
    height, width = plan.model.image.img_size
    images = torch.randn(batch_size, 3, height, width, device=device)
    targets = torch.randint(1000, (batch_size,), device=device)
    batches = itertools.cycle(_batches(images.to(engine.dtype), targets, steps))
    sides = {
        "plain": _plain_step(
            plan, images, targets, {"drop_path_rate": drop_path, **({"img_size": img_size} if img_size else {})}
        ),
        "ours": lambda: engine.train_step(batches),
    }
    best = dict.fromkeys(sides, float("inf"))
    for step in sides.values():
        _seconds_a_step(step, 2, device)
    counts = {name: count_step(step) for name, step in sides.items()}
    for turn in range(turns):
        for name in ("plain", "ours") if turn % 2 else ("ours", "plain"):
            best[name] = min(best[name], _seconds_a_step(sides[name], steps, device))
    engine.close()
    if made_group:
        torch.distributed.destroy_process_group()
    return StepBench(
        model=model,
        batch_size=batch_size,
        drop_path=drop_path,
        drop_path_compute=drop_path_compute,
        deepspeed_config=Path(deepspeed_config).name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        threads=torch.get_num_threads(),
        versions=_versions(),
        plain_images_per_second=batch_size / best["plain"],
        ours_images_per_second=batch_size / best["ours"],
        plain_counts=counts["plain"],
        ours_counts=counts["ours"],
    )


def _batches(images: torch.Tensor, targets: torch.Tensor, number: int) -> Iterator[Batch]:
    """The same images under other keys: each turn meets the same draws, and those of many steps are less of luck."""
    keys = torch.arange(number * len(images)).split(len(images))
    for own in keys:
        yield {"images": images, "targets": targets, "keys": own.to(images.device), "keys_on_host": own}


def _start(words: list[str], process: Process) -> tuple[Plan, Engine, bool]:
    """An engine as a run builds it, and whether the process group was made for it."""
    quiet_deepspeed(False)
    from deepspeed.accelerator import get_accelerator

    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build import build_engine
    from ds_vit.training.plan import prepare

    config, explicit = flags.parse(words)
    plan = prepare(config, explicit, process, on_cpu=get_accelerator().device_name() == "cpu")
    made_group = init_distributed(rendezvous(process))
    return plan, build_engine(plan, device_of(process.local_rank), build_groups(plan.parallel.layout)), made_group


def _plain_step(plan: Plan, images: torch.Tensor, targets: torch.Tensor, options: dict[str, Any]) -> Callable[[], None]:
    """One step of a plain loop of timm and torch on the same images: the same model, optimizer, precision, clipping.

    As a good engineer writes it: fused where torch has that for the optimizer, gradients in 16 bits by autocast.
    """
    import timm

    optimizer = plan.optimizer
    peer = timm.create_model(plan.config.model, **options).to(images.device).train()
    timms = timm.optim.create_optimizer_v2(
        peer,
        opt=optimizer.cls.__name__.lower(),
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.arguments.get("betas"),
        **({"fused": True} if "fused" in inspect.signature(optimizer.cls).parameters else {}),
    )
    half = plan.deepspeed.precision.name != "fp32"

    def step() -> None:
        # At stage 3 DeepSpeed puts a linear map of its own, two operations for one, in place of the whole process's.
        with (
            mock.patch.object(torch.nn.functional, "linear", torch._C._nn.linear),
            torch.autocast(images.device.type, torch.bfloat16, enabled=half),
        ):
            logits = peer(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), targets, label_smoothing=plan.config.smoothing)
        timms.zero_grad()
        loss.backward()
        if optimizer.clip:
            torch.nn.utils.clip_grad_norm_(peer.parameters(), optimizer.clip)
        timms.step()

    return step


def to_json(result: StepBench) -> str:
    """One line for a file of figures."""
    counted = {"operations_ratio": result.operations_ratio, "allocated_ratio": result.allocated_ratio}
    return json.dumps({**asdict(result), "ratio": result.ratio, **counted})
