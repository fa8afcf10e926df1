"""Line charts and heat maps as plain data: page.html draws them, page.js shows the values under the pointer."""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

Panel = dict[str, Any]
"""A card of the page: "kind" selects its macro in page.html, "title" is its caption, the rest belongs to the kind."""

LEFT, RIGHT, TOP, BOTTOM = 50, 384, 10, 194  # the plot within a picture of 400 x 220
MAX_POINTS = 400
NUM_COLOURS = 8
THIN, WIDEST = 1.6, 7.0  # line widths
MAX_DOTS = 25
_VALUE_HEIGHT = 14
_MARKS = {"resume": "resumed", "rollback": "rolled back", "skip": "step skipped", "stop": "interrupted"}

# Viridis, which grows evenly in lightness for every kind of colour vision (van der Walt and Smith, matplotlib, CC0).
_VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=float)
FEW_COLUMNS = 12  # fit into the narrowest card with their names
MAX_NUMBERED, MAX_NAMED = 24, 40  # rows and columns that show numbers, names
_MAX_HORIZONTAL = 3  # letters of a column's name
_BRIGHT = 130  # of 255: a cell that needs dark text


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend and under the pointer.
        points: (step, value), steps growing; values that are not finite are left out.
        colour: index of the page's colours.
        dashed: another curve has the same colour.
        width: of the line; a curve that another may hide is wider than that one, and pale.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    width: float = THIN

    @property
    def is_band(self) -> bool:
        """Whether it is wide and pale."""
        return self.width > THIN

    @property
    def look(self) -> str:
        """Its CSS classes."""
        return f"c{self.colour % NUM_COLOURS}{' dashed' * self.dashed}{' band' * self.is_band}"


@dataclass(frozen=True)
class Mark:
    """An event at a step; `kind` is "resume", "rollback", "skip" or "stop"."""

    step: int
    text: str
    kind: str


def line_widths(number: int) -> list[float]:
    """Widths of curves that may hide each other, in drawing order: the last is the thinnest."""
    step = min(3.0, (WIDEST - THIN) / max(1, number - 1))
    return [THIN + step * (number - 1 - at) for at in range(number)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log: bool = False,
    note: str = "",
    span: tuple[float, float] | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    outliers: Collection[float] = (),
    named: bool = False,
) -> Panel | None:
    """Curves over steps; None if no curve has a point.

    Args:
        title: with the unit.
        series: in the order of the legend.
        marks: vertical lines.
        log: a logarithmic axis; values must be above 0.
        note: a line below the title.
        span: first and last step of the axis (default: those of the curves).
        bounds: limits of the quantity; the axis does not exceed them.
        outliers: steps whose values do not set the scale if there are others; they are drawn at the edge.
        named: a legend for a single curve too.
    """
    series = [replace(one, points=points) for one in series if (points := thin_out(one.points))]
    if not series:
        return None
    points = [point for one in series for point in one.points]
    values = [value for step, value in points if step not in outliers] or [value for _, value in points]
    steps = [step for step, _ in points]
    scale = math.log10 if log else float
    x = _widen(*(span or (min(steps), max(steps))))
    y = _widen(scale(min(values)), scale(max(values)), bounds)
    # A value beyond an axis is placed at its end.
    across, down = partial(np.interp, xp=x, fp=(LEFT + 4, RIGHT)), partial(np.interp, xp=y, fp=(BOTTOM - 6, TOP + 4))
    drawn = [[(across(step), down(scale(value))) for step, value in one.points] for one in series]
    return {
        "kind": "chart",
        "title": title,
        "note": note,
        "legend": series if named or len(series) > 1 else [],
        "marked": [(kind, _MARKS[kind]) for kind in dict.fromkeys(mark.kind for mark in marks)],
        "curves": list(zip(series, drawn, strict=True)),
        "values": _single_values(series, drawn),
        "marks": [(across(mark.step), mark) for mark in marks],
        "rows": [(down(at), number(10**at if log else at)) for at in (log_ticks(*y) if log else ticks(*y, 5))],
        "columns": [(across(at), number(at)) for at in ticks(*x, 6)],
        "data": {
            "x": [*x, LEFT + 4, RIGHT],
            "marks": [[mark.step, mark.text] for mark in marks],
            "series": [[one.name, [[step, _short(value)] for step, value in one.points]] for one in series],
        },
    }


def _single_values(
    series: Sequence[Series], drawn: Sequence[Sequence[tuple[float, float]]]
) -> list[tuple[float, float, str, str]]:
    """(x, y, text, CSS class) for each curve with a single point, unless another value is already there."""
    found: list[tuple[float, float, str, str]] = []
    for one, spots in zip(series, drawn, strict=True):
        across, down = spots[0]
        if len(spots) > 1 or any(abs(down - other) < _VALUE_HEIGHT for _, other, *_ in found):
            continue
        right = across > (LEFT + RIGHT) / 2
        found.append(
            (across + (-10 if right else 10), down, f"{one.points[0][1]:.5g}", "before" if right else "behind")
        )
    return found


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[object],
    values: np.ndarray,
    *,
    column_kind: str,
    note: str = "",
    log: bool = False,
    numbers: bool = False,
) -> Panel | None:
    """A colour per value: layers over steps, or classes over classes; None if no value is finite.

    Args:
        title: with the unit.
        rows: names from top to bottom.
        columns: names from left to right.
        values: [rows, columns]; a value that is not finite (on a logarithmic scale, not above 0) stays blank.
        column_kind: what the columns are, such as "step".
        note: a line below the title.
        log: colours follow the logarithm.
        numbers: show column names and the values in the cells, as far as there is room.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log10(values) if log else np.asarray(values, dtype=float)
    known = np.isfinite(scaled)
    if not known.any():
        return None
    low, high = scaled[known].min(), scaled[known].max()
    colours = viridis(np.where(known, (scaled - low) / ((high - low) or 1.0), 0.0))
    names = [str(column) for column in columns]
    cells = []
    if numbers and max(values.shape) <= MAX_NUMBERED:
        bright = colours @ np.array([0.299, 0.587, 0.114]) > _BRIGHT
        cells = list(zip(np.where(known, values, 0.0).flat, bright.flat, strict=True))
    return {
        "kind": "heat",
        "title": title,
        "note": note,
        "wide": numbers and len(names) > FEW_COLUMNS,
        "scale": [number(10**end if log else end) for end in (low, high)],
        "labels": list(rows) if len(rows) <= MAX_NAMED else [rows[0], rows[-1]],
        "num_rows": min(len(rows), MAX_NAMED),
        "names": names,
        "column_kind": column_kind,
        "every": numbers and len(names) <= MAX_NAMED,
        "upright": any(len(name) > _MAX_HORIZONTAL for name in names),
        "crowd": "few" if len(names) <= FEW_COLUMNS else "some" if len(names) <= MAX_NAMED else "many",
        "image": image_uri(Image.fromarray(np.dstack((colours, 255 * known)).astype(np.uint8), "RGBA")),
        "cells": cells,
        "data": {
            "rows": list(rows),
            "columns": names,
            "of": column_kind,
            "values": [
                [None if math.isnan(value) else _short(value) for value in row]
                for row in np.where(known, values, np.nan)
            ],
        },
    }


def viridis(shares: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1, of any shape, as colours: uint8 [..., 3]."""
    stops = np.linspace(0.0, 1.0, len(_VIRIDIS))
    channels = [np.interp(shares, stops, channel) for channel in _VIRIDIS.T]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def image_uri(image: Image.Image, kind: str = "png", **options: object) -> str:
    """An image as a data: address, so that the page needs no other file."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` finite points: the lowest and the highest of each interval of steps, so no spike is lost."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) <= MAX_POINTS:
        return points
    kept = {0, len(points) - 1}
    for first, end in itertools.pairwise(np.linspace(0, len(points), MAX_POINTS // 2).astype(int)):
        interval = range(first, end)
        kept |= {min(interval, key=lambda at: points[at][1]), max(interval, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def number(value: float) -> str:
    """A number as an axis shows it: 0.25, 12k, 3e-5."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= unit:
            return f"{value / unit:.4g}{name}"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if 0 < size < 1e-2:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two bounds, at most so many."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Logarithms of round numbers between two logarithms: of powers of ten, or of 1, 2 and 5 times them."""
    first, last = math.ceil(low), math.floor(high)
    if high - low >= 2:
        return list(range(first, last + 1, max(1, math.ceil((last - first) / 5))))
    powers = range(math.floor(low), math.ceil(high) + 1)
    found = [at for power in powers for factor in (1, 2, 5) if low <= (at := power + math.log10(factor)) <= high]
    return found if len(found) > 1 else ticks(low, high, 3)


def _widen(low: float, high: float, bounds: tuple[float, float] = (-math.inf, math.inf)) -> tuple[float, float]:
    """Two different ends of an axis, within the bounds."""
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return max(low - room, min(low, bounds[0])), min(high + room, max(high, bounds[1]))


def _short(value: float) -> float:
    """A value with the six digits that page.js shows."""
    return float(f"{value:.6g}")
