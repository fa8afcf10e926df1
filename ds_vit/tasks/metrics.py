"""Evaluation metrics: sums that add up over micro-batches and ranks, and the figures that are reported of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ds_vit.data.sampler import evaluation_keys

Batch = Mapping[str, torch.Tensor]
"""The tensors of a micro-batch on this rank's device, by name: "keys" int64 [B] always, the task's fields where their
stage is this rank's, and in evaluation "valid" bool [B], which rows count."""


@dataclass(frozen=True)
class Figure:
    """A reported metric.

    Attributes:
        name: its key in metrics.jsonl.
        label: in a line or a table.
        unit: after the number.
        digits: behind the point, in a line; a table shows one more.
        higher_is_better: whether a higher value is better.
        summed_up: whether summary.json has its best and its last value. A task's first metric decides which weights are
            the best only if it is.
    """

    name: str
    label: str
    unit: str = ""
    digits: int = 2
    higher_is_better: bool = True
    summed_up: bool = True

    def value(self, figures: Mapping[str, float], more_digits: int = 0) -> str:
        """The number and its unit."""
        return f"{figures[self.name]:.{self.digits + more_digits}f}{self.unit and ' ' + self.unit}"

    def best(self, *values: float) -> float:
        """The best of some values; NaN is the best only where all are."""
        numbers = [value for value in values if value == value] or values
        return max(numbers) if self.higher_is_better else min(numbers)


@dataclass(frozen=True)
class Chart:
    """A chart of the report, over the steps, of values that a task adds to the training rows of metrics.jsonl.

    Attributes:
        title: with the unit.
        parts: key in the rows → what it is, in the legend.
    """

    title: str
    parts: Mapping[str, str]


def spread(most: int, number: int) -> np.ndarray:
    """At most so many of `number` samples to show, int64, from all over a split: a folder's lie class by class."""
    return np.linspace(0, number - 1, min(most, number)).round().astype(np.int64)


class Metrics(ABC):
    """Sums over the samples of an evaluation that add up over micro-batches and ranks.

    Args:
        size: how many sums there are.
        device: where they are kept.

    Attributes:
        num_samples: of the split, from `expect`.
        by_sample: a row per sample of the split, in its order, zero where this rank did not count it: they add up over
            the ranks. None where the metrics have none.
        rows: a float32 row per sample of the split, as `by_sample`, for `compute`. None where the metrics need none.
        pixels: the contents of `pictures`, zero where this rank has none: they add up over the ranks too.
    """

    num_samples: int = 0
    by_sample: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    pixels: torch.Tensor | None = None

    def __init__(self, size: int, device: torch.device) -> None:
        self.sums = torch.zeros(size, dtype=torch.float64, device=device)

    def expect(self, num_samples: int) -> None:
        """Take the number of samples of the split, before the first `update`."""
        self.num_samples = num_samples

    @cached_property
    def _keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys of the split's samples in growing order, and the sample of each."""
        return torch.from_numpy(evaluation_keys(np.arange(self.num_samples))).to(self.sums.device).sort()

    def places(self, batch: Batch) -> torch.Tensor:
        """The numbers in the split of a batch's valid rows, int64: their rows of `by_sample`."""
        keys, samples = self._keys
        return samples[torch.searchsorted(keys, batch["keys"][batch["valid"]])]

    def take_texts(self, samples: torch.Tensor, features: torch.Tensor) -> None:
        """Take the features of `Task.further_texts`, before the first `update`.

        Args:
            samples: of each text, int64 [M], growing.
            features: as of `Task.encode`, [M, E].
        """
        raise NotImplementedError

    @abstractmethod
    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Count a micro-batch: fp32 outputs of the last layer; rows where `batch["valid"]` is False count nowhere.

        Only ranks whose rows count call it, and each of them as often.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The figures of everything that was counted, "images" (how many samples) among them."""

    def pictures(self) -> dict[str, torch.Tensor]:
        """Pictures of what was counted, by name: uint8 [3, height, width]."""
        return {}


class Means(Metrics):
    """Means over the samples of an evaluation.

    Args:
        device: where the sums are kept.
        names: of the figures.
    """

    def __init__(self, device: torch.device, *names: str) -> None:
        super().__init__(len(names) + 1, device)  # of each figure; images
        self._names = names

    def count(self, values: Sequence[torch.Tensor], batch: Batch) -> None:
        """Add the values of each figure, a tensor [B] for each name, where `batch["valid"]`."""
        rows = torch.stack([each.double() for each in (*values, torch.ones_like(values[0]))], dim=1)
        self.sums += torch.where(batch["valid"][:, None], rows, 0.0).sum(0)

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`."""
        *sums, images = self.sums.tolist()
        means = {name: total / max(images, 1) for name, total in zip(self._names, sums, strict=True)}
        return {**means, "images": int(images)}
