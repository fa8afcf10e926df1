"""What a source of images is, and what all kinds of sources share.

A source is a finite list of (image, target) pairs with named classes, or of images with captions. It is opened once, in
the main process, and read in any number of worker processes.
"""

from __future__ import annotations

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from ds_vit import randomness
from ds_vit.data.decode import decode, orientation
from ds_vit.data.sources.captions import Captions
from ds_vit.fault_tolerance.errors import UserError, enumerate_some

_ROWS_AT_ONCE = 1 << 16  # of a fingerprint: no second copy of millions of names
_HEADERS = 200  # files
_THREADS = 8  # Pillow decodes outside the interpreter's lock, and folders are often on a network


class Source(ABC):
    """A finite, indexable set of images with labels, captions or both.

    Attributes:
        class_names: the classes, in the order of their numbers; empty for images without labels, whose targets are 0.
        has_captions: whether its images have captions.
        multi_label: whether a target is a multi-hot vector (float32 [C]) in place of a class number.
        entries: what `entry` knows in addition to "target" and "captions".
        left_out: how many files were found that are not images we read, by suffix ("" for none).
        mixture: (images, rows of an epoch) of each part of a weighted mixture (`SampleOrder`).
    """

    class_names: tuple[str, ...]
    has_captions: bool = False
    multi_label: bool = False
    entries: Collection[str] = ("image",)
    left_out: Mapping[str, int] = {}
    mixture: tuple[tuple[int, int], ...] = ()

    @property
    def num_classes(self) -> int:
        """How many classes targets are numbered over."""
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of which samples these are: their names within the data set, labels and captions, not their pixels.

        The same for the same images in a folder that was moved, or in a tar of it. A million names take 0.1 s.
        """
        return fingerprint_of(self.identity(), str(len(self)))

    def identity(self) -> tuple[np.ndarray, ...]:
        """What `fingerprint` hashes, in the order of the samples; by default their targets and captions."""
        targets = np.array([self.target(index) for index in range(len(self))])
        if not self.has_captions:
            return (targets,)
        return targets, *Captions.of(self.captions(index) for index in range(len(self))).identity()

    @abstractmethod
    def __len__(self) -> int: ...

    def has(self, entry: str) -> bool:
        """Whether the samples have an entry."""
        return {"target": bool(self.class_names), "captions": self.has_captions}.get(entry, entry in self.entries)

    def entry(self, name: str, index: int) -> Any:
        """An entry of a sample, read when it is asked for: "image" (its file's bytes, or pixels), "target", "captions".

        Raises:
            OSError: its file cannot be read.
        """
        if name == "image":
            data = self.encoded(index)
            return self.image(index) if data is None else data
        if name not in ("target", "captions"):
            raise LookupError(f"{type(self).__name__} has no entry {name!r}")
        return self.target(index) if name == "target" else self.captions(index)

    def encoded(self, index: int) -> bytes | None:
        """The bytes of an image's file; None in a source of pixels, which overrides `image`.

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
        assert data is not None, f"{type(self).__name__} has neither encoded() nor image()"
        return decode(data, self.describe(index))

    @abstractmethod
    def target(self, index: int) -> int | np.ndarray:
        """The class number, or the float32 multi-hot vector [C]; nothing is decoded for it."""

    def captions(self, index: int) -> tuple[str, ...]:
        """All captions of one image, where `has_captions`; nothing is decoded for it.

        An empty tuple means that they are damaged: the image then counts as damaged too.
        """
        raise LookupError(f"{self.describe(index)} has no captions")

    @abstractmethod
    def describe(self, index: int) -> str:
        """Where the image comes from (a file's name), for messages."""


def fingerprint_of(arrays: Iterable[np.ndarray], prefix: str = "") -> str:
    """A hash of arrays, their types and shapes, and of a text before them."""
    digest = hashlib.blake2b(prefix.encode(), digest_size=16)
    for array in arrays:
        digest.update(f";{array.dtype.str}{array.shape}".encode())
        for first in range(0, len(array), _ROWS_AT_ONCE):
            digest.update(np.ascontiguousarray(array[first : first + _ROWS_AT_ONCE]).view(np.uint8).data)
    return digest.hexdigest()


class ArraySource(Source):
    """A source that holds names and class numbers in NumPy arrays.

    A list of a million strings would be copied into every worker, page by page, by its reference counts.
    """

    _targets: np.ndarray  # int64 [N]
    _paths: np.ndarray | None = None  # bytes [N], with forward slashes
    _captions: Captions | None = None
    no_classes_because: str = ""
    """Why the images have no classes; only a task without labels takes them then."""

    def __len__(self) -> int:
        return len(self._targets)

    def set_captions(self, captions: Captions) -> None:
        """Give the images captions in place of classes."""
        self._captions, self.has_captions = captions, True
        self.class_names, self._targets = (), np.zeros(len(captions), dtype=np.int64)

    def number_over(self, classes: Sequence[str]) -> None:
        """Number the classes, one per image, over these names, among which they are."""
        number_of = {name: number for number, name in enumerate(classes)}
        self._targets = np.array([number_of[name] for name in self.class_names])[self._targets]
        self.class_names = tuple(classes)

    def drop_classes(self, num_images: int, reason: str) -> None:
        """Leave the images without classes."""
        self.class_names, self._targets, self.no_classes_because = (), np.zeros(num_images, dtype=np.int64), reason

    def captions(self, index: int) -> tuple[str, ...]:
        return super().captions(index) if self._captions is None else self._captions[index]

    def target(self, index: int) -> int | np.ndarray:
        return int(self._targets[index])

    def path(self, index: int) -> str:
        """Where the image is within the data set, with forward slashes."""
        assert self._paths is not None, f"{type(self).__name__} has no paths"
        return os.fsdecode(self._paths[index])

    def identity(self) -> tuple[np.ndarray, ...]:
        names = () if self._paths is None else (below_common_folder(self._paths),)
        return *names, self._targets, *(() if self._captions is None else self._captions.identity())


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


def check_labels(source: Source, labels: np.ndarray, numbers: np.ndarray, classes: Sequence[str]) -> None:
    """Raise UserError if a label is not one of the classes.

    Args:
        source: describes a sample.
        labels: as the files have them, [N].
        numbers: of their classes, int64 [N].
        classes: their names.
    """
    valid = (numbers >= 0) & (numbers < len(classes))
    if valid.all():
        return
    first = int(valid.argmin())
    label = os.fsdecode(labels[first]) if isinstance(labels[first], bytes) else int(labels[first])
    raise UserError(
        f"{source.describe(first)} has the label {label!r}; the {len(classes)} classes are {enumerate_some(classes)}, "
        f"with the numbers 0 to {len(classes) - 1}; {int((~valid).sum())} of {len(labels)} samples have such a label"
    )


def headers_of_some(source: Source) -> list[tuple[str, int]]:
    """The mode and `orientation` of up to 200 files, drawn by key; ("", 0) if one is no image or cannot be read.

    No image is decoded.
    """

    def header(number: int) -> tuple[str, int]:
        path = source.describe(number)
        try:
            with Image.open(path if os.path.isfile(path) else io.BytesIO(source.encoded(number) or b"")) as image:
                return image.mode, orientation(image)
        except Exception:
            return "", 0

    size = len(source)
    drawn = randomness.permute(np.arange(min(size, _HEADERS)), size, randomness.name_key("headers"))
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(header, drawn.tolist()))
