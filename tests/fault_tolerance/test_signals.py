"""Told to stop, or refused by the disk: the documented outcome each time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from curves import assert_same_curve, checkpoints_in_time, read_rows, train_in, train_rows
from interrupting import TINY, train_with
from project import ON_CPU, ROOT, heeds, wait_until
from runs import run_quietly

from ds_vit.checkpoint.folder import checkpoints, marked, newest
from ds_vit.fault_tolerance import exit_codes
from ds_vit.launching.this_host import free_port
from ds_vit.training.evaluation import Evaluation

CONFIG = ["--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]
NEVER = {"step": 10**9, "delay": 0.0}


def words(*argv: object) -> list[str]:
    return [str(word) for word in [*TINY, *CONFIG, "-b", 8, *argv]]


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """Rows of the run that nobody interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    return train_in(ranks, 2, words("--max-steps", 12, "--output", output))


@pytest.mark.slow
def test_one_rank_of_a_pipeline_receives_a_signal_and_all_save(ranks, tmp_path, whole):
    # Catches: a rank that stops alone, a step that is not saved, a code that schedulers cannot tell from a failure, a
    # process that waits for ever for the workers of its loader.
    output = tmp_path / "run"
    argv = words("--max-steps", 12, "--output", output, "--pp", 2, "--grad-accum-steps", 2, "--workers", 1)
    results = ranks.run(2, train_with, argv, str(output), 1, signal.SIGUSR1, {"step": 3, "delay": 0.0})
    assert [code for code, _, _ in results] == [exit_codes.INTERRUPTED] * 2
    step = int(marked(output / "checkpoints", "latest").removeprefix("step-"))
    assert 3 <= step < 12
    assert f"interrupted by SIGUSR1 after step {step}; saved in" in results[0][1]
    assert (summary(output)["exit"], summary(output)["steps"]) == ("interrupted", step)
    assert not (output / "model.safetensors").exists()
    rows = train_in(ranks, 2, [*argv, "--resume", "auto"])
    assert_same_curve(whole, rows, rtol=1e-6)
    assert next(r for r in train_rows(rows) if r["step"] > step)["images_seen"] == 16 * (step + 1)
    assert (summary(output)["exit"], summary(output)["steps"]) == ("completed", 12)
    assert summary(output)["last_top1"] == [row["top1"] for row in whole if row["kind"] == "eval"][-1]


evaluate = Evaluation.run


def evaluate_after_sigterm(evaluation):
    """In the place of `Evaluation.run`: a signal arrives at rank 1 as it begins."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(evaluation)


@pytest.mark.slow
def test_told_during_evaluation(ranks, tmp_path, whole):
    # Catches: an evaluation of an hour that outlasts the grace period, or one that is left out after the resume.
    output = tmp_path / "run"
    argv = words("--max-steps", 12, "--output", output, "--validation-batch-size", 4, "--checkpoint-interval", 100)
    told = functools.partial(mock.patch, "ds_vit.training.evaluation.Evaluation.run", evaluate_after_sigterm)
    results = ranks.run(2, run_quietly, argv, told)
    assert [code for code, _, _ in results] == [exit_codes.INTERRUPTED] * 2
    assert not [row for row in read_rows(output) if row["kind"].startswith("eval")]
    assert newest(output / "checkpoints")[0].step == 12
    rows = train_in(ranks, 2, [*argv, "--resume", "auto"])
    assert marked(output / "checkpoints", "best") == "step-00000012"
    for kind in ("eval", "eval_ema"):
        [a], [b] = ([row for row in r if row["kind"] == kind] for r in (whole, rows))
        assert (a["top1"], a["top5"], a["step"]) == (b["top1"], b["top5"], b["step"])


def test_a_signal_while_a_rank_imports(tmp_path):
    # Catches: the seconds of imports, when the default would be to die unexplained.
    env = {**os.environ, **ON_CPU, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *words("--output", tmp_path / "run")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or heeds(process.pid, signal.SIGTERM), "importing", 120)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == exit_codes.INTERRUPTED, err
    assert "SIGTERM while no training is under way: nothing to save" in err
    assert not (tmp_path / "run").exists()


def test_a_signal_while_a_rank_waits_for_others():
    # Catches: a wait inside a library, which runs no handler of Python's.
    script = """
import datetime, os, signal, threading
import torch.distributed as dist
from ds_vit.fault_tolerance.signals import Signals
with Signals().installed():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    dist.TCPStore("127.0.0.1", 0, 2, True, datetime.timedelta(seconds=50))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (exit_codes.INTERRUPTED, ""), done.stderr
    assert "SIGTERM before the ranks have met: nothing to save" in done.stderr


def test_time_limit(ranks, tmp_path):
    # Catches: a limit that only one rank's clock has passed, or that is counted from somewhere else.
    output = tmp_path / "run"
    argv = words("--max-steps", 80, "--output", output, "--time-limit", "1h", "--stop-before-seconds", 3599.99)
    results = ranks.run(2, train_with, argv, str(output), 0, signal.SIGTERM, NEVER)
    assert [code for code, _, _ in results] == [exit_codes.INTERRUPTED] * 2
    assert "interrupted by the time limit after step 0; nothing was trained yet" in results[0][1]
    assert not (output / "checkpoints").exists()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own for the checkpoints."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_weights_that_do_not_fit(ranks, tmp_path, whole):
    # Catches: "nothing was trained" (code 2) and no summary after a run that was trained to its end.
    output = tmp_path / "run"
    with small_disk(output, "200k"):  # the weights take 0.15 MB, everything else 0.12 MB
        results = ranks.run(2, train_with, words("--max-steps", 12, "--output", output), str(output), 0, 15, NEVER)
        assert [code for code, _, _ in results] == [exit_codes.UNSAVED] * 2
        assert "WARNING: the weights could not be written" in results[0][1]
        assert "No space left" in results[0][1]
        assert_same_curve(whole, read_rows(output), rtol=1e-6)
        assert (summary(output)["exit"], summary(output)["steps"]) == ("not all saved", 12)
        assert not (output / "model.safetensors").exists()
        assert not (output / ".weights.partial").exists()


def train_in_time(argv, output):
    """On a rank: train, each checkpoint written or refused before the next step."""
    with checkpoints_in_time():
        return train_with(argv, output, 0, signal.SIGTERM, NEVER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "reason", "failed"),
    [
        ("full", "No space left", [False, True, True]),
        ("no folder", "exists|Not a directory", [True, True, True]),
    ],
)
def test_a_disk_that_refuses(ranks, tmp_path, whole, trouble, reason, failed):
    # Catches: a crash, a half checkpoint, a rank that waits for another's file, a success that is none.
    output = tmp_path / "run"
    folder = output / "checkpoints"
    argv = words("--max-steps", 12, "--output", output, "--checkpoint-interval", 4)
    # Enough for one of 0.45 MB, not for two.
    with contextlib.nullcontext() if trouble == "no folder" else small_disk(folder, "700k"):
        if trouble == "no folder":
            output.mkdir()
            folder.write_text("a file where the folder should be")
        results = ranks.run(2, train_in_time, argv, str(output))
        assert [code for code, _, _ in results] == [exit_codes.UNSAVED] * 2
        said = results[0][1]
        assert re.search(reason, said), said
        assert "WARNING: the checkpoint of step 12 could not be written" in said
        rows = read_rows(output)
        assert_same_curve(whole, rows, rtol=1e-6)
        assert [bool(row.get("error")) for row in rows if row["kind"] == "checkpoint"] == failed
        assert summary(output)["exit"] == "not all saved"
        assert (output / "model.safetensors").exists()
        if trouble == "full":
            [path] = checkpoints(folder)
            newest(folder)[0].verify()
            assert path.name == marked(folder, "latest") == "step-00000004"
            assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000004"]
