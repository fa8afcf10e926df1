"""Folders of transformers: the config of a tower, its image processor and tokenizer, the towers of a class."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Resampling
from timm.data import DEFAULT_CROP_PCT
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ds_vit.data.settings import ImageConfig
from ds_vit.data.text import ClipTokenizer, FileTokenizer, Tokenizer, build_tokenizer
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import TimmViT
from ds_vit.tasks.clip.tower import TextSettings
from ds_vit.tasks.exports import Exported
from ds_vit.tasks.foreign_names import ACTIVATIONS, Rule, general


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
    block = model.blocks[0]
    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    for part, module, known_kind in (("block", block, Block), ("attention", attn, Attention), ("MLP", mlp, Mlp)):
        if type(module) is not known_kind:
            yield f"the {part} {type(module).__name__}"
    if (act := type(getattr(mlp, "act", None)).__name__) not in ACTIVATIONS.values():
        yield f"the activation {act}"
    if model.global_pool != pool:
        yield f"global_pool {model.global_pool!r}"
    norms = (m for name, m in model.named_modules() if isinstance(m, nn.LayerNorm) and not name.startswith("text."))
    if len(eps := sorted({norm.eps for norm in norms})) > 1:
        yield f"norms of the image tower with eps {' and '.join(map(str, eps))}"
    names = {general(name) for name in model.state_dict()} - {*optional}
    known = {name for rule in rules for name in rule.ours} - {*optional}

    def parts(of: set[str]) -> list[str]:  # one name for all tensors of a layer outside the blocks
        return sorted({name if "blocks" in name else re.sub(r"((text\.)?[^.]+).*", r"\1", name) for name in of})

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


# ---- the tokenizer of a text tower, checked against the run's ids ----------------------------------------------------


_SAMPLES = ("", "a photo of a cat", "Wow! 3 dogs  (naïve Ünï) ...", "latin small letter a with acute, " * 40)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def write_tokenizer(name: str, settings: TextSettings, folder: Path) -> str:
    """Write tokenizer.json and tokenizer_config.json, which `AutoTokenizer.from_pretrained` loads.

    Args:
        name: --tokenizer of the run.
        settings: of the text tower.
        folder: of the export.

    Returns:
        Why there is no tokenizer in the folder, a line for people; "" if there is one.
    """
    tokenizer = build_tokenizer(name, settings.context_length)
    reason = ""
    if isinstance(tokenizer, ClipTokenizer) and settings.reads_padding:
        reason = "this text tower sees the padding of --tokenizer clip, id 0, which transformers reads as '!'"
    elif isinstance(tokenizer, ClipTokenizer):
        from transformers import CLIPTokenizer

        own = CLIPTokenizer(*tokenizer.vocabulary(), model_max_length=settings.context_length)
        own.save_pretrained(str(folder))
    elif isinstance(tokenizer, FileTokenizer):
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"bos": tokenizer.start_id, "eos": tokenizer.end_id, "pad": tokenizer.pad_id}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": settings.context_length,
            **{f"{key}_token": tokenizer.token_of(id_) for key, id_ in special.items() if id_ is not None},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    else:
        reason = f"transformers has no counterpart of --tokenizer {name}, whose ids this text tower takes"
    if reason := reason or _difference(tokenizer, settings, folder):
        for file in _TOKENIZER_FILES:
            (folder / file).unlink(missing_ok=True)
        return f"the folder has no tokenizer: {reason}"
    return ""


def _difference(tokenizer: Tokenizer, settings: TextSettings, folder: Path) -> str:
    """The first difference between the ids of the folder's tokenizer and the run's; "" if there is none."""
    from transformers import AutoTokenizer

    written = AutoTokenizer.from_pretrained(str(folder))

    def seen(ids: NDArray[np.int64]) -> list[int]:
        end = len(ids) if settings.reads_padding else int((ids == settings.end_id).argmax()) + 1
        return [int(one) for one in ids[:end]]

    for text in _SAMPLES:
        theirs = np.array(written(text, padding="max_length", truncation=True)["input_ids"])
        ids = seen(tokenizer.encode(text))
        if seen(theirs) != ids:
            return f"transformers reads {text[:40]!r} as {seen(theirs)[:8]}, and the run as {ids[:8]}"
    return ""
