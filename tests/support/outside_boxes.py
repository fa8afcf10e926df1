"""A task from outside: the boxes of an image, ragged in the files and in the loader, padded on the device.

No detector: the features of an image are regressed to the boxes that belong to it, each weighted alike. What a detector
needs of the data is here: boxes that follow the crop and the flips of their image.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ds_vit.config.flag import Settings, flag
from ds_vit.data.field import RaggedField
from ds_vit.tasks.metrics import Figure, Metrics
from ds_vit.tasks.task import ChainTask


def make_boxes(root: Path) -> Path:
    """ROOT/train and ROOT/val: black images with up to three bright squares, and a file of these beside each."""
    draw = np.random.default_rng(0)
    for number in range(31):
        path = root / ("train" if number < 24 else "val") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels, lines = np.zeros((40, 48, 3), dtype=np.uint8), []
        for left, top in draw.integers(0, 28, (number % 4, 2)):
            pixels[top : top + 12, left : left + 12] = 255
            lines.append(f"{left} {top} {left + 12} {top + 12}")
        Image.fromarray(pixels).save(path)
        path.with_suffix(".txt").write_text("\n".join(lines))
    return root


class Boxes(RaggedField):
    """(left, top, right, bottom) in shares of the image as the model sees it, float32 [B, most, 4]; -1: none."""

    padding = -1.0

    def __init__(self, follows, most):
        super().__init__("boxes", (most, 4), torch.float32, stage="last", entry="image")
        self.follows = follows

    def read(self, sample):
        """As `Field.read`."""
        text = Path(sample.name).with_suffix(".txt").read_text()
        boxes = np.array(text.split(), dtype=np.float32).reshape(-1, 4)
        if len(boxes) > self.shape[0]:
            raise sample.damaged(f"it has {len(boxes)} boxes, more than --most-boxes {self.shape[0]}")
        (top, left, height, width), _, operations = self.follows.geometry(sample)
        boxes = ((boxes - [left, top, left, top]) / [width, height, width, height]).clip(0.0, 1.0)
        for operation in operations:
            boxes = self.moved(boxes, operation.name)
        return boxes[(boxes[:, 2:] > boxes[:, :2]).all(1)].astype(np.float32)

    def moved(self, boxes, operation):
        """The boxes after an operation on the image."""
        if operation == "hflip":
            boxes[:, [0, 2]] = 1.0 - boxes[:, [2, 0]]
        elif operation == "vflip":
            boxes[:, [1, 3]] = 1.0 - boxes[:, [3, 1]]
        return boxes


class BoxSettings(Settings):
    """The task's flags."""

    most_boxes: int = flag(8, "places for the boxes of an image")


class BoxRegression(ChainTask):
    """One box from the pooled features, and its distance to the boxes of the image."""

    settings = (BoxSettings,)
    has_classes = False
    figures = (Figure("distance", "distance", digits=4, higher_is_better=False),)

    @classmethod
    def create_model(cls, spec, config, *, for_training):
        """As `Task.create_model`."""
        return super().create_model(replace(spec, num_classes=4), config, for_training=for_training)

    def fields(self, *, training):
        """As `Task.fields`."""
        images = self.images(training=training)
        return images, Boxes(images, self.config.most_boxes)

    def loss(self, tp):
        """As `ChainTask.loss`."""
        return lambda outputs, batch: distances(outputs, batch["boxes"]).mean()

    def metrics(self, device):
        """As `Task.metrics`."""
        return Distance(2, device)


def distances(outputs, boxes):
    """The mean distance of a box [B, 4] to those of its image [B, most, 4]; 0 without any."""
    here = (boxes >= 0).all(-1)
    of_boxes = F.smooth_l1_loss(outputs.float()[:, None].expand_as(boxes), boxes, reduction="none").mean(-1)
    return torch.where(here, of_boxes, 0.0).sum(1) / here.sum(1).clamp(min=1)


class Distance(Metrics):
    """The mean of `distances`."""

    def update(self, outputs, batch):
        """As `Metrics.update`."""
        of_images = distances(outputs, batch["boxes"])[batch["valid"]].double()
        self.sums += torch.stack((of_images.sum(), batch["valid"].sum()))

    def compute(self):
        """As `Metrics.compute`."""
        distance, images = self.sums.tolist()
        return {"distance": distance / images, "images": int(images)}
