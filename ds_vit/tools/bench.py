"""`ds-vit bench step` and `ds-vit bench ladder`: training steps of several sides, measured in the same run.

ds-vit bench step --against timm timm-compiled --deepspeed_config ds_configs/cpu_zero{0,1,3}_fp32.json
torchrun --nproc_per_node 2 --module ds_vit.cli bench step --against ddp fsdp2 --deepspeed_config …
ds-vit bench ladder --deepspeed_config ds_configs/cpu_zero0_fp32.json

The rungs of the ladder are those of Meta AI's account of faster ViT training (PyCls, 2022: automatic mixed precision,
sharding, an average-pooled classifier, a larger batch), and compiled blocks. Its multi-tensor optimizer is no rung:
ours always are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process, discover
from ds_vit.monitoring.figures import new_figure
from ds_vit.tools.measure import (
    Candidate,
    Ratio,
    Side,
    machine,
    make_ours,
    measure,
    random_batch,
    ranks_met,
    ratio,
    resolve_engine,
    versions,
)
from ds_vit.tools.peers import check_comparable, check_peer, peer_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ds_vit.training.build_engine import EngineConfig


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Attributes:
        name: what it adds.
        words: flags of training that do it, in addition to those of the rungs before.
        larger_batch: how many times the images of a micro-batch.
    """

    name: str
    words: tuple[str, ...] = ()
    larger_batch: int = 1


RUNGS = (
    Rung("fp32, ZeRO-0", ("--set", "zero_optimization.stage=0")),
    Rung("bf16 by autocast", ("--set", "torch_autocast.enabled=true", "--set", "torch_autocast.dtype=bfloat16")),
    Rung("ZeRO-1", ("--set", "zero_optimization.stage=1")),
    Rung("average-pooled classifier", ("--model-kwargs", "class_token=false", "global_pool=avg")),
    Rung("twice the batch", larger_batch=2),
    Rung("compiled blocks", ("--compile",)),
)


@dataclass(frozen=True)
class Bench:
    """What was measured on what.

    Attributes:
        options: flags of the runs.
        global_batch, precision: of the first of ours.
        ours, peers: name → side.
        ratios: one of ours → what it is compared with (a peer; "the one before", "the first") → ratio.
    """

    model: str
    options: str
    layout: str
    device: str
    threads: int
    versions: dict[str, str]
    global_batch: int
    precision: str
    ours: dict[str, Side]
    peers: dict[str, Side]
    ratios: dict[str, dict[str, Ratio]]

    def to_json(self) -> str:
        """One line for a file of figures."""
        return json.dumps(asdict(self))


def bench_step(
    words: Sequence[str], deepspeed_configs: Sequence[str], peers: Sequence[str], *, turns: int = 12, steps: int = 3
) -> Bench:
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
    stems = [Path(path).stem for path in deepspeed_configs]
    ours = {
        stem if stems.count(stem) == 1 else path: resolve_engine([*words, "--deepspeed_config", path], process)
        for stem, path in zip(stems, deepspeed_configs, strict=True)
    }
    precisions = sorted({engine.precision.name for engine in ours.values()})
    if len(precisions) > 1:
        raise UserError(f"--deepspeed_config: files of one precision can be compared, not of {', '.join(precisions)}")
    check_comparable(next(iter(ours.values())))
    compared = {name: {peer: peer for peer in peers} for name in ours}
    return _measured(words, ours, peers, compared, process, turns, steps)


def climb_ladder(
    words: Sequence[str], deepspeed_config: str, batch_size: int, *, turns: int = 12, steps: int = 3
) -> Bench:
    """Time and count the steps of all rungs, which take turns (a collective).

    Args:
        words: flags of a training run for all rungs.
        deepspeed_config: the JSON file.
        batch_size: images of a rank's micro-batch on the first rungs.
        turns: how often each rung is measured.
        steps: steps a turn.

    Raises:
        UserError: --model-kwargs, which a rung sets; or what training with these flags would raise.
    """
    if "--model-kwargs" in words:
        raise UserError("bench ladder sets --model-kwargs on its way; choose another --model instead")
    process = discover()
    ours, added = {}, [*words, "--deepspeed_config", deepspeed_config]
    for rung in RUNGS:
        added += rung.words
        batch_size *= rung.larger_batch
        ours[rung.name] = resolve_engine([*added, "-b", str(batch_size)], process)
    names = list(ours)
    pairs = itertools.pairwise(names)
    compared = {name: {"the one before": before, "the first": names[0]} for before, name in pairs}
    return _measured(words, ours, (), compared, process, turns, steps)


def _measured(
    words: Sequence[str],
    ours: Mapping[str, EngineConfig],
    peers: Sequence[str],
    compared: Mapping[str, Mapping[str, str]],
    process: Process,
    turns: int,
    steps: int,
) -> Bench:
    """Measure all sides; `compared` has of each of ours: name of a ratio → the other side."""
    config = next(iter(ours.values()))
    candidates = {name: Candidate(own, make_ours) for name, own in ours.items()}
    candidates |= {name: Candidate(config, partial(_make_peer, name)) for name in peers}
    with ranks_met(process) as device:
        sides = measure(candidates, device, turns, steps)
        name, threads = machine(device)
    return Bench(
        model=config.model.spec.name,
        options=" ".join(words),
        layout=str(config.layout),
        device=name,
        threads=threads,
        versions=versions(),
        global_batch=config.batch.global_batch,
        precision=config.precision.name,
        ours={name: sides[name] for name in ours},
        peers={name: sides[name] for name in peers},
        ratios={
            name: {label: ratio(sides[name], sides[other]) for label, other in others.items()}
            for name, others in compared.items()
        },
    )


def _make_peer(
    name: str, config: EngineConfig, device: torch.device, stack: contextlib.ExitStack
) -> Callable[[], object]:
    pixels = random_batch(config, config.batch.global_batch // dist.get_world_size(), torch.float32, device)
    return peer_step(name, config, pixels["images"], pixels["targets"])


def title(result: Bench) -> str:
    """What was measured, on what."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"{result.model}, {result.precision}, batch {result.global_batch}, {result.layout}; a step, fastest of the "
        f"turns; {result.device}, {result.threads} threads; {versions}"
    )


def table(result: Bench) -> list[tuple[str, ...]]:
    """A header and a line a side: its own figures, and of ours the ratios, each with its range over the turns.

    Columns without a value are left out.
    """
    labels = list(dict.fromkeys(label for ratios in result.ratios.values() for label in ratios))
    sides = {**result.peers, **result.ours}
    differ = len({side.images for side in sides.values()}) > 1
    lines = [("", "images a step", "images/s", *(f"of {label}" for label in labels))]
    lines[0] += ("operations", "waits", "MB allocated", "MB at the peak", "MFU")
    for name, side in sides.items():
        ratios = result.ratios.get(name, {})
        cells = [ratios.get(label) for label in labels]
        lines.append(
            (
                name,
                str(side.images) if differ else "",
                f"{side.images_per_second:.2f}",
                *(f"{r.images_per_second:.3f} ({r.low:.3f} to {r.high:.3f})" if r else "" for r in cells),
                str(side.counts.operations),
                str(side.counts.waits),
                f"{side.counts.allocated_bytes / 1e6:.0f}",
                f"{side.memory_bytes / 1e6:.0f}" if side.memory_bytes else "",
                f"{side.mfu:.1%}" if side.mfu else "",
            )
        )
    known = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return list(zip(*known, strict=True))


def draw(result: Bench) -> Figure:
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
