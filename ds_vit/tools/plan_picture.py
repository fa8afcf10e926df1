"""The pictures of `ds-vit plan`: memory by stage and the pipeline's course of a layout; goodput by GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_vit.monitoring.figures import new_figure
from ds_vit.planner.goodput import Goodput
from ds_vit.planner.schedule import Played, StageCost, play
from ds_vit.planner.search import Layouted, Planned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEMORY = ("weights", "masters", "optimizer", "average", "buckets", "gathered", "going_back")
_COLOURS = {"forward": "tab:blue", "backward": "tab:orange", "transfer": "tab:gray", "load": "tab:green"}
_MOST_MICRO_BATCHES = 16


def draw(found: Planned, one: Layouted) -> Figure:
    """Memory of a rank by stage, and the pipeline's course in time."""
    pp = one.layout.pp
    figure = new_figure(10, 4.5 if pp == 1 else 7)
    axes = figure.subplots(1 if pp == 1 else 2, 1, squeeze=False)[:, 0]
    left = [0.0] * len(one.memory)
    names = [f"stage {i}" for i in range(len(one.memory))]
    for field in _MEMORY:
        sizes = [getattr(memory, field) / 1e9 for memory in one.memory]
        if any(sizes):
            axes[0].barh(names, sizes, left=left, label=field.replace("_", " "))
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes[0].axvline(one.room / 1e9, color="black", linestyle="--", label="room")
    axes[0].set(xlabel="GB a rank, in the backward pass", title=f"{found.wishes.spec.name}: {one}")
    axes[0].invert_yaxis()
    axes[0].legend(fontsize="small", ncols=4)
    if pp > 1:
        _draw_course(axes[1], one)
    return figure


def play_layout(one: Layouted) -> Played:
    """A layout's step, of at most 16 micro-batches, as DeepSpeed's schedule goes through it."""
    pp, m = one.layout.pp, one.batch.accumulation
    work = (one.time.computing + one.time.recomputing + one.time.tensor) / m
    send = one.time.sending / m / (2 if pp == 2 else 4)
    stages = [StageCost(work / 3, work * 2 / 3, send) for _ in itertools.pairwise(one.bounds)]
    return play(stages, min(m, _MOST_MICRO_BATCHES))


def _draw_course(axes: Axes, one: Layouted) -> None:
    played, m = play_layout(one), one.batch.accumulation
    for kind, colour in _COLOURS.items():
        spans = [span for span in played.spans if span.kind == kind and span.end > span.start]
        if spans:
            axes.barh(
                [span.stage for span in spans],
                [1e3 * (span.end - span.start) for span in spans],
                left=[1e3 * span.start for span in spans],
                color=colour,
                edgecolor="white",
                linewidth=0.4,
                label=kind,
            )
    shown = f"the first {_MOST_MICRO_BATCHES} of {m} micro-batches" if m > _MOST_MICRO_BATCHES else "one step"
    bubble = f"bubble {one.time.bubble / one.time.seconds:.0%} of the step"
    axes.set(xlabel="ms", ylabel="stage", title=f"{shown}; {bubble}")
    axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=4)


def draw_goodput(found: Sequence[Goodput], per_host: int) -> Figure:
    """Goodput and the best interval between checkpoints, by the number of GPUs."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    gpus = [one.hosts * per_host for one in found]
    axes.plot(gpus, [100 * one.share for one in found], marker="o", label="goodput, %")
    axes.set(xscale="log", xlabel="GPUs", ylabel="goodput, %")
    beside = axes.twinx()
    beside.plot(gpus, [one.interval_seconds / 60 for one in found], marker="s", color="tab:orange")
    beside.plot(gpus, [one.young_daly_seconds / 60 for one in found], linestyle=":", color="black")
    beside.set(yscale="log", ylabel="checkpoint every … minutes (dotted: Daly)")
    return figure
