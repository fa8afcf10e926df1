"""The optimizer, its learning rate and schedule, and the number of steps: from the flags and the DeepSpeed JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_vit import config as flags
from ds_vit.config import RunConfig
from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import check_grad_norm
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.config.units import parse_steps
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import check_rate_factors, describe_default_decay, rules_of
from ds_vit.optim.rate_factors import rate_factors
from ds_vit.optim.schedules import LearningRate, check_warmup
from ds_vit.tasks.task import Horizon
from ds_vit.training.resolve.data import DataConfig
from ds_vit.training.resolve.deepspeed import DeepSpeedSettings, optimizer_of
from ds_vit.training.resolve.model import ModelConfig

DEFAULT_WEIGHT_DECAY = 2e-5  # timm's, for an "auto" in the JSON
DEFAULT_EPOCHS = 300  # timm's
DEFAULT_WARMUP_EPOCHS = 5  # timm's; at most a tenth of the run
# Flags next to a scheduler of the JSON: those that it excludes, and those that fill an "auto" of its parameters.
_EXCLUDED = ("sched", "min_lr", "wsd_decay_fraction")
_FILLS = {
    "warmup_steps": "warmup_num_steps",
    "warmup_epochs": "warmup_num_steps",
    "warmup_lr": "warmup_min_lr",
}


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its schedule and its steps.

    Attributes:
        cls: its class.
        arguments: of the class, the rate among them.
        lr: the learning rate after warm-up.
        decay: weight decay; None where neither JSON nor flags give one.
        clip: largest norm of the gradient; 0 for no clipping.
        fallback: parameters with another update rule; None where all have the same.
        schedule: of the learning rate; None where the JSON's scheduler sets it.
        scheduler: values for "auto" in the JSON's scheduler.
        total_steps: steps that are run.
        horizon: of the schedules.
        factors: on the learning rate by timm name; empty if all are 1.
        origins: dotted name in the JSON → where its number came from, where it is not the JSON's.
        notes: lines for people.
    """

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    lr: float
    decay: float | None
    clip: float
    fallback: frozenset[str] | None = field(repr=False)
    schedule: LearningRate | None
    scheduler: Mapping[str, float]
    total_steps: int
    horizon: Horizon
    factors: Mapping[str, float] = field(repr=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def weight_decay(self) -> float:
        """Of the parameters that are decayed."""
        return self.decay or 0.0

    @property
    def json_params(self) -> dict[str, float]:
        """Values that replace those of the JSON's `optimizer.params`."""
        return {"lr": self.lr} if self.decay is None else {"lr": self.lr, "weight_decay": self.decay}

    @property
    def numbers(self) -> dict[str, Any]:
        """The JSON's numbers by their keys, with the optimizer's defaults; not its rate, which a schedule sets."""
        given = {**self.arguments, "weight_decay": self.weight_decay}
        defaults = {name: each.default for name, each in inspect.signature(self.cls.__init__).parameters.items()}
        names = [name for name, default in defaults.items() if name != "lr" and default is not inspect.Parameter.empty]
        params = {f"optimizer.params.{name}": given.get(name, defaults[name]) for name in names}
        return {"gradient_clipping": self.clip, **params}


def resolve_optimizer(
    config: RunConfig, explicit: frozenset[str], deepspeed: DeepSpeedSettings, data: DataConfig, model: ModelConfig
) -> OptimizerConfig:
    """The JSON's optimizer and scheduler, completed by the flags.

    Raises:
        UserError: an unsupported optimizer, or flags and a JSON that contradict each other.
    """
    path, notes = deepspeed.path, []
    json = deepspeed.json
    cls, arguments = optimizer_of(json, path)
    notes += rules_of(cls).notes(arguments)
    origins: dict[str, str] = {}
    lr = _base_rate(config, cls, arguments, json, path)
    if config.lr is not None or "lr" not in arguments:
        origins[KEY_OF_FLAG["lr"]] = "--lr" if config.lr is not None else f"{cls.__name__}'s default"
    lr, scaling = _scale_by_batch(config, lr, data.batch.global_batch)
    notes += scaling
    if scaling:
        origins[KEY_OF_FLAG["lr"]] = "--lr-scale-by-batch"
    clip = _resolve_clip(config, json, path, origins, notes)
    decay = _resolve_decay(config, json, path, origins)
    notes += describe_default_decay(cls, decay, path)
    per_epoch = data.order.steps_per_epoch
    total_steps, scheduled_steps = _count_steps(config, per_epoch)
    notes += _unreached(config, per_epoch, total_steps)
    horizon = Horizon(scheduled_steps, per_epoch, decay or 0.0)
    factors = _rate_factors(config, cls, arguments, model, horizon)
    schedule, scheduler = None, {}
    if json.scheduler is not None:
        _check_one_schedule(config, explicit, json, path)
        scheduler = {"warmup_max_lr": lr, **_fill_scheduler(config, explicit, json, per_epoch, scheduled_steps, notes)}
    else:
        schedule = LearningRate(
            name=config.sched,
            base_lr=lr,
            total_steps=scheduled_steps,
            warmup_steps=_warmup_steps(config, per_epoch, scheduled_steps, notes),
            warmup_lr=config.warmup_lr,
            min_lr=config.min_lr,
            decay_fraction=config.wsd_decay_fraction,
        )
    return OptimizerConfig(
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
        factors=factors,
        origins=origins,
        notes=tuple(notes),
    )


def _resolve_clip(
    config: RunConfig, json: DeepSpeedJson, path: str, origins: dict[str, str], notes: list[str]
) -> float:
    """The gradient norm above which gradients are scaled down, 0 for never; adds its origin and a note."""
    clip = _from_json_or_flag(config, "clip_grad", json, 0.0, path, origins)
    if clip is None:
        clip = 1.0  # DeepSpeed's own default; written down, so that it can be seen
        origins["gradient_clipping"] = "DeepSpeed's default"
        notes.append(f"{path} does not mention gradient_clipping: DeepSpeed's default 1.0 holds")
    check_grad_norm(json, path, clip=clip)
    return clip


def _resolve_decay(config: RunConfig, json: DeepSpeedJson, path: str, origins: dict[str, str]) -> float | None:
    """The weight decay, None for the optimizer's default; UserError for an end of a schedule that has no start."""
    decay = _from_json_or_flag(config, "weight_decay", json, DEFAULT_WEIGHT_DECAY, path, origins)
    if config.weight_decay_end is not None and not decay:
        raise UserError(
            f"--weight-decay-end {config.weight_decay_end:g} has no effect: there is no weight decay to begin with in "
            f"{path}; give --weight-decay a value above 0"
        )
    return decay


def _rate_factors(
    config: RunConfig,
    cls: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    model: ModelConfig,
    horizon: Horizon,
) -> dict[str, float]:
    """The factors on the learning rate by parameter, those of --layer-decay and the task's."""
    task, asking = model.task, []
    if config.layer_decay not in (None, 1.0):
        asking.append("--layer-decay")
    if task.rate_factors(model.whole) or task.held_names(1, horizon):
        asking.append(f"--task {task.name}, which has rates by parameter,")
    for what in asking:
        check_rate_factors(cls, arguments, what)
    return rate_factors(model.whole, config.layer_decay, task.rate_factors(model.whole))


def _from_json_or_flag(
    config: RunConfig, flag: str, json: DeepSpeedJson, fallback: float, path: str, origins: dict[str, str]
) -> float | None:
    """The flag's number, else the JSON's, else (for "auto") the fallback; None where neither gives one.

    Where it is not the JSON's, its origin is added to `origins`.
    """
    given, key = getattr(config, flag), KEY_OF_FLAG[flag]
    value = json.given(key)
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


def _base_rate(
    config: RunConfig, optimizer: type, arguments: Mapping[str, Any], json: DeepSpeedJson, path: str
) -> float:
    """--lr, else the JSON's, else the optimizer's own default.

    Raises:
        UserError: "auto" without --lr, or no number.
    """
    if config.lr is not None:
        return config.lr
    lr = arguments.get("lr")
    if KEY_OF_FLAG["lr"] in json.auto:
        raise UserError(f'{path}: optimizer.params.lr is "auto" and there is no --lr; give one')
    if lr is None:
        lr = inspect.signature(optimizer.__init__).parameters["lr"].default
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or lr < 0:
        raise UserError(f"{path}: optimizer.params.lr must be a number >= 0, not {lr!r}")
    return float(lr)


def _scale_by_batch(config: RunConfig, lr: float, global_batch: int) -> tuple[float, list[str]]:
    """The rate after --lr-scale-by-batch, and a line that says so."""
    if config.lr_scale_by_batch == "none":
        return lr, []
    root, power = ("", 1.0) if config.lr_scale_by_batch == "linear" else ("sqrt ", 0.5)
    scaled = lr * (global_batch / config.lr_base_size) ** power
    return scaled, [f"learning rate {lr:g} x {root}({global_batch} / {config.lr_base_size}) = {scaled:g}"]


def _count_steps(config: RunConfig, steps_per_epoch: int) -> tuple[int, int]:
    """(steps that are run, the schedule's horizon). With --epochs, --max-steps only stops early.

    Raises:
        UserError: --profile-steps asks for one that is not run.
    """
    if config.epochs is None and config.max_steps is not None:
        run = horizon = config.max_steps
    else:
        horizon = (config.epochs or DEFAULT_EPOCHS) * steps_per_epoch
        run = min(horizon, config.max_steps or horizon)
    if parse_steps(config.profile_steps, "--profile-steps").stop > run + 1:
        raise UserError(f"--profile-steps {config.profile_steps}: the run has {run} steps")
    return run, horizon


def _unreached(config: RunConfig, steps_per_epoch: int, run: int) -> list[str]:
    """Lines about counts of steps and epochs that the run ends before."""
    counted = {"max_steps": 1, "check_replicas": 1, "mixup_off_epoch": steps_per_epoch}
    if config.task == "dino":
        counted["freeze_last_layer_epochs"] = steps_per_epoch
    given = {name: getattr(config, name) or 0 for name in counted}
    length = f"the run has {run:,} steps, {run / steps_per_epoch:.3g} epochs"
    return [
        f"{flags.spelling(name)} {given[name]} is not reached: {length}"
        for name, steps in counted.items()
        # What acts after an epoch needs a step of the next one.
        if given[name] and given[name] * steps + ("epoch" in name) > run
    ]


def _check_one_schedule(config: RunConfig, explicit: frozenset[str], json: DeepSpeedJson, path: str) -> None:
    """Reject flags of a schedule next to the JSON's scheduler, except those that fill an "auto" of its parameters."""
    fixed = (name for name, parameter in _FILLS.items() if f"scheduler.params.{parameter}" not in json.auto)
    names = (*_EXCLUDED, *fixed)
    both = [flags.spelling(n) for n in names if n in explicit and getattr(config, n) != flags.default_of(n)]
    if both:
        kind = json.given("scheduler.type")
        raise UserError(f'{path} has a "scheduler" ({kind}) and {", ".join(both)} asks for another; keep one')


def _fill_scheduler(
    config: RunConfig,
    explicit: frozenset[str],
    json: DeepSpeedJson,
    per_epoch: int,
    horizon: int,
    notes: list[str],
) -> dict[str, float]:
    """The flags' values for "auto" in the JSON's scheduler, except the rate after warm-up.

    Raises:
        UserError: a warm-up that does not fit into the run.
    """
    warmup = 1
    if "scheduler.params.warmup_num_steps" in json.auto:
        warmup = _warmup_steps(config, per_epoch, horizon, notes)
        check_warmup(warmup, horizon)
        if warmup < 2:
            notes.append(f"scheduler.params.warmup_num_steps: DeepSpeed warms up for at least 2 steps, not {warmup}")
    return {
        # From 0 where no flag says otherwise, as in Hugging Face's integration.
        "warmup_min_lr": config.warmup_lr if "warmup_lr" in explicit else 0.0,
        "warmup_num_steps": max(1, warmup),
        "total_num_steps": horizon,
    }


def _warmup_steps(config: RunConfig, steps_per_epoch: int, horizon: int, notes: list[str]) -> int:
    """Those of the flags, to the letter; else 5 epochs, or a tenth of the horizon where that is less, with a note."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * steps_per_epoch)
    if config.sched == "constant":
        return 0
    by_timm = DEFAULT_WARMUP_EPOCHS * steps_per_epoch
    warmup = min(by_timm, horizon // 10)
    if warmup < by_timm:
        notes.append(
            f"warming up for a tenth of {horizon} steps, {warmup}, and not for timm's default of "
            f"{DEFAULT_WARMUP_EPOCHS} epochs, {by_timm} (--warmup-steps or --warmup-epochs decides)"
        )
    return warmup
