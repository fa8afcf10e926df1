"""The sentence that matters, said again after what the launcher prints when a rank fails.

torchrun ends with twenty lines and DeepSpeed's launcher with a dump of the command; what was wrong stands above them.
torchrun shows the message of a failed rank's error file in its last lines, unless it was itself told to stop. There,
and under DeepSpeed's launcher and mpirun, which have no such door, a small process waits for the launcher to end.
mpirun passes on what its ranks say only while they live, so that process writes where mpirun itself does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

# Longer than DeepSpeed's launcher takes to end the other ranks, and a process that is never in anybody's way.
_PATIENCE_SECONDS = 30

# $1: the launcher's pid, which has ended too where its parent reads on before it asks for its code (Z); $2: how often
# to look, ten times a second; $3: the sentence, which is said only if it did end.
_WAIT_AND_SAY = """
n=0
while grep -qs '^State:.[^ZX]' "/proc/$1/status" && [ "$n" -lt "$2" ]; do sleep 0.1; n=$((n + 1)); done
grep -qs '^State:.[^ZX]' "/proc/$1/status" || printf '%s\\n' "$3" >&2
"""

_waiting: list[subprocess.Popen] = []
_one_speaks = threading.RLock()  # a signal's thread, or the run


def say_last(sentence: str, environ: Mapping[str, str] = os.environ, *, stopped: bool = False) -> None:
    """Let the launcher's output end with a sentence, the newest one; nothing where no launcher is seen.

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
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        place: TextIO
        if is_mpirun():
            place = opened.enter_context(open(f"/proc/{os.getppid()}/fd/2", "a"))
            sentence = f"\n{sentence}"  # it ends in the middle of a rank's line
        elif stopped if error_file else b"deepspeed.launcher.launch" in _command_of_parent():
            place = sys.stderr
        else:
            return
        words = ["sh", "-c", _WAIT_AND_SAY, "sh", str(os.getppid()), str(10 * _PATIENCE_SECONDS), sentence]
        with _one_speaks:
            _take_back()
            # A session of its own: a launcher ends its ranks with all that they have started.
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": place, "stderr": place}
            _waiting.append(subprocess.Popen(words, **streams, start_new_session=True))


def say_nothing_last() -> None:
    """Take back what `say_last` was given: it has turned out well."""
    with _one_speaks:
        _take_back()


def _take_back() -> None:
    while _waiting:
        waiting = _waiting.pop()
        waiting.kill()
        waiting.wait()


def is_mpirun() -> bool:
    """Whether Open MPI's mpirun (prterun by its own name) started this process on its own machine."""
    return Path(os.fsdecode(_command_of_parent().partition(b"\0")[0])).name in ("mpirun", "mpiexec", "prterun")


def _command_of_parent() -> bytes:
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return b""
