"""What `ds-vit predict` writes for a run of --task segmentation: masks as its data has them, and overlays.

A mask has the size of its image, the pixel values of the training masks and the colours of labels.csv as its palette,
so that it can be corrected and trained on.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ds_vit.config.run_folder import written_whole
from ds_vit.data.decode import open_image
from ds_vit.data.field import Field, Sample
from ds_vit.data.fields import normalised
from ds_vit.data.masks import default_palette
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.exports import Exported, MaskPredictor, Predict
from ds_vit.tasks.segmentation.windows import Windows, canvas_of, classes_at, stitched

LABELS = "labels.csv"
"""In a run's folder: a row for each class in the order of the logits."""
_COLUMNS = ("index", "name", "colour")
_SIDES = (512, 2048)  # of an overlay's longer side: the legend is readable, and a photo of 50 megapixels opens
_OPACITY = 0.5


class _Windows(Windows):
    """The windows of an image, however many it has."""

    def checked(self, value: torch.Tensor, sample: Sample) -> torch.Tensor:
        return value


class _Size(Field):
    """The height and width of the image of some windows."""

    def __init__(self, of_windows: Windows) -> None:
        super().__init__("size", (2,), torch.int64, entry=of_windows.entry)
        self._windows = of_windows

    def read(self, sample: Sample) -> Any:
        opened = self._windows.opened(sample)
        return [opened.height, opened.width]


class SegmentationMasks(MaskPredictor):
    """As `MaskPredictor`: `masks/` has palette PNG files, `overlays/` JPEG files with a legend."""

    refused_flags: ClassVar[Mapping[str, str]] = {
        "bce_loss": "each pixel gets its most probable class",
        "interpolation": "images are resized bilinearly",
        **dict.fromkeys(("crop_pct", "crop_mode"), "windows slide over whole images (--slide-stride)"),
    }

    def __init__(self, exported: Exported, values: Mapping[str, Any], folder: Path | None) -> None:
        self._image, self._stride = exported.image, values.get("slide_stride")
        num_classes = exported.model.num_classes
        self._names = exported.labels or tuple(f"LABEL_{number}" for number in range(num_classes))
        first = int(bool(values.get("reduce_zero_label")))  # value 0 is no class
        self._values = np.arange(num_classes) + first
        self._colours = default_palette(num_classes + first)[self._values]
        if folder is not None and (path := folder / LABELS).is_file():
            self._values, self._colours = _read_labels(path, num_classes)
        self.fields = (windows := _Windows("windows", self._image, self._stride, most=1), _Size(windows))

    def classes(self, read: Mapping[str, Any], forward: Predict) -> np.ndarray:
        """As `MaskPredictor.classes`, by the windows of evaluation."""
        height, width = read["size"][0].tolist()
        canvas = canvas_of((height, width), self._image.img_size, self._stride)
        logits = forward(normalised(read["windows"]["items"], self._image))
        return classes_at(stitched(logits, canvas, self._image.img_size), (height, width)).cpu().numpy()

    def write(self, image: str, classes: np.ndarray, folder: Path, stem: str) -> Path:
        """As `MaskPredictor.write`."""
        mask, overlay = folder / "masks" / f"{stem}.png", folder / "overlays" / f"{stem}.jpg"
        for path in (mask, overlay):
            path.parent.mkdir(parents=True, exist_ok=True)
        mask_picture(classes, self._values, self._colours).save(mask)
        opened = open_image(Path(image).read_bytes(), image, exif_rotation=self._image.exif_rotation)
        pixels = opened if isinstance(opened, Image.Image) else opened.image()
        overlay_picture(pixels, classes, self._names, self._colours).save(overlay, quality=90)
        return mask


def write_labels(folder: Path, source: Source) -> None:
    """Write labels.csv into a run's folder, for `SegmentationMasks`.

    Args:
        folder: of the run.
        source: a split of its data.

    Raises:
        OSError: the file cannot be written.
    """
    names, values = source.class_names, source.entry("values", 0).tolist()
    colours = source.entry("colours", 0) if source.has("colours") else default_palette(max(values) + 1)[values]
    with written_whole(folder / LABELS) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows((v, name, f"#{bytes(c).hex()}") for v, name, c in zip(values, names, colours, strict=True))


def _read_labels(path: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """The pixel values [C] and the colours uint8 [C, 3] of the classes of a run."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(int(row["index"]), [*bytes.fromhex(row["colour"].lstrip("#"))]) for row in csv.DictReader(file)]
        values, colours = np.array([row[0] for row in rows]), np.array([row[1] for row in rows], dtype=np.uint8)
        if values.shape != (num_classes,) or colours.shape != (num_classes, 3) or values.min() < 0:
            raise ValueError(f"{len(rows)} rows in place of {num_classes}, or another form than a training run writes")
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it, or remove it for default colours") from None
    return values, colours


def mask_picture(classes: np.ndarray, values: np.ndarray, colours: np.ndarray) -> Image.Image:
    """A mask with the pixel values of the data: with a palette, or in grey of 16 bits where a value exceeds 255.

    Args:
        classes: class numbers [H, W].
        values: pixel value of each class [C].
        colours: uint8 [C, 3].
    """
    pixels = values[classes]
    if values.max() > 255:
        return Image.fromarray(pixels.astype(np.uint16))
    palette = default_palette(256)
    palette[values] = colours
    picture = Image.fromarray(pixels.astype(np.uint8))
    picture.putpalette(palette.tobytes())
    return picture


def overlay_picture(image: Image.Image, classes: np.ndarray, names: Sequence[str], colours: np.ndarray) -> Image.Image:
    """An image under the half transparent colours of its classes, next to their names and shares, the largest first."""
    scale = np.clip(max(image.size), *_SIDES) / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    tint = Image.fromarray(colours[classes]).resize(size, Image.Resampling.NEAREST)
    picture = Image.blend(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), tint, _OPACITY)
    line = max(size) // 24
    font = _font(line * 2 // 3)
    shares = np.bincount(classes.flatten(), minlength=len(names)) / classes.size
    present = [number for number in np.argsort(-shares, kind="stable").tolist() if shares[number]]
    lines = [f"{100 * shares[number]:.1f} %  {names[number]}" for number in present]
    most = max(1, size[1] // line - 1)
    if len(lines) > most:
        lines[most - 1 :] = [f"and {len(lines) - most + 1} more"]
    width = round(max(font.getlength(text) for text in lines)) + line * 5 // 2
    whole = Image.new("RGB", (size[0] + width, size[1]), "white")
    whole.paste(picture, (0, 0))
    draw = ImageDraw.Draw(whole)
    for row, (number, text) in enumerate(zip(present, lines, strict=False)):
        left, top = size[0] + line // 3, line // 2 + row * line
        if not text.startswith("and "):
            draw.rectangle((left, top, left + line, top + line * 3 // 4), fill=tuple(colours[number].tolist()))
        draw.text((left + line * 4 // 3, top), text, fill="black", font=font)
    return whole


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # The basic layout, which every build of Pillow has.
    path = str(files("ds_vit.data") / "glyphs" / "DejaVuSans.ttf")
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
