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

BRIGHTNESS, CONTRAST, SATURATION = range(3)
"""ImageEnhance's Brightness, Contrast and Color, by torchvision's numbers for the parts of its ColorJitter."""

Parameters = Sequence[tuple[int, float]]
"""(BRIGHTNESS, CONTRAST or SATURATION; factor) in the order to apply them."""

_MANY_PIXELS = 64 * 64  # from here on Pillow's way of taking an image apart is the faster one
_GREY = (19595 / 65536, 38470 / 65536, 7471 / 65536)  # Pillow's conversion to "L" (ITU-R 601-2)


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
    return pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels.permute(1, 2, 0).numpy())


@lru_cache(maxsize=4)
def _memory(num_pixels: int) -> tuple[np.ndarray, torch.Tensor, np.ndarray, np.ndarray]:
    """Planes [3, N] twice, a grey [N] and a scratch [N]: new memory for each image takes as long as the arithmetic."""
    planes = np.empty((3, num_pixels), dtype=np.float32)
    return planes, torch.from_numpy(planes), np.empty_like(planes[0]), np.empty_like(planes[0])


def _add_grey(planes: np.ndarray, factor: float, offset: float) -> np.ndarray:
    """The planes' grey times a factor, plus an offset, [N] in memory that the next call overwrites."""
    *_, grey, scratch = _memory(planes.shape[1])
    red, green, blue = (np.float32(factor * weight) for weight in _GREY)
    np.multiply(planes[0], red, out=grey)
    grey += np.multiply(planes[1], green, out=scratch)
    grey += np.multiply(planes[2], blue, out=scratch)
    grey += np.float32(offset)
    return grey


def adjust_colors(pixels: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """What ImageEnhance makes of an image, uint8 [3, H, W], the same bits."""
    planes, values, *_ = _memory(pixels.shape[1] * pixels.shape[2])
    np.copyto(planes, pixels.numpy().reshape(3, -1))
    for number, (kind, factor) in enumerate(parameters):
        if number:
            np.floor(planes, out=planes)  # after the last part, the conversion to uint8 does it
        if kind == BRIGHTNESS:
            planes *= np.float32(factor)
        else:
            grey = _add_grey(planes, 1.0, 0.5)
            np.floor(grey, out=grey)
            other = _mean(grey) if kind == CONTRAST else grey
            planes -= other
            planes *= np.float32(factor)
            planes += other
        if factor > 1.0:  # else the blend lies between the two
            values.clamp_(0.0, 255.0)
    return torch.from_numpy(planes.astype(np.uint8)).view(pixels.shape)


def _mean(grey: np.ndarray) -> np.float32:
    """Pillow's mean of a grey."""
    # float32 holds sums below 2**24 exactly, in any order.
    exact = torch.float32 if 255 * grey.size < 2**24 else torch.float64
    return np.float32(int(torch.from_numpy(grey).sum(dtype=exact).item() / grey.size + 0.5))


def nearly_adjust_colors(pixels: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """`adjust_colors` up to a grey level or two, in half the time: fractions are not cut off in between.

    Each part is linear unless it clips, and only a factor above 1 can. Parts that do not are collected and applied at
    once: `scale` times the values, plus `grey` times their grey, plus `offset`.
    """
    planes, values, *_ = _memory(pixels.shape[1] * pixels.shape[2])
    np.copyto(planes, pixels.numpy().reshape(3, -1))
    last = len(parameters) - 1
    scale, grey, offset = 1.0, 0.0, 0.0
    for number, (kind, factor) in enumerate(parameters):
        rest = 1.0 - factor
        other = offset if kind == SATURATION else 0.0
        if kind == CONTRAST:
            sums = values.sum(dim=1).tolist()
            mean = sum(weight * total for weight, total in zip(_GREY, sums, strict=True)) / planes.shape[1]
            other = (scale + grey) * mean + offset
        grey = factor * grey + (rest * (scale + grey) if kind == SATURATION else 0.0)
        # Cutting off fractions between parts takes 0.5 on average.
        offset = factor * offset + rest * other - (0.5 if number < last else 0.0)
        scale *= factor
        if factor > 1.0 or number == last:
            added = _add_grey(planes, grey, offset) if grey else np.float32(offset)
            planes *= np.float32(scale)
            planes += added
            values.clamp_(0.0, 255.0)
            scale, grey, offset = 1.0, 0.0, 0.0
    return torch.from_numpy(planes.astype(np.uint8)).view(pixels.shape)
