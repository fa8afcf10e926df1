"""Parts of a split: `--train-split 'train[:10%]'`, and what `--val-fraction` holds out."""

from __future__ import annotations

import re

import numpy as np
from PIL import Image

from ds_vit import randomness
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError

_PART = re.compile(r"(?P<split>.*)\[:(?P<percent>\d+(\.\d+)?)%\]")


class Subset(Source):
    """Some images of a source, in their order.

    Args:
        source: the whole.
        numbers: of the images in it, ascending.
    """

    def __init__(self, source: Source, numbers: np.ndarray) -> None:
        self._source = source
        self._numbers = numbers
        self.class_names = source.class_names
        self.multi_label = source.multi_label
        self.left_out = source.left_out

    def __len__(self) -> int:
        return len(self._numbers)

    def encoded(self, index: int) -> bytes | None:
        return self._source.encoded(int(self._numbers[index]))

    def image(self, index: int) -> Image.Image:
        return self._source.image(int(self._numbers[index]))

    def target(self, index: int) -> int | np.ndarray:
        return self._source.target(int(self._numbers[index]))

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return (self._numbers, *self._source.told_apart_by())

    def describe(self, index: int) -> str:
        return self._source.describe(int(self._numbers[index]))


def first_part(source: Source, percent: float) -> Subset:
    """So many percent of a source, of each class as many.

    Which ones is a function of their numbers in the source alone, the same in every run; those of a smaller part are
    among those of a larger one. Each class keeps at least one image. Images with several labels count as one class.

    Args:
        source: the whole.
        percent: above 0, at most 100.
    """
    order, place, counts = _by_class(source)
    return Subset(source, np.sort(order[place < np.maximum(1, np.round(counts * percent / 100.0))]))


def hold_out(source: Source, fraction: float) -> tuple[Subset, Subset]:
    """A source in two: what stays for training, and a share of each class for evaluation.

    Chosen as by `first_part`, from the other end, so that `train[:10%]` and a tenth that is held out have no image in
    common. A class of two images or more gives at least one and keeps at least one; one of a single image keeps it.

    Args:
        source: the whole.
        fraction: above 0, below 1.

    Raises:
        UserError: no class has two images.
    """
    order, place, counts = _by_class(source)
    out = place >= counts - np.clip(np.round(counts * fraction), 1, np.maximum(counts - 1, 0))
    out &= counts > 1
    if not out.any():
        raise UserError(
            f"--val-fraction {fraction:g}: no class has a second image to hold out ({len(source)} images in "
            f"{source.num_classes} classes); train without evaluation: --val-split ''"
        )
    return Subset(source, np.sort(order[~out])), Subset(source, np.sort(order[out]))


def _by_class(source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The images in keyed order, class after class; the place of each within its class, and the size of that."""
    numbers = np.arange(len(source))
    multi = source.multi_label
    targets = np.zeros_like(numbers) if multi else np.array([source.target(n) for n in range(len(source))])
    order = np.lexsort((randomness.sample_keys(0, 0, numbers), targets))
    counts = np.bincount(targets)
    place = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
    return order, place, counts[targets[order]]


def part_of(split: str) -> tuple[str, float]:
    """`train[:10%]` → ("train", 10.0); the whole is 100.

    Raises:
        UserError: brackets that say something else, or a part of nothing or of more than all.
    """
    if "[" not in split:
        return split, 100.0
    found = _PART.fullmatch(split)
    if found is None or not 0 < float(found["percent"]) <= 100:
        raise UserError(f"split {split!r}: a part of a split is written train[:10%], above 0 and at most 100")
    return found["split"], float(found["percent"])
