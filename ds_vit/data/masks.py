"""Fields of images and their masks: one box and the flips of the sample's key serve both.

The image is resized bilinearly, the mask takes the nearest pixel, because a mean of two class numbers is another class.

Shapes: H x W a file's pixels, h x w the model's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import truediv
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import RandomResizedCrop, Size, uniform
from ds_vit.data.augment.transforms import TrainTransform
from ds_vit.data.decode import Box, Jpeg
from ds_vit.data.field import Field, Rows, Sample, stacked
from ds_vit.data.fields import ImageField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.masks import IGNORED, require_same_size

# ---- crops -----------------------------------------------------------------------------------------------------------


class ScaleCrop(RandomResizedCrop):
    """A box of random scale at a random place, resized to the model's size; beyond the image it is padded.

    At scale 1 the box is the largest of the model's shape within the image, at 0.5 it has twice that height and width.

    Args:
        size: (h, w) of the result.
        scale_range: smallest and largest scale, drawn uniformly.
        mean: of the channels, in [0, 1]: the colour around the image.
    """

    def __init__(self, size: Size, scale_range: tuple[float, float], mean: Sequence[float]) -> None:
        self._size, self._range = size, scale_range
        self._colour = tuple(round(255 * value) for value in mean)

    def draw(self, key: int, size: Size) -> tuple[Box, InterpolationMode]:
        """As `RandomResizedCrop.draw`; the box may begin before the image or end beyond it."""
        low, high = self._range
        scale = (low + (high - low) * uniform(key, "scale")) * max(map(truediv, self._size, size))
        height, width = (max(1, round(out / scale)) for out in self._size)
        rooms = size[0] - height, size[1] - width  # negative where the image is the smaller one
        top, left = (
            int(uniform(key, name) * (abs(room) + 1)) * (1 if room > 0 else -1)
            for name, room in zip(("crop top", "crop left"), rooms, strict=True)
        )
        return (top, left, height, width), InterpolationMode.BILINEAR

    def apply(self, image: Image.Image | Jpeg, parameters: tuple[Box, InterpolationMode]) -> Image.Image:
        """The box of an RGB image, bilinear with antialiasing; of a JPEG file only its part is decoded.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        (top, left, height, width), _ = parameters
        whole = Image.new("RGB", (width, height), self._colour)
        if isinstance(image, Jpeg):
            above, before = max(top, 0), max(left, 0)
            below, after = min(top + height, image.height), min(left + width, image.width)
            image, top, left = image.crop((above, before, below - above, after - before)), top - above, left - before
        whole.paste(image, (-left, -top))
        return whole.resize(self._size[::-1], Image.Resampling.BILINEAR)


def crop_mask(mask: np.ndarray, box: Box, out: Size) -> np.ndarray:
    """A box of a mask, resized by the nearest pixel: pixel i has the value at floor(top + (i + 1/2) height / h).

    Args:
        mask: [H, W].
        box: (top, left, height, width), which may begin before the mask or end beyond it: `IGNORED` is there.
        out: (h, w).

    Returns:
        [h, w] of the mask's type.
    """
    places = [
        first + (2 * np.arange(number) + 1) * length // (2 * number)
        for first, length, number in zip(box[:2], box[2:], out, strict=True)
    ]
    inside = [(place >= 0) & (place < length) for place, length in zip(places, mask.shape, strict=True)]
    result = np.full(out, IGNORED, dtype=mask.dtype)
    result[np.ix_(*inside)] = mask[np.ix_(*(place[kept] for place, kept in zip(places, inside, strict=True)))]
    return result


# ---- fields of training ----------------------------------------------------------------------------------------------


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
        self._scale_range = (1.0, 1.0) if augment.no_aug else scale_range
        super().__init__(name, image, augment)

    def _transform(self) -> TrainTransform:
        others = getattr(super()._transform(), "transforms", ())  # none with --no-aug
        return TrainTransform(ScaleCrop(self.image.img_size, self._scale_range, self.image.mean), others)


class MaskField(Field):
    """The mask of a training image, cropped and flipped as the image: int64 [B, h, w], `IGNORED` beyond the file.

    Args:
        name: as for `Field`.
        follows: the field of the image, whose crop is of whole pixels.
    """

    def __init__(self, name: str, follows: ImageField) -> None:
        super().__init__(name, follows.image.img_size, torch.int64, stage="last", entry="mask")
        self._follows = follows

    def read(self, sample: Sample) -> np.ndarray:
        """The classes, int16 [h, w].

        Raises:
            UserError: the mask has another size than the image, or a value that is no class.
        """
        box, size, operations = self._follows.geometry(sample)
        mask = super().read(sample)
        require_same_size(sample.name, size, mask.shape)
        top, left, height, width = map(int, box)
        cropped = crop_mask(mask, (top, left, height, width), (self.shape[0], self.shape[1]))
        for operation in operations:
            if operation.name in ("hflip", "vflip"):  # the others change colours
                cropped = np.flip(cropped, axis=1 if operation.name == "hflip" else 0)
        return np.ascontiguousarray(cropped)

    def blank(self) -> torch.Tensor:
        """No pixel counts."""
        return torch.full(self.shape, IGNORED, dtype=torch.int16)

    def collate(self, values: Sequence[Any], rows: Rows) -> torch.Tensor:
        """As `Field.collate`, int16."""
        return stacked(values, torch.int16)
