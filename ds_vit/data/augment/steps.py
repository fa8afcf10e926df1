"""The steps of augmentation, each split into a draw and its application.

timm's and torchvision's transforms draw while they change an image. Here each is a function `draw(transform, key)` that
decides everything random from the sample's key and returns the operations to apply, as plain data, and one function
`apply` for all operations, which draws nothing (on_device.py has another one for the training device). Only the crop,
the first step, is a separate pair.

Images are Pillow's. With --decode fast the crop makes a tensor, uint8 [3, H, W], which the operations take too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP, AugmentOp, AugMixAugment, AutoAugment, RandAugment, gaussian_blur_rand
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch.nn.functional import interpolate
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.functional import pil_modes_mapping

from ds_vit.data.augment.colours import COLOURS, adjust_colors, as_image, as_pixels
from ds_vit.data.augment.draws import seeded, uniform
from ds_vit.data.decode import Box, Jpeg

Size = tuple[int, int]
Pixels: TypeAlias = Image.Image | torch.Tensor


# ---- crops -----------------------------------------------------------------------------------------------------------


class RandomResizedCrop:
    """A random part of the image, resized (Szegedy et al. 2015); timm's RandomResizedCropAndInterpolation."""

    def __init__(self, transform: RandomResizedCropAndInterpolation) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> tuple[Box, InterpolationMode]:
        """((top, left, height, width), interpolation), for the sample `key` and an image of `size` (height, width)."""
        transform, modes = self._transform, self._transform.interpolation
        stand_in = torch.empty((1, *size), device="meta")  # timm asks an image for its size only
        with seeded(key, "crop"):
            box = transform.get_params(stand_in, transform.scale, transform.ratio)
            return box, random.choice(modes) if isinstance(modes, tuple) else modes

    def apply(self, image: Image.Image | Jpeg, parameters: tuple[Box, InterpolationMode]) -> Pixels:
        """Of a JPEG file only the box is decoded to a Pillow image, or by --decode fast to a tensor."""
        box, interpolation = parameters
        size = self._transform.size
        if not isinstance(image, Jpeg):
            return F.resized_crop(image, *box, size, interpolation)
        if not image.fast:
            return image.crop(box).resize(size[::-1], pil_modes_mapping[interpolation])
        pixels, scale = image.scaled(box, size)
        if scale == 1 and interpolation.value in ("bilinear", "bicubic"):
            # Contiguous: torch has vector code for such images only.
            part = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
            return interpolate(part, size, mode=interpolation.value, antialias=True)[0].contiguous()
        top, left, height, width = box
        # The box's edges may lie inside of a pixel of the smaller image.
        y, x = top / scale - top // scale, left / scale - left // scale
        smaller = Image.fromarray(pixels)
        inside = (x, y, min(x + width / scale, smaller.width), min(y + height / scale, smaller.height))
        return as_pixels(smaller.resize(size[::-1], pil_modes_mapping[interpolation], inside))


class KeepRatioCrop:
    """The modes rkrc and rkrr: timm's ResizeKeepRatio and its crop or pad, which draw while they change the image."""

    def __init__(self, *transforms_: Callable[[Image.Image], Image.Image]) -> None:
        self._transforms = transforms_

    def draw(self, key: int, size: Size) -> int:
        """The key itself."""
        return key

    def apply(self, image: Image.Image | Jpeg, parameters: int) -> Image.Image:
        """timm's pixels."""
        image = image.image() if isinstance(image, Jpeg) else image
        with seeded(parameters, "crop"):
            for transform in self._transforms:
                image = transform(image)
        return image


# ---- operations ------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One drawn operation: its name, its arguments, and those that only timm's geometric ones have.

    The names are timm's, without those that differ only in how their arguments are drawn (`_SAME`), and hflip, vflip,
    Hue, KernelBlur and AugMix.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it, and it is pickled


def apply(image: Pixels, operations: Iterable[Operation]) -> Pixels:
    """The image after some operations: timm's and torchvision's pixels to the bit."""
    for of_colours, run in itertools.groupby(operations, lambda operation: operation.name in COLOURS):
        together = list(run)
        if of_colours and len(together) > 1:  # to take an image apart for a single one costs more than Pillow's way
            image = adjust_colors(as_pixels(image), [(name, factor) for name, (factor,), _ in together])
            continue
        for name, arguments, keywords in together:
            if name in _OWN:
                image = _OWN[name](image, *arguments)
            else:
                image = NAME_TO_OP[name](as_image(image), *arguments, **keywords)
    return image


def _posterized(image: Pixels, bits: int) -> torch.Tensor:
    # Keeping 0 bits, or fewer beyond magnitude 10, is black. Pillow 13 refuses it, and timm 1.0.31 then fails.
    return as_pixels(image) & (256 - 2 ** (8 - bits) if bits > 0 else 0)


def _solarized(image: Pixels, threshold: int) -> torch.Tensor:
    # Pillow makes a table of 768 Python numbers, which takes longer than a small image.
    pixels = as_pixels(image).numpy()
    return torch.from_numpy(pixels ^ np.negative((pixels >= threshold).view(np.int8)).view(np.uint8))


def _augmixed(image: Pixels, key: int, transform: AugMixAugment) -> Image.Image:
    with seeded(key, "auto augment"):
        return transform(as_image(image))


_OWN: dict[str, Callable[..., Pixels]] = {
    "hflip": F.hflip,
    "vflip": F.vflip,
    "Hue": lambda image, factor: F.adjust_hue(as_image(image), factor),
    "KernelBlur": lambda image, sigma, kernel_size: F.gaussian_blur(image, kernel_size, sigma),
    "Posterize": _posterized,
    "Solarize": _solarized,
    "AugMix": _augmixed,
}


# ---- draws -----------------------------------------------------------------------------------------------------------


@singledispatch
def draw(transform: Any, key: int) -> Sequence[Operation]:
    """The operations that a transform of timm or torchvision does to the sample `key`, in order."""
    raise NotImplementedError(f"timm's factory returned {transform!r}, which has no keyed draw")


@draw.register
def _(transform: transforms.RandomHorizontalFlip, key: int) -> Sequence[Operation]:
    return [Operation("hflip")] if uniform(key, "hflip") < transform.p else []


@draw.register
def _(transform: transforms.RandomVerticalFlip, key: int) -> Sequence[Operation]:
    return [Operation("vflip")] if uniform(key, "vflip") < transform.p else []


@draw.register
def _(transform: transforms.RandomGrayscale, key: int) -> Sequence[Operation]:
    return [Operation("Color", (0.0,))] if uniform(key, "grayscale") < transform.p else []


@draw.register
def _(transform: transforms.RandomApply, key: int) -> Sequence[Operation]:
    (inner,) = transform.transforms
    return draw(inner, key) if uniform(key, f"maybe {type(inner).__name__}") < transform.p else []


@draw.register
def _(transform: transforms.ColorJitter, key: int) -> Sequence[Operation]:
    ranges = transform.brightness, transform.contrast, transform.saturation, transform.hue
    with seeded(key, "color jitter", torch_only=True):
        order, *factors = transform.get_params(*ranges)
    names = ("Brightness", "Contrast", "Color", "Hue")
    return [Operation(names[kind], (factors[kind],)) for kind in order.tolist() if factors[kind] is not None]


@draw.register
def _(transform: transforms.GaussianBlur, key: int) -> Sequence[Operation]:
    with seeded(key, "gaussian blur", torch_only=True):
        return [Operation("KernelBlur", (transform.get_params(*transform.sigma), transform.kernel_size))]


@draw.register
def _(transform: transforms.RandomSolarize, key: int) -> Sequence[Operation]:
    return [Operation("Solarize", (transform.threshold,))] if uniform(key, "solarize") < transform.p else []


class RandomBlur:
    """Pillow's Gaussian blur with a radius (standard deviation in pixels) that is uniform between two.

    Args:
        radius: smallest and largest.
    """

    def __init__(self, radius: tuple[float, float]) -> None:
        self.radius = radius


@draw.register
def _(transform: RandomBlur, key: int) -> Sequence[Operation]:
    low, high = transform.radius
    return [Operation("GaussianBlur", (low + (high - low) * uniform(key, "blur radius"),))]


@draw.register(RandAugment)  # Cubuk et al. 2019
@draw.register(AutoAugment)  # Cubuk et al. 2018; 3-Augment, Touvron et al. 2022
def _(transform: RandAugment | AutoAugment, key: int) -> Sequence[Operation]:
    with seeded(key, "auto augment"):
        return transform(())


@draw.register
def _(transform: AugMixAugment, key: int) -> Sequence[Operation]:  # Hendrycks et al. 2019
    return [Operation("AugMix", (key, transform))]


_SAME = {"PosterizeOriginal": "Posterize", "GaussianBlurRand": "GaussianBlur", "Desaturate": "Color"}


class _Recorder:
    """Replaces the function of a timm AugmentOp: adds the operation to the ones before, which represent the image.

    So the distribution of a policy is timm's by construction, whatever it draws from. An image (of AugMix, which mixes
    images and draws meanwhile) is changed at once.
    """

    def __init__(self, op: AugmentOp) -> None:
        self._name = _SAME.get(op.name, op.name.removesuffix("Increasing"))
        self._function = op.aug_fn
        self._desaturates = op.name == "Desaturate"

    def __call__(self, image: Any, *arguments: Any, **keywords: Any) -> Any:
        # Two kinds of timm's functions draw by themselves: the geometric ones an interpolation, 3-Augment's blur its
        # radius. Both are drawn here, so that nothing is left to draw when the operation is applied.
        if isinstance(keywords.get("resample"), (list, tuple)):
            keywords["resample"] = random.choice(keywords["resample"])
        if self._function is gaussian_blur_rand:
            arguments = (random.uniform(0.1, 2.0 * arguments[0]),)
        if self._desaturates:
            arguments = (min(1.0, max(0.0, 1.0 - arguments[0])),)
        operation = Operation(self._name, arguments, keywords)
        return (*image, operation) if isinstance(image, tuple) else as_image(apply(image, [operation]))


def recording(transform: Any) -> Any:
    """A transform as `draw` needs it: the functions of a timm policy are replaced, so that nothing else may use it."""
    if isinstance(transform, AutoAugment):
        ops = [op for sub_policy in transform.policy for op in sub_policy]
    else:
        ops = transform.ops if isinstance(transform, (RandAugment, AugMixAugment)) else []
    for op in ops:
        op.aug_fn = _Recorder(op)
    return transform
