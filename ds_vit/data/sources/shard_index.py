"""The index beside a WebDataset shard (`train-000.tar.index.npz`): where each sample's image lies, and its label.

Read from the tar once, so that any sample is one positioned read from then on. A shard is a tar whose files are grouped
by their name up to the first dot: `cat/1.jpg` and `cat/1.cls` are one sample (github.com/webdataset/webdataset).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import posixpath
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import BinaryIO, NamedTuple

import numpy as np

from ds_vit.data.sources.made_once import one_at_a_time, partial_name
from ds_vit.data.sources.source import IMAGE_EXTENSIONS
from ds_vit.fault_tolerance.errors import UserError

SUFFIX = ".index.npz"
DOT = "%2E"
"""A dot in the name of a file that `ds-vit shards` packed; a bare one would end the sample's key there."""

_FORMAT = 1
_JSON_LABELS = ("label", "cls")
_BLOCK = tarfile.BLOCKSIZE
_MOST_PROCESSES = 16  # each rank of a machine may be at it


class ShardIndex(NamedTuple):
    """The samples of a shard, in the order in which their keys first occur.

    Attributes:
        paths: the images' names, bytes [N].
        offsets, sizes: the images' bytes in the shard, int64 [N] each.
        labels: class numbers int64 [N], or class names in UTF-8, bytes [N].
        left_out: how many files were found that are not read, by suffix.
        state: the shard's size and time of change (`state_of`) when it was read.
    """

    paths: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    left_out: dict[str, int]
    state: tuple[int, int]


def open_indexes(shards: Sequence[str]) -> list[ShardIndex]:
    """The indexes of shards; one that is missing, or made of another state of its shard, is made anew.

    Where nothing can be written beside a shard, its index serves this process alone.

    Raises:
        UserError: a shard is no whole uncompressed tar, or a sample has no label.
    """
    found = [load_index(shard) for shard in shards]
    missing = [shard for shard, index in zip(shards, found, strict=True) if index is None]
    made = iter(_make_all(missing))
    return [index if index is not None else next(made) for index in found]


def state_of(file: BinaryIO) -> tuple[int, int]:
    """What a shard's index holds it to: its size in bytes, and when it was last changed, in nanoseconds."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def make_index(shard: str) -> ShardIndex:
    """Read a shard's index from the tar, and write it beside it where that is possible."""
    with one_at_a_time(shard):
        index = load_index(shard)  # another rank's, meanwhile
        if index is None:
            index = read_index(shard)
            with contextlib.suppress(OSError):  # a folder to read from alone
                save_index(shard, index)
        return index


def read_index(shard: str) -> ShardIndex:
    """Read a shard's index from the tar."""
    with open(shard, "rb") as file:
        return _scan(file, shard)


def save_index(shard: str, index: ShardIndex) -> None:
    """Write an index beside its shard, whole or not at all; any number of processes may do so at once."""
    partial = partial_name(shard + SUFFIX)
    try:
        with open(partial, "wb") as file:
            np.savez(
                file,
                state=np.array([_FORMAT, *index.state], dtype=np.int64),
                paths=index.paths,
                places=np.stack([index.offsets, index.sizes]),
                labels=index.labels,
                left_out=np.array(json.dumps(index.left_out)),
            )
        os.replace(partial, shard + SUFFIX)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def load_index(shard: str) -> ShardIndex | None:
    """The index beside a shard; None where there is none that fits it."""
    with open(shard, "rb") as file:
        state = state_of(file)
    try:
        with np.load(shard + SUFFIX) as arrays:
            if arrays["state"].tolist() != [_FORMAT, *state]:
                return None
            offsets, sizes = arrays["places"]
            return ShardIndex(
                arrays["paths"], offsets, sizes, arrays["labels"], json.loads(str(arrays["left_out"])), state
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _make_all(shards: Sequence[str]) -> list[ShardIndex]:
    if len(shards) < 2:
        return [make_index(shard) for shard in shards]
    processes = min(len(shards), os.cpu_count() or 1, _MOST_PROCESSES)
    try:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            return list(pool.map(make_index, shards))
    except BrokenProcessPool:
        raise UserError(
            f"a process that indexed {shards[0]} and its like was killed; had the machine no memory left? What is "
            "indexed stays: start again to go on"
        ) from None


class _Sample:
    """The files of one key, as far as they have been seen."""

    def __init__(self) -> None:
        self.image: tuple[str, int, int] | None = None  # path, offset, size
        self.label: int | str | None = None
        self.files: list[str] = []


_OF_WEBDATASET = re.compile(r"(?:^|/)__[^/]*__(?:$|[/.])")  # what its writers keep for themselves
_KEY = re.compile(r"((?:.*/)?[^./]+)(\.[^/]*)")


def _scan(file: BinaryIO, shard: str) -> ShardIndex:
    state = state_of(file)
    samples: dict[str, _Sample] = {}
    left_out: Counter[str] = Counter()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                path = posixpath.normpath(info.name)
                if info.islnk():
                    raise UserError(
                        f"{shard} holds {info.name} as a hard link, which has no bytes of its own; make the shard "
                        "again with tar --hard-dereference"
                    )
                if not info.isreg() or _OF_WEBDATASET.search(path):
                    continue
                named = _KEY.fullmatch(path)
                if named is None:
                    left_out[""] += 1
                else:
                    _add(samples.setdefault(named[1], _Sample()), named[1], named[2].lower(), info, tar, shard)
                vars(tar)["members"] = []  # of a million, tarfile would keep each
            ends_at = tar.offset
    except (tarfile.TarError, EOFError) as error:
        raise UserError(
            f"{shard} cannot be read as an uncompressed tar ({error}); it may be cut short: copy or make it again"
        ) from error
    file.seek(ends_at)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise UserError(
            f"{shard} is cut short: after {len(samples)} samples, at byte {ends_at}, a tar's end is missing; copy or "
            "make it again"
        )
    return _as_index(samples, left_out, shard, state)


def _add(sample: _Sample, key: str, suffix: str, info: tarfile.TarInfo, tar: tarfile.TarFile, shard: str) -> None:
    if suffix in sample.files:
        raise UserError(f"{shard} holds {key}{suffix} twice; a sample's files must differ by their suffix")
    sample.files.append(suffix)
    if suffix in IMAGE_EXTENSIONS and sample.image is None:
        sample.image = info.name.replace(DOT, "."), info.offset_data, info.size
    elif suffix == ".cls":
        sample.label = _number(_content(tar, info).decode(errors="replace").strip())
    elif suffix == ".json" and sample.label is None:
        sample.label = _json_label(_content(tar, info), f"{shard}:{info.name}")


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    assert file is not None, f"{info.name} is no file"  # only files come here
    return file.read()


def _number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else text


def _json_label(data: bytes, name: str) -> int | str | None:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise UserError(f"{name} is no JSON ({error})") from None
    found = [fields[key] for key in _JSON_LABELS if key in fields] if isinstance(fields, dict) else []
    if not found:
        return None
    if isinstance(found[0], bool) or not isinstance(found[0], (int, str)):
        raise UserError(f"{name}: the label {found[0]!r} is neither a class number nor a class name")
    return found[0]


def _as_index(samples: dict[str, _Sample], left_out: Counter[str], shard: str, state: tuple[int, int]) -> ShardIndex:
    for sample in samples.values():
        of_image = None if sample.image is None else posixpath.splitext(sample.image[0])[1].lower()
        left_out.update(s for s in sample.files if of_image is None or s not in (of_image, ".cls", ".json"))
    kept = [(key, sample.label, sample.image) for key, sample in samples.items() if sample.image is not None]
    if not kept:
        raise UserError(f"{shard} holds no images (read are {' '.join(sorted(IMAGE_EXTENSIONS))})")
    bare = [key for key, label, _ in kept if label in (None, "")]
    if bare:
        raise UserError(
            f"{shard}: {len(bare)} of {len(kept)} samples have no label, the first is {bare[0]}; give each a .cls file "
            'with its class, or a .json file with "label"'
        )
    labels = [label for _, label, _ in kept]
    if all(isinstance(label, int) for label in labels):
        array = np.array(labels, dtype=np.int64)
    else:
        array = np.array([str(label).encode() for label in labels], dtype=np.bytes_)
    places = np.array([image[1:] for *_, image in kept], dtype=np.int64)
    paths = np.array([os.fsencode(image[0]) for *_, image in kept], dtype=np.bytes_)
    return ShardIndex(paths, places[:, 0], places[:, 1], array, dict(left_out), state)
