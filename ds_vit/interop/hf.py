"""A Hugging Face `ViTForImageClassification` folder for a plain ViT or DeiT of timm's.

Plain: class token, learned positions, pre-norm blocks with one fused qkv and a GELU MLP, classified by the class token.
Anything else would be another function under the same names, so it is refused with what stands in the way.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from timm.layers import Attention, Mlp, PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ds_vit.checkpoint import save_weights
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.interop.check import Predict
from ds_vit.interop.source import Exported
from ds_vit.models import TimmViT
from ds_vit.models.hf_names import ACTIVATIONS, hf_names
from ds_vit.models.weight_files import names_as_metadata

_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}  # Pillow's numbers


def reader() -> str:
    """Which tool loads it back."""
    import transformers

    return f"transformers {transformers.__version__}"


def obstacles(model: TimmViT) -> list[str]:
    """What of a model `ViTForImageClassification` has no counterpart of; empty where it has all."""
    found: list[str] = []
    if type(model) is not VisionTransformer:
        return [f"timm's class {type(model).__name__}"]
    blocks = list(model.blocks)
    kinds = [
        (type(model.patch_embed), PatchEmbed, "patch embedding"),
        (type(blocks[0]), Block, "block"),
        (type(getattr(blocks[0], "attn", None)), Attention, "attention"),
        (type(getattr(blocks[0], "mlp", None)), Mlp, "MLP"),
    ]
    found += [f"the {what} {kind.__name__}" for kind, wanted, what in kinds if kind is not wanted]
    found += sorted({_pattern(name) for name in model.state_dict() if not _has_counterpart(name)})
    if model.cls_token is None:
        found.append("no class token")
    if model.pos_embed is None:
        found.append("no learned positions")
    if model.global_pool != "token":
        found.append(f"global_pool {model.global_pool!r}")
    norms = [module for name, module in model.named_modules() if name == "norm" or re.search(r"\.norm[12]$", name)]
    if not all(isinstance(norm, nn.LayerNorm) for norm in norms) or len({norm.eps for norm in norms}) != 1:
        found.append("norms that are not LayerNorm of one eps: " + ", ".join(sorted({type(n).__name__ for n in norms})))
    if not found:
        act = type(blocks[0].mlp.act).__name__
        found += [] if act in ACTIVATIONS.values() else [f"the activation {act}"]
        biases = ("patch_embed.proj", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")
        found += [f"no {name}.bias" for name in biases if model.get_submodule(name).bias is None]
    return found


def _has_counterpart(name: str) -> bool:
    try:
        hf_names(name)
    except KeyError:
        return False
    return True


def _pattern(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


def refuse(exported: Exported) -> None:
    """Refuse what the class cannot be, before anything is written.

    Raises:
        UserError: says what stands in the way.
    """
    if not exported.model.num_classes:
        raise UserError(
            f"{exported.found.path} has no classifier, and ViTForImageClassification is one; --to timm and --to onnx "
            "write the encoder alone, and fine-tuning gives it a classifier (--initial-checkpoint)"
        )
    found = obstacles(exported.model)
    if found:
        raise UserError(
            f"Hugging Face's ViTForImageClassification has no counterpart of {'; '.join(found)}: this model cannot be "
            "exported to hf; --to timm and --to onnx can"
        )
    height, width = exported.img_size
    if height != width:
        raise UserError(f"images of {height} x {width} pixels: Hugging Face's image processors make square ones only")
    if exported.pixels["crop_mode"] == "border":
        raise UserError("--crop-mode border: Hugging Face's image processors have no counterpart; use --to timm")


def write(exported: Exported, folder: Path) -> None:
    """Write config.json, model.safetensors (sharded above 5 GB) and preprocessor_config.json."""
    from transformers import ViTConfig

    model = exported.model
    names = exported.labels or tuple(f"LABEL_{number}" for number in range(model.num_classes))
    patch = model.patch_embed.patch_size
    act = type(model.blocks[0].mlp.act).__name__
    config = ViTConfig(
        architectures=["ViTForImageClassification"],
        hidden_size=model.embed_dim,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        intermediate_size=model.blocks[0].mlp.fc1.out_features,
        hidden_act=next(name for name, cls in ACTIVATIONS.items() if cls == act),
        layer_norm_eps=model.norm.eps,
        image_size=exported.img_size[0],
        patch_size=patch[0] if patch[0] == patch[1] else list(patch),
        num_channels=3,
        qkv_bias=model.blocks[0].attn.qkv.bias is not None,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    config.save_pretrained(str(folder))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        pieces = hf_names(name)
        for piece, part in zip(pieces, tensor.chunk(len(pieces)), strict=True):
            state[piece] = part
    positions = state["vit.embeddings.position_embeddings"]
    if model.no_embed_class:  # positions of the patches alone: the class token's is zero
        zero = positions.new_zeros(1, 1, positions.shape[2])
        state["vit.embeddings.position_embeddings"] = torch.cat([zero, positions], dim=1)
    save_weights(folder, state, metadata=names_as_metadata(exported.labels))
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(exported), indent=2) + "\n")


def _processor(exported: Exported) -> dict[str, Any]:
    """timm's evaluation transform as the settings of an image processor: resize, centre crop, normalise."""
    pixels, side = exported.pixels, exported.img_size[0]
    resized = math.floor(side / pixels["crop_pct"])
    squash = pixels["crop_mode"] == "squash"
    return {
        "image_processor_type": "CLIPImageProcessor",  # the one that resizes by the shorter edge and crops
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": resized, "width": resized} if squash else {"shortest_edge": resized},
        "resample": _RESAMPLE[pixels["interpolation"]],
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(pixels["mean"]),
        "image_std": list(pixels["std"]),
    }


def load(folder: Path) -> Predict:
    """The folder as transformers loads it; a tensor that is missing or left over is an error, not a warning."""
    from transformers import ViTForImageClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, info = ViTForImageClassification.from_pretrained(str(folder), output_loading_info=True)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    assert not wrong, wrong
    model.eval()
    return lambda images: model(pixel_values=images).logits
