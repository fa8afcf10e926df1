"""Small versions of timm's ViTs for tests: any name at depth 2, with weights that let no error hide."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import Layer, take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec, create_model, supported_names

# One name for each kind of thing that a block, an embedding or a head can be made of.
KINDS = {
    "class token": "vit_tiny_patch16_224",
    "registers and layer scale": "vit_small_patch14_reg4_dinov2",
    "packed SwiGLU": "vit_giant_patch14_dinov2",
    "average pool": "vit_base_patch16_gap_224",
    "attention pool": "vit_base_patch16_siglip_224",
    "pre-norm and CLIP": "vit_base_patch16_clip_224",
    "RMS norm, SwiGLU, no bias": "aimv2_large_patch14_224",
    "parallel scaling": "vit_base_patch16_xp_224",
    "two parallel branches": "vit_small_patch16_18x2_224",
    "residual post-norm": "vit_base_patch16_rpn_224",
    "convolutional stem": "vit_tiny_r_s16_p8_224",
    "Eva with rotary tables": "eva02_tiny_patch14_224",
    "Eva with norms over features": "eva02_base_patch14_224",
    "Eva with q and v biases": "eva_giant_patch14_224",
    "Eva with attention pool": "vit_pe_core_base_patch16_224",
    "learned rotary frequencies": "vit_small_patch16_rope_mixed_ape_224",
    "DINOv3": "vit_small_patch16_dinov3_qkvb",
}


def small_kwargs(name: str) -> dict[str, Any]:
    """Constructor arguments that make a timm model small: depth 2 and, where the stem allows it, width 96."""
    kwargs: dict[str, Any] = {"depth": 2}
    if not name.startswith(("vitamin", "vit_base_mci")):  # their stems fix the width
        kwargs |= {"embed_dim": 96, "num_heads": 3}
    if "sapiens2" in name:  # its table of key-value heads has an entry for each block
        kwargs["num_kv_heads"] = 3
    return kwargs


def small_spec(name: str, drop_path_rate: float | None = None, img_size: int | None = None, **kwargs: Any) -> ModelSpec:
    """The spec of a small model with 10 classes."""
    return ModelSpec(
        name, num_classes=10, img_size=img_size, drop_path_rate=drop_path_rate, model_kwargs=small_kwargs(name) | kwargs
    )


def small_image_size(name: str) -> int:
    """Four patches a side: what a name has of its own is in its blocks, and attention is quadratic in this number."""
    size = re.search(r"_patch(\d+)_", name)
    return 4 * int(size[1]) if size else 64


def shake(model: nn.Module, seed: int = 0) -> None:
    """Move every parameter: at timm's initial values many a branch gives zero, and a zero hides whatever is wrong."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def timm_model(spec: ModelSpec, *, shaken: bool = True) -> nn.Module:
    """The same model as timm alone builds it, on the CPU, by default moved away from its initial values."""
    torch.manual_seed(0)
    extra = {} if spec.img_size is None else {"img_size": spec.img_size}
    extra |= {} if spec.drop_path_rate is None else {"drop_path_rate": spec.drop_path_rate}
    model = timm.create_model(spec.name, num_classes=spec.num_classes, **extra, **spec.model_kwargs)
    if shaken:
        shake(model)
    return model


def write_teacher(folder: Path, num_classes: int = 10, **kwargs: Any) -> nn.Module:
    """A random ViT in timm's own form, for --kd-model-name local-dir:FOLDER; returns it."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **kwargs)
    save_for_hf(model, folder, safe_serialization=True, model_args=kwargs)
    return model


def timm_state_dict(module: nn.Module, keep_vars: bool = False) -> dict[str, torch.Tensor]:
    """What the layers in a module hold of timm's state dict, under timm's names; the tensors are their own."""
    layers = (child for child in module.modules() if isinstance(child, Layer))
    return {name: tensor for layer in layers for name, tensor in layer.state_dict(keep_vars=keep_vars).items()}


def load_timm_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy values under timm's names into whatever part of the model the module holds."""
    for layer in (child for child in module.modules() if isinstance(child, Layer)):
        layer.load_state_dict({name: state[name] for name in layer.state_dict()})


def our_model(
    spec: ModelSpec, weights_of: nn.Module | None = None, for_training: bool = True, **kwargs: Any
) -> SequentialViT:
    """The same model as this package builds it, with the weights of a timm model where one is given."""
    description = create_model(spec, for_training=for_training)
    layers = take_apart(description)
    initialise(description, layers, seed=0, device="cpu")
    model = SequentialViT(layers, **kwargs)
    if weights_of is not None:
        load_timm_state_dict(model, weights_of.state_dict())
    return model


def what_it_computes(model: nn.Module) -> tuple[Any, ...]:
    """All that a model's forward depends on beside the values of its weights: two models with equal ones are the same.

    Every sub-module's class, its plain attributes, and the shapes of its parameters and buffers.
    """
    plain = (bool, int, float, str, tuple, list, type(None))
    parts: list[Any] = []
    for name, module in model.named_modules():
        own = {key: repr(value) for key, value in vars(module).items() if isinstance(value, plain)}
        shapes = [(n, tuple(t.shape)) for n, t in [*module.named_parameters(), *module.named_buffers()] if "." not in n]
        parts.append((name, type(module).__qualname__, tuple(sorted(own.items())), tuple(shapes)))
    return tuple(parts)


@functools.cache
def different_names() -> tuple[str, ...]:
    """A name of each model that differs from the others when it is small: many differ in depth, width or weights only.

    Four patches a side; grouped queries and random rotary coordinates as `small_kwargs` and the tests set them.
    """
    by_model: dict[object, str] = {}
    for name in supported_names():
        model = create_model(small_spec(name, img_size=small_image_size(name)), for_training=False)
        by_model.setdefault(what_it_computes(model), name)
    assert len(by_model) > 80
    return tuple(by_model.values())


def images(spec: ModelSpec, count: int = 2) -> torch.Tensor:
    """Random images of the size that the model takes, [count, 3, height, width]."""
    size = spec.img_size or create_model(spec, for_training=False).patch_embed.img_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))
