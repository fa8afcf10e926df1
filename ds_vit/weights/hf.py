"""A Hugging Face `ViTForImageClassification` folder for a plain ViT or DeiT of timm's.

Plain: class token, learned positions, pre-norm blocks with one fused qkv and a GELU MLP, classified by the class token.
Any other model would compute something else under the same names, and is rejected with the reason.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from PIL.Image import Resampling
from timm.data import DEFAULT_CROP_PCT
from timm.layers import Attention, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ds_vit.checkpoint.tensors import save_weights
from ds_vit.data import ImageConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import TimmViT
from ds_vit.weights.files import names_as_metadata
from ds_vit.weights.hf_names import ACTIVATIONS, has_counterpart, hf_names, needed_names
from ds_vit.weights.source import Exported, Predict


def unknown_modules(block: nn.Module) -> list[str]:
    """The parts of a timm block that Hugging Face's blocks have no counterpart of; empty where they have all."""
    attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    kinds = (("block", block, Block), ("attention", attn, Attention), ("MLP", mlp, Mlp))
    act = type(getattr(mlp, "act", None)).__name__
    return [
        *(f"the {part} {type(module).__name__}" for part, module, kind in kinds if type(module) is not kind),
        *([f"the activation {act}"] if act not in ACTIVATIONS.values() else []),
    ]


def obstacles(model: TimmViT) -> list[str]:
    """The parts of a model that `ViTForImageClassification` has no counterpart of; empty where it has all."""
    if type(model) is not VisionTransformer:
        return [f"timm's class {type(model).__name__}"]
    names = {re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name in model.state_dict()}
    return [
        *unknown_modules(model.blocks[0]),
        *sorted(name for name in names if not has_counterpart(name)),
        *sorted(f"no {name}" for name in needed_names() - names),
        *([f"global_pool {model.global_pool!r}"] if model.global_pool != "token" else []),
    ]


def _refuse(exported: Exported) -> None:
    """Reject what the class cannot represent; UserError with the reason."""
    if not exported.model.num_classes:
        raise UserError(
            f"{exported.weights.path} has no classifier, and ViTForImageClassification is one; --to timm and --to onnx "
            "write only the encoder, and fine-tuning gives it a classifier (--initial-checkpoint)"
        )
    missing = obstacles(exported.model)
    if missing:
        raise UserError(
            f"Hugging Face's ViTForImageClassification has no counterpart of {'; '.join(missing)}: this model cannot "
            "be exported to hf; --to timm and --to onnx can"
        )
    refuse_images(exported.image)


def refuse_images(image: ImageConfig) -> None:
    """Reject images that Hugging Face's processors do not prepare; UserError with the reason."""
    height, width = image.img_size
    if height != width:
        raise UserError(f"images of {height} x {width} pixels: Hugging Face's image processors make square ones only")
    if image.crop_mode == "border":
        raise UserError("--crop-mode border: Hugging Face's image processors have no counterpart; use --to timm")


def write(exported: Exported, folder: Path) -> None:
    """Write config.json, model.safetensors (sharded above 5 GB) and preprocessor_config.json.

    Raises:
        UserError: the class cannot represent the model or its images; nothing is written.
    """
    from transformers import ViTConfig

    _refuse(exported)
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
        image_size=exported.image.img_size[0],
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
        state |= zip(pieces, tensor.chunk(len(pieces)), strict=True)
    if model.no_embed_class:  # positions of the patches only: the class token's is zero
        name = "vit.embeddings.position_embeddings"
        state[name] = nn.functional.pad(state[name], (0, 0, 1, 0))
    save_weights(folder, state, metadata=names_as_metadata(exported.labels))
    write_processor(exported, folder)


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
