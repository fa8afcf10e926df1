"""Initial weights from a file with timm's names (`--initial-checkpoint`), checked whole and read layer by layer.

Accepted are .safetensors, the index.json of a sharded one, a folder that holds either, and torch files (.pth, .pt,
.bin, .tar; read with `weights_only=True`). As in timm, an EMA inside a training checkpoint is preferred.

Names and shapes are compared with the model's before anything is loaded. Position embeddings and patch kernels of
another size are resampled by timm's own `checkpoint_filter_fn`, which also translates foreign names.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.models import clean_state_dict, vision_transformer
from torch import nn

from ds_vit.models.param_groups import classifier_names
from ds_vit.models.zoo import TimmViT, names_and_shapes

_TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # in timm's order of preference
_RESAMPLED = ("pos_embed", "patch_embed.proj.weight")  # what depends on the image or patch size


class _SafetensorsFiles(Mapping[str, torch.Tensor]):
    """The tensors of one or more safetensors files, each read when it is asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._owners: dict[str, Any] = {}
        for path in paths:
            handle = safe_open(path, framework="pt")
            self._owners.update(dict.fromkeys(handle.keys(), handle))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._owners[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, without reading it."""
        return torch.Size(self._owners[name].get_slice(name).get_shape())


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    return tensors.shape(name) if isinstance(tensors, _SafetensorsFiles) else tensors[name].shape


def _read_torch(path: Path) -> dict[str, Any]:
    """The (memory-mapped) contents of a torch file; timm's own training checkpoints hold an argparse.Namespace."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # written by torch < 1.6


def _open(path: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a checkpoint under the names that it gives them; ValueError where it cannot be read."""
    if path.is_dir():
        candidates = [path / "model.safetensors.index.json", path / "model.safetensors"]
        found = [candidate for candidate in candidates if candidate.is_file()]
        if not found:
            raise ValueError(f"initial checkpoint {path} is a folder without model.safetensors or its index.json")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"initial checkpoint {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            return _SafetensorsFiles([path])
        if path.suffix == ".json":
            shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            return _SafetensorsFiles(path.parent / shard for shard in shards)
        if path.suffix not in _TORCH_SUFFIXES:
            kinds = ", ".join((".safetensors", ".safetensors.index.json", *_TORCH_SUFFIXES))
            raise ValueError(f"its ending {path.suffix!r} is none of {kinds}")
        contents = _read_torch(path)
        for wrapper in _WRAPPERS:
            if isinstance(contents, dict) and isinstance(contents.get(wrapper), Mapping):
                contents = contents[wrapper]
                break
        if not isinstance(contents, Mapping):
            raise ValueError(f"it holds a {type(contents).__name__}, not a dictionary of tensors")
        return clean_state_dict(dict(contents))
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"initial checkpoint {path} holds more than tensors and is not loaded, because unpickling it could run "
            f"code; save its state dict as safetensors ({str(error).splitlines()[0]})"
        ) from error
    except (AttributeError, EOFError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"initial checkpoint {path} cannot be read: {error}") from error


def _filter_function(model: TimmViT) -> Callable[..., dict[str, torch.Tensor]]:
    """timm's `checkpoint_filter_fn` as timm binds it for this name when it loads its own weights."""
    name = model.pretrained_cfg["architecture"]
    module = timm.models.model_entrypoint(name).__module__
    filter_function = import_module(module).checkpoint_filter_fn
    if module.endswith(".deit"):
        return partial(filter_function, adapt_layer_scale=True)
    if "flexi" in name:
        return partial(filter_function, interpolation="bilinear", antialias=False)
    if "radio" in name:
        align_corners = any(part in name for part in vision_transformer._RADIO_ALIGN_CORNERS)
        return partial(filter_function, interpolation="bilinear", antialias=False, align_corners=align_corners)
    return filter_function


class InitialCheckpoint:
    """A file of initial weights that fits a model.

    Attributes:
        newly_initialised: the classifier's parameters, where the file has none or one of another number of classes;
            empty otherwise. They keep their drawn values; tell the person who runs it.
    """

    def __init__(self, path: str | Path, model: TimmViT) -> None:
        """Open a checkpoint and hold its names and shapes against the model's.

        Args:
            path: see the module's first lines.
            model: the description of the model, on the meta device.

        Raises:
            ValueError: the file cannot be read, or names or shapes differ in more than the number of classes; the
                first five differences are named.
        """
        path = Path(path)
        wanted = names_and_shapes(model)
        self._tensors = _open(path)
        foreign = not set(self._tensors) <= set(wanted)
        self._translated = self._translate(path, model, self._tensors if foreign else _RESAMPLED)
        given = {} if foreign else {name: _shape(self._tensors, name) for name in self._tensors}
        given |= {name: tensor.shape for name, tensor in self._translated.items()}
        self.newly_initialised = self._new_classifier(model, wanted, given)

        kept = [name for name in wanted if name not in self.newly_initialised]
        differences = [f"{name} {tuple(wanted[name])} is missing from the file" for name in kept if name not in given]
        differences += [
            f"{name} is {tuple(given[name])} in the file and {tuple(wanted[name])} in the model"
            for name in kept
            if name in given and given[name] != wanted[name]
        ]
        differences += [f"{name} {tuple(given[name])} is not in the model" for name in given if name not in wanted]
        if differences:
            raise ValueError(
                f"initial checkpoint {path} does not fit {model.pretrained_cfg['architecture']}, a model of "
                f"{len(wanted)} tensors, in {len(differences)} places: {'; '.join(differences[:5])}"
            )

    def _translate(self, path: Path, model: TimmViT, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The named tensors as timm's filter gives them: resampled, and under timm's names."""
        tensors = {name: self._tensors[name] for name in names if name in self._tensors}
        try:
            translated = _filter_function(model)(tensors, model)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"initial checkpoint {path} does not fit {model.pretrained_cfg['architecture']}: timm cannot translate "
                f"it ({type(error).__name__}: {error})"
            ) from error
        others = [f"{name} ({type(v).__name__})" for name, v in translated.items() if not isinstance(v, torch.Tensor)]
        if others:
            raise ValueError(f"initial checkpoint {path} is no state dict: it holds {', '.join(others[:5])}")
        return translated

    @staticmethod
    def _new_classifier(
        model: TimmViT, wanted: Mapping[str, torch.Size], given: Mapping[str, torch.Size]
    ) -> tuple[str, ...]:
        own = sorted(classifier_names(model))
        if not any(name in given for name in own):
            return tuple(own)
        other_classes = all(
            name in given and given[name][0] != wanted[name][0] and given[name][1:] == wanted[name][1:] for name in own
        )
        return tuple(own) if other_classes else ()

    def covers(self, layer: nn.Module) -> bool:
        """Whether the file gives every value of a layer."""
        return not any(name in self.newly_initialised for name in layer.state_dict())

    def load(self, layer: nn.Module) -> None:
        """Copy the file's values into a layer of `take_apart`; only these are read."""
        with torch.no_grad():
            for name, tensor in layer.state_dict().items():
                if name not in self.newly_initialised:
                    tensor.copy_(self._translated[name] if name in self._translated else self._tensors[name])
