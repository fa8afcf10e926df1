"""Benchmarks that print ratios against a peer measured in the same run.

    ds-vit bench step --against timm --model vit_tiny_patch16_224 --deepspeed_config ds_configs/cpu_zero1_fp32.json

Machines are noisy: the two sides take turns, and the fastest turn of each counts.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ds_vit import config as flags
from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import discover, rendezvous

if TYPE_CHECKING:
    from ds_vit.training.plan import Plan


@dataclass(frozen=True)
class StepBench:
    """Training steps on one rank, ours against a plain loop of timm and torch; images a second of the fastest turn."""

    model: str
    batch_size: int
    deepspeed_config: str
    device: str
    threads: int
    versions: dict[str, str]
    plain_images_per_second: float
    ours_images_per_second: float

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.ours_images_per_second / self.plain_images_per_second


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
    *, model: str, batch_size: int, deepspeed_config: str, turns: int = 12, steps: int = 3, img_size: int | None = None
) -> StepBench:
    """Time optimizer steps on fixed random pixels: forward, loss, backward, clipping at the JSON's value, AdamW.

    Args:
        model: timm name.
        batch_size: images a step, one micro-batch.
        deepspeed_config: JSON file with AdamW; its precision is the plain loop's too (autocast for 16-bit files).
        turns: how often each side is measured; the two alternate.
        steps: steps a turn.
        img_size: image side, the model's own where None.

    Raises:
        UserError: more than one rank, or what training with these settings would raise.
    """
    process = discover()
    if process.world_size != 1:
        raise UserError(f"bench step measures one rank, and the launcher started {process.world_size}")
    quiet_deepspeed(False)
    from deepspeed.accelerator import get_accelerator

    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build import build_engine
    from ds_vit.training.plan import prepare

    words = ["--deepspeed_config", deepspeed_config, "--dataset", "digits", "--model", model, "-b", str(batch_size)]
    words += ["--num-classes", "1000", "--max-steps", "10", *(["--img-size", str(img_size)] if img_size else [])]
    config, explicit = flags.parse(words)
    plan = prepare(config, explicit, process, on_cpu=get_accelerator().device_name() == "cpu")
    made_group = init_distributed(rendezvous(process))
    device = device_of(process.local_rank)
    engine = build_engine(plan, device, build_groups(plan.parallel.layout))

    height, width = plan.model.image.img_size
    images = torch.randn(batch_size, 3, height, width, device=device)
    targets = torch.randint(1000, (batch_size,), device=device)
    batch = {"images": images.to(engine.dtype), "targets": targets, "keys": torch.arange(batch_size, device=device)}
    sides = {
        "plain": _plain_step(plan, images, targets, {"img_size": img_size} if img_size else {}),
        "ours": lambda: engine.train_step(iter([batch])),
    }
    best = dict.fromkeys(sides, float("inf"))
    for step in sides.values():
        _seconds_a_step(step, 2, device)
    for turn in range(turns):
        for name in ("plain", "ours") if turn % 2 else ("ours", "plain"):
            best[name] = min(best[name], _seconds_a_step(sides[name], steps, device))
    engine.close()
    if made_group:
        torch.distributed.destroy_process_group()
    return StepBench(
        model=model,
        batch_size=batch_size,
        deepspeed_config=Path(deepspeed_config).name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        threads=torch.get_num_threads(),
        versions=_versions(),
        plain_images_per_second=batch_size / best["plain"],
        ours_images_per_second=batch_size / best["ours"],
    )


def _plain_step(plan: Plan, images: torch.Tensor, targets: torch.Tensor, options: dict[str, int]) -> Callable[[], None]:
    """One step of a plain loop of timm and torch on the same images: the same model, optimizer, precision, clipping."""
    import timm

    optimizer = plan.optimizer
    peer = timm.create_model(plan.config.model, **options).to(images.device).train()
    timms = timm.optim.create_optimizer_v2(
        peer,
        opt=optimizer.cls.__name__.lower(),
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.arguments.get("betas"),
    )
    half = plan.deepspeed.precision.name != "fp32"

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
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
    return json.dumps({**asdict(result), "ratio": result.ratio})
