"""Learning-rate schedules as pure functions of the optimizer step: nothing to save, nothing to restore.

cosine, warm-up and the meaning of their arguments follow timm's CosineLRScheduler (timm/scheduler/cosine_lr.py) stepped
on updates; wsd is warm-up, stable, decay (Hu et al. 2024, MiniCPM), with a linear decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ds_vit.fault_tolerance.errors import UserError


def check_warmup(warmup_steps: int, total_steps: int) -> None:
    """Reject a warm-up that is longer than the run.

    Raises:
        UserError: with both numbers.
    """
    if warmup_steps and warmup_steps >= total_steps:
        raise UserError(
            f"a warm-up of {warmup_steps} steps does not fit into a run of {total_steps}; "
            "shorten it with --warmup-steps, or train longer"
        )


@dataclass(frozen=True)
class LearningRate:
    """A learning rate for every optimizer step.

    Attributes:
        name: "cosine", "linear", "constant" or "wsd".
        base_lr: the rate after warm-up.
        total_steps: the horizon; from there on the rate is `min_lr` (or `base_lr` where it is constant).
        warmup_steps: steps of linear warm-up from `warmup_lr` to `base_lr`.
        warmup_lr: the rate of the first step under warm-up.
        min_lr: the rate that the decay ends at.
        decay_fraction: share of the horizon in which wsd decays.
    """

    name: str
    base_lr: float
    total_steps: int
    warmup_steps: int = 0
    warmup_lr: float = 1e-5
    min_lr: float = 0.0
    decay_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_warmup(self.warmup_steps, self.total_steps)
        if self.min_lr > self.base_lr:
            raise UserError(f"--min-lr {self.min_lr} is above the base learning rate {self.base_lr}")

    @property
    def acts(self) -> dict[str, Any]:
        """The fields that affect the rate: two schedules with the same ones are the same."""
        names = ["name", "base_lr", "warmup_steps"]
        names += ["warmup_lr"] if self.warmup_steps else []
        names += ["total_steps", "min_lr"] if self.name != "constant" else []
        names += ["decay_fraction"] if self.name == "wsd" else []
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        warmup = f", warm-up of {self.warmup_steps} from {self.warmup_lr:g}" if self.warmup_steps else ""
        if self.name == "constant":
            return f"constant at {self.base_lr:g}{warmup}"
        decay = f", decay in the last {self.decay_fraction:.0%}" if self.name == "wsd" else ""
        return f"{self.name} from {self.base_lr:g} to {self.min_lr:g} over {self.total_steps} steps{warmup}{decay}"

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_lr + step * (self.base_lr - self.warmup_lr) / self.warmup_steps
        if self.name == "constant":
            return self.base_lr
        if step >= self.total_steps:
            return self.min_lr
        span = self.base_lr - self.min_lr
        if self.name == "cosine":
            return self.min_lr + 0.5 * span * (1.0 + math.cos(math.pi * step / self.total_steps))
        if self.name == "linear":
            return self.min_lr + span * (1.0 - step / self.total_steps)
        decay_steps = max(1, round(self.decay_fraction * self.total_steps))
        done = step - (self.total_steps - decay_steps)
        return self.base_lr if done <= 0 else self.min_lr + span * (1.0 - done / decay_steps)
