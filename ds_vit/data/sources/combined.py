"""Sources made of other sources: parts of a split (`train[:10%]`, `--val-fraction`), and several as one."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_vit import randomness
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, enumerate_some

_PART = re.compile(r"(?P<split>.*)\[:(?P<percent>\d+(\.\d+)?)%\]")


def _of_sample(method: str) -> Any:
    """A method of `_View`: that of the source of a sample."""

    def read(view: _View, index: int) -> Any:
        source, number = view._locate(index)
        return getattr(source, method)(number)

    return read


class _View(Source):
    """Samples that other sources hold."""

    @abstractmethod
    def _locate(self, index: int) -> tuple[Source, int]:
        """The source of a sample, and its number there."""

    def entry(self, name: str, index: int) -> Any:
        if name == "target":  # may be numbered over other classes
            return self.target(index)
        source, number = self._locate(index)
        return source.entry(name, number)

    encoded = _of_sample("encoded")
    image = _of_sample("image")
    target = _of_sample("target")
    captions = _of_sample("captions")
    describe = _of_sample("describe")


# ---- parts of a split ------------------------------------------------------------------------------------------------


class Subset(_View):
    """Some images of a source, in their order.

    Args:
        source: the whole.
        numbers: of the images in it, ascending.
    """

    def __init__(self, source: Source, numbers: np.ndarray) -> None:
        self._source = source
        self._numbers = numbers
        self.class_names = source.class_names
        self.has_captions = source.has_captions
        self.multi_label = source.multi_label
        self.left_out = source.left_out
        self.entries = source.entries

    def __len__(self) -> int:
        return len(self._numbers)

    def _locate(self, index: int) -> tuple[Source, int]:
        return self._source, int(self._numbers[index])

    def identity(self) -> tuple[np.ndarray, ...]:
        return (self._numbers, *self._source.identity())


def first_part(source: Source, percent: float) -> Subset:
    """So many percent of a source, of each class as many.

    Which ones is a function of their numbers in the source, the same in every run; those of a smaller part are
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
        counted = f"{len(source)} images in {source.num_classes} classes"
        raise UserError(f"--val-fraction {fraction:g}: no class has two images ({counted}); pass --val-split ''")
    return Subset(source, np.sort(order[~out])), Subset(source, np.sort(order[out]))


def across_classes(source: Source, number: int) -> Subset:
    """So many images of a source, to look at: of as many classes as possible, from all over their order.

    Which ones is a function of their numbers in the source, the same in every run. Images with several labels count as
    one class.

    Args:
        source: the whole.
        number: at least 1; all of a source that has fewer.
    """
    order, place, _ = _by_class(source)
    turns = order[np.argsort(place, kind="stable")]  # an image of each class, then the second of each
    number = min(number, len(turns))
    at = np.linspace(0, max(number, int((place == 0).sum())) - 1, number).round().astype(int)
    return Subset(source, np.sort(turns[at]))


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


# ---- mixtures --------------------------------------------------------------------------------------------------------


def mixed(sources: Sequence[Source], weights: Sequence[float] = (), classes: Sequence[str] | None = None) -> Source:
    """One source of several; a single one is itself, where its classes have these numbers.

    Args:
        sources: in the order of --data-dir.
        weights: the share of an epoch's rows that each gets, of any sum; none: each image once per epoch.
        classes: what the samples' classes are numbered over; None for those of the first source, () for none.

    Raises:
        UserError: a class of one source that is none of the classes, or a weight of less than one row.
    """
    unchanged = len(sources) == 1 and not weights and tuple(classes or ()) in ((), sources[0].class_names)
    return sources[0] if unchanged else MixedSource(sources, weights, classes)


class MixedSource(_View):
    """The samples of several sources, one after the other; classes are matched by name.

    The arguments are those of `mixed`.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float] = (), classes: Sequence[str] | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._starts = np.cumsum([0, *map(len, sources)])
        self.class_names = tuple(classes) if classes is not None else sources[0].class_names
        self.has_captions = all(source.has_captions for source in sources)
        self.multi_label = sources[0].multi_label
        self.entries = set.intersection(*(set(source.entries) for source in sources))
        self._numbers = [self._class_numbers(source) for source in sources]
        self.left_out = dict(sum((Counter(source.left_out) for source in sources), Counter()))
        self.mixture = self._rows_of_an_epoch(weights) if weights else ()

    def _class_numbers(self, source: Source) -> np.ndarray:
        """The number here of each of a source's classes, 0 without classes."""
        if not self.class_names:
            return np.zeros(source.num_classes, dtype=np.int64)
        number_of = {name: number for number, name in enumerate(self.class_names)}
        if unknown := [name for name in source.class_names if name not in number_of]:
            classes = f"{len(unknown)} classes that are not among the {len(number_of)} of the first --data-dir"
            raise UserError(f"the source of {source.describe(0)} has {classes}: {enumerate_some(unknown)}")
        if source.multi_label != self.multi_label or (self.multi_label and source.class_names != self.class_names):
            raise UserError("sources of several labels per image can only be mixed if all have the same labels")
        return np.array([number_of[name] for name in source.class_names], dtype=np.int64)

    def _rows_of_an_epoch(self, weights: Sequence[float]) -> tuple[tuple[int, int], ...]:
        """(images, rows of an epoch) of each source; the rows are as many as there are images in all."""
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * len(self)
        rows = np.floor(shares).astype(np.int64)
        rows[np.argsort(rows - shares, kind="stable")[: len(self) - rows.sum()]] += 1  # the largest remainders
        if not rows.all():
            without = f"of {len(self)} rows per epoch, source {int(rows.argmin()) + 1} would get none"
            raise UserError(f"--data-weights {' '.join(f'{w:g}' for w in weights)}: {without}; increase its weight")
        return tuple((len(source), int(number)) for source, number in zip(self._sources, rows, strict=True))

    def _number_of_source(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def _locate(self, index: int) -> tuple[Source, int]:
        number = self._number_of_source(index)
        return self._sources[number], index - int(self._starts[number])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def target(self, index: int) -> int | np.ndarray:
        if not (self.multi_label or self.class_names):
            return 0
        target = super().target(index)
        return target if self.multi_label else int(self._numbers[self._number_of_source(index)][target])

    def identity(self) -> tuple[np.ndarray, ...]:
        prints = np.array([source.fingerprint for source in self._sources], dtype=np.bytes_)
        return prints, np.array(self.mixture, dtype=np.int64), *self._numbers
