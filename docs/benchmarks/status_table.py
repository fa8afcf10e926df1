"""The table of docs/status.md: which tests have run on what, counted in their source.

    python docs/benchmarks/status_table.py [--write]

A test is a function; its cases are pytest's. Every test runs on the CPU, except those that are for another device only:
tests of tests/simulated_device, or with its fixture, and tests marked `gpu`. A test with one parameter so marked runs
on both. What a GPU has run is in the JSON files of docs/benchmarks/gpu_day.sh.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_tables import FOLDER, print_or_write, read, table  # next to this file

ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "status.md"
MARK = "mark.gpu"


class Test(NamedTuple):
    """A test function: "tests/x/test_y.py::test_z", and where it runs: "cpu", "simulated", "gpu"."""

    name: str
    on: frozenset[str]


def tests_of(path: Path) -> list[Test]:
    """Those of a file."""
    tree = ast.parse(path.read_text())
    assigned = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    all_marked = MARK in assigned.get("pytestmark", "")
    # Values of parameters that only a GPU takes, under a name of the module.
    marked = {name for name, value in assigned.items() if MARK in value and name != "pytestmark"}
    found = []
    for node in tree.body:
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            continue
        whole = all_marked or any(ast.unparse(decorator).endswith(MARK) for decorator in node.decorator_list)
        names = {inner.id for one in node.decorator_list for inner in ast.walk(one) if isinstance(inner, ast.Name)}
        partly = any(MARK in ast.unparse(decorator) for decorator in node.decorator_list) or names & marked
        uses = {argument.arg for argument in node.args.args}
        own = "simulated" if "simulated_device" in path.parts or "device_library" in uses else "cpu"
        on = {"gpu"} if whole else {own, "gpu"} if partly else {own}
        found.append(Test(f"{path.relative_to(ROOT).as_posix()}::{node.name}", frozenset(on)))
    return found


def outcomes(folder: Path) -> dict[str, Counter[str]]:
    """Test → how many of its cases have passed, failed or been skipped on a GPU."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for part in read(folder).values():
        if not part["rehearsal"]:
            for case, outcome in part.get("cases", {}).items():
                found[case.partition("[")[0]][outcome] += 1
    return found


def status(folder: Path = FOLDER / "gpu") -> str:
    """Both tables: tests by folder, and each test for a GPU."""
    tests = [test for path in sorted((ROOT / "tests").rglob("test_*.py")) for test in tests_of(path)]
    by_folder: dict[str, Counter[str]] = defaultdict(Counter)
    for test in tests:
        by_folder[test.name.rpartition("::")[0].rpartition("/")[0]].update(test.on)
    # Not counted on the CPU: the page would be of yesterday with every new test.
    rows = [
        [f"`{name}`", "yes" if on["cpu"] else "", *(on[kind] or "" for kind in ("simulated", "gpu"))]
        for name, on in sorted(by_folder.items())
    ]
    ran = outcomes(folder)
    of_gpu = [
        [
            f"`{test.name.removeprefix('tests/')}`",
            ", ".join(f"{n} {what}" for what, n in ran[test.name].items()) or "not yet",
        ]
        for test in tests
        if "gpu" in test.on
    ]
    return "\n\n".join(
        [
            table(("tests in", "on the CPU", "for the simulated device", "marked `gpu`"), rows),
            table(("test marked `gpu`", "cases on a GPU"), of_gpu),
        ]
    )


if __name__ == "__main__":
    print_or_write(__doc__, PAGE, "tests by device", status)
