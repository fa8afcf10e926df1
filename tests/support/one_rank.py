"""A launcher of one rank, for the supervisor's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_vit.launching.launchers import Launcher
from ds_vit.launching.rank import Job, signal_ranks


@dataclass
class OneRank(Launcher):
    """Starts rank 0 of 1 by itself."""

    def __post_init__(self) -> None:
        self.environ = {**self.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

    def commands(self, job: Job) -> dict[str, list[str]]:
        return {"": self._rank_words(job, "127.0.0.1", 1)}

    def send(self, pids: Sequence[int], signum: int) -> None:
        signal_ranks(self.run, signum)
