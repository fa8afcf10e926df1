"""The captions of a source's images: their table, where to find them, and the check that they match the images."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds_vit.fault_tolerance.errors import UserError, enumerate_some, text_lines

NOT_UTF_8 = re.compile("[\ud800-\udfff]")
"""A character that `surrogateescape` makes of a byte."""


@dataclass(frozen=True)
class CaptionKeys:
    """The names of columns and keys of data with captions; an empty one is the default of the form of the data.

    Attributes:
        image: of the column of images.
        caption: of the column of captions, or of their key in a .json file.
        separator: of the columns of a table; "" as its header has it.
    """

    image: str = ""
    caption: str = ""
    separator: str = ""


@dataclass(frozen=True, eq=False)
class Captions:
    """The captions of N images, any number each: those of image i are firsts[i] to firsts[i + 1] - 1.

    They are in arrays: a list of a million strings would be copied into every worker, page by page, by its reference
    counts.

    Attributes:
        text: all of them in UTF-8, one after the other, uint8 [bytes].
        starts: where each begins in `text`, and the end, int64 [captions + 1].
        firsts: the first of each image, and their number, int64 [N + 1].
    """

    text: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray

    @classmethod
    def of(cls, captions: Iterable[Sequence[str]]) -> Captions:
        """The table of the captions of each image."""
        of_images = [[caption.encode() for caption in of_image] for of_image in captions]
        texts = [text for of_image in of_images for text in of_image]
        return cls(
            np.frombuffer(b"".join(texts), dtype=np.uint8),
            np.cumsum([0, *map(len, texts)], dtype=np.int64),
            np.cumsum([0, *map(len, of_images)], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Captions]) -> Captions:
        """One table of several, at least one."""

        def bounds(arrays: Sequence[np.ndarray]) -> np.ndarray:
            ends = np.cumsum([0, *(array[-1] for array in arrays)])
            shifted = [array[:-1] + end for array, end in zip(arrays, ends[:-1], strict=True)]
            return np.concatenate([*shifted, ends[-1:]])

        texts = np.concatenate([part.text for part in parts])
        return cls(texts, bounds([part.starts for part in parts]), bounds([part.firsts for part in parts]))

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, index: int) -> tuple[str, ...]:
        numbers = range(int(self.firsts[index]), int(self.firsts[index + 1]))
        return tuple(self.text[self.starts[n] : self.starts[n + 1]].tobytes().decode() for n in numbers)

    def identity(self) -> tuple[np.ndarray, ...]:
        """The arrays, for `Source.identity`."""
        return self.text, self.starts, self.firsts


def clean_captions(captions: Iterable[str | float | None]) -> tuple[str, ...]:
    """Captions without blanks around them; none if one was not UTF-8 (`surrogateescape`).

    Missing ones are left out: an empty text, None and NaN, as pandas and img2dataset write them.
    """
    stripped = [caption.strip() for caption in captions if isinstance(caption, str)]
    if any(map(NOT_UTF_8.search, stripped)):
        return ()
    return tuple(filter(None, stripped))


def caption_lines(data: bytes) -> tuple[str, ...]:
    """The captions of a text file, one per line; none if it is not UTF-8."""
    return clean_captions(text_lines(data.decode("utf-8-sig", errors="surrogateescape")))


def check_matches(where: str, without_text: Collection[str], without_image: Collection[str], num: int) -> None:
    """Raise UserError if no image has a text, or a text has no image. A single image without one is a damaged pair.

    Args:
        where: the data, for messages.
        without_text: names of images.
        without_image: names of texts.
        num: how many images there are.
    """
    bare = without_text if len(without_text) == num else ()
    kinds = ((bare, "without a caption"), (without_image, "captions without an image"))
    if problems := [f"{len(names):,} {what} ({enumerate_some(sorted(names))})" for names, what in kinds if names]:
        raise UserError(f"{where}: {num:,} images, {' and '.join(problems)}; add what is missing, or remove the rest")
