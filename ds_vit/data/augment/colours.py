"""Brightness, contrast and saturation as Pillow's ImageEnhance makes them, bit for bit, on planes of float32.

Pillow's Image.blend computes `a + factor * (b - a)` in float32, clips to [0, 255] and cuts the fraction off; its grey
is an integer. All of these are whole numbers below 2^24, which float32 holds exactly, so that the order of the sums
does not matter.
"""

from __future__ import annotations

import torch

_GREY = ((19595.0, 38470.0, 7471.0),)  # over 2^16: Pillow's conversion to "L" (ITU-R 601-2)


def _grey(image: torch.Tensor) -> torch.Tensor:
    """Pillow's grey of an image [3, H, W]: whole numbers, float32 [1, H, W]."""
    grey = image.new_tensor(_GREY) @ image.flatten(1)
    return grey.add_(32768.0).mul_(1.0 / 65536.0).floor_().view(1, *image.shape[1:])


def _blend(other: torch.Tensor | float, image: torch.Tensor, factor: float) -> None:
    """Image.blend(other, image, factor), in place."""
    image.sub_(other).mul_(factor).add_(other).clamp_(0.0, 255.0).floor_()


def brightness(image: torch.Tensor, factor: float) -> None:
    """ImageEnhance.Brightness on float32 [3, H, W] of whole numbers, in place."""
    image.mul_(factor).clamp_(0.0, 255.0).floor_()


def contrast(image: torch.Tensor, factor: float) -> None:
    """ImageEnhance.Contrast on float32 [3, H, W] of whole numbers, in place."""
    mean = _grey(image).sum(dtype=torch.float64).item() / (image.shape[1] * image.shape[2])
    _blend(float(int(mean + 0.5)), image, factor)


def saturation(image: torch.Tensor, factor: float) -> None:
    """ImageEnhance.Color on float32 [3, H, W] of whole numbers, in place."""
    _blend(_grey(image), image, factor)


ADJUST = {0: brightness, 1: contrast, 2: saturation}
"""By torchvision's numbers for the parts of its ColorJitter."""
