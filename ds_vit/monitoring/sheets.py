"""What the report shows of single images: contact sheets, and what each validation image was taken for."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from ds_vit.config.run_folder import RunFolder, write_json, written_whole
from ds_vit.data import ImageConfig, Source
from ds_vit.data.decode import ImageDecodeError
from ds_vit.tasks import Batch

SIDE = 112  # pixels of an image in a sheet
_ACROSS = 8
_MOST_TRAINING, _MOST_MISTAKES = 16, 24


def save_sheet(images: Sequence[Image.Image], captions: Sequence[str], path: Path) -> None:
    """Write images side by side into a PNG, and their captions into the .json beside it.

    Raises:
        OSError: the disk refuses.
    """
    rows = -(-len(images) // _ACROSS)
    sheet = Image.new("RGB", (SIDE * _ACROSS, SIDE * rows), "white")
    for at, image in enumerate(images):
        resample = Image.Resampling.NEAREST if max(image.size) < SIDE else Image.Resampling.BICUBIC
        tile = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), resample)
        sheet.paste(tile, (at % _ACROSS * SIDE, at // _ACROSS * SIDE))
    with written_whole(path) as partial:
        sheet.save(partial, format="png")
    write_json(path.with_suffix(".json"), {"tile": SIDE, "captions": list(captions)})


def save_training_images(batch: Batch, image: ImageConfig, classes: Sequence[str], path: Path) -> None:
    """A sheet of a micro-batch's first images, as the model gets them, over their labels.

    Args:
        batch: with "images" [B, 3, H, W]; with "targets" where this rank has them.
        image: for mean and std.
        classes: their names; empty where the task has none.
        path: of the sheet.

    Raises:
        OSError: the disk refuses.
    """
    pixels = batch["images"][:_MOST_TRAINING].float().cpu()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (image.mean, image.std))
    pixels = ((pixels * std + mean).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    labels = [""] * len(pixels)
    if classes and "targets" in batch:
        labels = [_label(target, classes) for target in batch["targets"][:_MOST_TRAINING].cpu()]
    save_sheet([Image.fromarray(one) for one in pixels], labels, path)


def _label(target: torch.Tensor, classes: Sequence[str]) -> str:
    """A class number's name, or the names of a soft target that stand out from its smoothing, each with its share."""
    if target.ndim == 0:
        return _name(int(target), classes)
    values, places = target.float().sort(descending=True)
    standing_out = [(float(v), int(at)) for v, at in zip(values, places, strict=True) if v > values[-1] + 0.02][:3]
    return ", ".join(f"{value:.0%} {_name(at, classes)}" for value, at in standing_out)


def write_predictions(folder: RunFolder, by_sample: torch.Tensor, source: Source, classes: Sequence[str]) -> None:
    """predictions.csv, surest first, and the sheet of the surest mistakes.

    Args:
        folder: of the run.
        by_sample: float64 [N, 2] of the split: 1 + the class an image was taken for (0: it was not counted), and how
            probable that was.
        source: the split.
        classes: the names of the classes.

    Raises:
        OSError: the disk refuses.
    """
    taken_for, probability = by_sample.cpu().numpy().T
    order = np.argsort(-probability, kind="stable")
    order = order[taken_for[order] > 0]
    targets = {int(at): int(source.target(int(at))) for at in order}
    predicted = taken_for.astype(int) - 1
    with (
        written_whole(folder.predictions) as partial,
        # Names of files need not be UTF-8.
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        table = csv.writer(file)
        table.writerow(("image", "class", "predicted", "probability", "class_number", "predicted_number"))
        for at, target in targets.items():
            names = (_name(target, classes), _name(predicted[at], classes))
            table.writerow((source.describe(at), *names, f"{probability[at]:.6f}", target, predicted[at]))
    images, captions = [], []
    for at in [at for at, target in targets.items() if target != predicted[at]][:_MOST_MISTAKES]:
        try:
            images.append(source.image(at))
        except ImageDecodeError:
            continue
        name = _name(predicted[at], classes)
        captions.append(f"{_name(targets[at], classes)}, taken for {name} ({probability[at]:.0%})")
    if images:
        save_sheet(images, captions, folder.mistakes)
    else:  # a better evaluation than the last one
        folder.mistakes.unlink(missing_ok=True)
        folder.mistakes.with_suffix(".json").unlink(missing_ok=True)


def _name(number: int, classes: Sequence[str]) -> str:
    return classes[number] if number < len(classes) else f"class {number}"
