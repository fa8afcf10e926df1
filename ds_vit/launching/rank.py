"""The process that a launcher starts for each rank: it keeps the rank's log, forwards signals and reports failures.

    python launch/rank.py --run=ID PAYLOAD         run a rank, or all of this host (started by launch/run.py)
    python launch/rank.py --run=ID --signal=USR1   send a signal to this run's ranks on this host
    python launch/rank.py --probe [--port=P]       print facts about this host and a free port

The payload contains the command, folder and environment of the rank in characters that no shell changes, so ssh, srun
and mpirun cannot split or expand it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.exit_codes import BAD_INPUT, INTERRUPTED
from ds_vit.launching.process import Process, discover
from ds_vit.launching.this_host import code_checksum, free_port, identity, listed_gpus, versions

MARK = "ds-vit-rank "
"""Prefix of the line in which a failed rank reports to the launching process, on stderr; JSON follows."""

PROBED = "ds-vit-host "
"""Prefix of the line in which a host answers; JSON follows."""

DRAWS = "TTY_COMPATIBLE"
"""Variable of rich: what rank 0 prints is for a terminal, with colours and a line that is drawn anew."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_STOPS = {signal.SIGUSR1, signal.SIGINT}  # "save and end"
_POLL_SECONDS = 0.25
_STOP_SECONDS = 120.0  # to save and end, once the launcher is gone
_ERASED = b"\x1b[2K"  # by a terminal: the line so far
_CONTROL = re.compile(rb"\x1b\[[?0-9;]*[A-Za-z]")

MAX_LINES = 30
MAX_CHARS = 3000
"""How much is kept: the report is one line, and one write of up to 4 kB does not mix with the others' on a pipe."""

_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch puts it before the lines of a traceback
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_ERROR = re.compile(
    r"\berror\b[^:]{0,40}: |\w(Error|Exception): |^Fatal |terminate called|Segmentation fault", re.IGNORECASE
)


@dataclass(frozen=True)
class Job:
    """What a host runs for a run; the same for all ranks, except for the last three fields.

    Attributes:
        command: script and arguments for this Python.
        cwd: folder to run in.
        environ: added to the launcher's.
        logs: folder of the ranks' logs; relative to `cwd`.
        slots: the GPUs of this host's ranks; empty if a launcher starts each rank.
        first: the number of this host's first rank.
        world_size: the ranks of all hosts.
    """

    command: tuple[str, ...]
    cwd: str
    environ: Mapping[str, str]
    logs: str
    slots: Sequence[int] = ()
    first: int = 0
    world_size: int = 1

    def encode(self) -> str:
        """This job as letters, digits, `-`, `_` and `=`."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, payload: str) -> Job:
        """The inverse of `encode`."""
        fields = json.loads(base64.urlsafe_b64decode(payload))
        return cls(**fields | {"command": tuple(fields["command"]), "slots": tuple(fields["slots"])})


def run_host(job: Job, run: str) -> int:
    """Run this host's ranks, each in a separate process; once one has failed, the others get SIGTERM.

    Returns:
        0, or the exit code of the first rank that failed (254 for 255, which would be ssh's own).
    """
    words = [sys.executable, "-u", sys.argv[0], f"--run={run}", replace(job, slots=()).encode()]
    environ = {**os.environ, "WORLD_SIZE": str(job.world_size), "LOCAL_SIZE": str(len(job.slots))}
    if list(job.slots) != list(range(len(job.slots))):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.slots))
    running = {}
    for local_rank in range(len(job.slots)):
        own = {"RANK": str(job.first + local_rank), "LOCAL_RANK": str(local_rank)}
        process = subprocess.Popen(words, env=environ | own)
        running[process.pid] = process
    code = 0
    while running:
        pid, status = os.wait()
        del running[pid]
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGTERM)
    return min(code if code >= 0 else 128 - code, 254)


def run_rank(job: Job, environ: Mapping[str, str] = os.environ) -> int:
    """Run this rank to its end. Its output goes to its log, and rank 0's to stdout as well.

    Signals are blocked (see launch/rank.py) until the rank exists. A SIGUSR1 or Ctrl-C ("save and end") that arrives
    before the rank can save ends it, which counts as an interruption: there was nothing to save.

    Returns:
        The rank's exit code; 128 + n if signal n ended it, or 75 if that was a forwarded SIGUSR1 or SIGINT.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    process = discover(environ)
    log, path = _open_log(job, process)
    child = subprocess.Popen(
        [sys.executable, "-u", *job.command],
        cwd=job.cwd,
        env={**environ, **job.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=functools.partial(begin_child, os.getpid(), signal.SIGKILL),
    )
    passed: set[int] = set()

    def pass_on(number: int, frame: object) -> None:
        if number not in passed:  # the supervisor repeats a signal for ranks that missed it
            passed.add(number)
            child.send_signal(number)

    for signum in _SIGNALS:
        signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    finder = ErrorFinder()
    _follow(child, log, finder, is_main=process.rank == 0)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    # The line is of a Python that has not begun the script.
    if passed & _STOPS and (code - 128 in _STOPS or finder.lines[-1:] == ["KeyboardInterrupt"]):
        _write(log, b"== asked to save and end before this rank could: nothing to save\n")
        code = INTERRUPTED
    _write(log, f"== rank {process.rank} ended with code {code}\n".encode())
    if code:
        error = finder.lines if code != INTERRUPTED else []
        report = {"rank": process.rank, "host": socket.gethostname(), "code": code, "log": path}
        report |= {"at": finder.first_seen or time.time(), "error": error}
        with contextlib.suppress(OSError):
            os.write(2, f"{MARK}{json.dumps(report)}\n".encode())
    return code


class PlainLines:
    """What a terminal shows of bytes in the end: whole lines without colours; of one that is drawn anew the last."""

    def __init__(self) -> None:
        self._rest = b""

    def __call__(self, chunk: bytes) -> bytes:
        """The lines that are complete with these bytes; what is left of them at the end, where there are no more."""
        end = b"\n" if self._rest and not chunk else b""
        *lines, rest = (self._rest + chunk + end).split(b"\n")
        self._rest = rest.rpartition(_ERASED)[2]
        return b"".join(_CONTROL.sub(b"", line.rpartition(_ERASED)[2]).strip(b"\r") + b"\n" for line in lines)


class ErrorFinder:
    """Fed with a rank's output as it comes; `lines` is what its reader should see first.

    Attributes:
        first_seen: when the first error was printed, in seconds since the epoch; None while there is none.
    """

    def __init__(self) -> None:
        self.first_seen: float | None = None
        self._tail: deque[str] = deque(maxlen=MAX_LINES)
        self._found: deque[str] = deque(maxlen=MAX_LINES)
        self._inside = ""  # "traceback" or "message"; further lines of either are indented
        self._has_traceback = False

    def feed(self, lines: bytes) -> None:
        """Take the next lines of the output, as `PlainLines` gives them."""
        for line in lines.decode(errors="replace").split("\n")[:-1]:
            self._take(_PREFIX.sub("", line))

    def _take(self, line: str) -> None:
        if line:
            self._tail.append(line)
        if self._inside and line.startswith(" "):
            self._found.append(line)
        elif self._inside == "traceback":
            self._found.append(line)
            self._inside = "message" if line else "traceback"  # the exception itself stands at the margin
        elif not self._has_traceback and _TRACEBACK.match(line):
            self._found = deque([line], maxlen=MAX_LINES)
            self._inside, self._has_traceback = "traceback", True
        elif not self._found and _ERROR.search(line):
            self._found.append(line)
            self._inside = "message"
        else:
            self._inside = ""
        if self._found and self.first_seen is None:
            self.first_seen = time.time()

    @property
    def lines(self) -> list[str]:
        """The first traceback; else the first message that says error; else the last lines. `MAX_CHARS` at most."""
        found = list(self._found or self._tail)
        while sum(map(len, found)) > MAX_CHARS:
            found = found[1:] if len(found) > 1 else [found[0][-MAX_CHARS:]]
        return [line for line in found if line]


def _follow(child: subprocess.Popen, log: BinaryIO | None, finder: ErrorFinder, *, is_main: bool) -> None:
    """Copy the child's output until it has ended, to the log as plain lines; ask it to end if the launcher is gone."""
    assert child.stdout is not None
    pipe, plain = child.stdout.fileno(), PlainLines()
    os.set_blocking(pipe, False)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    for own in (1, 2):  # only the end of the reader, which is always reported
        poll.register(own, 0)
    deadline = None
    while True:
        ended = child.poll() is not None
        events = dict(poll.poll(_POLL_SECONDS * 1000))
        if pipe in events:
            try:
                chunk = os.read(pipe, 65536)
            except BlockingIOError:
                chunk = b""
            finder.feed(text := plain(chunk))
            _write(log, text)
            if chunk:
                if is_main:
                    with contextlib.suppress(OSError):
                        os.write(1, chunk)
                continue
            poll.unregister(pipe)  # closed; the process may still run
        if ended:  # loader workers may still hold the pipe open
            finder.feed(text := plain(b""))
            _write(log, text)
            child.wait()
            return
        if deadline is None and any(events.get(own, 0) & (select.POLLERR | select.POLLHUP) for own in (1, 2)):
            for own in (1, 2):
                poll.unregister(own)
            _write(log, b"== the launcher is gone: asking this rank to save and end\n")
            child.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            child.kill()


def _open_log(job: Job, process: Process) -> tuple[BinaryIO | None, str]:
    """The rank's log with a header line; None, and a line on stderr, if it cannot be written."""
    host = socket.gethostname()
    path = Path(job.cwd, job.logs, f"rank-{process.rank:04d}.{host}.log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
    except OSError as error:
        print(f"rank {process.rank} on {host}: no log at {path}: {error.strerror}", file=sys.stderr, flush=True)
        return None, ""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    place = (
        f"rank {process.rank} of {process.world_size}, local rank {process.local_rank}, on {host}, pid {os.getpid()}"
    )
    _write(log, f"== {now} {place}: {' '.join(job.command)}\n".encode())
    return log, str(path)


def _write(log: BinaryIO | None, data: bytes) -> None:
    if log is not None:
        with contextlib.suppress(OSError):  # a full disk must not end the training
            log.write(data)
            log.flush()


def begin_child(parent: int, signum: int) -> None:
    """In a new process: have the kernel send it a signal when its parent is killed (prctl's PR_SET_PDEATHSIG, 1)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a script's background job ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signum))
        if os.getppid() != parent:  # killed before the call
            os._exit(128 + signal.SIGKILL)


def signal_ranks(run: str, signum: int) -> int:
    """Send a signal to this run's ranks on this host; returns their number.

    SIGKILL goes to the process that keeps the log, and its rank ends with it.
    """
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended, or another user's
            # A launcher on this host has the same arguments, but no RANK.
            if process.pid != os.getpid() and f"--run={run}" in process.cmdline() and "RANK" in process.environ():
                process.send_signal(signum)
                count += 1
    return count


def probe(port: int = 0) -> dict[str, Any]:
    """Facts about this host for the launching machine.

    Returns:
        {"port": a free one, "machine", "versions" (a checksum of the code too), "gpus"}; see this_host.py.

    Raises:
        UserError: `port` is in use.
    """
    return {
        "port": free_port(port),
        "machine": identity(),
        "versions": {**versions(), "the code of ds_vit": code_checksum()},
        "gpus": len(listed_gpus()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch/rank.py`."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    if "probe" in options:
        try:
            print(PROBED + json.dumps(probe(int(options.get("port", "0")))))
        except UserError as error:
            print(f"rank.py: error: {error}", file=sys.stderr)
            return BAD_INPUT
        return 0
    if "signal" in options:
        print(f"ranks={signal_ranks(options['run'], signal.Signals['SIG' + options['signal']])}")
        return 0
    job = Job.decode(words[-1])
    return run_host(job, options["run"]) if job.slots else run_rank(job)
