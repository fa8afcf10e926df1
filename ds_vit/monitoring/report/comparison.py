"""Several runs side by side: settings that differ, results, and the deviation of their losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ds_vit.config.deepspeed_json import leaves
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.monitoring.report.charts import Panel, Series, line_chart
from ds_vit.monitoring.report.panels import metric_label
from ds_vit.monitoring.report.record import Launch, Record

_OF_THE_PLACE = ("flag output", "flag resume", "flag deepspeed_config")
_UNITS = {
    "JSON train_batch_size": "images",
    "JSON train_micro_batch_size_per_gpu": "images per rank",
    "JSON gradient_accumulation_steps": "micro-batches per step",
    "flag checkpoint_interval": "steps, or with a unit",
    "flag eval_interval": "epochs",
    "flag img_size": "pixels",
    "flag log_interval": "steps",
    "flag max_steps": "optimizer steps",
    "flag validation_batch_size": "images per rank",
    "flag workers": "per rank",
}
_MIN_DEVIATION = 1e-9  # 0 has no place on a logarithmic axis


def differences(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Settings that are not the same in all runs: (name and unit, value in each run), "-" if a run has none."""
    known = [dict(_settings(record)) for record in records]
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

    lines = [line(", ".join(filter(None, metric_label(key))), key, 5) for key in metrics]
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
    return [*lines, *_launches(records)]


def _launches(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """The launches of each run; nothing if no run was resumed."""
    found = [record.launches for record in records]
    most = max(map(len, found))
    if most < 2:
        return
    yield ("launches (wall time is of all)", *(str(len(each) or "-") for each in found))
    for at in range(most):
        yield (f"launch {at + 1}", *(_describe(each[at]) if at < len(each) else "-" for each in found))


def _describe(launch: Launch) -> str:
    seconds = "" if launch.seconds is None else f" in {launch.seconds:,.0f} s"
    return f"steps {launch.steps}{seconds}: {launch.place}"


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
        Series(record.name, [(step, max(value, _MIN_DEVIATION)) for step, value in points], at)
        for at, (record, points) in enumerate(zip(records[1:], deviations(records), strict=True), 1)
    ]
    note = f"relative; {_MIN_DEVIATION:g} means equal in every bit"
    return line_chart(f"Deviation of the loss from {records[0].name}", series, log=True, note=note, named=True)


def _settings(record: Record) -> Iterator[tuple[str, str]]:
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
