"""What a run says about its images: sizes, augmentation and mixing.

The fields are timm's flags with underscores, with timm's defaults. Values are checked when a setting is built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from ds_vit.fault_tolerance.errors import UserError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

# The sections of timm's --aa strings (timm.data.auto_augment), a number after each name. timm passes over a section
# that it does not know when it holds no digit; here it is an error.
_NUMBER = r"\d+(?:\.\d*)?"
_AA_SECTIONS = {
    "rand": rf"m\d+|n(?:[1-9]|1[0-4])|p(?:0(?:\.\d*)?|1(?:\.0*)?)|mstd{_NUMBER}|mmax\d+|inc[01]|t(?:weights|3aw|3a)",
    "augmix": rf"m\d+|w[1-9]\d*|d[1-9]\d*|a{_NUMBER}|b[01]|mstd{_NUMBER}",
    **dict.fromkeys(("v0", "v0r", "original", "originalr", "3a"), f"mstd{_NUMBER}"),
}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_probability(flag: str, value: float) -> None:
    _require(0.0 <= value <= 1.0, f"{flag} is a probability between 0 and 1, not {value}")


def _require_range(flag: str, value: tuple[float, float] | None) -> None:
    if value is not None:
        _require(
            len(value) == 2 and 0.0 < value[0] <= value[1],
            f"{flag} takes two positive numbers, the smaller first, not {' '.join(str(v) for v in value)}",
        )


@dataclass(frozen=True)
class ImageConfig:
    """How an image becomes a model's input, in training and in evaluation.

    Attributes:
        img_size: height and width in pixels.
        mean, std: of the channels, for values in [0, 1].
        interpolation: of evaluation, and of training without augmentation.
        crop_pct: the share of the resized image's edge that evaluation keeps; None is timm's 0.875.
        crop_mode: evaluation's "center" (None), "squash" or "border".
    """

    img_size: tuple[int, int] = (224, 224)
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD
    interpolation: str = "bilinear"
    crop_pct: float | None = None
    crop_mode: str | None = None

    def __post_init__(self) -> None:
        _require(
            len(self.img_size) == 2 and all(size >= 1 for size in self.img_size),
            f"--img-size takes a positive height and width, not {self.img_size}",
        )
        for flag, values in (("--mean", self.mean), ("--std", self.std)):
            _require(len(values) == 3, f"{flag} takes 3 numbers (red, green, blue), not {len(values)}")
        _require(all(value > 0 for value in self.std), f"--std must be positive, not {self.std}")
        _require(
            self.interpolation in INTERPOLATIONS,
            f"--interpolation {self.interpolation} is none of {', '.join(INTERPOLATIONS)}",
        )
        _require(
            self.crop_pct is None or 0.0 < self.crop_pct <= 1.0, f"--crop-pct must lie in (0, 1], not {self.crop_pct}"
        )
        _require(
            self.crop_mode in (None, "center", "squash", "border"),
            f"--crop-mode {self.crop_mode} is none of center, squash, border",
        )


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image by itself; each field means what timm's flag of the name means."""

    no_aug: bool = False
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    train_crop_mode: str | None = None
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float | tuple[float, ...] | None = 0.4
    color_jitter_prob: float | None = None
    grayscale_prob: float = 0.0
    gaussian_blur_prob: float = 0.0
    aa: str | None = None
    train_interpolation: str = "random"
    reprob: float = 0.0
    remode: str = "pixel"
    recount: int = 1

    def __post_init__(self) -> None:
        _require_range("--scale", self.scale)
        _require_range("--ratio", self.ratio)
        _require(
            self.train_crop_mode in (None, "rrc", "rkrc", "rkrr"),
            f"--train-crop-mode {self.train_crop_mode} is none of rrc, rkrc, rkrr",
        )
        for name in ("hflip", "vflip", "grayscale_prob", "gaussian_blur_prob", "reprob"):
            _require_probability("--" + name.replace("_", "-"), getattr(self, name))
        if self.color_jitter_prob is not None:
            _require_probability("--color-jitter-prob", self.color_jitter_prob)
        factors = self.color_jitter if isinstance(self.color_jitter, tuple) else (self.color_jitter or 0.0,)
        _require(
            len(factors) in (1, 3, 4) and all(factor >= 0.0 for factor in factors),
            f"--color-jitter takes 1, 3 (brightness, contrast, saturation) or 4 (hue) numbers from 0, not {factors}",
        )
        _require(len(factors) < 4 or factors[3] <= 0.5, f"the hue of --color-jitter is at most 0.5, not {factors[-1]}")
        _require(
            self.train_interpolation in (*INTERPOLATIONS, "random"),
            f"--train-interpolation {self.train_interpolation} is none of {', '.join(INTERPOLATIONS)}, random",
        )
        _require(self.remode in ("const", "rand", "pixel"), f"--remode {self.remode} is none of const, rand, pixel")
        _require(self.recount >= 1, f"--recount must be at least 1, not {self.recount}")
        if self.aa:
            _check_auto_augment(self.aa)


def _check_auto_augment(text: str) -> None:
    family, *sections = text.split("-")
    _require(
        family in _AA_SECTIONS,
        f"--aa {text}: {family!r} is none of {', '.join(_AA_SECTIONS)} (as in rand-m9-mstd0.5-inc1)",
    )
    for section in sections:
        _require(
            re.fullmatch(_AA_SECTIONS[family], section) is not None,
            f"--aa {text}: {family} does not know the section {section!r}; known are {_AA_SECTIONS[family]}",
        )


@dataclass(frozen=True)
class MixConfig:
    """Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) of pairs, and label smoothing; timm's flags."""

    mixup: float = 0.0
    cutmix: float = 0.0
    cutmix_minmax: tuple[float, float] | None = None
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_off_epoch: int = 0
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            _require(getattr(self, name) >= 0.0, f"--{name} must be 0 or positive, not {getattr(self, name)}")
        _require_range("--cutmix-minmax", self.cutmix_minmax)
        _require(
            self.cutmix_minmax is None or self.cutmix_minmax[1] <= 1.0,
            f"--cutmix-minmax takes shares of the image's edges, at most 1, not {self.cutmix_minmax}",
        )
        _require_probability("--mixup-prob", self.mixup_prob)
        _require_probability("--mixup-switch-prob", self.mixup_switch_prob)
        _require(self.mixup_off_epoch >= 0, f"--mixup-off-epoch must be 0 or positive, not {self.mixup_off_epoch}")
        _require(0.0 <= self.smoothing < 1.0, f"--smoothing must lie in [0, 1), not {self.smoothing}")

    @property
    def active(self) -> bool:
        """Whether pairs are mixed at all; targets are then soft ones in every epoch, also after `mixup_off_epoch`."""
        return self.mixup > 0.0 or self.cutmix > 0.0 or self.cutmix_minmax is not None

    def mixes_in(self, epoch: int) -> bool:
        """Whether pairs are mixed in an epoch (from 0)."""
        return self.active and (self.mixup_off_epoch == 0 or epoch < self.mixup_off_epoch)
