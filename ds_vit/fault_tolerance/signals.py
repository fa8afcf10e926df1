"""Signals and time limits, at which all ranks stop at the same step.

A scheduler sends SIGTERM or SIGUSR1 to one rank or to all, at any time; Ctrl-C sends SIGINT to all of a machine. A
signal is only recorded. Between two steps the ranks exchange whether any has received one (`Groups.largest`), so all of
them save the same step. Before the process group exists there is nothing to save, and the process ends.

Imports nothing heavy: `end_at_signals` runs before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ds_vit.fault_tolerance import exit_codes

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AGAIN_SECONDS = 1.0  # one Ctrl-C comes twice where the launcher passes on what the terminal has sent already
_END = b"\0"  # no signal has this number


class Interrupted(Exception):
    """The run ends early, on all ranks at the same step."""


def end_at_signals(program: str) -> dict[signal.Signals, Any]:
    """End this process with code 75 (Ctrl-C: 130) on `SIGNALS`, until `Signals` records them.

    For the first line of a program: importing torch and DeepSpeed takes seconds. torch reads its level of C++ messages
    as it is imported. A warning shows 25 lines of stack, for example when the store of another run closes.

    Returns:
        The handlers of these signals before.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    def end(number: int, frame: Any) -> None:
        line = f"{program}: {signal_name(number)} while no training is under way: nothing to save\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        os._exit(_code(number))

    return {number: signal.signal(number, end) for number in _heard()}


def _heard() -> list[signal.Signals]:
    """`SIGNALS`, without SIGINT if this is a background job of a script."""
    return [number for number in SIGNALS if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


def signal_name(number: int) -> str:
    """The signal as people know it: "Ctrl-C", "SIGTERM"."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _code(number: int) -> int:
    """The exit code if a signal ends the process before there is anything to save."""
    return exit_codes.CTRL_C if number == signal.SIGINT else exit_codes.INTERRUPTED


class Signals:
    """Records `SIGNALS` while `installed`; a second Ctrl-C ends the process at once.

    Attributes:
        received: number of the first signal; 0 without one.
        ranks_have_met: until this is set, a signal ends the process at once; a run that only evaluates never sets it.
        moment: printed when a signal ends the process at once.
        before_end: called, from another thread, before a signal ends the process at once.
    """

    def __init__(self) -> None:
        self.received = 0
        self.ranks_have_met = False
        self.moment = "before the ranks have met"
        self.before_end: Callable[[], None] | None = None

    @contextlib.contextmanager
    def installed(self, *, is_local_main: bool = True) -> Iterator[Signals]:
        """Record signals within the block; does nothing outside the main thread.

        A process that waits for other ranks inside a library runs no Python handler. Signal numbers therefore also go
        into a pipe, which a thread reads.

        Args:
            is_local_main: print a line when a signal ends this process before the ranks have met.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = {number: signal.signal(number, self._note) for number in _heard()}
        old_descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(reading, is_local_main), name="signals", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(old_descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            # Closing would not end the thread: a forked loader worker holds the pipe open.
            os.write(writing, _END)
            thread.join()
            os.close(writing)

    def _note(self, number: int, frame: Any) -> None:
        self.received = self.received or number

    def _watch(self, reading: int, is_local_main: bool) -> None:
        def say(text: str) -> None:
            if is_local_main:
                print(f"train.py: {text}", file=sys.stderr, flush=True)

        first = None  # Ctrl-C
        with open(reading, "rb", buffering=0) as pipe:
            while (received := pipe.read(1)) != _END:
                number = received[0]
                if number not in SIGNALS:
                    continue
                self.received = self.received or number
                if not self.ranks_have_met:
                    say(f"{signal_name(number)} {self.moment}: nothing to save")
                    if self.before_end is not None:
                        self.before_end()
                    os._exit(_code(number))
                if number != signal.SIGINT:
                    continue
                if first is None:
                    first = time.monotonic()
                    say("Ctrl-C: this step is finished and saved; again to end at once, without saving")
                elif time.monotonic() - first >= _AGAIN_SECONDS:
                    say("Ctrl-C again: ended without saving; what came after the last checkpoint is lost")
                    os._exit(exit_codes.CTRL_C)


def ignore_in_worker(worker: int = 0) -> None:
    """For a loader's worker process: ignore signals, because its rank needs it until the step ends.

    Launchers and schedulers signal whole process trees.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
