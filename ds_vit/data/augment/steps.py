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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, singledispatch
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

from ds_vit import randomness
from ds_vit.data.decode import Box, Jpeg

Size = tuple[int, int]
Pixels: TypeAlias = Image.Image | torch.Tensor


# ---- the keys of draws -----------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def uniform(key: int, name: str) -> float:
    """One uniform draw in [0, 1) with 53 random bits, a pure function of (key, name)."""
    return ((randomness.mix(key, randomness.name_key(name)) & _MASK) >> 11) * 2.0**-53


@contextmanager
def shielded() -> Iterator[None]:
    """Leave the global generators of `random`, NumPy and torch (CPU) as they were on entry.

    Saving and restoring them costs more than most draws, so that one shield is around all draws of a batch.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(key: int, name: str, *, torch_only: bool = False) -> None:
    """Let the global generators of `random`, NumPy and torch (CPU) be pure functions of (key, name); in `shielded`.

    All three, whichever a library is known to use: a change there must not make a draw depend on the process.

    Args:
        key: of the sample.
        name: of the draw.
        torch_only: seed torch's generator only: torchvision asks no other one, as a test verifies, and seeding `random`
            takes as long as the draws themselves.
    """
    seed = randomness.mix(key, randomness.name_key(name)) & _MASK
    torch.default_generator.manual_seed(seed)
    if not torch_only:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


# ---- crops -----------------------------------------------------------------------------------------------------------


class RandomResizedCrop:
    """A random part of the image, resized (Szegedy et al. 2015); timm's RandomResizedCropAndInterpolation."""

    def __init__(self, transform: RandomResizedCropAndInterpolation) -> None:
        self._transform = transform

    def draw(self, key: int, size: Size) -> tuple[Box, InterpolationMode]:
        """((top, left, height, width), interpolation), for the sample `key` and an image of `size` (height, width)."""
        transform, modes = self._transform, self._transform.interpolation
        stand_in = torch.empty((1, *size), device="meta")  # timm asks an image for its size only
        seed_generators(key, "crop")
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
        seed_generators(parameters, "crop")
        for transform in self._transforms:
            image = transform(image)
        return image


# ---- brightness, contrast and saturation -----------------------------------------------------------------------------

# As Pillow's ImageEnhance makes them, in less than half of its time. Pillow's Image.blend computes `a + factor * (b -
# a)` in float32, clips to [0, 255] and cuts the fraction off; its grey is an integer. All sums behind a grey are
# whole multiples of 2^-16 below 2^8, which float32 holds exactly, so that their order does not matter, nor whether
# products are rounded. NumPy begins an operation in a third of torch's time; torch limits and sums up values faster.

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
    seed_generators(key, "auto augment")
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
    seed_generators(key, "color jitter", torch_only=True)
    order, *factors = transform.get_params(*ranges)
    names = ("Brightness", "Contrast", "Color", "Hue")
    return [Operation(names[kind], (factors[kind],)) for kind in order.tolist() if factors[kind] is not None]


@draw.register
def _(transform: transforms.GaussianBlur, key: int) -> Sequence[Operation]:
    seed_generators(key, "gaussian blur", torch_only=True)
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
    seed_generators(key, "auto augment")
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
