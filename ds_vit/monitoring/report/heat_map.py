"""Heat maps: a table of colours, with its numbers where they fit. The page's script shows what is under the pointer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from PIL import Image

from ds_vit.monitoring.report.charts import card, png_uri, short
from ds_vit.monitoring.report.charts import number as short_number
from ds_vit.monitoring.report.html import Html, tag

# Viridis, which grows evenly in lightness for every kind of colour vision (van der Walt and Smith, matplotlib, CC0).
_VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=float)
FEW = 12  # columns, for which the narrowest card has room
MOST_NUMBERED, MOST_NAMED = 24, 40
_LONGEST_LYING = 3  # letters
_LIGHT = 130  # of 255, above which a cell's number is dark


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[object],
    values: np.ndarray,
    *,
    of_columns: str,
    note: str = "",
    log: bool = False,
    numbers: bool = False,
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
        numbers: the columns have names like the rows, and the values are written into the cells; both where there is
            room for them.
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
            [short(float(v)) if ok else None for v, ok in zip(*pair, strict=True)]
            for pair in zip(values, known, strict=True)
        ],
    }
    labels = [tag("span", name) for name in rows] if len(rows) <= MOST_NAMED else _ends(rows)
    picture = tag("div", class_="cells", data_cells=json.dumps(data, separators=(",", ":")))
    image = f'<img alt="" src="{png_uri(Image.fromarray(pixels, "RGBA"))}">'
    inside = f">{image}{_numbers(values, known, colours) if numbers else ''}</div>"
    picture = Html(picture.replace("></div>", inside))
    ends = (short_number(10**low), short_number(10**high)) if log else (short_number(low), short_number(high))
    scale = tag("div", ends[0], tag("i", class_="scale"), ends[1], class_="legend")
    under = _under(of_columns, [str(column) for column in columns], every=numbers)
    body = tag(
        "div",
        tag("div", *labels, class_="labels"),
        picture,
        tag("i"),
        tag("div", *under, class_="columns"),
        class_=f"heat {_crowd(len(columns))}",
        style=f"--rows:{min(len(rows), MOST_NAMED)};--columns:{len(columns)}",
    )
    return card(title, body, note, scale, wide=numbers and len(columns) > FEW)


def _ends(names: Sequence[str]) -> list[Html]:
    return [tag("span", names[0]), tag("span", names[-1])]


def _crowd(columns: int) -> str:
    """From which width on a card has room for a name and a number a column: page.css."""
    return "few" if columns <= FEW else "some" if columns <= MOST_NAMED else "many"


def _under(of_columns: str, columns: Sequence[str], *, every: bool) -> list[Html]:
    """What stands below: the first column and the last, or a name each where the card has room for them."""
    first, last = tag("span", f"{of_columns} {columns[0]}"), tag("span", columns[-1])
    ends = tag("div", first, last, class_="under ends")
    if not every or len(columns) > MOST_NAMED:
        return [ends]
    upright = any(len(name) > _LONGEST_LYING for name in columns)
    names = tag("div", *(tag("span", name) for name in columns), class_=f"names{' upright' * upright}")
    return [names, tag("div", tag("span", of_columns), class_="under of"), ends]


def _numbers(values: np.ndarray, known: np.ndarray, colours: np.ndarray) -> Html:
    """The values, rounded, over the cells; none for a 0, which is most of them, and nothing where they are too many."""
    if max(values.shape) > MOST_NUMBERED:
        return Html("")
    light = colours @ np.array([0.299, 0.587, 0.114]) > _LIGHT
    cells = [
        tag("span", f"{value:.0f}" if ok and value else "", class_="dark" if bright else None)
        for value, ok, bright in zip(values.ravel(), known.ravel(), light.ravel(), strict=True)
    ]
    return tag("div", *cells, class_="numbers")


def viridis(shares: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1, of any shape, as colours: uint8 [..., 3]."""
    spots = shares * (len(_VIRIDIS) - 1)
    at = np.minimum(spots.astype(int), len(_VIRIDIS) - 2)
    colours = _VIRIDIS[at] + (spots - at)[..., None] * (_VIRIDIS[at + 1] - _VIRIDIS[at])
    return colours.round().astype(np.uint8)
