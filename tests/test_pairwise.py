"""The selection of combinations: small, legal, and no pair is left out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from pairwise import cover, pairs


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 5))
def test_every_legal_pair_is_covered(sizes, modulus):
    # Catches: a choice, or a pair of them, that no chosen combination has; one chosen that is not legal.
    product = itertools.product(*(range(size) for size in sizes))
    legal = [dict(zip("abcd", choice, strict=False)) for choice in product if sum(choice) % modulus == 0]
    chosen = cover(legal)
    assert all(case in legal for case in chosen)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, legal))


def test_a_cover_is_smaller_than_the_product():
    # Catches: a selection that is the product again.
    cases = [dict(zip("abcd", choice, strict=True)) for choice in itertools.product(range(3), repeat=4)]
    assert 9 <= len(cover(cases)) < 18
    assert set().union(*map(pairs, cover(cases)[:-1])) != set().union(*map(pairs, cases)), "none is superfluous"


def test_the_cheaper_of_two_is_taken():
    # Catches: a cost that nobody asks for, or a pair that is left out because it is dear.
    cases = [dict(zip("abc", choice, strict=True)) for choice in itertools.product((1, 0), repeat=3)]
    dear = cases[0]
    without, with_cost = cover(cases), cover(cases, lambda case: 100 if case == dear else 1)
    assert dear in without
    assert dear not in with_cost
    assert set().union(*map(pairs, with_cost)) == set().union(*map(pairs, cases))
