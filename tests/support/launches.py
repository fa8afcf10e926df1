"""The training that every launcher's test starts, and what one process makes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import oracle
from curves import train_in
from project import ROOT
from ranks import RankPool

GLOBAL_BATCH = 16
NASTY = """out 'it' "$(touch pwned)"; touch pwned `touch pwned` $HOME & * \\"""
"""A folder's name that no shell may see unquoted."""


def training(data: Path, steps: int = 4) -> list[str]:
    """Arguments of launch/train.py but for output, batch and layout: CIFAR-10 JPEGs, everything random switched on."""
    words = [
        *("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "--data-dir", data),
        *("--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", oracle.IMG_SIZE, "--drop-path", 0.2),
        *("--aa", "rand-m9-mstd0.5-inc1", "--mixup", 0.8, "--reprob", 0.5),
        *("--warmup-steps", 2, "--lr", 2e-3, "--log-interval", 1, "--eval-interval", 0),
        *("--epochs", 100_000, "--max-steps", steps, "--workers", 0, "--checkpoint-interval", 0),
    ]
    return [str(word) for word in words]


def one_process(ranks: RankPool, data: Path, steps: int = 4) -> list[dict]:
    """The rows of a run of one process."""
    return train_in(ranks, 1, [*training(data, steps), "--batch-size", str(GLOBAL_BATCH)])


def explain(done: subprocess.CompletedProcess, output: Path | None = None) -> str:
    """All that a failed launch has said."""
    logs = sorted(output.parent.glob("**/rank-*.log")) if output else []
    return "\n".join([done.stdout, done.stderr, *(f"---- {log.name}\n{log.read_text()[-3000:]}" for log in logs)])
