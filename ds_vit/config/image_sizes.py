"""Which size of images an optimizer step trains on: progressive resizing (Tan and Le 2021), or several at random."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_vit import randomness
from ds_vit.config.flag import PIXELS
from ds_vit.fault_tolerance.errors import UserError


@dataclass(frozen=True)
class ImageSizes:
    """The side of the images as a pure function of the step's number.

    Attributes:
        sizes: sides in pixels; the last is the model's own and the largest.
        firsts: the first step of each size, counted from 0; empty if each step draws a size.
        seed: of the run; a step's size is drawn from its number and this, all sizes alike.
        later_by: subtracted from a step's number.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...] = ()
    seed: int = 0
    later_by: int = 0

    def at(self, step: int) -> int:
        """The side in pixels at a step, counted from 0."""
        step -= self.later_by
        if self.firsts:
            return self.sizes[max(bisect.bisect_right(self.firsts, step), 1) - 1]
        drawn = randomness.mix(self.seed, randomness.name_key("image size"), step)
        return self.sizes[(drawn & (2**63 - 1)) % len(self.sizes)]

    def later(self, steps: int) -> ImageSizes:
        """The same for numbers that are larger by `steps`, as those of batches are when some were left out."""
        return replace(self, later_by=self.later_by + steps)

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
