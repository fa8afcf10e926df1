"""Single images in the report: contact sheets, and the prediction of each validation image."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from ds_vit.config.run_folder import RunFolder, write_json, written_whole
from ds_vit.data.batches import MicroBatch
from ds_vit.data.decode import ImageDecodeError, Jpeg
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.tasks.metrics import Batch, Pairs
from ds_vit.tasks.task import LOCAL_IMAGES

SIDE = 112  # pixels of an image in a sheet
_ACROSS = 8
_IMAGES_FOR_SAMPLE = 4  # of which all crops are shown
_MOST_MISTAKES = 24


def save_sheet(images: Sequence[Image.Image], captions: Sequence[str], path: Path, num_views: int = 0) -> None:
    """Write images side by side into a PNG, and their captions into the .json next to it.

    Args:
        images: of any size.
        captions: of each.
        path: of the PNG.
        num_views: images of a sample, which a row shows; 0 if each is a sample.

    Raises:
        OSError: it cannot be written.
    """
    across = num_views or _ACROSS
    rows = -(-len(images) // across)
    sheet = Image.new("RGB", (SIDE * across, SIDE * rows), "white")
    for at, image in enumerate(images):
        resample = Image.Resampling.NEAREST if max(image.size) < SIDE else Image.Resampling.BICUBIC
        tile = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), resample)
        sheet.paste(tile, (at % across * SIDE, at // across * SIDE))
    with written_whole(path) as partial:
        sheet.save(partial, format="png")
    write_json(path.with_suffix(".json"), {"tile": SIDE, "views": num_views, "captions": list(captions)})


class TrainingSheet:
    """This rank's images of the first step as the model gets them, with their labels.

    If an image has several crops, a row shows those of one sample: the global ones, then the local ones.

    Args:
        image: mean and std.
        source: the training split.
        classes: class names; empty if the task has none.
        most: number of images; of several crops a quarter as many samples are shown, at least one.
        num_batches: micro-batches of a step.
    """

    def __init__(self, image: ImageConfig, source: Source, classes: Sequence[str], most: int, num_batches: int) -> None:
        self._mean, self._std = (torch.tensor(values).view(-1, 1, 1) for values in (image.mean, image.std))
        self._source = source
        self._classes = classes
        self._missing = most
        self._num_views = 0
        self._batches_left = num_batches
        self._images: list[Image.Image] = []
        self._captions: list[str] = []

    def add(self, drawn: MicroBatch, batch: Batch, save: Callable[[TrainingSheet], None]) -> None:
        """Take images of a micro-batch, up to the end of the first step.

        Args:
            drawn: the samples and mixing weights.
            batch: its tensors; without "images" [B, 3, H, W], or the crops [B, 2, 3, H, W] and those of "local_images",
                nothing is added.
            save: called once, when the sheet is complete.
        """
        if not (self._missing and self._batches_left and "images" in batch):
            return
        views = [batch[name] for name in ("images", LOCAL_IMAGES) if name in batch]
        if views[0].ndim == 5 and not self._num_views:
            self._num_views = sum(part.shape[1] for part in views)
            self._missing = max(1, self._missing // _IMAGES_FOR_SAMPLE)
        samples = len(views[0][: self._missing])
        of_parts = [self._pictures(part[:samples]) for part in views]
        for row in range(samples):
            of_sample = [picture for part in of_parts for picture in part[row]]
            self._images += of_sample
            self._captions += [self._caption(drawn, row), *[""] * (len(of_sample) - 1)]
        self._missing -= samples
        self._batches_left -= 1
        if not (self._missing and self._batches_left):
            save(self)

    def _pictures(self, images: torch.Tensor) -> list[list[Image.Image]]:
        """Of normalised images [B, ..., 3, H, W]: the views of each sample, or its one image."""
        pixels = images.float().cpu()
        pixels = ((pixels * self._std + self._mean).clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
        views = pixels.movedim(-3, -1).unflatten(0, (-1, 1)) if pixels.ndim == 4 else pixels.movedim(-3, -1)
        return [[Image.fromarray(one) for one in sample] for sample in views.contiguous().numpy()]

    def save(self, path: Path) -> None:
        """Write the sheet.

        Raises:
            OSError: it cannot be written.
        """
        save_sheet(self._images, self._captions, path, self._num_views)

    def _caption(self, drawn: MicroBatch, row: int) -> str:
        """A row's label; a mixed row has both labels, and lambda, the weight of the first."""
        if not self._classes:
            return ""
        own = self._label(drawn, row)
        if drawn.mix is None or drawn.mix.lam[row] == 1.0:
            return own
        how = "cutmix" if drawn.mix.box[row].any() else "mixup"
        partner = self._label(drawn, int(drawn.mix.partner[row]))
        return f"{how} \N{GREEK SMALL LETTER LAMDA} {drawn.mix.lam[row]:.2f}: {own} + {partner}"

    def _label(self, drawn: MicroBatch, row: int) -> str:
        # A pipeline's first stage has no targets, and does not know the replacement of a damaged image.
        if drawn.targets is None and drawn.skipped:
            return "(unknown: bad images are replaced)"
        target = self._source.target(int(drawn.indices[row])) if drawn.targets is None else drawn.targets[row].numpy()
        if np.ndim(target) == 0:
            return _name(int(target), self._classes)
        return ", ".join(_name(int(at), self._classes) for at in np.flatnonzero(target)) or "no label"


def write_predictions(
    folder: RunFolder, by_sample: torch.Tensor, source: Source, classes: Sequence[str], image: ImageConfig
) -> None:
    """Write predictions.csv, in the order of the split, and the sheet of the most confident mistakes.

    Probabilities have four digits, so layouts that differ by rounding almost always write the same bytes.

    Args:
        folder: of the run.
        by_sample: float64 [N, 2] of the split: 1 + the predicted class (0: not counted), and its probability.
        source: the split.
        classes: class names.
        image: how the split's images are read.

    Raises:
        OSError: a file cannot be written.
    """
    taken_for, probability = by_sample.cpu().numpy().T
    probability = probability.round(4)
    targets = {int(at): int(source.target(int(at))) for at in np.flatnonzero(taken_for > 0)}
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
            table.writerow((source.describe(at), *names, f"{probability[at]:.4f}", target, predicted[at]))
    mistakes = sorted(
        (at for at, target in targets.items() if target != predicted[at]), key=lambda at: -probability[at]
    )
    captioned = [
        (at, f"{_name(targets[at], classes)}, predicted {_name(predicted[at], classes)} ({probability[at]:.0%})")
        for at in mistakes[:_MOST_MISTAKES]
    ]
    _save_samples(source, captioned, folder.mistakes, image)


def write_pairs(folder: RunFolder, pairs: Pairs, source: Source, image: ImageConfig) -> None:
    """Write the similarities of some images and captions, and a sheet of the most and the least similar pairs.

    Args:
        folder: of the run.
        pairs: of its validation split.
        source: the split.
        image: how its images are read.

    Raises:
        OSError: a file cannot be written.
    """
    texts = [source.captions(sample)[0] for sample in pairs.samples]
    names = [Path(source.describe(sample)).name for sample in pairs.samples]
    write_json(folder.similarities, {"images": names, "captions": texts, "similarities": pairs.similarities})
    captioned = [
        (sample, f"{similarity:.3f}, place {place:,}: {source.captions(sample)[0]}")
        for sample, similarity, place in (*pairs.best, *pairs.worst)
    ]
    _save_samples(source, captioned, folder.pairs, image)


def _save_samples(source: Source, captioned: Sequence[tuple[int, str]], path: Path, image: ImageConfig) -> None:
    """Save a sheet of samples with their captions, without those that cannot be decoded; with none, remove it."""
    images, captions = [], []
    for index, caption in captioned:
        with contextlib.suppress(ImageDecodeError):
            found = source.opened(index, exif_rotation=image.exif_rotation)
            images.append(found.image() if isinstance(found, Jpeg) else found)
            captions.append(caption)
    if images:
        save_sheet(images, captions, path)
    else:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)


def _name(number: int, classes: Sequence[str]) -> str:
    return classes[number] if number < len(classes) else f"class {number}"
