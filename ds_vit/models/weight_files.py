"""Files of weights, of any tool, as a mapping from timm's names to tensors that are read when asked for.

Accepted are .safetensors, the index.json of a sharded one, torch files (.pth, .pt, .bin, .tar; read with
`weights_only=True`), and a folder that holds either: timm's own, or one of Hugging Face's `ViTForImageClassification`,
whose names are translated. As in timm, an EMA inside a training checkpoint is preferred.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from timm.models import clean_state_dict

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.hf_names import TensorsFromHF, is_hf

_TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # in timm's order of preference
_IN_FOLDER = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
_DEEPSPEED = ("*_optim_states.pt", "mp_rank_*_model_states.pt")


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, mapped into memory: what is not looked at is not read.

    Of a name that two of them have, it is the later file's.

    Attributes:
        metadata: the words of their headers.

    Args:
        paths: the files.

    Raises:
        UserError: a file is not there, is no safetensors, or is shorter than its header says.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.metadata: dict[str, str] = {}
        self._owners: dict[str, Any] = {}
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is no safetensors file: {error}") from None
            self._owners.update(dict.fromkeys(handle.keys(), handle))
            self.metadata.update(handle.metadata() or {})

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._owners[name].get_tensor(name)

    def __delitem__(self, name: str) -> None:
        """Leave a tensor out of the mapping; the file keeps it."""
        del self._owners[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, without reading it."""
        return torch.Size(self._owners[name].get_slice(name).get_shape())

    def is_floating_point(self, name: str) -> bool:
        """Whether a tensor holds floating-point numbers, without reading it."""
        return self._owners[name].get_slice(name).get_dtype().startswith(("F", "BF"))


def shape_of(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """The shape of a tensor of `open_weights`; nothing is read where the file says it by itself."""
    return tensors.shape(name) if isinstance(tensors, (TensorFiles, TensorsFromHF)) else tensors[name].shape


def is_floating_point(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether a tensor of `open_weights` holds floating-point numbers; safetensors say it without being read."""
    if isinstance(tensors, TensorFiles):
        return tensors.is_floating_point(name)
    return isinstance(tensors, TensorsFromHF) or tensors[name].is_floating_point()


def read_torch(path: Path) -> Any:
    """The (memory-mapped) contents of a torch file; timm's own training checkpoints hold an argparse.Namespace."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # written by torch < 1.6


def deepspeed_checkpoint(folder: Path) -> Path | None:
    """The folder of ranks' files of a checkpoint that DeepSpeed's own `save_checkpoint` wrote, or None.

    Args:
        folder: that folder, or the one around it with the file `latest`.
    """
    latest = folder / "latest"
    inner = folder / latest.read_text().strip() if latest.is_file() else folder
    return inner if any(True for pattern in _DEEPSPEED for _ in inner.glob(pattern)) else None


def _file_of(path: Path) -> Path:
    """The file to open for a path that was given; UserError where there is none."""
    if not path.is_dir():
        return path
    found = [path / name for name in _IN_FOLDER if (path / name).is_file()]
    if found:
        return found[0]
    if deepspeed_checkpoint(path):
        raise UserError(
            f"initial checkpoint {path} is one of DeepSpeed's own, which are pickles; if you trust it, convert it: "
            f"ds-vit import {path} --to weights.safetensors"
        )
    raise UserError(f"initial checkpoint {path} is a folder without model.safetensors or its index.json")


def _shards(path: Path) -> list[Path]:
    """The files that a .safetensors or its index.json stands for."""
    if path.suffix != ".json":
        return [path]
    return [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]


def _safetensors(path: Path) -> TensorFiles:
    """Averaged weights lack what is not trained: that is read from the raw ones beside them."""
    shards = _shards(path)
    if path.name.startswith("ema.safetensors"):
        raw = [path.parent / name for name in _IN_FOLDER[:2] if (path.parent / name).is_file()]
        shards = [*(_shards(raw[0]) if raw else []), *shards]
    return TensorFiles(shards)


def open_weights(path: str | Path) -> dict[str, torch.Tensor] | TensorFiles | TensorsFromHF:
    """The tensors of a checkpoint, under timm's names where the file has Hugging Face's.

    Raises:
        UserError: it does not exist, cannot be read, or holds more than tensors.
    """
    path = _file_of(Path(path))
    if not path.is_file():
        raise UserError(f"initial checkpoint {path} does not exist")
    try:
        tensors = _open_file(path)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"initial checkpoint {path} holds more than tensors and is not loaded, because unpickling it could run "
            f"code; save its state dict as safetensors ({str(error).splitlines()[0]})"
        ) from error
    except (AttributeError, EOFError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(f"initial checkpoint {path} cannot be read: {error}") from error
    return TensorsFromHF(tensors, lambda name: shape_of(tensors, name)) if is_hf(tensors) else tensors


def names_as_metadata(class_names: Sequence[str]) -> dict[str, str]:
    """Class names as the header of a safetensors file has them, whose values are strings alone; `class_names` reads."""
    return {"class_names": json.dumps(list(class_names))} if class_names else {}


def class_names(path: str | Path) -> tuple[str, ...]:
    """The names of the classes that weights bring with them, in the order of the logits; empty where they bring none.

    From the header of the safetensors file, else from the config.json beside it: timm's `label_names` or Hugging
    Face's `id2label`, unless that is its default (LABEL_0, LABEL_1, …).

    Raises:
        UserError: the weights or the config.json cannot be read.
    """
    file = _file_of(Path(path))
    if file.suffix in (".safetensors", ".json"):
        words = TensorFiles(_shards(file)[:1]).metadata
        if "class_names" in words:
            return tuple(json.loads(words["class_names"]))
    config = _config_beside(file)
    numbered = config.get("id2label") or {}
    names = config.get("label_names") or [numbered[number] for number in sorted(numbered, key=int)]
    default = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return () if default else tuple(str(name) for name in names)


def hf_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder that weights lie in; empty where there is none."""
    config = _config_beside(Path(path))
    return config if "model_type" in config else {}


def _config_beside(path: Path) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"initial checkpoint {path}: {file} is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _open_file(path: Path) -> dict[str, torch.Tensor] | TensorFiles:
    if path.suffix in (".safetensors", ".json"):
        return _safetensors(path)
    if path.suffix not in _TORCH_SUFFIXES:
        kinds = ", ".join((".safetensors", ".safetensors.index.json", *_TORCH_SUFFIXES))
        raise UserError(f"its ending {path.suffix!r} is none of {kinds}")
    contents = read_torch(path)
    for wrapper in _WRAPPERS:
        if isinstance(contents, dict) and isinstance(contents.get(wrapper), Mapping):
            contents = contents[wrapper]
            break
    if not isinstance(contents, Mapping):
        raise UserError(f"it holds a {type(contents).__name__}, not a dictionary of tensors")
    return clean_state_dict(dict(contents))
