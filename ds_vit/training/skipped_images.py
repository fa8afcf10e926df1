"""Which images --on-bad-image skip has passed over: counted over all ranks, each file once in a log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_vit.data import Source
from ds_vit.fault_tolerance.errors import UserError


class SkippedImages:
    """Images that could not be decoded: in training replaced by others, in evaluation left out of the count.

    Args:
        log: file that rank 0 writes each of them to once, a JSON object a line; None for none.
        active: whether there can be any; what cannot be is not exchanged.
    """

    def __init__(self, log: Path | None, *, active: bool) -> None:
        self._log = log
        self._active = active
        self._new: list[tuple[str, str, int | None]] = []  # of this rank since the last exchange: file, reason, epoch
        self._by_file: Counter[str] = Counter()
        self._by_epoch: Counter[str] = Counter()
        self._earlier = 0  # of a checkpoint that has the sum alone
        self._logged: set[str] = set()
        if log is not None and log.exists():  # of the run that goes on
            self._logged = {json.loads(line)["file"] for line in log.read_text().splitlines()}

    def found(self, source: Source, skipped: Sequence[tuple[int, str]], epoch: int | None) -> None:
        """Note what this rank has met, from a `MicroBatch`; `epoch` is None in evaluation."""
        self._new += [(source.describe(number), reason, epoch) for number, reason in skipped]

    def gather(self) -> int:
        """How many training samples were replaced so far, on all ranks (a collective)."""
        if self._active:
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, self._new)
            self._new = []
            for file, reason, epoch in (item for of_rank in everywhere for item in of_rank):
                if epoch is not None:
                    self._by_file[file] += 1
                    self._by_epoch[str(epoch)] += 1
                self._write(file, reason, epoch)
        return self._earlier + sum(self._by_file.values())

    def _write(self, file: str, reason: str, epoch: int | None) -> None:
        if self._log is None or file in self._logged:
            return
        self._logged.add(file)
        if dist.get_rank() == 0:
            split = "evaluation" if epoch is None else "training"
            try:
                with self._log.open("a") as log:
                    log.write(json.dumps({"file": file, "split": split, "reason": reason}) + "\n")
            except OSError as error:
                raise UserError(f"{self._log} cannot be written to: {error.strerror or error}") from error

    def state_dict(self) -> dict[str, Any]:
        """Of training, as plain data (a collective); by file and by epoch only where there are any."""
        state: dict[str, Any] = {"skipped_images": self.gather()}
        if self._by_file:
            state |= {"skipped_by_file": dict(sorted(self._by_file.items())), "skipped_by_epoch": dict(self._by_epoch)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._by_file = Counter(state.get("skipped_by_file", {}))
        self._by_epoch = Counter(state.get("skipped_by_epoch", {}))
        self._earlier = state["skipped_images"] - sum(self._by_file.values())
