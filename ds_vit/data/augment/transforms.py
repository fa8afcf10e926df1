"""From a decoded image to the uint8 pixels of a batch: the training and evaluation transforms.

timm's factory decides what the flags mean; steps.py splits the transforms that it returns into draws and operations.
Normalisation, erasing and mixing follow on the batch (fields.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import MaybePILToTensor, ResizeKeepRatio
from torchvision import transforms

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import (
    KeepRatioCrop,
    Operation,
    RandomResizedCrop,
    Size,
    apply,
    as_pixels,
    draw,
    recording,
)
from ds_vit.data.decode import Jpeg
from ds_vit.data.settings import ImageConfig
from ds_vit.fault_tolerance.errors import UserError

_NAMED_AS_IN_TIMM = ["scale", "ratio", "hflip", "vflip", "color_jitter_prob", "grayscale_prob", "gaussian_blur_prob"]


class TrainTransform:
    """The random steps of training, in timm's order, ending in uint8 [3, H, W].

    Args:
        crop: the first step, which brings every image to the model's size.
        transforms_: timm's for the others.

    Attributes:
        cuts: whether an image is only cut, for the device to do the rest (on_device.py).
    """

    cuts = False

    def __init__(self, crop: RandomResizedCrop | KeepRatioCrop, transforms_: Sequence[Any]) -> None:
        self.crop = crop
        self.transforms = [recording(transform) for transform in transforms_]

    def draw(self, key: int, size: Size) -> tuple[Any, list[Operation]]:
        """The crop's parameters and the operations, for the sample `key` and a decoded image of `size`."""
        operations = [operation for transform in self.transforms for operation in draw(transform, key)]
        return self.crop.draw(key, size), operations

    def __call__(self, image: Image.Image | Jpeg, key: int) -> torch.Tensor:
        """The augmented pixels of an RGB image, uint8 [3, H, W]: a pure function of the image and the sample's key."""
        crop, operations = self.draw(key, (image.height, image.width))
        return as_pixels(apply(self.crop.apply(image, crop), operations))


class FixedTransform:
    """A transform without randomness, ending in uint8 [3, H, W]: evaluation's, and training's under --no-aug."""

    cuts = False

    def __init__(self, image: ImageConfig, **options: Any) -> None:
        """Args: size and interpolation; further options of timm's factory."""
        shape = (3, *image.img_size)
        self._transform = create_transform(shape, interpolation=image.interpolation, use_prefetcher=True, **options)

    def box(self, size: Size) -> tuple[float, float, float, float]:
        """The part of an image of `size` that is in the result: (top, left, height, width)."""
        resize, crop = self._transform.transforms[:2]
        resized = resize(torch.empty((3, *size), device="meta")).shape[1:]
        scale = [before / after for before, after in zip(size, resized, strict=True)]
        first = [round((length - kept) / 2) for length, kept in zip(resized, crop.size, strict=True)]
        return first[0] * scale[0], first[1] * scale[1], crop.size[0] * scale[0], crop.size[1] * scale[1]

    def __call__(self, image: Image.Image | Jpeg, key: int) -> torch.Tensor:
        """The pixels of an RGB image, uint8 [3, H, W]; the key is not used."""
        return self._transform(image.image() if isinstance(image, Jpeg) else image)


def train_transform(image: ImageConfig, augment: AugmentConfig) -> TrainTransform | FixedTransform:
    """The transform of training images that timm's flags in `augment` mean.

    Raises:
        UserError: --gaussian-blur-prob on images smaller than the blur's kernel.
    """
    if augment.no_aug:
        return FixedTransform(image, is_training=True, no_aug=True)
    primary, secondary, final = create_transform(
        (3, *image.img_size),
        is_training=True,
        train_crop_mode=augment.train_crop_mode or None,
        color_jitter=augment.color_jitter or None,
        auto_augment=augment.aa or None,
        interpolation=augment.train_interpolation,
        mean=image.mean,
        std=image.std,
        use_prefetcher=True,
        separate=True,
        **{name: getattr(augment, name) for name in _NAMED_AS_IN_TIMM},
    )
    assert [type(t) for t in final.transforms] == [MaybePILToTensor], final
    others: list[Any] = [*primary.transforms, *secondary.transforms]
    first = others.pop(0)
    # The modes rkrc and rkrr begin with two transforms: a resize, then a crop or pad.
    crop = KeepRatioCrop(first, others.pop(0)) if isinstance(first, ResizeKeepRatio) else RandomResizedCrop(first)
    if augment.gaussian_blur_prob:
        _require_room_for_blur(others, image.img_size)
    return TrainTransform(crop, others)


def eval_transform(image: ImageConfig) -> FixedTransform:
    """timm's evaluation transform: resize so that `crop_pct` of the edge is kept, crop the centre."""
    return FixedTransform(image, mean=image.mean, crop_pct=image.crop_pct, crop_mode=image.crop_mode)


def _require_room_for_blur(transforms_: Sequence[Any], img_size: Size) -> None:
    for transform in transforms_:
        inner = transform.transforms[0] if isinstance(transform, transforms.RandomApply) else None
        if isinstance(inner, transforms.GaussianBlur) and min(img_size) <= (kernel := max(inner.kernel_size)) // 2:
            needed = f"needs images of at least {kernel // 2 + 1} pixels, not {img_size[0]}x{img_size[1]}"
            raise UserError(f"--gaussian-blur-prob: timm's blur has a kernel of {kernel} pixels and {needed}")
