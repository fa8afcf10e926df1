"""safetensors files, written one tensor after the other; models/weight_files.py reads them.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

_TYPES: dict[torch.dtype, tuple[str, np.dtype]] = {
    torch.float64: ("F64", np.dtype("<f8")),
    torch.float32: ("F32", np.dtype("<f4")),
    torch.int64: ("I64", np.dtype("<i8")),
    torch.int32: ("I32", np.dtype("<i4")),
    torch.uint8: ("U8", np.dtype("u1")),
    torch.bool: ("BOOL", np.dtype("?")),
}
_READ_BYTES = 2 * 2**20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written.

    Attributes:
        name: in the file.
        shape: whole.
        dtype: what the checkpoint keeps it in; fp32 for weights and optimizer state.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.numel * _TYPES[self.dtype][1].itemsize


@dataclass(frozen=True)
class FileEntry:
    """A finished file, as the manifest lists it."""

    name: str
    num_bytes: int
    sha256: str
    tensors: tuple[str, ...] = ()


def split_files(stem: str, tensors: Sequence[TensorSpec], max_bytes: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Deal tensors to files of at most `max_bytes` (one larger tensor has a file of its own), in the order given.

    Returns:
        `{"model.safetensors": all}`, or Hugging Face's `model-00001-of-00003.safetensors`, … where one is not enough.
    """
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.num_bytes
    if len(parts) == 1:
        return {f"{stem}.safetensors": tuple(parts[0])}
    return {f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors": tuple(part) for i, part in enumerate(parts, 1)}


def index_of(files: Mapping[str, Sequence[TensorSpec]]) -> dict[str, Any]:
    """Hugging Face's index of a sharded set of files: total bytes, and which file each tensor is in."""
    return {
        "metadata": {"total_size": sum(tensor.num_bytes for part in files.values() for tensor in part)},
        "weight_map": {tensor.name: name for name, part in files.items() for tensor in part},
    }


def _header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset + tensor.num_bytes]
        header[tensor.name] = {"dtype": _TYPES[tensor.dtype][0], "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorWriter:
    """Writes one safetensors file, a tensor at a time, in the order of the header.

    Args:
        path: the file; it is made anew.
        tensors: all that will be in it.
        metadata: further words of its header.

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
        array = value.detach().to(spec.dtype).contiguous().numpy().reshape(-1).astype(_TYPES[spec.dtype][1], copy=False)
        if array.size:
            self._put(memoryview(array).cast("B"))
        self._next += 1

    def close(self) -> FileEntry:
        """Bring the file to the disk, read it back, and compare.

        Raises:
            ValueError: a tensor is missing.
            OSError: the disk gives back something else than was written.
        """
        if self._next != len(self._tensors):
            raise ValueError(f"{self.path}: closed before {self._tensors[self._next].name} was written")
        os.fsync(self._file.fileno())
        self._file.close()
        written = self._hash.hexdigest()
        found = sha256_of(self.path, from_disk=True)
        if found != written:
            raise OSError(f"{self.path.name}: what was read back is not what was written (a faulty disk or network)")
        return FileEntry(self.path.name, self._num_bytes, written, tuple(t.name for t in self._tensors))

    def abandon(self) -> None:
        """Close the file as it is; it is worth nothing. May be called at any time."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _put(self, data: memoryview) -> None:
        self._hash.update(data)
        self._num_bytes += data.nbytes
        while data.nbytes:  # a raw file may take a part of it, above all shortly before the disk is full
            data = data[self._file.write(data) :]


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
        buffer = bytearray(_READ_BYTES)
        view = memoryview(buffer)
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write a small file and bring it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())


def replace_text(path: Path, text: str) -> None:
    """Give a small file new contents, all or nothing, and bring the change to the disk."""
    temporary = path.with_name(f".{path.name}.partial")
    write_bytes(temporary, text.encode())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_weights(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    max_shard_size: str | int = "5GB",
    name: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write `<name>.safetensors`, or shards with Hugging Face's `<name>.safetensors.index.json` where it is larger.

    Each file is written under another name and then renamed, so a reader sees a whole file or none.

    Args:
        folder: an existing folder.
        state: timm names → CPU tensors.
        max_shard_size: bytes, or "5GB".
        name: of the file, without its suffix.
        metadata: further words of the header of each file.

    Returns:
        The file that a reader opens: the weights, or the index.
    """
    split = split_torch_state_dict_into_shards(
        dict(state), filename_pattern=f"{name}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    for file, keys in split.filename_to_tensors.items():
        temporary = folder / f".{file}.partial"
        words = {"format": "pt", **(metadata or {})}
        save_file({key: state[key].contiguous() for key in keys}, str(temporary), metadata=words)
        temporary.chmod(0o666 & ~_umask())  # safetensors makes files that nobody else can read
        os.replace(temporary, folder / file)
    if not split.is_sharded:
        return folder / f"{name}.safetensors"
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    temporary = folder / f".{name}.safetensors.index.json.partial"
    temporary.write_text(json.dumps(index, indent=1))
    os.replace(temporary, folder / f"{name}.safetensors.index.json")
    return folder / f"{name}.safetensors.index.json"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
