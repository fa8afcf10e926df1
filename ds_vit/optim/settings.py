"""The resolved settings of an optimizer and of its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_vit.optim.schedules import LearningRate
from ds_vit.tasks.task import Horizon


@dataclass(frozen=True)
class Optimizer:
    """The update rule of each parameter.

    Attributes:
        cls: its class.
        arguments: of the class, the rate among them.
        lr: the learning rate after warm-up.
        decay: weight decay; None where neither JSON nor flags give one.
        clip: largest norm of the gradient; 0 for no clipping.
        fallback: parameters with another update rule; None where all have the same.
        factors: on the learning rate by timm name; empty if all are 1.
        notes: lines for people.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    lr: float
    decay: float | None
    clip: float
    fallback: frozenset[str] | None = field(repr=False)
    factors: Mapping[str, float] = field(repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def weight_decay(self) -> float:
        """Of the parameters that are decayed."""
        return self.decay or 0.0


@dataclass(frozen=True)
class Schedule:
    """The length of a run, and its learning rate in each step.

    Attributes:
        rate: the learning rate of the flags; None where the JSON's scheduler sets it.
        scheduler: values for "auto" in the JSON's scheduler.
        total_steps: steps that are run.
        horizon: of the schedules.
        notes: lines for people.
    """

    rate: LearningRate | None
    scheduler: Mapping[str, float]
    total_steps: int
    horizon: Horizon
    notes: tuple[str, ...] = field(default=(), compare=False)
