"""The size of images at each step: progressive resizing (Tan and Le 2021), or several at random."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from ds_vit import randomness
from ds_vit.config.units import parse_schedule
from ds_vit.fault_tolerance.errors import UserError


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
