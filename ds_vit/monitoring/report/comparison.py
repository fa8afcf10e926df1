"""Several runs side by side: which settings differ, what came of each, and how far their losses lie apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_vit.monitoring.report.charts import Series, line_chart
from ds_vit.monitoring.report.html import Html
from ds_vit.monitoring.report.record import Record

_OF_THE_PLACE = ("flag output", "flag resume", "flag deepspeed_config")
_LEAST = 1e-9  # a deviation of 0 has no place on a logarithmic axis


def differences(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """What is not the same in all runs: (name, its value in each run), "-" where a run has none."""
    known = [dict(_settings(record)) for record in records]
    names = list(dict.fromkeys(name for each in known for name in each))
    lines = [(name, *(each.get(name, "-") for each in known)) for name in names if name not in _OF_THE_PLACE]
    return [(name, *map(_cut, values)) for name, *values in lines if len(set(values)) > 1]


def outcomes(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """What came of each run: (name, its value in each run)."""
    summaries = [record.summary for record in records]
    names = list(dict.fromkeys(key for each in summaries for key in each))
    names = [name for name in names if name.startswith(("best_", "last_")) or name in ("images_per_second", "exit")]
    lines = [(name, *(_shown(each.get(name)) for each in summaries)) for name in (*names, "steps", "wall_seconds")]
    loss = [record.points("train", "loss") for record in records]
    lines.append(("last training loss", *(_shown(points[-1][1] if points else None) for points in loss)))
    apart = deviations(records)
    if any(apart):
        largest = (_shown(max((value for _, value in points), default=None)) for points in apart)
        lines.append(("loss, furthest from the first run's", "-", *largest))
    return lines


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
    return line_chart(f"How far the loss lies from that of {records[0].name}", series, log=True, note=note)


def _settings(record: Record) -> Iterator[tuple[str, str]]:
    """Everything that decides a run, by names that say where it stands."""
    yield from ((f"flag {name}", _shown(value)) for name, value in record.config.items())
    yield from ((f"JSON {name}", value) for name, value in _flat(record.deepspeed))
    yield from ((f"layout {name}", _shown(value)) for name, value in record.layout.items())
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


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"
