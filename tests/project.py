"""Where the project lies, and which files belong to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def project_files() -> list[Path]:
    """Every file that git tracks or would add, below `ROOT`; empty outside a git clone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        return []
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]
