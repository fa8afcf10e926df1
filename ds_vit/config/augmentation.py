"""The settings of augmentation and mixing, with timm's names and defaults; `ds_vit.data` reads them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ds_vit.config.flag import (
    ASCENDING,
    IDENTITY,
    NOTED,
    Below1,
    Epochs,
    Probability,
    Settings,
    UpTo1,
    checked,
    flag,
    read_by,
)
from ds_vit.fault_tolerance.errors import UserError

# The sections of timm's --aa strings (timm.data.auto_augment). timm ignores an unknown section without a digit; here it
# is an error.
_NUMBER = r"\d+(?:\.\d*)?"
_AA_SECTIONS = {
    "rand": rf"m\d+|n(?:[1-9]|1[0-4])|p(?:0(?:\.\d*)?|1(?:\.0*)?)|mstd{_NUMBER}|mmax\d+|inc[01]|t(?:weights|3aw|3a)",
    "augmix": rf"m\d+|w[1-9]\d*|d[1-9]\d*|a{_NUMBER}|b[01]|mstd{_NUMBER}",
    **dict.fromkeys(("v0", "v0r", "original", "originalr", "3a"), f"mstd{_NUMBER}"),
}
_AA_WORDS = {
    "rand": "m9 (magnitude), n2 (operations, 1 to 14), p0.5 (probability), mstd0.5, mmax10, inc1, tweights, t3a, t3aw",
    "augmix": "m5 (magnitude), w3 (width), d2 (depth), a1.0 (alpha), b1 (blended), mstd0.5",
    **dict.fromkeys(("v0", "v0r", "original", "originalr", "3a"), "mstd0.5"),
}
_AA_LARGEST = 101  # mstd101 is timm's word for a uniform magnitude


def _check_auto_augment(text: str, flag: str) -> None:
    family, *sections = text.split("-")
    if family not in _AA_SECTIONS:
        raise UserError(f"{flag} {text}: {family!r} is none of {', '.join(_AA_SECTIONS)} (as in rand-m9-mstd0.5-inc1)")
    for section in sections:
        if re.fullmatch(_AA_SECTIONS[family], section) is None:
            raise UserError(f"{flag} {text}: {family} has no section {section!r}; it has {_AA_WORDS[family]}")
        number = re.search(_NUMBER, section)
        if number is not None and float(number[0]) > _AA_LARGEST:
            raise UserError(f"{flag} {text}: the number of {section!r} must be at most {_AA_LARGEST}")


_Alpha = Annotated[float, Field(ge=0, le=1000)]
_Side = Annotated[float, Field(gt=0, le=100)]
_Factor = Annotated[float, Field(ge=0, le=100)]
_FACTORS = checked(
    "takes 1, 3 or 4 numbers (the last is the hue, at most 0.5)",
    lambda x: not isinstance(x, tuple) or len(x) in (1, 3) or (len(x) == 4 and x[3] <= 0.5),
)
_NONE_IS_EMPTY = BeforeValidator(lambda word: "" if word == "none" else word)
# 3-Augment is the one policy that keeps the jitter.
_REPLACED_BY_AA = (lambda c: c.aa and "3a" not in c.aa, "under --aa, which replaces the colour jitter")
_WHOLE_IMAGES = ("train_crop_mode=rkrc|rkrr", "with --train-crop-mode rkrc or rkrr: whole images")
_DRAWS_BOX = ("cutmix_minmax", "with --cutmix-minmax, which draws the box itself")
_BOTH = "unless --mixup and --cutmix are both on"
_MIXES = "mixup or cutmix or cutmix_minmax"


class AugmentConfig(Settings, section="augmentation", scope=IDENTITY, idle_if="no_aug"):
    """Augmentation of a single training image; each field means the same as timm's flag."""

    decode: Literal["exact", "fast"] = flag(
        "exact",
        "decode as Pillow does, or within two grey levels",
        section="data",
        idle_if=_WHOLE_IMAGES,
    )
    augment_on: Literal["cpu", "device"] = flag(
        "cpu",
        "augment in the loader's processes, or on the device",
        NOTED,
        section="data",
        excludes={
            "train_crop_mode=rkrc|rkrr": "the device supports rrc",
            "train_interpolation=nearest|box|hamming|lanczos": "the device supports bilinear, bicubic and random",
            "aa=augmix*": "the device supports policies of rand, 3a, original and v0",
        },
    )
    no_aug: bool = flag(False, "resize and crop only")
    train_crop_mode: Literal["", "rrc", "rkrc", "rkrr"] = flag("", "training crop")
    train_interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"] = flag(
        "random", "resize filter of training"
    )
    scale: Annotated[tuple[_Side, _Side], ASCENDING] = flag((0.08, 1.0), "random-resized crop: area")
    ratio: Annotated[tuple[_Side, _Side], ASCENDING] = flag((3 / 4, 4 / 3), "random-resized crop: aspect")
    hflip: Probability = flag(0.5, "horizontal flip probability", neutral=(0.0,))
    vflip: Probability = flag(0.0, "vertical flip probability")
    color_jitter: Annotated[_Factor | tuple[_Factor, ...], _FACTORS] = flag(
        0.4, "colour jitter strength (off under --aa)", idle_if=_REPLACED_BY_AA, neutral=(0.0,)
    )
    color_jitter_prob: Probability | None = flag(
        None, "probability of the colour jitter", needs="color_jitter", idle_if=_REPLACED_BY_AA
    )
    grayscale_prob: Probability = flag(0.0, "probability of turning grey")
    gaussian_blur_prob: Probability = flag(0.0, "probability of blurring")
    aa: Annotated[str, _NONE_IS_EMPTY, read_by(_check_auto_augment)] = flag(
        "", "policy: rand-m9-mstd0.5-inc1, augmix-m5, 3a, original, v0, …"
    )
    reprob: Probability = flag(0.0, "random erasing probability")
    remode: Literal["const", "rand", "pixel"] = flag("pixel", "random erasing filling", needs="reprob")
    recount: Annotated[int, Field(ge=1, le=1000)] = flag(1, "random erasing count", needs="reprob")


class MixConfig(Settings, section="augmentation", scope=IDENTITY):
    """Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) of pairs, and label smoothing; timm's flags."""

    mixup: _Alpha = flag(0.0, "mixup alpha")
    cutmix: _Alpha = flag(0.0, "cutmix alpha", idle_if=_DRAWS_BOX)
    cutmix_minmax: Annotated[tuple[UpTo1, UpTo1], ASCENDING] | None = flag(
        None, "cutmix box side, smallest and largest"
    )
    mixup_prob: Probability = flag(1.0, "probability of mixing a pair", needs=_MIXES)
    mixup_switch_prob: Probability = flag(
        0.5, "probability of cutmix if both are on", needs=[("mixup", _BOTH), ("cutmix or cutmix_minmax", _BOTH)]
    )
    mixup_off_epoch: Epochs = flag(0, "stop mixing from this epoch on (0: never)", needs=_MIXES)
    smoothing: Below1 = flag(0.1, "label smoothing", section="loss", neutral=(0.0,))

    @property
    def active(self) -> bool:
        """Whether pairs are mixed at all; targets are then soft ones in every epoch, also after `mixup_off_epoch`."""
        return bool(self.mixup or self.cutmix or self.cutmix_minmax)

    def mixes_in(self, epoch: int) -> bool:
        """Whether pairs are mixed in an epoch (from 0)."""
        return self.active and (self.mixup_off_epoch == 0 or epoch < self.mixup_off_epoch)
