"""Run folders that an earlier version left (`tests/old_runs`) resume, evaluate, predict and export."""

import json
import os
import tarfile

import pytest
from curves import assert_same_curve, read_rows
from old_runs import FOLDER, STEPS, STOPPED, TASKS, command
from PIL import Image
from project import ROOT
from runs import run_quietly

from ds_vit import cli

QUICK = ("classification", "clip")


@pytest.fixture(scope="module", params=[pytest.param(t, marks=[] if t in QUICK else pytest.mark.slow) for t in TASKS])
def unpacked(request, tmp_path_factory):
    """A task's name, and its archive's folder."""
    folder = tmp_path_factory.mktemp(request.param)
    with tarfile.open(FOLDER / f"{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return request.param, folder


def in_folder(folder, argv, main=None):
    """On a rank: what a command says in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return run_quietly(argv, None, main)
    finally:
        os.chdir(before)


def picture(folder):
    """An image file."""
    Image.new("RGB", (32, 24), (200, 30, 90)).save(folder / "picture.png")
    return folder / "picture.png"


def test_tools_read_it(ranks, unpacked, tmp_path):
    """Catches: a tool that an older run's configuration ends, or that finds none of its weights."""
    task, folder = unpacked

    def tool(*words):
        [(code, out, err)] = ranks.run(1, in_folder, str(folder), words, cli.main, timeout=200)
        assert code == 0, err
        return out

    tool("eval", "run", "--weights", "last", "--workers", "0")
    [last] = [row for row in read_rows(folder / "run") if row["kind"] == "eval" and row["step"] == STOPPED]
    found = json.loads((folder / "run" / "eval.json").read_text())
    metrics = {name for name in found.keys() & last.keys() if isinstance(last[name], float)}
    assert metrics
    assert {name: found[name] for name in metrics} == pytest.approx({name: last[name] for name in metrics}, rel=1e-5)
    if task in ("classification", "distillation"):
        assert "%" in tool("predict", "run", picture(tmp_path))
    if task != "bridgetower":
        tool("export", "run", "--to", "timm", "--output", tmp_path / "timm")
        assert (tmp_path / "timm" / "model.safetensors").is_file()


def test_tools_read_a_run_of_a_removed_optimizer(ranks, tmp_path):
    """Catches: a tool that checks settings of training, which it does not use."""
    with tarfile.open(FOLDER / "classification.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.glob("run/deepspeed*.json"):
        path.write_text(path.read_text().replace('"Lamb"', '"Rprop"'))
    image = picture(tmp_path)
    export = ("export", "run", "--to", "timm", "--output", tmp_path / "timm")
    for words in (("predict", "run", image), ("eval", "run", "--workers", "0"), export):
        [(code, _, err)] = ranks.run(1, in_folder, str(tmp_path), words, cli.main, timeout=200)
        assert code == 0, err


def test_it_resumes(ranks, unpacked):
    """Catches: a checkpoint or a setting of an older run that is read as another, or not at all."""
    task, folder = unpacked
    config = ROOT / "ds_configs" / "cpu_zero3_fp32.json"
    argv = [*command(task, "run", STEPS), "--resume", "auto", "-b", "64", "--deepspeed_config", str(config)]
    for code, _, err in ranks.run(2, in_folder, str(folder), argv, timeout=200):
        assert code == 0, err
    (folder / "whole").mkdir()
    (folder / "whole.jsonl").rename(folder / "whole" / "metrics.jsonl")
    ours, whole = ([row for row in read_rows(folder / name) if row["kind"] == "train"] for name in ("run", "whole"))
    assert len(ours) == STEPS
    assert_same_curve(ours[STOPPED:], whole[STOPPED:], rtol=1e-5)
