"""How long a run is and at what rate it learns: from the flags and the DeepSpeed JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ds_vit import config as flags
from ds_vit.config import RunConfig
from ds_vit.config.durations import parse_steps
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


# Flags beside a scheduler of the JSON: those that it excludes, and those that fill an "auto" of its parameters.
_EXCLUDED = ("sched", "min_lr", "wsd_decay_fraction")
_FILLS = {
    "warmup_steps": "warmup_num_steps",
    "warmup_epochs": "warmup_num_steps",
    "warmup_lr": "warmup_min_lr",
}


def check_one_schedule(config: RunConfig, explicit: frozenset[str], block: Mapping[str, Any], path: str) -> None:
    """Refuse flags of a schedule beside the JSON's scheduler, but for those that fill an "auto" of its parameters."""
    params = block.get("params") or {}
    names = (*_EXCLUDED, *(name for name, parameter in _FILLS.items() if params.get(parameter) != "auto"))
    both = [flags.spelling(n) for n in names if n in explicit and getattr(config, n) != flags.default_of(n)]
    if both:
        raise UserError(
            f'{path} has a "scheduler" ({block.get("type")}) and {", ".join(both)} asks for another; keep one'
        )


def make_schedule(config: RunConfig, steps_per_epoch: int, horizon: int, lr: float, notes: list[str]) -> Schedule:
    """The flags' schedule over `horizon` steps; lines for people are added to `notes`."""
    return Schedule(
        name=config.sched,
        base_lr=lr,
        total_steps=horizon,
        warmup_steps=_warmup_steps(config, steps_per_epoch, horizon, notes),
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
        decay_fraction=config.wsd_decay_fraction,
    )


def fill_scheduler(
    config: RunConfig,
    explicit: frozenset[str],
    block: Mapping[str, Any],
    per_epoch: int,
    horizon: int,
    notes: list[str],
) -> dict[str, float]:
    """What the flags put for an "auto" in the JSON's scheduler, less the rate after warm-up.

    Raises:
        UserError: a warm-up that does not fit into the run.
    """
    warmup = 1
    if (block.get("params") or {}).get("warmup_num_steps") == "auto":
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
    if config.warmup_steps is not None:
        return config.warmup_steps
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * steps_per_epoch)
    if config.sched == "constant":
        return 0
    warmup = DEFAULT_WARMUP_EPOCHS * steps_per_epoch
    if warmup >= horizon:
        warmup = horizon // 20
        instead = f"warming up for {warmup}" if warmup else "fewer than 20 steps begin at the full rate, without any"
        notes.append(
            f"timm's default warm-up of {DEFAULT_WARMUP_EPOCHS} epochs does not fit into {horizon} steps: {instead} "
            "(--warmup-steps or --warmup-epochs decides)"
        )
    return warmup
