"""Several sources as one: `--data-dir A B`, in the shares that `--data-weights` gives them or each image once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError


def mixed(sources: Sequence[Source], weights: Sequence[float] = (), classes: Sequence[str] | None = None) -> Source:
    """One source of several; a single one is itself, where its classes have these numbers.

    Args:
        sources: in the order of --data-dir.
        weights: the share of an epoch's rows that each gets, of any sum; none: each image once an epoch.
        classes: what the samples' classes are numbered over; None for those of the first source.

    Raises:
        UserError: a class of one source that is none of the classes, or a weight of less than one row.
    """
    as_it_is = len(sources) == 1 and not weights and tuple(classes or ()) in ((), sources[0].class_names)
    return sources[0] if as_it_is else MixedSource(sources, weights, classes)


class MixedSource(Source):
    """The samples of several sources, one after the other; classes are matched by name.

    The arguments are those of `mixed`.
    """

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float] = (), classes: Sequence[str] | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._starts = np.cumsum([0, *map(len, sources)])
        self.class_names = tuple(classes) if classes is not None else sources[0].class_names
        self.multi_label = sources[0].multi_label
        self._numbers = [self._numbered(source) for source in sources]
        kinds = {suffix for source in sources for suffix in source.left_out}
        self.left_out = {suffix: sum(source.left_out.get(suffix, 0) for source in sources) for suffix in kinds}
        self.mixture = self._rows_of_an_epoch(weights) if weights else ()

    def _numbered(self, source: Source) -> np.ndarray:
        """The number here of each of a source's classes."""
        number_of = {name: number for number, name in enumerate(self.class_names)}
        unknown = [name for name in source.class_names if name not in number_of]
        if unknown:
            raise UserError(
                f"{source.describe(0)} and its like have {len(unknown)} classes that the first --data-dir lacks "
                f"({', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}); every class must be one of its "
                f"{len(number_of)}, by name"
            )
        if source.multi_label != self.multi_label or (self.multi_label and source.class_names != self.class_names):
            raise UserError("sources of several labels an image can only be mixed where all have the same labels")
        return np.array([number_of[name] for name in source.class_names], dtype=np.int64)

    def _rows_of_an_epoch(self, weights: Sequence[float]) -> tuple[tuple[int, int], ...]:
        """(images, rows of an epoch) of each source; the rows are as many as there are images in all."""
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * len(self)
        rows = np.floor(shares).astype(np.int64)
        rows[np.argsort(rows - shares, kind="stable")[: len(self) - rows.sum()]] += 1  # the largest remainders
        if not rows.all():
            raise UserError(
                f"--data-weights {' '.join(f'{w:g}' for w in weights)}: of {len(self)} rows an epoch, source "
                f"{int(rows.argmin()) + 1} would get none; give it more, or leave it out"
            )
        return tuple((len(source), int(number)) for source, number in zip(self._sources, rows, strict=True))

    def _at(self, index: int) -> tuple[int, int]:
        """Which source, and which of its samples."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def encoded(self, index: int) -> bytes | None:
        number, inside = self._at(index)
        return self._sources[number].encoded(inside)

    def image(self, index: int) -> Image.Image:
        number, inside = self._at(index)
        return self._sources[number].image(inside)

    def target(self, index: int) -> int | np.ndarray:
        number, inside = self._at(index)
        target = self._sources[number].target(inside)
        return target if self.multi_label else int(self._numbers[number][target])

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        prints = np.array([source.fingerprint for source in self._sources], dtype=np.bytes_)
        return prints, np.array(self.mixture, dtype=np.int64), *self._numbers

    def describe(self, index: int) -> str:
        number, inside = self._at(index)
        return self._sources[number].describe(inside)
