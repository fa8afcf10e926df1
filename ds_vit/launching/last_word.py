"""The sentence that matters, said again after what the launcher prints when a rank fails.

torchrun ends with twenty lines and DeepSpeed's launcher with a dump of the command; what was wrong stands above them.
torchrun shows the message of a failed rank's error file in its last lines, unless it was itself told to stop. There,
and under DeepSpeed's launcher, which has no such door, a small process waits for the launcher to end. (mpirun takes its
ranks' output only while they live: `mpirun --quiet` says less.)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

# Longer than DeepSpeed's launcher takes to end the other ranks, and a process that is never in anybody's way.
_PATIENCE_SECONDS = 30

# $1: the launcher's pid, which has ended too where its parent reads on before it asks for its code (Z); $2: how often
# to look, ten times a second; $3: the sentence.
_WAIT_AND_SAY = """
n=0
while grep -qs '^State:.[^ZX]' "/proc/$1/status" && [ "$n" -lt "$2" ]; do sleep 0.1; n=$((n + 1)); done
printf '%s\\n' "$3" >&2
"""


def say_last(sentence: str, environ: Mapping[str, str] = os.environ, *, stopped: bool = False) -> None:
    """Let the launcher's output end with a sentence; nothing where no launcher of the two is seen.

    Args:
        sentence: what went wrong and what to do, as it was said already.
        environ: of this process.
        stopped: by a signal, which torchrun may have had too; it then ends with a traceback alone.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        info = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # it was said once
            Path(error_file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": info}}))
    if stopped if error_file else _is_deepspeeds_launcher(os.getppid()):
        words = ["sh", "-c", _WAIT_AND_SAY, "sh", str(os.getppid()), str(10 * _PATIENCE_SECONDS), sentence]
        # A session of its own: DeepSpeed's launcher ends its ranks with all that they have started.
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)


def _is_deepspeeds_launcher(pid: int) -> bool:
    try:
        return b"deepspeed.launcher.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
