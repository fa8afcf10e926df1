"""The files of DINOv2 and DINOv3 (facebookresearch/dinov2, facebookresearch/dinov3): backbones and projection heads.

timm's filters translate a published backbone (`_convert_dinov2` in models/vision_transformer.py, `checkpoint_filter_fn`
in models/eva.py). They drop the mask token, which self-distillation trains, and know no training checkpoint.

| there | here |
|---|---|
| `mask_token` [1, D] | `mask_token` [1, 1, D] |
| `blocks.C.N.…`, of blocks wrapped C at a time | `blocks.N.…` |
| `norm` next to `cls_norm` | `patch_norm`, and `cls_norm` as `norm` |
| `dino_head.mlp.{0,2,4}` | the same |
| `dino_head.last_layer.weight` (DINOv3), `.weight_v` or `.parametrizations.weight.original1` (DINOv2) | `.weight` |
| `dino_head.last_layer.weight_g` or `.parametrizations.weight.original0` | none: prototypes have no lengths |
| `ibot_head` | none: one head serves class tokens and patches |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_vit.config.flag import spelling
from ds_vit.models.zoo import names_and_shapes
from ds_vit.tasks.dino.towers import HEAD, LOCAL_NORM, PATCH_NORM, ProjectionHead
from ds_vit.tasks.foreign_names import ForeignNames, Shapes

_LAST_LAYER = {
    "last_layer.weight_v": "last_layer.weight",
    "last_layer.parametrizations.weight.original1": "last_layer.weight",
    "last_layer.parametrizations.weight.original0": "last_layer.weight_g",
}


def _from_backbone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """As `ForeignNames.translate`: what timm's filters leave to do."""
    mask = tensors.get("mask_token")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return None
    renamed = {"norm": "patch_norm", "cls_norm": "norm"} if "cls_norm.weight" in tensors else {}

    def named(name: str) -> str:
        begin, _, end = name.partition(".")
        return f"{renamed[begin]}.{end}" if begin in renamed else re.sub(r"^blocks\.\d+\.(?=\d+\.)", "blocks.", name)

    # timm knows DINOv3 by its registers, which the configs of its code leave out by default.
    is_bare = "rope_embed.periods" in tensors and "storage_tokens" not in tensors
    registers = {"storage_tokens": mask.new_empty(1, 0, mask.shape[1])} if is_bare else {}
    return {named(name): tensor for name, tensor in tensors.items()} | {"mask_token": mask[None]} | registers


def _from_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """As `ForeignNames.translate`: the names of a head's tower; None for a file without a head."""
    begin = f"{HEAD}." if any(name.startswith(f"{HEAD}.") for name in tensors) else ""
    parts = (f"{begin}mlp.", f"{begin}last_layer.", "ibot_head.")  # the last is reported as ignored
    found = {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(parts)}
    return {_LAST_LAYER.get(name, name): tensor for name, tensor in found.items()} or None


def _head_remark(tensors: Mapping[str, torch.Tensor]) -> str:
    """As `ForeignNames.remark`: a second head, and lengths of prototypes, which multiply the logits there."""
    remarks = []
    if any(name.startswith("ibot_head.") for name in tensors):
        remarks.append("its ibot_head is not used: one head serves class tokens and patches")
    lengths = tensors.get("last_layer.weight_g")
    if lengths is None:
        lengths = torch.linalg.vector_norm(tensors["last_layer.weight"].float(), dim=1)
    low, high = float(lengths.min()), float(lengths.max())
    if not 0.999 < low <= high < 1.001:
        remarks.append(f"its prototypes have lengths of {low:.3g} to {high:.3g}, which count as 1")
    return "; ".join(remarks)


def _head_differences(model: nn.Module, shapes: Shapes, _: Callable[[str], dict[str, Any]]) -> Iterator[str]:
    """As `ForeignNames.differences`: another number of layers, or of numbers that flags set."""
    if not isinstance(model, ProjectionHead):
        return
    first, last = shapes.get("mlp.0.weight"), shapes.get("last_layer.weight")
    if first is None or last is None:
        yield f"it has no {HEAD}"
        return
    if more := sorted(name for name in shapes if name.startswith("mlp.") and name not in names_and_shapes(model)):
        yield f"its head has other layers ({', '.join(more)})"
    for flag, theirs in (("prototypes", last[0]), ("head_hidden_dim", first[0]), ("head_bottleneck_dim", last[1])):
        if theirs != (ours := getattr(model.config, flag)):
            yield f"its head has {spelling(flag)} {theirs}, and the model {ours}; give {spelling(flag)} {theirs}"


def _backbone_remark(tensors: Mapping[str, torch.Tensor]) -> str:
    """As `ForeignNames.remark`: norms that begin as another (`SelfDistillation.fit_tensors`)."""
    norms = (norm for norm in (PATCH_NORM, LOCAL_NORM) if f"{norm}.weight" in tensors)
    copies = [norm for norm in norms if torch.equal(tensors[f"{norm}.weight"], tensors["norm.weight"])]
    return f"{' and '.join(copies)} begin as norm" if copies else ""


BACKBONE_NAMES = ForeignNames(
    r"patch_embed\.proj\.weight$", _from_backbone, lambda *_: iter(()), remark=_backbone_remark
)
HEAD_NAMES = ForeignNames(
    rf"(?:{HEAD}\.|(?<!ibot_head\.))mlp\.0\.weight$", _from_head, _head_differences, tower=HEAD, remark=_head_remark
)
