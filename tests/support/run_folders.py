"""Folders of runs as training leaves them, and the page that a command makes of them."""

import csv
import json
from html.parser import HTMLParser

import yaml
from PIL import Image

from ds_vit import cli
from ds_vit.tasks.panels import save_sheet

EVIL = ('<img src="http://evil.invalid/x" onerror="fail()">', "\"';$(rm -rf ~)|&", "</script><script>fail()</script>")


def layers(step):
    """A row's figures by layer."""
    one = {"norm": 1.0 / step, "update_to_weight": 1e-3, "below_2^-24": 0.01}
    return {"embed": one, "blocks.0": {**one, "norm": None}, "head": one}


def write_run(path, *, offset=0.0, stage=1):
    """A run's folder as training leaves it, of 40 steps, gone on with at step 20."""
    path.mkdir(parents=True)
    rows, more = [], {"data_wait_fraction": 0.1, "memory_bytes": 3_000_000_000}
    for step in (*range(1, 31), None, *range(21, 41)):
        if step is None:
            rows.append({"kind": "rollback", "step": 30, "to_step": 20, "reason": "nonfinite"})
            continue
        figures = {"loss": 2.0 / step + offset, "lr": 1e-3, "grad_norm": 1.0 + step % 3, "loss_scale": 1.0}
        rows.append({"kind": "train", "step": step, **figures, "images_per_second": 100.0, **more})
    rows += [{"kind": "gradients", "step": step, "layers": layers(step)} for step in (1, 20, 40)]
    rows += [{"kind": "eval_ema", "step": step, "loss": 0.5, "images": 4} for step in (20, 40)]
    rows += [{"kind": "eval", "step": step, "top1": 2.0 * step, "loss": 1.0, "images": 4} for step in (20, 40)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tra')
    layout = {"pp": 2, "dp": 2, "tp": 1, "zero_stage": stage}
    starts = [{"step": step, "layout": layout, "device": "cpu", "versions": {"torch": "2"}} for step in (0, 20)]
    (path / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
    (path / "config.yaml").write_text(yaml.safe_dump({"model": "vit_tiny", "data_dir": EVIL[0], "seed": stage}))
    told = {"zero_optimization": {"stage": stage}, "train_batch_size": 8 * stage}
    (path / "deepspeed.json").write_text(json.dumps(told))
    (path / "classes.json").write_text(json.dumps(EVIL))
    summary = {"model": "vit_tiny", "layout": layout, "steps": 40, "best_top1": 80.0, "exit": "completed"}
    summary["memory"] = {"predicted_bytes": 2_500_000_000, "measured_bytes": 3_000_000_000}
    summary["step_seconds"] = {"measured": 0.5}
    (path / "summary.json").write_text(json.dumps({**summary, "num_parameters": 5_000_000}))
    taken_for = [(0, 0), (0, 1), (1, 1), (2, 1)]
    with (path / "predictions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("image", "class", "predicted", "probability", "class_number", "predicted_number"))
        table.writerows((f"{EVIL[0]}.jpg", EVIL[a], EVIL[b], "0.9", a, b) for a, b in taken_for)
    save_sheet([Image.new("RGB", (8, 8), "red")] * 3, EVIL, path / "mistakes.png")
    return path


class Tags(HTMLParser):
    """Every element of a page, and its text outside script and style."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.inside = [], "", ""
        self.feed(page)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        self.inside = name

    def handle_data(self, data):
        self.text += data if self.inside not in ("script", "style") else ""


def page_of(capsys, *words):
    """The page that a command writes, and what it said."""
    assert cli.main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    path = said.splitlines()[-1]
    with open(path, encoding="utf-8") as file:
        return file.read(), said
