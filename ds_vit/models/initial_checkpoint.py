"""Initial weights from a file (`--initial-checkpoint`), checked whole and read layer by layer.

`weight_files.py` says which files. Names and shapes are compared with the model's before anything is loaded. Position
embeddings of another size, and on request patch kernels, are resampled by timm's own `checkpoint_filter_fn`, which also
translates foreign names. What became of each tensor is kept, to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import vision_transformer
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.models.hf_names import TensorsFromHF, check_hf_config
from ds_vit.models.masked_autoencoder import decoder_names, is_of_decoder
from ds_vit.models.param_groups import classifier_names
from ds_vit.models.weight_files import hf_config, is_floating_point, open_weights, shape_of
from ds_vit.models.zoo import TimmViT, names_and_shapes

_RESAMPLED = ("pos_embed", "patch_embed.proj.weight")  # what depends on the image or patch size


def enumerate_some(names: Sequence[str]) -> str:
    """The first five, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


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


def _check_tensors(path: Path, contents: Mapping[str, Any]) -> None:
    others = [f"{name} ({type(v).__name__})" for name, v in contents.items() if not isinstance(v, torch.Tensor)]
    if others:
        raise UserError(f"initial checkpoint {path} is no state dict: it holds {', '.join(others[:5])}")


class InitialCheckpoint:
    """A file of initial weights that fits a model.

    Attributes:
        newly_initialised: the classifier's parameters, where the file has none or one of another number of classes,
            and a masked autoencoder's decoder, where the file has none; empty otherwise. They keep their drawn values,
            which the user should be told.
        left_out: parameters of a masked autoencoder's decoder, which the file has and the model does not.
        adapted: resampled tensors by name, with their shape in the file.
        ignored: tensors of the file, with their shape, of which nothing is used: a classifier of other classes, and
            what timm's translation of foreign names leaves out or merges into others.
    """

    def __init__(self, path: str | Path, model: TimmViT, *, resample_patch_embed: bool = False) -> None:
        """Open a checkpoint and hold its names and shapes against the model's.

        Args:
            path: see `weight_files.py`.
            model: the description of the model, on the meta device.
            resample_patch_embed: let kernels of another patch size be resampled, as positions are.

        Raises:
            UserError: the file cannot be read, its patch size is another one, or names or shapes differ in more than
                the number of classes; the first five differences are named.
        """
        path = Path(path)
        wanted = names_and_shapes(model)
        decoder = sorted(decoder_names(model))
        self._tensors = open_weights(path)
        self.left_out = () if decoder else tuple(filter(is_of_decoder, self._tensors))
        for name in self.left_out:
            del self._tensors[name]
        if isinstance(self._tensors, TensorsFromHF):
            try:
                check_hf_config(hf_config(path), model)
            except UserError as error:
                raise UserError(
                    f"initial checkpoint {path} does not fit {model.pretrained_cfg['architecture']}: {error}"
                ) from None
        foreign = not set(self._tensors) <= set(wanted)
        if not foreign and isinstance(self._tensors, dict):
            _check_tensors(path, self._tensors)
        parameters = [] if foreign else [name for name, _ in model.named_parameters() if name in self._tensors]
        if whole := [name for name in parameters if not is_floating_point(self._tensors, name)]:
            raise UserError(
                f"initial checkpoint {path} holds no floating-point numbers in {len(whole)} tensors "
                f"({', '.join(whole[:5])}): quantised weights have to be turned back first"
            )
        self._wanted = wanted
        self.adapted = self._other_shapes()
        if "patch_embed.proj.weight" in self.adapted and not resample_patch_embed:
            raise UserError(self._other_patches(path))
        self._translated = self._translate(path, model, self._tensors if foreign else _RESAMPLED)
        given = {} if foreign else {name: shape_of(self._tensors, name) for name in self._tensors}
        given |= {name: tensor.shape for name, tensor in self._translated.items()}
        self.newly_initialised = (
            *self._new_classifier(model, wanted, given),
            *(() if any(name in given for name in decoder) else decoder),
        )

        kept = [name for name in wanted if name not in self.newly_initialised]
        differences = [f"{name} {tuple(wanted[name])} is missing from the file" for name in kept if name not in given]
        differences += [
            f"{name} is {tuple(given[name])} in the file and {tuple(wanted[name])} in the model"
            for name in kept
            if name in given and given[name] != wanted[name]
        ]
        differences += [f"{name} {tuple(given[name])} is not in the model" for name in given if name not in wanted]
        if differences:
            raise UserError(
                f"initial checkpoint {path} does not fit {model.pretrained_cfg['architecture']}, a model of "
                f"{len(wanted)} tensors, in {len(differences)} places: {'; '.join(differences[:5])}"
            )
        used = {*wanted} - {*self.newly_initialised} | (self._used if foreign else set())
        self.ignored = {name: shape for name, shape in self._shapes().items() if name not in used}
        self._foreign = foreign

    def _shapes(self) -> dict[str, torch.Size]:
        """Of the file's tensors; what else lies in a file of foreign names is timm's to judge."""
        held = self._tensors
        names = [name for name in held if not isinstance(held, dict) or isinstance(held[name], torch.Tensor)]
        return {name: shape_of(held, name) for name in names}

    def _other_shapes(self) -> dict[str, torch.Size]:
        """The shapes, in the file, of kernels and positions that have another one in the model.

        Under foreign names too: a file has one kernel of as many channels, and positions that are called so.
        """
        found = {}
        kernel, positions = (self._wanted.get(name, torch.Size()) for name in _RESAMPLED[::-1])
        for name, shape in self._shapes().items():
            if len(shape) == 4 and shape[:2] == kernel[:2] and shape != kernel:
                found["patch_embed.proj.weight"] = shape
            called_so = name.rsplit(".", 1)[-1].startswith("pos") and len(shape) in (2, 3)
            if called_so and positions and shape[-1] == positions[-1] and shape[-2] != positions[-2]:
                found["pos_embed"] = shape
        return found

    def _other_patches(self, path: Path) -> str:
        theirs, ours = (tuple(shapes["patch_embed.proj.weight"][2:]) for shapes in (self.adapted, self._wanted))
        same = f"--model-kwargs patch_size={theirs[0]}" if theirs[0] == theirs[1] else "a --model of that patch size"
        return (
            f"initial checkpoint {path} does not fit the model: it is of patches of {theirs[0]} x {theirs[1]} pixels, "
            f"and the model's are {ours[0]} x {ours[1]}; give {same}, or have its kernels resampled by "
            "--resample-patch-embed"
        )

    @property
    def in_words(self) -> str:
        """What was taken, adapted, drawn and ignored, for people."""
        num_taken = len(self._wanted) - len(self.newly_initialised) - len(self.adapted)
        how = "under names that timm translates" if self._foreign else "as they are"
        parts = [f"{num_taken} of {len(self._wanted)} tensors taken {how}"]
        adapted = [f"{name} {tuple(s)} in the file to {tuple(self._wanted[name])}" for name, s in self.adapted.items()]
        ignored = [f"{name} {tuple(shape)}" for name, shape in sorted(self.ignored.items())]
        parts += [f"resampled: {', '.join(adapted)}"] if adapted else []
        parts += [f"newly initialised: {enumerate_some(self.newly_initialised)}"] if self.newly_initialised else []
        parts += [f"ignored: {enumerate_some(ignored)}"] if ignored else []
        return "; ".join(parts)

    def _translate(self, path: Path, model: TimmViT, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The named tensors as timm's filter gives them: resampled, and under timm's names."""
        tensors = {name: self._tensors[name] for name in names if name in self._tensors}
        try:
            translated = _filter_function(model)(tensors, model)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"initial checkpoint {path} does not fit {model.pretrained_cfg['architecture']}: timm cannot translate "
                f"it ({type(error).__name__}: {first_line(error)})"
            ) from error
        _check_tensors(path, translated)
        kept = {tensor.untyped_storage().data_ptr() for tensor in translated.values()}
        held = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        self._used = {name for name, tensor in held.items() if tensor.untyped_storage().data_ptr() in kept}
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
