"""The steps of augmentation, each split into a draw and its application.

A step is two functions: `draw(key, size)` decides everything that is random, from the sample's key and the image's
size, and `apply(image, parameters)` does it, drawing nothing. `parameters` is plain data, None where the step
leaves the image as it is. Each step adapts one transform of timm or torchvision, whose functions draw and apply.

Images are Pillow's. With --decode fast the first step makes a tensor, uint8 [3, H, W], which the others take too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

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

from ds_vit.data.augment.colours import adjust_colors, as_image, as_pixels
from ds_vit.data.augment.draws import seeded, uniform
from ds_vit.data.decode import Box, Jpeg

Size = tuple[int, int]
Pixels: TypeAlias = Image.Image | torch.Tensor


class Step(Protocol):
    """One random step of augmentation."""

    def draw(self, key: int, size: Size) -> Any:
        """The step's parameters for the sample `key` and an image of `size` (height, width); None for no change."""

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        """The image after the step; `parameters` are not None."""


# ---- crops -----------------------------------------------------------------------------------------------------------


class RandomResizedCrop:
    """A random part of the image, resized (Szegedy et al. 2015); timm's RandomResizedCropAndInterpolation."""

    def __init__(self, transform: RandomResizedCropAndInterpolation) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> tuple[Box, InterpolationMode]:
        """((top, left, height, width), interpolation)."""
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


class WholeTransform:
    """Transforms of timm that draw while they change the image: from the sample's key, when they are applied.

    Args:
        name: of the draw.
        transforms_: done one after the other.
    """

    def __init__(self, name: str, *transforms_: Callable[[Image.Image], Image.Image]) -> None:
        self._name = name
        self._transforms = transforms_

    def draw(self, key: int, size: Size) -> int:
        """The key itself."""
        return key

    def apply(self, image: Pixels | Jpeg, parameters: int) -> Image.Image:
        image = image.image() if isinstance(image, Jpeg) else as_image(image)
        with seeded(parameters, self._name):
            for transform in self._transforms:
                image = transform(image)
        return image


# ---- flips, colours and blur -----------------------------------------------------------------------------------------


class Maybe:
    """A function of the image without parameters, done with a probability."""

    def __init__(self, name: str, probability: float, function: Callable[[Any], Any]) -> None:
        self.name = name
        self._probability = probability
        self._function = function

    def draw(self, key: int, size: Size) -> bool | None:
        """True or None."""
        return True if uniform(key, self.name) < self._probability else None

    def apply(self, image: Pixels, parameters: bool) -> Pixels:
        return self._function(image)


def _to_grayscale(image: Pixels) -> Image.Image:
    return F.rgb_to_grayscale(as_image(image), num_output_channels=3)  # of a tensor it would round otherwise


class MaybeStep:
    """Another step, done with a probability: torchvision's RandomApply of one transform."""

    def __init__(self, transform: transforms.RandomApply) -> None:
        (inner,) = transform.transforms
        self._name = f"maybe {type(inner).__name__}"
        self._probability = transform.p
        self.step = step_of(inner)

    def draw(self, key: int, size: Size) -> Any:
        """The other step's parameters or None."""
        return self.step.draw(key, size) if uniform(key, self._name) < self._probability else None

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        return self.step.apply(image, parameters)


class ColorJitter:
    """Brightness, contrast, saturation and hue in random order by random factors; torchvision's ColorJitter."""

    _ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)

    def __init__(self, transform: transforms.ColorJitter) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> list[tuple[int, float]] | None:
        """[(0 to 3 for brightness, contrast, saturation, hue; factor), ...] in the order to apply them."""
        transform = self._transform
        with seeded(key, "color jitter", torch_only=True):
            order, *factors = transform.get_params(
                transform.brightness, transform.contrast, transform.saturation, transform.hue
            )
        return [(kind, factors[kind]) for kind in order.tolist() if factors[kind] is not None] or None

    def apply(self, image: Pixels, parameters: list[tuple[int, float]]) -> Pixels:
        """Torchvision's pixels."""
        if self._transform.hue is None:
            return adjust_colors(as_pixels(image), parameters)
        image = as_image(image)
        for kind, factor in parameters:
            image = self._ADJUST[kind](image, factor)
        return image


class GaussianBlur:
    """torchvision's GaussianBlur."""

    def __init__(self, transform: transforms.GaussianBlur) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> float:
        """The kernel's standard deviation in pixels."""
        with seeded(key, "gaussian blur", torch_only=True):
            return self._transform.get_params(*self._transform.sigma)

    def apply(self, image: Pixels, parameters: float) -> Pixels:
        return F.gaussian_blur(image, self._transform.kernel_size, [parameters, parameters])


# ---- policies --------------------------------------------------------------------------------------------------------
#
# timm's policies draw while they change the image. Here timm's own policy object runs at draw time on an image of one
# pixel, with the function of each of its operations replaced by a recorder; what was recorded is applied later, by
# timm's functions. So the distribution is timm's by construction, whatever it draws from.


def _posterized(pixels: np.ndarray, bits: int) -> np.ndarray:
    # Keeping 0 bits, or fewer beyond magnitude 10, is black. Pillow 13 refuses it, and timm 1.0.31 then fails.
    return pixels & np.uint8(256 - 2 ** (8 - bits) if bits > 0 else 0)


def _solarized(pixels: np.ndarray, threshold: int) -> np.ndarray:
    # Pillow makes a table of 768 Python numbers, which takes longer than a small image.
    return pixels ^ np.negative((pixels >= threshold).view(np.int8)).view(np.uint8)


_ON_ARRAYS: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(("Posterize", "PosterizeIncreasing", "PosterizeOriginal"), _posterized),
    **dict.fromkeys(("Solarize", "SolarizeIncreasing"), _solarized),
}


class Operation(NamedTuple):
    """One drawn operation: timm's name of it, its arguments, and those that only geometric ones have."""

    name: str
    arguments: tuple[float, ...]
    keywords: dict[str, Any]

    def apply(self, image: Image.Image) -> Image.Image:
        """Run timm's function of the name, or one that gives the same bits in less time."""
        if self.name in _ON_ARRAYS:
            return Image.fromarray(_ON_ARRAYS[self.name](np.asarray(image), *self.arguments))
        return NAME_TO_OP[self.name](image, *self.arguments, **self.keywords)


Note = Callable[[Operation, Image.Image], Image.Image]


class _Recorder:
    """Replaces the function of a timm AugmentOp and notes its call: `note` gives the image that follows."""

    def __init__(self, op: AugmentOp, note: Note) -> None:
        self._name = op.name
        self._draws_radius = op.aug_fn is gaussian_blur_rand
        self._note = note

    def __call__(self, image: Image.Image, *arguments: float, **keywords: Any) -> Image.Image:
        # Two kinds of timm's functions draw by themselves: the geometric ones an interpolation, 3-Augment's blur its
        # radius. Both are drawn here, so that nothing is left to draw when the operation is applied.
        if isinstance(keywords.get("resample"), (list, tuple)):
            keywords["resample"] = random.choice(keywords["resample"])
        if self._draws_radius:
            return self._note(Operation("GaussianBlur", (random.uniform(0.1, 2.0 * arguments[0]),), {}), image)
        return self._note(Operation(self._name, arguments, keywords), image)


def _record(ops: Sequence[AugmentOp], note: Note) -> None:
    for op in ops:
        op.aug_fn = _Recorder(op, note)


class Policy:
    """timm's RandAugment (Cubuk et al. 2019) or AutoAugment (Cubuk et al. 2018; 3-Augment, Touvron et al. 2022).

    Args:
        transform: the policy, which must not be used elsewhere afterwards.
    """

    def __init__(self, transform: RandAugment | AutoAugment) -> None:
        self._transform = transform
        self._drawn: list[Operation] = []
        self._pixel = Image.new("RGB", (1, 1))
        ops = transform.ops if isinstance(transform, RandAugment) else [op for sub in transform.policy for op in sub]
        _record(ops, self._note)

    def _note(self, operation: Operation, image: Image.Image) -> Image.Image:
        self._drawn.append(operation)
        return image

    def draw(self, key: int, size: Size) -> list[Operation] | None:
        """The operations to apply, in order."""
        self._drawn = []
        with seeded(key, "auto augment"):
            self._transform(self._pixel)
        return self._drawn or None

    def apply(self, image: Pixels, parameters: list[Operation]) -> Image.Image:
        image = as_image(image)
        for operation in parameters:
            image = operation.apply(image)
        return image


def augmix(transform: AugMixAugment) -> WholeTransform:
    """The step of timm's AugMix (Hendrycks et al. 2019), whose operations draw as those of `Policy`."""
    _record(transform.ops, Operation.apply)
    return WholeTransform("auto augment", transform)


# ---- adapters --------------------------------------------------------------------------------------------------------

_ADAPTERS: tuple[tuple[Any, Callable[[Any], Step]], ...] = (
    (RandomResizedCropAndInterpolation, RandomResizedCrop),
    (transforms.RandomHorizontalFlip, lambda transform: Maybe("hflip", transform.p, F.hflip)),
    (transforms.RandomVerticalFlip, lambda transform: Maybe("vflip", transform.p, F.vflip)),
    (transforms.RandomGrayscale, lambda transform: Maybe("grayscale", transform.p, _to_grayscale)),
    (transforms.RandomApply, MaybeStep),
    ((RandAugment, AutoAugment), Policy),
    (AugMixAugment, augmix),
    (transforms.ColorJitter, ColorJitter),
    (transforms.GaussianBlur, GaussianBlur),
)


def step_of(transform: Any) -> Step:
    """The step that does what a transform of timm or torchvision does."""
    for kind, adapter in _ADAPTERS:
        if isinstance(transform, kind):
            return adapter(transform)
    raise NotImplementedError(f"timm's factory returned {transform!r}, which has no keyed step")
