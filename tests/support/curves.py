"""The same training in two layouts, and whether their curves are the same.

def test_zero_stage_does_not_matter(ranks):
    one = train_in(ranks, 1, [*ARGS, "--deepspeed_config", "ds_configs/cpu_zero1_fp32.json"])
    four = train_in(ranks, 4, [*ARGS, "--deepspeed_config", "ds_configs/cpu_zero3_fp32.json"])
    assert_same_curve(one, four, rtol=1e-5)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ranks import RankPool
from runs import unpredicted

from ds_vit.config.run_folder import RunFolder

Row = Mapping[str, Any]

_MAX_LINES = 12
"""How many parting values a failure lists."""


def read_rows(output: str | Path) -> list[dict[str, Any]]:
    """All rows of `metrics.jsonl` in a run's output folder, as written."""
    return RunFolder(Path(output)).rows()


def train_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of kind "train" in the order of their steps; of a repeated step (after a resume) the later row."""
    by_step = {row["step"]: row for row in rows if row["kind"] == "train"}
    return [by_step[step] for step in sorted(by_step)]


def read_samples(output: Path) -> dict[int, list[int]]:
    """Of a run with --log-samples: step → the samples of its global batch in the order of its rows, as used last."""
    steps: dict[int, dict[int, list[int]]] = {}
    for path in RunFolder(output).samples.iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], {})[line["first_row"]] = line["samples"]
    return {step: list(itertools.chain(*(parts[first] for first in sorted(parts)))) for step, parts in steps.items()}


def evals(rows):
    """What evaluation counted."""
    return [{k: row[k] for k in ("step", "top1", "top5", "images")} for row in rows if row["kind"] == "eval"]


@contextlib.contextmanager
def checkpoints_in_time() -> Iterator[None]:
    """Steps of these models take milliseconds, a busy disk more: so that a checkpoint is of the step that a test names,
    each is on the disk before the next step begins.
    """
    from unittest import mock

    from ds_vit.training.checkpoint_manager import CheckpointManager

    boundary = CheckpointManager.boundary

    def in_time(manager: CheckpointManager, step: int) -> None:
        manager._saver.wait()
        boundary(manager, step)

    with mock.patch.object(CheckpointManager, "boundary", in_time):
        yield


def train_main(argv: list[str]) -> int:
    """What a rank of `train_in` runs: the trainer's own entry point, in the pool's process group."""
    from ds_vit.train import main

    with checkpoints_in_time(), unpredicted():
        code = main(argv)
    assert code != 1, "a bug: its traceback is in this rank's output"
    return code


def train_in(ranks: RankPool, world_size: int, argv: Sequence[str], *, timeout: float = 300.0) -> list[dict[str, Any]]:
    """Train with the command line `argv` on `world_size` ranks, and give all rows of its `metrics.jsonl`.

    The run is written where `--output` in `argv` says, else to a folder that is removed afterwards; without checkpoints
    unless `argv`, or its recipe, asks for them.

    Raises:
        RankFailure: a rank raised, died or hung.
        AssertionError: a rank's exit code was not 0.
    """
    argv = [str(arg) for arg in argv]
    given = [argv[i + 1] for i, arg in enumerate(argv[:-1]) if arg == "--output"]
    given += [arg.removeprefix("--output=") for arg in argv if arg.startswith("--output=")]
    with tempfile.TemporaryDirectory(prefix="train-") as own:
        output = given[-1] if given else own
        if not given:
            argv += ["--output", own]
        if not {"--checkpoint-interval", "--recipe"} & set(argv):
            argv += ["--checkpoint-interval", "0"]
        codes = ranks.run(world_size, train_main, argv, timeout=timeout)
        assert codes == [0] * world_size, f"exit codes of the ranks: {codes}; {' '.join(argv)}"
        return read_rows(output)


def assert_same_curve(
    a: Sequence[Row], b: Sequence[Row], rtol: float, keys: Sequence[str] = ("loss", "grad_norm")
) -> None:
    """Assert that two runs have the same steps and, within rounding, the same values at each.

    Two values agree where `|a - b| <= rtol * max(|a|, |b|)`. None agrees with None only; what is not finite agrees
    with nothing, since a curve that has diverged proves nothing.

    Args:
        a, b: rows of `metrics.jsonl`; only those of kind "train" count.
        rtol: relative tolerance of every single value.
        keys: the columns to compare.

    Raises:
        AssertionError: with a table of the values that part, and the largest deviation of each column.
    """
    __tracebackhide__ = True
    a, b = train_rows(a), train_rows(b)
    steps_a, steps_b = [row["step"] for row in a], [row["step"] for row in b]
    assert steps_a, "the first curve has no training step"
    assert steps_a == steps_b, f"the curves have different steps: {_ranges(steps_a)} and {_ranges(steps_b)}"
    parting, largest = [], []
    for key in keys:
        deviations = [(_deviation(row_a[key], row_b[key]), row_a, row_b) for row_a, row_b in zip(a, b, strict=True)]
        parting += [(key, *d) for d in deviations if not d[0] <= rtol]
        worst, row, _ = max(deviations, key=lambda d: d[0])
        largest.append(f"{key}: largest deviation {worst:.2e} at step {row['step']}")
    if not parting:
        return
    lines = [f"the curves part at {len(parting)} of {len(keys) * len(a)} values (rtol {rtol:g})"]
    lines.append(f"{'step':>6}  {'column':<10} {'first':>16} {'second':>16} {'deviation':>10}")
    parting.sort(key=lambda p: (p[2]["step"], keys.index(p[0])))
    for key, deviation, row_a, row_b in parting[:_MAX_LINES]:
        lines.append(f"{row_a['step']:>6}  {key:<10} {_text(row_a[key])} {_text(row_b[key])} {deviation:>10.2e}")
    if len(parting) > _MAX_LINES:
        lines.append(f"{'':>6}  and {len(parting) - _MAX_LINES} more")
    raise AssertionError("\n".join([*lines, *largest]))


def largest_deviation(a: Sequence[Row], b: Sequence[Row], key: str) -> float:
    """The largest relative deviation of a column over the steps of two runs; infinite where two cannot be compared."""
    rows = zip(train_rows(a), train_rows(b), strict=True)
    return max(_deviation(row_a[key], row_b[key]) for row_a, row_b in rows)


def _deviation(x: float | None, y: float | None) -> float:
    """`|x - y|` in units of the larger magnitude; infinite where the two cannot be compared."""
    if x is None or y is None:
        return 0.0 if x is y else math.inf
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0


def _text(value: float | None) -> str:
    return f"{'none' if value is None else format(value, '.10g'):>16}"


def _ranges(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"
