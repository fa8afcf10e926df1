"""Which lines of the package run, in the tests and in all Python that they start: `launch/test.sh --coverage`.

Each statement of the package gets another before it, which marks its line. On Python 3.11 coverage.py, which follows
each call of Python's, those inside torch too, takes 1.6 times the tests' time, and SlipCover 1.2 s for each process
that imports the package; here what was changed is kept as bytecode. A process writes what it has run when it ends,
however it does, unless it is killed.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib.abc
import importlib.machinery
import os
import pickle
import shutil
import sys
import sysconfig
import types
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ds_vit"
FOLDER = "DS_VIT_LINE_COUNTS"
"""The variable with the folder that the counts go to. Where it is not set, nothing is counted."""

FLOOR = 90
"""Percent of the lines, which all tests together have to run."""

_seen: dict[str, bytearray] = {}  # file → 1 for each line that has run
_MARKED = f".marked-{zlib.crc32(Path(__file__).read_bytes()):08x}.pyc"


def install(folder: Path) -> None:
    """Have every Python process of this environment count where the variable is set, to an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    there = f"sys.path.insert(0, {str(ROOT / 'tests')!r}); import line_counts; del sys.path[0]; line_counts.start()"
    path = Path(sysconfig.get_path("purelib"), "ds_vit_line_counts.pth")
    wanted = f"{FOLDER!r} in os.environ and os.path.exists({str(Path(__file__).resolve())!r})"
    path.write_text(f"import os, sys; {wanted} and exec({there!r})\n")
    sys.dont_write_bytecode = False
    for source in (ROOT / PACKAGE).rglob("*.py"):  # now, and not by each rank
        _Loader(source.stem, str(source)).get_code(source.stem)


def start() -> None:
    """Count from now on."""
    folder, exit_now = Path(os.environ[FOLDER]), os._exit
    sys.meta_path.insert(0, _Finder())

    def written(code: int) -> None:
        write(folder)
        exit_now(code)

    atexit.register(write, folder)
    os._exit = written


def write(folder: Path) -> None:
    """Add what this process, and those that it was forked from, has run; a process that ends is not kept from it."""
    with contextlib.suppress(Exception):
        path = folder / uuid.uuid4().hex
        path.write_bytes(zlib.compress(pickle.dumps(dict(_seen)), 1))
        path.rename(path.with_suffix(".seen"))  # one that is killed here leaves no half


def marker(file: str, num_lines: int) -> Callable[[int], None]:
    """What marks a line of a file as run."""
    seen = _seen.setdefault(file, bytearray(1 + num_lines))

    def mark(line: int) -> None:
        seen[line] = 1

    mark._dynamo_marked_constant = True  # torch.compiler.assume_constant_result: runs where torch.compile reads it
    return mark


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package's modules as usual, and has them marked."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        ours = spec is not None and spec.origin is not None and spec.origin.startswith(str(ROOT / PACKAGE))
        if ours and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with marks, and keeps its bytecode beside that without any."""

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> types.CodeType:
        return compile(marked(ast.parse(data), path), path, "exec", dont_inherit=True, optimize=_optimization)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_beside(path))

    def set_data(self, path: str, data: bytes, **mode: Any) -> None:
        super().set_data(_beside(path), data, **mode)


def _beside(path: str) -> str:
    return path.removesuffix(".pyc") + _MARKED if path.endswith(".pyc") else path


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in it, those for type checkers aside."""
    for name, value in ast.iter_fields(tree):
        if name == "body" and isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
            continue
        if isinstance(value, list):
            if value and isinstance(value[0], ast.stmt):
                yield value
            for child in value:
                if isinstance(child, ast.AST):
                    yield from _bodies(child)


def _counts(statement: ast.stmt) -> bool:
    """Whether it runs: docstrings and declarations do not, and what is imported from `__future__` comes first."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    return not (
        isinstance(statement, (ast.Global, ast.Nonlocal))
        or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")
    )


def marked(tree: ast.Module, file: str) -> ast.Module:
    """The module with `__mark__(line)` before each statement."""
    first = next((at for at, one in enumerate(tree.body) if _counts(one)), None)
    for body in _bodies(tree):
        found = []
        for statement in body:
            if _counts(statement):
                found.append(_at(statement, f"__mark__({statement.lineno})"))
            found.append(statement)
        body[:] = found
    if first is not None:
        last = max(node.end_lineno for node in ast.walk(tree) if isinstance(node, ast.stmt))
        made = f"__mark__ = __import__('line_counts').marker({file!r}, {last})"
        tree.body.insert(first, _at(tree.body[first], made))
    return tree


def _at(statement: ast.stmt, text: str) -> ast.stmt:
    """A statement of its own where another one stands."""
    [made] = ast.parse(text).body
    for node in ast.walk(made):
        ast.copy_location(node, statement)
    return made


def report(folder: Path) -> tuple[float, list[str]]:
    """(percent of lines that were run, a row a file of those that were not) of all that has been written."""
    together: dict[str, set[int]] = {}
    for path in folder.glob("*.seen"):
        for file, seen in pickle.loads(zlib.decompress(path.read_bytes())).items():
            together.setdefault(file, set()).update(line for line, was in enumerate(seen) if was)
    rows, num_lines, num_missing = [], 0, 0
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        bodies = _bodies(ast.parse(path.read_bytes()))
        lines = {statement.lineno for body in bodies for statement in body if _counts(statement)}
        missing = sorted(lines - together.get(str(path), set()))
        num_lines += len(lines)
        num_missing += len(missing)
        if missing:
            told = f"{path.relative_to(ROOT)}: {len(missing)} of {len(lines)}: {', '.join(map(str, missing))}"
            rows.append(told if len(told) <= 120 else told[:117] + "...")
    return 100 * (1 - num_missing / num_lines), rows


class LineCounts:
    """A plugin of pytest, of every process: writes at a worker's end, reports at the controller's."""

    def __init__(self, config: Any) -> None:
        self._folder = Path(os.environ[FOLDER])
        self._is_worker = hasattr(config, "workerinput")
        of_all = config.args_source is config.ArgsSource.TESTPATHS
        self._floor = FLOOR if of_all and not (config.option.markexpr or config.option.keyword) else 0
        self._rows: list[str] = []

    def pytest_sessionfinish(self, session: Any) -> None:
        """The workers have written when the controller comes here."""
        write(self._folder)
        if self._is_worker:
            return
        percent, self._rows = report(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)  # who ends later has nothing to tell any more
        told = f"{percent:.1f} % of the lines ran"
        if percent < self._floor:
            told += f": less than {self._floor} %"
            session.exitstatus = session.exitstatus or 1
        self._rows.append(told)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Before pytest's own last line."""
        terminalreporter.section("lines that did not run")
        for row in self._rows:
            terminalreporter.write_line(row)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
