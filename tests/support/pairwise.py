"""A few combinations in place of a full product: every pair of choices that can be made together occurs in one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

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
    """A selection of the legal combinations in which every pair occurs that occurs in any of them, nearly the cheapest.

    The linear program, in which a combination may be chosen in part, tells those that are worth a choice: what they
    cover is worth what they cost. Among these the whole program is solved, to 2 % (a greedy choice costs a fifth more).

    Args:
        cases: all of them.
        cost: of a combination.
        covers: what a combination covers, if not the pairs of its choices.
    """
    found = [covers(case) for case in cases]
    # In an order that does not depend on hashes, which each process of pytest salts: all have to choose the same.
    places = {one: place for place, one in enumerate(sorted(set().union(*found), key=repr))}
    cells = [(places[one], i) for i, ones in enumerate(found) for one in ones]
    covering = csr_matrix((np.ones(len(cells)), np.transpose(cells)))
    costs = np.array([cost(case) for case in cases])
    relaxed = linprog(costs, A_ub=-covering, b_ub=-np.ones(len(places)), bounds=(0, 1))
    beyond_worth = costs + relaxed.ineqlin.marginals @ covering
    worth = np.flatnonzero(beyond_worth < costs.mean() / 50)
    chosen = milp(
        costs[worth],
        integrality=np.ones(len(worth)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(covering[:, worth], lb=1),
        options={"mip_rel_gap": 0.02},
    )
    return [cases[i] for i in worth[chosen.x > 0.5]]
