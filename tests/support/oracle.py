"""The outside oracle: a plain single-process loop of timm and torch, without DeepSpeed and without any of our code.

`command` is our run of the same: these images, weights and settings.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torchvision
from project import write_config
from safetensors.torch import load_file, save_file
from timm.optim import Lamb, Lars, muon, param_groups_layer_decay, param_groups_weight_decay
from timm.optim.muon import zeropower_via_newtonschulz
from timm.utils import ModelEmaV3

MODEL = "vit_tiny_patch16_224"
KWARGS = {"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
DEEP_KWARGS = {"patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 4}
"""Split by 2 and 4 pipeline stages and by 2 tensor-parallel ranks."""
IMG_SIZE, NUM_IMAGES = 32, 32
LR, SGD_LR, WEIGHT_DECAY, CLIP, STEPS, EMA_DECAY, LAYER_DECAY = 1e-3, 0.5, 0.05, 0.1, 10, 0.8, 0.7
# eps 1e-6: with a smaller one Adam scales the rounding of gradients that are zero up to the learning rate.
BLOCKS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": LR, "eps": 1e-8, "weight_decay": WEIGHT_DECAY}},
    "lamb": {"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-6, "weight_decay": WEIGHT_DECAY}},
    "lars": {"type": "Lars", "params": {"lr": 1.0, "trust_coeff": 0.02, "momentum": 0.9, "weight_decay": WEIGHT_DECAY}},
    "muon": {"type": "Muon", "params": {"lr": 0.02, "eps": 1e-6, "weight_decay": WEIGHT_DECAY}},
    "sgd": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": WEIGHT_DECAY}},
    "layer decay": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-6, "weight_decay": WEIGHT_DECAY}},
}


PLAIN = [
    *("--no-aug", "--smoothing", 0, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", ""),
    *("--sched", "constant", "--warmup-epochs", 0, "--max-steps", STEPS),
]
"""Flags of a run without anything random."""


class Curve(NamedTuple):
    """Rows as in metrics.jsonl (loss before the update, norm before clipping), final weights, timm's average."""

    rows: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor]


def kwargs_words(kwargs: dict[str, Any] = KWARGS) -> list[str]:
    """The model's arguments as the command line takes them."""
    return ["--model-kwargs", *(f"{k}={v}" for k, v in kwargs.items())]


@cache  # asked for by many modules of tests, and over a second to read
def _first_images(archive: Path) -> list[tuple[str, bytes]]:
    """The first 200 files of an archive of 50,000, those of all classes in turn: "class/name", contents."""
    with tarfile.open(archive) as tar:
        by_number = sorted((os.path.basename(m.name), m.name, m) for m in tar.getmembers() if m.isfile())
        return [("/".join(name.split("/")[-2:]), tar.extractfile(m).read()) for _, name, m in by_number[:200]]


def cifar_folder(archive: Path, folder: Path, num_images: int, split: str) -> None:
    """Unpack the first images of each class, `num_images` in all (at most 200), into `folder/split/<class>/`."""
    images = _first_images(archive)[:num_images]
    assert len(images) == num_images
    for name, data in images:
        target = folder / split / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def cifar_splits(real_images: Path, folder: Path, num_train: int, num_val: int) -> Path:
    """A folder with the first CIFAR-10 images of both splits, `train/` and `val/`; returns it."""
    cifar_folder(real_images / "cifar10" / "train.tar", folder, num_train, "train")
    cifar_folder(real_images / "cifar10" / "test.tar", folder, num_val, "val")
    return folder


def write_weights(
    path: Path, *, name: str = MODEL, img_size: int = IMG_SIZE, spread: float = 0.05, **kwargs: Any
) -> None:
    """A timm model's random weights as a safetensors file; random also where timm starts at zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=img_size, **{**KWARGS, **kwargs})
    state = {n: p + spread * torch.randn(p.shape, generator=generator) for n, p in model.state_dict().items()}
    save_file(state, str(path))


def cifar_with_weights(real_images: Path, folder: Path, num_images: int = NUM_IMAGES, **kwargs: Any) -> Path:
    """A folder with the first CIFAR-10 images as `train/` and weights of a model with these arguments; returns it."""
    cifar_folder(real_images / "cifar10" / "train.tar", folder, num_images, "train")
    write_weights(folder / "weights.safetensors", num_classes=10, **kwargs)
    return folder


def timm_optimizer(
    kind: str, model: torch.nn.Module, layer_decay: float | None = None, **changes: Any
) -> torch.optim.Optimizer:
    """The optimizer and parameter groups of timm's train.py for a row of `BLOCKS`, with changed arguments."""
    params = {**BLOCKS[kind]["params"], **changes}
    decay = params.pop("weight_decay")
    no_decay = model.no_weight_decay()
    fallback = {"fallback_list": params.pop("fallback_list", ())}
    if kind == "layer decay" or layer_decay:
        groups = param_groups_layer_decay(model, decay, no_decay, layer_decay=layer_decay or LAYER_DECAY, **fallback)
        for group in groups:
            group["lr"] = params["lr"] * group["lr_scale"]
    else:
        groups = param_groups_weight_decay(model, decay, no_weight_decay_list=no_decay, **fallback)
    if BLOCKS[kind]["type"] == "Lamb":
        return Lamb(groups, max_grad_norm=None, **params)
    if BLOCKS[kind]["type"] == "Muon":
        dtype = getattr(torch, params.pop("ns_dtype", "float32"))  # timm's has no such argument
        muon.zeropower_via_newtonschulz = partial(zeropower_via_newtonschulz, dtype=dtype)
        return muon.Muon(groups, **params)
    return {"Lars": Lars, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[BLOCKS[kind]["type"]](groups, **params)


def train_on(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Path,
    kind: str = "adamw",
    make: Callable[..., torch.optim.Optimizer] = timm_optimizer,
    *,
    name: str = MODEL,
    frozen: Sequence[str] = (),
    model_kwargs: dict[str, Any] = KWARGS,
    **changes: Any,
) -> Curve:
    """Train on given batches of 10 classes, one a step: images float32 [B, 3, H, W], labels int64 [B].

    fp32, cross-entropy without smoothing, weight decay by timm's own grouping, `clip_grad_norm_`. Parameters whose
    names begin as `frozen` says are not trained; `changes` are the optimizer's.
    """
    model = timm.create_model(name, num_classes=10, img_size=IMG_SIZE, **model_kwargs)
    model.load_state_dict(load_file(str(weights)))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(tuple(frozen)))
    return train_model(model, make(kind, model, **changes), batches)


def train_model(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.cross_entropy,
) -> Curve:
    """Train a model in fp32 on batches of images and targets, one a step, with `clip_grad_norm_`."""
    ema = ModelEmaV3(model, decay=EMA_DECAY)
    rows: list[dict[str, Any]] = []
    for step, (images, labels) in enumerate(batches, start=1):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        ema.update(model, step=step)
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return Curve(rows, model.state_dict(), ema.module.state_dict())


def images_and_labels(folder: Path, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """All images of a split in a folder, as a run with mean and std of 0.5 has them, and their labels."""
    pixels = torchvision.transforms.Compose(
        [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize([0.5] * 3, [0.5] * 3)]
    )
    data = torchvision.datasets.ImageFolder(str(folder / split), pixels)
    return torch.stack([image for image, _ in data]), torch.tensor([label for _, label in data])


def train_plainly(folder: Path, kind: str = "adamw", *args: Any, steps: int = STEPS, **kwargs: Any) -> Curve:
    """`train_on` the images of a folder, all of them in each step, from the weights that lie there."""
    return train_on([images_and_labels(folder)] * steps, folder / "weights.safetensors", kind, *args, **kwargs)


def command(
    folder: Path,
    kind: str,
    layout: tuple[int, int, int, int],
    output: Path,
    *words: Any,
    recipe: Sequence[Any] = PLAIN,
    params: dict[str, Any] | None = None,
    blocks: dict[str, Any] | None = None,
    model_kwargs: dict[str, Any] = KWARGS,
    num_images: int = NUM_IMAGES,
) -> list[str]:
    """The command line of our run, its batch in two micro-batches; its JSON is written next to the output.

    Args:
        folder: of images and weights.
        kind: a row of `BLOCKS`.
        layout: pp, dp, tp and the ZeRO stage.
        output: the run's folder.
        words: further flags, which win.
        recipe: flags of data, augmentation and schedule.
        params: of the optimizer, that differ.
        blocks: of the JSON, that differ.
        model_kwargs: of the model.
        num_images: that `folder` has: the global batch.
    """
    pp, dp, tp, stage = layout
    optimizer = {"type": BLOCKS[kind]["type"], "params": {**BLOCKS[kind]["params"], **(params or {})}}
    output.parent.mkdir(parents=True, exist_ok=True)
    blocks = {"optimizer": optimizer, "gradient_clipping": CLIP, **(blocks or {})}
    config = write_config(output.with_name(f"{output.name}.json"), stage, **blocks)
    argv = ["--model", MODEL, *kwargs_words(model_kwargs), "--img-size", IMG_SIZE, *recipe, "--log-interval", 1]
    argv += [] if "--dataset" in words else ["--data-dir", folder]
    argv += ["--workers", 0, "--initial-checkpoint", folder / "weights.safetensors"]
    argv += ["--deepspeed_config", config, "--pp", pp, "--tp", tp, "-b", num_images // dp // 2, "--grad-accum-steps", 2]
    argv += ["--output", output, "--model-ema", "--model-ema-decay", EMA_DECAY]
    argv += ["--layer-decay", LAYER_DECAY] if kind == "layer decay" else []
    return [str(word) for word in [*argv, *words]]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The tensor that differs most, relative to its norm."""
    assert a.keys() == b.keys()
    parts = {n: (torch.linalg.norm(a[n] - b[n]) / torch.linalg.norm(b[n]).clamp_min(1e-3)).item() for n in a}
    worst = max(parts, key=parts.get)
    return parts[worst], worst
