"""Evaluation alone, without an optimizer or a step: what `--eval-only` and `ds-vit eval` (tools/evaluate.py) share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds_vit.config.run_folder import RunFolder
from ds_vit.engine.base import Engine
from ds_vit.engine.start import device_of
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.models import Flops, count_flops
from ds_vit.monitoring.metrics import Reporter, make_console
from ds_vit.monitoring.progress import Line
from ds_vit.monitoring.throughput import Throughput
from ds_vit.parallel.groups import Groups
from ds_vit.tasks import Batch
from ds_vit.training.build import build_engine
from ds_vit.training.evaluate import Watch, evaluate
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.plan import Plan
from ds_vit.training.summary import show_end, show_start, summarise


def evaluate_plan(
    plan: Plan,
    device: torch.device,
    groups: Groups,
    watch: Watch,
    skipped: Path | None = None,
) -> tuple[Engine, dict[str, float]]:
    """Build the model of a plan and evaluate it (a collective).

    Args:
        plan: of evaluation alone.
        device: where this rank computes.
        groups: of the run.
        watch: hears of it.
        skipped: file that images are named in that could not be decoded, or None.

    Returns:
        The engine; the figures of the task's metrics, the same on every rank.
    """
    with watch.doing("building the model", None):
        engine = build_engine(plan, device, groups)
    inputs = InputPipeline(plan, engine, Throughput(), skipped=skipped)
    figures = evaluate(engine, inputs, watch)
    inputs.skipped.gather()
    return engine, figures


def run_evaluation(plan: Plan, folder: RunFolder, groups: Groups, started: float, watchdog: Watchdog) -> dict[str, Any]:
    """`--eval-only`: evaluate, and write a run's files (a collective).

    Args:
        plan: of evaluation alone.
        folder: the output folder, shared by all ranks; rank 0 writes to it.
        groups: of the run.
        started: `time.perf_counter()` when the program began.
        watchdog: is told of every bit of progress.

    Returns:
        What summary.json holds, on every rank.
    """
    device = device_of(plan.parallel.process.local_rank)

    def stamp(step: int) -> dict[str, float]:
        return {"epoch": 0, "wall_seconds": time.perf_counter() - started}

    is_first = plan.parallel.process.rank == 0
    reporter = Reporter(folder, total_steps=0, console=make_console(), stamp=stamp) if is_first else None
    console = reporter.console if reporter else None
    show_start(plan, folder, count_flops(plan.model.whole) if console else Flops(0, 0), device, console)

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        watchdog.beat(0, "evaluation", patience=plan.patience_of_first)
        return watchdog.micro_batches(batches)

    pictures: dict[str, torch.Tensor] = {}
    watchdog.beat(0, "building the model", patience=4)
    watch = Watch(watched, lambda: watchdog.beat(0, "evaluation"), pictures.update, doing=Line(console).doing)
    engine, figures = evaluate_plan(plan, device, groups, watch, folder.skipped)
    if reporter:
        reporter.start(events=engine.write_events)
        reporter.eval({"step": 0, **figures}, plan.model.task.figures)
        reporter.pictures(0, pictures)
        reporter.close()
    seconds = time.perf_counter() - started
    skipped = {"skipped_images": len(plan.data.validation) - int(figures["images"])}
    summary = summarise(plan, [figures], [], Throughput(), skipped, seconds, steps=0, exit_word="completed")
    show_end(plan, folder, summary, console)
    engine.close()
    return summary
