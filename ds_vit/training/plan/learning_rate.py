"""How long a run is and at what rate it learns: from the flags and the DeepSpeed JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ds_vit import config as flags
from ds_vit.config import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.schedules import Schedule, check_warmup

DEFAULT_EPOCHS = 300  # timm's
DEFAULT_WARMUP_EPOCHS = 5  # timm's


def learning_rate(config: RunConfig, optimizer: type, arguments: Mapping[str, Any], path: str) -> float:
    """--lr, else the JSON's, else the optimizer's own default.

    Raises:
        UserError: "auto" without --lr, or no number.
    """
    if config.lr is not None:
        return config.lr
    lr = arguments.get("lr")
    if lr == "auto":
        raise UserError(f'{path}: optimizer.params.lr is "auto" and there is no --lr; give one')
    if lr is None:
        lr = inspect.signature(optimizer.__init__).parameters["lr"].default
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or lr < 0:
        raise UserError(f"{path}: optimizer.params.lr must be a number >= 0, not {lr!r}")
    return float(lr)


def scaled_by_batch(config: RunConfig, lr: float, global_batch: int) -> tuple[float, list[str]]:
    """--lr-scale-by-batch, and a line that says what came of it."""
    if config.lr_scale_by_batch == "none":
        return lr, []
    ratio = global_batch / config.lr_base_size
    scaled = lr * (ratio if config.lr_scale_by_batch == "linear" else ratio**0.5)
    formula = (
        f"{lr:g} x {'' if config.lr_scale_by_batch == 'linear' else 'sqrt '}({global_batch} / {config.lr_base_size})"
    )
    return scaled, [f"learning rate {formula} = {scaled:g}"]


def steps(config: RunConfig, steps_per_epoch: int) -> tuple[int, int]:
    """(steps that are run, the schedule's horizon). With --epochs, --max-steps only stops early."""
    if config.epochs is None and config.max_steps is not None:
        return config.max_steps, config.max_steps
    horizon = (config.epochs or DEFAULT_EPOCHS) * steps_per_epoch
    return min(horizon, config.max_steps or horizon), horizon


# Flags beside a scheduler of the JSON: those that it excludes, and those that fill an "auto" of its parameters.
_EXCLUDED = ("sched", "min_lr", "wsd_decay_fraction")
_FILLS = {
    "warmup_steps": "warmup_num_steps",
    "warmup_epochs": "warmup_num_steps",
    "warmup_lr": "warmup_min_lr",
}


def make_schedule(
    config: RunConfig,
    explicit: frozenset[str],
    data: Mapping[str, Any],
    steps_per_epoch: int,
    horizon: int,
    lr: float,
    path: str,
    notes: list[str],
) -> Schedule | None:
    """The flags' schedule, or None where the JSON has a scheduler.

    Args:
        config: the flags.
        explicit: which of them were given.
        data: the JSON.
        steps_per_epoch: optimizer steps.
        horizon: optimizer steps that the schedule is made for.
        lr: after warm-up.
        path: of the JSON, for messages.
        notes: lines for people are added to these.

    Raises:
        UserError: both are asked for.
    """
    block = data.get("scheduler")
    if block:
        params = block.get("params") or {}
        names = (*_EXCLUDED, *(name for name, parameter in _FILLS.items() if params.get(parameter) != "auto"))
        both = [flags.spelling(n) for n in names if n in explicit and getattr(config, n) != flags.default_of(n)]
        if both:
            raise UserError(
                f'{path} has a "scheduler" ({block.get("type")}) and {", ".join(both)} asks for another; keep one'
            )
        return None
    warmup = _warmup_steps(config, steps_per_epoch, horizon, notes)
    return Schedule(
        name=config.sched,
        base_lr=lr,
        total_steps=horizon,
        warmup_steps=warmup,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        decay_fraction=config.wsd_decay_fraction,
    )


def warmup_of_the_json(
    config: RunConfig, data: Mapping[str, Any], steps_per_epoch: int, horizon: int, notes: list[str]
) -> int:
    """The steps of warm-up that stand for an "auto" in the JSON's scheduler: those of a schedule of the flags.

    Args:
        config, data, steps_per_epoch, horizon, notes: as for `make_schedule`.

    Returns:
        At least 1; 1 too where nothing asks for it.

    Raises:
        UserError: it does not fit into the run.
    """
    if ((data.get("scheduler") or {}).get("params") or {}).get("warmup_num_steps") != "auto":
        return 1
    warmup = _warmup_steps(config, steps_per_epoch, horizon, notes)
    check_warmup(warmup, horizon)
    if warmup < 2:
        notes.append(f"scheduler.params.warmup_num_steps: DeepSpeed warms up for 2 steps at least, not for {warmup}")
    return max(1, warmup)


def _warmup_steps(config: RunConfig, steps_per_epoch: int, horizon: int, notes: list[str]) -> int:
    if config.warmup_steps is not None:
        return config.warmup_steps
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * steps_per_epoch)
    if config.sched == "constant":
        return 0
    warmup = DEFAULT_WARMUP_EPOCHS * steps_per_epoch
    if warmup >= horizon:
        warmup = horizon // 20
        notes.append(
            f"timm's default warm-up of {DEFAULT_WARMUP_EPOCHS} epochs does not fit into {horizon} steps: "
            f"warming up for {warmup} (--warmup-steps or --warmup-epochs decides)"
        )
    return warmup
