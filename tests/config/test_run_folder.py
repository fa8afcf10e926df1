"""The names in a run's output folder are a contract with other tools; one place knows them."""

import json
import math

import pytest
from project import ROOT

from ds_vit.config.run_folder import RunFolder, to_json, weights_in, write_json

NAMES = {
    "config": "config.yaml",
    "deepspeed": "deepspeed.json",
    "metrics": "metrics.jsonl",
    "tensorboard": "tensorboard",
    "summary": "summary.json",
    "classes": "classes.json",
    "checkpoints": "checkpoints",
    "samples": "samples",
    "evaluation": "eval.json",
}


def test_the_names(tmp_path):
    """A file under another name is one that people's scripts do not find."""
    folder = RunFolder(tmp_path)
    assert {name: getattr(folder, name).relative_to(tmp_path).as_posix() for name in NAMES} == NAMES
    assert not folder.holds_run
    folder.checkpoints.mkdir()
    assert folder.holds_run


def test_what_is_written_is_read(tmp_path):
    """A row of another kind, or half a file."""
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"kind": "train", "step": 1}\n{"kind": "eval", "step": 1}\n')
    assert [row["kind"] for row in folder.rows()] == ["train", "eval"]
    assert folder.rows("eval") == [{"kind": "eval", "step": 1}]
    write_json(folder.summary, {"exit": "completed"})
    assert folder.read_summary() == {"exit": "completed"} == json.loads((tmp_path / "summary.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


@pytest.mark.parametrize(("kind", "stem"), [("raw", "model"), ("ema", "ema")])
def test_weights(tmp_path, kind, stem):
    """One shard of many in place of their index."""
    assert weights_in(tmp_path, kind) is None
    (tmp_path / f"{stem}.safetensors").touch()
    assert weights_in(tmp_path, kind).name == f"{stem}.safetensors"
    (tmp_path / f"{stem}.safetensors.index.json").touch()
    assert weights_in(tmp_path, kind).name == f"{stem}.safetensors.index.json"


def test_nobody_else_spells_the_names():
    """A second place that knows a name is one that a renaming forgets."""
    spelled = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "ds_vit").rglob("*.py")
        for name in NAMES.values()
        if path.name != "run_folder.py" and f'/ "{name}"' in path.read_text()
    }
    assert not spelled


def test_what_is_not_finite_is_null(tmp_path):
    """`NaN` and `Infinity`, which Python writes and other languages' readers refuse."""
    folder = RunFolder(tmp_path)
    written = {"best_loss": math.nan, "layers": {"embed": {"norm": math.inf}}, "betas": (0.9, -math.inf), "steps": 3}
    read = {"best_loss": None, "layers": {"embed": {"norm": None}}, "betas": [0.9, None], "steps": 3}
    write_json(folder.summary, written)
    assert folder.read_summary() == read
    assert json.loads(to_json(written)) == read
