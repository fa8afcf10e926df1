"""Brightness, contrast and saturation as Pillow's ImageEnhance makes them, bit for bit, on planes of float32.

Pillow's Image.blend computes `a + factor * (b - a)` in float32, clips to [0, 255] and cuts the fraction off; its grey
is an integer. All of these are whole numbers below 2^24, which float32 holds exactly, so that the order of the sums
does not matter.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

_GREY = (19595.0, 38470.0, 7471.0)  # over 2^16: Pillow's conversion to "L" (ITU-R 601-2)


class Planes:
    """The pixels of one image after another, whole numbers in float32, in memory that is taken once.

    New memory for each image would take as long as the arithmetic.

    Attributes:
        size: (height, width).
        values: float32 [3, H * W].
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self.values = torch.empty(3, size[0] * size[1])
        self._grey = torch.empty(1, size[0] * size[1])

    def load(self, image: Image.Image) -> None:
        """Take up an RGB image of this size."""
        self.values.view(3, *self.size).copy_(torch.from_numpy(np.array(image)).permute(2, 0, 1))

    def pixels(self) -> torch.Tensor:
        """uint8 [3, H, W], in memory of its own."""
        return self.values.to(torch.uint8).view(3, *self.size)

    def grey(self) -> torch.Tensor:
        """Pillow's grey, float32 [1, H * W]."""
        red, green, blue = self.values
        grey = self._grey[0]
        # Whole numbers below 2**24: exact in any order, which a matrix product under --tf32 would not be.
        torch.mul(red, _GREY[0], out=grey).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
        return self._grey.add_(32768.0).mul_(1.0 / 65536.0).floor_()

    def blend(self, other: torch.Tensor | float, factor: float) -> None:
        """Image.blend(other, image, factor)."""
        self._cut(self.values.sub_(other).mul_(factor).add_(other), factor)

    def scale(self, factor: float) -> None:
        """Image.blend(black, image, factor)."""
        self._cut(self.values.mul_(factor), factor)

    def _cut(self, values: torch.Tensor, factor: float) -> None:
        if factor > 1.0:  # else the blend lies between the two
            values.clamp_(0.0, 255.0)
        values.floor_()


def _contrast(planes: Planes, factor: float) -> None:
    mean = planes.grey().sum(dtype=torch.float64).item() / planes.values.shape[1]
    planes.blend(float(int(mean + 0.5)), factor)


ADJUST = {
    0: Planes.scale,
    1: _contrast,
    2: lambda planes, factor: planes.blend(planes.grey(), factor),
}
"""ImageEnhance's Brightness, Contrast and Color, by torchvision's numbers for the parts of its ColorJitter."""
