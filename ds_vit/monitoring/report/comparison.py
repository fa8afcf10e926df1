"""Several runs side by side: which settings differ, what came of each, and how far their losses lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_vit.config.deepspeed_set import KEY_OF_FLAG
from ds_vit.monitoring.report.charts import Series, line_chart
from ds_vit.monitoring.report.html import Html
from ds_vit.monitoring.report.launches import Launch, launches, layouts_in_words
from ds_vit.monitoring.report.panels import in_words
from ds_vit.monitoring.report.record import Record

_OF_THE_PLACE = ("flag output", "flag resume", "flag deepspeed_config")
_UNITS = {
    "JSON train_batch_size": "images",
    "JSON train_micro_batch_size_per_gpu": "images a rank",
    "JSON gradient_accumulation_steps": "micro-batches a step",
    "flag checkpoint_interval": "steps, or with a unit",
    "flag eval_interval": "epochs",
    "flag img_size": "pixels",
    "flag log_interval": "steps",
    "flag max_steps": "optimizer steps",
    "flag validation_batch_size": "images a rank",
    "flag workers": "a rank",
}
_LEAST = 1e-9  # a deviation of 0 has no place on a logarithmic axis


def differences(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """What is not the same in all runs: (name and unit, its value in each run), "-" where a run has none."""
    known = [dict(_settings(record)) for record in records]
    names = list(dict.fromkeys(name for each in known for name in each))
    lines = [(name, *(each.get(name, "-") for each in known)) for name in names if name not in _OF_THE_PLACE]
    units = {name: f" ({_UNITS[name]})" for name in names if name in _UNITS}
    return [(name + units.get(name, ""), *map(_cut, values)) for name, *values in lines if len(set(values)) > 1]


def outcomes(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """What came of each run: (name and unit, its value in each run); where it had several launches, of these too."""
    summaries = [_summed_up(record) for record in records]
    names = list(dict.fromkeys(key for each in summaries for key in each))
    figures = [name for name in names if name.startswith(("best_", "last_"))]
    lines = []
    for name in figures:
        label = ", ".join(filter(None, in_words(name)))
        lines.append((label, *(_shown(each.get(name), 5) for each in summaries)))
    loss = [record.points("train", "loss") for record in records]
    lines.append(("last training loss", *(_shown(points[-1][1] if points else None) for points in loss)))
    apart = deviations(records)
    if any(apart):
        largest = (_shown(max((value for _, value in points), default=None), 3) for points in apart)
        lines.append((f"loss, furthest from that of {records[0].name} (relative)", "-", *largest))
    for label, name, digits in (
        ("images a second", "images_per_second", 4),
        ("end", "exit", 6),
        ("steps", "steps", 6),
        ("wall time, s", "wall_seconds", 4),
    ):
        lines.append((label, *(_shown(each.get(name), digits) for each in summaries)))
    return [*lines, *_launches(records)]


def _summed_up(record: Record) -> Mapping[str, Any]:
    """summary.json; of a run that has come to no end what its last row tells."""
    last = (record.rows.get("train") or [{}])[-1]
    so_far = {"steps": last.get("step"), "wall_seconds": last.get("wall_seconds"), "exit": "no end yet"}
    return {**so_far, **record.summary}


def _launches(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """How often each run was started, and what each launch did; nothing where none went on."""
    found = [launches(record) for record in records]
    most = max(map(len, found))
    if most < 2:
        return
    yield ("launches (wall time is of all)", *(str(len(each) or "-") for each in found))
    for at in range(most):
        told = (each[at] if at < len(each) else None for each in found)
        yield (f"launch {at + 1}", *("-" if one is None else _what_it_did(one) for one in told))


def _what_it_did(launch: Launch) -> str:
    seconds = "" if launch.seconds is None else f" in {launch.seconds:,.0f} s"
    return f"steps {launch.steps}{seconds}: {launch.place}"


def deviations(records: Sequence[Record]) -> list[list[tuple[int, float]]]:
    """Of each run but the first: (step, |its loss - the first's| / |the first's|) where both wrote one down."""
    first, *others = (dict(record.points("train", "loss")) for record in records)
    return [
        [(step, abs(loss - first[step]) / abs(first[step])) for step, loss in other.items() if first.get(step)]
        for other in others
    ]


def deviation_chart(records: Sequence[Record]) -> Html:
    """The deviations over the steps."""
    apart = deviations(records)
    series = [
        Series(record.name, [(step, max(value, _LEAST)) for step, value in points], at)
        for at, (record, points) in enumerate(zip(records[1:], apart, strict=True), 1)
    ]
    note = f"relative; {_LEAST:g} stands for every bit the same"
    return line_chart(f"How far the loss lies from that of {records[0].name}", series, log=True, note=note, named=True)


def _settings(record: Record) -> Iterator[tuple[str, str]]:
    """Everything that decides a run, by names that say where it stands."""
    told = dict(_flat(record.deepspeed))
    layout = layouts_in_words(record)
    # What stands in the JSON and in the layout is what counts: the flags that it came from would only repeat it.
    repeated = {flag for flag, key in KEY_OF_FLAG.items() if key in told} | ({"pp", "tp"} if layout else set())
    yield from ((f"flag {name}", _shown(value)) for name, value in record.config.items() if name not in repeated)
    yield from ((f"JSON {name}", value) for name, value in told.items())
    if layout:
        yield "layout", layout
    if not layout or "zero_optimization.stage" not in told:
        beside = {"pp", "dp", "tp"} if layout else set()
        yield from ((f"layout {name}", _shown(v)) for name, v in record.layout.items() if name not in beside)
    start = record.starts[-1] if record.starts else {}
    yield from ((f"version of {name}", _shown(value)) for name, value in (start.get("versions") or {}).items())
    yield "device", _shown(start.get("device"))
    yield "classes", _shown(list(record.classes))


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{above}{name}.")
        else:
            yield above + name, _shown(item)


def _shown(value: Any, digits: int = 6) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
