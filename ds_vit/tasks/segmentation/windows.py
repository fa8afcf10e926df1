"""Evaluation at the images' own sizes: windows of the model's size, and the logits of an image stitched from theirs.

An image is resized until it covers the model's size; its canvas is that size, and windows slide over it. Logits are
averaged where windows overlap, as mmsegmentation does, and upsampled to the size of the image's mask. Everything is
done one image at a time, so that no result depends on the batch.

Shapes: K windows, C classes, h x w the model's size, gh x gw of its logits, rh x rw of the canvas, H x W of the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ds_vit.data.augment.steps import Size
from ds_vit.data.decode import Jpeg
from ds_vit.data.field import RaggedField, Rows, Sample
from ds_vit.data.fields import ImageField, normalised
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.masks import IGNORED, require_same_size
from ds_vit.fault_tolerance.errors import UserError


def stitched(logits: torch.Tensor, size: Size, starts: Sequence[Size], img_size: Size) -> torch.Tensor:
    """The mean logits of an image's windows on its canvas.

    Args:
        logits: of its windows, [K, C, gh, gw].
        size: (rh, rw) of the canvas.
        starts: (top, left) of each window.
        img_size: (h, w).

    Returns:
        float32 [C, rh, rw].
    """
    (h, w), logits = img_size, logits.float()
    scores, times = logits.new_zeros((logits.shape[1], *size)), logits.new_zeros(size)
    for window, (top, left) in zip(logits, starts, strict=True):
        scores[:, top : top + h, left : left + w] += F.interpolate(window[None], img_size, mode="bilinear")[0]
        times[top : top + h, left : left + w] += 1
    return scores.div_(times)


# ---- fields of evaluation --------------------------------------------------------------------------------------------


class Windows(RaggedField, ImageField):
    """The windows of an image, normalised: [B, most, 3, h, w], black where it has fewer. Only its own are sent.

    Args:
        name: as for `Field`.
        image: size and normalisation.
        stride: --slide-stride, at most the window: None for two thirds of it; 0 for the whole image as one window.
        sizes: (height, width) of the images that are read.

    Raises:
        UserError: the stride is larger than a window.
    """

    def __init__(self, name: str, image: ImageConfig, stride: int | None, sizes: Iterable[Size] = ()) -> None:
        if (side := min(image.img_size)) < (stride or 0):
            raise UserError(f"--slide-stride {stride} must be at most {side}: windows of {side} would leave gaps")
        ImageField.__init__(self, name, image, None)
        self._stride = stride
        self.shape = (max(len(self.canvas(size)[1]) for size in (image.img_size, *sizes)), *self.shape)

    def canvas(self, size: Size) -> tuple[Size, list[Size]]:
        """The (rh, rw) to which an image of this size is resized, and (top, left) of its windows, row by row."""
        img_size = self.image.img_size
        if self._stride == 0:
            return img_size, [(0, 0)]
        cover = max(window / length for window, length in zip(img_size, size, strict=True))
        resized = [max(window, round(length * cover)) for window, length in zip(img_size, size, strict=True)]

        def starts(length: int, window: int) -> list[int]:
            step = self._stride or max(1, round(2 * window / 3))
            room = length - window
            return [min(number * step, room) for number in range(-(-room // step) + 1)]

        tops, lefts = (starts(*pair) for pair in zip(resized, img_size, strict=True))
        return (resized[0], resized[1]), [(top, left) for top in tops for left in lefts]

    def cut(self, image: Image.Image) -> torch.Tensor:
        """The windows of an RGB image, uint8 [K, 3, h, w], in the order of `canvas`."""
        (height, width), starts = self.canvas((image.height, image.width))
        resized = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        (h, w) = self.image.img_size
        return torch.from_numpy(np.stack([resized[:, top : top + h, left : left + w] for top, left in starts]))

    def classes(self, logits: torch.Tensor, size: Size) -> torch.Tensor:
        """The class of each pixel of an image: the highest logit after bilinear upsampling (align_corners=False), the
        first of equals.

        Args:
            logits: [K, C, gh, gw]; those after the windows of this image are not read.
            size: (H, W).

        Returns:
            int64 [H, W].
        """
        resized, starts = self.canvas(size)
        scores = stitched(logits[: len(starts)], resized, starts, self.image.img_size)
        best = scores.new_full(size, -torch.inf)
        classes = torch.zeros(size, dtype=torch.int16, device=scores.device)
        for number, of_class in enumerate(scores):  # all classes of a photo at once would take gigabytes
            upsampled = F.interpolate(of_class[None, None], size, mode="bilinear")[0, 0]
            classes.masked_fill_(upsampled > best, number)
            torch.maximum(upsampled, best, out=best)
        return classes.long()

    def read(self, sample: Sample) -> torch.Tensor:
        """The windows, uint8 [k, 3, h, w].

        Raises:
            UserError: the image has another size than its mask.
        """
        opened = self.opened(sample)
        require_same_size(sample.name, (opened.height, opened.width), sample["mask_size"])
        return self.cut(opened.image() if isinstance(opened, Jpeg) else opened)

    def checked(self, value: torch.Tensor, sample: Sample) -> torch.Tensor:
        """As `Field.checked`; they are sent as they were read."""
        return value

    def to_device(self, packed: Any, rows: Rows, device: torch.device) -> torch.Tensor:
        """As `Field.to_device`, float32."""
        return normalised(super().to_device(packed, rows, device), self.image)


class WholeMask(RaggedField):
    """The mask of an image at its own size, int32 [B, most high, most wide], padded by -1 (ignored).

    Args:
        name: as for `Field`.
        sizes: (height, width) of the masks that are read.
    """

    padding = IGNORED

    def __init__(self, name: str, sizes: Iterable[Size]) -> None:
        most = tuple(map(max, zip(*sizes, strict=True)))
        super().__init__(name, most, torch.int32, stage="last", entry="mask")

    def read(self, sample: Sample) -> np.ndarray:
        """The rows of the mask, padded."""
        mask = sample[self.entry]
        return np.pad(mask, ((0, 0), (0, self.shape[1] - mask.shape[1])), constant_values=IGNORED)
