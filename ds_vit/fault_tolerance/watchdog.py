"""A rank that makes no progress, or is lost, ends the run on every rank in bounded time, with a message.

Each rank has two daemon threads. One sends heartbeats through the process group's store and reads whether a rank has
ended the run. The other has the clocks: it decides when this rank's main thread, or the store, has been silent for too
long. Only rank 0 reads all heartbeats, so a thousand ranks cost the store a few hundred requests per second.

In a stall every rank prints its place and the stacks of its threads, and ends with code 71. A rank that died, or whose
host or link is gone, is named, and the others end with code 72.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.fault_tolerance.roll_call import GRACE_SECONDS, RAISED_SECONDS, Place, Roll, Sign, Verdict
from ds_vit.fault_tolerance.stack import innermost, pending_collectives

LOST_SECONDS = 60.0
"""Longest time without a heartbeat; half of `stall_seconds` if that is shorter.

A frozen rank stalls the others too, and must be found before they time out.
"""

_FALLBACK_SECONDS = 60.0  # additional time for a main thread that never releases the GIL
_COMMUNICATION = re.compile(
    # Not a bare "timed out": DataLoader and CUDA kernels say that too.
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|(wait|operation) timeout|socket|remote peer",
    re.IGNORECASE,
)
_run_number = itertools.count()
T = TypeVar("T")


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception means that a peer or its connection is gone, not that this rank failed."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:300]


class Watchdog:
    """Watches one run, as a context manager from building the model to the last file.

    Args:
        stall_seconds: longest time between two calls of `beat`; 0 disables the watchdog.
        rank: of this process.
        world_size: the number of ranks.
        local_rank: of this process on its host.
        folder: for the flight recorder's dump (`stall/` in it).
        store: for heartbeats (default: the process group's, on a separate connection).
        end: ends the process with a code; tests replace it.
    """

    def __init__(
        self,
        stall_seconds: float,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        folder: Path | None = None,
        store: Any | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.stall_seconds = stall_seconds
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.lost_seconds = min(stall_seconds / 2, LOST_SECONDS)
        self._folder = folder
        self._store: Any = store  # created in `__enter__`, unless given
        self._end = end
        self._host = socket.gethostname()
        self._period = min(2.0, max(0.2, self.lost_seconds / 10))
        self._main = threading.get_ident()
        self._place = Place()
        self._patience = 1.0
        self._progress = time.monotonic()
        self._state, self._error = "runs", ""
        self._contact = self._progress
        self._number = 0
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._roll: Roll | None = None

    # ---- for the training loop ------------------------------------------------------------------------------------

    def beat(self, step: int, phase: str, *, micro_batch: int = 0, patience: float = 1.0) -> None:
        """Record progress: restart this rank's clock. Takes less than a microsecond.

        Args:
            step: counts from 1.
            phase: the current activity, for messages.
            micro_batch: counts from 1 within the step.
            patience: the activity may take this many times `stall_seconds`.
        """
        self._place = Place(step, micro_batch, phase)
        self._patience = patience
        self._progress = time.monotonic()

    def micro_batches(self, batches: Iterator[T]) -> Generator[T, None, None]:
        """Pass batches through, with a beat before (waiting for data) and after each; phase and patience are kept."""
        while True:
            place, patience = self._place, self._patience
            self.beat(place.step, "waiting for data", micro_batch=place.micro_batch)
            batch = next(batches, None)
            if batch is None:
                return
            self.beat(place.step, place.phase, micro_batch=place.micro_batch + 1, patience=patience)
            yield batch

    def __enter__(self) -> Watchdog:
        if self.stall_seconds <= 0:
            return self
        self._progress = self._contact = time.monotonic()
        if self.world_size > 1:
            number = next(_run_number)
            store = self._store or dist.distributed_c10d._get_default_store().clone()
            self._store = dist.PrefixStore(f"ds_vit/watchdog/{number}", store)
            if self.rank == 0:
                self._roll = Roll(self.world_size, self.lost_seconds, time.monotonic())
            self._start(self._talk, "watchdog-talk")
        self._start(self._watch, "watchdog-clock")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stall_seconds <= 0:
            return
        if error is not None and self.world_size > 1 and is_communication_error(error):
            # The lost rank is known after a time of silence; the threads then end this process.
            self._state, self._error = "cut off", _described(error)
            self._stopped.wait(self.lost_seconds + 4 * GRACE_SECONDS)
        elif error is not None:
            self._state, self._error = "raised", _described(error)
            self._leave(RAISED_SECONDS + 5 * self._period)
        else:
            self._state = "left"
            self.beat(self._place.step, "end")
            self._leave(self.stall_seconds)
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * self._period)
        faulthandler.cancel_dump_traceback_later()

    # ---- the store: signs of life out, verdicts in -----------------------------------------------------------------

    def _start(self, function: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _talk(self) -> None:
        """Until the run ends: send heartbeats and check for a decision to end it."""
        broken: float | None = None
        while not self._stopped.wait(self._period if self._number else 0.0):
            try:
                self._tell()
                if self._state != "raised" and self._store.check(["verdict"]):
                    self._carry_out(Verdict(**json.loads(self._store.get("verdict"))))
                elif self._roll is not None and (verdict := self._call_roll(self._roll)) is not None:
                    self._give_up(verdict)
            except RuntimeError:  # the store's errors: rank 0 or the way to it is gone
                if self._state in ("left", "raised"):
                    return
                broken = broken or time.monotonic()
                if time.monotonic() - broken >= GRACE_SECONDS:
                    self._contact = -float("inf")
                    return
            else:
                broken = None
                self._contact = time.monotonic()

    def _tell(self) -> None:
        self._number += 1
        sign = Sign(self._number, self._state, self._host, self._place, self._error)
        self._store.set(f"rank/{self.rank}", sign.pack())

    def _call_roll(self, roll: Roll) -> Verdict | None:
        """Read all heartbeats (rank 0)."""
        known = [r for r in range(self.world_size) if r in roll.signs or self._store.check([f"rank/{r}"])]
        now = time.monotonic()
        for rank, text in zip(known, self._store.multi_get([f"rank/{r}" for r in known]), strict=True):
            roll.hear(rank, Sign.unpack(text), now)
        return roll.judge(now)

    def _leave(self, seconds: float) -> None:
        """Send the last heartbeat; rank 0, whose process may hold the store, waits for the others."""
        if self.world_size == 1:
            return
        deadline = time.monotonic() + seconds
        pause = 0.01  # the others come within milliseconds of each other, mostly
        with contextlib.suppress(RuntimeError):
            self._tell()
            while self._roll is not None and time.monotonic() < deadline and not self._stopped.is_set():
                if self._others_have_left():
                    return
                if self._state == "raised" and self._store.check(["verdict"]):
                    self._stopped.wait(2 * self._period)  # the others read it before the store goes with this process
                    return
                self._stopped.wait(pause)
                pause = min(2 * pause, self._period / 4)

    def _others_have_left(self) -> bool:
        """Whether all other ranks have sent their last heartbeat."""
        keys = [f"rank/{rank}" for rank in range(1, self.world_size)]
        if not self._store.check(keys):
            return False
        return all(Sign.unpack(text).state in ("left", "raised") for text in self._store.multi_get(keys))

    def _give_up(self, verdict: Verdict) -> None:
        """Publish the decision to end the run; the first one counts."""
        packed = json.dumps(asdict(verdict))
        mine = self._store.compare_set("verdict", "", packed) == packed.encode()
        if mine and verdict.kind == "lost":
            self._say(f"{verdict.line}; the other ranks end with code {exit_codes.LOST}")

    def _carry_out(self, verdict: Verdict) -> None:
        """Print the message, wait until all ranks have read the decision, and end."""
        if not self._ending.acquire(blocking=False):
            return
        if verdict.kind == "stall":
            if self._roll is not None:
                with contextlib.suppress(RuntimeError):
                    self._call_roll(self._roll)
                self._say(f"{verdict.line}{self._roll.behind()}; every rank ends with code {exit_codes.STALLED}")
            self._show_place()
        with contextlib.suppress(RuntimeError):
            read = self._store.add("read", 1)
            deadline = time.monotonic() + GRACE_SECONDS
            # No rank ends before all have read it: the store may end with rank 0's process, and a closed socket
            # raises errors in the peers' collectives.
            while not self._store.check(["go"]) and time.monotonic() < deadline:
                if self._roll and read >= self._roll.present(time.monotonic() - 3 * self._period - 1.0):
                    self._store.set("go", "1")
                time.sleep(0.1)
                read = self._store.add("read", 0)
            if self.rank == 0:
                time.sleep(0.5)
        self._finish(exit_codes.STALLED if verdict.kind == "stall" else exit_codes.LOST)

    # ---- the clocks ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the run ends: check this rank's progress and the store's answers."""
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            limit = self.stall_seconds * self._patience
            # A main thread that never releases the GIL stops this loop too; then C code ends the process.
            faulthandler.dump_traceback_later(limit + _FALLBACK_SECONDS, exit=True, file=2)
            if now - self._progress >= limit and self._state == "runs":
                self._stall(now - self._progress)
            if self.world_size > 1 and now - self._contact >= self.lost_seconds and self._state in ("runs", "cut off"):
                self._store_lost()

    def _stall(self, seconds: float) -> None:
        place = f"rank {self.rank} (host {self._host}) has made no progress for {seconds:.0f} s at {self._place}"
        verdict = Verdict("stall", f"{place} (--stall-seconds {self.stall_seconds:g})")
        if self.world_size > 1:
            # The other thread reads the decision; a store that hangs is found in the next rounds.
            asked = threading.Thread(target=self._ask_all_to_stop, args=(verdict,), daemon=True)
            asked.start()
            asked.join(GRACE_SECONDS)
            if self._stopped.wait(2 * GRACE_SECONDS):
                return
        if self._ending.acquire(blocking=False):
            self._say(f"{verdict.line}; ending with code {exit_codes.STALLED}")
            self._show_place()
            self._finish(exit_codes.STALLED)

    def _ask_all_to_stop(self, verdict: Verdict) -> None:
        with contextlib.suppress(RuntimeError):
            self._give_up(verdict)

    def _store_lost(self) -> None:
        """Rank 0's process, its host or the connection is gone; each host prints it."""
        if not self._ending.acquire(blocking=False):
            return
        if self.local_rank == 0:
            self._say(
                f"rank 0 is lost: rank {self.rank} (host {self._host}) has no answer from it any more (killed, out of "
                f"memory, or its host or the network is gone), at {self._place}; ending with code {exit_codes.LOST}"
            )
        self._finish(exit_codes.LOST)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        print(f"train.py: error: {line}", file=sys.stderr, flush=True)

    def _show_place(self) -> None:
        """Print this rank's place, the collective of its main thread, all stacks and pending collectives."""
        idle = time.monotonic() - self._progress
        where = innermost(sys._current_frames().get(self._main))
        self._say(f"rank {self.rank} (host {self._host}): {self._place} for {idle:.0f} s{where}; stacks follow")
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        for line in self._flight_recorder():
            self._say(f"rank {self.rank}: {line}")

    def _flight_recorder(self) -> list[str]:
        """Write torch's record of collectives to `stall/`, and return the unfinished ones as lines."""
        import torch._C._distributed_c10d as c10d

        text, entries = b"", []
        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's, and since torch 2.9 everybody's
            if not entries and hasattr(c10d, name):
                with contextlib.suppress(RuntimeError, ValueError):
                    text = getattr(c10d, name)()
                    entries = json.loads(text).get("entries", [])
        if not entries:
            return []
        lines = pending_collectives(entries)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                path = self._folder / "stall" / f"rank-{self.rank:05d}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
                lines.append(f"torch's flight recorder is in {path}")
        return lines

    def _finish(self, code: int) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._end(code)
