"""`report.html`, `ds-vit report` and `ds-vit compare`, on runs whose names would like to be markup."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import tracemalloc
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from project import ROOT
from run_folders import EVIL, Tags, page_of, write_run
from runs import DIGITS, ONE_BLOCK, run_quietly

from ds_vit import cli
from ds_vit.config.run_folder import RunFolder
from ds_vit.data.settings import ImageConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.gradient_health import HIGHEST, LOWEST
from ds_vit.monitoring.report import page
from ds_vit.monitoring.report import record as reading
from ds_vit.monitoring.report.page import differences, outcomes, write_report
from ds_vit.monitoring.report.panels import PERCENT, curves, gradients
from ds_vit.monitoring.report.record import Record
from ds_vit.optim.schedules import LearningRate
from ds_vit.tasks.classification.task import class_panels, read_predictions, write_predictions
from ds_vit.tasks.metrics import Chart, Figure
from ds_vit.tasks.panels import MAX_POINTS, Series, heat_map, line_chart, log_ticks, number, table, thin_out, ticks
from ds_vit.tasks.task import Task


def test_gradients_by_power_of_two(evil):
    """Shares at the wrong power, and lines that are not at fp16's limits."""

    def counts(by_power):
        return [by_power.get(power, 0) for power in range(LOWEST, HIGHEST + 1)]

    layers = {"embed": counts({-30: 1, -20: 2, -5: 1}), "head": counts({-3: 12})}
    row = {"step": 11, "below_2^-24": 1 / 16, "below_2^-14": 3 / 16, "layers": {}}
    rows = {"gradients": [row | {"histogram": {"lowest": LOWEST, "counts": layers}}]}
    panel = gradients(replace(Record.read(evil), rows=rows))[-1]
    columns, values = panel["data"]["columns"], panel["data"]["values"]
    assert panel["labels"] == ["embed", "head"]
    assert [columns[at] for at, value in enumerate(values[0]) if value] == ["2^-30", "2^-20", "2^-5"]
    assert [value for value in values[0] if value] == [25.0, 50.0, 25.0]
    assert {columns[at] for at, value in enumerate(values[1]) if value} == {"2^-3"}
    blank = [at for at, value in enumerate(values[0]) if value is None]
    assert [columns[at + 1] for at in blank] == ["2^-24", "2^-14"]
    assert "6.2%" in panel["note"]
    assert "18.8%" in panel["note"]


def test_names_are_text_and_nothing_is_fetched(evil, capsys):
    """A class that is markup, a folder that is a command, a picture from somewhere else."""
    page, _ = page_of(capsys, "report", evil)
    found = Tags(page)
    assert sum(name == "script" for name, _ in found.elements) == 1
    assert not [words for _, words in found.elements if any(key.startswith("on") for key in words)]
    links = [words.get("src") or words.get("href") for _, words in found.elements]
    assert {link.partition(",")[0].split(";")[0] for link in links if link} == {
        "data:",
        "data:image/png",
        "data:image/jpeg",
    }
    for name in EVIL:
        assert name in found.text
    command = next(line for line in found.text.splitlines() if "launch/train.py" in line)
    words = shlex.split(command[command.index("DS_ACCELERATOR") :].partition("All settings")[0])
    assert words[words.index("--recipe") + 1] == str(evil / "config.yaml")
    assert words[1:4] == ["deepspeed", "--num_accelerators", "4"]
    assert len(page) < 300_000


def test_what_a_run_tells(evil, capsys):
    """A panel that is lost, a mark that is drawn nowhere."""
    page, _ = page_of(capsys, "report", evil)
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    wanted = (
        "Training loss",
        "Learning rate",
        "Gradient norm by layer",
        "Confusion matrix",
        "The 2 most confident of 2 mistakes in 4 images",
        "Resumed run: 2 launches",
        "Memory of the fullest rank, GB",
        "pp 2 x dp 2",
    )
    assert [title for title in wanted if not any(title in each for each in titles)] == []
    assert "step 20: resumed in another process (pp 2 x dp 2 x tp 1)" in page
    assert 'class="mark rollback"' in page
    assert 'class="mark resume"' in page
    assert '<i class="swatch dashed resume"></i>resumed</span>' in page
    assert "stage 1" in page
    assert "replica 1" in page


def test_what_tells_nothing_is_left_out(evil):
    """A curve of 100 %, and a column of dashes; a run without an end is no such column."""
    record = replace(Record.read(evil), rows={"eval": [{"step": 1, "top1": 50.0, "top5": 100.0}]})
    assert record.metrics() == ["top1"]
    assert replace(record, classes=list("abcdef")).metrics() == ["top1", "top5"]
    assert replace(record, config={"num_classes": 10}).metrics() == ["top1", "top5"], "of ten outputs for three classes"
    assert table("t", ("launch", "device", "ranks"), [("1", "-", "2"), ("2", "", "-")])["header"] == ["launch", "ranks"]
    assert table("t", ("", "run"), [("steps", "-")])["header"] == ["", "run"]


def test_figures_of_classes(evil):
    """Precision and recall in each other's place: known counts."""
    matrix, _, scores, _ = class_panels(read_predictions(evil / "predictions.csv"), "abc")
    assert matrix["data"]["values"] == [[50.0, 50.0, 0.0], [0.0, 100.0, 0.0], [0.0, 100.0, 0.0]]
    assert scores["lines"] == [
        ["c", "1", "-", "0.0 %", "0.0 %"],
        ["b", "1", "33.3 %", "100.0 %", "50.0 %"],
        ["a", "2", "100.0 %", "50.0 %", "66.7 %"],
    ]


def test_21843_classes():
    """A matrix of gigabytes, a page of megabytes."""
    names = [f"class {number}" for number in range(21843)]
    rows = [
        {"image": "a", "class": name, "predicted": names[at // 2], "probability": "0.5"}
        | {"class_number": str(at), "predicted_number": str(at // 2)}
        for at, name in enumerate(names)
    ]
    tracemalloc.start()
    panels = class_panels(rows, names)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert "The 1,000 hardest of 21,843 classes" in [panel["title"] for panel in panels]
    assert len(json.dumps(panels)) < 1e6


class Boxes(Task):
    """A task from outside, of which only the report is asked."""

    name = "boxes"
    charts = (Chart("Boxes found", {"boxes": "of the step"}),)
    figures = (Figure("top1", "boxes right", "%"),)

    @classmethod
    def panels(cls, folder):
        """As `Task.panels`."""
        lines = [("dog", folder.path.name)]
        of_images = {"kind": "remark", "text": "12 boxes"}
        return {"Boxes": [table("Boxes by class", ("class", "run"), lines)], "Images": [of_images]}


def test_a_task_from_outside_has_its_own_panels(monkeypatch, tmp_path):
    """A report that knows the tasks of this package only; a run that has none because its task is gone."""
    run = write_run(tmp_path / "run")
    rows = '{"kind": "train", "step": 40, "loss": 1.0, "boxes": 7}\n'
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + "\n" + rows)
    monkeypatch.setattr(reading, "task_of", lambda values: Boxes)
    write_report([Record.read(run)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for part in ("Boxes found", "<h2>Boxes</h2>", "Boxes by class", "12 boxes", "best boxes right", "Training loss"):
        assert part in page
    assert "Confusion matrix" not in page

    def missing(values):
        raise UserError("--task boxes:Boxes: there is no module boxes")

    monkeypatch.setattr(reading, "task_of", missing)
    write_report([Record.read(run)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("there is no module boxes") == 1
    assert "Training loss" in page
    assert "Boxes found" not in page


def test_steps_that_were_taken_back_are_not_drawn(tmp_path):
    """The branch of a run that was killed, or rolled back, beyond where it went on."""
    rows = [{"kind": "train", "step": step, "loss": 1.0} for step in (10, 20, 30, 40)]
    rows += [{"kind": "eval", "step": 40, "top1": 1.0}, {"kind": "checkpoint", "step": 40}]
    rows += [{"kind": "train", "step": step, "loss": 2.0} for step in (20, 25)]
    rows += [{"kind": "rollback", "step": 26, "to_step": 20}]
    gradients = [{"kind": "gradients", "step": step} for step in (10, 20, 30)]
    rows = [*(row for pair in zip(gradients, rows, strict=False) for row in pair), *rows[len(gradients) :]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = Record.read(tmp_path)
    assert record.points("train", "loss") == [(10, 1.0), (20, 2.0)]
    assert record.points("eval", "top1") == []
    assert [row["step"] for row in record.rows["gradients"]] == [10, 20]
    assert len(record.rows["checkpoint"]) == 1


def test_a_name_that_is_not_utf8(evil, tmp_path):
    """A file of a Latin-1 machine that ends the training at its first evaluation."""
    names, image = [os.fsdecode(b"caf\xe9.jpg"), "b.jpg"], Image.new("RGB", (8, 8))
    source = SimpleNamespace(target=[0, 1].__getitem__, describe=names.__getitem__, entry=lambda entry, at: image)
    folder = RunFolder(tmp_path)
    write_predictions(
        folder, torch.tensor([[2.0, 0.9], [2.0, 0.8]]), source, ["a", os.fsdecode(b"\xe9")], ImageConfig()
    )
    assert [row["image"] for row in csv.DictReader(folder.predictions.open(errors="surrogateescape"))] == names
    shutil.copytree(evil, tmp_path / "run")
    shutil.copy(folder.predictions, tmp_path / "run")
    write_report([Record.read(tmp_path / "run")], tmp_path / "page.html")
    assert "caf?.jpg" in (tmp_path / "page.html").read_text()


def test_what_cannot_be_reported(evil, tmp_path, capsys):
    """A traceback."""
    for words, wrong in (
        (["report", tmp_path / "nowhere"], "there is no metrics.jsonl"),
        (["compare", evil], "takes two runs or more"),
        (["compare", evil, evil], "is given twice"),
        (["report", evil, "--output", evil / "metrics.jsonl" / "x.html"], "could not be written"),
    ):
        assert cli.main([str(word) for word in words]) == 2
        assert wrong in capsys.readouterr().err


HOVER = """<script>
for (const each of document.querySelectorAll("svg.chart, .cells")) {
  const box = each.getBoundingClientRect();
  const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2};
  each.dispatchEvent(new PointerEvent("pointermove", at));
  const said = document.createElement("q");
  said.textContent = tip.textContent;
  document.body.append(said);
}
</script>"""


def test_in_a_browser(evil, tmp_path, capsys):
    """A script that fails, a page that fetches; values under the pointer that are none."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium: apt-get install chromium")
    page, _ = page_of(capsys, "report", evil)
    (tmp_path / "page.html").write_text(page.replace("</body>", HOVER + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'browser'}", f"--log-net-log={tmp_path / 'net.json'}"]
    done = subprocess.run([*command, f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    asked = set(re.findall(r'"url":"(\w+://[^"]*)"', (tmp_path / "net.json").read_text()))
    its_own = re.compile(r"https?://[\w.]*(google|googleapis|gvt1)\.com/")  # the browser looks for updates
    assert not [url for url in asked if not its_own.match(url) and not url.startswith("file://")]
    said = re.findall(r"<q>(.*?)</q>", done.stdout, re.DOTALL)
    step, loss = re.match(r"step (\d+)\nof the step  ([\d.]+)", said[0]).groups()
    assert float(loss) == pytest.approx(2 / int(step), rel=1e-5)
    assert len(said) >= 7
    assert all(said)


def predicted_by(run):
    """predictions.csv by image."""
    with (run / "predictions.csv").open(newline="") as file:
        return {row["image"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_every_layout_writes_the_same_predictions(ranks, tmp_path):
    """A sample that two ranks count, a rank whose rows are lost; a report that stops the run."""
    config = ROOT / "ds_configs" / "cpu_zero1_fp32.json"
    kwargs = ("--model-kwargs", "patch_size=4", "embed_dim=24", "depth=2", "num_heads=2")
    words = ("--deepspeed_config", config, *DIGITS, *kwargs, "--max-steps", 2, "--lr", 1e-3, "--no-aug")
    words = [str(word) for word in (*words, "--epochs", 1, "--checkpoint-interval", 0)]
    cuts = {"one": (1, ["-b", "32"]), "dp": (2, ["-b", "16"]), "pp": (2, ["-b", "32", "--pp", "2"])}
    for name, (world, cut) in cuts.items():
        said = ranks.run(world, run_quietly, [*words, *cut, "--output", str(tmp_path / name)])
        assert {code for code, _, _ in said} == {0}, said
    one = predicted_by(tmp_path / "one")
    assert len(one) == 355
    for name in ("dp", "pp"):
        other = predicted_by(tmp_path / name)
        assert {image: row["predicted"] for image, row in other.items()} == {
            i: row["predicted"] for i, row in one.items()
        }
        gaps = [abs(float(other[image]["probability"]) - float(row["probability"])) for image, row in one.items()]
        assert max(gaps) < 1.1e-4
        assert [*other] == [*one], "the order of the split, whatever rounding does to the probabilities"
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    right = sum(row["class"] == row["predicted"] for row in one.values())
    assert 100.0 * right / len(one) == pytest.approx(summary["last_top1"])
    captions = json.loads((tmp_path / "one" / "augmented.json").read_text())["captions"]
    assert all(captions)
    for name in cuts:
        page = (tmp_path / name / "report.html").read_text()
        assert "Confusion matrix" in page
        assert "Training images of the first step" in page
        told = json.loads((tmp_path / name / "augmented.json").read_text())
        assert len(told["captions"]) == 16
        assert told["captions"] == captions, name


def break_the_report():
    """On a rank: a page that cannot be made."""
    return mock.patch.object(page, "curves", side_effect=KeyError("oh"))


def test_a_report_that_fails_is_a_warning(ranks, tmp_path):
    """A finished run that exits with an error for want of a picture."""
    config = str(ROOT / "ds_configs" / "cpu_zero0_fp32.json")
    words = ["--deepspeed_config", config, *ONE_BLOCK, "--val-split", "", "--output", str(tmp_path / "run")]
    words += ["--max-steps", "1", "-b", "8", "--checkpoint-interval", "0", "--lr", "1e-3", "--epochs", "1"]
    [(code, out, _)] = ranks.run(1, run_quietly, words, break_the_report)
    assert code == 0
    assert "report.html is not written (KeyError: 'oh'); ds-vit report makes it" in out


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


@pytest.mark.parametrize("steps", [1, 8])
def test_a_start_does_not_set_the_scale(tmp_path, steps):
    """A first value that flattens the rest of the chart; a note about leaving it out where it is the only one."""
    rows = [{"kind": "train", "step": at, "data_wait_fraction": 0.02 if at > 1 else 0.99} for at in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = next(each for each in curves([Record.read(tmp_path)]) if "waiting for data" in each["title"])
    assert ("in which the loader starts" in chart["note"]) == (steps > 1)
    assert (max(float(label) for _, label in chart["rows"]) < 10) == (steps > 1)
    assert [1, 99.0] in chart["data"]["series"][0][1], "the value stays under the pointer"


def test_numbers_of_a_confusion_matrix(tmp_path):
    """Columns without a name, cells whose share only a pointer tells; a hundred numbers that cover each other."""
    panel = class_panels(read_predictions(write_run(tmp_path / "run") / "predictions.csv"), EVIL)[0]
    assert [value for value, _ in panel["cells"] if value] == [50, 50, 100, 100]
    assert panel["every"]
    assert panel["upright"]
    many = [f"class {at}" for at in range(100)]
    crowded = heat_map("shares", many, many, np.eye(100), column_kind="prediction", numbers=True)
    assert not crowded["cells"]
    assert not crowded["every"]


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
    assert furthest == ["-", "10"]  # 0.5 against 2 / 40
    assert "Deviation of the loss from" in page
    averages = [json.loads(words["data-chart"]) for name, words in Tags(page).elements if "data-chart" in words]
    assert any(len(chart["series"]) == 4 for chart in averages)
    assert page.count('class="curve c0 dashed band"') == page.count('class="curve c1 dashed"') == 1
    assert not [name for name, words in Tags(page).elements if any(key.startswith("on") for key in words)]


def test_launches_of_a_run_that_went_on(evil):
    """A total that passes for one process's; steps that were done twice, counted twice."""
    two, one = ({"pp": 1, "dp": dp, "tp": 1, "zero_stage": 1} for dp in (2, 1))
    # The second launch was killed at step 30, and the third resumed from step 20.
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
    cosine, wsd = LearningRate("cosine", 0.1, 40, warmup_steps=7), LearningRate("wsd", 0.2, 40)
    starts = [{"step": step, "schedule": asdict(each)} for step, each in ((0, cosine), (25, wsd))]
    record = replace(Record.read(evil), rows={"train": rows}, starts=starts)
    assert record.rates == [(step + 1, (cosine if step < 25 else wsd).lr(step)) for step in range(40)]
    drawn = next(one for one in curves([record]) if one["title"] == "Learning rate")
    assert f"{cosine.lr(7):.4g}" in str(drawn["data"])
    starts = [{"step": 0, "schedule": asdict(LearningRate("linear", 0.1, 100_000, warmup_steps=777))}]
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
    """A page in the current folder without a line that says so; a last line that is no path."""
    monkeypatch.chdir(tmp_path)
    other = write_run(tmp_path / "other")
    assert cli.main(["report", str(evil), str(other)]) == 0
    said = capsys.readouterr()
    assert said.out == "comparison.html\n"
    assert "in the current folder (--output FILE puts the page elsewhere)" in said.err
