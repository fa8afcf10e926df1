"""From a decoded image to the uint8 pixels of a batch: the training and evaluation transforms.

timm's factory decides what the flags mean; each transform that it returns is adapted to a step with a draw and an
application (steps.py). Normalisation, erasing and mixing follow on the batch (device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import MaybePILToTensor, ResizeKeepRatio
from torchvision import transforms

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.colours import as_pixels
from ds_vit.data.augment.steps import Size, Step, WholeTransform, step_of
from ds_vit.data.decode import Jpeg
from ds_vit.data.settings import ImageConfig
from ds_vit.fault_tolerance.errors import UserError

_NAMED_AS_IN_TIMM = ["scale", "ratio", "hflip", "vflip", "color_jitter_prob", "grayscale_prob", "gaussian_blur_prob"]


class TrainTransform:
    """The random steps of training, in timm's order, ending in uint8 [3, H, W].

    The first step brings every image to `img_size`, which the others receive.
    """

    def __init__(self, steps: Sequence[Step], img_size: Size) -> None:
        self.steps = tuple(steps)
        self._img_size = img_size

    def draw(self, key: int, size: Size) -> list[Any]:
        """The parameters of every step, for the sample `key` and a decoded image of `size` (height, width)."""
        return [step.draw(key, size if number == 0 else self._img_size) for number, step in enumerate(self.steps)]

    def __call__(self, image: Image.Image | Jpeg, key: int) -> torch.Tensor:
        """The augmented pixels of an RGB image, uint8 [3, H, W]: a pure function of the image and the sample's key."""
        found: Any = image
        for step, drawn in zip(self.steps, self.draw(key, (image.height, image.width)), strict=True):
            if drawn is not None:
                found = step.apply(found, drawn)
        return as_pixels(found)


class FixedTransform:
    """A transform without randomness, ending in uint8 [3, H, W]: evaluation's, and training's under --no-aug."""

    def __init__(self, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self._transform = transform

    def __call__(self, image: Image.Image | Jpeg, key: int) -> torch.Tensor:
        """The pixels of an RGB image, uint8 [3, H, W]; the key is not used."""
        return self._transform(image.image() if isinstance(image, Jpeg) else image)


def train_transform(image: ImageConfig, augment: AugmentConfig) -> TrainTransform | FixedTransform:
    """The transform of training images that timm's flags in `augment` mean.

    Raises:
        UserError: --gaussian-blur-prob on images smaller than the blur's kernel.
    """
    shape = (3, *image.img_size)
    if augment.no_aug:
        return FixedTransform(
            create_transform(
                shape, is_training=True, no_aug=True, interpolation=image.interpolation, use_prefetcher=True
            )
        )
    primary, secondary, final = create_transform(
        shape,
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
    pending: list[Any] = [*primary.transforms, *secondary.transforms]
    steps: list[Step] = []
    if isinstance(pending[0], ResizeKeepRatio):  # the modes rkrc and rkrr: a resize, then a crop or pad
        steps.append(WholeTransform("crop", pending.pop(0), pending.pop(0)))
    for transform in pending:
        if augment.gaussian_blur_prob and isinstance(transform, transforms.RandomApply):
            _require_room_for_blur(transform.transforms[0], image.img_size)
        steps.append(step_of(transform))
    return TrainTransform(steps, image.img_size)


def eval_transform(image: ImageConfig) -> FixedTransform:
    """timm's evaluation transform: resize so that `crop_pct` of the edge is kept, crop the centre."""
    return FixedTransform(
        create_transform(
            (3, *image.img_size),
            interpolation=image.interpolation,
            mean=image.mean,
            crop_pct=image.crop_pct,
            crop_mode=image.crop_mode,
            use_prefetcher=True,
        )
    )


def _require_room_for_blur(transform: Any, img_size: Size) -> None:
    if isinstance(transform, transforms.GaussianBlur) and min(img_size) <= max(transform.kernel_size) // 2:
        kernel = max(transform.kernel_size)
        needed = f"needs images of at least {kernel // 2 + 1} pixels, not {img_size[0]}x{img_size[1]}"
        raise UserError(f"--gaussian-blur-prob: timm's blur has a kernel of {kernel} pixels and {needed}")
