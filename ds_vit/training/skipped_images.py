"""Images that `--on-bad-image skip` could not decode: counted over all ranks, each file once in a log."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_vit.data.sources.source import Source
from ds_vit.run_folder import LineLog


@dataclass(eq=False)
class SkippedImages:
    """Images that could not be decoded: in training replaced by others, in evaluation left out of the count.

    Attributes:
        log: file that rank 0 writes each of them to once, a JSON object per line; None for none.
        active: whether images may be skipped; otherwise the ranks exchange nothing.
        epoch_images: images in an epoch of training.
        most: the share of them that may be replaced, and at least one if it is above 0.
    """

    log: Path | None
    active: bool
    epoch_images: int = 0
    most: float = 1.0

    def __post_init__(self) -> None:
        # Of this rank since the last exchange: file, reason, split, epoch.
        self._new: list[tuple[str, str, str, int | None]] = []
        self._by_file: Counter[str] = Counter()
        self._by_epoch: Counter[str] = Counter()
        self._towards_limit: Counter[int] = Counter()  # by epoch
        self._logged: set[str] = set()
        self._reasons: dict[str, str] = {}  # by file, of those since the start or the resume
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
        if self.active:
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, self._new)
            self._new = []
            for file, reason, split, epoch in (item for of_rank in everywhere for item in of_rank):
                self._reasons[file] = reason
                if epoch is not None:
                    self._by_file[file] += 1
                    self._by_epoch[str(epoch)] += 1
                    self._towards_limit[epoch] += 1
                if self._lines is not None and file not in self._logged and dist.get_rank() == 0:
                    self._lines.add({"file": file, "split": split, "reason": reason})
                self._logged.add(file)
        return self._by_file.total()

    def too_many(self) -> str:
        """An error message if an epoch has had more of them than it may, else ""; as of the last `gather`."""
        epoch, number = max(self._towards_limit.items(), key=lambda item: item[1], default=(0, 0))
        newest = max(self._towards_limit, default=0)
        self._towards_limit = Counter({newest: self._towards_limit[newest]})  # earlier epochs are over
        if number <= max(self.most * self.epoch_images, self.most > 0):  # one of a few images is a large share
            return ""
        first = next((f" ({file}: {reason})" for file, reason in sorted(self._reasons.items())), "")
        self._towards_limit.clear()  # a run that resumes counts anew: the files may have been repaired
        return (
            f"{number:,} of the {self.epoch_images:,} images of epoch {epoch} ({number / self.epoch_images:.2g}) "
            f"are damaged{first}, and --max-bad-images allows {self.most:g}; "
            f"{self.log} names those found so far, and ds-vit doctor --images DATA_DIR all damaged files; repair or "
            "replace them, or raise --max-bad-images"
        )

    def state_dict(self) -> dict[str, Any]:
        """Of training, as plain data (a collective); by file and by epoch only where there are any."""
        state: dict[str, Any] = {"skipped_images": self.gather()}
        if self._by_file:
            state |= {"skipped_by_file": dict(sorted(self._by_file.items())), "skipped_by_epoch": dict(self._by_epoch)}
        if self._towards_limit.total():
            state["skipped_towards_limit"] = {str(epoch): number for epoch, number in self._towards_limit.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._by_file = Counter(state.get("skipped_by_file", {}))
        self._by_epoch = Counter(state.get("skipped_by_epoch", {}))
        self._towards_limit = Counter({int(epoch): n for epoch, n in state.get("skipped_towards_limit", {}).items()})
