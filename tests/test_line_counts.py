"""The count of lines that run: what is marked, and that marks change nothing."""

import ast

from line_counts import _bodies, _counts, _marked

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
    ran, names = set(), {}
    exec(compile(_marked(ast.parse(SOURCE)), "source", "exec"), {"__mark__": ran.add}, names)
    assert (names["found"], names["said"]) == (3, "-1")
    wanted = {one.lineno for body in _bodies(ast.parse(SOURCE)) for one in body if _counts(one)}
    never = SOURCE.splitlines().index("        return 1") + 1
    assert wanted - ran == {never}
    assert ran - wanted == set()
    assert names["Counter"].__doc__ == "Counts."
