"""The fields of self-distillation: the crops of an image, which share its decoding, and the masks of their patches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.crops import MultiCrop, block_masks
from ds_vit.data.field import Field, Rows, Sample
from ds_vit.data.fields import ImageField
from ds_vit.data.settings import NUM_GLOBAL, CropConfig, ImageConfig

LOCAL_IMAGES = "local_images"
"""The name of the field of an image's small crops."""


def keys_of_views(keys: torch.Tensor, num_views: int) -> torch.Tensor:
    """The keys of a sample's crops, for drop-path, dropout and masks: int64 [B] -> [B, num_views]."""
    of_samples = randomness.mix_tensor(keys, randomness.name_key("view"))
    return randomness.mix_tensor(of_samples[:, None], torch.arange(num_views, device=keys.device))


class CropField(ImageField):
    """Some of several crops of a training image: [B, v, 3, H, W]. Those of one `MultiCrop` are made together.

    Args:
        name: as for `Field`.
        image: size and normalisation.
        augment: where to augment, and how to decode.
        views: all crops of the image.
        part: of `views.shapes`: 0 for the global crops, 1 for the local ones.
    """

    mixes = False

    def __init__(self, name: str, image: ImageConfig, augment: AugmentConfig, views: MultiCrop, part: int) -> None:
        self._views, self._part = views, part
        super().__init__(name, image, augment)
        self.shape = views.shapes[part]

    def _transform(self) -> MultiCrop:
        return self._views

    def read(self, sample: Sample) -> Any:
        """The crops uint8 [v, 3, H, W], or how the device makes them (`Cut`)."""
        return sample.once(self._views, partial(super().read, sample))[self._part]

    def resized(self, side: int) -> CropField:
        """As `Field.resized`: the crops have sizes of their own."""
        return self


def crop_fields(image: ImageConfig, crops: CropConfig, augment: AugmentConfig) -> tuple[CropField, ...]:
    """ "images", the global crops [B, 2, 3, H, W], and "local_images" [B, n, 3, S, S] if there are any."""
    views = MultiCrop(image, crops, augment)
    names = ("images", LOCAL_IMAGES)[: len(views.shapes)]
    return tuple(CropField(name, image, augment, views, part) for part, name in enumerate(names))


class PatchMasks(Field):
    """The patches of the global crops that are hidden from the student, bool [B, 2, N]: a function of the keys.

    The tensor stays on the host, where a step asks how many patches are masked.

    Args:
        grid: rows and columns of patches.
        probability: as for `block_masks`.
        ratio_min_max: as for `block_masks`.
    """

    def __init__(self, grid: tuple[int, int], probability: float, ratio_min_max: tuple[float, float]) -> None:
        super().__init__("masks", (NUM_GLOBAL, grid[0] * grid[1]), torch.bool)
        self._draw = partial(block_masks, grid=grid, probability=probability, ratio_min_max=ratio_min_max)

    def _drawn(self, keys: torch.Tensor) -> torch.Tensor:
        of_views = keys_of_views(keys, NUM_GLOBAL).flatten()
        return torch.from_numpy(self._draw(of_views.numpy())).view(-1, *self.shape)

    def collate(self, values: Sequence[None], rows: Rows) -> torch.Tensor:
        """As `Field.collate`."""
        return self._drawn(rows.keys)

    def to_device(self, packed: torch.Tensor, rows: Rows, device: torch.device) -> torch.Tensor:
        """As `Field.to_device`, on the host."""
        return packed[: rows.num_rows]

    def example(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Masks of some keys, on the host."""
        return self._drawn(torch.arange(num_rows))
