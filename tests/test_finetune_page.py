"""docs/finetune.md, followed to the letter: its commands, in their order, on a folder of real JPEG files."""

from __future__ import annotations

import csv
import json
import re

import oracle
import pytest
import timm
from project import ROOT, give_a_clone, run_shell
from safetensors.torch import save_file

PAGE = (ROOT / "docs" / "finetune.md").read_text()
COMMANDS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MODEL = "vit_tiny_patch16_224"
NUM_PHOTOS = 10  # a class: eight to train on, two held out


@pytest.fixture
def folder(tmp_path, real_images):
    """Where the page begins: photos/, and weights of ImageNet's classes (random here)."""
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", tmp_path, 10 * NUM_PHOTOS, "all")
    for name in ("cat", "dog"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "all" / name).rename(tmp_path / "photos" / f"my {name}")
    save_file(timm.create_model(MODEL).state_dict(), tmp_path / "vit_tiny.safetensors")
    return tmp_path


@pytest.mark.slow
def test_six_commands_from_photographs_to_predictions(folder):
    # Catches: a page that lags behind the program, names of classes that get lost on the way.
    environ = give_a_clone(folder)
    split, train, measure, predict, to_csv, export = (run_shell(command, folder, environ) for command in COMMANDS)
    assert split == ""
    assert len(list(folder.glob("data/val/my dog/*.jpg"))) == 2
    assert "newly initialised: head.bias, head.weight" in train
    summary = json.loads((folder / "runs" / "photos" / "summary.json").read_text())
    assert (summary["exit"], summary["class_names"], summary["eval_images"]) == ("completed", ["my cat", "my dog"], 4)
    assert f"{summary['last_top1']:.3f} %" in measure
    rows = [line.strip("│").split("│") for line in predict.splitlines() if line[:1] == "│"]
    assert [row[0].strip() for row in rows if row[0].strip()] == [
        "data/val/my cat/0004.jpg",
        "data/val/my cat/0009.jpg",
        "data/val/my dog/0004.jpg",
    ]
    assert {row[1].strip() for row in rows} == {"my cat", "my dog"}
    assert to_csv == ""
    table = list(csv.DictReader((folder / "classes.csv").open()))
    assert len(table) == 2 * NUM_PHOTOS
    assert all(float(row["probability1"]) + float(row["probability2"]) == pytest.approx(1, abs=1e-5) for row in table)
    assert "largest difference of the logits 0.0e+00" in export
    config = json.loads((folder / "runs" / "photos" / "export-timm" / "config.json").read_text())
    assert config["label_names"] == ["my cat", "my dog"]


def test_there_are_six():
    # Catches: a seventh step, and blocks that the test above does not see.
    assert len(COMMANDS) == PAGE.count("```") // 2 == 6
    assert re.findall(r"^\*\*(\d)\.", PAGE, re.MULTILINE) == list("123456")
