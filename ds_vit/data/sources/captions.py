"""The captions of a source's images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Captions:
    """The captions of N images, any number each.

    They are in three arrays: a list of a million strings would be copied into every worker, page by page, by its
    reference counts.

    Args:
        captions: of each image.
    """

    def __init__(self, captions: Iterable[Sequence[str]]) -> None:
        of_images = [[caption.encode() for caption in of_image] for of_image in captions]
        texts = [text for of_image in of_images for text in of_image]
        self._text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        # Caption c is text[starts[c] : starts[c + 1]]; those of image i are firsts[i] to firsts[i + 1] - 1.
        self._starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        self._firsts = np.cumsum([0, *map(len, of_images)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> tuple[str, ...]:
        numbers = range(int(self._firsts[index]), int(self._firsts[index + 1]))
        return tuple(self._text[self._starts[n] : self._starts[n + 1]].tobytes().decode() for n in numbers)

    def identity(self) -> tuple[np.ndarray, ...]:
        """The arrays, for `Source.identity`."""
        return self._text, self._starts, self._firsts
