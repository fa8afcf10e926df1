"""Is the layout a hyper-parameter here? A few steps in each layout, against one reference, on this cluster.

deepspeed launch/parity.py --deepspeed_config FILE [flags of train.py] [--layouts "pp2 tp2, tp2 --sequence-parallel"]

Every layout takes all ranks of the launch (dp follows from pp and tp), the same global batch (accumulation follows
from dp) and the same initial values. Each is trained in new processes (relaunch.py says why) by the trainer's own
`prepare`, `build_engine` and `InputPipeline`. Rank 0 prints a row a layout: the largest relative deviations from the
reference; while it works, stderr says what is under way.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_vit.fault_tolerance import exit_codes
from ds_vit.launching.process import Process
from ds_vit.monitoring.metrics import make_console
from ds_vit.tools.parity.progress import Progress
from ds_vit.tools.parity.relaunch import Failure, Relauncher
from ds_vit.tools.parity.request import Cut, Request, parse
from ds_vit.tools.parity.runs import Curve, Survey, survey, train_one
from ds_vit.training.program import guarded

# The largest relative deviations of (loss, gradient norm, weights) that are rounding. In fp32 all are below 2e-6 where
# nothing is wrong. In bf16 the loss may be 0.3 % away; the norm and the weights, of which some start at zero and so
# are all gradient, get 5 and 3 times what was measured (6e-3, 7e-2). fp16 has 3 more bits: an eighth of bf16's.
TOLERANCES = {
    "fp32": (1e-5, 1e-5, 1e-5),
    "bf16": (3e-3, 3e-2, 2e-1),
    "autocast-bf16": (3e-3, 3e-2, 2e-1),
    "fp16": (4e-4, 4e-3, 2.5e-2),
    "autocast-fp16": (4e-4, 4e-3, 2.5e-2),
}


@dataclass(frozen=True)
class Row:
    """A layout in the matrix.

    Attributes:
        name: the layout as written.
        loss: largest relative deviation of a step's loss.
        norm: the same of the gradient norm before clipping.
        weight: the tensor that is farthest from the reference's after the last step, and how far.
        problem: why there is nothing to compare: it is illegal here, or failed.
        failed: whether this breaks the promise.
    """

    name: str
    loss: float = math.nan
    norm: float = math.nan
    weight: tuple[str, float] = ("", math.nan)
    problem: str = ""
    failed: bool = False

    @property
    def verdict(self) -> str:
        """The last column."""
        if self.problem:
            return "failed" if self.failed else "not legal"
        return "DEVIATES" if self.failed else "same"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch/parity.py` with these arguments, on every rank of the launch.

    Returns:
        0 where every layout trains the same; 1 where one deviates by more than the tolerance, or fails; 2 for input
        that cannot be, where one line on stderr says what is wrong and what to do.
    """

    def body(process: Process) -> int:
        request = parse(argv)
        ranks = Relauncher(process, verbose=bool(request.values.get("verbose")))
        try:
            with Progress.of_rank(process.rank).doing("preparing the layouts; new processes import torch"):
                found = ranks.run(survey, request)
            code = int(compare(ranks, request, found))
        except Failure as error:
            if process.rank == 0:
                print(f"parity.py: error: {error}", file=sys.stderr, flush=True)
            code = exit_codes.BAD_INPUT if error.refused else 1
        sys.stdout.flush()
        ranks.close()
        return code

    return guarded("parity.py", body, "nothing was compared")


def compare(ranks: Relauncher, request: Request, found: Survey) -> bool:
    """Train the reference and each layout, and print the matrix (all ranks together; rank 0 speaks).

    Returns:
        Whether a layout deviates or failed, on every rank.

    Raises:
        Failure: the reference failed.
    """
    is_main = ranks.process.rank == 0
    console = make_console() if is_main else Console(quiet=True)
    for line in found.facts:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    legal = sum(illegal is None for *_, illegal in found.layouts)
    told = f"training the reference and {legal} layouts, each in new processes that import torch first:"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    progress, number = Progress.of_rank(ranks.process.rank), 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="ds_vit-parity-") as folder:
        told = f"training the reference, {found.reference.text}"
        with progress.doing(told, Path(folder), request.steps) as look:
            reference = ranks.run(train_one, request, found.reference, None, folder, meanwhile=look)
        for cut, text, illegal in found.layouts:
            if illegal is not None:
                rows.append(Row(cut.text, problem=illegal))
                continue
            started = time.perf_counter()
            number += 1
            told = f"training {cut.text}, layout {number} of {legal}"
            with progress.doing(told, Path(folder), request.steps) as look:
                rows.append(_compare_one(ranks, request, found, cut, reference, folder, look))
            seconds = time.perf_counter() - started
            line = f"{cut.text} ({text}): {rows[-1].verdict}, {seconds:.0f} s"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(matrix(rows, judge_weights=found.judge_weights))
    for name in dict.fromkeys(found.precision[cut.text] for cut, _, illegal in found.layouts if illegal is None):
        limits = next(tolerances(request, found, c) for c, _, _ in found.layouts if found.precision.get(c.text) == name)
        numbers = ", ".join(f"{limit:.0e}" for limit in limits)
        console.print(f"tolerance in {name}: {numbers}", markup=False, highlight=False)
    for row in rows:
        if row.problem:
            console.print(f"{row.name}: {row.problem}", markup=False, highlight=False, soft_wrap=True)
    return ranks.agree("verdict", any(row.failed for row in rows))


def _compare_one(
    ranks: Relauncher,
    request: Request,
    found: Survey,
    cut: Cut,
    reference: Curve,
    folder: str,
    meanwhile: Callable[[], None],
) -> Row:
    try:
        curve = ranks.run(train_one, request, cut, found.batch, folder, meanwhile=meanwhile)
    except Failure as error:
        return Row(cut.text, problem=str(error), failed=True)
    loss = deviation([a for a, _ in reference.rows], [a for a, _ in curve.rows])
    norm = deviation([b for _, b in reference.rows], [b for _, b in curve.rows])
    weight = curve.worst_weight or ("", 0.0)  # rank 0 alone has them
    judged = [loss, norm, *([weight[1]] if found.judge_weights else [])]
    failed = any(not value <= limit for value, limit in zip(judged, tolerances(request, found, cut), strict=False))
    return Row(cut.text, loss, norm, weight, failed=failed)


def tolerances(request: Request, found: Survey, cut: Cut) -> tuple[float, float, float]:
    """What passes in a layout for loss, gradient norm and weights: --rtol, else those of the coarser number format."""
    if request.rtol is not None:
        return (request.rtol,) * 3
    formats = (found.precision[cut.text], found.precision[found.reference.text])
    return max(TOLERANCES[name] for name in formats)


def deviation(reference: Iterable[float | None], values: Iterable[float | None]) -> float:
    """The largest |a - b| / |a| of two curves; infinite where one of a pair is missing or not finite."""

    def one(a: float | None, b: float | None) -> float:
        if a is None or b is None:
            return 0.0 if a is b else math.inf
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        if a == b:
            return 0.0
        return abs(a - b) / abs(a) if a else math.inf

    return max(one(a, b) for a, b in zip(reference, values, strict=True))


def matrix(rows: Sequence[Row], *, judge_weights: bool) -> Table:
    """The rows as a table.

    Args:
        rows: one a layout.
        judge_weights: whether the weights count; their column says so where they do not.
    """
    table = Table(title="largest relative deviation from the reference", title_justify="left", title_style="bold")
    table.add_column("layout", no_wrap=True)
    table.add_column("loss", justify="right")
    table.add_column("grad norm", justify="right")
    table.add_column("weights" if judge_weights else "weights (not judged)", justify="right")
    table.add_column("worst tensor", overflow="fold")
    table.add_column("verdict")
    for row in rows:
        if row.problem:
            table.add_row(row.name, "-", "-", "-", "", row.verdict)
            continue
        numbers = [f"{number:.1e}" for number in (row.loss, row.norm, row.weight[1])]
        table.add_row(row.name, *numbers, row.weight[0], row.verdict)
    return table
