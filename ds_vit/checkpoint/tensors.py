"""safetensors files: written one tensor after the other, and mapped into memory to be read.

safetensors' own `save_file` needs every tensor in memory at once. Here the header is made from names and shapes, and
the values follow one tensor at a time, so that a writer never holds more than one. The files are ordinary safetensors
(https://github.com/huggingface/safetensors#format): 8 bytes of header length, a JSON header padded with spaces to a
multiple of 8, then the values, little-endian, in the header's order without gaps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from ds_vit.fault_tolerance.errors import UserError

WEIGHT_BYTES = 5 * 10**9
"""Largest file of weights, as Hugging Face has it: timm and others read one file most easily."""

_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
_READ_BYTES = 2 * 2**20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written.

    Attributes:
        name: in the file.
        shape: whole.
        dtype: in the file; fp32 for weights and optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileEntry:
    """A finished file, as the manifest lists it."""

    name: str
    num_bytes: int
    sha256: str


def split_files(stem: str, tensors: Sequence[TensorSpec], max_bytes: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Split tensors into files of at most `max_bytes` (one larger tensor gets a separate file), as Hugging Face does.

    Returns:
        `{"model.safetensors": all}`, or `model-00001-of-00003.safetensors`, … where one is not enough.
    """
    named = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        named,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="{suffix}.safetensors",  # a stem with braces is no part of the format
        max_shard_size=max_bytes,
    )
    files = {stem + end: tuple(named[name] for name in names) for end, names in split.filename_to_tensors.items()}
    return files or {f"{stem}.safetensors": ()}


def index_files(kinds: Mapping[str, Mapping[str, Sequence[TensorSpec]]]) -> dict[str, str]:
    """Hugging Face's index of each kind that takes several files: total bytes, and which file each tensor is in.

    Args:
        kinds: kind → its files, from `split_files`.

    Returns:
        Name of the index → its text.
    """
    texts = {}
    for kind, files in kinds.items():
        if len(files) > 1:
            size = sum(tensor.num_bytes for part in files.values() for tensor in part)
            weight_map = {tensor.name: name for name, part in files.items() for tensor in part}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            texts[f"{kind}.safetensors.index.json"] = json.dumps(index, indent=1) + "\n"
    return texts


def _header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset + tensor.num_bytes]
        header[tensor.name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorWriter:
    """Writes one safetensors file, a tensor at a time, in the order of the header.

    Args:
        path: the file; it is made anew.
        tensors: all that will be in it.
        metadata: further entries of its header.

    Raises:
        OSError: from any method, where the file system refuses.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._tensors = tuple(tensors)
        self._next = 0
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self._file = path.open("wb", buffering=0)
        self._put(memoryview(_header(tensors, metadata or {})))

    def write(self, name: str, value: torch.Tensor) -> None:
        """Append a tensor: `value` is the whole of it, on the CPU, and `name` the header's next.

        Raises:
            ValueError: another tensor is due, or the shape differs.
        """
        spec = self._tensors[self._next] if self._next < len(self._tensors) else None
        if spec is None or name != spec.name or tuple(value.shape) != spec.shape:
            raise ValueError(f"{self.path}: {name} {tuple(value.shape)} is written where {spec} is due")
        if value.numel():
            self._put(memoryview(value.detach().to(spec.dtype).contiguous().view(-1).view(torch.uint8).numpy()))
        self._next += 1

    def close(self) -> FileEntry:
        """Bring the file to the disk, read it back, and compare.

        Raises:
            ValueError: a tensor is missing.
            OSError: the disk returns other bytes than were written.
        """
        if self._next != len(self._tensors):
            raise ValueError(f"{self.path}: closed before {self._tensors[self._next].name} was written")
        os.fsync(self._file.fileno())
        self._file.close()
        written = self._hash.hexdigest()
        digest = sha256_of(self.path, from_disk=True)
        if digest != written:
            raise OSError(f"{self.path.name}: the bytes read back differ from those written (a faulty disk or network)")
        return FileEntry(self.path.name, self._num_bytes, written)

    def abandon(self) -> None:
        """Close an unfinished file, which is useless. May be called at any time."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _put(self, data: memoryview) -> None:
        self._hash.update(data)
        self._num_bytes += data.nbytes
        while data.nbytes:  # a raw file may take a part of it, above all shortly before the disk is full
            data = data[self._file.write(data) :]


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, mapped into memory: values that are not used are not read.

    Where two files have a name, the later file's tensor counts.

    Attributes:
        metadata: the entries of their headers.

    Args:
        paths: the files.

    Raises:
        UserError: a file is not there, is not safetensors, or is shorter than its header says.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.metadata: dict[str, str] = {}
        self._owners: dict[str, Any] = {}
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is not a safetensors file: {error}") from None
            self._owners.update(dict.fromkeys(handle.keys(), handle))
            self.metadata.update(handle.metadata() or {})

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._owners[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def sha256_of(path: Path, *, from_disk: bool = False) -> str:
    """The SHA-256 of a file, hexadecimal.

    Args:
        path: the file.
        from_disk: ask the system to forget its cached copy first, so that the disk itself is read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def write_text(path: Path, text: str) -> FileEntry:
    """Write a small file and bring it to the disk."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())


def replace_text(path: Path, text: str) -> None:
    """Replace the contents of a small file atomically, and bring the change to the disk."""
    temporary = path.with_name(f".{path.name}.partial")
    write_text(temporary, text)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_empty(folder: Path) -> None:
    """Make a folder and its parents; what it holds is removed."""
    remove(folder)
    folder.mkdir(parents=True)


def remove(path: Path) -> None:
    """Remove a folder and its contents, or a file in its place; errors are ignored."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def move_files(temporary: Path, folder: Path, names: Iterable[str], texts: Mapping[str, str]) -> None:
    """Move finished files, and small ones that are still to be written, out of a temporary folder, which is removed.

    Args:
        temporary: inside `folder`.
        folder: where a reader looks for the files; each appears whole.
        names: of the finished files.
        texts: name → contents of the others (indices), moved last.
    """
    for name, text in texts.items():
        write_text(temporary / name, text)
    for name in (*names, *texts):
        (temporary / name).replace(folder / name)
    temporary.rmdir()
    sync_folder(folder)


def save_weights(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    max_bytes: int = WEIGHT_BYTES,
    name: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `<name>.safetensors`, or shards with Hugging Face's `<name>.safetensors.index.json` where it is larger.

    Args:
        folder: an existing folder.
        state: timm names → CPU tensors.
        max_bytes: largest size of a file.
        name: of the file, without its suffix.
        metadata: further entries of the header of each file.

    Raises:
        OSError: the file system refuses; what was written is removed.
    """
    specs = [TensorSpec(key, tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()]
    files = split_files(name, specs, max_bytes)
    temporary = folder / f".{name}.partial"
    try:
        make_empty(temporary)
        for file, tensors in files.items():
            writer = TensorWriter(temporary / file, tensors, metadata)
            for spec in tensors:
                writer.write(spec.name, state[spec.name])
            writer.close()
        move_files(temporary, folder, files, index_files({name: files}))
    finally:
        remove(temporary)
