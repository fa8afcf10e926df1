"""Being told to stop: signals, the end of a job's time, and how all ranks come to the same answer.

A scheduler that takes the machine back sends SIGTERM or SIGUSR1, to one rank or to all, at any time; Ctrl-C is SIGINT,
to all on this machine. A signal is noted and nothing else; at the next boundary between steps the ranks ask each other
whether any has had one, so that all of them save the same step. Before the ranks have met there is nothing to save and
no rank to ask: the process ends.

Nothing heavy is imported here: `end_at_signals` is there before torch is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ds_vit.fault_tolerance import exit_codes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AGAIN_SECONDS = 1.0  # one Ctrl-C comes twice where the launcher passes on what the terminal has sent already
_END = b"\0"  # no signal has this number


class Interrupted(Exception):
    """The run ends early, on all ranks at the same step.

    Attributes:
        why: for people.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def end_at_signals(program: str) -> None:
    """Let `SIGNALS` end this process with code 75 (Ctrl-C: 130) wherever `Signals` does not note them.

    For the first line of a program: importing torch and DeepSpeed takes seconds, in which a signal would kill.
    """

    def end(number: int, frame: Any) -> None:
        line = f"{program}: {_name(number)} while no training is under way: nothing to save\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        os._exit(_code(number))

    for number in _heard():
        signal.signal(number, end)


def _heard() -> list[signal.Signals]:
    """`SIGNALS`, without SIGINT in a job that a script has put into the background: that Ctrl-C is for another."""
    return [number for number in SIGNALS if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _code(number: int) -> int:
    """The exit code of a process that a signal ends before there is anything to save."""
    return exit_codes.CTRL_C if number == signal.SIGINT else exit_codes.INTERRUPTED


class Signals:
    """Notes `SIGNALS` while `installed`; a second Ctrl-C ends the process at once.

    Attributes:
        received: number of the first signal, 0 before one has come.
        ranks_have_met: until this is set, a signal ends the process at once; a run that only evaluates leaves it so.
        moment: when a signal came that ends the process at once, for people.
        on_first: called with the first signal's name, from another thread, once the ranks have met.
    """

    def __init__(self) -> None:
        self.received = 0
        self.ranks_have_met = False
        self.moment = "before the ranks have met"
        self.on_first: Callable[[str], None] | None = None

    @contextlib.contextmanager
    def installed(self, *, is_local_main: bool = True) -> Iterator[Signals]:
        """Note signals within the block; only the main thread may do this, elsewhere nothing is noted.

        A process that waits inside a library for the other ranks runs no Python handler. The number of a signal
        therefore also goes into a pipe, from which a thread can read it.

        Args:
            is_local_main: say so when a signal ends this process before the ranks have met.
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
            # Not by closing: a loader's worker that was forked from here holds the pipe open.
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
                    say(f"{_name(number)} {self.moment}: nothing to save")
                    os._exit(_code(number))
                on_first, self.on_first = self.on_first, None
                if on_first is not None:
                    with contextlib.suppress(Exception):  # this thread has a second Ctrl-C to hear
                        on_first(_name(number))
                if number != signal.SIGINT:
                    continue
                if first is None:
                    first = time.monotonic()
                    say("Ctrl-C: this step is finished and saved; again to end at once, without saving")
                elif time.monotonic() - first >= _AGAIN_SECONDS:
                    say("Ctrl-C again: ended without saving; what came after the last checkpoint is lost")
                    os._exit(exit_codes.CTRL_C)


def ignore_in_worker(worker: int = 0) -> None:
    """For a loader's worker process: leave the stopping to its rank, which still needs it to reach the boundary.

    Launchers and schedulers signal whole process trees; a worker that died of it would take its rank along.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Deadline:
    """When a run has to have stopped by itself.

    Args:
        end: as `time.time()`; None for never.
        before_seconds: how much earlier to stop, for the save.
    """

    def __init__(self, end: float | None, before_seconds: float) -> None:
        self.at = None if end is None else end - before_seconds

    @property
    def passed(self) -> bool:
        """Whether it is time to stop."""
        return self.at is not None and time.time() >= self.at


class Ballot:
    """The ranks' common answer to small questions, once a step.

    Args:
        group: of all ranks, over gloo, so that no device is waited for; None where there is one rank.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def largest(self, values: Sequence[int]) -> list[int]:
        """Of each value the largest over all ranks (a collective)."""
        if self._group is None:
            return list(values)
        import torch
        import torch.distributed as dist

        answer = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        return answer.tolist()
