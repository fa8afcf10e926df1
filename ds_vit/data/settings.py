"""What a model's input is: size, normalisation, and how evaluation crops. Values are checked when one is built.

The flags of augmentation and mixing are in `ds_vit.config.augmentation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, resolve_data_config
from torch import nn

from ds_vit.config.augmentation import INTERPOLATIONS
from ds_vit.fault_tolerance.errors import UserError


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

    def __post_init__(self) -> None:
        size, mean, std, crop_pct = self.img_size, self.mean, self.std, self.crop_pct
        three = "takes 3 numbers (red, green, blue), not"
        for correct, message in (
            (len(size) == 2 and min(size) >= 1, f"--img-size takes a positive height and width, not {size}"),
            (len(mean) == 3, f"--mean {three} {len(mean)}"),
            (len(std) == 3, f"--std {three} {len(std)}"),
            (min(std, default=1) > 0, f"--std must be positive, not {std}"),
            (self.interpolation in INTERPOLATIONS,
             f"--interpolation {self.interpolation} is none of {', '.join(INTERPOLATIONS)}"),
            (crop_pct is None or 0.0 < crop_pct <= 1.0, f"--crop-pct must lie in (0, 1], not {crop_pct}"),
            (self.crop_mode in (None, "center", "squash", "border"),
             f"--crop-mode {self.crop_mode} is none of center, squash, border"),
        ):  # fmt: skip
            if not correct:
                raise UserError(message)


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
