"""The launches of a run: which steps each did, on which ranks, in which time; a run that went on has several."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_vit.monitoring.report.record import Record


@dataclass(frozen=True)
class Launch:
    """What one launch, all its ranks together, did of a run.

    Attributes:
        done_before: optimizer steps before it.
        done: the same at its end; what a later launch took back does not count.
        layout: the degrees in words; empty where starts.jsonl does not tell.
        ranks: their number; 0 where that is not known.
        device: name of the accelerator, or "cpu".
        seconds: wall time of these steps, from its start on; None where metrics.jsonl does not tell.
    """

    done_before: int
    done: int
    layout: str
    ranks: int
    device: str
    seconds: float | None

    @property
    def steps(self) -> str:
        """Which it did."""
        return f"{self.done_before + 1:,} to {self.done:,}" if self.done > self.done_before else "none that stayed"

    @property
    def place(self) -> str:
        """Layout, ranks and device in a few words."""
        ranks = _ranks(self.ranks) if self.ranks else ""
        return ", ".join(word for word in (self.layout, ranks, self.device) if word)


def launches(record: Record) -> list[Launch]:
    """Those of a run, in order; none where its folder has no starts.jsonl."""
    starts = record.starts
    before = [start.get("step") or 0 for start in starts]
    rows = record.rows.get("train", ())
    done = record.summary.get("steps") or (rows[-1]["step"] if rows else 0)
    times = [_seconds_at(record, step) for step in before]
    total = record.summary.get("wall_seconds") or _seconds_at(record, done)
    found = []
    for at, start in enumerate(starts):
        # A launch that went on from an earlier step than the one before it took that one's steps back.
        end = min([done, *before[at + 1 :]])
        until = total if at == len(starts) - 1 else times[before.index(end)] if end in before else None
        began = times[at]
        seconds = until - began if until is not None and began is not None and end > before[at] else None
        layout = dict(start.get("layout") or {})
        degrees = " x ".join(f"{name} {layout[name]}" for name in ("pp", "dp", "tp") if name in layout)
        ranks = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1) if layout else 0
        device = str(start.get("device") or "")
        found.append(Launch(before[at], max(end, before[at]), degrees, ranks, device, seconds))
    return found


def first_rows(record: Record) -> list[int]:
    """The step of the first row of kind "train" of each launch, in which its loader starts."""
    steps = [row["step"] for row in record.rows.get("train", ())]
    before = [start.get("step") or 0 for start in record.starts] or [0]
    firsts = (next((step for step in steps if step > done), None) for done in before)
    return sorted({step for step in firsts if step is not None})


def layouts_in_words(record: Record) -> str:
    """One layout after the other; empty where none is known."""
    words = (f"{one.layout} ({_ranks(one.ranks)})" for one in launches(record) if one.layout)
    return ", then ".join(word for word, _ in itertools.groupby(words))


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _seconds_at(record: Record, step: int) -> float | None:
    """Wall time of the run when so many steps were done, from the last row up to there."""
    if step == 0:
        return 0.0
    rows = [row for kind in ("train", "checkpoint") for row in record.rows.get(kind, ()) if row["step"] <= step]
    return max((row["wall_seconds"] for row in rows if "wall_seconds" in row), default=None)
