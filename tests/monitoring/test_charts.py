"""Axes, ticks, values and numbers of the report's charts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from run_folders import write_run

from ds_vit.monitoring.report.charts import MAX_POINTS, Series, heat_map, line_chart, log_ticks, number, thin_out, ticks
from ds_vit.monitoring.report.panels import PERCENT, class_panels, curves
from ds_vit.monitoring.report.record import Record


def test_axes():
    """A tick between the lines, a spike that thinning loses."""
    assert ticks(0, 880, 6) == [0, 200, 400, 600, 800]
    assert ticks(0.5, 2.4, 5) == [0.5, 1.0, 1.5, 2.0]
    for low, high, powers in (
        (1e-9, 0.02, [1e-9, 1e-7, 1e-5, 1e-3]),
        (5e-4, 0.03, [5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02]),
    ):
        assert 10.0 ** np.array(log_ticks(np.log10(low), np.log10(high))) == pytest.approx(powers)
    assert len(log_ticks(0.1, 0.2)) >= 2
    assert [number(value) for value in (0, 3e-5, 0.25, 12_000, 2.5e6)] == ["0", "3e-5", "0.25", "12k", "2.5M"]
    points = [(step, 100.0 if step == 7777 else 1.0) for step in range(10_000)] + [(10_000, float("nan"))]
    thin = thin_out(points)
    assert len(thin) <= MAX_POINTS
    assert (7777, 100.0) in thin
    assert thin[-1][0] == 9999


def shown_of(chart):
    """The ticks and values of a chart."""
    return [label for _, label in (*chart["rows"], *chart["columns"])] + [text for *_, text, _ in chart["values"]]


def test_an_axis_ends_where_the_quantity_does():
    """A top-5 of 100 % on an axis to 110 %."""
    points = [(step, 100.0) for step in (10, 20)]
    assert "110" not in shown_of(line_chart("top-5, %", [Series("a", points)], bounds=PERCENT))
    assert "105" not in shown_of(line_chart("top-5, %", [Series("a", points)], bounds=PERCENT))
    assert "105" in shown_of(line_chart("anything", [Series("a", points)]))


def test_a_start_does_not_set_the_scale(tmp_path):
    """99 % at the first step, and all others on the floor."""
    rows = [{"kind": "train", "step": step, "data_wait_fraction": 0.99 if step == 1 else 0.02} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = next(each for each in curves([Record.read(tmp_path)]) if "waiting for data" in each["title"])
    assert "the start of the loader (99 % at step 1)" in chart["note"]
    assert max(float(label) for _, label in chart["rows"]) < 10
    assert [1, 99.0] in chart["data"]["series"][0][1], "the value stays under the pointer"


def test_numbers_of_a_confusion_matrix(tmp_path):
    """Columns without a name, cells whose share only a pointer tells; a hundred numbers that cover each other."""
    panel = class_panels(Record.read(write_run(tmp_path / "run")))[0]
    assert [value for value, _ in panel["cells"] if value] == [50, 50, 100, 100]
    assert panel["every"]
    assert panel["upright"]
    many = [f"class {at}" for at in range(100)]
    crowded = heat_map("shares", many, many, np.eye(100), column_kind="prediction", numbers=True)
    assert not crowded["cells"]
    assert not crowded["every"]
