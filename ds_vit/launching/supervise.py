"""Supervise a run: forward its output, collect failures, kill hanging ranks, restart with `--resume auto`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.exit_codes import BAD_INPUT, DIVERGED, DRIFTED, INTERRUPTED, OK, UNSAVED
from ds_vit.fault_tolerance.signals import signal_name
from ds_vit.launching.launchers import Launcher
from ds_vit.launching.rank import DRAWS, MARK, Job, begin_child

# A restart would end the same way; after replicas have diverged, a person must choose the checkpoint.
_FINAL = (OK, BAD_INPUT, DIVERGED, DRIFTED, UNSAVED)
_KILLED = 128 + signal.SIGKILL
_TERMINATED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1, _KILLED)  # by the launcher, after another rank failed
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PAYLOAD = re.compile(r"(eyJ\w{5})[\w=-]+$")  # of `Job.encode`
_SSH_FAILED = 255
_MAX_BACKOFF_SECONDS = 600
_SHOW_CURSOR = b"\x1b[?25h"
_ASK_AGAIN_SECONDS = 5.0  # doubled each time: a rank that had not started missed the first signal


@dataclass
class Outcome:
    """The result of an attempt.

    Attributes:
        code: as in `ds_vit.fault_tolerance.exit_codes`, or another code of the first rank that failed.
        reports: of failed ranks, in the order of arrival; see `rank.run_rank`.
        lost: hosts whose connection broke.
        stopping: the ranks were asked to save and end, and were not killed since.
    """

    code: int
    reports: list[Mapping] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stopping: bool = False


@dataclass
class Supervisor:
    """Runs attempts of one job.

    Attributes:
        restarts: maximum number of restarts after a failure or an interruption.
        backoff_seconds: wait before the first restart; doubled each time, ten minutes at most.
        grace_seconds: time for the other ranks to end after one has failed.
        first_restart: restarts already used, if a scheduler requeued this job.
        ends_when_interrupted: leave restarts after an interruption to the scheduler.
        say: prints a line.
        asked: received signals to stop.
    """

    launcher: Launcher
    job: Job
    restarts: int = 0
    backoff_seconds: float = 10.0
    grace_seconds: float = 30.0
    first_restart: int = 0
    ends_when_interrupted: bool = False
    say: Callable[[str], None] = lambda line: print(f"run: {line}", file=sys.stderr, flush=True)
    asked: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Run to the end, with restarts; returns the exit code of the last attempt."""
        for signum in _SIGNALS:
            signal.signal(signum, lambda number, _: self.asked.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # launch/run.py blocks them until now
        used = self.first_restart
        while True:
            job = self.job if used == 0 else replace(self.job, command=(*self.job.command, "--resume", "auto"))
            try:
                outcome = self._attempt(job)
            except UserError as error:
                if used == self.first_restart:
                    raise
                outcome = Outcome(1)
                self.say(f"could not start: {error}")
            for line in describe(outcome):
                self.say(line)
            if outcome.code in _FINAL or self.asked or used >= self.restarts:
                return outcome.code
            if outcome.code == INTERRUPTED and self.ends_when_interrupted:
                return outcome.code
            used += 1
            wait = min(self.backoff_seconds * 2 ** (used - self.first_restart - 1), _MAX_BACKOFF_SECONDS)
            self.say(f"restarting in {wait:g} s with --resume auto (restart {used} of {self.restarts})")
            end = time.monotonic() + wait
            while time.monotonic() < end:
                time.sleep(0.1)
                if self.asked:
                    return outcome.code

    def _attempt(self, job: Job) -> Outcome:
        commands = self.launcher.commands(job)
        if self.asked:
            return Outcome(INTERRUPTED)
        more = f" (and {len(commands) - 1} more hosts)" if len(commands) > 1 else ""
        shown = _PAYLOAD.sub(r"\1…", shlex.join(next(iter(commands.values()))).rstrip("'"))
        self.say(f"{shown}{more}, which is {shlex.join(job.command)}")
        processes = {
            subprocess.Popen(
                argv,
                cwd=job.cwd,
                env=dict(self.launcher.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only this process, which asks the ranks to save and end
                # If this process is killed: mpirun and srun pass SIGUSR1 on, ssh ends, and ranks notice a closed pipe.
                preexec_fn=functools.partial(begin_child, os.getpid(), signal.SIGUSR1),
            ): host
            for host, argv in commands.items()
        }
        outcome = Outcome(0)
        try:
            self._watch(processes, outcome)
        finally:
            if any(process.poll() is None for process in processes):
                outcome.stopping = False
                self._kill(list(processes))
        outcome.code = exit_code(next((p.returncode for p in processes if p.returncode), 0), outcome)
        return outcome

    def _watch(self, processes: Mapping[subprocess.Popen, str], outcome: Outcome) -> None:
        """Forward lines until the launcher has ended, or must be killed.

        Args:
            processes: with the host that an ssh goes to.
            outcome: filled.
        """
        handled, deadline, wait, again = 0, None, _ASK_AGAIN_SECONDS, 0.0
        with selectors.DefaultSelector() as selector:
            for process in processes:
                for pipe, own in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
                    draws = own is sys.stdout and DRAWS in self.job.environ
                    selector.register(pipe, selectors.EVENT_READ, _Lines(own.buffer, outcome, draws=draws))
            while True:
                running = [process.pid for process in processes if process.poll() is None]
                failed = [host for process, host in processes.items() if process.returncode == _SSH_FAILED]
                outcome.lost = list(filter(None, failed))
                events = selector.select(0.25)
                for key, _ in events:
                    if not key.data.copy(key.fd):
                        selector.unregister(key.fileobj)
                if not running and not events:
                    return
                now = time.monotonic()
                if len(self.asked) > handled:
                    handled = len(self.asked)
                    if handled == 1:
                        self.say(f"{signal_name(self.asked[0])}: asking the ranks to save and end (again: kill them)")
                        outcome.stopping = True
                    elif signal.SIGUSR1 not in self.asked[1:]:
                        return
                if outcome.stopping and now >= again and running:
                    self.launcher.send(running, signal.SIGINT if self.asked[0] == signal.SIGINT else signal.SIGUSR1)
                    again, wait = time.monotonic() + wait, 2 * wait
                if deadline is None and (outcome.lost or any(_failed(r["code"]) for r in outcome.reports)):
                    deadline = now + self.grace_seconds
                if deadline is not None and now > deadline:
                    self.say(f"not all ranks have ended {self.grace_seconds:g} s after the first failure: killing them")
                    return

    def _kill(self, processes: Sequence[subprocess.Popen]) -> None:
        """Kill the ranks on every reachable host, then the launcher and its children here."""
        with contextlib.suppress(OSError, UserError):
            self.launcher.send([process.pid for process in processes if process.poll() is None], signal.SIGKILL)
        end = time.monotonic() + 10
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Lines:
    """Copies a stream line by line without the ranks' reports, or as it is if a rank draws on a terminal."""

    def __init__(self, to: BinaryIO, outcome: Outcome, *, draws: bool) -> None:
        self._to, self._outcome, self._rest, self._draws = to, outcome, b"", draws

    def copy(self, descriptor: int) -> bool:
        """Copy the available data; False at the end of the stream."""
        chunk = os.read(descriptor, 65536)
        if self._draws:
            self._write(chunk or _SHOW_CURSOR)  # of a rank that was killed
            return bool(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            self._take(line)
        return bool(chunk)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        _, mark, report = text.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError):
                self._outcome.reports.append(json.loads(report))
                return
        self._write(line + b"\n")

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the run continues without a reader
            self._to.write(data)
            self._to.flush()


def _failed(code: int) -> bool:
    return code not in (OK, INTERRUPTED, *_TERMINATED)


def first_failure(reports: Sequence[Mapping]) -> Mapping | None:
    """The report of the rank whose first error was printed first; ranks that the launcher ended come last.

    A launcher kills ranks after one has failed. A killed rank that reports before all others was killed by the kernel.
    """
    if reports and reports[0]["code"] == _KILLED:
        return reports[0]
    order = sorted(reports, key=lambda report: (not _failed(report["code"]), not report["error"], report["at"]))
    return next((report for report in order if report["code"] != INTERRUPTED), None)


def exit_code(launcher_code: int, outcome: Outcome) -> int:
    """The exit code of an attempt; the launcher's is wrong if a rank died of a signal."""
    first = first_failure(outcome.reports)
    if first is not None and (_failed(first["code"]) or outcome.reports[0]["code"] == _KILLED):
        return first["code"]
    if any(report["code"] == INTERRUPTED for report in outcome.reports) or launcher_code == INTERRUPTED:
        return INTERRUPTED
    # Processes without a handler: mpirun, ssh, or a Python that is starting.
    if outcome.stopping and not outcome.lost and (outcome.reports or launcher_code):
        return INTERRUPTED
    if first is not None:
        return first["code"]
    if outcome.lost:
        return 1
    return launcher_code if launcher_code >= 0 else 128 - launcher_code


def describe(outcome: Outcome) -> list[str]:
    """The last lines to print about an attempt; none if it succeeded."""
    if outcome.code == OK:
        return []
    if outcome.code == INTERRUPTED:
        return ["interrupted and saved (code 75): resume with --resume auto"]
    lines = [f"the connection to {host} broke: the host or its network is down" for host in outcome.lost]
    first = first_failure(outcome.reports)
    if first is None and lines:
        return lines
    if first is None:
        return [f"failed with code {outcome.code}; no rank reported a reason: see the launcher's lines above"]
    how, number = f"code {first['code']}", first["code"] - 128
    if number >= 0:
        how = f"killed by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"
        how += " (out of memory? see dmesg on that host)" * (number == signal.SIGKILL)
    lines.append(f"rank {first['rank']} on {first['host']} failed first, {how}; its log: {first['log'] or 'none'}")
    lines += [f"  {line}" for line in first["error"]]
    others = sum(report is not first for report in outcome.reports)
    return [*lines, f"({others} more rank{'s' * (others > 1)} ended after it)"] if others else lines
