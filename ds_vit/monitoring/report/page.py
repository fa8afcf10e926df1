"""The page itself: one file that needs no other, of one run or of several beside each other."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from ds_vit.monitoring.report.charts import png_uri
from ds_vit.monitoring.report.classes import class_panels
from ds_vit.monitoring.report.comparison import deviation_chart, differences, outcomes
from ds_vit.monitoring.report.html import Html, join, tag
from ds_vit.monitoring.report.launches import launches
from ds_vit.monitoring.report.layout_picture import layout_picture
from ds_vit.monitoring.report.panels import curves, gradients, in_words
from ds_vit.monitoring.report.record import Record
from ds_vit.monitoring.report.tables import table
from ds_vit.parallel.layout import Layout

_HERE = Path(__file__).parent
_WIDEST = 1200  # pixels of a picture


def render(records: Sequence[Record]) -> str:
    """The page of some runs."""
    parts = _one(records[0]) if len(records) == 1 else _several(records)
    title = records[0].name if len(records) == 1 else ", ".join(record.name for record in records)
    return join(
        [
            Html('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            # Nothing may be fetched, whatever stands in the page.
            Html('<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '),
            Html("style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"),
            Html('<link rel="icon" href="data:,">'),
            tag("title", f"{title} - ds_vit"),
            Html(f"<style>\n{(_HERE / 'page.css').read_text()}</style></head>\n<body>"),
            tag("main", *parts, tag("footer", f"ds_vit, {time.strftime('%Y-%m-%d %H:%M')}")),
            Html(f'<div id="tip"></div><script>\n{(_HERE / "page.js").read_text()}</script></body></html>\n'),
        ]
    )


def _one(record: Record) -> list[Html]:
    layout = record.layout
    zero = layout.pop("zero_stage", None)
    start = record.starts[-1] if record.starts else {}
    picture = layout_picture(Layout(**layout), zero, start.get("hosts") or ()) if layout else Html("")
    return [
        _head(record),
        *_section("Over the steps", curves([record])),
        *_section("Gradients", gradients(record)),
        *_section("Classes", class_panels(record)),
        *_section("Images", _pictures(record)),
        *_section("Layout", [card for card in (_launches(record), picture, _predicted(record)) if card]),
        tag("h2", "Run it again"),
        tag("pre", record.command),
        _settings(record),
    ]


def _launches(record: Record) -> Html:
    """A line a launch, of a run that went on."""
    found = launches(record)
    if len(found) < 2:
        return Html("")
    lines = [
        (str(at), one.steps, one.layout, str(one.ranks or "-"), one.device, _duration_or_dash(one.seconds))
        for at, one in enumerate(found, 1)
    ]
    title = f"The run went on: {len(found)} launches; the picture below is of the last"
    return table(title, ("launch", "steps", "layout", "ranks", "device", "wall time"), lines, wide=True)


def _predicted(record: Record) -> Html:
    """What the planner said of memory and time, beside what was measured."""
    lines = []
    memory, times = record.summary.get("memory") or {}, record.summary.get("step_seconds") or {}
    for name, of, key, factor, unit in (
        ("memory of the fullest rank", memory, "_bytes", 1e-9, "GB"),
        ("an optimizer step", times, "", 1.0, "s"),
    ):
        predicted, measured = of.get(f"predicted{key}"), of.get(f"measured{key}")
        if predicted and measured:
            lines.append((name, *(f"{factor * value:.3g} {unit}" for value in (predicted, measured))))
    if not lines:
        return Html("")
    on_cpu = record.starts and record.starts[-1].get("device") == "cpu"
    title = "Predicted and measured" + (", on a CPU with all that the process takes" if on_cpu else "")
    return table(title, ("", "predicted", "measured"), lines, wide=True)


def _several(records: Sequence[Record]) -> list[Html]:
    names = [record.name for record in records]
    lines = differences(records)
    nothing = [("nothing but the place", *("" for _ in records))]
    loss, *others = curves(records)
    charts = [loss, deviation_chart(records), *others]
    return [
        tag("h1", f"{len(records)} runs"),
        tag("p", ", ".join(str(record.folder.path) for record in records), class_="sub"),
        tag("h2", "What came of them"),
        table("Figures", ("", *names), outcomes(records), wide=True),
        tag("h2", "What differs"),
        table("Settings, data, versions, layout", ("", *names), lines or nothing, wide=True),
        *_section("Over the steps", [chart for chart in charts if chart]),
    ]


def _section(title: str, cards: Sequence[Html]) -> list[Html]:
    return [tag("h2", title), tag("div", *cards, class_="grid")] if cards else []


def _head(record: Record) -> Html:
    summary = record.summary
    end = str(summary.get("exit", "no end yet"))
    badge = tag("span", end, class_=f"badge {'completed' if end == 'completed' else 'other'}")
    about = [str(record.config.get("model") or summary.get("model") or "")]
    data = record.config.get("data_dir") or record.config.get("dataset")
    about += [f"on {data}"] if data else []
    about += [str(record.folder.path)]
    tiles = [tag("div", tag("b", value), tag("span", label), class_="tile") for label, value in _key_figures(record)]
    return tag(
        "header",
        tag("h1", record.name, badge),
        tag("p", " · ".join(part for part in about if part), class_="sub"),
        tag("div", *tiles, class_="tiles"),
    )


def _key_figures(record: Record) -> list[tuple[str, str]]:
    summary, rows = record.summary, record.rows.get("train", ())
    found = []
    for key, value in summary.items():
        if key.startswith("best_") and value is not None:
            label, unit = in_words(key)
            found.append((label, f"{value:.4g}{' %' * (unit == '%')}"))
    if not any("top" in label for label, _ in found):
        found += [
            (f"last {name}", f"{points[-1][1]:.5g}")
            for name in record.figures()
            if (points := record.points("eval", name))
        ]
    if rows and rows[-1].get("loss") is not None:
        found.append(("last training loss", f"{rows[-1]['loss']:.4f}"))
    steps = summary.get("steps") or (rows[-1]["step"] if rows else 0)
    found.append(("steps", f"{steps:,}"))
    if summary.get("images_per_second"):
        found.append(("images a second", f"{summary['images_per_second']:,.0f}"))
    seconds = summary.get("wall_seconds") or (rows[-1].get("wall_seconds") if rows else None)
    if seconds:
        number = len(record.starts)
        found.append((f"wall time of {number} launches" if number > 1 else "wall time", _duration(seconds)))
    if summary.get("num_parameters"):
        found.append(("parameters", f"{summary['num_parameters'] / 1e6:.4g} M"))
    if summary.get("precision"):
        found.append(("precision", str(summary["precision"])))
    return found


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _duration_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else _duration(seconds)


def _pictures(record: Record) -> list[Html]:
    """The pictures that lie in the folder: training images as the model saw them, surest mistakes, what MAE painted."""
    folder, cards = record.folder, []
    for sheet, title in (
        (folder.augmented, "Training images of the first step, as the model sees them"),
        (folder.mistakes, "The surest mistakes of the last evaluation"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = json.loads(sheet.with_suffix(".json").read_text())
            with Image.open(sheet) as image:
                tiles = _tiles(image, told["tile"], told["captions"])
            cards.append(
                tag("figure", tag("figcaption", title), tag("div", *tiles, class_="tilesheet"), class_="card wide")
            )
    for name, title in (
        ("reconstruction", "Images, what is left of them, what is painted, and both together"),
        ("ema-reconstruction", "The same with the moving average of the weights"),
        (
            "token-norms",
            "Validation images, and how long the last block leaves the tokens of their patches: dark is the shortest "
            "of an image, bright the longest",
        ),
        (
            "attention",
            "Validation images, and the attention that their patches get in the last step before the classifier, "
            "mean of all heads: bright is the most of an image",
        ),
    ):
        with contextlib.suppress(OSError), Image.open(folder.picture(name)) as image:
            uri = _as_jpeg(image)
            shown = Html(f'<img class="picture" alt="" src="{uri}">')
            cards.append(tag("figure", tag("figcaption", title), shown, class_="card wide"))
    cut = record.layout.get("pp", 1) > 1 or record.config.get("sequence_parallel")
    if cut and record.classes and cards:
        said = "Norms and attention are drawn where one rank sees all tokens: without --pp, --sequence-parallel."
        cards.append(tag("p", said, class_="note"))
    return cards


def _tiles(sheet: Image.Image, side: int, captions: Sequence[str]) -> list[Html]:
    """A contact sheet cut into its images, each over its words."""
    across = sheet.width // side
    tiles = []
    for at, caption in enumerate(captions):
        left, top = at % across * side, at // across * side
        image = sheet.crop((left, top, left + side, top + side)).convert("RGB")
        tiles.append(tag("div", Html(f'<img alt="" src="{png_uri(image, "jpeg", quality=88)}">'), caption))
    return tiles


def _as_jpeg(image: Image.Image) -> str:
    image = image.convert("RGB")
    image.thumbnail((_WIDEST, 2 * _WIDEST))
    return png_uri(image, "jpeg", quality=88)


def _settings(record: Record) -> Html:
    lines = [(str(name), str(value)) for name, value in record.config.items()]
    start = record.starts[-1] if record.starts else {}
    versions = [(name, str(value)) for name, value in (start.get("versions") or {}).items()]
    cards = [table("config.yaml", ("flag", "value"), lines)] if lines else []
    if record.deepspeed:
        text = tag("pre", json.dumps(record.deepspeed, indent=2))
        cards.append(
            tag("figure", tag("figcaption", "deepspeed.json"), tag("div", text, class_="scroll"), class_="card")
        )
    cards += [table("Versions", ("package", "version"), versions)] if versions else []
    return tag("details", tag("summary", "All settings"), tag("div", *cards, class_="grid")) if cards else Html("")
