"""What an optimizer step does, how many there are, and at what rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_vit import config as flags
from ds_vit.config import RunConfig
from ds_vit.config.deepspeed_rules import check_grad_norm
from ds_vit.config.deepspeed_set import KEY_OF_FLAG
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import check_layer_decay, check_weight_decay, optimizer_class, rules_of
from ds_vit.optim.schedules import Schedule
from ds_vit.training.plan.data import DataPlan
from ds_vit.training.plan.deepspeed import DeepSpeedPlan
from ds_vit.training.plan.learning_rate import (
    check_one_schedule,
    fill_scheduler,
    learning_rate,
    make_schedule,
    scaled_by_batch,
    steps,
)
from ds_vit.training.plan.model import ModelPlan

DEFAULT_WEIGHT_DECAY = 2e-5  # timm's, for an "auto" in the JSON


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer and its course; `step` counts optimizer steps.

    Attributes:
        cls: its class.
        arguments: of the class, the rate among them.
        lr: the learning rate after warm-up.
        decay: weight decay; None where neither JSON nor flags speak of it.
        clip: largest norm of the gradient; 0 for no clipping.
        fallback: what the optimizer gives another update; None where all are treated alike.
        schedule: of the learning rate; None where the JSON's scheduler sets it.
        scheduler: what stands for "auto" in the JSON's scheduler.
        total_steps: steps that are run.
        horizon: steps that the schedule is made for.
        origins: dotted name in the JSON → where its number came from, where it is not the JSON's.
        notes: lines for people.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    lr: float
    decay: float | None
    clip: float
    fallback: frozenset[str] | None = field(repr=False)
    schedule: Schedule | None
    scheduler: Mapping[str, float]
    total_steps: int
    horizon: int
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def weight_decay(self) -> float:
        """Of the parameters that are decayed."""
        return self.decay or 0.0

    @property
    def of_flags(self) -> dict[str, float]:
        """What the flags have the last word on in the JSON's `optimizer.params`."""
        return {"lr": self.lr} if self.decay is None else {"lr": self.lr, "weight_decay": self.decay}


def resolve_optimizer(
    config: RunConfig, explicit: frozenset[str], told: DeepSpeedPlan, data: DataPlan, model: ModelPlan
) -> OptimizerPlan:
    """The JSON's optimizer and scheduler, and what the flags say to them.

    Raises:
        UserError: an optimizer that cannot be had, or flags and a JSON that contradict each other.
    """
    path, notes = told.path, []
    cls, arguments = optimizer_class(told.json.get("optimizer") or {}, path)
    notes += rules_of(cls).notes(arguments)
    if config.layer_decay not in (None, 1.0):
        check_layer_decay(cls, arguments)
    origins: dict[str, str] = {}
    lr = learning_rate(config, cls, arguments, path)
    if config.lr is not None or "lr" not in arguments:
        origins[KEY_OF_FLAG["lr"]] = "--lr" if config.lr is not None else f"{cls.__name__}'s default"
    lr, scaling = scaled_by_batch(config, lr, data.batch.global_batch)
    notes += scaling
    if scaling:
        origins[KEY_OF_FLAG["lr"]] = "--lr-scale-by-batch"
    clip = _from_json_or_flag(config, "clip_grad", told.json.get("gradient_clipping"), 0.0, path, origins)
    if clip is None:
        clip = 1.0  # DeepSpeed's own default; written down, so that it can be seen
        origins["gradient_clipping"] = "DeepSpeed's default"
        notes.append(f"{path} does not mention gradient_clipping: DeepSpeed's default 1.0 holds")
    check_grad_norm(told.json, path, clip=clip)
    decay = arguments.get("weight_decay")
    decay = _from_json_or_flag(config, "weight_decay", decay, DEFAULT_WEIGHT_DECAY, path, origins)
    notes += check_weight_decay(cls, decay, path)
    per_epoch = data.order.steps_per_epoch
    total_steps, horizon = steps(config, per_epoch)
    schedule, scheduler = None, {}
    if block := told.json.get("scheduler"):
        check_one_schedule(config, explicit, block, path)
        scheduler = {"warmup_max_lr": lr, **fill_scheduler(config, explicit, block, per_epoch, horizon, notes)}
    else:
        schedule = make_schedule(config, per_epoch, horizon, lr, notes)
    return OptimizerPlan(
        cls=cls,
        arguments={**arguments, "lr": lr},
        lr=lr,
        decay=decay,
        clip=clip,
        fallback=rules_of(cls).fallback(model.whole, arguments),
        schedule=schedule,
        scheduler=scheduler,
        total_steps=total_steps,
        horizon=horizon,
        origins=origins,
        notes=tuple(notes),
    )


def _from_json_or_flag(
    config: RunConfig, flag: str, value: Any, fallback: float, path: str, origins: dict[str, str]
) -> float | None:
    """The flag's number, else the JSON's, else (for "auto") the fallback; None where neither of them speaks.

    Where it is not the JSON's, `origins` is told whose it is.
    """
    given, key = getattr(config, flag), KEY_OF_FLAG[flag]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if value not in (None, "auto") and not is_number:
        raise UserError(f'{path}: {key} must be a number >= 0 or "auto", not {value!r}')
    if given is not None:
        origins[key] = flags.spelling(flag)
        return given
    if value == "auto":
        origins[key] = "default"
        return fallback
    return None if value is None else float(value)
