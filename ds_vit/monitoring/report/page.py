"""The page: one file that needs no other, of one run or of several side by side."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ds_vit.config.deepspeed_json import leaves
from ds_vit.config.run_folder import written_whole
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.fault_tolerance.errors import written
from ds_vit.monitoring.progress import format_seconds
from ds_vit.monitoring.report.panels import curves, gradients, metric_label
from ds_vit.monitoring.report.record import Record, ranks_in_words
from ds_vit.tasks import panels as drawing
from ds_vit.tasks.panels import NUM_COLOURS, Panel, Series, line_chart, pictures, sheet, table

MAX_REPLICAS, MAX_CELLS = 8, 64
IMAGES = "Images"  # a heading, under which a task has panels too
_SHARDED = {
    1: "the optimizer state",
    2: "the optimizer state and the gradients",
    3: "the optimizer state, the gradients and the weights",
}
_PICTURES = {
    "token-norms": "Images and the norms of their patch tokens after the last block, dark: smallest, bright: largest",
    "attention": "Images and the attention to their patches before the classifier, mean of all heads, bright: largest",
    "patch-pca": "Images and the first three principal components of their patch tokens, as red, green and blue",
}


_OF_THE_PLACE = ("flag output", "flag resume", "flag deepspeed_config")
_UNITS = {
    "JSON train_batch_size": "images",
    "JSON train_micro_batch_size_per_gpu": "images per rank",
    "JSON gradient_accumulation_steps": "micro-batches per step",
    "flag eval_interval": "epochs",
    "flag img_size": "pixels",
    "flag log_interval": "steps",
    "flag max_steps": "optimizer steps",
    "flag validation_batch_size": "images per rank",
    "flag workers": "per rank",
}
_MIN_DEVIATION = 1e-9  # 0 has no place on a logarithmic axis


def write_report(records: Sequence[Record], path: Path) -> None:
    """Write the page of one run, or of several side by side, atomically.

    Raises:
        UserError: the file cannot be written.
    """
    with written(f"{path} could not be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(render(records), encoding="utf-8", errors="replace")


def render(records: Sequence[Record]) -> str:
    """The page of some runs. Every text is escaped by jinja2, so no class or file name can become markup."""
    content = _one(records[0]) if len(records) == 1 else _several(records)
    made = time.strftime("%Y-%m-%d %H:%M")
    title = ", ".join(record.name for record in records)
    return templates().get_template("page.html").render(title=title, made=made, **content)


@functools.cache
def templates() -> Environment:
    """The templates and the constants of tasks/panels.py; a template is compiled once in a process."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {name: value for name, value in vars(drawing).items() if name.isupper()}
    return environment


def _one(record: Record) -> dict[str, Any]:
    data = record.config.get("data_dir") or record.config.get("dataset")
    model = record.config.get("model") or record.summary.get("model")
    sections = {"Over the steps": curves([record]), "Gradients": gradients(record)}
    images = sheet(record.folder.augmented, "Training images of the first step, as the model sees them")
    if isinstance(record.task, str):
        sections["The task"] = [{"kind": "remark", "text": f"The panels of the task are left out: {record.task}."}]
    else:
        for section, panels in record.task.panels(record.folder).items():
            (images if section == IMAGES else sections.setdefault(section, [])).extend(panels)
    sections[IMAGES] = [*images, *_token_maps(record, shows_images=bool(images))]
    sections["Layout"] = [card for card in (_launches(record), _layout(record)) if card]
    return {
        "heading": record.name,
        "end": record.outcome["exit"],
        "about": " · ".join(filter(None, (model, data and f"on {data}", str(record.folder.path)))),
        "tiles": _key_figures(record),
        "sections": [(title, cards) for title, cards in sections.items() if cards],
        "command": record.command,
        "settings": _settings(record),
    }


def _several(records: Sequence[Record]) -> dict[str, Any]:
    names = [record.name for record in records]
    differing = differences(records) or [("nothing except the folder", *("" for _ in records))]
    loss, *others = curves(records)
    return {
        "heading": f"{len(records)} runs",
        "about": ", ".join(str(record.folder.path) for record in records),
        "sections": [
            ("Results", [table("Metrics", ("", *names), outcomes(records), wide=True)]),
            ("Differences", [table("Settings, data, versions, layout", ("", *names), differing, wide=True)]),
            ("Over the steps", [chart for chart in (loss, deviation_chart(records), *others) if chart]),
        ],
    }


def _launches(record: Record) -> Panel | None:
    """A line per launch of a resumed run."""
    found = record.launches
    if len(found) < 2:
        return None
    lines = []
    for at, one in enumerate(found, 1):
        wall = "-" if one.seconds is None else format_seconds(one.seconds)
        lines.append((str(at), one.steps, one.layout, str(one.ranks or "-"), one.device, wall))
    title = f"Resumed run: {len(found)} launches; the picture below shows the last"
    return table(title, ("launch", "steps", "layout", "ranks", "device", "wall time"), lines, wide=True)


def _layout(record: Record) -> Panel | None:
    """Replicas side by side, in each a row per pipeline stage and a cell per rank; the first few of many."""
    if record.layout is None:
        return None
    layout, stage = record.layout
    parts = [f"the blocks are split into {layout.pp} pipeline stages"] * (layout.pp > 1)
    parts += [f"each layer is sharded over {layout.tp} ranks"] * (layout.tp > 1)
    if layout.dp > 1:
        parts += [f"{layout.dp} replicas share each batch"]
        parts += [f"ZeRO shards {_SHARDED[stage]} over them"] if stage else []
    hosts = record.last_start.get("hosts") or ()
    return {
        "kind": "layout",
        "title": f"{layout}, ZeRO-{stage}: {ranks_in_words(layout.world_size)}",
        "note": f"{'; '.join(parts) or 'everything on one rank'}. The loss curve is the same in every layout.",
        "wide": True,
        "degrees": layout,
        "shown": max(1, min(layout.dp, MAX_REPLICAS, MAX_CELLS // (layout.pp * layout.tp))),
        "hosts": hosts,
        "colours": {host: f"c{at % NUM_COLOURS}" for at, host in enumerate(dict.fromkeys(hosts))},
    }


def _key_figures(record: Record) -> list[tuple[str, str]]:
    """(label, value) of the tiles at the top."""
    summary, losses = record.outcome, record.points("train", "loss")
    found = []
    for key, value in summary.items():
        if key.startswith("best_") and value is not None and not record.is_trivial(key):
            label, unit = metric_label(key, [record])
            found.append((label, f"{value:.4g}{' %' * (unit == '%')}"))
    if not any(value.endswith("%") for _, value in found):
        evaluated = {name: record.points("eval", name) for name in record.metrics()}
        found += [(f"last {name}", f"{points[-1][1]:.5g}") for name, points in evaluated.items() if points]
    wall = f"wall time of {len(record.starts)} launches" if len(record.starts) > 1 else "wall time"
    for label, value, show in (
        ("last training loss", losses[-1][1] if losses else None, "{:.4f}".format),
        ("steps", summary["steps"] or 0, "{:,}".format),
        ("images per second", summary.get("images_per_second") or None, "{:,.0f}".format),
        (wall, summary["wall_seconds"], format_seconds),
        ("parameters", summary.get("num_parameters"), lambda number: f"{number / 1e6:.4g} M"),
        ("precision", summary.get("precision"), str),
    ):
        if value is not None:
            found.append((label, show(value)))
    return found


def _token_maps(record: Record, *, shows_images: bool) -> list[Panel]:
    """The pictures of norms, attention and components; or why there are none next to other images."""
    cards = pictures(record.folder, _PICTURES)
    is_pipeline = record.layout is not None and record.layout[0].pp > 1
    if record.classes and (cards or shows_images) and (is_pipeline or record.config.get("sequence_parallel")):
        text = "No norms and attention with --pp or --sequence-parallel: no rank has all tokens."
        cards.append({"kind": "remark", "text": text})
    return cards


def _settings(record: Record) -> list[Panel]:
    lines = [(str(name), str(value)) for name, value in record.config.items()]
    versions = [(name, str(value)) for name, value in (record.last_start.get("versions") or {}).items()]
    cards = [table("config.yaml", ("flag", "value"), lines)] if lines else []
    if record.deepspeed:
        cards.append({"kind": "text", "title": "deepspeed.json", "text": json.dumps(record.deepspeed, indent=2)})
    return [*cards, *([table("Versions", ("package", "version"), versions)] if versions else [])]


# ---- several runs side by side ---------------------------------------------------------------------------------------


def differences(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Settings that are not the same in all runs: (name and unit, value in each run), "-" if a run has none."""
    known = [dict(_defining(record)) for record in records]
    lines = []
    for name in dict.fromkeys(name for each in known for name in each):
        values = [each.get(name, "-") for each in known]
        if name not in _OF_THE_PLACE and len(set(values)) > 1:
            unit = f" ({_UNITS[name]})" if name in _UNITS else ""
            lines.append((name + unit, *(value if len(value) <= 200 else f"{value[:199]}…" for value in values)))
    return lines


def outcomes(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The results: (name and unit, value in each run); if a run had several launches, a line for each of them."""
    summaries = [record.outcome for record in records]
    metrics = [key for key in dict.fromkeys(key for each in summaries for key in each) if key[:5] in ("best_", "last_")]
    metrics = [key for key in metrics if not all(record.is_trivial(key) for record in records)]

    def line(label: str, key: str, digits: int) -> tuple[str, ...]:
        return (label, *(_format(each.get(key), digits) for each in summaries))

    lines = [line(", ".join(filter(None, metric_label(key, records))), key, 5) for key in metrics]
    losses = [record.points("train", "loss") for record in records]
    lines.append(("last training loss", *(_format(points[-1][1] if points else None) for points in losses)))
    if any(apart := deviations(records)):
        largest = (_format(max((value for _, value in points), default=None), 3) for points in apart)
        lines.append((f"loss, largest deviation from {records[0].name} (relative)", "-", *largest))
    lines += [
        line("images per second", "images_per_second", 4),
        line("end", "exit", 6),
        line("steps", "steps", 6),
        line("wall time, s", "wall_seconds", 4),
    ]
    return [*lines, *_launch_lines(records)]


def _launch_lines(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """The launches of each run; nothing if no run was resumed."""
    found = [record.launches for record in records]
    most = max(map(len, found))
    if most < 2:
        return
    yield ("launches (wall time is of all)", *(str(len(each) or "-") for each in found))
    for at in range(most):
        yield (f"launch {at + 1}", *(str(each[at]) if at < len(each) else "-" for each in found))


def deviations(records: Sequence[Record]) -> list[list[tuple[int, float]]]:
    """Of each run but the first: (step, |its loss - the first's| / |the first's|) where both have a row."""
    first, *others = (dict(record.points("train", "loss")) for record in records)
    return [
        [(step, abs(loss - first[step]) / abs(first[step])) for step, loss in other.items() if first.get(step)]
        for other in others
    ]


def deviation_chart(records: Sequence[Record]) -> Panel | None:
    """The deviations over the steps."""
    series = [
        Series(record.name, [(step, max(value, _MIN_DEVIATION)) for step, value in points], at, is_named=True)
        for at, (record, points) in enumerate(zip(records[1:], deviations(records), strict=True), 1)
    ]
    note = f"relative; {_MIN_DEVIATION:g} means equal in every bit"
    return line_chart(f"Deviation of the loss from {records[0].name}", series, log=True, note=note)


def _defining(record: Record) -> Iterator[tuple[str, str]]:
    """Everything that defines a run, by names that say where it is set."""
    deepspeed = leaves(record.deepspeed)
    layouts = record.layouts
    # The JSON and the layout count; flags that set them would repeat them.
    repeated = {flag for flag, key in KEY_OF_FLAG.items() if key in deepspeed} | ({"pp", "tp"} if layouts else set())
    yield from ((f"flag {name}", _format(value)) for name, value in record.config.items() if name not in repeated)
    yield from ((f"JSON {name}", _format(value)) for name, value in deepspeed.items())
    if layouts:
        yield "layout", layouts
    yield from (
        (f"version of {name}", _format(value)) for name, value in (record.last_start.get("versions") or {}).items()
    )
    yield "device", _format(record.last_start.get("device"))
    yield "classes", _format(list(record.classes))


def _format(value: Any, digits: int = 6) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
