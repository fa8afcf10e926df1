"""`assert_same_curve` can fail, and says where."""

from __future__ import annotations

import math

import pytest
from curves import assert_same_curve, read_rows, train_rows


def curve(*losses, first_step=1):
    rows = [{"kind": "train", "step": first_step + i, "loss": x, "grad_norm": 1.0} for i, x in enumerate(losses)]
    return [*rows, {"kind": "eval", "step": 1, "top1": 50.0}]


def test_equal_within_the_tolerance_passes():
    # Catches: a tolerance that is absolute, or that counts rows which are no training steps.
    assert_same_curve(curve(2.0, 1000.0), curve(2.0, 1000.009), rtol=1e-5)
    assert_same_curve(curve(0.0, None), curve(0.0, None), rtol=1e-5)


def test_the_table_names_step_column_and_deviation():
    # Catches: a failure that does not say where the curves part.
    with pytest.raises(AssertionError) as failure:
        assert_same_curve(curve(2.0, 1.0, 0.5), curve(2.0, 1.001, 0.5), rtol=1e-5)
    text = str(failure.value)
    assert "part at 1 of 6 values (rtol 1e-05)" in text
    assert ["2", "loss", "1", "1.001", "9.99e-04"] in [line.split() for line in text.splitlines()]
    assert "loss: largest deviation 9.99e-04 at step 2" in text
    assert "grad_norm: largest deviation 0.00e+00" in text


@pytest.mark.parametrize(("x", "y"), [(math.nan, math.nan), (math.inf, math.inf), (None, 1.0), (1.0, None), (0, 1e-30)])
def test_what_cannot_agree_fails(x, y):
    # Catches: two diverged runs, or a column that is missing in one, that pass for equal.
    with pytest.raises(AssertionError, match="part at 1 of 2"):
        assert_same_curve(curve(x), curve(y), rtol=1e-5)


def test_other_steps_fail():
    # Catches: a run that stopped early, and two empty runs.
    with pytest.raises(AssertionError, match="different steps: 2 steps, 1 to 2 and 1 steps, 1 to 1"):
        assert_same_curve(curve(1.0, 1.0), curve(1.0), rtol=1e-5)
    with pytest.raises(AssertionError, match="different steps"):
        assert_same_curve(curve(1.0), curve(1.0, first_step=2), rtol=1e-5)
    with pytest.raises(AssertionError, match="no training step"):
        assert_same_curve([], [], rtol=1e-5)


def test_a_long_table_is_cut():
    # Catches: a thousand lines for a run that parts from its first step on.
    with pytest.raises(AssertionError, match=r"and 18 more\nloss: largest deviation 5\.00e-01") as failure:
        assert_same_curve(curve(*[1.0] * 30), curve(*[2.0] * 30), rtol=1e-5)
    assert len(str(failure.value).splitlines()) < 20


def test_the_later_row_of_a_repeated_step_counts(tmp_path):
    # Catches: a resumed run judged by the rows that it has replaced.
    lines = ['{"kind": "train", "step": 2, "loss": 9.0}', '{"kind": "train", "step": 1, "loss": 1.0}']
    lines += ['{"kind": "eval", "step": 2}', '{"kind": "train", "step": 2, "loss": 2.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = read_rows(tmp_path)
    assert len(rows) == 4
    assert [(row["step"], row["loss"]) for row in train_rows(rows)] == [(1, 1.0), (2, 2.0)]
