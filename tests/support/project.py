"""Where the project lies, and which files belong to it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def lightly_train() -> Path:
    """The folder of lightly-train's files, which are read without its dependencies; skips where it is not installed."""
    package = importlib.util.find_spec("lightly_train")
    if package is None:
        raise unittest.SkipTest("needs lightly-train: pip install --no-deps lightly-train==0.18.0")
    return Path(package.submodule_search_locations[0])


def wait_until(condition: Callable[[], object], missing: Callable[[], object] | str, seconds: float = 240) -> None:
    """Wait until a condition is met; fails with what is missing."""
    end, pause = time.monotonic() + seconds, 0.01
    while not condition():
        assert time.monotonic() < end, f"{missing() if callable(missing) else missing} after {seconds:g} s"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.2)


def heeds(pid: int, signum: int) -> bool:
    """Whether a process blocks or catches a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigCgt"))]
    return any(mask >> (signum - 1) & 1 for mask in masks)


def write_config(path: Path, stage: int = 1, **blocks: Any) -> Path:
    """Write the project's DeepSpeed file of a ZeRO stage on a CPU with other blocks; returns its path."""
    config = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    path.write_text(json.dumps(config | blocks))
    return path


def project_files() -> list[Path]:
    """Every file that git tracks or would add, below `ROOT`; empty outside a git clone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        return []
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def give_a_clone(folder: Path) -> None:
    """Link what pages use of a clone into a folder."""
    for name in ("launch", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)


def run_python(folder: Path, *words: str) -> None:
    """Run a script in a folder, on the CPU; it must succeed."""
    environ = {**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
