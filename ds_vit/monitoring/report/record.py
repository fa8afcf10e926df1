"""A run as its folder tells it, whatever of it is there: a run that was killed has a report too."""

from __future__ import annotations

import contextlib
import csv
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ds_vit.config.run_folder import RunFolder
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.report.charts import Mark

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What is known of a run.

    Attributes:
        folder: of the run.
        name: what to call it, unlike those of the others of a page.
        config: config.yaml.
        deepspeed: deepspeed.json.
        summary: summary.json; empty for a run that came to no end.
        rows: kind → the rows of metrics.jsonl, in the order of their steps; of a repeated step the later one.
        starts: starts.jsonl, a row a process that worked on the run.
        classes: the names of the classes.
        predictions: predictions.csv, a row a validation image, surest first.
    """

    folder: RunFolder
    name: str
    config: Mapping[str, Any]
    deepspeed: Mapping[str, Any]
    summary: Mapping[str, Any]
    rows: Mapping[str, Sequence[Row]]
    starts: Sequence[Row]
    classes: Sequence[str]
    predictions: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> Record:
        """Read a run's folder.

        Args:
            path: of the folder.
            name: as above; None for the folder's own.

        Raises:
            UserError: there is no run in it.
        """
        folder = RunFolder(path)
        if not folder.metrics.is_file():
            raise UserError(f"{path}: there is no metrics.jsonl; give a run's --output folder")
        by_kind = _rows_by_kind(_json_lines(folder.metrics))
        config: Any = {}
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            config = yaml.safe_load(folder.config.read_text())
        classes = _json(folder.classes, [])
        return cls(
            folder=folder,
            name=name or path.resolve().name,
            config=config if isinstance(config, dict) else {},
            deepspeed=_json(folder.deepspeed, {}),
            summary=_json(folder.summary, {}),
            rows={kind: [rows[step] for step in sorted(rows)] for kind, rows in by_kind.items()},
            starts=_json_lines(folder.starts),
            classes=[str(each) for each in classes],
            predictions=_predictions(folder.predictions),
        )

    def points(self, kind: str, key: str, factor: float = 1.0) -> list[tuple[int, float]]:
        """(step, value) of a figure, where there is one."""
        rows = self.rows.get(kind, ())
        return [(row["step"], factor * row[key]) for row in rows if isinstance(row.get(key), (int, float))]

    def figures(self, kind: str = "eval") -> list[str]:
        """The names of what its evaluations measured."""
        found = {key: None for row in self.rows.get(kind, ()) for key in row}
        beside = {"kind", "step", "epoch", "wall_seconds", "images", "skipped_images"}
        return [name for name in found if name not in beside]

    @property
    def layout(self) -> dict[str, int]:
        """Degrees pp, dp, tp and zero_stage at its last start; empty where neither file tells."""
        return dict(self.summary.get("layout") or (self.starts[-1].get("layout") if self.starts else None) or {})

    @property
    def world_size(self) -> int:
        """The ranks of its last start, 1 where that is not known."""
        layout = self.layout
        return layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)

    @property
    def marks(self) -> list[Mark]:
        """What happened on the way: resumes, rollbacks, steps that were not applied, an end that was no end."""
        marks = [
            Mark(start["step"], f"step {start['step']}: went on in another process{_ranks(start)}", "resume")
            for start in self.starts
            if start.get("step")
        ]
        for row in self.rows.get("rollback", ()):
            text = f"step {row['step']}: rolled back to step {row.get('to_step')} ({row.get('reason')})"
            marks.append(Mark(row["step"], text, "rollback"))
        skips = self.rows.get("skip", ())
        marks += [Mark(row["step"], f"step {row['step']} was skipped ({row.get('reason')})", "skip") for row in skips]
        if self.summary.get("exit") == "interrupted":
            marks.append(Mark(self.summary["steps"], f"step {self.summary['steps']}: interrupted", "stop"))
        return sorted(marks, key=lambda mark: mark.step)

    @property
    def command(self) -> str:
        """What a person types to run it again, quoted for a shell."""
        words = ["--recipe", str(self.folder.config), "--output", f"{self.folder.path}-again"]
        if self.world_size == 1:
            return shlex.join(["ds-vit", "train", *words])
        on_cpu = self.starts and self.starts[-1].get("device") == "cpu"
        hosts = len(set(self.starts[-1].get("hosts") or ())) if self.starts else 1
        if hosts > 1:
            launcher = ["deepspeed", "--hostfile", "hostfile"]
        else:
            launcher = ["deepspeed", "--num_accelerators" if on_cpu else "--num_gpus", str(self.world_size)]
        return ("DS_ACCELERATOR=cpu " if on_cpu else "") + shlex.join([*launcher, "launch/train.py", *words])


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Runs, each under a name of its own: its folder's, with as many of the folders above as tell it apart.

    Raises:
        UserError: one of them is no run, or stands twice.
    """
    resolved = [path.resolve() for path in paths]
    for at, path in enumerate(resolved):
        if path in resolved[:at]:
            raise UserError(f"{paths[at]} stands twice")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return [Record.read(path, "/".join(path.resolve().parts[-depth:])) for path in paths]


def _ranks(start: Row) -> str:
    layout = start.get("layout") or {}
    return f" (pp {layout.get('pp')} x dp {layout.get('dp')} x tp {layout.get('tp')})" if layout else ""


def _json(path: Path, instead: Any) -> Any:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        return value if isinstance(value, type(instead)) else instead
    return instead


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, but for one that a killed process left half-written; none where there is no file."""
    rows = []
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _rows_by_kind(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Kind → step → its last row. What was measured on steps that a resume or a rollback took back is left out."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        step, kind = row.get("step"), str(row.get("kind"))
        if not isinstance(step, int):
            continue
        taken_back = step if kind == "train" else row.get("to_step", step) + 1 if kind == "rollback" else None
        if taken_back is not None:
            for measured in ("train", "eval", "eval_ema", "gradients"):
                by_step = found.get(measured, {})
                # A step's gradients are written down before its loss.
                first = taken_back + 1 if (kind, measured) == ("train", "gradients") else taken_back
                while by_step and next(reversed(by_step)) >= first:
                    by_step.popitem()
        found.setdefault(kind, {})[step] = row
    return found


def _predictions(path: Path) -> list[dict[str, str]]:
    with contextlib.suppress(OSError), path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))
    return []
