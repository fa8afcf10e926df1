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
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from PIL import Image
from project import ROOT
from run_folders import EVIL, Tags, page_of
from runs import DIGITS, ONE_BLOCK, run_quietly

from ds_vit import cli
from ds_vit.config.run_folder import RunFolder
from ds_vit.data.settings import ImageConfig
from ds_vit.monitoring import report
from ds_vit.monitoring.gradient_health import HIGHEST, LOWEST
from ds_vit.monitoring.report.panels import class_panels, gradients, table
from ds_vit.monitoring.report.record import Record
from ds_vit.monitoring.sheets import write_predictions


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
    matrix, _, scores, _ = class_panels(replace(Record.read(evil), classes="abc"))
    assert matrix["data"]["values"] == [[50.0, 50.0, 0.0], [0.0, 100.0, 0.0], [0.0, 100.0, 0.0]]
    assert scores["lines"] == [
        ["c", "1", "-", "0.0 %", "0.0 %"],
        ["b", "1", "33.3 %", "100.0 %", "50.0 %"],
        ["a", "2", "100.0 %", "50.0 %", "66.7 %"],
    ]


def test_21843_classes(evil):
    """A matrix of gigabytes, a page of megabytes."""
    names = [f"class {number}" for number in range(21843)]
    rows = [
        {"image": "a", "class": name, "predicted": names[at // 2], "probability": "0.5"}
        | {"class_number": str(at), "predicted_number": str(at // 2)}
        for at, name in enumerate(names)
    ]
    tracemalloc.start()
    panels = class_panels(replace(Record.read(evil), classes=names, predictions=rows))
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert "The 1,000 hardest of 21,843 classes" in [panel["title"] for panel in panels]
    assert len(json.dumps(panels)) < 1e6


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
    source = SimpleNamespace(target=[0, 1].__getitem__, describe=names.__getitem__, opened=lambda at, **_: image)
    folder = RunFolder(tmp_path)
    write_predictions(
        folder, torch.tensor([[2.0, 0.9], [2.0, 0.8]]), source, ["a", os.fsdecode(b"\xe9")], ImageConfig()
    )
    assert [row["image"] for row in csv.DictReader(folder.predictions.open(errors="surrogateescape"))] == names
    shutil.copytree(evil, tmp_path / "run")
    shutil.copy(folder.predictions, tmp_path / "run")
    report.write_report([Record.read(tmp_path / "run")], tmp_path / "page.html")
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
    return mock.patch.object(report.page, "curves", side_effect=KeyError("oh"))


def test_a_report_that_fails_is_a_warning(ranks, tmp_path):
    """A finished run that exits with an error for want of a picture."""
    config = str(ROOT / "ds_configs" / "cpu_zero0_fp32.json")
    words = ["--deepspeed_config", config, *ONE_BLOCK, "--val-split", "", "--output", str(tmp_path / "run")]
    words += ["--max-steps", "1", "-b", "8", "--checkpoint-interval", "0", "--lr", "1e-3", "--epochs", "1"]
    [(code, out, _)] = ranks.run(1, run_quietly, words, break_the_report)
    assert code == 0
    assert "report.html is not written (KeyError: 'oh'); ds-vit report makes it" in out
