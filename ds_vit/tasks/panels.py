"""The panels of a report as plain data, and the sheets of images that some are made of.

A task makes its own (`Task.panels`) of these: line charts, heat maps, tables, sheets and pictures. page.html of
monitoring/report draws them, page.js shows the values under the pointer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from ds_vit.config.run_folder import RunFolder, write_json, written_whole
from ds_vit.data.decode import ImageDecodeError, Jpeg, open_image
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source

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
_LONG_CELL = 20  # letters of a cell that needs a wider column
_MAX_WIDTH = 1200  # pixels of a picture
TILE = 112  # pixels of an image in a sheet
_ACROSS = 8  # images of a sheet


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend and under the pointer.
        points: (step, value), steps growing; values that are not finite are left out.
        colour: index of the page's colours.
        dashed: another curve has the same colour.
        width: of the line; a curve that another may hide is wider than that one, and pale.
        is_named: a legend has it though it is the only curve.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    width: float = THIN
    is_named: bool = False

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
        "legend": series if len(series) > 1 or series[0].is_named else [],
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


def table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], *, wide: bool = False) -> Panel:
    """A table; columns of numbers are aligned to the right.

    With a name in the corner the columns are quantities, and those without any value are left out; without one they are
    runs, and stay.
    """
    kept = [at for at, name in enumerate(header) if not header[0] or any(line[at] not in ("", "-") for line in lines)]
    header, lines = [header[at] for at in kept], [[line[at] for at in kept] for line in lines]

    def look(at: int) -> str:
        if lines and all(line[at][:1].isdigit() or line[at] == "-" for line in lines):
            return "n"
        return "long" if any(len(line[at]) > _LONG_CELL for line in lines) else ""

    looks = [look(at) for at in range(len(header))]
    return {"kind": "table", "title": title, "header": header, "lines": lines, "looks": looks, "wide": wide}


def sheet(path: Path, title: str) -> list[Panel]:
    """The panel of a sheet from `save_sheet`; none where there is no such file."""
    images, captions, num_views = read_sheet(path)
    tiles = [(image_uri(image, "jpeg", quality=88), text) for image, text in zip(images, captions, strict=True)]
    # The crops of a sample stay in a row.
    return [{"kind": "tiles", "title": title, "tiles": tiles, "columns": num_views, "wide": True}] if tiles else []


def pictures(folder: RunFolder, titles: Mapping[str, str]) -> list[Panel]:
    """The panels of pictures of the last evaluation, by their names, as far as there are such files.

    A picture of averaged weights follows those of the weights themselves.
    """
    of_average = {f"ema-{name}": "The same with the moving average of the weights" for name in titles}
    cards = []
    for name, title in {**titles, **of_average}.items():
        with contextlib.suppress(OSError), Image.open(folder.picture(name)) as image:
            shown = image.convert("RGB")
            shown.thumbnail((_MAX_WIDTH, 2 * _MAX_WIDTH))
            uri = image_uri(shown, "jpeg", quality=88)
            cards.append({"kind": "picture", "title": title, "uri": uri, "wide": True})
    return cards


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
    for least, unit, name in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / unit:.4g}{name}"
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


# ---- sheets of images -----------------------------------------------------------------------------------------------


def save_sheet(images: Sequence[Image.Image], captions: Sequence[str], path: Path, num_views: int = 0) -> None:
    """Write images side by side into a PNG, and their captions into the .json next to it.

    Args:
        images: of any size.
        captions: of each.
        path: of the PNG.
        num_views: images of a sample, which a row shows; 0 if each is a sample.

    Raises:
        OSError: it cannot be written.
    """
    across = num_views or _ACROSS
    rows = -(-len(images) // across)
    sheet = Image.new("RGB", (TILE * across, TILE * rows), "white")
    for at, image in enumerate(images):
        resample = Image.Resampling.NEAREST if max(image.size) < TILE else Image.Resampling.BICUBIC
        tile = ImageOps.fit(image.convert("RGB"), (TILE, TILE), resample)
        sheet.paste(tile, (at % across * TILE, at // across * TILE))
    with written_whole(path) as partial:
        sheet.save(partial, format="png")
    write_json(path.with_suffix(".json"), {"tile": TILE, "views": num_views, "captions": list(captions)})


def read_sheet(path: Path) -> tuple[list[Image.Image], list[str], int]:
    """The images, their captions and `num_views` of a sheet from `save_sheet`; none where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        about = json.loads(path.with_suffix(".json").read_text())
        side, captions = about["tile"], about["captions"]
        with Image.open(path) as file:
            whole = file.convert("RGB")
        places = (divmod(at, whole.width // side) for at in range(len(captions)))
        corners = [(column * side, row * side) for row, column in places]
        return [whole.crop((x, y, x + side, y + side)) for x, y in corners], captions, int(about.get("views", 0))
    return [], [], 0


def save_samples(source: Source, captioned: Sequence[tuple[int, str]], path: Path, image: ImageConfig) -> None:
    """Save a sheet of samples with their captions, without those that cannot be decoded; with none, remove it."""
    images, captions = [], []
    for index, caption in captioned:
        with contextlib.suppress(ImageDecodeError):
            found = open_image(source.entry("image", index), source.describe(index), exif_rotation=image.exif_rotation)
            images.append(found.image() if isinstance(found, Jpeg) else found)
            captions.append(caption)
    if images:
        save_sheet(images, captions, path)
    else:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)


def class_name(number: int, classes: Sequence[str]) -> str:
    """The name of a class, also where only its number is known."""
    return classes[number] if number < len(classes) else f"class {number}"
