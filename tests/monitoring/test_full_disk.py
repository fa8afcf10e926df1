"""metrics.jsonl and TensorBoard on a disk that has no room: training continues, and nothing is lost in silence."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from interrupting import TINY
from project import ROOT
from rich.console import Console

from ds_vit.fault_tolerance import exit_codes
from ds_vit.monitoring.metrics import Reporter
from ds_vit.run_folder import RunFolder


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Disk:
    """A file that takes so many more bytes."""

    def __init__(self, file: io.RawIOBase, room: int) -> None:
        self._file = file
        self.room = room
        self.close = file.close

    def write(self, data: bytes) -> int:
        if not self.room:
            full()
        written = self._file.write(data[: self.room])
        self.room -= written
        return written


def reporter_on(folder: Path, room: int) -> tuple[Reporter, io.StringIO]:
    said = io.StringIO()
    reporter = Reporter(RunFolder(folder), total_steps=9, console=Console(file=said, width=200), stamp=lambda _: {})
    reporter.start()
    reporter._file = Disk(reporter._file, room)
    return reporter, said


def skip(reporter: Reporter, steps: range) -> None:
    for step in steps:
        reporter.skip({"step": step, "skipped_steps": step}, None)


def test_rows_wait_for_room(tmp_path):
    """A row that is cut in two, written twice or left out where the disk was full for a while."""
    reporter, said = reporter_on(tmp_path, room=100)
    skip(reporter, range(5))
    assert reporter.num_lost
    reporter._file.room = 10**6
    skip(reporter, range(5, 7))
    assert reporter.num_lost == 0
    reporter.close()
    assert [row["step"] for row in RunFolder(tmp_path).rows()] == list(range(7))
    assert said.getvalue().count("WARNING") == 1
    assert "No space left on device" in said.getvalue()


def test_rows_that_are_lost_are_counted(tmp_path):
    """Half a row at the end of the file, which no reader takes."""
    reporter, said = reporter_on(tmp_path, room=100)
    skip(reporter, range(5))
    reporter.close()
    rows = RunFolder(tmp_path).rows()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert 0 < len(rows) < 5
    assert f"{5 - len(rows)} rows of {tmp_path / 'metrics.jsonl'} are lost" in said.getvalue()


def test_pictures_without_room(tmp_path, monkeypatch):
    """TensorBoard raises in the training loop what its thread met."""
    reporter, said = reporter_on(tmp_path, room=10**6)
    monkeypatch.setattr(reporter._board, "add_scalar", full)
    skip(reporter, range(3))
    reporter.close()
    assert len(RunFolder(tmp_path).rows()) == 3
    assert said.getvalue().count("WARNING") == 1


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboards_thread_prints_no_traceback(tmp_path, capfd):
    """A traceback between the steps, or a warning that names another file than the one that was refused."""
    reporter, said = reporter_on(tmp_path, room=0)
    writer = reporter._board._get_file_writer().event_writer._async_writer
    writer._writer._writer.write = full
    for step in range(50):
        skip(reporter, range(step, step + 1))
        time.sleep(0.01)
    reporter.close()
    assert "Traceback" not in capfd.readouterr().err
    assert [str(tmp_path / name) in said.getvalue() for name in ("metrics.jsonl", "tensorboard")] == [True, True]


def train_without_room(argv: list[str]) -> tuple[int, str]:
    """On a rank: train, with room for the first rows alone."""
    from ds_vit.train import main

    start = Reporter.start

    def start_on_a_full_disk(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self._file = Disk(self._file, 500)

    out = io.StringIO()
    broken = mock.patch.object(Reporter, "start", start_on_a_full_disk)
    with contextlib.redirect_stdout(out), broken, mock.patch("ds_vit.monitoring.metrics.write_pairs", full):
        return main(argv), out.getvalue()


PAIRS = [
    *("--task", "clip", "--dataset", "glyphs", "--text-width", 24, "--text-depth", 1, "--text-heads", 2),
    *("--context-length", 16, "--embed-dim", 16, "-vb", 290),
]


@pytest.mark.parametrize("task", ["classification", "clip"])
def test_a_run_ends_with_its_weights_and_a_code(ranks, tmp_path, task):
    """A traceback in mid-run, or a success that is none; a sheet of pairs, or a text tower, that ends the run."""
    argv = [*TINY, "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "-b", 8]
    argv += PAIRS if task == "clip" else ["--val-split", ""]
    argv += ["--max-steps", 4, "--output", tmp_path / "run"]
    results = ranks.run(2, train_without_room, [str(word) for word in argv])
    assert [code for code, _ in results] == [exit_codes.UNSAVED] * 2
    said = results[0][1]
    assert said.count("could not be written") == (2 if task == "clip" else 1)
    assert ("pairs.png could not be written" in "".join(said.split("\n"))) == (task == "clip")
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "text.safetensors").exists() == (task == "clip")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "not all saved"
    files = "".join(line.strip("│ ") for line in said[said.rindex("│ files") :].splitlines()).replace(" ", "")
    assert "(model.safetensors," in files
    assert "report.html,summary.json,tensorboard)" in files, "without metrics.jsonl, of which rows are lost"
    RunFolder(tmp_path / "run").rows()


def test_a_picture_that_is_refused(tmp_path):
    """A run that ends because a picture of its evaluation finds no room, or because TensorBoard was given up before."""
    reporter, said = reporter_on(tmp_path, 10**6)
    folder, pictures = RunFolder(tmp_path), {"reconstruction": torch.zeros(3, 4, 4, dtype=torch.uint8)}
    folder.picture("reconstruction").mkdir()
    reporter._board = None
    reporter.pictures(1, pictures)
    assert "reconstruction.png could not be written (Is a directory); training continues, without" in said.getvalue()
