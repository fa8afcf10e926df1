"""Curves recorded once: a change that moves code must leave every bit of them as it is.

    python tests/support/recorded_curves.py        # record anew, after a change that is meant to move the curves

The recording holds for the versions and the processor that it names. Elsewhere kernels round otherwise, and the curves
are compared within 1e-6 of the recorded values.
"""

import json

import pytest
from recorded_curves import FILE, RUNS, curve, environment


@pytest.mark.parametrize("name", RUNS)
def test_the_curve_is_the_recorded_one(ranks, name):
    # Catches: a refactoring that changes an order, a type or a draw.
    recording = json.loads(FILE.read_text())
    rows, recorded = curve(ranks, *RUNS[name]), recording["runs"][name]
    if recording["environment"] == environment():
        assert rows == recorded
        return
    assert [set(row) for row in rows] == [set(row) for row in recorded]
    for row, old in zip(rows, recorded, strict=True):
        for key in ("loss", "grad_norm"):
            if key in old:
                assert row[key] == pytest.approx(old[key], rel=1e-6), (row["step"], key)
