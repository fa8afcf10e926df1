"""Training on ranks of the pool, one of which is told to stop, or killed, at a moment that the test chooses."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from runs import DIGITS, unpredicted

from ds_vit.config.run_folder import RunFolder

TINY = [
    *(*DIGITS, "--log-interval", 1),
    *("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "--epochs", 1, "--warmup-steps", 2),
    *("--drop-path", 0.2, "--model-ema", "--stall-seconds", 0, "--checkpoint-interval", 0),
]


def metrics_bytes(output: Path) -> int:
    """Size of metrics.jsonl."""
    path = RunFolder(output).metrics
    return path.stat().st_size if path.exists() else 0


def last_step(output: Path, since: int = 0) -> int:
    """The step of the last whole row of kind "train" in metrics.jsonl behind its first bytes; 0 where there is none."""
    path = RunFolder(output).metrics
    rows = path.read_bytes()[since:].decode(errors="replace").splitlines() if path.exists() else []
    for row in reversed(rows):
        with contextlib.suppress(ValueError):
            data = json.loads(row)
            if data["kind"] == "train":
                return data["step"]
    return 0


def alive(output: Path) -> bool:
    """Whether any process of a run that `train_with` began is left, one that a rank has forked included.

    Each rank holds a lock, which its children inherit with the open file; only the end of all of them gives it up.
    """
    with _lock_file(output).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.lock")


def strikes(output: Path) -> list[dict[str, Any]]:
    """What each signal met: {"signal", "rank", "saving": a checkpoint was being written}."""
    path = output.with_name(f"{output.name}.strikes")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_with(argv: list[str], output: str, rank: int, signum: int, when: dict[str, Any]) -> tuple[int, str, str]:
    """On a rank of a job: train; the process of one rank sends itself a signal.

    Args:
        argv: of launch/train.py.
        output: the run's folder.
        rank: which one.
        signum: the signal.
        when: {"step": when this step is logged; 0: as soon as the program begins}, {"saving": when a checkpoint is
            being written} or both, and "delay": seconds after that.

    Returns:
        Exit code, and what was said on stdout and stderr.
    """
    import torch.distributed as dist

    from ds_vit.train import main

    sys.argv = ["launch/train.py", *argv]  # which the command to resume with names; pytest's own depends on its start
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:  # a save that takes long enough to be hit
        time.sleep(0.01)
        fsync(descriptor)

    os.fsync = slow_fsync
    lock = _lock_file(Path(output)).open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    ended = threading.Event()
    since = metrics_bytes(Path(output))  # what an earlier process logged does not count

    began = time.time()

    def saving() -> bool:  # what a killed run left half-written does not count
        for path in Path(output, "checkpoints").glob(".step-*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime > began:
                    return True
        return False

    def strike() -> None:
        while not ended.wait(0.001):
            if "step" in when and last_step(Path(output), since) < when["step"]:
                continue
            if "saving" in when and not saving():
                continue
            ended.wait(when["delay"])
            with Path(output).with_name(f"{Path(output).name}.strikes").open("a") as file:
                file.write(json.dumps({"signal": int(signum), "rank": rank, "saving": saving()}) + "\n")
            os.kill(os.getpid(), signum)
            return

    if dist.get_rank() == rank:
        threading.Thread(target=strike, daemon=True).start()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), unpredicted():
        code = main(argv)
    ended.set()
    lock.close()
    return code, out.getvalue(), err.getvalue()
