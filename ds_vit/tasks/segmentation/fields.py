"""The image of a training sample of segmentation; its mask (data/masks.py) follows its crop and flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import Operation, Size
from ds_vit.data.augment.transforms import TrainTransform, train_transform
from ds_vit.data.decode import Box
from ds_vit.data.field import Sample
from ds_vit.data.fields import ImageField
from ds_vit.data.masks import ScaleCrop
from ds_vit.data.settings import ImageConfig


class SceneImages(ImageField):
    """A training image, scaled, cropped, flipped and coloured: [B, 3, h, w].

    Args:
        name: as for `Field`.
        image: size and normalisation.
        augment: flips and colours; with --no-aug a crop at scale 1 and nothing else.
        scale_range: of --scale-range.
    """

    mixes = False

    def __init__(self, name: str, image: ImageConfig, augment: AugmentConfig, scale_range: tuple[float, float]) -> None:
        self._scale_range = scale_range
        super().__init__(name, image, augment)

    def _transform(self) -> TrainTransform:
        assert self.augment is not None, "evaluation has windows"
        scale_range = (1.0, 1.0) if self.augment.no_aug else self._scale_range
        of_timm = train_transform(self.image, self.augment)
        others = of_timm.transforms if isinstance(of_timm, TrainTransform) else ()
        crop: Any = ScaleCrop(self.image.img_size, scale_range, self.image.mean)  # draws and applies like timm's
        return TrainTransform(crop, others)

    def geometry(self, sample: Sample) -> tuple[Box, Size, Sequence[Operation]]:
        """As `ImageField.geometry`; the box may begin before the image or end beyond it."""
        image = self.opened(sample)
        size = image.height, image.width
        box, operations = self.transform.draw(sample.key, size)
        return box, size, operations
