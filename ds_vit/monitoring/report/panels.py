"""The panels that every run has: curves of one run or several, and the gradients of one run.

Those of one task come from `Task.charts` and `Task.panels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ds_vit.monitoring.report.record import Record, Row
from ds_vit.tasks.panels import Panel, Series, heat_map, line_chart, line_widths
from ds_vit.tasks.registry import known_figures
from ds_vit.tasks.task import Task

ANY, PERCENT = (-math.inf, math.inf), (0.0, 100.0)
# The powers of two of the smallest fp16 number, and of the smallest with all its bits (IEEE 754 binary16).
SMALLEST, SMALLEST_NORMAL = -24, -14


def tasks_of(records: Sequence[Record]) -> list[type[Task]]:
    """The classes of the runs' tasks, each once, as far as they can be imported."""
    return list(dict.fromkeys(record.task for record in records if not isinstance(record.task, str)))


def metric_label(name: str, records: Sequence[Record]) -> tuple[str, str]:
    """A metric of the runs' summary.json and its unit: `best_top1_ema` is ("best top-1 of the average", "%")."""
    which, _, metric = name.partition("_")
    average = " of the average" if metric.endswith("_ema") else ""
    metric = metric.removesuffix("_ema")
    figure = known_figures(*tasks_of(records)).get(metric)
    label, unit = (figure.label, figure.unit) if figure else (metric.replace("_", " "), "")
    return f"{which} {label}{average}", unit


def _chart(
    records: Sequence[Record],
    title: str,
    *parts: tuple[str, str, str, float],
    log: bool = False,
    **settings: Any,
) -> Panel | None:
    """A quantity over the steps; parts: (kind of row, key, label, factor)."""
    several = len(records) > 1
    series: list[Series] = []
    for part, (kind, key, label, factor) in enumerate(parts):
        for at, (record, width) in enumerate(zip(records, line_widths(len(records)), strict=True)):
            points = record.rates if key == "lr" else record.points(kind, key, factor)
            if log:
                points = [(step, value) for step, value in points if value > 0]
            name = f"{record.name}{f': {label}' * (len(parts) > 1)}" if several else label
            if points:
                colour, dashed = (at, part > 0) if several else (len(series), False)
                series.append(Series(name, points, colour, dashed, width, several))
    last = max((row["step"] for record in records for rows in record.rows.values() for row in rows), default=1)
    marks = () if several else records[0].marks
    return line_chart(title, series, log=log, marks=marks, span=(0, last), **settings)


def curves(records: Sequence[Record]) -> list[Panel]:
    """The metrics over the steps: a chart per quantity, a colour per run (of one run, per metric)."""
    chart, tasks = partial(_chart, records), tasks_of(records)
    figures = known_figures(*tasks)

    def all_values(key: str) -> list[float]:
        return [value for record in records for _, value in record.points("train", key)]

    losses = [("train", "loss", "of the step", 1.0)]
    if len(records) == 1:
        losses.append(("train", "epoch_loss", "mean over the epoch", 1.0))
    charts = [chart("Training loss", *losses)]
    for name in dict.fromkeys(name for kind in ("eval", "eval_ema") for each in records for name in each.metrics(kind)):
        figure = figures.get(name)
        label, unit = (figure.label, figure.unit) if figure else (name, "")
        parts = [("eval", name, "weights", 1.0)]
        if any(record.points("eval_ema", name) for record in records):
            parts.append(("eval_ema", name, "moving average of the weights", 1.0))
        title = f"{label} on the validation split{f', {unit}' if unit else ''}"
        charts.append(chart(title, *parts, bounds=PERCENT if unit == "%" else ANY))
    norms = all_values("grad_norm")
    wide = bool(norms) and min(norms) > 0 and max(norms) > 30 * min(norms)
    charts += [
        chart("Learning rate", ("train", "lr", "base rate", 1.0)),
        *(
            chart(one.title, *(("train", key, what, 1.0) for key, what in one.parts.items()))
            for one in {each.title: each for task in tasks for each in task.charts}.values()
        ),
        chart("Gradient norm, before clipping", ("train", "grad_norm", "norm", 1.0), log=wide),
    ]
    if len(set(all_values("loss_scale"))) > 1:
        charts.append(chart("Loss scale", ("train", "loss_scale", "scale", 1.0), log=True))
    starts = {step for record in records for step in record.first_steps}
    later = {step for record in records for step, _ in record.points("train", "data_wait_fraction")} - starts
    wait_note = "the scale leaves out the first row of a launch, in which the loader starts" if later else ""
    memory_note = "growth of the process, on a CPU" if any(record.on_cpu for record in records) else ""
    charts += [
        chart("Images per second, all ranks", ("train", "images_per_second", "images/s", 1.0)),
        chart(
            "Time spent waiting for data, %",
            ("train", "data_wait_fraction", "share", 100.0),
            bounds=PERCENT,
            outliers=starts,
            note=wait_note,
        ),
        chart("TFLOP/s per accelerator", ("train", "tflops_per_accelerator", "TFLOP/s", 1.0)),
        chart("Model FLOPs utilisation, %", ("train", "mfu", "share of the peak", 100.0), bounds=PERCENT),
        chart(
            "Memory of the fullest rank, GB",
            ("train", "memory_bytes", "maximum since the row before", 1e-9),
            note=memory_note,
        ),
        chart(
            "Checkpoints, seconds",
            ("checkpoint", "pause_seconds", "training paused", 1.0),
            ("checkpoint", "write_seconds", "written in the background", 1.0),
        ),
    ]
    return [one for one in charts if one]


def gradients(record: Record) -> list[Panel]:
    """Per layer over the steps: the rows of --grad-stats-interval."""
    rows = list(record.rows.get("gradients", ()))
    if not rows:
        return []
    rows = [rows[at] for at in np.linspace(0, len(rows) - 1, min(len(rows), 200)).round().astype(int)]
    layers = list(dict.fromkeys(layer for row in rows for layer in row["layers"]))
    tensors = list(dict.fromkeys(name for row in rows for name in row.get("trust_ratios", {})))

    def over_steps(title: str, note: str, key: str, factor: float = 1.0, *, log: bool = True) -> Panel | None:
        if key == "trust_ratios":
            names, found = tensors, [row.get(key, {}) for row in rows]
        else:
            names = layers
            found = [{layer: figures.get(key) for layer, figures in row["layers"].items()} for row in rows]
        values = factor * np.array([[of_step.get(name) for of_step in found] for name in names], dtype=float)  # or nan
        steps = [row["step"] for row in rows]
        return heat_map(title, names, steps, values, column_kind="step", note=note, log=log) if names else None

    too_small = "below 2^-24, the smallest fp16 number"
    panels = [
        over_steps("Gradient norm by layer", "layers that vanish or explode stand out", "norm"),
        over_steps("Update over weight by layer", "about 1e-3 is usual", "update_to_weight"),
        over_steps("Gradients too small for fp16, %", too_small, "below_2^-24", 100.0, log=False),
        over_steps("Trust ratios by tensor", "factors of LAMB or LARS on the update", "trust_ratios"),
        _powers_of_two(rows[-1]),
    ]
    return [one for one in panels if one]


def _powers_of_two(row: Row) -> Panel | None:
    """The last histogram by layer, with a blank column at each limit of fp16."""
    histogram = row.get("histogram", {"counts": {}})
    counts = {layer: np.array(of_layer, float) for layer, of_layer in histogram["counts"].items() if sum(of_layer)}
    if not counts:
        return None
    lowest, shares = histogram["lowest"], np.stack([100 * of_layer / of_layer.sum() for of_layer in counts.values()])
    seen = lowest + np.flatnonzero(shares.max(axis=0) > 0.1)
    first, last = min(seen[0], SMALLEST - 1), max(seen[-1], SMALLEST_NORMAL)
    columns = [f"2^{power}" for power in range(first, last + 1)]
    values = shares[:, first - lowest : last + 1 - lowest]
    for limit, name in ((SMALLEST_NORMAL, "fewer bits in fp16"), (SMALLEST, "zero in fp16")):
        columns.insert(limit - first, f"below: {name}")
        values = np.insert(values, limit - first, np.nan, axis=1)
    note = (
        f"at step {row['step']}; the right line is 2^-14, below it {row['below_2^-14']:.1%} have fewer bits in fp16; "
        f"the left one is 2^-24, below it {row['below_2^-24']:.1%} are zero"
    )
    title = "Gradients by power of two, % of each layer"
    return heat_map(title, list(counts), columns, values, column_kind="gradient", note=note)
