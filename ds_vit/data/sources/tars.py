"""Sources in tar files.

Numbered, and held in memory, as folders are (folders.py).
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterator
from typing import IO, BinaryIO, NamedTuple

import numpy as np

from ds_vit.data.sources.listing import list_images, number_classes
from ds_vit.data.sources.source import Source, below_common_folder
from ds_vit.fault_tolerance.errors import UserError


class _Member(NamedTuple):
    """A file in a tar: its path, its class, and the bytes of the outermost tar that it occupies."""

    path: str
    label: str
    offset: int
    size: int


def _members(file: IO[bytes], base: int, prefix: str, where: str) -> Iterator[_Member]:
    """The regular files of a tar, and of tars in it, whose first byte lies at `base` of the outermost file.

    A class is the innermost folder's name, a tar in a tar (or a tar of a folder of tars) counting as a folder: the
    labels of timm's ReaderImageInTar.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                if not info.isreg():
                    continue
                path = posixpath.normpath(info.name)
                if path.lower().endswith(".tar"):
                    child = posixpath.join(prefix, posixpath.splitext(posixpath.basename(path))[0])
                    inner = tar.extractfile(info)
                    assert inner is not None  # info.isreg()
                    yield from _members(inner, base + info.offset_data, child, f"{where}:{path}")
                else:
                    label = posixpath.basename(posixpath.join(prefix, posixpath.dirname(path)).rstrip("/"))
                    yield _Member(posixpath.join(prefix, path), label, base + info.offset_data, info.size)
    except tarfile.TarError as error:
        raise UserError(f"{where} cannot be read as an uncompressed tar ({error})") from error


class TarSource(Source):
    """A tar of class folders, or a folder of tars (one a class, or each with class folders).

    The archive's index is read once; an image is then one positioned read, which leaves no state behind in the open
    file, so that forked workers may share it. Files are opened at the first read.

    Args:
        root: what to call the source in messages.
        tars: the tar files. With `root` itself alone, its name is no part of a class.

    Raises:
        UserError: not an uncompressed tar, no images, or none in a class folder.
    """

    def __init__(self, root: str, tars: list[str]) -> None:
        members: list[_Member] = []
        tar_of: list[int] = []
        for number, path in enumerate(tars):
            prefix = "" if path == root else os.path.splitext(os.path.basename(path))[0]
            with open(path, "rb") as file:
                members += _members(file, 0, prefix, path)
            tar_of += [number] * (len(members) - len(tar_of))
        listing = list_images([m.path for m in members], [m.label for m in members], root)
        kept = [members[number] for number in listing.files]
        self._tars = tuple(tars)
        self._tar_of = np.array([tar_of[number] for number in listing.files], dtype=np.int32)
        self._paths = np.array([os.fsencode(member.path) for member in kept], dtype=np.bytes_)
        self._offsets = np.array([member.offset for member in kept], dtype=np.int64)
        self._sizes = np.array([member.size for member in kept], dtype=np.int64)
        self.left_out = dict(listing.left_out)
        self.class_names, self._targets = number_classes(listing.labels)
        self._open: dict[int, BinaryIO] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        number = int(self._tar_of[index])
        if number not in self._open:
            self._open[number] = open(self._tars[number], "rb", buffering=0)  # noqa: SIM115 - kept for the run
        return os.pread(self._open[number].fileno(), int(self._sizes[index]), int(self._offsets[index]))

    def target(self, index: int) -> int:
        return int(self._targets[index])

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return below_common_folder(self._paths), self._targets

    def path(self, index: int) -> str:
        """Where the image is in the tar, or below the folder of tars, with forward slashes."""
        return os.fsdecode(self._paths[index])

    def describe(self, index: int) -> str:
        return f"{self._tars[self._tar_of[index]]}:{self.path(index)}"
