"""Evaluation at the images' own sizes: windows of the model's size, and the logits of an image stitched from theirs.

An image is resized until it covers the model's size; its canvas is that size, and windows slide over it. Logits are
averaged where windows overlap, as mmsegmentation does, and upsampled to the size of the image's mask. Everything is
done one image at a time, so that no result depends on the batch.

Shapes: K windows, C classes, h x w the model's size, gh x gw of its logits, rh x rw of the canvas, H x W of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ds_vit.data.decode import ImageDecodeError, Jpeg
from ds_vit.data.field import Field, RaggedField, Rows, Sample
from ds_vit.data.fields import ImageField, normalised
from ds_vit.data.masks import IGNORED
from ds_vit.data.settings import ImageConfig
from ds_vit.data.slots import empty
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError

Size = tuple[int, int]
"""(height, width) in pixels."""

_READERS = 16  # threads that read the headers of masks


# ---- windows of an image ---------------------------------------------------------------------------------------------


class Canvas(NamedTuple):
    """The place of an image's windows.

    Attributes:
        size: (rh, rw), to which the image is resized.
        starts: (top, left) of each window, row by row.
    """

    size: Size
    starts: list[tuple[int, int]]


def canvas_of(size: Size, img_size: Size, stride: int | None) -> Canvas:
    """The windows of an image.

    Args:
        size: of the image.
        img_size: (h, w) of a window.
        stride: --slide-stride, at most the window: None for two thirds of it; 0 for the whole image as one window.

    Raises:
        UserError: the stride is larger than a window.
    """
    if (side := min(img_size)) < (stride or 0):
        raise UserError(f"--slide-stride {stride} must be at most {side}: windows of {side} would leave gaps")
    if stride == 0:
        return Canvas(img_size, [(0, 0)])
    cover = max(window / length for window, length in zip(img_size, size, strict=True))
    resized = [max(window, round(length * cover)) for window, length in zip(img_size, size, strict=True)]

    def starts(length: int, window: int) -> list[int]:
        step = stride or max(1, round(2 * window / 3))
        room = length - window
        return [min(number * step, room) for number in range(-(-room // step) + 1)]

    tops, lefts = (starts(*pair) for pair in zip(resized, img_size, strict=True))
    return Canvas((resized[0], resized[1]), [(top, left) for top in tops for left in lefts])


def windows_of(image: Image.Image, img_size: Size, stride: int | None) -> torch.Tensor:
    """The windows of an RGB image, uint8 [K, 3, h, w], in the order of `canvas_of`."""
    (height, width), starts = canvas_of((image.height, image.width), img_size, stride)
    resized = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    (h, w) = img_size
    return torch.from_numpy(np.stack([resized[:, top : top + h, left : left + w] for top, left in starts]))


def stitched(logits: torch.Tensor, canvas: Canvas, img_size: Size) -> torch.Tensor:
    """The mean logits of an image's windows on its canvas.

    Args:
        logits: of its windows, [K, C, gh, gw].
        canvas: of the image.
        img_size: (h, w).

    Returns:
        float32 [C, rh, rw].
    """
    (h, w), logits = img_size, logits.float()
    scores, times = logits.new_zeros((logits.shape[1], *canvas.size)), logits.new_zeros(canvas.size)
    for window, (top, left) in zip(logits, canvas.starts, strict=True):
        scores[:, top : top + h, left : left + w] += F.interpolate(window[None], img_size, mode="bilinear")[0]
        times[top : top + h, left : left + w] += 1
    return scores.div_(times)


def classes_at(scores: torch.Tensor, size: Size) -> torch.Tensor:
    """The class of each pixel: the highest logit after bilinear upsampling (align_corners=False), the first of equals.

    Args:
        scores: float32 [C, rh, rw].
        size: (H, W) of the result.

    Returns:
        int64 [H, W].
    """
    best = scores.new_full(size, -torch.inf)
    classes = torch.zeros(size, dtype=torch.int16, device=scores.device)
    for number, of_class in enumerate(scores):  # all classes of a photo at once would take gigabytes
        upsampled = F.interpolate(of_class[None, None], size, mode="bilinear")[0, 0]
        classes.masked_fill_(upsampled > best, number)
        torch.maximum(upsampled, best, out=best)
    return classes.long()


def predicted_classes(logits: torch.Tensor, size: Size, img_size: Size, stride: int | None) -> torch.Tensor:
    """The class of each pixel of an image, int64 [H, W], from the logits of its windows.

    Args:
        logits: [K, C, gh, gw]; those after the windows of this image are not read.
        size: (H, W).
        img_size: (h, w).
        stride: as for `canvas_of`.
    """
    canvas = canvas_of(size, img_size, stride)
    return classes_at(stitched(logits[: len(canvas.starts)], canvas, img_size), size)


def extent(source: Source | None, img_size: Size, stride: int | None) -> tuple[int, int, int]:
    """The most windows of an image, and the largest height and width of a mask; of one window without a source.

    Only the headers of masks are read. A mask that is damaged is left to the one who reads it.
    """
    if source is None:
        return 1, *img_size

    def size_of(index: int) -> Size | None:
        try:
            return source.entry("mask_size", index)
        except ImageDecodeError:
            return None

    with ThreadPoolExecutor(_READERS) as threads:
        sizes = {size for size in threads.map(size_of, range(len(source))) if size} or {img_size}
    heights, widths = zip(*sizes, strict=True)
    return max(len(canvas_of(size, img_size, stride).starts) for size in sizes), max(heights), max(widths)


# ---- fields of evaluation --------------------------------------------------------------------------------------------


class Windows(ImageField):
    """The windows of an image, normalised: [B, most, 3, h, w], zeros where it has fewer. Only its own are sent.

    Args:
        name: as for `Field`.
        image: size and normalisation.
        stride: as for `canvas_of`.
        most: windows of an image.
    """

    def __init__(self, name: str, image: ImageConfig, stride: int | None, most: int) -> None:
        super().__init__(name, image)
        self.shape, self._stride = (most, *self.shape), stride

    def read(self, sample: Sample) -> torch.Tensor:
        """The windows, uint8 [k, 3, h, w].

        Raises:
            UserError: the image has another size than its mask.
        """
        opened = self.opened(sample)
        size = opened.height, opened.width
        if sample.source.has("mask_size") and size != tuple(sample["mask_size"]):
            its, mask = (f"{height}x{width}" for height, width in (size, sample["mask_size"]))
            raise UserError(
                f"{sample.name} has {its} pixels (height x width) and its mask {mask}; they must be the same"
            )
        return windows_of(opened.image() if isinstance(opened, Jpeg) else opened, self.image.img_size, self._stride)

    def blank(self) -> torch.Tensor:
        """No window, with room for all."""
        return torch.zeros(self.shape, dtype=torch.uint8)[:0]

    def collate(self, values: Sequence[torch.Tensor], rows: Rows) -> Any:
        """The windows of all rows one after the other, and the number of each row's."""
        counts = torch.tensor([len(of_row) for of_row in values])
        return {"items": torch.cat([*values], out=empty((int(counts.sum()), *self.shape[1:]))), "counts": counts}

    def to_device(self, packed: Any, rows: Rows, device: torch.device) -> torch.Tensor:
        """As `Field.to_device`, float32."""
        counts = packed["counts"][: rows.num_rows].tolist()
        images = torch.zeros((rows.num_rows, *self.shape), device=device)
        parts = packed["items"].to(device, non_blocking=True)[: sum(counts)].split(counts)
        for row, part in zip(images, parts, strict=True):
            if len(part):
                row[: len(part)] = normalised(part, self.image)
        return images


class WholeMask(RaggedField):
    """The mask of an image at its own size, int32 [B, most high, most wide], padded by -1 (ignored).

    Args:
        name: as for `Field`.
        most: (height, width) that no mask exceeds.
    """

    padding = IGNORED

    def __init__(self, name: str, most: Size) -> None:
        super().__init__(name, most, torch.int32, stage="last", entry="mask")

    def read(self, sample: Sample) -> np.ndarray:
        """The rows of the mask, padded."""
        mask = sample[self.entry]
        return np.pad(mask, ((0, 0), (0, self.shape[1] - mask.shape[1])), constant_values=IGNORED)


class Sizes(Field):
    """The size of each image's mask, int64 [B, 2]; 0 x 0 of a row that is not valid."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (2,), torch.int64, stage="last", entry="mask_size")
