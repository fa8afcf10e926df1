"""Images inside of tar files: class folders that were packed. Shards of WebDataset (shards.py) are read alike."""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, BinaryIO

import numpy as np

from ds_vit.data.sources.listing import hidden, is_image, list_images, number_classes
from ds_vit.data.sources.source import ArraySource
from ds_vit.fault_tolerance.errors import UserError

_MOST_OPEN = 256  # files; a process may have 1,024 on most systems


class PackedSource(ArraySource):
    """Images at known places in tar files.

    An image is one positioned read, which leaves no state behind in the open file, so that forked workers may share it.
    Files are opened at the first read.

    Args:
        tars: the files.
        tar_of: which of them holds each image, int32 [N].
        paths: the images' names, bytes [N].
        offsets, sizes: of their bytes, int64 [N].
    """

    def __init__(
        self, tars: Sequence[str], tar_of: np.ndarray, paths: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
    ) -> None:
        self._tars, self._tar_of = tuple(tars), tar_of
        self._paths = paths
        self._offsets, self._sizes = offsets, sizes
        self._open: dict[int, BinaryIO] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def encoded(self, index: int) -> bytes:
        return self.content(index, int(self._offsets[index]), int(self._sizes[index]))

    def content(self, index: int, offset: int, size: int) -> bytes:
        """The bytes at a place in the file that holds an image."""
        number = int(self._tar_of[index])
        file = self._open.get(number)
        if file is None:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)), None)
            # Threads may open it at once; a file is closed when none of them holds it.
            file = self._open.setdefault(number, self.open_tar(number))
        return os.pread(file.fileno(), size, offset)

    def open_tar(self, number: int) -> BinaryIO:
        """Open one of the files, unbuffered."""
        return open(self._tars[number], "rb", buffering=0)

    def describe(self, index: int) -> str:
        return f"{self._tars[self._tar_of[index]]}:{self.path(index)}"


class TarSource(PackedSource):
    """A tar of class folders, or a folder of tars (one per class, or each with class folders).

    The archive's index is read once, and numbered as folders are (folders.py).

    Args:
        root: what to call the source in messages.
        tars: the tar files. If `root` is the only one, its name is no part of a class.
        labelled: as for `list_images`.

    Raises:
        UserError: not an uncompressed tar, or what `list_images` refuses.
    """

    def __init__(self, root: str, tars: list[str], *, labelled: bool = True) -> None:
        folders: dict[str, str] = {}
        places: dict[str, tuple[int, int, int]] = {}
        for number, tar in enumerate(tars):
            prefix = "" if tar == root else os.path.splitext(os.path.basename(tar))[0]
            with open(tar, "rb") as file:
                for path, folder, offset, size in members_of(file, tar, prefix):
                    folders[path], places[path] = folder, (number, offset, size)
        paths, classes, self.left_out = list_images(folders, root, labelled=labelled)
        tar_of, offsets, sizes = np.array([places[path] for path in paths], dtype=np.int64).T
        names = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        super().__init__(tars, tar_of.astype(np.int32), names, offsets, sizes)
        self.class_names, self._targets = number_classes(classes)


def refuse_link(info: tarfile.TarInfo, where: str) -> None:
    """Raise UserError for a hard or symbolic link in a tar."""
    if info.islnk() or info.issym():
        way_out = "make the tar again with tar --dereference --hard-dereference"
        raise UserError(f"{where} holds {info.name} as a link, which has no bytes; {way_out}")


def members_of(file: IO[bytes], where: str, prefix: str = "", base: int = 0) -> Iterator[tuple[str, str, int, int]]:
    """(path, class folder, offset, size) of the regular files of a tar, and of tars in it.

    A class folder is the innermost folder, without the names of tars. Of a file outside of folders it is the tar, where
    that lies in a tar (or in a folder of tars): the labels of timm's ReaderImageInTar. Offsets are those in the
    outermost tar, where this one begins at `base`.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                if is_image(info.name) or info.name.lower().endswith(".tar"):
                    refuse_link(info, where)
                if not info.isreg():
                    continue
                path, start = posixpath.normpath(info.name), base + info.offset_data
                if path.lower().endswith(".tar") and not hidden(path):
                    child = posixpath.join(prefix, posixpath.splitext(posixpath.basename(path))[0])
                    inner = tar.extractfile(info)
                    assert inner is not None  # info.isreg()
                    yield from members_of(inner, f"{where}:{path}", child, start)
                else:
                    yield posixpath.join(prefix, path), posixpath.dirname(path) or prefix, start, info.size
    except tarfile.TarError as error:
        raise UserError(f"{where} cannot be read as an uncompressed tar ({error})") from error
