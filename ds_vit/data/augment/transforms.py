"""From a decoded image to the uint8 pixels of a batch: the training and evaluation transforms.

timm's factory decides what the flags mean; each transform that it returns is adapted to a step with a draw and an
application of its own (steps.py, policies.py). Normalisation, erasing and mixing follow on the batch (device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugMixAugment, AutoAugment, RandAugment
from timm.data.transforms import (
    CenterCropOrPad,
    MaybePILToTensor,
    RandomCropOrPad,
    RandomResizedCropAndInterpolation,
    ResizeKeepRatio,
)
from torchvision import transforms

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.colours import image_of, pixels_of
from ds_vit.data.augment.policies import AugMix, Policy
from ds_vit.data.augment.steps import (
    ColorJitter,
    GaussianBlur,
    MaybeStep,
    RandomResizedCrop,
    ResizeAndCrop,
    Size,
    Step,
    maybe_step,
    on_planes,
)
from ds_vit.data.decode import Jpeg
from ds_vit.data.settings import ImageConfig
from ds_vit.fault_tolerance.errors import UserError


class TrainTransform:
    """The random steps of training, in timm's order, ending in uint8 [3, H, W].

    The first step brings every image to `img_size`; the others see that size.
    """

    def __init__(self, steps: Sequence[Step], img_size: Size) -> None:
        self.steps = tuple(steps)
        self._img_size = img_size
        self._on_planes = [step if on_planes(step) else None for step in self.steps]
        by_pillow = [number for number, step in enumerate(self._on_planes) if number == 0 or step is None]
        self._to_the_end = by_pillow[-1] + 1  # from this step on none needs a Pillow image

    def draw(self, key: int, size: Size) -> list[Any]:
        """The parameters of every step, for the sample `key` and a decoded image of `size` (height, width)."""
        return [step.draw(key, size if number == 0 else self._img_size) for number, step in enumerate(self.steps)]

    def apply(self, image: Image.Image | Jpeg, parameters: Sequence[Any]) -> torch.Tensor:
        """Run the steps with their parameters."""
        if isinstance(image, Jpeg) and not isinstance(self.steps[0], RandomResizedCrop):
            image = image.image()
        first = self.steps[0]
        found: Image.Image | torch.Tensor
        exact = not isinstance(image, Jpeg) or not image.fast
        if isinstance(first, RandomResizedCrop):
            found = first.apply(image, parameters[0]) if exact else first.nearly(image, parameters[0])
        else:
            found = first.apply(image, parameters[0])
        for number, drawn in enumerate(parameters[1:], 1):
            if drawn is None:
                continue
            step = self._on_planes[number]
            if step is not None and (number >= self._to_the_end or isinstance(found, torch.Tensor)):
                found = step.planes(_pixels(found), drawn, exact)
            else:
                found = self.steps[number].apply(image_of(found) if isinstance(found, torch.Tensor) else found, drawn)
        return _pixels(found)

    def __call__(self, image: Image.Image | Jpeg, key: int) -> torch.Tensor:
        """The augmented pixels of an RGB image, uint8 [3, H, W]: a pure function of the image and the sample's key."""
        return self.apply(image, self.draw(key, (image.height, image.width)))


def _pixels(image: Image.Image | torch.Tensor) -> torch.Tensor:
    return image if isinstance(image, torch.Tensor) else pixels_of(image)


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
    if augment.no_aug:
        return FixedTransform(
            create_transform(
                (3, *image.img_size),
                is_training=True,
                no_aug=True,
                interpolation=image.interpolation,
                use_prefetcher=True,
            )
        )
    primary, secondary, final = create_transform(
        (3, *image.img_size),
        is_training=True,
        train_crop_mode=augment.train_crop_mode or None,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        vflip=augment.vflip,
        color_jitter=augment.color_jitter or None,
        color_jitter_prob=augment.color_jitter_prob,
        grayscale_prob=augment.grayscale_prob,
        gaussian_blur_prob=augment.gaussian_blur_prob,
        auto_augment=augment.aa or None,
        interpolation=augment.train_interpolation,
        mean=image.mean,
        std=image.std,
        use_prefetcher=True,
        separate=True,
    )
    assert [type(t) for t in final.transforms] == [MaybePILToTensor], final
    steps = _steps([*primary.transforms, *secondary.transforms])
    for step in secondary.transforms:
        if augment.gaussian_blur_prob and isinstance(step, transforms.RandomApply):
            _require_room_for_blur(step.transforms[0], image.img_size)
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


def _steps(timm_transforms: Sequence[Any]) -> list[Step]:
    steps: list[Step] = []
    pending = list(timm_transforms)
    while pending:
        transform = pending.pop(0)
        if isinstance(transform, ResizeKeepRatio):
            crop = pending.pop(0)
            assert isinstance(crop, CenterCropOrPad | RandomCropOrPad), crop
            steps.append(ResizeAndCrop(transform, crop))
        elif isinstance(transform, transforms.RandomApply):
            (inner,) = transform.transforms
            steps.append(MaybeStep(f"maybe {type(inner).__name__}", transform.p, _adapt(inner)))
        else:
            steps.append(_adapt(transform))
    return steps


def _adapt(transform: Any) -> Step:
    """The step that does what a transform of timm or torchvision does."""
    for kind, adapter in (
        (RandomResizedCropAndInterpolation, RandomResizedCrop),
        ((transforms.RandomHorizontalFlip, transforms.RandomVerticalFlip, transforms.RandomGrayscale), maybe_step),
        ((RandAugment, AutoAugment), Policy),
        (AugMixAugment, AugMix),
        (transforms.ColorJitter, ColorJitter),
        (transforms.GaussianBlur, GaussianBlur),
    ):
        if isinstance(transform, kind):
            return adapter(transform)
    raise NotImplementedError(f"timm's factory returned {transform!r}, which has no keyed step")


def _require_room_for_blur(transform: Any, img_size: Size) -> None:
    if isinstance(transform, transforms.GaussianBlur) and min(img_size) <= max(transform.kernel_size) // 2:
        raise UserError(
            f"--gaussian-blur-prob: timm's blur has a kernel of {transform.kernel_size[0]} pixels and needs images of "
            f"at least {max(transform.kernel_size) // 2 + 1} pixels, not {img_size[0]}x{img_size[1]}"
        )
