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

from ds_vit.config.run_folder import RunFolder
from ds_vit.fault_tolerance import exit_codes
from ds_vit.monitoring.metrics import Reporter


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def reporter_on(folder: Path) -> tuple[Reporter, io.StringIO]:
    said = io.StringIO()
    reporter = Reporter(RunFolder(folder), total_steps=9, console=Console(file=said, width=200), stamp=lambda _: {})
    reporter.start()
    return reporter, said


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboards_thread_prints_no_traceback(tmp_path, capfd):
    """A traceback between the steps, an error that ends training, or a warning at each step."""
    reporter, said = reporter_on(tmp_path)
    writer = reporter._board._get_file_writer().event_writer._async_writer
    writer._writer._writer.write = full
    for step in range(50):
        reporter.skip({"step": step, "skipped_steps": step}, None)
        time.sleep(0.01)
    reporter.close()
    assert len(RunFolder(tmp_path).rows()) == 50
    assert "Traceback" not in capfd.readouterr().err
    assert said.getvalue().count("WARNING") == 1
    assert str(tmp_path / "tensorboard") in said.getvalue()


class SmallDisk(io.FileIO):
    """A log with room for its first rows only."""

    def write(self, data: bytes) -> int:
        return super().write(data) if self.tell() + len(data) <= 500 else full()


def train_without_room(argv: list[str]) -> tuple[int, str]:
    """On a rank: train on such a disk."""
    from ds_vit.train import main

    out, log = io.StringIO(), mock.patch("ds_vit.config.run_folder.io.FileIO", SmallDisk)
    with contextlib.redirect_stdout(out), log, mock.patch("ds_vit.tasks.clip.task.write_pairs", full):
        return main(argv), out.getvalue()


PAIRS = [
    *("--task", "clip", "--dataset", "glyphs", "--text-width", 24, "--text-depth", 1, "--text-heads", 2),
    *("--context-length", 16, "--embed-dim", 16, "-vb", 290),
]


def test_a_run_ends_with_its_weights_and_a_code(ranks, tmp_path):
    """A traceback in mid-run, or a success that is none; a sheet of pairs, or a text tower, that ends the run."""
    argv = [*TINY, *PAIRS, "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "-b", 8]
    argv += ["--max-steps", 4, "--output", tmp_path / "run"]
    results = ranks.run(2, train_without_room, [str(word) for word in argv])
    assert [code for code, _ in results] == [exit_codes.UNSAVED] * 2
    said = results[0][1]
    assert said.count("could not be written") == 2
    assert "without the report's files on the last evaluation" in said.replace("\n", " ")
    assert "rows of " in said
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "text.safetensors").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == "not all saved"
    files = "".join(line.strip("│ ") for line in said[said.rindex("│ files") :].splitlines()).replace(" ", "")
    assert "(model.safetensors," in files
    assert "report.html,summary.json,tensorboard)" in files, "without metrics.jsonl, of which rows are lost"
    RunFolder(tmp_path / "run").rows()


def test_a_picture_that_is_refused(tmp_path):
    """A run that ends because a picture of its evaluation finds no room, or because TensorBoard was given up before."""
    reporter, said = reporter_on(tmp_path)
    folder, pictures = RunFolder(tmp_path), {"reconstruction": torch.zeros(3, 4, 4, dtype=torch.uint8)}
    folder.picture("reconstruction").mkdir()
    reporter._board = None
    reporter.pictures(1, pictures)
    assert "reconstruction.png could not be written (Is a directory); training continues, without" in said.getvalue()
