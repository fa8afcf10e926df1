"""Damaged images that were skipped: counted over all ranks, each file once in a log, and the limit of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_vit.config.run_folder import LineLog
from ds_vit.data.sources.source import Source


@dataclass(eq=False)
class SkippedImages:
    """Images that could not be decoded: in training replaced by others, in evaluation left out of the count.

    Attributes:
        log: file that rank 0 writes each of them to once, a JSON object per line; None to write none.
        epoch_images: images in an epoch of training.
        most: the share of them that may be replaced, and at least one if it is above 0.
    """

    log: Path | None
    epoch_images: int = 0
    most: float = 1.0

    def __post_init__(self) -> None:
        # Of this rank since the last exchange: file, reason, split, epoch.
        self._new: list[tuple[str, str, str, int | None]] = []
        self._by_file: Counter[str] = Counter()
        self._by_epoch: Counter[str] = Counter()
        # Since the start or the resume: damaged files may have been repaired in between.
        self._towards_limit: Counter[int] = Counter()  # by epoch
        self._first = ""  # file and reason
        self._logged: set[str] = set()
        self._lines = LineLog(self.log) if self.log is not None else None
        if self.log is not None and self.log.exists():  # of the run that is resumed
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that a full disk or a kill cut off
                    self._logged.add(json.loads(line)["file"])

    def add(self, source: Source, skipped: Sequence[tuple[int, str]], split: str, epoch: int | None = None) -> None:
        """Add the skipped images of a `MicroBatch` of this rank.

        Args:
            source: of the batch.
            skipped: as `MicroBatch.skipped`.
            split: "training" or "evaluation", for the log.
            epoch: that the image was replaced in; None for evaluation, which only leaves it out.
        """
        self._new += [(source.describe(number), reason, split, epoch) for number, reason in skipped]

    def gather(self) -> int:
        """How many training samples were replaced so far, on all ranks (a collective)."""
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, self._new)
        self._new = []
        for file, reason, split, epoch in sorted(itertools.chain.from_iterable(everywhere), key=itemgetter(0)):
            if epoch is not None:
                self._by_file[file] += 1
                self._by_epoch[str(epoch)] += 1
                self._towards_limit[epoch] += 1
                self._first = self._first or f"{file}: {reason}"
            if self._lines is not None and file not in self._logged and dist.get_rank() == 0:
                self._lines.add({"file": file, "split": split, "reason": reason})
            self._logged.add(file)
        return self._by_file.total()

    def too_many(self) -> str:
        """An error message if an epoch has had more of them than it may, else "".

        As of the last `gather`; if none is allowed, a collective.
        """
        if not self.most:
            self.gather()
        epoch, number = max(self._towards_limit.items(), key=itemgetter(1), default=(0, 0))
        if number <= max(self.most * self.epoch_images, self.most > 0):  # one of a few images is a large share
            return ""
        allowed = f"--max-bad-images allows {self.most:g}" if self.most else "none is allowed"
        return (
            f"{number:,} of the {self.epoch_images:,} images of epoch {epoch} ({number / self.epoch_images:.2g}) "
            f"are damaged ({self._first}), and {allowed}; "
            f"{self.log} names those found so far, and ds-vit doctor --images DATA_DIR all damaged files; repair or "
            "replace them, or allow more by --on-bad-image skip and --max-bad-images"
        )

    def state_dict(self) -> dict[str, Any]:
        """Of training, as plain data (a collective); by file and by epoch only where there are any."""
        state: dict[str, Any] = {"skipped_images": self.gather()}
        if self._by_file:
            state |= {"skipped_by_file": dict(sorted(self._by_file.items())), "skipped_by_epoch": dict(self._by_epoch)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._by_file = Counter(state.get("skipped_by_file", {}))
        self._by_epoch = Counter(state.get("skipped_by_epoch", {}))
