"""The count of lines that run: what is marked, and that marks change nothing."""

import ast
import os
import subprocess
import sys

import line_counts
from line_counts import FOLDER, _bodies, _counts, marked, report
from project import ROOT

SOURCE = '''"""A module."""
from __future__ import annotations
TYPE_CHECKING = False
if TYPE_CHECKING:
    import nothing_of_the_kind

class Counter:
    """Counts."""
    total = 0

    def add(self, numbers):
        for number in numbers:
            if number < 0:
                raise ValueError(
                    number
                )
            elif number:
                self.total += number
            else:
                continue
        return self.total

    def never(self):
        return 1

found = Counter().add([1, 0, 2])
try:
    Counter().add([-1])
except ValueError as error:
    said = str(error)
'''


def test_lines_that_run_are_marked():
    # Catches: a line of a branch that was not taken, a statement in a handler or behind `else` without a mark.
    names = {}
    exec(compile(marked(ast.parse(SOURCE), "source"), "source", "exec"), names)
    ran = {line for line, was in enumerate(line_counts._seen.pop("source")) if was}
    assert (names["found"], names["said"]) == (3, "-1")
    wanted = {one.lineno for body in _bodies(ast.parse(SOURCE)) for one in body if _counts(one)}
    never = SOURCE.splitlines().index("        return 1") + 1
    assert wanted - ran == {never}
    assert ran - wanted == set()
    assert names["Counter"].__doc__ == "Counts."


def test_programs_are_counted(tmp_path):
    # Catches: `python -m`, which loads a module in a way of its own; a process that writes nothing.
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import line_counts; line_counts.start()\n"
    program = (
        f"{start}import runpy; sys.argv = ['ds-vit', '--help']; runpy.run_module('ds_vit.cli', run_name='__main__')"
    )
    environ = {**os.environ, FOLDER: str(tmp_path), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    percent, rows = report(tmp_path)
    assert 0 < percent < 50
    [told] = (row for row in rows if row.startswith("ds_vit/cli.py: "))
    missing, of = (int(word) for word in told.split()[1:4:2] for word in [word.strip(":")])
    assert 0 < missing < of
