"""The names in a run's output folder are a contract with other tools; one place knows them."""

import errno
import io
import json
import math
from types import MappingProxyType

import pytest
from project import ROOT

from ds_vit.config import run_folder
from ds_vit.config.run_folder import LineLog, RunFolder, to_json, weights_in, write_json

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
    assert json.loads((tmp_path / "summary.json").read_text()) == {"exit": "completed"}
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
    layers = MappingProxyType({"embed": {"norm": math.inf}})
    written = {"best_loss": math.nan, "layers": layers, "betas": (0.9, -math.inf), "steps": 3}
    read = {"best_loss": None, "layers": {"embed": {"norm": None}}, "betas": [0.9, None], "steps": 3}
    write_json(folder.summary, written)
    assert json.loads(folder.summary.read_text()) == read
    assert json.loads(to_json(written)) == read


def test_lines_that_a_full_disk_refuses_are_dropped_whole(tmp_path, monkeypatch, capsys):
    # Catches: a run that ends over a log; a line that is torn, by a full disk or a kill, which no reader parses; a
    # line that is lost in silence, or warned of each time; a file opened for each line.
    write, room, opened = io.FileIO.write, [10], []

    class Disk(io.FileIO):
        def __init__(self, *args):
            super().__init__(*args)
            opened.append(args)

        def write(self, data):
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = min(room[0], len(data))
            room[0] -= count
            return write(self, data[:count])

    monkeypatch.setattr(run_folder.io, "FileIO", Disk)
    path = tmp_path / "samples" / "rank-00000.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"number":7}\n{"num')
    log = LineLog(path)
    for number, (free, is_refused) in enumerate([(10, True), (0, True), (1000, False), (3, True), (1000, False)]):
        room[0] = free
        log.add({"number": number})
        assert log.is_refused == is_refused
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [7, 2, 4]
    assert (log.num_lost, len(opened)) == (3, 1)
    assert capsys.readouterr().err.count("No space left on device") == 1
