"""Heartbeats, a stall timer and stacks: a rank that stalls or is lost ends the run on every rank, with a message.

Each rank has two daemon threads. One sends heartbeats through the process group's store and reads whether a rank has
ended the run. The other is the timer: it decides when this rank's main thread, or the store, has been silent for too
long. Only rank 0 reads all heartbeats, so a thousand ranks cost the store a few hundred requests per second.

In a stall every rank prints its place and the stacks of its threads, and ends with code 71. A rank that died, failed,
or whose host or link is gone, is named, and the others end with code 72.
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
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import enumerate_some, first_line

LOST_SECONDS = 60.0
"""Longest time without a heartbeat; half of `stall_seconds` if that is shorter.

A frozen rank stalls the others too, and must be found before they time out.
"""

DEFAULT_SECONDS = 300.0  # below the ten minutes after which NCCL gives up, with less to say
COMPILE_SECONDS = 3600.0  # of the slowest mode, with as many ranks as cores
_RAISED_SECONDS = 5.0  # for ranks that raise the same error at different times
_STORE_SECONDS = 10.0  # for a store to come back, and for a heartbeat after a connection has broken
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


# ---- rank 0's record of the heartbeats -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a rank is. `micro_batch` counts from 1 within the step; 0 where this rank takes none."""

    step: int = 0
    micro_batch: int = 0
    phase: str = "start"

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step}{micro}, {self.phase}"


@dataclass(frozen=True)
class Heartbeat:
    """One message of a living rank.

    Attributes:
        number: counts the heartbeats of this rank.
        state: "runs", "left" (finished) or "raised" (it ends with `error`).
        host: of the rank.
        place: where it is.
        error: see `state`; of a rank that runs: that of its broken connection, while it waits for the reason.
    """

    number: int = 0
    state: str = "runs"
    host: str = ""
    place: Place = field(default_factory=Place)
    error: str = ""

    def pack(self) -> str:
        """JSON for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str | bytes) -> Heartbeat:
        """The counterpart of `pack`."""
        values = json.loads(text)
        return cls(**{**values, "place": Place(**values["place"])})


@dataclass(frozen=True)
class Shutdown:
    """The decision to end the run: its exit code, and the message."""

    code: int
    line: str


class Heartbeats:
    """Each rank's last heartbeat (pure, except for the times that it receives).

    Args:
        world_size: number of ranks.
        lost_seconds: silence after which a rank counts as lost.
        now: when the run began, in seconds of any clock.
    """

    def __init__(self, world_size: int, lost_seconds: float, now: float) -> None:
        self.lost_seconds = lost_seconds
        self.last: dict[int, Heartbeat] = {}
        self._received = dict.fromkeys(range(world_size), now)
        self._trouble_at: float | None = None

    def record(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat; one that was read before does not count."""
        if rank not in self.last or heartbeat.number != self.last[rank].number:
            self._received[rank] = now
        self.last[rank] = heartbeat

    def find_failure(self, now: float) -> Shutdown | None:
        """Check whether a rank is lost, or ended with an error while others wait."""
        running = [r for r in self._received if r not in self.last or self.last[r].state == "runs"]
        raised = [r for r, heartbeat in self.last.items() if heartbeat.state == "raised"]
        cut_off = [r for r in running if r in self.last and self.last[r].error]
        if self._trouble_at is None and (cut_off or (raised and running)):
            self._trouble_at = now
        waited = 0.0 if self._trouble_at is None else now - self._trouble_at
        if raised and running and waited >= _RAISED_SECONDS:
            line = f"{self._names(raised[:1])} ended with an error: {self.last[raised[0]].error}"
            return Shutdown(exit_codes.LOST, line)
        limit = self.lost_seconds
        if cut_off and waited >= _STORE_SECONDS:  # a broken connection shortens it, from then on
            limit = min(limit, _STORE_SECONDS)
        lost = [r for r in running if now - self._received[r] >= limit]
        if cut_off and not lost and waited >= 3 * _STORE_SECONDS:
            return Shutdown(
                exit_codes.LOST,
                f"{self._names(cut_off)} lost the connection to a peer, yet every rank lives: a fault of the network "
                f"between hosts ({self.last[cut_off[0]].error}); `ds-vit doctor` tests it",
            )
        if not lost:
            return None
        silent = max(now - self._received[r] for r in lost)
        return Shutdown(
            exit_codes.LOST,
            f"{self._names(lost)} {'is' if len(lost) == 1 else 'are'} lost: no sign of life for {silent:.0f} s "
            f"(killed, out of memory, or the host or its network is gone); last seen at {self._place(lost[0])}",
        )

    def describe_slowest(self) -> str:
        """The ranks that are furthest behind, for the message about a stall."""
        running = {r: heartbeat.place for r, heartbeat in self.last.items() if heartbeat.state == "runs"}
        spots = {r: (place.step, place.micro_batch) for r, place in running.items()}
        last = [r for r in running if spots[r] == min(spots.values())]
        if len(last) == len(running):
            waiting = [r for r in running if running[r].phase == "waiting for data"]
            last = waiting if len(waiting) < len(running) else []
        return f"; furthest back: {self._names(last)} at {self._place(last[0])}" if last else ""

    def _names(self, ranks: list[int]) -> str:
        hosts = sorted({self.last[r].host for r in ranks if r in self.last})
        where = f" (host{'s' * (len(hosts) > 1)} {', '.join(hosts[:8])})" if any(hosts) else ""
        return f"rank{'s' * (len(ranks) > 1)} {enumerate_some([*map(str, ranks)], 16)}{where}"

    def _place(self, rank: int) -> str:
        return str(self.last[rank].place) if rank in self.last else "the start"


# ---- the threads of a rank -------------------------------------------------------------------------------------------


class Watchdog:
    """Watches one run, as a context manager from building the model to the last file.

    Args:
        stall_seconds: longest time between two calls of `beat`; 0 disables the watchdog. None is `DEFAULT_SECONDS` if
            there are several ranks, else 0.
        compiles: a phase may compile in its first time, and may then take longer.
        rank: of this process.
        world_size: the number of ranks.
        local_rank: of this process on its host.
        store: for heartbeats (default: the process group's, on a separate connection).
        end: ends the process with a code; tests replace it.
    """

    def __init__(
        self,
        stall_seconds: float | None,
        *,
        compiles: bool = False,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        store: Any | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        if stall_seconds is None:
            stall_seconds = DEFAULT_SECONDS if world_size > 1 else 0.0
        self.stall_seconds = stall_seconds
        self.first_patience = max(4.0, COMPILE_SECONDS / stall_seconds) if compiles and stall_seconds else 1.0
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.lost_seconds = min(stall_seconds / 2, LOST_SECONDS)
        self._store: Any = store  # created in `__enter__`, unless given
        self._end = end
        self._host = socket.gethostname()
        self._period = min(2.0, max(0.2, self.lost_seconds / 10))
        self._place = Place()
        self._patience = 1.0
        self._begun: set[str] = set()
        self._progress = self._contact = time.monotonic()
        self._state, self._error = "runs", ""
        self._number = 0
        self._stalled: Shutdown | None = None
        self._stopped, self._all_have_read = threading.Event(), threading.Event()
        self._ending = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._heartbeats: Heartbeats | None = None  # of rank 0

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

    def begin(self, step: int, phase: str) -> float:
        """Record the start of a phase; returns how many times `stall_seconds` it may take."""
        patience = 1.0 if phase in self._begun else self.first_patience
        self._begun.add(phase)
        self.beat(step, phase, patience=patience)
        return patience

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
        if self.rank == 0:
            self._heartbeats = Heartbeats(self.world_size, self.lost_seconds, self._progress)
        if self.world_size > 1:
            number = next(_run_number)
            store = self._store or dist.distributed_c10d._get_default_store().clone()
            self._store = dist.PrefixStore(f"ds_vit/watchdog/{number}", store)
            self._start(self._exchange, "watchdog-store")
        self._start(self._watch, "watchdog-timer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stall_seconds <= 0:
            return
        if error is None:
            self._state = "left"
            self.beat(self._place.step, "end")
            self._leave(self.stall_seconds)
        else:
            self._error = f"{type(error).__name__}: {first_line(error)}"[:300]
            if self.world_size > 1 and is_communication_error(error):
                # Rank 0 knows the reason after a time of silence; the threads then end this process.
                self.beat(self._place.step, self._place.phase, micro_batch=self._place.micro_batch, patience=100)
                self._stopped.wait(self.lost_seconds + 4 * _STORE_SECONDS)
            self._state = "raised"
            self._leave(_RAISED_SECONDS + 5 * self._period)
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * self._period)
        faulthandler.cancel_dump_traceback_later()

    # ---- the store -------------------------------------------------------------------------------------------------

    def _start(self, function: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _exchange(self) -> None:
        """Until the run ends: send heartbeats, publish a failure (the first one counts), and end when there is one."""
        broken: float | None = None
        while not self._stopped.wait(self._period if self._number else 0.0):
            try:
                self._send()
                failure = self._read_heartbeats()
                if found := self._stalled or failure:
                    self._store.compare_set("shutdown", "", json.dumps(asdict(found)))
                if self._state != "raised" and self._store.check(["shutdown"]):
                    self._shut_down(Shutdown(**json.loads(self._store.get("shutdown"))))
            except RuntimeError:  # the store's errors: rank 0 or the way to it is gone
                if self._state != "runs":
                    return
                broken = broken or time.monotonic()
                if time.monotonic() - broken >= _STORE_SECONDS:
                    self._contact = -float("inf")
                    return
            else:
                broken = None
                self._contact = time.monotonic()

    def _send(self) -> None:
        self._number += 1
        heartbeat = Heartbeat(self._number, self._state, self._host, self._place, self._error)
        self._store.set(f"rank/{self.rank}", heartbeat.pack())

    def _read_heartbeats(self) -> Shutdown | None:
        """On rank 0, read all heartbeats and find a failure."""
        if self._heartbeats is None:
            return None
        last = self._heartbeats.last
        known = [r for r in range(self.world_size) if r in last or self._store.check([f"rank/{r}"])]
        now = time.monotonic()
        for rank, text in zip(known, self._store.multi_get([f"rank/{r}" for r in known]), strict=True):
            self._heartbeats.record(rank, Heartbeat.unpack(text), now)
        return self._heartbeats.find_failure(now)

    def _leave(self, seconds: float) -> None:
        """Send the last heartbeat; rank 0, whose process may hold the store, waits for the others'."""
        if self.world_size == 1:
            return
        deadline = time.monotonic() + seconds
        keys = [f"rank/{rank}" for rank in range(1, self.world_size)]
        pause = 0.01  # the others come within milliseconds of each other, mostly
        with contextlib.suppress(RuntimeError):
            self._send()
            while self.rank == 0 and time.monotonic() < deadline and not self._stopped.is_set():
                texts = self._store.multi_get(keys) if self._store.check(keys) else None
                if texts and all(Heartbeat.unpack(text).state != "runs" for text in texts):
                    return
                if self._state == "raised" and self._store.check(["shutdown"]):
                    self._stopped.wait(2 * self._period)  # the others read it before the store goes with this process
                    return
                self._stopped.wait(pause)
                pause = min(2 * pause, self._period / 4)

    # ---- the timer -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the run ends: check this rank's progress and the store's answers."""
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            limit = self.stall_seconds * self._patience
            # A main thread that never releases the GIL stops this loop too; then C code ends the process.
            faulthandler.dump_traceback_later(limit + _FALLBACK_SECONDS, exit=True, file=2)
            if self._state != "runs":
                continue
            if now - self._progress >= limit:
                self._stall(now - self._progress)
            if self.world_size > 1 and now - self._contact >= self.lost_seconds:
                causes = "killed, out of memory, or its host or the network is gone"
                asked = f"rank {self.rank} (host {self._host}) has no answer from it any more ({causes})"
                self._shut_down(Shutdown(exit_codes.LOST, f"rank 0 is lost: {asked}, at {self._place}"))

    def _stall(self, seconds: float) -> None:
        self._stalled = Shutdown(
            exit_codes.STALLED,
            f"rank {self.rank} (host {self._host}) has made no progress for {seconds:.0f} s at {self._place} "
            f"(--stall-seconds {self.stall_seconds:g})",
        )
        # The other thread publishes it and ends this rank, unless the store hangs.
        if self.world_size == 1 or not self._stopped.wait(3 * _STORE_SECONDS):
            self._shut_down(self._stalled)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _shut_down(self, found: Shutdown) -> None:
        """Print the message and end."""
        if not self._ending.acquire(blocking=False):
            return
        is_stall = found.code == exit_codes.STALLED
        if self.local_rank == 0:  # once per host, which may have its own log
            slowest = self._heartbeats.describe_slowest() if is_stall and self._heartbeats is not None else ""
            self._say(f"{found.line}{slowest}; the run ends with code {found.code}")
        if is_stall:
            idle = time.monotonic() - self._progress
            self._say(f"rank {self.rank} (host {self._host}): {self._place} for {idle:.0f} s; stacks follow")
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(file=2, all_threads=True)
        if self.world_size > 1:
            # No rank ends before all have read the decision: the store may end with rank 0's process, and a closed
            # socket raises errors in the peers' collectives. A lost rank reads nothing, and the store may hang.
            self._start(self._count_readers, "watchdog-end")
            self._all_have_read.wait(self.lost_seconds + 2 * _STORE_SECONDS if is_stall else 2 * self._period + 2.5)
        self._stopped.set()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._end(found.code)

    def _count_readers(self) -> None:
        """Wait until every rank has read the decision to end the run, or the store is gone."""
        with contextlib.suppress(RuntimeError):
            count = self._store.add("read", 1)
            while count < self.world_size and not self._stopped.wait(self._period / 4):
                count = self._store.add("read", 0)
            if self.rank == 0:
                self._stopped.wait(self._period)  # the others read the count before the store goes with this process
        self._all_have_read.set()

    def _say(self, line: str) -> None:
        print(f"train.py: error: {line}", file=sys.stderr, flush=True)
