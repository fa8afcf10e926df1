"""`ds-vit bench step`: training steps as ours are, beside those of timm and torch, measured in the same run.

ds-vit bench step --against timm timm-compiled --deepspeed_config ds_configs/cpu_zero{0,1,3}_fp32.json
torchrun --nproc_per_node 2 --module ds_vit.cli bench step --against ddp fsdp2 --deepspeed_config …
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import discover
from ds_vit.monitoring.figures import new_figure
from ds_vit.tools.measure import (
    Candidate,
    Ratio,
    Report,
    Side,
    machine,
    make_ours,
    measure,
    plan_of,
    random_batch,
    ranks_met,
    ratio,
    versions,
)
from ds_vit.tools.peers import check_comparable, check_peer, peer_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ds_vit.training.plan import Plan


@dataclass(frozen=True)
class StepBench(Report):
    """Training steps of several sides: name → side, ours by their files' names; and one of ours → a peer → ratio."""

    global_batch: int
    precision: str
    ours: dict[str, Side]
    peers: dict[str, Side]
    ratios: dict[str, dict[str, Ratio]]


def bench_step(
    words: Sequence[str], deepspeed_configs: Sequence[str], peers: Sequence[str], *, turns: int = 12, steps: int = 3
) -> StepBench:
    """Time and count optimizer steps on fixed random pixels: forward, loss, backward, clipping, update (a collective).

    Args:
        words: flags of a training run, of ours; model, image size, drop-path and optimizer are the peers' too.
        deepspeed_configs: JSON files of one precision; each makes one of ours.
        peers: of `PEERS`.
        turns: how often each side is measured; they alternate.
        steps: steps a turn.

    Raises:
        UserError: a peer that cannot train on so many ranks, files of several precisions, or what training with these
            settings would raise.
    """
    process = discover()
    for peer in peers:
        check_peer(peer, process.world_size)
    plans = {
        _name(path, deepspeed_configs): plan_of([*words, "--deepspeed_config", path], process)
        for path in deepspeed_configs
    }
    plan = next(iter(plans.values()))
    precisions = sorted({plan.deepspeed.precision.name for plan in plans.values()})
    if len(precisions) > 1:
        raise UserError(f"--deepspeed_config: files of one precision can be compared, not of {', '.join(precisions)}")
    check_comparable(plan)
    candidates = {name: Candidate(own, make_ours) for name, own in plans.items()}
    candidates |= {name: Candidate(plan, partial(_make_peer, name)) for name in peers}
    with ranks_met(process) as device:
        sides = measure(candidates, device, turns, steps)
        name, threads = machine(device)
    return StepBench(
        model=plan.config.model,
        options=" ".join(words),
        global_batch=plan.data.batch.global_batch,
        layout=str(plan.parallel.layout),
        precision=plan.deepspeed.precision.name,
        device=name,
        threads=threads,
        versions=versions(),
        ours={name: sides[name] for name in plans},
        peers={name: sides[name] for name in peers},
        ratios={name: {peer: ratio(sides[name], sides[peer]) for peer in peers} for name in plans},
    )


def _make_peer(name: str, plan: Plan, device: torch.device, stack: contextlib.ExitStack) -> Callable[[], object]:
    pixels = random_batch(plan, plan.data.batch.global_batch // dist.get_world_size(), torch.float32, device)
    return peer_step(name, plan, pixels["images"], pixels["targets"])


def _name(path: str, among: Sequence[str]) -> str:
    """A file's name, or its whole path where another one has the same name."""
    stem = Path(path).stem
    return stem if [Path(other).stem for other in among].count(stem) == 1 else path


def title(result: StepBench) -> str:
    """What was measured, on what."""
    return f"{result.model}, {result.precision}, batch {result.global_batch}, {result.layout}; {result.where}"


def table(result: StepBench) -> list[tuple[str, ...]]:
    """A header and a line a side: its own figures, and of ours the ratio to each peer with its quartiles.

    Columns that nothing is known of are left out.
    """
    against = [f"of {peer}" for peer in result.peers]
    lines = [("", "images/s", *against, "operations", "waits", "MB allocated", "MB at the peak", "MFU")]
    for name, side in {**result.peers, **result.ours}.items():
        ratios = [
            f"{r.images_per_second:.3f} ({r.low:.2f} to {r.high:.2f})" for r in result.ratios.get(name, {}).values()
        ]
        lines.append(
            (
                name,
                f"{side.images_per_second:.2f}",
                *(ratios or [""] * len(against)),
                str(side.counts.operations),
                str(side.counts.waits),
                f"{side.counts.allocated_bytes / 1e6:.0f}",
                f"{side.memory_bytes / 1e6:.0f}" if side.memory_bytes else "",
                f"{side.mfu:.1%}" if side.mfu else "",
            )
        )
    known = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return list(zip(*known, strict=True))


def draw(result: StepBench) -> Figure:
    """The rates of all sides as bars, ours in another colour.

    Raises:
        UserError: matplotlib is not installed.
    """
    sides = {**result.peers, **result.ours}
    figure = new_figure(7, 1.2 + 0.35 * len(sides))
    axes = figure.subplots()
    colours = ["#b0b0b0"] * len(result.peers) + ["#4a7fb5"] * len(result.ours)
    bars = axes.barh(list(sides), [side.images_per_second for side in sides.values()], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("images/s, fastest turn")
    axes.set_title(title(result).partition(";")[0], fontsize=10)
    return figure
