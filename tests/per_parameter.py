"""timm's own optimizers, layer decay and moving average in a plain loop of one process, to compare layouts with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import timm
import torch
import torchvision
from safetensors.torch import load_file
from timm.optim import Lamb, Lars, muon, param_groups_layer_decay, param_groups_weight_decay
from timm.optim.muon import zeropower_via_newtonschulz
from timm.utils import ModelEmaV3

# 6 blocks and 4 heads: cut by 2 and 4 stages and by 2 ranks.
KWARGS = {"patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 4}
DECAY, CLIP, STEPS, EMA_DECAY, LAYER_DECAY = 0.05, 0.1, 10, 0.8, 0.7
# eps 1e-6: with a smaller one Adam scales the rounding of gradients that are zero up to the learning rate.
BLOCKS: dict[str, dict[str, Any]] = {
    "lamb": {"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-6, "weight_decay": DECAY}},
    "lars": {"type": "Lars", "params": {"lr": 1.0, "trust_coeff": 0.02, "momentum": 0.9, "weight_decay": DECAY}},
    "muon": {"type": "Muon", "params": {"lr": 0.02, "eps": 1e-6, "weight_decay": DECAY}},
    "sgd": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": DECAY}},
    "layer decay": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-6, "weight_decay": DECAY}},
}
WORDS: dict[str, list[Any]] = {kind: [] for kind in BLOCKS} | {"layer decay": ["--layer-decay", LAYER_DECAY]}


def timm_optimizer(
    kind: str, model: torch.nn.Module, layer_decay: float | None = None, **changes: Any
) -> torch.optim.Optimizer:
    """What timm's train.py would make of it."""
    params = {**BLOCKS[kind]["params"], **changes}
    params.pop("weight_decay")
    no_decay = model.no_weight_decay()
    fallback = {"fallback_list": params.pop("fallback_list", ())}
    if kind == "layer decay" or layer_decay:
        groups = param_groups_layer_decay(model, DECAY, no_decay, layer_decay=layer_decay or LAYER_DECAY, **fallback)
        for group in groups:
            group["lr"] = params["lr"] * group["lr_scale"]
    else:
        groups = param_groups_weight_decay(model, DECAY, no_weight_decay_list=no_decay, **fallback)
    if BLOCKS[kind]["type"] == "Lamb":
        return Lamb(groups, max_grad_norm=None, **params)
    if BLOCKS[kind]["type"] == "Muon":
        dtype = getattr(torch, params.pop("ns_dtype", "float32"))  # timm's has no such argument
        muon.zeropower_via_newtonschulz = partial(zeropower_via_newtonschulz, dtype=dtype)
        return muon.Muon(groups, **params)
    return {"Lars": Lars, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[BLOCKS[kind]["type"]](groups, **params)


def train_plainly(
    folder: Path,
    kind: str,
    make: Callable[..., torch.optim.Optimizer] = timm_optimizer,
    model_kwargs: dict[str, Any] = KWARGS,
    **changes: Any,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Rows as in metrics.jsonl, the final weights, and timm's ModelEmaV3 of them; all images are one batch."""
    pixels = torchvision.transforms.Compose(
        [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize([0.5] * 3, [0.5] * 3)]
    )
    data = torchvision.datasets.ImageFolder(str(folder / "train"), pixels)
    images = torch.stack([image for image, _ in data])
    labels = torch.tensor([label for _, label in data])
    model = timm.create_model(oracle.MODEL, num_classes=10, img_size=oracle.IMG_SIZE, **model_kwargs)
    model.load_state_dict(load_file(str(folder / "weights.safetensors")))
    optimizer = make(kind, model, **changes)
    ema = ModelEmaV3(model, decay=EMA_DECAY)
    rows = []
    for step in range(1, STEPS + 1):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        ema.update(model, step=step)
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return rows, model.state_dict(), ema.module.state_dict()
