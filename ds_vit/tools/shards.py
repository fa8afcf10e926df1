"""`ds-vit shards FOLDER OUT`: WebDataset shards of class folders or of images with captions.

A few large files take the place of millions of small ones.

What a shard holds is a function of the folder and the settings, to every bit. So a run that was killed continues where
it was: a shard under its own name, with the index next to it, was read back and is whole.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import multiprocessing
import os
import posixpath
import signal
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ds_vit.data.decode import ORIENTATION, ImageDecodeError, decode, orientation
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.folders import FolderSource
from ds_vit.data.sources.pairs import TextFileSource
from ds_vit.data.sources.shard_index import DOT, DOT_OF_SUFFIX, load_index, read_index, save_index
from ds_vit.data.sources.shards import CLASSES_FILE, PLAN_FILE, shard_name
from ds_vit.data.sources.source import TRAIN_NAMES, VAL_NAMES
from ds_vit.data.sources.tars import TarSource
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.progress import Line
from ds_vit.run_folder import written_whole

_QUALITY = 90  # of what is resized
_KEYS = CaptionKeys()
_Packable = FolderSource | TarSource | TextFileSource
_SPLITS = (*TRAIN_NAMES, *VAL_NAMES, "test")


@dataclass(frozen=True)
class Packing:
    """How images go into shards.

    Attributes:
        per_shard: images of a shard.
        resize: pixels of the shorter side of larger images; None for as they are.
        quality: of JPEG, which everything is then encoded as; None for the files' own bytes (90 where it is resized).
    """

    per_shard: int = 5000
    resize: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.per_shard < 1:
            raise UserError(f"--per-shard must be at least 1, not {self.per_shard}")
        if self.resize is not None and self.resize < 1:
            raise UserError(f"--resize must be at least 1 pixel, not {self.resize}")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise UserError(f"--quality lies between 1 and 100, not {self.quality}")


class Packed(NamedTuple):
    """What became of a split, or of one shard of it.

    Attributes:
        images, shards: how many there are.
        made: of the shards, those that were not there before.
        file_bytes: of the images' files in those that were made.
        shard_bytes: of all shards.
        undecodable: files that were to be encoded anew and went in as they are.
    """

    images: int
    shards: int
    made: int
    file_bytes: int
    shard_bytes: int
    undecodable: tuple[str, ...]


def make_shards(
    folder: str,
    out: str,
    packing: Packing,
    *,
    workers: int,
    line: Line,
    allow_empty: bool = False,
    captions: bool = False,
) -> Iterator[tuple[str, Packed]]:
    """Pack each split of a folder, or the folder itself where it has none.

    Args:
        folder, out: of the images, and of the shards.
        packing: how images go into shards.
        workers: processes.
        line: shows the progress.
        allow_empty: whether a class folder without images is a class.
        captions: pack a text file with each image, in place of its class.

    Yields:
        Each split's name, and what became of it.

    Raises:
        UserError: no such folder, classes that differ between splits, no text files, or an `out` that
            holds other shards.
    """
    if workers < 1:
        raise UserError(f"--workers must be at least 1, not {workers}")
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is no folder; give one with train/ and val/ in it, or with class folders")
    parent, inside = folder, set(os.listdir(folder))
    splits = [name for name in _SPLITS if {name, f"{name}.tar"} & inside]
    if not splits:
        parent, name = os.path.split(os.path.abspath(folder))
        splits = [name]
    classes = None
    for split in splits:
        keys = _KEYS if captions else None
        source = open_source("", parent, split, classes=classes, allow_empty=allow_empty, captions=keys)
        if not isinstance(source, _Packable):
            raise UserError(
                f"{os.path.join(parent, split)} is no folder or tar of class folders; nothing else is packed"
            )
        classes = None if captions else source.class_names
        yield split, _pack(source, split, Path(out), packing, workers, line)


def _pack(source: _Packable, split: str, out: Path, packing: Packing, workers: int, line: Line) -> Packed:
    firsts = range(0, len(source), packing.per_shard)
    plan = {**asdict(packing), "images": len(source), "shards": len(firsts), "samples": source.fingerprint}
    try:
        _keep_to_plan(out, split, plan, source)
        work = _Work(source, split, out, packing, _clashing(source))
        parts: list[Packed] = []
        context = multiprocessing.get_context()
        pool = ProcessPoolExecutor(min(workers, len(firsts)), context, initializer=_start, initargs=(work,))
        with line.doing(f"{split}: shards", len(firsts)) as counted:
            try:
                parts += counted(pool.map(_make, firsts))
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool:
        raise UserError(
            f"a process that made shards was killed; had the machine no memory left? What is made stays in {out}: "
            "start again to continue, with fewer --workers"
        ) from None
    except OSError as error:
        raise UserError(
            f"{error.filename or out}: {error.strerror}; what is made stays in {out}: start again to continue"
        ) from error
    *counts, undecodable = zip(*parts, strict=True)
    return Packed._make([*map(sum, counts), tuple(itertools.chain.from_iterable(undecodable))])


def _keep_to_plan(out: Path, split: str, plan: dict[str, object], source: _Packable) -> None:
    """Write down what is made and of which classes, or see that it is what was begun there."""
    out.mkdir(parents=True, exist_ok=True)
    plan_file = out / PLAN_FILE.format(split)
    there = [path.name for path in out.glob(f"{split}-*.tar")]
    if there and not plan_file.exists():
        raise UserError(f"{out} holds {min(there)} of another origin; give another folder, or move it away")
    files: list[tuple[Path, object, str]] = [(plan_file, plan, "shards of other images or settings")]
    if not source.has_captions:
        files.insert(0, (out / CLASSES_FILE, list(source.class_names), "other classes"))
    for path, wanted, what in files:
        # A class folder's name need not be UTF-8: as in `os.fsdecode`, and JSON escapes it.
        text = (json.dumps(wanted, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        if not path.exists():
            with written_whole(path) as partial:
                partial.write_bytes(text)
        elif path.read_bytes() != text:
            raise UserError(f"{out} holds {what}, {path.name} says; give another folder, or remove that one")


def _clashing(source: _Packable) -> frozenset[int]:
    """The images that differ from another one only by their suffix (`1.png`, `1.jpg`), of which a shard makes one."""
    stems = np.array([hash(posixpath.splitext(source.path(number))[0]) for number in range(len(source))])
    _, place, counts = np.unique(stems, return_inverse=True, return_counts=True)
    return frozenset(np.flatnonzero(counts[place] > 1).tolist())


class _Work(NamedTuple):
    """What the processes need for any shard of a split."""

    source: _Packable
    split: str
    out: Path
    packing: Packing
    clashing: frozenset[int]


_work: _Work


def _start(work: _Work) -> None:
    """A process begins: it ends with the one that started it, and leaves Ctrl-C to that."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is not a worker"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _make(first: int) -> Packed:
    """Make the shard that begins with an image, unless it is there, and read it back."""
    source, split, out, packing, _ = _work
    numbers = range(first, min(first + packing.per_shard, len(source)))
    shard = out / shard_name(split, first // packing.per_shard)
    keys = _KEYS if source.has_captions else None
    found = load_index(str(shard), keys) if shard.exists() else None
    if found is not None and len(found.paths) == len(numbers):
        return Packed(len(numbers), 1, 0, 0, shard.stat().st_size, ())
    with written_whole(shard) as partial:
        file_bytes, written, undecodable = _write(partial, numbers)
        index = read_index(str(partial), keys)
        with partial.open("rb") as file:
            places = zip(index.offsets, index.sizes, strict=True)
            read = [_digest(os.pread(file.fileno(), size, at)) for at, size in places]
        if index.captions is not None:
            same = [index.captions[place] == source.captions(number) for place, number in enumerate(numbers)]
        else:
            same = [index.labels[place] == source.target(number) for place, number in enumerate(numbers)]
        if read != written or not all(same):
            raise UserError(f"{shard} was written and reads back otherwise: the disk or the memory is at fault")
    save_index(str(shard), index, keys)
    return Packed(len(numbers), 1, 1, file_bytes, shard.stat().st_size, undecodable)


def _write(path: Path, numbers: Sequence[int]) -> tuple[int, list[bytes], tuple[str, ...]]:
    """Write images with labels or captions; their bytes, what each image hashes to, and those that are no images."""
    source = _work.source
    file_bytes, digests, undecodable = 0, [], []
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in numbers:
                name = source.describe(number)
                data = source.encoded(number)
                file_bytes += len(data)
                stem, suffix = posixpath.splitext(source.path(number))
                folder, stem = posixpath.split(stem)
                key = posixpath.join(folder, stem.replace(".", DOT))
                if number in _work.clashing:
                    key += DOT_OF_SUFFIX + suffix.removeprefix(".")
                try:
                    encoded = _encoded_anew(data, name, _work.packing)
                except ImageDecodeError:
                    encoded = None
                    undecodable.append(name)
                if encoded is not None:
                    data, suffix = encoded, ".jpg"
                digests.append(_digest(data))
                if source.has_captions:
                    member_of_sample = (f"{key}.txt", "".join(f"{text}\n" for text in source.captions(number)).encode())
                else:
                    member_of_sample = (f"{key}.cls", str(source.target(number)).encode())
                for member, content in ((key + suffix, data), member_of_sample):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        file.flush()
        os.fsync(file.fileno())
    return file_bytes, digests, tuple(undecodable)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _encoded_anew(data: bytes, name: str, packing: Packing) -> bytes | None:
    """An image as JPEG, its shorter side `resize` pixels at most; None for one that stays as it is."""
    if packing.resize is None and packing.quality is None:
        return None
    image = decode(data, name)
    exif = Image.Exif()
    if (turn := orientation(image)) > 1:  # for --exif-rotation
        exif[ORIENTATION] = turn
    shorter = min(image.size)
    if packing.resize is not None and shorter > packing.resize:
        size = [max(1, round(side * packing.resize / shorter)) for side in image.size]
        image = image.resize(size, Image.Resampling.BICUBIC)
    elif packing.quality is None:
        return None
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=packing.quality or _QUALITY, exif=exif.tobytes() if exif else b"")
    return buffer.getvalue()
