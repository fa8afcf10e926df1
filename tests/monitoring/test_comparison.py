"""`ds-vit compare`, and `ds-vit report` of several runs: what differs, what came of each, in which launches."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from run_folders import Tags, page_of, write_run

from ds_vit import cli
from ds_vit.monitoring.report.page import differences, outcomes
from ds_vit.monitoring.report.panels import curves
from ds_vit.monitoring.report.record import Record
from ds_vit.optim.schedules import Schedule


def with_wall_seconds(record, **changes):
    """A record whose training rows took two seconds a step."""
    rows = [{**row, "wall_seconds": 2.0 * row["step"]} for row in record.rows["train"]]
    return replace(record, rows={"train": rows}, **changes)


def test_compare_says_what_differs(evil, tmp_path, capsys):
    """A difference that is passed over, a deviation that is not one."""
    other = write_run(tmp_path / "other", offset=0.5, stage=3)
    page, said = page_of(capsys, "compare", evil, other, "--output", tmp_path / "both.html")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
    table = {row[0]: row[1:] for row in rows}
    assert table["flag seed"] == table["JSON zero_optimization.stage"] == ["1", "3"]
    assert "flag model" not in table
    assert "The global batches differ (8, 24 images)" in said
    furthest = next(values for name, values in table.items() if name.startswith("loss, largest deviation"))
    assert furthest == ["-", "10"]  # 0.5 beside 2 / 40
    assert "Deviation of the loss from" in page
    averages = [json.loads(words["data-chart"]) for name, words in Tags(page).elements if "data-chart" in words]
    assert any(len(chart["series"]) == 4 for chart in averages)
    assert page.count('class="curve c0 dashed band"') == page.count('class="curve c1 dashed"') == 1
    assert not [name for name, words in Tags(page).elements if any(key.startswith("on") for key in words)]


def test_launches_of_a_run_that_went_on(evil):
    """A total that passes for one process's; steps that were done twice, counted twice."""
    two, one = ({"pp": 1, "dp": dp, "tp": 1, "zero_stage": 1} for dp in (2, 1))
    # The second launch was killed at step 30, and the third went on from step 20.
    starts = [
        {"step": step, "layout": layout, "device": "cpu", "precision": "bf16"}
        for step, layout in ((0, two), (10, one), (20, two))
    ]
    plain = Record.read(evil)
    record = with_wall_seconds(plain, starts=starts, summary={**plain.summary, "wall_seconds": 85.0})
    found = [(one.steps, one.ranks, one.seconds) for one in record.launches]
    assert found == [("1 to 10", 2, 20.0), ("11 to 20", 1, 20.0), ("21 to 40", 2, 45.0)]
    assert record.rates == record.points("train", "lr"), "no launch says its schedule"
    table = {name: values for name, *values in outcomes([record, plain])}
    assert table["launches (wall time is of all)"] == ["3", "2"]
    assert table["launch 2"][0] == "steps 11 to 20 in 20 s: pp 1 x dp 1 x tp 1, ZeRO-1, bf16, 1 rank, cpu"
    assert table["launch 3"][1] == "-"
    layouts = [values for name, *values in differences([record, plain]) if name == "layout"]
    many, few = "pp 1 x dp 2 x tp 1, ZeRO-1, bf16 (2 ranks)", "pp 1 x dp 1 x tp 1, ZeRO-1, bf16 (1 rank)"
    assert layouts == [[f"{many}, then {few}, then {many}", "pp 2 x dp 2 x tp 1, ZeRO-1 (4 ranks)"]]
    assert record.first_steps == [1, 11, 21]


def test_learning_rates_are_drawn_from_the_schedule(evil):
    """A warm-up between two rows that is drawn as a straight line, or a schedule that a later launch replaced."""
    rows = [{"kind": "train", "step": step, "lr": 1.0, "loss": 1.0} for step in (1, 40)]
    cosine, wsd = Schedule("cosine", 0.1, 40, warmup_steps=7), Schedule("wsd", 0.2, 40)
    starts = [{"step": step, "schedule": asdict(each)} for step, each in ((0, cosine), (25, wsd))]
    record = replace(Record.read(evil), rows={"train": rows}, starts=starts)
    assert record.rates == [(step + 1, (cosine if step < 25 else wsd).lr(step)) for step in range(40)]
    drawn = next(one for one in curves([record]) if one["title"] == "Learning rate")
    assert f"{cosine.lr(7):.4g}" in str(drawn["data"])
    starts = [{"step": 0, "schedule": asdict(Schedule("linear", 0.1, 100_000, warmup_steps=777))}]
    steps = [step for step, _ in replace(record, starts=starts, summary={**record.summary, "steps": 100_000}).rates]
    assert len(steps) < 500
    assert {1, 778, 100_000} <= {*steps}


def test_a_run_without_an_end_is_compared_as_far_as_it_came(evil):
    """Dashes in place of what the rows of a killed run, or of one still under way, tell."""
    plain = Record.read(evil)
    table = {name: values for name, *values in outcomes([with_wall_seconds(plain, summary={}), plain])}
    assert [table[name][0] for name in ("steps", "wall time, s", "end")] == ["40", "80", "not ended"]
    assert table["end"][1] == "completed"


def test_nothing_stands_twice_in_a_comparison(evil):
    """The stage in the JSON and in the layout, the ranks as a flag and in the layout; numbers without a unit."""
    records = []
    for tp in (1, 2):
        config = {"model": "vit_tiny", "pp": 2, "tp": tp, "lr": 0.1 * tp, "log_interval": tp}
        deepspeed = {"zero_optimization": {"stage": 2 * tp - 1}, "train_batch_size": 8 * tp}
        deepspeed["optimizer"] = {"params": {"lr": 0.1 * tp}}
        start = {"step": 0, "layout": {"pp": 2, "dp": 2, "tp": tp, "zero_stage": 2 * tp - 1}, "device": "cpu"}
        records.append(replace(Record.read(evil), config=config, deepspeed=deepspeed, starts=[start]))
    assert sorted(name for name, *_ in differences(records)) == [
        *("JSON optimizer.params.lr", "JSON train_batch_size (images)", "JSON zero_optimization.stage"),
        *("flag log_interval (steps)", "layout"),
    ]


def test_where_a_comparison_is_written(evil, tmp_path, capsys, monkeypatch):
    """A page in the current folder that nobody is told of; a last line that is no path."""
    monkeypatch.chdir(tmp_path)
    other = write_run(tmp_path / "other")
    assert cli.main(["report", str(evil), str(other)]) == 0
    said = capsys.readouterr()
    assert said.out == "comparison.html\n"
    assert "in the current folder (--output FILE puts the page elsewhere)" in said.err
