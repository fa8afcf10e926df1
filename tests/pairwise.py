"""A few combinations in place of a full product: every pair of choices that can be made together occurs in one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Hashable]
"""Factor → choice."""


def pairs(case: Case) -> set[Any]:
    """The pairs of choices that a combination covers."""
    return set(itertools.combinations(case.items(), 2))


def cover(cases: Sequence[Case], cost: Callable[[Case], float] = lambda case: 1.0) -> list[Case]:
    """A greedy selection of the legal combinations, in which every pair occurs that occurs in any of them.

    Args:
        cases: all of them.
        cost: of a combination: of several that add as much, the cheaper one.
    """
    covers = [pairs(case) for case in cases]
    worth = [math.sqrt(cost(case)) for case in cases]  # by the cost itself many small ones would be chosen
    missing = set().union(*covers)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(covers[i] & missing) / worth[i])
        chosen.append(best)
        missing -= covers[best]
    for one in sorted(chosen, key=lambda i: -worth[i]):
        if covers[one] <= set().union(*(covers[other] for other in chosen if other != one)):
            chosen.remove(one)
    return [cases[i] for i in chosen]
