"""Which ranks are lost: each rank's heartbeat as rank 0 receives it, and the decision. No threads, no store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

_CUT_OFF_SECONDS = 10.0  # limit of silence once a connection between ranks has broken
RAISED_SECONDS = 5.0  # for ranks that raise the same error at different times
GRACE_SECONDS = 10.0  # for all ranks to read a verdict; for a store to come back


@dataclass(frozen=True)
class Place:
    """Where a rank stands. `micro_batch` counts from 1 within the step; 0 where this rank takes none."""

    step: int = 0
    micro_batch: int = 0
    phase: str = "start"

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"step {self.step}{micro}, {self.phase}"


@dataclass(frozen=True)
class Sign:
    """A heartbeat: that a rank lives, and where it is.

    Attributes:
        number: counts the heartbeats.
        state: "runs", "left" (finished), "raised" (it ends with `error`) or "cut off" (its connection to another rank
            broke).
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
    def unpack(cls, text: str | bytes) -> Sign:
        """The counterpart of `pack`."""
        values = json.loads(text)
        return cls(**{**values, "place": Place(**values["place"])})


@dataclass(frozen=True)
class Verdict:
    """The decision to end the run: `kind` "stall" or "lost", and the message."""

    kind: str
    line: str


class Roll:
    """Rank 0's record of each rank's last heartbeat (pure, except for the times that it receives).

    Args:
        world_size: number of ranks.
        lost_seconds: silence after which a rank counts as lost.
        now: when the run began, in seconds of any clock.
    """

    def __init__(self, world_size: int, lost_seconds: float, now: float) -> None:
        self.lost_seconds = lost_seconds
        self.signs: dict[int, Sign] = {}
        self._heard = dict.fromkeys(range(world_size), now)
        self._trouble: float | None = None

    def hear(self, rank: int, sign: Sign, now: float) -> None:
        """Record a heartbeat; one that was seen before does not count."""
        if rank not in self.signs or sign.number != self.signs[rank].number:
            self._heard[rank] = now
        self.signs[rank] = sign

    def judge(self, now: float) -> Verdict | None:
        """Check whether a rank is lost, or ended with an error while others wait."""
        running = [r for r in self._heard if r not in self.signs or self.signs[r].state in ("runs", "cut off")]
        raised = [r for r, sign in self.signs.items() if sign.state == "raised"]
        cut_off = [r for r in running if r in self.signs and self.signs[r].state == "cut off"]
        if self._trouble is None and (raised or cut_off):
            self._trouble = now
        waited = now - self._trouble if self._trouble is not None else 0.0
        if raised and running and waited >= RAISED_SECONDS:
            first = raised[0]
            return Verdict("lost", f"{self._name(first)} ended with an error: {self.signs[first].error}")
        limit = min(self.lost_seconds, _CUT_OFF_SECONDS) if cut_off else self.lost_seconds
        # After the first broken connection a rank gets the whole shorter limit.
        lost = [r for r in running if now - self._heard[r] >= limit and (not cut_off or waited >= limit)]
        if lost:
            silent = max(now - self._heard[r] for r in lost)
            return Verdict(
                "lost",
                f"{self._names(lost)} {'is' if len(lost) == 1 else 'are'} lost: no sign of life for {silent:.0f} s "
                f"(killed, out of memory, or the host or its network is gone); last seen at {self._place(lost[0])}",
            )
        if cut_off and waited >= limit + 2 * GRACE_SECONDS:
            return Verdict(
                "lost",
                f"{self._names(cut_off)} lost the connection to a peer, yet every rank lives: a fault of the network "
                f"between hosts ({self.signs[cut_off[0]].error}); `ds-vit doctor` tests it",
            )
        return None

    def present(self, since: float) -> int:
        """The number of running ranks with a heartbeat after `since`."""
        running = [r for r, sign in self.signs.items() if sign.state in ("runs", "cut off")]
        return sum(self._heard[r] >= since for r in running)

    def behind(self) -> str:
        """The ranks that are furthest behind, for the message about a stall."""
        running = {r: s for r, s in self.signs.items() if s.state == "runs"}
        if len(running) < 2:
            return ""
        spot = {r: (s.place.step, s.place.micro_batch) for r, s in running.items()}
        last = [r for r in running if spot[r] == min(spot.values())]
        if len(last) == len(running):
            odd = {s.place.phase for s in running.values()}
            last = [r for r in running if running[r].place.phase == "waiting for data"] if len(odd) > 1 else []
        return f"; furthest back: {self._names(last)} at {self._place(last[0])}" if last else ""

    def _name(self, rank: int) -> str:
        host = self.signs[rank].host if rank in self.signs else ""
        return f"rank {rank}" + (f" (host {host})" if host else "")

    def _names(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return self._name(ranks[0])
        hosts = sorted({self.signs[r].host for r in ranks if r in self.signs})
        listed = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
        where = f" (host{'s' * (len(hosts) > 1)} {', '.join(hosts[:8])})" if hosts else ""
        return f"ranks {listed}{where}"

    def _place(self, rank: int) -> str:
        return str(self.signs[rank].place) if rank in self.signs else "the start"
