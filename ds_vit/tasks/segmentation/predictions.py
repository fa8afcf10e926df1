"""What `ds-vit predict` writes for a run of --task segmentation: masks as its data has them, and overlays.

A mask has the size of its image, the pixel values of the training masks and the colours of labels.csv as its palette,
so that it can be corrected and trained on.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ds_vit.data.decode import decode, upright
from ds_vit.data.fields import normalised
from ds_vit.data.sources.listing import LABELS_FILE
from ds_vit.data.sources.masks import default_palette, find_labels
from ds_vit.data.sources.source import Source
from ds_vit.tasks.exports import ArrayPredictor, Exported, Predict
from ds_vit.tasks.segmentation.windows import Windows


def predict_masks(exported: Exported, values: Mapping[str, Any], folder: Path) -> ArrayPredictor:
    """As `Task.predictor`: `masks/` has palette PNG files, `overlays/` JPEG files of the same sizes."""
    image = exported.image
    windows = Windows("images", image, values.get("slide_stride"))
    flags = values.get("ignore_index", -1), bool(values.get("reduce_zero_label"))
    labels = find_labels(str(folder), exported.model.num_classes, *flags)

    def decoded(data: bytes, name: str) -> Image.Image:
        return upright(decode(data, name)) if image.exif_rotation else decode(data, name)

    def classes(data: bytes, name: str, forward: Predict) -> torch.Tensor:
        pixels = decoded(data, name)
        logits = forward(normalised(windows.cut(pixels), image))
        return windows.classes(logits, (pixels.height, pixels.width)).cpu()

    def write(path: str, classes: np.ndarray, folder: Path, stem: str) -> Path:
        mask, overlay = folder / "masks" / f"{stem}.png", folder / "overlays" / f"{stem}.jpg"
        for made in (mask, overlay):
            made.parent.mkdir(parents=True, exist_ok=True)
        mask_picture(classes, labels.values, labels.colours).save(mask)
        # The image under the half transparent colours of its classes.
        photo, colours = decoded(Path(path).read_bytes(), path), Image.fromarray(labels.colours[classes])
        Image.blend(photo, colours, 0.5).save(overlay, quality=90)
        return mask

    return ArrayPredictor(classes, write)


def write_labels(folder: Path, source: Source) -> None:
    """Write labels.csv into a run's folder, for `predict_masks`.

    Args:
        folder: of the run.
        source: a split of its data.

    Raises:
        OSError: the file cannot be written.
    """
    colours = [f"#{bytes(colour).hex()}" for colour in source.entry("colours", 0)]
    rows = zip(source.entry("values", 0), source.class_names, colours, strict=True)
    with (folder / LABELS_FILE).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("index", "name", "colour"), *rows])


def mask_picture(classes: np.ndarray, values: np.ndarray, colours: np.ndarray) -> Image.Image:
    """A mask with the pixel values of the data: with a palette, or in grey of 16 bits where a value exceeds 255.

    Args:
        classes: class numbers [H, W].
        values: pixel value of each class [C], at most `MOST_VALUE`.
        colours: uint8 [C, 3].
    """
    if values.max() > 255:
        return Image.fromarray(values[classes].astype(np.uint16))
    picture, palette = Image.fromarray(values[classes].astype(np.uint8)), default_palette(256)
    palette[values] = colours
    picture.putpalette(palette.tobytes())
    return picture
