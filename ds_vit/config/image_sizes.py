"""Progressive resizing (Tan and Le 2021; Touvron et al. 2019): which size of images an optimizer step trains on."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace

from ds_vit.fault_tolerance.errors import UserError

FLAG = "--img-size-schedule"


@dataclass(frozen=True)
class SizeSchedule:
    """The side of the images as a pure function of the step's number.

    Attributes:
        sizes: sides in pixels, one after the other; the last is the model's own and the largest.
        firsts: the first step of each, counted from 0.
    """

    sizes: tuple[int, ...]
    firsts: tuple[int, ...]

    def at(self, step: int) -> int:
        """The side in pixels at a step, counted from 0."""
        return self.sizes[bisect.bisect_right(self.firsts, step) - 1]

    def later(self, steps: int) -> SizeSchedule:
        """The same for numbers that are larger by `steps`, as those of batches are when some were left out."""
        return replace(self, firsts=(0, *(first + steps for first in self.firsts[1:])))


def parse_schedule(text: str) -> tuple[tuple[int, float], ...]:
    """`128:0,160:0.4,224:0.8` → ((128, 0.0), (160, 0.4), (224, 0.8)): a side, and from which share of the run on.

    Raises:
        UserError: another form, a share that does not grow from 0 on, or a size larger than the last.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        parts = tuple((int(size), float(share)) for size, share in pairs)
    except ValueError:
        raise UserError(f"{FLAG} takes SIZE:SHARE,… such as 128:0,160:0.4,224:0.8, not {text!r}") from None
    shares = [share for _, share in parts]
    if shares[0] != 0 or not all(0 <= share < 1 for share in shares) or sorted({*shares}) != shares:
        raise UserError(f"{FLAG} {text}: the shares of the run must begin with 0 and grow, all below 1")
    if min(size for size, _ in parts) < 1 or max(size for size, _ in parts) != parts[-1][0]:
        raise UserError(f"{FLAG} {text}: the last size is the model's own: no other may be larger, or below 1")
    return parts


def size_schedule(text: str, num_steps: int) -> SizeSchedule:
    """The schedule of a run whose learning-rate schedule is made for so many steps.

    Raises:
        UserError: as `parse_schedule`; or a run too short for each size to have a step.
    """
    parts = parse_schedule(text)
    firsts = tuple(math.ceil(round(share * num_steps, 6)) for _, share in parts)
    if len({*firsts}) < len(firsts) or firsts[-1] >= num_steps:
        raise UserError(f"{FLAG} {text}: {num_steps} steps are too few for each size to have one; take fewer sizes")
    return SizeSchedule(tuple(size for size, _ in parts), firsts)
