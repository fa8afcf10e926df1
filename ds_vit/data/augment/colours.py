"""Brightness, contrast and saturation as Pillow's ImageEnhance makes them, in less than half of its time.

Pillow's Image.blend computes `a + factor * (b - a)` in float32, clips to [0, 255] and cuts the fraction off; its grey
is an integer. All sums behind a grey are whole multiples of 2^-16 below 2^8, which float32 holds exactly, so that
their order does not matter, nor whether products are rounded. NumPy begins an operation in a third of torch's time;
torch limits and sums up values faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from PIL import Image

COLOURS = ("Brightness", "Contrast", "Color")
"""ImageEnhance's names for what torchvision's ColorJitter calls brightness, contrast and saturation."""

_MANY_PIXELS = 64 * 64  # from here on Pillow's way of taking an image apart is the faster one
_RED, _GREEN, _BLUE = np.array([19595, 38470, 7471], dtype=np.float32) / np.float32(65536)  # Pillow's "L" (ITU-R 601-2)
_HALF = np.float32(0.5)


def as_pixels(image: Image.Image | torch.Tensor) -> torch.Tensor:
    """An RGB image's pixels, uint8 [3, H, W], contiguous (torchvision's pil_to_tensor gives a strided view)."""
    if isinstance(image, torch.Tensor):
        return image
    planes = np.empty((3, image.height * image.width), dtype=np.uint8)
    if planes.shape[1] < _MANY_PIXELS:
        np.copyto(planes, np.frombuffer(image.tobytes(), dtype=np.uint8).reshape(-1, 3).T)
    else:
        for plane, name in zip(planes, "RGB", strict=True):
            plane[:] = np.frombuffer(image.tobytes("raw", name), dtype=np.uint8)
    return torch.from_numpy(planes).view(3, image.height, image.width)


def as_image(pixels: Image.Image | torch.Tensor) -> Image.Image:
    """The RGB image of pixels, uint8 [3, H, W]."""
    if isinstance(pixels, Image.Image):
        return pixels
    return Image.merge("RGB", [Image.fromarray(plane) for plane in pixels.numpy()])  # a strided copy takes 15 times it


@lru_cache(maxsize=4)
def _memory(num_pixels: int) -> tuple[np.ndarray, torch.Tensor, np.ndarray, np.ndarray]:
    """Planes [3, N] twice, a grey [N] and a scratch [N]: new memory for each image takes as long as the arithmetic."""
    planes = np.empty((3, num_pixels), dtype=np.float32)
    return planes, torch.from_numpy(planes), np.empty_like(planes[0]), np.empty_like(planes[0])


def adjust_colors(pixels: torch.Tensor, parameters: Sequence[tuple[str, float]]) -> torch.Tensor:
    """The result of ImageEnhance to the bit.

    Args:
        pixels: uint8 [3, H, W].
        parameters: (one of `COLOURS`, factor) in the order to apply them.
    """
    _, height, width = pixels.shape
    planes, values, grey, scratch = _memory(height * width)
    np.copyto(planes, pixels.numpy().reshape(3, -1))
    for number, (kind, factor) in enumerate(parameters):
        if number:
            np.floor(planes, out=planes)  # after the last part, the conversion to uint8 does it
        if kind == "Brightness":
            planes *= np.float32(factor)
        else:
            np.multiply(planes[0], _RED, out=grey)
            grey += np.multiply(planes[1], _GREEN, out=scratch)
            grey += np.multiply(planes[2], _BLUE, out=scratch)
            grey += _HALF
            np.floor(grey, out=grey)
            other = _mean(grey) if kind == "Contrast" else grey
            planes -= other
            planes *= np.float32(factor)
            planes += other
        if factor > 1.0:  # else the blend lies between the two
            values.clamp_(0.0, 255.0)
    return torch.from_numpy(planes.astype(np.uint8)).view(3, height, width)


def _mean(grey: np.ndarray) -> np.float32:
    """Pillow's mean of a grey."""
    # float32 holds sums below 2**24 exactly, in any order.
    exact = torch.float32 if 255 * grey.size < 2**24 else torch.float64
    return np.float32(int(torch.from_numpy(grey).sum(dtype=exact).item() / grey.size + 0.5))
