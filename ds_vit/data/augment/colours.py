"""Brightness, contrast and saturation as Pillow's ImageEnhance makes them, bit for bit, on planes of float32.

Pillow's Image.blend computes `a + factor * (b - a)` in float32, clips to [0, 255] and cuts the fraction off; its grey
is an integer. All of these are whole numbers below 2^24, which float32 holds exactly, so that the order of the sums
does not matter.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

_GREY = np.array([19595.0, 38470.0, 7471.0], dtype=np.float32)  # over 2^16: Pillow's conversion to "L" (ITU-R 601-2)
_HALF, _ONE = np.float32(32768.0), np.float32(1.0 / 65536.0)
_MANY_PIXELS = 64 * 64  # from here on Pillow's way of taking an image apart is the faster one


def _take_apart(image: Image.Image, planes: np.ndarray) -> None:
    """Write the channels of an RGB image, of any type [3, H * W]."""
    if planes.shape[1] < _MANY_PIXELS:
        np.copyto(planes, np.asarray(image).reshape(-1, 3).T)
        return
    for plane, name in zip(planes, "RGB", strict=True):
        np.copyto(plane, np.frombuffer(image.tobytes("raw", name), dtype=np.uint8))


def pixels_of(image: Image.Image) -> torch.Tensor:
    """An RGB image's pixels, uint8 [3, H, W], without gaps as torchvision's pil_to_tensor leaves them."""
    planes = np.empty((3, image.height * image.width), dtype=np.uint8)
    _take_apart(image, planes)
    return torch.from_numpy(planes).view(3, image.height, image.width)


class Planes:
    """The pixels of one image after another, whole numbers in float32, in memory that is taken once.

    New memory for each image would take as long as the arithmetic. Of NumPy and torch each does what takes it less
    time: NumPy begins an operation in a third of torch's time and converts types faster, torch limits values faster.

    Attributes:
        size: (height, width).
        values: float32 [3, H * W].
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self.values = np.empty((3, size[0] * size[1]), dtype=np.float32)
        self._tensor = torch.from_numpy(self.values)
        self._grey = np.empty(size[0] * size[1], dtype=np.float32)
        self._part = np.empty_like(self._grey)

    def load(self, image: Image.Image) -> None:
        """Take up an RGB image of this size."""
        _take_apart(image, self.values)

    def pixels(self) -> torch.Tensor:
        """uint8 [3, H, W], in memory of its own."""
        return torch.from_numpy(self.values.astype(np.uint8)).view(3, *self.size)

    def grey(self) -> np.ndarray:
        """Pillow's grey, float32 [H * W], in memory that the next call writes into."""
        grey, part = self._grey, self._part
        np.multiply(self.values[0], _GREY[0], out=grey)
        for plane, weight in zip(self.values[1:], _GREY[1:], strict=True):
            np.add(grey, np.multiply(plane, weight, out=part), out=grey)
        np.add(grey, _HALF, out=grey)
        np.multiply(grey, _ONE, out=grey)
        return np.floor(grey, out=grey)

    def blend(self, other: np.ndarray | np.float32, factor: float) -> None:
        """Image.blend(other, image, factor)."""
        np.subtract(self.values, other, out=self.values)
        np.multiply(self.values, np.float32(factor), out=self.values)
        np.add(self.values, other, out=self.values)
        self._cut(factor)

    def scale(self, factor: float) -> None:
        """Image.blend(black, image, factor)."""
        np.multiply(self.values, np.float32(factor), out=self.values)
        self._cut(factor)

    def _cut(self, factor: float) -> None:
        if factor > 1.0:  # else the blend lies between the two
            self._tensor.clamp_(0.0, 255.0)
        np.floor(self.values, out=self.values)


def _contrast(planes: Planes, factor: float) -> None:
    grey = planes.grey()
    # float32 holds sums below 2**24 exactly, in any order.
    exact = torch.float32 if 255 * len(grey) < 2**24 else torch.float64
    total = torch.from_numpy(grey).sum(dtype=exact).item()
    planes.blend(np.float32(int(total / len(grey) + 0.5)), factor)


ADJUST = {
    0: Planes.scale,
    1: _contrast,
    2: lambda planes, factor: planes.blend(planes.grey(), factor),
}
"""ImageEnhance's Brightness, Contrast and Color, by torchvision's numbers for the parts of its ColorJitter."""
