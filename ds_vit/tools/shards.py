"""`ds-vit shards FOLDER OUT`: pack class folders, or images with captions, into WebDataset shards.

A few large files replace millions of small ones. They are written to a hidden folder next to OUT, which is renamed to
OUT when all splits are packed.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import posixpath
import shutil
import signal
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ds_vit.data.decode import ORIENTATION, ImageDecodeError, decode, orientation
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.folders import FolderSource
from ds_vit.data.sources.listing import splits_in
from ds_vit.data.sources.pairs import TextFileSource
from ds_vit.data.sources.shards import CLASSES_FILE, DOT, DOT_OF_SUFFIX, PLAN_FILE, RESERVED, make_index, shard_name
from ds_vit.data.sources.tars import TarSource
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.rank import begin_child
from ds_vit.monitoring.progress import Line

_QUALITY = 90  # JPEG quality of resized images without --quality
_KEYS = CaptionKeys()
_LOCK = ".lock"  # in the hidden folder
_Packable = FolderSource | TarSource | TextFileSource


class Packing(NamedTuple):
    """How images go into shards.

    Attributes:
        per_shard: images of a shard.
        resize: images with a larger shorter side are resized to this one, in pixels; None keeps all sizes.
        quality: re-encode all images as JPEG of this quality; None keeps the files' bytes (resized images get 90).
    """

    per_shard: int
    resize: int | None
    quality: int | None


class Packed(NamedTuple):
    """A packed split, or one shard of it.

    Attributes:
        images: number of images.
        shards: number of shards.
        file_bytes: size of the images' files.
        shard_bytes: size of the shards.
        undecodable: files that cannot be decoded for re-encoding, and were packed as they are.
    """

    images: int
    shards: int
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
    allow_empty: bool,
    captions: bool,
) -> list[tuple[str, Packed]]:
    """Pack each split of a folder, or the folder itself where it has none.

    Args:
        folder: of the images.
        out: folder of the shards, absent or empty.
        packing: how images go into shards.
        workers: number of processes.
        line: shows the progress.
        allow_empty: allow class folders without images.
        captions: pack a text file with each image, in place of its class.

    Returns:
        The name and the size of each split.

    Raises:
        UserError: an invalid quality, no such folder, classes that differ between splits, no text files, or an `out`
            that is not empty or that another process packs into.
    """
    if packing.quality is not None and not 1 <= packing.quality <= 100:
        raise UserError(f"--quality lies between 1 and 100, not {packing.quality}")
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is no folder; give one with train/ and val/ in it, or with class folders")
    target = Path(out).resolve()
    if target.is_mount() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise UserError(f"{out} exists and is not an empty folder; give another one, or remove it")
    parent = folder
    if not (splits := splits_in(folder)):
        parent, name = os.path.split(os.path.abspath(folder))
        splits = [name]
    classes, labels = None, _KEYS if captions else True
    sources: dict[str, _Packable] = {}
    for split in splits:  # all of them before the first is packed
        try:
            source = open_source("", parent, split, classes=classes, allow_empty=allow_empty, labels=labels)
        except UserError as error:
            if len(splits) == 1:
                raise
            moved = f"to pack the other splits only, move {os.path.join(parent, split)} elsewhere"
            raise UserError(f"{error}; {moved}") from None
        if not isinstance(source, _Packable):
            raise UserError(
                f"{os.path.join(parent, split)} is no folder or tar of class folders; nothing else is packed"
            )
        if not captions and classes is None:
            classes = source.class_names
        sources[split] = source
    made = []
    try:
        with _made_whole(target) as partial:
            if classes is not None:
                # A folder name that is not UTF-8 has lone surrogates (`os.fsdecode`), which become JSON escapes here.
                text = json.dumps(list(classes), indent=2, ensure_ascii=False) + "\n"
                (partial / CLASSES_FILE).write_bytes(text.encode(errors="backslashreplace"))
            for split, source in sources.items():
                packed = _pack_split(_SplitJob(source, split, partial, packing, _clashing(source)), workers, line)
                (partial / PLAN_FILE.format(split)).write_text(json.dumps({"shards": packed.shards}) + "\n")
                made.append((split, packed))
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably because memory ran out; start again with fewer --workers"
        ) from None
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror}; nothing was written") from error
    return made


@contextlib.contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """A locked, hidden folder next to the target, which is renamed to it at the end, or removed after an error."""
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process packs into {target}; wait for it, or give another folder") from None
        except OSError:
            pass  # a file system without locks
        try:
            for left in partial.iterdir():  # of a run that was killed
                if left.name != _LOCK:
                    left.unlink()
            yield partial
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        (target / _LOCK).unlink()  # afterwards: until then another process may find the folder


class _SplitJob(NamedTuple):
    """A split and how it is packed, for the worker processes."""

    source: _Packable
    split: str
    folder: Path
    packing: Packing
    clashing: frozenset[int]


_job: _SplitJob  # of this worker process


def _start_worker(job: _SplitJob, parent: int) -> None:
    global _job
    _job = job
    begin_child(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one


def _pack_split(job: _SplitJob, workers: int, line: Line) -> Packed:
    firsts = range(0, len(job.source), job.packing.per_shard)
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        min(workers, len(firsts)), context, initializer=_start_worker, initargs=(job, os.getpid())
    )
    with line.doing(f"{job.split}: shards", len(firsts)) as counted:
        try:
            parts = [*counted(pool.map(_write_shard, firsts))]
        finally:
            pool.shutdown(cancel_futures=True)
    *counts, undecodable = zip(*parts, strict=True)
    return Packed._make([*map(sum, counts), tuple(itertools.chain.from_iterable(undecodable))])


def _clashing(source: _Packable) -> frozenset[int]:
    """The images that differ from another one only by their suffix (`1.png`, `1.jpg`): a shard would join them."""
    stems = np.array([hash(posixpath.splitext(source.path(number))[0]) for number in range(len(source))])
    _, place, counts = np.unique(stems, return_inverse=True, return_counts=True)
    return frozenset(np.flatnonzero(counts[place] > 1).tolist())


def _write_shard(first: int) -> Packed:
    """Write the shard whose first image has this number: images with labels or captions, and its index."""
    source, split, folder, packing, clashing = _job
    numbers = range(first, min(first + packing.per_shard, len(source)))
    shard = folder / shard_name(split, first // packing.per_shard)
    file_bytes, undecodable = 0, []
    with tarfile.open(shard, "w") as tar:
        for number in numbers:
            name = source.describe(number)
            try:
                data = source.encoded(number)
            except ImageDecodeError as error:
                raise UserError(f"{name}: {error.reason}; remove it; nothing was written") from None
            file_bytes += len(data)
            stem, suffix = posixpath.splitext(source.path(number))
            parent, stem = posixpath.split(stem)
            key = posixpath.join(parent, stem.replace(".", DOT))
            if number in clashing:
                key += DOT_OF_SUFFIX + suffix.removeprefix(".")
            if RESERVED.match(key):
                key = f"./{key}"
            try:
                encoded = _reencode(data, name, packing)
            except ImageDecodeError:
                encoded = None
                undecodable.append(name)
            if encoded is not None:
                data, suffix = encoded, ".jpg"
            if source.has_captions:
                annotation = (f"{key}.txt", "".join(f"{text}\n" for text in source.captions(number)).encode())
            else:
                annotation = (f"{key}.cls", str(source.target(number)).encode())
            for member, content in ((key + suffix, data), annotation):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    make_index(str(shard), _KEYS if source.has_captions else None)
    return Packed(len(numbers), 1, file_bytes, shard.stat().st_size, tuple(undecodable))


def _reencode(data: bytes, name: str, packing: Packing) -> bytes | None:
    """The image as JPEG, resized to `packing.resize` if it is larger; None if its bytes stay as they are."""
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
