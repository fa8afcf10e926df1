"""The steps of augmentation that move pixels and change colours.

A step is two functions: `draw(key, size)` decides everything that is random, from the sample's key and the image's
size alone, and `apply(image, parameters)` does it, drawing nothing. `parameters` is plain data, None where the step
leaves the image as it is. Each step adapts one transform of timm or torchvision: its own functions draw and apply.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import (
    CenterCropOrPad,
    RandomCropOrPad,
    RandomResizedCropAndInterpolation,
    ResizeKeepRatio,
    crop_or_pad,
)
from torch.nn.functional import interpolate
from torchvision import transforms
from torchvision.transforms import functional as F
from torchvision.transforms.functional import pil_modes_mapping

from ds_vit.data.augment.colours import Planes, pixels_of
from ds_vit.data.augment.draws import seeded, uniform
from ds_vit.data.decode import Jpeg

Size = tuple[int, int]


class Step(Protocol):
    """One random step of augmentation."""

    def draw(self, key: int, size: Size) -> Any:
        """The step's parameters for the sample `key` and an image of `size` (height, width); None for no change."""

    def apply(self, image: Image.Image, parameters: Any) -> Image.Image:
        """The image after the step; `parameters` are not None."""


class PlaneStep(Step, Protocol):
    """A step that can do without Pillow."""

    @property
    def takes_planes(self) -> bool:
        """Whether it can, with its settings."""

    def planes(self, pixels: torch.Tensor, parameters: Any, exact: bool) -> torch.Tensor:
        """`apply` of uint8 [3, H, W]; the same bits if `exact`."""


def on_planes(step: Step) -> TypeGuard[PlaneStep]:
    """Whether a step can do without Pillow."""
    return isinstance(step, Maybe | ColorJitter) and step.takes_planes


def _stand_in(size: Size) -> torch.Tensor:
    """Something of this size without pixels, for library functions that ask an image for its size alone."""
    return torch.empty((1, *size), device="meta")


class RandomResizedCrop:
    """A random part of the image, resized (Szegedy et al. 2015); timm's RandomResizedCropAndInterpolation."""

    def __init__(self, transform: RandomResizedCropAndInterpolation) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> tuple[tuple[int, int, int, int], transforms.InterpolationMode]:
        """((top, left, height, width), interpolation)."""
        transform = self._transform
        with seeded(key, "crop"):
            box = transform.get_params(_stand_in(size), transform.scale, transform.ratio)
            return box, _choose(transform.interpolation)

    def apply(
        self, image: Image.Image | Jpeg, parameters: tuple[tuple[int, int, int, int], transforms.InterpolationMode]
    ) -> Image.Image:
        """Of a JPEG file only the box becomes a Pillow image."""
        box, interpolation = parameters
        size = self._transform.size
        if isinstance(image, Jpeg):
            return image.crop(box).resize(size[::-1], pil_modes_mapping[interpolation])
        return F.resized_crop(image, *box, size, interpolation)

    def nearly(
        self, image: Jpeg, parameters: tuple[tuple[int, int, int, int], transforms.InterpolationMode]
    ) -> torch.Tensor:
        """`apply` as --decode fast allows it: uint8 [3, H, W]."""
        box, interpolation = parameters
        size = self._transform.size
        pixels, scale = image.scaled(box, size)
        if scale == 1 and interpolation.value in ("bilinear", "bicubic"):
            # Without gaps between its rows: torch has vector code for such images alone.
            part = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
            return interpolate(part, size, mode=interpolation.value, antialias=True)[0].contiguous()
        top, left, height, width = box
        # The box's edges may lie inside of a pixel of the smaller image.
        y, x = top / scale - top // scale, left / scale - left // scale
        part = Image.fromarray(pixels)
        inside = (x, y, min(x + width / scale, part.width), min(y + height / scale, part.height))
        return pixels_of(part.resize(size[::-1], pil_modes_mapping[interpolation], inside))


class ResizeAndCrop:
    """A resize that keeps the aspect ratio up to a jitter, then a crop or pad to size: timm's modes rkrc and rkrr."""

    def __init__(self, resize: ResizeKeepRatio, crop: CenterCropOrPad | RandomCropOrPad) -> None:
        self._resize = resize
        self._crop = crop

    def draw(self, key: int, size: Size) -> tuple[list[int], transforms.InterpolationMode, tuple[int, int] | None]:
        """(height and width to resize to, interpolation, top and left of the crop or None for the centre)."""
        resize = self._resize
        with seeded(key, "crop"):
            resized = resize.get_params(
                _stand_in(size),
                resize.size,
                resize.longest,
                resize.random_scale_prob,
                resize.random_scale_range,
                resize.random_scale_area,
                resize.random_aspect_prob,
                resize.random_aspect_range,
            )
            interpolation = _choose(resize.interpolation)
            corner = None
            if isinstance(self._crop, RandomCropOrPad):
                corner = self._crop.get_params(_stand_in((resized[0], resized[1])), self._crop.size)
            return resized, interpolation, corner

    def apply(
        self,
        image: Image.Image,
        parameters: tuple[list[int], transforms.InterpolationMode, tuple[int, int] | None],
    ) -> Image.Image:
        resized, interpolation, corner = parameters
        image = F.resize(image, resized, interpolation)
        if corner is None:
            return self._crop(image)
        return crop_or_pad(image, *corner, *self._crop.size, fill=self._crop.fill, padding_mode=self._crop.padding_mode)


def _choose(
    interpolation: transforms.InterpolationMode | tuple[transforms.InterpolationMode, ...],
) -> transforms.InterpolationMode:
    """One of timm's "random" interpolations; nothing is drawn where it is fixed."""
    return random.choice(interpolation) if isinstance(interpolation, tuple) else interpolation


class Maybe:
    """A function of the image without parameters, done with a probability."""

    def __init__(self, name: str, probability: float, function: Callable[[Any], Any]) -> None:
        self.name = name
        self._probability = probability
        self._function = function

    def draw(self, key: int, size: Size) -> bool | None:
        """True or None."""
        return True if uniform(key, self.name) < self._probability else None

    def apply(self, image: Image.Image, parameters: bool) -> Image.Image:
        return self._function(image)

    @property
    def takes_planes(self) -> bool:
        """Flips do."""
        return self._function in (F.hflip, F.vflip)

    def planes(self, pixels: torch.Tensor, parameters: bool, exact: bool) -> torch.Tensor:
        """`apply`, the same bits."""
        return self._function(pixels)


def maybe_step(transform: torch.nn.Module) -> Maybe:
    """The step of torchvision's RandomHorizontalFlip, RandomVerticalFlip or RandomGrayscale."""
    if isinstance(transform, transforms.RandomHorizontalFlip):
        return Maybe("hflip", transform.p, F.hflip)
    if isinstance(transform, transforms.RandomVerticalFlip):
        return Maybe("vflip", transform.p, F.vflip)
    assert isinstance(transform, transforms.RandomGrayscale), transform
    return Maybe("grayscale", transform.p, partial(F.rgb_to_grayscale, num_output_channels=3))


class MaybeStep:
    """Another step, done with a probability: torchvision's RandomApply of one transform."""

    def __init__(self, name: str, probability: float, step: Step) -> None:
        self._name = name
        self._probability = probability
        self.step = step

    def draw(self, key: int, size: Size) -> Any:
        """The other step's parameters or None."""
        return self.step.draw(key, size) if uniform(key, self._name) < self._probability else None

    def apply(self, image: Image.Image, parameters: Any) -> Image.Image:
        return self.step.apply(image, parameters)


class ColorJitter:
    """Brightness, contrast, saturation and hue in random order by random factors; torchvision's ColorJitter."""

    _ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)

    def __init__(self, transform: transforms.ColorJitter) -> None:
        self._transform = transform
        self._planes: Planes | None = None

    def draw(self, key: int, size: Size) -> list[tuple[int, float]] | None:
        """[(0 to 3 for brightness, contrast, saturation, hue; factor), ...] in the order to apply them."""
        transform = self._transform
        with seeded(key, "color jitter", torch_alone=True):
            order, *factors = transform.get_params(
                transform.brightness, transform.contrast, transform.saturation, transform.hue
            )
        return [(kind, factors[kind]) for kind in order.tolist() if factors[kind] is not None] or None

    def apply(self, image: Image.Image, parameters: list[tuple[int, float]]) -> Image.Image:
        for kind, factor in parameters:
            image = self._ADJUST[kind](image, factor)
        return image

    @property
    def takes_planes(self) -> bool:
        """Not with hue."""
        return self._transform.hue is None

    def planes(self, pixels: torch.Tensor, parameters: list[tuple[int, float]], exact: bool) -> torch.Tensor:
        """`apply` in less than half of Pillow's time; nearly so if not `exact`."""
        size = (pixels.shape[1], pixels.shape[2])
        if self._planes is None or self._planes.size != size:
            self._planes = Planes(size)
        return (self._planes.adjusted if exact else self._planes.nearly_adjusted)(pixels, parameters)


class GaussianBlur:
    """torchvision's GaussianBlur."""

    def __init__(self, transform: transforms.GaussianBlur) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> float:
        """The kernel's standard deviation in pixels."""
        with seeded(key, "gaussian blur", torch_alone=True):
            return self._transform.get_params(*self._transform.sigma)

    def apply(self, image: Image.Image, parameters: float) -> Image.Image:
        return F.gaussian_blur(image, self._transform.kernel_size, [parameters, parameters])
