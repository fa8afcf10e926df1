"""Charts as inline SVG: curves over steps. The page's script shows the values under the pointer."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from ds_vit.monitoring.report.html import Html, join, tag

WIDTH, HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 384, 10, 194
MOST_POINTS = 400
NUM_COLOURS = 8
THIN, _WIDEST = 1.6, 7.0
_LARGEST_DOTS, _ROOM_OF_A_VALUE = 25, 14


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend and under the pointer.
        points: (step, value), steps growing; values finite.
        colour: its number among the page's colours.
        dashed: it has its colour in common with another one.
        width: of the line; a curve that another may cover is wider than that one.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    width: float = THIN

    @property
    def look(self) -> str:
        """Its classes in the page's CSS."""
        return f"c{self.colour % NUM_COLOURS}{' dashed' * self.dashed}{' band' * self.is_band}"

    @property
    def is_band(self) -> bool:
        """Whether it lies broad and pale below others."""
        return self.width > THIN


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step.

    Attributes:
        step: where.
        text: what.
        kind: "resume", "rollback", "skip" or "stop".
    """

    step: int
    text: str
    kind: str


def widths(number: int) -> list[float]:
    """Of so many curves that may cover each other, in the order in which they are drawn: the last is the thinnest."""
    if number < 2:
        return [THIN] * number
    return [THIN + min(3.0, (_WIDEST - THIN) / (number - 1)) * (number - 1 - at) for at in range(number)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log: bool = False,
    note: str = "",
    span: tuple[float, float] | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    aside: Collection[float] = (),
    named: bool = False,
) -> Html:
    """Curves over steps; empty where none has a point.

    Args:
        title: with the unit.
        series: in the order of the legend.
        marks: vertical lines.
        log: a logarithmic axis, whose values must be above 0.
        note: a line below the title.
        span: the steps from left to right; None for those of the curves.
        bounds: beyond which the quantity cannot lie, and so the axis does not go.
        aside: steps whose values set the scale only where there are no others; what lies beyond is drawn at its edge.
        named: a legend for a single curve too.
    """
    series = [replace(one, points=thinned(one.points)) for one in series if one.points]
    if not series:
        return Html("")
    steps = [step for one in series for step, _ in one.points]
    every = [(step, value) for one in series for step, value in one.points]
    values = [value for step, value in every if step not in aside] or [value for _, value in every]
    x = _Axis(*_apart(*(span or (min(steps), max(steps)))), _LEFT + 4, _RIGHT)
    low, high = (math.log10(min(values)), math.log10(max(values))) if log else (min(values), max(values))
    y = _Axis(*_apart(low, high, bounds), _BOTTOM - 6, _TOP + 4)

    def place(value: float) -> float:
        inside = min(max(math.log10(value) if log else value, y.low), y.high)
        return y.place(inside)

    pieces = [*_grid(x, y, log=log)]
    for mark in marks:
        at = f"{x.place(min(max(mark.step, x.low), x.high)):.1f}"
        line = tag("line", x1=at, x2=at, y1=_TOP, y2=_BOTTOM, class_=f"mark {mark.kind}")
        pieces.append(tag("g", tag("title", mark.text), line))
    for one in series:
        pieces += _curve(one, [(x.place(step), place(value)) for step, value in one.points])
    pieces += _lone_values(series, x, place)
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "top": _TOP,
        "bottom": _BOTTOM,
        "marks": [[mark.step, mark.text] for mark in marks],
        "series": [[one.name, one.colour % NUM_COLOURS, [[s, short(v)] for s, v in one.points]] for one in series],
    }
    pieces.append(tag("line", class_="cursor", y1=_TOP, y2=_BOTTOM, x1=-9, x2=-9))
    picture = tag(
        "svg",
        *pieces,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        aria_label=f"{title}, over steps",
        data_chart=json.dumps(data, separators=(",", ":")),
    )
    return card(title, picture, note, legend(series) if named or len(series) > 1 else Html(""))


def _curve(one: Series, spots: Sequence[tuple[float, float]]) -> list[Html]:
    """A line through places, and dots where there are few of them."""
    pieces = []
    if len(spots) > 1:
        path = "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in spots)
        style = f"stroke-width:{one.width:g}" if one.is_band else None
        pieces.append(tag("path", d=path, class_=f"curve {one.look}", style=style))
    if len(spots) <= _LARGEST_DOTS:
        radius = f"{(2 if len(spots) > 1 else 3.5) + 0.5 * (one.width - THIN):.3g}"
        look = f"dot c{one.colour % NUM_COLOURS}{' band' * one.is_band}"
        pieces += [tag("circle", cx=f"{a:.1f}", cy=f"{d:.1f}", r=radius, class_=look) for a, d in spots]
    return pieces


def _lone_values(series: Sequence[Series], x: _Axis, place: Callable[[float], float]) -> list[Html]:
    """The value beside the point of each curve that has one alone: no line leads to it, and the axis says little."""
    pieces: list[Html] = []
    taken: list[float] = []
    for one in series:
        if len(one.points) > 1:
            continue
        (step, value), *_ = one.points
        across, down = x.place(step), place(value)
        if any(abs(down - other) < _ROOM_OF_A_VALUE for other in taken):
            continue
        taken.append(down)
        right = across > (x.start + x.end) / 2
        at = across - 10 if right else across + 10
        look = f"value {'before' if right else 'behind'}"
        pieces.append(tag("text", f"{value:.5g}", x=f"{at:.1f}", y=f"{down:.1f}", class_=look))
    return pieces


def legend(series: Sequence[Series]) -> Html:
    """The names of curves beside their colours."""
    heights = (f"height:{2 * one.width:g}px" if one.is_band else None for one in series)
    items = (
        tag("span", tag("i", class_=f"swatch {one.look}", style=height), one.name, class_="key")
        for one, height in zip(series, heights, strict=True)
    )
    return tag("div", *items, class_="legend")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS`: of each stretch of steps its lowest and its highest, so that no spike is lost."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if len(points) <= MOST_POINTS:
        return points
    kept = {0, len(points) - 1}
    edges = np.linspace(0, len(points), MOST_POINTS // 2).astype(int)
    for first, end in itertools.pairwise(edges):
        stretch = range(first, end)
        kept |= {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def png_uri(image: Image.Image, kind: str = "png", **options: object) -> str:
    """An image as a data: address, so that a page that shows it needs nothing else."""
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def number(value: float) -> str:
    """A number as an axis shows it: 0.25, 12k, 3e-5."""
    if value == 0:
        return "0"
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    if size < 1e-2:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def card(title: str, picture: Html, note: str, key: Html, *, wide: bool = False) -> Html:
    """A picture below its title, a note and what its colours mean; `wide`: over all columns of the page."""
    said = tag("p", note, class_="note") if note else Html("")
    return tag("figure", tag("figcaption", title), said, key, picture, class_=f"card{' wide' * wide}")


@dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high` on places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _apart(low: float, high: float, bounds: tuple[float, float] = (-math.inf, math.inf)) -> tuple[float, float]:
    """Two ends of an axis that are not one, and that lie within what can be."""
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return max(low - room, min(low, bounds[0])), min(high + room, max(high, bounds[1]))


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


def _grid(x: _Axis, y: _Axis, *, log: bool) -> list[Html]:
    pieces = []
    for value in log_ticks(y.low, y.high) if log else ticks(y.low, y.high, 5):
        at = f"{y.place(value):.1f}"
        shown = number(10**value if log else value)
        pieces += [
            tag("line", x1=_LEFT, x2=_RIGHT, y1=at, y2=at, class_="grid"),
            tag("text", shown, x=_LEFT - 6, y=at, class_="left"),
        ]
    for value in ticks(x.low, x.high, 6):
        at = f"{x.place(value):.1f}"
        pieces.append(tag("text", number(value), x=at, y=_BOTTOM + 16, class_="below"))
    pieces.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="axis"))
    return [join(pieces)]


def short(value: float) -> float:
    """A value as the page's script shows it: six digits."""
    return float(f"{value:.6g}")
