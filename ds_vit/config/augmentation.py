"""The settings of augmentation and mixing, with timm's names and defaults, and the size of images at each step:
progressive resizing (Tan and Le 2021), or several at random.

Each field is a flag, a key of recipes and a setting that `ds_vit.data` reads. The parser checks the values.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ds_vit import randomness
from ds_vit.config.flag import (
    ABOVE_0_TO_1,
    EPOCHS,
    FROM_0_BELOW_1,
    NOTED,
    PAIR,
    PIXELS,
    PROBABILITY,
    Range,
    Rule,
    flag,
)
from ds_vit.fault_tolerance.errors import UserError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

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
_ALPHA = Range(0, 1000)
_SIDES = Range(0, 100, above=True)
_FACTORS = Rule(
    "takes 1, 3 or 4 numbers (the last is the hue, at most 0.5)",
    lambda x: not isinstance(x, tuple) or len(x) in (1, 3) or (len(x) == 4 and x[3] <= 0.5),
)


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


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of a single training image; each field means the same as timm's flag."""

    decode: str = flag(
        "exact", "decode as Pillow does, or within two grey levels", section="data", choices=("exact", "fast")
    )
    augment_on: str = flag(
        "cpu", "augment in the loader's processes, or on the device", NOTED, section="data", choices=("cpu", "device")
    )
    no_aug: bool = flag(False, "resize and crop only")
    train_crop_mode: str = flag("", "training crop", choices=("rrc", "rkrc", "rkrr"))
    train_interpolation: str = flag("random", "resize filter of training", choices=(*INTERPOLATIONS, "random"))
    scale: Sequence[float] | None = flag((0.08, 1.0), "random-resized crop: area", span=_SIDES, **PAIR)
    ratio: Sequence[float] | None = flag((3 / 4, 4 / 3), "random-resized crop: aspect", span=_SIDES, **PAIR)
    hflip: float = flag(0.5, "horizontal flip probability", span=PROBABILITY, neutral=(0.0,))
    vflip: float = flag(0.0, "vertical flip probability", span=PROBABILITY)
    color_jitter: float | Sequence[float] = flag(
        0.4, "colour jitter strength (off under --aa)", span=Range(0, 100), rule=_FACTORS, neutral=(0.0,)
    )
    color_jitter_prob: float | None = flag(None, "probability of the colour jitter", span=PROBABILITY)
    grayscale_prob: float = flag(0.0, "probability of turning grey", span=PROBABILITY)
    gaussian_blur_prob: float = flag(0.0, "probability of blurring", span=PROBABILITY)
    aa: str = flag("", "policy: rand-m9-mstd0.5-inc1, augmix-m5, 3a, original, v0, …", read=_check_auto_augment)
    reprob: float = flag(0.0, "random erasing probability", span=PROBABILITY)
    remode: str = flag("pixel", "random erasing filling", choices=("const", "rand", "pixel"))
    recount: int = flag(1, "random erasing count", span=Range(1, 1000))


@dataclass(frozen=True)
class MixConfig:
    """Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019) of pairs, and label smoothing; timm's flags."""

    mixup: float = flag(0.0, "mixup alpha", span=_ALPHA)
    cutmix: float = flag(0.0, "cutmix alpha", span=_ALPHA)
    cutmix_minmax: Sequence[float] | None = flag(
        None, "cutmix box side, smallest and largest", span=ABOVE_0_TO_1, **PAIR
    )
    mixup_prob: float = flag(1.0, "probability of mixing a pair", span=PROBABILITY)
    mixup_switch_prob: float = flag(0.5, "probability of cutmix if both are on", span=PROBABILITY)
    mixup_off_epoch: int = flag(0, "stop mixing from this epoch on (0: never)", span=EPOCHS)
    smoothing: float = flag(0.1, "label smoothing", section="loss", span=FROM_0_BELOW_1, neutral=(0.0,))

    @property
    def active(self) -> bool:
        """Whether pairs are mixed at all; targets are then soft ones in every epoch, also after `mixup_off_epoch`."""
        return bool(self.mixup or self.cutmix or self.cutmix_minmax)

    def mixes_in(self, epoch: int) -> bool:
        """Whether pairs are mixed in an epoch (from 0)."""
        return self.active and (self.mixup_off_epoch == 0 or epoch < self.mixup_off_epoch)


# ---- which size of images an optimizer step trains on ----------------------------------------------------------------


@dataclass(frozen=True)
class ImageSizes:
    """The side of the images as a pure function of the step's number.

    Attributes:
        sizes: sides in pixels; the last is the model's own and the largest.
        firsts: the first step of each size, counted from 0; empty if each step draws a size.
        seed: of the run; a step's size is drawn from its number and this, all sizes alike.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...] = ()
    seed: int = 0

    def at(self, step: int) -> int:
        """The side in pixels at a step, counted from 0."""
        if self.firsts:
            return self.sizes[max(bisect.bisect_right(self.firsts, step), 1) - 1]
        drawn = randomness.mix(self.seed, randomness.name_key("image size"), step)
        return self.sizes[(drawn & (2**63 - 1)) % len(self.sizes)]

    @property
    def in_words(self) -> str:
        """For a table."""
        if not self.firsts:
            return f"{', '.join(map(str, self.sizes))}: drawn for each step"
        return ", ".join(f"{size} from step {first + 1:,}" for size, first in zip(self.sizes, self.firsts, strict=True))


def all_sizes(schedule: str, drawn: Sequence[int]) -> list[int]:
    """The sizes of either flag, the last the largest; none where neither is given.

    Raises:
        UserError: as `parse_schedule`.
    """
    return [size for size, _ in parse_schedule(schedule)] if schedule else sorted({*drawn})


def parse_schedule(text: str, flag: str = "--img-size-schedule") -> tuple[tuple[int, float], ...]:
    """`128:0,160:0.4,224:0.8` → ((128, 0.0), (160, 0.4), (224, 0.8)): a side, and from which share of the run on.

    Raises:
        UserError: another form, a share that does not grow from 0 on, or a size larger than the last.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        parts = tuple((int(size), float(share)) for size, share in pairs)
    except ValueError:
        raise UserError(f"{flag} takes SIZE:SHARE,… such as 128:0,160:0.4,224:0.8, not {text!r}") from None
    shares = [share for _, share in parts]
    if shares[0] != 0 or not all(0 <= share < 1 for share in shares) or sorted({*shares}) != shares:
        raise UserError(f"{flag} {text}: the shares of the run must begin with 0 and grow, all below 1")
    sizes = [size for size, _ in parts]
    if not PIXELS.holds(sizes):
        raise UserError(f"{flag} {text}: a size {PIXELS.words} pixels")
    if max(sizes) != sizes[-1]:
        raise UserError(f"{flag} {text}: the last size is the model's own: no other may be larger")
    return parts


def size_schedule(text: str, num_steps: int) -> ImageSizes:
    """The schedule of a run whose learning-rate schedule is made for so many steps.

    Raises:
        UserError: as `parse_schedule`; or a run too short for each size to have a step.
    """
    parts = parse_schedule(text)
    firsts = tuple(math.ceil(round(share * num_steps, 6)) for _, share in parts)
    if len({*firsts}) < len(firsts) or firsts[-1] >= num_steps:
        raise UserError(
            f"--img-size-schedule {text}: {num_steps} steps are too few for each size to have one; take fewer sizes"
        )
    return ImageSizes(tuple(size for size, _ in parts), firsts)
