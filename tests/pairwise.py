"""A few combinations in place of a full product: every pair of choices that can be made together occurs in one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Hashable]
"""Factor → choice."""


def pairs(case: Case) -> set[Any]:
    """The pairs of choices that a combination covers."""
    return set(itertools.combinations(case.items(), 2))


def cover(cases: Sequence[Case]) -> list[Case]:
    """A greedy selection of the legal combinations, in which every pair occurs that occurs in any of them."""
    covers = [pairs(case) for case in cases]
    missing = set().union(*covers)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(covers[i] & missing))
        chosen.append(cases[best])
        missing -= covers[best]
    return chosen
