"""The resolved settings of data: what a model's input is, and which samples a run reads.

The flags of augmentation and mixing are in `ds_vit.config.augmentation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_data_config
from torch import nn

from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.sampler import SampleOrder
from ds_vit.data.sources.source import Source


@dataclass(frozen=True)
class ImageConfig:
    """How an image becomes a model's input, in training and in evaluation.

    Attributes:
        img_size: height and width in pixels.
        mean, std: of the channels, for values in [0, 1].
        interpolation: of evaluation, and of training without augmentation.
        crop_pct: the share of the resized image's edge that evaluation keeps; None is timm's 0.875.
        crop_mode: evaluation's "center" (None), "squash" or "border".
        exif_rotation: whether files are turned as their EXIF orientation says.
    """

    img_size: tuple[int, int] = (224, 224)
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD
    interpolation: str = "bilinear"
    crop_pct: float | None = None
    crop_mode: str | None = None
    exif_rotation: bool = False


NUM_GLOBAL = 2
"""Large crops of an image, if several crops are taken."""


@dataclass(frozen=True)
class CropConfig:
    """Several crops of each training image: `NUM_GLOBAL` large ones of the model's size, and small ones.

    Attributes:
        local_size: side of a small crop in pixels.
        num_local: small crops of an image; 0 for none.
        global_scale, local_scale: smallest and largest area of a crop, as a share of the image's.
    """

    local_size: int
    num_local: int = 8
    global_scale: tuple[float, float] = (0.32, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.32)

    @property
    def num_views(self) -> int:
        """Crops of an image."""
        return NUM_GLOBAL + self.num_local


PIXEL_FLAGS = tuple(field.name for field in fields(ImageConfig) if field.name not in ("img_size", "exif_rotation"))
"""The fields that are flags of the same name; where one is not given, the model decides."""


def resolve_pixels(given: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The fields of `PIXEL_FLAGS`, as given, else the model's own (timm's resolve_data_config); and `exif_rotation`.

    Args:
        given: by their names; None and "" mean that it is not given.
        model: timm's, or one with its `pretrained_cfg`.
    """
    wanted = {name: given[name] for name in PIXEL_FLAGS if given.get(name) not in (None, "")}
    resolved = resolve_data_config(wanted, model=model)
    pixels = {name: tuple(resolved[name]) if name in ("mean", "std") else resolved[name] for name in PIXEL_FLAGS}
    return {**pixels, "exif_rotation": given.get("exif_rotation") == "on"}


# ---- the samples of a run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ZeroShotData:
    """The images of `--zeroshot` and the prompts of their classes.

    Attributes:
        source: images with one class each.
        prompts: C · T sentences, those of the first class first.
    """

    source: Source
    prompts: tuple[str, ...]

    @property
    def classes(self) -> torch.Tensor:
        """The class of each prompt, int64 [C · T]."""
        number = self.source.num_classes
        return torch.arange(number).repeat_interleave(len(self.prompts) // number)


class Workers(NamedTuple):
    """Loader processes of a rank; how `auto` came to that number, for people ("" where it was given)."""

    number: int
    reason: str = ""


@dataclass(frozen=True)
class Data:
    """The samples of a run.

    Attributes:
        train_source: the training split; in evaluation only it defines the classes.
        order: of the training samples.
        val_source: the evaluation split, or None.
        zeroshot: of --zeroshot, or None.
        sizes: which size of images each step trains on; None where all have the model's.
        workers: loader processes of this rank.
        notes: lines for people.
    """

    train_source: Source
    order: SampleOrder
    val_source: Source | None = None
    zeroshot: ZeroShotData | None = None
    sizes: ImageSizes | None = None
    workers: Workers = field(default=Workers(0))
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def evaluates(self) -> bool:
        """Whether there are images to evaluate."""
        return self.val_source is not None or self.zeroshot is not None

    @property
    def validation(self) -> Source:
        """The split whose images an evaluation counts: `val_source`, or that of --zeroshot if it is the only one."""
        source = self.zeroshot.source if self.val_source is None and self.zeroshot is not None else self.val_source
        assert source is not None, "there is no evaluation split"
        return source
