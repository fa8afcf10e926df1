"""Predict the classes of images with trained weights, or write their features.

ds-vit predict runs/first cat.jpg dog.jpg
ds-vit predict runs/first photos --output classes.csv
ds-vit embed runs/first photos --output features.npz

Images go the way of evaluation: the same decoding, resizing, crop and normalisation, by the same code. The model is
timm's own, in fp32, whatever the run computed in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from ds_vit.data import ImageDecodeError, Loader, eval_loader, finish_images
from ds_vit.data.sources.folders import ImageFiles, find_images
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import TimmViT
from ds_vit.weights.files import find_weights
from ds_vit.weights.source import Exported, load_source

_MOST_WORKERS = 4  # timm's default


@dataclass(frozen=True)
class ClassProbability:
    """A class that an image may be of.

    Attributes:
        number: of its logit.
        name: LABEL_<number> where nothing says it.
        probability: from 0 to 1.
    """

    number: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, the first one first."""

    image: str
    classes: tuple[ClassProbability, ...]


@dataclass(frozen=True)
class Unreadable:
    """An image file that could not be read or decoded, and why."""

    image: str
    reason: str


@dataclass(frozen=True)
class Predictions:
    """What `predict` gives.

    Attributes:
        model: its timm name.
        weights: the file that was read.
        by: "softmax", or "sigmoid" for weights that were trained with binary cross-entropy: a probability is then of
            its class alone, and they need not sum to 1.
        images: in the order given, without those that could not be read.
        unreadable: those.
    """

    model: str
    weights: str
    by: str
    images: tuple[Prediction, ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True)
class Features:
    """What `embed` gives.

    Attributes:
        images: N paths in the order given, without those that could not be read.
        features: float32 [N, D], what the classifier gets: pooled, and normalised where the model does that.
        unreadable: the images that could not be read.
    """

    images: tuple[str, ...]
    features: np.ndarray
    unreadable: tuple[Unreadable, ...]


def predict(source: str | Path, images: Sequence[str | os.PathLike[str]], **settings: Any) -> Predictions:
    """The most probable classes of images; arguments and errors as of `predict_each`."""
    return collect(*predict_each(source, images, **settings))


def predict_each(
    source: str | Path,
    images: Sequence[str | os.PathLike[str]],
    *,
    top_k: int | None = None,
    weights: str = "raw",
    checkpoint: str = "",
    labels: str | Path | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    device: str = "auto",
    **settings: Any,
) -> tuple[Exported, Iterator[Prediction | Unreadable]]:
    """Predict images one after the other.

    Args:
        source: a run's output folder, a checkpoint folder, or a file or folder that `--initial-checkpoint` accepts.
        images: files, and folders of them.
        top_k: how many classes an image; default 5, or all where there are fewer.
        weights: "raw", or "ema" for the moving average.
        checkpoint: which one of a run's; see `find_weights`.
        labels: a file of class names, one a line; default those that lie with the weights.
        batch_size: images at once.
        workers: processes that decode; default 0 for up to two batches, else up to 4.
        device: "cpu", "cuda", "cuda:1", …; "auto" is the accelerator where there is one.
        settings: model and pixel flags and `bce_loss` by their recipe names; they have the last word over the run's
            config.yaml.

    Returns:
        The model; and of each image, in the order given, its classes, or why it cannot be read.

    Raises:
        UserError: input that cannot be.
    """
    found = find_weights(source, weights, checkpoint)  # a missing run is said before a missing image
    files = find_images(images)
    exported = load_source(found, settings, labels)
    num_classes = exported.model.num_classes
    if not num_classes:
        raise UserError(
            f"{source} has no classifier: its run's task has no classes; `ds-vit embed` writes its features"
        )
    if top_k is not None and not 1 <= top_k <= num_classes:
        raise UserError(f"--top-k {top_k} must lie between 1 and the model's {num_classes} classes")
    outputs = _outputs(exported, files, _logits, batch_size, workers, device)
    return exported, _predictions(exported, top_k or min(5, num_classes), outputs)


def embed(
    source: str | Path,
    images: Sequence[str | os.PathLike[str]],
    *,
    weights: str = "raw",
    checkpoint: str = "",
    batch_size: int = 32,
    workers: int | None = None,
    device: str = "auto",
    **settings: Any,
) -> Features:
    """The features of images: what the model's classifier gets. Weights need not have one.

    Arguments as of `predict_each`.

    Raises:
        UserError: input that cannot be, or no image that can be read.
    """
    stored = find_weights(source, weights, checkpoint)
    files = find_images(images)
    exported = load_source(stored, settings, classifier=False)
    found = list(_outputs(exported, files, _features, batch_size, workers, device))
    unreadable = tuple(one for one in found if isinstance(one, Unreadable))
    read = [one for one in found if not isinstance(one, Unreadable)]
    if not read:
        raise UserError(f"none of {len(files)} images can be read; the first, {files[0]}: {unreadable[0].reason}")
    return Features(tuple(name for name, _ in read), torch.stack([row for _, row in read]).numpy(), unreadable)


# ---- images through the model --------------------------------------------------------------------------------------

Forward = Callable[[TimmViT, torch.Tensor], torch.Tensor]
Outputs = Iterator[tuple[str, torch.Tensor] | Unreadable]


def _logits(model: TimmViT, images: torch.Tensor) -> torch.Tensor:
    return model(images)


def _features(model: TimmViT, images: torch.Tensor) -> torch.Tensor:
    return model.forward_head(model.forward_features(images), pre_logits=True)


def _outputs(
    exported: Exported, files: Sequence[str], forward: Forward, batch_size: int, workers: int | None, device: str
) -> Outputs:
    """What a function of the model and images [B, 3, H, W] gives for each file, fp32 on the CPU, in their order."""
    if batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, not {batch_size}")
    if workers is not None and workers < 0:
        raise UserError(f"--workers must be at least 0, not {workers}")
    if workers is None:
        workers = 0 if len(files) <= 2 * batch_size else min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    place, source = _find_device(device), ImageFiles(list(files))
    loader = eval_loader(
        source,
        image=exported.image,
        batch=min(batch_size, len(files)),
        load_targets=False,
        on_bad_image="skip",
        num_workers=workers,
        pin_memory=place.type != "cpu",
    )
    return _run(exported, forward, source, loader, place)


@torch.inference_mode()
def _run(exported: Exported, forward: Forward, source: ImageFiles, loader: Loader, device: torch.device) -> Outputs:
    model = exported.model.to(device)
    console = Console(stderr=True)
    hidden = not console.is_terminal or len(loader) == 1
    indices = iter(range(len(source)))  # there is none for the rows that pad the last batch
    for batch in track(loader, "images", len(loader), console=console, transient=True, disable=hidden):
        outputs = forward(model, finish_images(batch, exported.image, device=device)).float().cpu()
        for output, valid, index in zip(outputs, batch.valid.tolist(), indices, strict=False):
            image = source.describe(index)
            yield (image, output) if valid else Unreadable(image, _why(source, index))


def _why(source: ImageFiles, index: int) -> str:
    """What is wrong with an image that a worker could not decode."""
    try:
        source.image(index)
    except ImageDecodeError as error:
        return error.reason
    return "could not be decoded at first, and can be now: is it being written?"


def _find_device(name: str) -> torch.device:
    """The device of a name that torch knows; "auto": the accelerator, or the CPU where there is none."""
    there = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return there or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name} is no device; give auto, cpu, cuda or cuda:1") from None
    count = torch.accelerator.device_count() if there else 0
    if device.type != "cpu" and (there is None or device.type != there.type or (device.index or 0) >= count):
        raise UserError(f"--device {name}: there is {f'{there.type} with {count} devices' if there else 'a CPU alone'}")
    return device


def _predictions(exported: Exported, top_k: int, outputs: Outputs) -> Iterator[Prediction | Unreadable]:
    """The most probable classes of each image, from its logits."""
    names = exported.labels or tuple(f"LABEL_{number}" for number in range(exported.model.num_classes))
    for one in outputs:
        if isinstance(one, Unreadable):
            yield one
            continue
        image, logits = one
        probabilities = (logits.sigmoid() if exported.bce else logits.softmax(0)).topk(top_k)
        pairs = zip(probabilities.indices.tolist(), probabilities.values.tolist(), strict=True)
        yield Prediction(image, tuple(ClassProbability(number, names[number], value) for number, value in pairs))


def collect(exported: Exported, found: Iterable[Prediction | Unreadable]) -> Predictions:
    """All that `predict_each` gives."""
    found = list(found)
    return Predictions(
        model=exported.model.pretrained_cfg["architecture"],
        weights=str(exported.weights.path),
        by="sigmoid" if exported.bce else "softmax",
        images=tuple(one for one in found if isinstance(one, Prediction)),
        unreadable=tuple(one for one in found if isinstance(one, Unreadable)),
    )
