"""A few combinations in place of a full product: every pair of choices that can be made together occurs in one."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Case = Mapping[str, Hashable]
"""Factor → choice."""


def pairs(case: Case) -> set[Any]:
    """The pairs of choices that a combination covers."""
    return set(itertools.combinations(case.items(), 2))


def cover(
    cases: Sequence[Case],
    cost: Callable[[Case], float] = lambda case: 1.0,
    covers: Callable[[Case], set[Any]] = pairs,
) -> list[Case]:
    """A greedy selection of the legal combinations, in which every pair occurs that occurs in any of them.

    Args:
        cases: all of them.
        cost: of a combination: of several that add as much, the cheaper one.
        covers: what a combination covers, if not the pairs of its choices.
    """
    bits: dict[Any, int] = {}
    masks = [sum(1 << bits.setdefault(one, len(bits)) for one in covers(case)) for case in cases]
    worth = [math.sqrt(cost(case)) for case in cases]  # by the cost itself many small ones would be chosen
    missing, chosen = (1 << len(bits)) - 1, []
    queue = [(-mask.bit_count() / worth[i], i) for i, mask in enumerate(masks)]
    heapq.heapify(queue)
    while missing:
        _, best = heapq.heappop(queue)
        gain = (masks[best] & missing).bit_count()
        again = (-gain / worth[best], best)
        if queue and again > queue[0]:  # it adds less than it did
            heapq.heappush(queue, again)
        else:
            chosen.append(best)
            missing &= ~masks[best]
    for one in sorted(chosen, key=lambda i: -worth[i]):
        others = 0
        for other in chosen:
            others |= masks[other] if other != one else 0
        if not masks[one] & ~others:
            chosen.remove(one)
    return [cases[i] for i in chosen]
