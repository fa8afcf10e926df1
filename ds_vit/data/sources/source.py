"""What a source of images is.

A source is a finite list of (image, target) pairs with named classes. It is opened once, in the main process, and read
in any number of worker processes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from PIL import Image

from ds_vit.data.decode import Jpeg, open_image

# timm lists .png, .jpg and .jpeg alone, so that a folder of WebP files looks empty to it; Pillow reads all of these.
IMAGE_EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
)


_ROWS_AT_ONCE = 1 << 16  # of a fingerprint: no second copy of millions of names


class Source(ABC):
    """A finite, indexable set of labelled images.

    Attributes:
        class_names: the classes, in the order of their numbers.
        multi_label: whether a target is a multi-hot vector (float32 [C]) in place of a class number.
        left_out: how many files were found that are not images we read, by suffix ("" for none).
        mixture: of a source of several with weights, the images and the rows of an epoch of each (`SampleOrder`).
    """

    class_names: tuple[str, ...]
    multi_label: bool = False
    left_out: Mapping[str, int] = {}
    mixture: tuple[tuple[int, int], ...] = ()

    @property
    def num_classes(self) -> int:
        """How many classes targets are numbered over."""
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of which samples these are: their names within the data set and their labels, not their pixels.

        The same for the same images in a folder that was moved, or in a tar of it. A million names take 0.1 s.
        """
        digest = hashlib.blake2b(str(len(self)).encode(), digest_size=16)
        for array in self.told_apart_by():
            digest.update(f";{array.dtype.str}{array.shape}".encode())
            for first in range(0, len(array), _ROWS_AT_ONCE):
                digest.update(np.ascontiguousarray(array[first : first + _ROWS_AT_ONCE]).view(np.uint8).data)
        return digest.hexdigest()

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        """What tells these samples from those of another data set, in their order: here their targets."""
        return (np.array([self.target(index) for index in range(len(self))]),)

    @abstractmethod
    def __len__(self) -> int: ...

    def encoded(self, index: int) -> bytes | None:
        """The bytes of an image's file; None in a source that has pixels alone, which then has `image` of its own.

        Raises:
            OSError: its file cannot be read.
        """
        return None

    def image(self, index: int) -> Image.Image:
        """Decode one image, to RGB.

        Raises:
            ImageDecodeError: its content cannot be decoded.
            OSError: its file cannot be read.
        """
        data = self.encoded(index)
        assert data is not None, f"{type(self).__name__} has neither bytes nor an image() of its own"
        image = open_image(data, self.describe(index))
        return image.image() if isinstance(image, Jpeg) else image

    @abstractmethod
    def target(self, index: int) -> int | np.ndarray:
        """The class number, or the float32 multi-hot vector [C]; nothing is decoded for it."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """Where the image comes from (a file's name), for messages."""


def below_common_folder(paths: np.ndarray) -> np.ndarray:
    """Names of files without the folders that all of them lie in.

    Args:
        paths: bytes [N] with forward slashes, N >= 1.

    Returns:
        uint8 [N, W], each name padded with zeros to the longest; a view.
    """
    letters = np.ascontiguousarray(paths).view(np.uint8).reshape(len(paths), -1)
    same = np.ones(letters.shape[1], dtype=bool)
    for first in range(0, len(letters), _ROWS_AT_ONCE):
        same &= (letters[first : first + _ROWS_AT_ONCE] == letters[0]).all(axis=0)
    common = len(same) if same.all() else int(same.argmin())
    return letters[:, paths[0][:common].rfind(b"/") + 1 :]
