"""A run as its folder describes it, as far as it came: a run that was killed has a report too."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from ds_vit.config.run_folder import RunFolder, to_json
from ds_vit.device import hardware_name
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.this_host import versions
from ds_vit.optim.schedules import LearningRate
from ds_vit.parallel.layout import Layout
from ds_vit.tasks.panels import MAX_POINTS, Mark
from ds_vit.tasks.registry import task_of
from ds_vit.tasks.task import Task

Row = Mapping[str, Any]
_NO_METRIC = {"kind", "step", "epoch", "wall_seconds", "images", "skipped_images"}


@dataclass(frozen=True)
class Launch:
    """The work of one launch, all its ranks together.

    Attributes:
        done_before: optimizer steps before it.
        done: optimizer steps at its end; steps that a later launch repeated do not count.
        layout: degrees, ZeRO stage and precision; empty if starts.jsonl lacks them.
        ranks: their number; 0 if unknown.
        device: name of the accelerator, or "cpu".
        seconds: wall time of these steps; None if metrics.jsonl lacks it.
    """

    done_before: int
    done: int
    layout: str
    ranks: int
    device: str
    seconds: float | None

    @property
    def steps(self) -> str:
        """The steps of this launch that remained."""
        return f"{self.done_before + 1:,} to {self.done:,}" if self.done > self.done_before else "none that stayed"

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f" in {self.seconds:,.0f} s"
        place = ", ".join(filter(None, (self.layout, ranks_in_words(self.ranks), self.device)))
        return f"steps {self.steps}{seconds}: {place}"


@dataclass(frozen=True)
class Record:
    """What is known of a run.

    Attributes:
        folder: of the run.
        name: unique among the runs of a page.
        config: config.yaml.
        deepspeed: deepspeed.json.
        summary: summary.json; empty if the run has not ended.
        rows: kind → rows of metrics.jsonl by step; of a repeated step the later one.
        starts: starts.jsonl, one row per launch.
        classes: class names.
    """

    folder: RunFolder
    name: str
    config: Mapping[str, Any]
    deepspeed: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Mapping[str, Sequence[Row]]
    starts: Sequence[Row]
    classes: Sequence[str]

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> Record:
        """Read a run's folder; `name` defaults to the folder's.

        Raises:
            UserError: there is no run in it.
        """
        folder = RunFolder(path)
        if not folder.metrics.is_file():
            raise UserError(f"{path}: there is no metrics.jsonl; give a run's --output folder")
        by_kind = _rows_by_kind(_json_lines(folder.metrics))
        return cls(
            folder=folder,
            name=name or path.resolve().name,
            config=_mapping(folder.config, yaml.safe_load),
            deepspeed=_mapping(folder.deepspeed, json.loads),
            summary=_mapping(folder.summary, json.loads),
            rows={kind: [rows[step] for step in sorted(rows)] for kind, rows in by_kind.items()},
            starts=_json_lines(folder.starts),
            classes=folder.read_classes(),
        )

    @cached_property
    def task(self) -> type[Task] | str:
        """The class of its task; where that cannot be imported, one line that says so."""
        try:
            return task_of(self.config)
        except UserError as error:
            return str(error)

    def points(self, kind: str, key: str, factor: float = 1.0) -> list[tuple[int, float]]:
        """(step, value) of a metric, where there is one."""
        rows = self.rows.get(kind, ())
        return [(row["step"], factor * row[key]) for row in rows if isinstance(row.get(key), (int, float))]

    def metrics(self, kind: str = "eval") -> list[str]:
        """The names of the metrics of its evaluations."""
        return [
            name
            for name in dict.fromkeys(key for row in self.rows.get(kind, ()) for key in row)
            if name not in _NO_METRIC and not self.is_trivial(name)
        ]

    def is_trivial(self, metric: str) -> bool:
        """Whether every model has 100 %: top-5 among at most five classes; `metric` may be a key of summary.json."""
        name = metric.removeprefix("best_").removeprefix("last_").removesuffix("_ema")
        return name == "top5" and 0 < (self.config.get("num_classes") or len(self.classes)) <= 5

    @property
    def outcome(self) -> Row:
        """summary.json; of a run that has not ended, what its last row says of it."""
        last = (self.rows.get("train") or [{}])[-1]
        so_far = {"exit": "not ended", "steps": last.get("step"), "wall_seconds": last.get("wall_seconds")}
        return {**so_far, **self.summary}

    @property
    def last_start(self) -> Row:
        """The row of its last launch; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def on_cpu(self) -> bool:
        """Whether its last launch ran on a CPU."""
        return self.last_start.get("device") == "cpu"

    @property
    def layout(self) -> tuple[Layout, int] | None:
        """The layout and ZeRO stage of its last launch; None if unknown."""
        return _layout_of(self.summary) or _layout_of(self.last_start)

    @property
    def layouts(self) -> str:
        """The layouts of its launches, one after the other; empty if unknown."""
        found = (f"{one.layout} ({ranks_in_words(one.ranks)})" for one in self.launches if one.layout)
        return ", then ".join(layout for layout, _ in itertools.groupby(found))

    @property
    def marks(self) -> list[Mark]:
        """Resumes, rollbacks, skipped steps and an interruption."""
        marks = []
        for start in self.starts:
            if start["step"]:
                layout = _layout_of(start)
                text = f"step {start['step']}: resumed in another process{f' ({layout[0]})' if layout else ''}"
                marks.append(Mark(start["step"], text, "resume"))
        for row in self.rows.get("rollback", ()):
            text = f"step {row['step']}: rolled back to step {row.get('to_step')} ({row.get('reason')})"
            marks.append(Mark(row["step"], text, "rollback"))
        for row in self.rows.get("skip", ()):
            marks.append(Mark(row["step"], f"step {row['step']} was skipped ({row.get('reason')})", "skip"))
        if self.summary.get("exit") == "interrupted":
            marks.append(Mark(self.summary["steps"], f"step {self.summary['steps']}: interrupted", "stop"))
        return sorted(marks, key=lambda mark: mark.step)

    @property
    def launches(self) -> list[Launch]:
        """In order; empty if the folder has no starts.jsonl."""
        before = [start["step"] for start in self.starts]
        found = []
        for at, start in enumerate(self.starts):
            # A launch that resumed from an earlier step repeated the steps after it.
            end = max(before[at], min([self.outcome["steps"] or 0, *before[at + 1 :]]))
            total = self.summary.get("wall_seconds") if at == len(self.starts) - 1 else None
            seconds = (total or self._seconds_at(end)) - self._seconds_at(before[at])
            layout = _layout_of(start)
            words = [str(layout[0]), f"ZeRO-{layout[1]}", start.get("precision") or ""] if layout else []
            ranks = layout[0].world_size if layout else 0
            described = ", ".join(filter(None, words))
            found.append(Launch(before[at], end, described, ranks, start.get("device") or "", seconds or None))
        return found

    @property
    def rates(self) -> list[tuple[int, float]]:
        """(step, learning rate) by the schedule of each launch; as logged if the JSON's scheduler sets it."""
        points: dict[int, float] = {}
        for launch, start in zip(self.launches, self.starts, strict=True):
            try:
                schedule = LearningRate(**start["schedule"])
            except (KeyError, TypeError, UserError):
                return self.points("train", "lr")
            steps = range(launch.done_before, launch.done)
            corners = {schedule.warmup_steps, launch.done - 1}
            shown = {*steps[:: max(1, len(steps) // MAX_POINTS)], *(step for step in corners if step in steps)}
            points |= {step + 1: schedule.lr(step) for step in sorted(shown)}
        return list(points.items()) or self.points("train", "lr")

    @property
    def first_steps(self) -> list[int]:
        """The step of the first training row of each launch, in which its loader starts."""
        steps = [row["step"] for row in self.rows.get("train", ())]
        before = [start["step"] for start in self.starts] or [0]
        firsts = (next((step for step in steps if step > done), None) for done in before)
        return sorted({step for step in firsts if step is not None})

    @property
    def command(self) -> str:
        """The command that repeats the run, quoted for a shell."""
        words = ["--recipe", str(self.folder.config), "--output", f"{self.folder.path}-again"]
        num_ranks = self.layout[0].world_size if self.layout else 1
        if num_ranks == 1:
            return shlex.join(["ds-vit", "train", *words])
        launcher = ["deepspeed", "--num_accelerators" if self.on_cpu else "--num_gpus", str(num_ranks)]
        if len(set(self.last_start.get("hosts") or ())) > 1:
            launcher = ["deepspeed", "--hostfile", "hostfile"]
        return "DS_ACCELERATOR=cpu " * self.on_cpu + shlex.join([*launcher, "launch/train.py", *words])

    def _seconds_at(self, step: int) -> float:
        """Wall time of the run after so many steps, from the last row up to there; 0 if no row has it."""
        rows = [row for kind in ("train", "checkpoint") for row in self.rows.get(kind, ()) if row["step"] <= step]
        return max((row["wall_seconds"] for row in rows if "wall_seconds" in row), default=0.0)


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Runs under unique names: each folder's, with as many parent folders as needed.

    Raises:
        UserError: one of them is no run, or is given twice.
    """
    resolved = [path.resolve() for path in paths]
    if repeated := next((path for at, path in enumerate(resolved) if path in resolved[:at]), None):
        raise UserError(f"{repeated} is given twice")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return [Record.read(path, "/".join(path.resolve().parts[-depth:])) for path in paths]


def _layout_of(row: Row) -> tuple[Layout, int] | None:
    """Degrees and ZeRO stage in a row of starts.jsonl or in summary.json; None if it has none."""
    degrees = dict(row.get("layout") or {})
    return (Layout(degrees["pp"], degrees["dp"], degrees["tp"]), degrees["zero_stage"]) if degrees else None


def ranks_in_words(number: int) -> str:
    """`1 rank`, `4 ranks`; empty for 0."""
    return f"{number} rank{'s' * (number > 1)}" if number else ""


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The contents of a file; empty where there is no whole one."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        contents = parse(path.read_text(encoding="utf-8"))
        return contents if isinstance(contents, dict) else {}
    return {}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, except one that a killed process left incomplete; none if there is no file."""
    rows = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _rows_by_kind(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Kind → step → its last row, without the rows of steps that a resume or a rollback repeated."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        step, kind = row.get("step"), str(row.get("kind"))
        if not isinstance(step, int):
            continue
        if kind in ("train", "rollback"):
            repeated = step if kind == "train" else row.get("to_step", step) + 1
            for measured in ("train", "eval", "eval_ema", "gradients"):
                by_step = found.get(measured, {})
                # The gradients of a step are written before its loss.
                first = repeated + 1 if (kind, measured) == ("train", "gradients") else repeated
                while by_step and next(reversed(by_step)) >= first:
                    by_step.popitem()
        found.setdefault(kind, {})[step] = row
    return found


# ---- starts.jsonl: a row per launch, for the marks, launches and versions of the report ------------------------------


def note_start(
    folder: RunFolder,
    step: int,
    layout: Layout,
    zero_stage: int,
    device: torch.device,
    hosts: Sequence[str],
    schedule: LearningRate | None = None,
    precision: str = "",
) -> None:
    """Append the row of this launch; a write error loses only the row.

    Args:
        folder: of the run.
        step: optimizer steps completed before.
        layout: of the ranks.
        zero_stage: of DeepSpeed's ZeRO.
        device: of this rank.
        hosts: host name of each rank; empty if there is one host.
        schedule: of the learning rate; None if the JSON has a scheduler.
        precision: its name.
    """
    row = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": {**asdict(layout), "zero_stage": zero_stage},
        "precision": precision,
        "device": hardware_name(device) or device.type,
        "hosts": list(hosts),
        "schedule": schedule and asdict(schedule),
        "versions": versions(),
    }
    with contextlib.suppress(OSError), folder.starts.open("a") as file:
        file.write(to_json(row) + "\n")


def num_starts(folder: RunFolder) -> int:
    """The number of launches of a run, including this one; 1 without a file."""
    with contextlib.suppress(OSError):
        return max(1, folder.starts.read_text().count("\n"))
    return 1
