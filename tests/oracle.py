"""The outside oracle: a plain single-process loop of timm and torch, without DeepSpeed and without any of our code."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import timm.optim
import torch
import torchvision
from safetensors.torch import load_file, save_file

MODEL = "vit_tiny_patch16_224"
KWARGS = {"patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
IMG_SIZE = 32
LR, WEIGHT_DECAY, CLIP, STEPS = 1e-3, 0.05, 0.1, 10
SGD_LR = 0.5


def kwargs_words(kwargs: dict[str, Any] = KWARGS) -> list[str]:
    """The model's arguments as the command line takes them."""
    return ["--model-kwargs", *(f"{k}={v}" for k, v in kwargs.items())]


def cifar_folder(archive: Path, folder: Path, num_images: int, split: str) -> None:
    """Unpack the first images of each class, `num_images` in all, into `folder/split/<class>/`."""
    with tarfile.open(archive) as tar:
        files = sorted((m for m in tar.getmembers() if m.isfile()), key=lambda m: (Path(m.name).name, m.name))
        for member in files[:num_images]:
            target = folder / split / Path(member.name).parent.name / Path(member.name).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(tar.extractfile(member).read())


def write_weights(path: Path, *, num_classes: int, seed: int = 0, name: str = MODEL, **kwargs: Any) -> None:
    """A timm model's random weights as a safetensors file; random also where timm starts at zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(name, num_classes=num_classes, img_size=IMG_SIZE, **{**KWARGS, **kwargs})
    state = {n: p + 0.05 * torch.randn(p.shape, generator=generator) for n, p in model.state_dict().items()}
    save_file(state, str(path))


def train_plainly(
    folder: Path, weights: Path, *, num_classes: int, steps: int = STEPS, **kwargs: Any
) -> list[dict[str, Any]]:
    """Ten full-batch AdamW steps, rows as in metrics.jsonl: loss before the update, norm before clipping.

    fp32, cross-entropy without smoothing, weight decay by timm's own grouping, `clip_grad_norm_` at 0.1.
    """
    pixels = torchvision.transforms.Compose(
        [torchvision.transforms.ToTensor(), torchvision.transforms.Normalize([0.5] * 3, [0.5] * 3)]
    )
    data = torchvision.datasets.ImageFolder(str(folder / "train"), pixels)
    images = torch.stack([image for image, _ in data])
    labels = torch.tensor([label for _, label in data])
    return train_on([(images, labels)] * steps, weights, num_classes=num_classes, **kwargs)


def train_on(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Path,
    *,
    num_classes: int,
    optimizer: str = "AdamW",
    name: str = MODEL,
    frozen: Sequence[str] = (),
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """`train_plainly` on given batches, one a step: images float32 [B, 3, H, W], labels int64 [B].

    `name` is the model's; `frozen` are the modules and parameters directly under it that are not trained.
    """
    model = timm.create_model(name, num_classes=num_classes, img_size=IMG_SIZE, **{**KWARGS, **kwargs})
    model.load_state_dict(load_file(str(weights)))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.split(".")[0] not in frozen)
    groups = timm.optim.param_groups_weight_decay(model, WEIGHT_DECAY, no_weight_decay_list=model.no_weight_decay())
    if optimizer == "SGD":
        stepper = torch.optim.SGD(groups, lr=SGD_LR, momentum=0.9)
    else:
        stepper = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    rows: list[dict[str, Any]] = []
    for step, (images, labels) in enumerate(batches, start=1):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        stepper.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        stepper.step()
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return rows


def largest_deviation(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], key: str) -> float:
    """Largest relative difference of a column between two curves with the same steps."""
    train_a, train_b = ([r for r in rows if r["kind"] == "train"] for rows in (a, b))
    assert [r["step"] for r in train_a] == [r["step"] for r in train_b]
    return max(abs(x[key] - y[key]) / max(abs(x[key]), abs(y[key])) for x, y in zip(train_a, train_b, strict=True))
