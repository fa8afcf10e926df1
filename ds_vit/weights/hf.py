"""Folders of transformers: the config of a tower, its image processor, and which towers a class represents."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Resampling
from timm.data import DEFAULT_CROP_PCT
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ds_vit.data.settings import ImageConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import TimmViT
from ds_vit.weights.foreign_names import ACTIVATIONS, Rule, general
from ds_vit.weights.source import Exported


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Other libraries log and warn of steps that succeed."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def unknown_modules(block: nn.Module) -> list[str]:
    """The parts of a timm block that Hugging Face's blocks have no counterpart of; empty where they have all."""
    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    kinds = (("block", block, Block), ("attention", attn, Attention), ("MLP", mlp, Mlp))
    act = type(getattr(mlp, "act", None)).__name__
    return [
        *(f"the {part} {type(module).__name__}" for part, module, kind in kinds if type(module) is not kind),
        *([f"the activation {act}"] if act not in ACTIVATIONS.values() else []),
    ]


def obstacles(model: TimmViT, pool: str, rules: Sequence[Rule], optional: Sequence[str] = ()) -> Iterator[str]:
    """The parts of a model that another tool's class has no counterpart of.

    Args:
        model: timm's, or one of two towers.
        pool: how the class pools the image's tokens.
        rules: the names that it has.
        optional: names that it may have.
    """
    kind = next((one for one in type(model).__mro__ if one.__module__.startswith("timm.")), type(model))
    if kind is not VisionTransformer:
        yield f"timm's class {kind.__name__}"
        return
    yield from unknown_modules(model.blocks[0])
    if model.global_pool != pool:
        yield f"global_pool {model.global_pool!r}"
    norms = (m for name, m in model.named_modules() if isinstance(m, nn.LayerNorm) and not name.startswith("text."))
    if len(eps := sorted({norm.eps for norm in norms})) > 1:
        yield f"norms of the image tower with eps {' and '.join(map(str, eps))}"
    names = {general(name) for name in model.state_dict()} - {*optional}
    known = {name for rule in rules for name in rule.ours} - {*optional}

    def parts(of: set[str]) -> list[str]:  # one name for all tensors of a layer outside the blocks
        layers = (re.match(r"(text\.)?[^.]+", name) for name in of)
        return sorted({name if "blocks" in name else layer[0] for name, layer in zip(of, layers, strict=True) if layer})

    yield from parts(names - known)
    for part in parts(known - names):
        yield f"no {part}" + (" (timm's vit_…_clip_… have that norm)" if part == "norm_pre" else "")


def refuse_images(image: ImageConfig) -> None:
    """Reject images that Hugging Face's processors do not prepare; UserError with the reason."""
    height, width = image.img_size
    if height != width:
        raise UserError(f"images of {height} x {width} pixels: Hugging Face's image processors make square ones only")
    if image.crop_mode == "border":
        raise UserError("--crop-mode border: Hugging Face's image processors have no counterpart; use --to timm")


def with_all_positions(model: TimmViT) -> dict[str, torch.Tensor]:
    """The model's state, with a position of zeros for a class token that has none."""
    state = model.state_dict()
    if model.cls_token is not None and model.no_embed_class:
        state["pos_embed"] = nn.functional.pad(state["pos_embed"], (0, 0, 1, 0))
    return state


def activation(module: nn.Module) -> str:
    """transformers' name of the activation of a tower's blocks."""
    act = type(module.blocks[0].mlp.act).__name__
    return next(name for name, cls in ACTIVATIONS.items() if cls == act)


def tower_config(module: nn.Module, width: int) -> dict[str, Any]:
    """transformers' config of the blocks of a tower."""
    block = module.blocks[0]
    return {
        "hidden_size": width,
        "intermediate_size": block.mlp.fc1.out_features,
        "num_hidden_layers": len(module.blocks),
        "num_attention_heads": block.attn.num_heads,
        "hidden_act": activation(module),
        "layer_norm_eps": module.norm.eps,
    }


def write_processor(exported: Exported, folder: Path) -> None:
    """timm's evaluation transform as an image processor: resize by the shorter edge, centre crop, normalise."""
    from transformers import CLIPImageProcessor

    image, side = exported.image, exported.image.img_size[0]
    resized = math.floor(side / (image.crop_pct or DEFAULT_CROP_PCT))
    squash = image.crop_mode == "squash"
    CLIPImageProcessor(
        size={"height": resized, "width": resized} if squash else {"shortest_edge": resized},
        resample=Resampling[image.interpolation.upper()],
        crop_size={"height": side, "width": side},
        image_mean=list(image.mean),
        image_std=list(image.std),
    ).save_pretrained(str(folder))


def read(folder: Path, kind: str) -> Any:
    """The model in a folder as a class of transformers loads it; a tensor missing or left over is an error."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, kind).from_pretrained(str(folder), output_loading_info=True)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    assert not wrong, wrong
    return model.eval()
