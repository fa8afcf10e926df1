"""A program's own torch data set as a source of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from ds_vit.data.decode import undecodable
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError


class DatasetSource(Source):
    """A map-style torch `Dataset` of (image, class number) pairs, before any transform.

    The numbers of the classes are read from its `targets` (as torchvision's data sets have them), else from its items,
    each of which is then loaded once.

    Args:
        dataset: has a length; an item's image is a PIL image or a uint8 array [H, W, 3] or [H, W].
        class_names: in the order of their numbers; None for the data set's `classes`, else the numbers.

    Raises:
        UserError: what is no such data set.
    """

    def __init__(self, dataset: Any, class_names: Sequence[str] | None = None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UserError(f"a {type(dataset).__name__} is no data: give a Source, or a torch Dataset with a length")
        self._dataset = dataset
        names = class_names if class_names is not None else getattr(dataset, "classes", None)
        largest = int(self._targets.max())
        self.class_names = tuple(map(str, names if names is not None else range(largest + 1)))
        if largest >= len(self.class_names) or (self._targets < 0).any():
            raise UserError(
                f"{type(dataset).__name__} has targets from {self._targets.min()} to {largest}, and "
                f"{len(self.class_names)} classes are named"
            )
        self.image(0)

    @cached_property
    def _targets(self) -> np.ndarray:
        given = getattr(self._dataset, "targets", None)
        try:
            if given is None:
                given = [self._dataset[index][1] for index in range(len(self._dataset))]
            targets = np.asarray(given).astype(np.int64, casting="same_kind")
        except (IndexError, KeyError, TypeError, ValueError):  # items that are no pairs, targets of several lengths
            targets = np.zeros(0, dtype=np.int64)
        if targets.shape != (len(self._dataset),) or not len(targets):
            name = type(self._dataset).__name__
            raise UserError(f"{name} is not (image, class number) for each of its {len(self._dataset)} items")
        return targets

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int) -> Image.Image:
        """As `Source.image`."""
        try:
            image = self._dataset[index][0]
        except (OSError, SyntaxError) as error:
            raise undecodable(self.describe(index), error) from error
        if isinstance(image, np.ndarray) and image.dtype == np.uint8:
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise UserError(
                f"{self.describe(index)}: the image is a {type(image).__name__}, not a PIL image or a uint8 array; "
                "give the data set without a transform, which is this run's own (--img-size, --aa, …)"
            )
        return image.convert("RGB")

    def target(self, index: int) -> int:
        """As `Source.target`."""
        return int(self._targets[index])

    def describe(self, index: int) -> str:
        """As `Source.describe`."""
        return f"{type(self._dataset).__name__}[{index}]"


def as_source(data: Any, class_names: Sequence[str] | None = None) -> Source:
    """A source of what a program gives: a `Source` as it is, a torch data set as a `DatasetSource`."""
    return data if isinstance(data, Source) else DatasetSource(data, class_names)
