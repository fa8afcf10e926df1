"""The flags of augmentation and mixing, with timm's names and defaults: for the command line, recipes and data.

A line here is a flag, a recipe's key and a field of what `ds_vit.data` reads. Values are checked when one is built.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ds_vit.config.flag import AT_LEAST_0, AT_LEAST_1, PROBABILITY, RANGE, Rule, check_values, flag
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
_AA_WORDS = {
    "rand": "m9 (magnitude), n2 (operations, 1 to 14), p0.5 (probability), mstd0.5, mmax10, inc1, tweights, t3a, t3aw",
    "augmix": "m5 (magnitude), w3 (width), d2 (depth), a1.0 (alpha), b1 (blended), mstd0.5",
    **dict.fromkeys(("v0", "v0r", "original", "originalr", "3a"), "mstd0.5"),
}
_A = "augmentation"
_ALPHA = Rule("must be 0 or positive", lambda alpha: alpha >= 0)
_SMOOTHING = Rule("must lie in [0, 1)", lambda share: 0 <= share < 1)


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image by itself; each field means what timm's flag of the name means."""

    decode: str = flag(
        "exact",
        "data",
        "decode training images as Pillow does, or fast: within two grey levels of it on average",
        choices=("exact", "fast"),
    )
    augment_on: str = flag(
        "cpu",
        "data",
        "augment in the loader's processes, or in batches on the device that trains",
        choices=("cpu", "device"),
    )
    no_aug: bool = flag(False, _A, "resize and crop only")
    train_crop_mode: str = flag("", _A, "training crop", choices=("rrc", "rkrc", "rkrr"))
    train_interpolation: str = flag("random", _A, "resize filter of training", choices=(*INTERPOLATIONS, "random"))
    scale: Sequence[float] | None = flag((0.08, 1.0), _A, "random-resized crop: area", rule=RANGE, nargs=2)
    ratio: Sequence[float] | None = flag((3 / 4, 4 / 3), _A, "random-resized crop: aspect ratio", rule=RANGE, nargs=2)
    hflip: float = flag(0.5, _A, "horizontal flip probability", rule=PROBABILITY, neutral=(0.0,))
    vflip: float = flag(0.0, _A, "vertical flip probability", rule=PROBABILITY)
    color_jitter: float | Sequence[float] = flag(0.4, _A, "colour jitter strength (off under --aa)", neutral=(0.0,))
    color_jitter_prob: float | None = flag(None, _A, "probability of the colour jitter", rule=PROBABILITY)
    grayscale_prob: float = flag(0.0, _A, "probability of turning grey", rule=PROBABILITY)
    gaussian_blur_prob: float = flag(0.0, _A, "probability of blurring", rule=PROBABILITY)
    aa: str = flag("", _A, "policy: rand-m9-mstd0.5-inc1, augmix-m5, 3a, original, v0, …", neutral=("none",))
    reprob: float = flag(0.0, _A, "random erasing probability", rule=PROBABILITY)
    remode: str = flag("pixel", _A, "random erasing filling", choices=("const", "rand", "pixel"))
    recount: int = flag(1, _A, "random erasing count", rule=AT_LEAST_1)

    def __post_init__(self) -> None:
        check_values(self)
        factors = self.color_jitter if isinstance(self.color_jitter, tuple) else (self.color_jitter,)
        if len(factors) not in (1, 3, 4) or not all(factor >= 0.0 for factor in factors):
            raise UserError(
                f"--color-jitter takes 1, 3 (brightness, contrast, saturation) or 4 (hue) numbers from 0, not {factors}"
            )
        if len(factors) == 4 and factors[3] > 0.5:
            raise UserError(f"the hue of --color-jitter is at most 0.5, not {factors[3]}")
        if self.aa:
            _check_auto_augment(self.aa)


def _check_auto_augment(text: str) -> None:
    family, *sections = text.split("-")
    if family not in _AA_SECTIONS:
        raise UserError(f"--aa {text}: {family!r} is none of {', '.join(_AA_SECTIONS)} (as in rand-m9-mstd0.5-inc1)")
    for section in sections:
        if re.fullmatch(_AA_SECTIONS[family], section) is None:
            raise UserError(
                f"--aa {text}: {family} does not know the section {section!r}; it knows such as {_AA_WORDS[family]}"
            )


@dataclass(frozen=True)
class MixConfig:
    """Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) of pairs, and label smoothing; timm's flags."""

    mixup: float = flag(0.0, _A, "mixup alpha", rule=_ALPHA)
    cutmix: float = flag(0.0, _A, "cutmix alpha", rule=_ALPHA)
    cutmix_minmax: Sequence[float] | None = flag(None, _A, "cutmix box side, smallest and largest", rule=RANGE, nargs=2)
    mixup_prob: float = flag(1.0, _A, "probability of mixing a pair", rule=PROBABILITY)
    mixup_switch_prob: float = flag(0.5, _A, "probability of cutmix where both are on", rule=PROBABILITY)
    mixup_off_epoch: int = flag(0, _A, "stop mixing from this epoch on (0: never)", rule=AT_LEAST_0)
    smoothing: float = flag(0.1, "loss", "label smoothing", rule=_SMOOTHING, neutral=(0.0,))

    def __post_init__(self) -> None:
        check_values(self)
        if self.cutmix_minmax is not None and self.cutmix_minmax[1] > 1.0:
            raise UserError(
                f"--cutmix-minmax takes shares of the image's edges, at most 1, not {tuple(self.cutmix_minmax)}"
            )

    @property
    def active(self) -> bool:
        """Whether pairs are mixed at all; targets are then soft ones in every epoch, also after `mixup_off_epoch`."""
        return self.mixup > 0.0 or self.cutmix > 0.0 or self.cutmix_minmax is not None

    def mixes_in(self, epoch: int) -> bool:
        """Whether pairs are mixed in an epoch (from 0)."""
        return self.active and (self.mixup_off_epoch == 0 or epoch < self.mixup_off_epoch)
