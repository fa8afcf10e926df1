"""Brightness, contrast and saturation as Pillow's ImageEnhance makes them, bit for bit or nearly, on planes of float32.

Pillow's Image.blend computes `a + factor * (b - a)` in float32, clips to [0, 255] and cuts the fraction off; its grey
is an integer. All sums behind a grey are whole multiples of 2^-16 below 2^8, which float32 holds exactly, so that
their order does not matter, nor whether products are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

BRIGHTNESS, CONTRAST, SATURATION = range(3)
"""ImageEnhance's Brightness, Contrast and Color, by torchvision's numbers for the parts of its ColorJitter."""

_GREY = (19595 / 65536, 38470 / 65536, 7471 / 65536)  # Pillow's conversion to "L" (ITU-R 601-2)
_MANY_PIXELS = 64 * 64  # from here on Pillow's way of taking an image apart is the faster one


def pixels_of(image: Image.Image) -> torch.Tensor:
    """An RGB image's pixels, uint8 [3, H, W], without gaps as torchvision's pil_to_tensor leaves them."""
    planes = np.empty((3, image.height * image.width), dtype=np.uint8)
    if planes.shape[1] < _MANY_PIXELS:
        np.copyto(planes, np.frombuffer(image.tobytes(), dtype=np.uint8).reshape(-1, 3).T)
    else:
        for plane, name in zip(planes, "RGB", strict=True):
            plane[:] = np.frombuffer(image.tobytes("raw", name), dtype=np.uint8)
    return torch.from_numpy(planes).view(3, image.height, image.width)


def image_of(pixels: torch.Tensor) -> Image.Image:
    """The RGB image of pixels, uint8 [3, H, W] without gaps."""
    size = (pixels.shape[2], pixels.shape[1])
    return Image.merge("RGB", [Image.frombuffer("L", size, plane, "raw", "L", 0, 1) for plane in pixels.numpy()])


class Planes:
    """The pixels of one image after another in float32, in memory that is taken once.

    New memory for each image would take as long as the arithmetic. Of NumPy and torch each does what takes it less
    time: NumPy begins an operation in a third of torch's time, torch limits and sums up values faster.

    Attributes:
        size: (height, width).
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self._values = torch.empty((3, size[0] * size[1]), dtype=torch.float32)
        self._array = self._values.numpy()
        self._grey = np.empty(size[0] * size[1], dtype=np.float32)
        self._part = np.empty_like(self._grey)

    def adjusted(self, pixels: torch.Tensor, parameters: Sequence[tuple[int, float]]) -> torch.Tensor:
        """What ImageEnhance makes of an image, the same bits.

        Args:
            pixels: uint8 [3, H, W] of this size.
            parameters: (BRIGHTNESS, CONTRAST or SATURATION; factor) in the order to apply them.

        Returns:
            uint8 [3, H, W], in memory of its own.
        """
        self._load(pixels)
        for number, (kind, factor) in enumerate(parameters):
            if number:
                np.floor(self._array, out=self._array)  # of the last one uint8 takes care
            if kind == BRIGHTNESS:
                np.multiply(self._array, np.float32(factor), out=self._array)
            else:
                np.floor(self._weigh(1.0, 0.5), out=self._grey)
                self._blend(self._mean() if kind == CONTRAST else self._grey, factor)
            if factor > 1.0:  # else the blend lies between the two
                self._values.clamp_(0.0, 255.0)
        return self._pixels()

    def nearly_adjusted(self, pixels: torch.Tensor, parameters: Sequence[tuple[int, float]]) -> torch.Tensor:
        """`adjusted` up to a grey level or two, in half the time: fractions are not cut off in between.

        Each part is linear where it does not clip, and only a factor above 1 can. What does not is put off: `scale`
        times the values, plus `grey` times their grey, plus `offset`.
        """
        self._load(pixels)
        last = len(parameters) - 1
        scale, grey, offset = 1.0, 0.0, 0.0
        for number, (kind, factor) in enumerate(parameters):
            rest = 1.0 - factor
            if kind == CONTRAST:
                sums = self._values.sum(dim=1).tolist()
                mean = sum(w * s for w, s in zip(_GREY, sums, strict=True)) / self._grey.size
                other = (scale + grey) * mean + offset
            else:
                other = offset if kind == SATURATION else 0.0
            grey = factor * grey + (rest * (scale + grey) if kind == SATURATION else 0.0)
            offset = factor * offset + rest * other
            scale *= factor
            if number < last:
                offset -= 0.5  # what cutting off takes on average
            if factor > 1.0 or number == last:
                self._transform(scale, grey, offset)
                scale, grey, offset = 1.0, 0.0, 0.0
        return self._pixels()

    def _load(self, pixels: torch.Tensor) -> None:
        np.copyto(self._array, pixels.numpy().reshape(3, -1))

    def _pixels(self) -> torch.Tensor:
        return torch.from_numpy(self._array.astype(np.uint8)).view(3, *self.size)

    def _weigh(self, factor: float, offset: float) -> np.ndarray:
        """The grey times a factor, plus an offset, float32 [H * W] in memory that the next call writes into."""
        red, green, blue = (np.float32(factor * weight) for weight in _GREY)
        grey, part = self._grey, self._part
        np.multiply(self._array[0], red, out=grey)
        np.add(grey, np.multiply(self._array[1], green, out=part), out=grey)
        np.add(grey, np.multiply(self._array[2], blue, out=part), out=grey)
        return np.add(grey, np.float32(offset), out=grey)

    def _mean(self) -> np.float32:
        """Pillow's mean of the grey."""
        count = self._grey.size
        # float32 holds sums below 2**24 exactly, in any order.
        exact = torch.float32 if 255 * count < 2**24 else torch.float64
        total = torch.from_numpy(self._grey).sum(dtype=exact).item()
        return np.float32(int(total / count + 0.5))

    def _blend(self, other: np.ndarray | np.float32, factor: float) -> None:
        """Image.blend(other, image, factor), before it clips."""
        np.subtract(self._array, other, out=self._array)
        np.multiply(self._array, np.float32(factor), out=self._array)
        np.add(self._array, other, out=self._array)

    def _transform(self, scale: float, grey: float, offset: float) -> None:
        added = self._weigh(grey, offset) if grey else np.float32(offset)
        np.multiply(self._array, np.float32(scale), out=self._array)
        np.add(self._array, added, out=self._array)
        self._values.clamp_(0.0, 255.0)
