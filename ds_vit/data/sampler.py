"""The order in which samples are used: pure functions of (seed, epoch, step).

An epoch is a keyed permutation of the data set cut into global batches; the incomplete one at its end is dropped. Any
rank evaluates the permutation for its own rows only, at any step, for any number of ranks. A row is a place in the
global batch of one optimizer step. Rank r holds the r-th contiguous part of the rows, and its micro-batches are
contiguous parts of that one, in order, so that the rows of a step do not depend on how it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_vit import randomness
from ds_vit.fault_tolerance.errors import UserError


@dataclass(frozen=True)
class SampleOrder:
    """Which sample each row of each step's global batch is. Steps count from 0.

    Attributes:
        num_samples: size of the data set.
        global_batch: rows of one optimizer step.
        seed: the run's seed.
        aug_repeats: how many copies of a sample an epoch has (0 and 1: one), each augmented separately, as timm's
            RepeatAugSampler (Hoffer et al. 2019, "Augment your batch"; DeiT). An epoch keeps its number of rows, so
            that it then visits one sample in `aug_repeats`.
        mixture: where the data set is several with weights, one after the other: the images of each, and its rows of
            an epoch, which together are `num_samples`. Which rows they are is a permutation like any other. Each source
            goes through its images before it begins again, across epochs, each time in another order; those of rows
            that no step takes (behind an epoch's last full batch, between `aug_repeats`) are passed over.

    Raises:
        UserError: not one full global batch in an epoch.
    """

    num_samples: int
    global_batch: int
    seed: int
    aug_repeats: int = 0
    mixture: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.num_samples < self.global_batch:
            raise UserError(
                f"the global batch of {self.global_batch} is larger than the {self.num_samples} training images, so "
                "that an epoch has no full batch; lower --batch-size, the accumulation or the number of ranks, whose "
                f"product may be {self.num_samples} at most"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full global batches in an epoch."""
        return self.num_samples // self.global_batch

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""
        return step // self.steps_per_epoch

    def rows(self, step: int, rows: Sequence[int] | range | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples at some rows of a step's global batch.

        Returns:
            Sample indices and sample keys (`randomness.sample_keys`), int64 [len(rows)] each.
        """
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        positions = step_in_epoch * self.global_batch + self._spread(np.asarray(rows, dtype=np.int64))
        copies = max(1, self.aug_repeats)
        order_key = randomness.mix(self.seed, randomness.name_key("sample order"), epoch)
        indices = randomness.permute(positions // copies, self.num_samples, order_key)
        repeats = positions % copies
        if self.mixture:
            indices, times = self._of_sources(indices, epoch)
            repeats += times * copies
        return indices, randomness.sample_keys(self.seed, epoch, indices, repeats)

    def _of_sources(self, places: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples at places of an epoch in which each source has its rows side by side.

        Returns:
            Sample indices, and how often the epoch has come to each before, int64 [n] each.
        """
        indices, times = np.empty_like(places), np.empty_like(places)
        first_place = first_index = 0
        for number, (images, rows) in enumerate(self.mixture):
            mine = np.flatnonzero((places >= first_place) & (places < first_place + rows))
            rounds, inside = np.divmod(epoch * rows + places[mine] - first_place, images)
            for turn in np.unique(rounds).tolist():
                key = randomness.mix(self.seed, randomness.name_key("source order"), number, turn)
                here = rounds == turn
                indices[mine[here]] = first_index + randomness.permute(inside[here], images, key)
            times[mine] = rounds - epoch * rows // images
            first_place, first_index = first_place + rows, first_index + images
        return indices, times

    def _spread(self, rows: np.ndarray) -> np.ndarray:
        """Which position of the global batch stands at a row: first every `aug_repeats`-th one, then their neighbours.

        Copies of a sample are neighbours by position. Left there, mixup's adjacent pairs would mix an image with
        itself; timm's sampler deals them to different ranks for the same reason.
        """
        copies = max(1, self.aug_repeats)
        if copies == 1:
            return rows
        return np.argsort(np.arange(self.global_batch) % copies, kind="stable")[rows]


@dataclass(frozen=True)
class Share:
    """The rows of the global batch that one data-parallel rank holds; in evaluation, those that all count at a time.

    Attributes:
        dp_rank: this rank's place among the data-parallel ranks.
        dp_size: how many there are.
        micro_batch: rows a rank computes at a time.
        accumulation: micro-batches of an optimizer step.
    """

    dp_rank: int
    dp_size: int
    micro_batch: int
    accumulation: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, f"dp_rank {self.dp_rank} of {self.dp_size}"
        assert self.micro_batch >= 1, f"micro_batch {self.micro_batch}"
        assert self.accumulation >= 1, f"accumulation {self.accumulation}"

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.dp_size * self.accumulation * self.micro_batch

    def rows(self, micro_index: int) -> range:
        """Rows of the `micro_index`-th micro-batch (from 0) of an optimizer step."""
        assert 0 <= micro_index < self.accumulation, f"micro-batch {micro_index} of {self.accumulation}"
        start = (self.dp_rank * self.accumulation + micro_index) * self.micro_batch
        return range(start, start + self.micro_batch)


def evaluation_keys(indices: np.ndarray) -> np.ndarray:
    """The keys that samples have in every evaluation, int64 [B]: no seed, no epoch."""
    return randomness.sample_keys(0, 0, indices)
