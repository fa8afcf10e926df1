"""The export of a segmenter: its backbone as a folder of timm's, and its head beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from timm.layers import LayerNorm2d
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import create_model
from ds_vit.tasks.exports import TRANSFORMERS, Exported, Format, Predict, Save, Tool, write_timm_config
from ds_vit.tasks.segmentation.towers import HEAD


def _write(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write the backbone as config.json and model.safetensors, the head as head.json and head.safetensors.

    head.json has "kind" (of --seg-head), "grid" (rows and columns of patches), "classes" (their names in the order of
    the logits, if they are known) and "img_size" (height and width of the images).
    """
    state = exported.model.state_dict()
    head = {name.removeprefix(HEAD): state.pop(name) for name in [*state] if name.startswith(HEAD)}
    spec = replace(exported.spec, num_classes=0)
    backbone = create_model(spec, for_training=False, classifier=False, device="cpu")
    backbone.load_state_dict(state)
    save(folder, state, max_bytes=2**62)
    write_timm_config(replace(exported, model=backbone.eval(), labels=()), folder / "config.json")
    save(folder, head, max_bytes=2**62, name="head")
    about = {
        "kind": "linear" if len(head) == 2 else "conv",
        "grid": list(backbone.patch_embed.grid_size),
        "classes": list(exported.labels),
        "img_size": list(exported.image.img_size),
    }
    (folder / "head.json").write_text(json.dumps(about, indent=2) + "\n")
    return ("head.safetensors takes the normed patch tokens of timm's forward_features; head.json describes it",)


def _load(folder: Path) -> Predict:
    """The segmenter of the files, by timm and torch: images [B, 3, H, W] → logits [B, C, g, g']."""
    backbone = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    about, state = json.loads((folder / "head.json").read_text()), load_file(folder / "head.safetensors")
    rows, columns = about["grid"]
    width = backbone.num_features
    head: nn.Module
    if about["kind"] == "linear":
        head = nn.Linear(width, len(state["bias"]))
    else:
        inner = state["0.bias"].shape[0]
        head = nn.Sequential(
            nn.ConvTranspose2d(width, inner, 2, 2),
            LayerNorm2d(inner),
            nn.GELU(),
            nn.ConvTranspose2d(inner, inner, 2, 2),
            LayerNorm2d(inner),
            nn.GELU(),
            nn.Conv2d(inner, len(state["6.bias"]), 1),
        )
    head.load_state_dict(state)

    def predict(images: torch.Tensor) -> torch.Tensor:
        tokens = backbone.fc_norm(backbone.forward_features(images)[:, backbone.num_prefix_tokens :])
        if about["kind"] == "linear":
            return head(tokens).transpose(1, 2).unflatten(2, (rows, columns))
        return head(tokens.transpose(1, 2).unflatten(2, (rows, columns)))

    return predict


def _refuse(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    raise UserError(
        "transformers has no class for a ViT with this head: --to timm writes the backbone and the head, --to onnx "
        "both as one"
    )


FORMATS = {
    "timm": Format(Tool("timm", loaded_with="timm.create_model('local-dir:{}', pretrained=True)"), _write, _load),
    "hf": Format(TRANSFORMERS, _refuse, _load),
}
