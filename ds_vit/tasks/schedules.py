"""Values other than the learning rate by the optimizer step, as pure functions: nothing to save, nothing to restore.

Steps are counted from 1, as in `Task.schedules`. The values are those of DINOv2's `CosineScheduler`
(facebookresearch/dinov2, dinov2/utils/utils.py), whose iteration i is step i + 1 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Horizon:
    """What the schedules of a run are made for; a run that `--max-steps` or a signal stops early keeps it.

    Attributes:
        total_steps: of the schedules.
        steps_per_epoch: optimizer steps.
        weight_decay: of the JSON or --weight-decay, from which a schedule begins.
    """

    total_steps: int
    steps_per_epoch: int
    weight_decay: float

    def is_within(self, step: int, epochs: int) -> bool:
        """Whether a step is one of the first `epochs` epochs."""
        return step <= epochs * self.steps_per_epoch


def cosine(step: int, start: float, end: float, total_steps: int) -> float:
    """Half a cosine from `start` in step 1 towards `end`, which step total_steps + 1 would have.

    The last step, number T of T, has end + (start - end) · (1 + cos(π (T - 1) / T)) / 2; later ones have `end`.
    """
    done = step - 1
    if done >= total_steps:
        return end
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * done / total_steps))


def linear_warmup(step: int, start: float, end: float, warmup_steps: int) -> float:
    """A line from `start` in step 1 to `end` in step `warmup_steps`; later ones have `end`.

    With a warm-up of one step that step has `start`, as numpy's linspace; with none all steps have `end`.
    """
    if step > warmup_steps:
        return end
    return start + (end - start) * (step - 1) / max(1, warmup_steps - 1)
