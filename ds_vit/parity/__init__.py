"""Is the layout a hyper-parameter here? A few steps in each layout, against one reference, on this cluster.

deepspeed launch/parity.py --deepspeed_config FILE [flags of train.py] [--layouts "pp2 tp2, tp2 --sequence-parallel"]

Every layout takes all ranks of the launch (dp follows from pp and tp), the same global batch (accumulation follows
from dp) and the same initial values. Each is trained in new processes (relaunch.py says why) by the trainer's own
`prepare`, `build_engine` and `Feed`. Rank 0 prints a row a layout: the largest relative deviations from the reference.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ds_vit import layout
from ds_vit.metrics import make_console
from ds_vit.parity.relaunch import Failure, Relauncher
from ds_vit.parity.request import Cut, Request, parse
from ds_vit.parity.runs import Curve, Survey, survey, train_one

# The largest relative deviation that is rounding. In fp32 what was measured is below 2e-6, and a known error above
# 2e-5. 16-bit types: some units of their rounding (2**-8 and 2**-11), since each gradient is rounded on its own way.
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2, "autocast-bf16": 3e-2, "fp16": 4e-3, "autocast-fp16": 4e-3}


@dataclass(frozen=True)
class Row:
    """A layout in the matrix.

    Attributes:
        name: the layout as written.
        loss: largest relative deviation of a step's loss.
        norm: the same of the gradient norm before clipping.
        weight: the tensor that is farthest from the reference's after the last step, and how far.
        tolerance: what passes.
        problem: why there is nothing to compare: it is illegal here, or failed.
        failed: whether this breaks the promise.
    """

    name: str
    loss: float = math.nan
    norm: float = math.nan
    weight: tuple[str, float] = ("", math.nan)
    tolerance: float = math.nan
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
    process = None
    try:
        process = layout.discover()
        request = parse(argv)
        ranks = Relauncher(process, verbose=bool(request.values.get("verbose")))
        found = ranks.run(survey, request)
        code = int(compare(ranks, request, found))
    except (ValueError, Failure) as error:
        bad_input = isinstance(error, ValueError) or error.refused
        if process is None or process.rank == 0:
            print(f"parity.py: error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # a launcher ends all ranks with the first that exits: the one that speaks comes first
        return 2 if bad_input else 1
    ranks.close()
    return code


def compare(ranks: Relauncher, request: Request, found: Survey) -> bool:
    """Train the reference and each layout, and print the matrix (all ranks together; rank 0 speaks).

    Returns:
        Whether a layout deviates or failed, on every rank.

    Raises:
        Failure: the reference failed.
    """
    speaks = ranks.process.rank == 0
    console = make_console() if speaks else Console(quiet=True)
    for line in found.facts:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ds_vit-parity-") as folder:
        reference = ranks.run(train_one, request, found.reference, None, folder)
        for cut, text, illegal in found.layouts:
            if illegal is not None:
                rows.append(Row(cut.text, problem=illegal))
                continue
            started = time.perf_counter()
            rows.append(_compare_one(ranks, request, found, cut, reference, folder))
            seconds = time.perf_counter() - started
            line = f"{cut.text} ({text}): {rows[-1].verdict}, {seconds:.0f} s"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(matrix(rows, judge_weights=found.judge_weights))
    for row in rows:
        if row.problem:
            console.print(f"{row.name}: {row.problem}", markup=False, highlight=False, soft_wrap=True)
    return ranks.agree("verdict", any(row.failed for row in rows))


def _compare_one(ranks: Relauncher, request: Request, found: Survey, cut: Cut, reference: Curve, folder: str) -> Row:
    try:
        curve = ranks.run(train_one, request, cut, found.batch, folder)
    except Failure as error:
        return Row(cut.text, problem=str(error), failed=True)
    formats = (found.precision[cut.text], found.precision[found.reference.text])
    tolerance = request.rtol if request.rtol is not None else max(TOLERANCES[name] for name in formats)
    loss = deviation([a for a, _ in reference.rows], [a for a, _ in curve.rows])
    norm = deviation([b for _, b in reference.rows], [b for _, b in curve.rows])
    weight = curve.worst_weight or ("", 0.0)  # rank 0 alone has them
    judged = [loss, norm, *([weight[1]] if found.judge_weights else [])]
    return Row(cut.text, loss, norm, weight, tolerance, failed=not all(value <= tolerance for value in judged))


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
    table.add_column("tolerance", justify="right")
    table.add_column("verdict")
    for row in rows:
        if row.problem:
            table.add_row(row.name, "-", "-", "-", "", "-", row.verdict)
            continue
        numbers = [f"{number:.1e}" for number in (row.loss, row.norm, row.weight[1])]
        table.add_row(row.name, *numbers, row.weight[0], f"{row.tolerance:.0e}", row.verdict)
    return table
