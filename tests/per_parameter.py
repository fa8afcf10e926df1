"""timm's own optimizers, layer decay and moving average in a plain loop of one process, and our run of the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import timm
import torch
import torchvision
from project import ROOT
from safetensors.torch import load_file
from timm.optim import Lamb, Lars, muon, param_groups_layer_decay, param_groups_weight_decay
from timm.optim.muon import zeropower_via_newtonschulz
from timm.utils import ModelEmaV3

# 6 blocks and 4 heads: cut by 2 and 4 stages and by 2 ranks.
KWARGS = {"patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 4}
NUM_IMAGES = 32
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


def command(folder, kind, layout, output, params=None, precision=None, words=()):
    """The command line of our run; its JSON is written beside the output."""
    pp, dp, tp, stage = layout
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    block = BLOCKS[kind]
    data["optimizer"] = {"type": block["type"], "params": {**block["params"], **(params or {})}}
    data |= {"gradient_clipping": CLIP, **(precision or {})}
    output.mkdir(parents=True)
    config = output.parent / f"{output.name}.json"
    config.write_text(json.dumps(data))
    micro = NUM_IMAGES // dp // 2
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(KWARGS), "--img-size", oracle.IMG_SIZE]
    argv += ["--no-aug", "--smoothing", 0, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", ""]
    argv += ["--sched", "constant", "--warmup-epochs", 0, "--max-steps", STEPS, "--log-interval", 1]
    argv += ["--workers", 0, "--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors"]
    argv += ["--deepspeed_config", config, "--pp", pp, "--tp", tp, "-b", micro, "--grad-accum-steps", 2]
    argv += ["--output", output, "--model-ema", "--model-ema-decay", EMA_DECAY]
    return [*argv, *WORDS[kind], *words]


def furthest(a, b):
    """The tensor that differs most, relative to its norm."""
    assert a.keys() == b.keys()
    parts = {n: (torch.linalg.norm(a[n] - b[n]) / torch.linalg.norm(b[n]).clamp_min(1e-12)).item() for n in a}
    worst = max(parts, key=parts.get)
    return parts[worst], worst
