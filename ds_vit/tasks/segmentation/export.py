"""The export of a segmenter: its backbone as a folder of timm's, and its head in a second file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

from ds_vit.models.zoo import create_model
from ds_vit.tasks.exports import Exported, Format, Predict, Save, write_timm_config
from ds_vit.tasks.segmentation.towers import HEAD, grid_of_logits, make_head


def _write(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write the backbone as config.json and model.safetensors, the head as head.json and head.safetensors.

    head.json has "kind" (of --seg-head), "grid" (rows and columns of patches), "num_classes", their names as "classes"
    if they are known, and "img_size" (height and width of the images).
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
        "num_classes": exported.model.num_classes,
        "classes": list(exported.labels),
        "img_size": list(exported.image.img_size),
    }
    (folder / "head.json").write_text(json.dumps(about, indent=2) + "\n")
    return ("head.safetensors takes the normed patch tokens of timm's forward_features; head.json describes it",)


def _load(folder: Path) -> Predict:
    """The segmenter of the files, by timm and torch: images [B, 3, H, W] → logits [B, C, g, g']."""
    backbone = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    about, state = json.loads((folder / "head.json").read_text()), load_file(folder / "head.safetensors")
    head = make_head(about["kind"], backbone.num_features, about["num_classes"])  # of torch's and timm's modules
    head.load_state_dict(state)

    def predict(images: torch.Tensor) -> torch.Tensor:
        tokens = backbone.fc_norm(backbone.forward_features(images)[:, backbone.num_prefix_tokens :])
        return grid_of_logits(head, tokens, about["grid"])

    return predict


FORMATS = {"timm": Format("timm", (), _write, _load, loaded_with="timm.create_model('local-dir:{}', pretrained=True)")}
