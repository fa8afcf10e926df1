"""Charts as inline SVG: curves over steps, and heat maps. The page's script shows the values under the pointer."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from ds_vit.monitoring.report.html import Html, join, tag

WIDTH, HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 384, 10, 194
MOST_POINTS = 400
NUM_COLOURS = 8
# Viridis, which grows evenly in lightness for every kind of colour vision (van der Walt and Smith, matplotlib, CC0).
_VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=float)


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend and under the pointer.
        points: (step, value), steps growing; values finite.
        colour: its number among the page's colours.
        dashed: it has its colour in common with another one.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False

    @property
    def look(self) -> str:
        """Its classes in the page's CSS."""
        return f"c{self.colour % NUM_COLOURS}{' dashed' * self.dashed}"


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


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log: bool = False,
    note: str = "",
    span: tuple[float, float] | None = None,
) -> Html:
    """Curves over steps; empty where none has a point.

    Args:
        title: with the unit.
        series: in the order of the legend.
        marks: vertical lines.
        log: a logarithmic axis, whose values must be above 0.
        note: a line below the title.
        span: the steps from left to right; None for those of the curves.
    """
    series = [replace(one, points=thinned(one.points)) for one in series if one.points]
    if not series:
        return Html("")
    steps = [step for one in series for step, _ in one.points]
    values = [value for one in series for _, value in one.points]
    x = _Axis(*_apart(*(span or (min(steps), max(steps)))), _LEFT + 4, _RIGHT)
    low, high = (math.log10(min(values)), math.log10(max(values))) if log else (min(values), max(values))
    y = _Axis(*_apart(low, high), _BOTTOM - 6, _TOP + 4)

    def place(value: float) -> float:
        return y.place(math.log10(value) if log else value)

    pieces = [*_grid(x, y, log=log)]
    for mark in marks:
        at = f"{x.place(min(max(mark.step, x.low), x.high)):.1f}"
        line = tag("line", x1=at, x2=at, y1=_TOP, y2=_BOTTOM, class_=f"mark {mark.kind}")
        pieces.append(tag("g", tag("title", mark.text), line))
    for one in series:
        spots = [(x.place(step), place(value)) for step, value in one.points]
        if len(spots) > 1:
            path = "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in spots)
            pieces.append(tag("path", d=path, class_=f"curve {one.look}"))
        if len(spots) <= 25:
            pieces += [
                tag("circle", cx=f"{a:.1f}", cy=f"{d:.1f}", r=2, class_=f"dot c{one.colour % NUM_COLOURS}")
                for a, d in spots
            ]
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "top": _TOP,
        "bottom": _BOTTOM,
        "marks": [[mark.step, mark.text] for mark in marks],
        "series": [[one.name, one.colour % NUM_COLOURS, [[s, _short(v)] for s, v in one.points]] for one in series],
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
    return _card(title, picture, note, legend(series) if len(series) > 1 else Html(""))


def legend(series: Sequence[Series]) -> Html:
    """The names of curves beside their colours."""
    items = (tag("span", tag("i", class_=f"swatch {one.look}"), one.name, class_="key") for one in series)
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


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[object],
    values: np.ndarray,
    *,
    of_columns: str,
    note: str = "",
    log: bool = False,
) -> Html:
    """A colour a value, a row a name: layers over steps, or classes over classes.

    Args:
        title: with the unit.
        rows: names from top to bottom.
        columns: what the columns are.
        values: [rows, columns]; one that is not finite (or, on a logarithmic scale, not above 0) stays blank.
        of_columns: what the columns are called.
        note: a line below the title.
        log: colours follow the logarithm.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log10(values) if log else np.asarray(values, dtype=float)
    known = np.isfinite(scaled)
    if not known.any():
        return Html("")
    low, high = scaled[known].min(), scaled[known].max()
    colours = viridis(np.where(known, (scaled - low) / ((high - low) or 1.0), 0.0))
    pixels = np.dstack((colours, np.where(known, 255, 0))).astype(np.uint8)
    data = {
        "rows": list(rows),
        "columns": [str(column) for column in columns],
        "of": of_columns,
        "values": [
            [_short(float(v)) if ok else None for v, ok in zip(*pair, strict=True)]
            for pair in zip(values, known, strict=True)
        ],
    }
    named = len(rows) <= 40
    labels = [tag("span", name) for name in rows] if named else [tag("span", rows[0]), tag("span", rows[-1])]
    picture = tag("div", class_="cells", data_cells=json.dumps(data, separators=(",", ":")))
    image = f'<img alt="" src="{png_uri(Image.fromarray(pixels, "RGBA"))}">'
    picture = Html(picture.replace("></div>", f">{image}</div>"))
    ends = (number(10**low), number(10**high)) if log else (number(low), number(high))
    scale = tag("div", ends[0], tag("i", class_="scale"), ends[1], class_="legend")
    under = tag("div", tag("span", f"{of_columns} {columns[0]}"), tag("span", str(columns[-1])), class_="under")
    style = f"--rows:{len(rows)}"
    body = tag("div", tag("div", *labels, class_="labels"), picture, tag("i"), under, class_="heat", style=style)
    return _card(title, body, note, scale)


def viridis(shares: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1, of any shape, as colours: uint8 [..., 3]."""
    spots = shares * (len(_VIRIDIS) - 1)
    at = np.minimum(spots.astype(int), len(_VIRIDIS) - 2)
    colours = _VIRIDIS[at] + (spots - at)[..., None] * (_VIRIDIS[at + 1] - _VIRIDIS[at])
    return colours.round().astype(np.uint8)


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


def _card(title: str, picture: Html, note: str, key: Html) -> Html:
    said = tag("p", note, class_="note") if note else Html("")
    return tag("figure", tag("figcaption", title), said, key, picture, class_="card")


@dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high` on places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Two bounds that are not one."""
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


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


def _short(value: float) -> float:
    return float(f"{value:.6g}")
