"""The contact sheet of the images that training sees first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ds_vit.data.field import MicroBatch
from ds_vit.data.fields import Pictures
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.panels import class_name, save_sheet

_IMAGES_FOR_SAMPLE = 4  # of which all crops are shown


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
            batch: its tensors; nothing is added if it has neither images [B, 3, H, W] nor crops [B, v, 3, H, W].
            save: called once, when the sheet is complete.
        """
        pictures = [name for name, part in drawn.packed.items() if isinstance(part, Pictures) and name in batch]
        views = [batch[name] for name in pictures if batch[name].shape[-3] == len(self._mean)]
        if not (self._missing and self._batches_left and views):
            return
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
        own, mix = self._label(drawn, row), drawn.rows.mix
        if mix is None or mix.lam[row] == 1.0:
            return own
        how = "cutmix" if mix.box[row].any() else "mixup"
        partner = self._label(drawn, int(mix.partner[row]))
        return f"{how} \N{GREEK SMALL LETTER LAMDA} {mix.lam[row]:.2f}: {own} + {partner}"

    def _label(self, drawn: MicroBatch, row: int) -> str:
        # A pipeline's first stage has no targets, and does not know the replacement of a damaged image.
        targets = drawn.packed.get("targets")
        if targets is None and drawn.skipped:
            return "(unknown: bad images are replaced)"
        target = self._source.target(int(drawn.rows.indices[row])) if targets is None else targets[row].numpy()
        if np.ndim(target) == 0:
            return class_name(int(target), self._classes)
        return ", ".join(class_name(int(at), self._classes) for at in np.flatnonzero(target)) or "no label"
