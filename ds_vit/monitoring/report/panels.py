"""The panels of a page: curves of one run or several, and of one run what else its folder holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ds_vit.monitoring.report.charts import Series, line_chart, widths
from ds_vit.monitoring.report.heat_map import heat_map
from ds_vit.monitoring.report.html import Html
from ds_vit.monitoring.report.launches import first_rows
from ds_vit.monitoring.report.record import Record

_SHARES = {"top1": "top-1", "top5": "top-5", "knn_top1": "k-NN top-1", "linear_top1": "linear probe top-1"}
ANY, PERCENT = (-math.inf, math.inf), (0.0, 100.0)


def in_words(name: str) -> tuple[str, str]:
    """A figure of summary.json and its unit: `best_top1_ema` is ("best top-1 of the average", "%")."""
    which, _, figure = name.partition("_")
    average = " of the average" if figure.endswith("_ema") else ""
    figure = figure.removesuffix("_ema")
    unit = "%" if figure in _SHARES else ""
    return f"{which} {_SHARES.get(figure, figure.replace('_', ' '))}{average}", unit


def curves(records: Sequence[Record]) -> list[Html]:
    """What was measured over the steps, a chart a quantity, a colour a run (or, of one run, a figure)."""
    marks = records[0].marks if len(records) == 1 else ()
    span = (0, max((row["step"] for record in records for rows in record.rows.values() for row in rows), default=1))

    thickness = widths(len(records))

    def chart(
        title: str,
        *parts: tuple[str, str, str, float],
        log: bool = False,
        note: str = "",
        bounds: tuple[float, float] = ANY,
        aside: Collection[int] = (),
    ) -> Html:
        """Parts: (kind, key, what it is called, factor)."""
        series = []
        for part, (kind, key, label, factor) in enumerate(parts):
            for at, record in enumerate(records):
                points = record.points(kind, key, factor)
                if log:
                    points = [(step, value) for step, value in points if value > 0]
                name = label if len(records) == 1 else f"{record.name}{f': {label}' if len(parts) > 1 else ''}"
                if points:
                    colour, dashed = (at, part > 0) if len(records) > 1 else (len(series), False)
                    series.append(Series(name, points, colour, dashed, thickness[at]))
        named = len(records) > 1
        return line_chart(
            title, series, marks=marks, log=log, note=note, span=span, bounds=bounds, aside=aside, named=named
        )

    def varies(key: str) -> bool:
        return len({value for record in records for _, value in record.points("train", key)}) > 1

    figures = list(dict.fromkeys(name for record in records for name in record.figures()))
    figures += [name for record in records for name in record.figures("eval_ema") if name not in figures]
    losses = [("train", "loss", "of the step", 1.0)]
    if len(records) == 1:
        losses.append(("train", "epoch_loss", "mean over the epoch", 1.0))
    charts = [chart("Training loss", *losses)]
    for name in figures:
        label = _SHARES.get(name)
        title = f"{label} on the validation split, %" if label else f"{name} on the validation split"
        parts = [("eval", name, "the weights", 1.0)]
        if any(record.points("eval_ema", name) for record in records):
            parts.append(("eval_ema", name, "their moving average", 1.0))
        charts.append(chart(title, *parts, bounds=PERCENT if label else ANY))
    norms = [value for record in records for _, value in record.points("train", "grad_norm")]
    wide = bool(norms) and min(norms) > 0 and max(norms) > 30 * min(norms)
    charts += [
        chart("Learning rate", ("train", "lr", "base rate", 1.0)),
        chart("Gradient norm, before clipping", ("train", "grad_norm", "norm", 1.0), log=wide),
        chart("Loss scale", ("train", "loss_scale", "scale", 1.0), log=True) if varies("loss_scale") else Html(""),
        chart("Images a second, all ranks", ("train", "images_per_second", "images/s", 1.0)),
        _waiting(records, chart),
        chart("TFLOP/s an accelerator", ("train", "tflops_per_accelerator", "TFLOP/s", 1.0)),
        chart("Model FLOPs utilisation, %", ("train", "mfu", "share of the peak", 100.0), bounds=PERCENT),
        chart(
            "Memory of the fullest rank, GB",
            ("train", "memory_bytes", "at most since the row before", 1e-9),
            note=_of_memory(records),
        ),
        chart(
            "Checkpoints, seconds",
            ("checkpoint", "pause_seconds", "training waited", 1.0),
            ("checkpoint", "write_seconds", "written beside it", 1.0),
        ),
    ]
    return [one for one in charts if one]


def _waiting(records: Sequence[Record], chart: Callable[..., Html]) -> Html:
    """The share of the time that the loader took, on the scale of what it takes once it has started."""
    started, others = [], []
    for record in records:
        first = first_rows(record)
        for step, share in record.points("train", "data_wait_fraction", 100.0):
            (started if step in first else others).append((share, step))
    usual = max(others, default=(math.inf, 0))[0]
    beyond = [(share, step) for share, step in started if share > usual]
    note = ""
    if beyond:
        share, step = max(beyond)
        note = f"without the start of the loader ({share:.0f} % at step {step}), which does not set the scale"
    aside = {step for _, step in beyond}
    part = ("train", "data_wait_fraction", "share", 100.0)
    return chart("Time spent waiting for data, %", part, bounds=PERCENT, aside=aside, note=note)


def _of_memory(records: Sequence[Record]) -> str:
    """What a CPU counts in place of a device's memory."""
    on_cpu = any(record.starts and record.starts[-1].get("device") == "cpu" for record in records)
    return "by how much the process has grown: on a CPU torch counts nothing" if on_cpu else ""


def gradients(record: Record) -> list[Html]:
    """Of each layer over the steps, what --grad-stats-interval wrote down."""
    rows = list(record.rows.get("gradients", ()))
    if not rows:
        return []
    rows = [rows[at] for at in np.linspace(0, len(rows) - 1, min(len(rows), 200)).round().astype(int)]
    layers = list(dict.fromkeys(layer for row in rows for layer in row["layers"]))
    steps = [row["step"] for row in rows]

    def over_layers(title: str, key: str, note: str, factor: float = 1.0, *, log: bool) -> Html:
        return over_steps(title, layers, lambda row, layer: row["layers"].get(layer, {}).get(key), note, factor, log)

    def over_steps(
        title: str,
        names: Sequence[str],
        value: Callable[[Mapping[str, Any], str], float | None],
        note: str,
        factor: float,
        log: bool,
    ) -> Html:
        found = [[value(row, name) for row in rows] for name in names]
        values = np.array(found, dtype=float) * factor  # None becomes nan
        return heat_map(title, names, steps, values, of_columns="step", note=note, log=log)

    found = [
        over_layers("Gradient norm by layer", "norm", "a layer that fades or flares up stands out", log=True),
        over_layers(
            "Update over weight by layer", "update_to_weight", "about 1e-3 is usual; 0: nothing moves", log=True
        ),
        over_layers(
            "Gradients too small for fp16, %", "below_2^-24", "below 2^-24, where fp16 has only 0", 100.0, log=False
        ),
    ]
    tensors = list(dict.fromkeys(name for row in rows for name in row.get("trust_ratios", {})))
    if tensors:
        title, note = "Trust ratios by tensor", "by what LAMB or LARS multiplies an update"
        found.append(
            over_steps(title, tensors, lambda row, name: row.get("trust_ratios", {}).get(name), note, 1.0, True)
        )
    return [one for one in found if one]
