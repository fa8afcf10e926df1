"""The optimizer, its learning rate and schedule, and the number of steps: from the flags and the DeepSpeed JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import check_grad_norm
from ds_vit.config.flag import spelling
from ds_vit.config.rules import SCHEDULER_KEY_OF_FLAG
from ds_vit.config.schema import KEY_OF_FLAG, RunConfig
from ds_vit.config.units import parse_steps
from ds_vit.data.sampler import SampleOrder
from ds_vit.engine.settings import EngineSettings
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import check_rate_factors, describe_default_decay, rules_of
from ds_vit.optim.rate_factors import rate_factors
from ds_vit.optim.schedules import LearningRate, check_warmup
from ds_vit.optim.settings import Optimizer, Schedule
from ds_vit.tasks.task import Horizon
from ds_vit.training.resolve.deepspeed import optimizer_of
from ds_vit.training.run import Model

DEFAULT_WEIGHT_DECAY = 2e-5  # timm's, for an "auto" in the JSON
DEFAULT_EPOCHS = 300  # timm's
DEFAULT_WARMUP_EPOCHS = 5  # timm's; at most a tenth of the run


def resolve_update(
    config: RunConfig, engine: EngineSettings, order: SampleOrder, model: Model
) -> tuple[Optimizer, Schedule]:
    """The JSON's optimizer and scheduler, completed by the flags.

    Raises:
        UserError: an unsupported optimizer, or flags and a JSON that contradict each other.
    """
    path, json, per_epoch, task = engine.path, engine.json, order.steps_per_epoch, model.task
    cls, arguments = optimizer_of(json, path)
    lr, scaling = _rate(config, cls, arguments, engine, order.global_batch)
    clip, unmentioned = _from_json_or_flag(config, "clip_grad", json, 0.0), []
    if clip is None:
        clip = 1.0  # DeepSpeed's own default; written down, so that it can be seen
        unmentioned = [f"{path} does not mention gradient_clipping: DeepSpeed's default 1.0 holds"]
    check_grad_norm(json, path, clip=clip)
    decay = _from_json_or_flag(config, "weight_decay", json, DEFAULT_WEIGHT_DECAY)
    total_steps, scheduled_steps = _count_steps(config, per_epoch)
    horizon = Horizon(scheduled_steps, per_epoch, decay or 0.0)
    if reason := task.supports_training(horizon, order.global_batch):
        raise UserError(reason)
    of_task = task.rate_factors(model.whole)
    if config.layer_decay not in (None, 1.0):
        check_rate_factors(cls, arguments, "--layer-decay")
    if of_task or task.held_names(1, horizon):
        check_rate_factors(cls, arguments, f"--task {task.name}, which has rates by parameter,")
    optimizer = Optimizer(
        cls=cls,
        arguments={**arguments, "lr": lr},
        lr=lr,
        decay=decay,
        clip=clip,
        fallback=rules_of(cls).fallback(model.whole, arguments),
        factors=rate_factors(model.whole, config.layer_decay, of_task),
        notes=(*rules_of(cls).notes(arguments), *scaling, *unmentioned, *describe_default_decay(cls, decay, path)),
    )
    rate, scheduler = None, {}
    if json.given("scheduler"):
        _check_one_schedule(config, json, path)
        scheduler, notes = _fill_scheduler(config, json, per_epoch, scheduled_steps)
        scheduler = {"warmup_max_lr": lr, **scheduler}
        for key in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"):
            own = json.given(f"scheduler.params.{key}")
            if own not in (None, "auto") and config.lr not in (None, own, json.given("optimizer.params.lr")):
                notes.append(f"--lr {config.lr:g} has no effect: {path} has scheduler.params.{key} {own}")
    else:
        warmup, notes = _warmup_steps(config, per_epoch, scheduled_steps)
        rate = LearningRate(
            name=config.sched,
            base_lr=lr,
            total_steps=scheduled_steps,
            warmup_steps=warmup,
            warmup_lr=config.warmup_lr,
            min_lr=config.min_lr,
            decay_fraction=config.wsd_decay_fraction,
        )
    notes = [*_unreached(config, per_epoch, total_steps, task.epoch_flags), *notes]
    return optimizer, Schedule(rate, scheduler, total_steps, horizon, tuple(notes))


def _from_json_or_flag(config: RunConfig, flag: str, json: DeepSpeedJson, fallback: float) -> float | None:
    """The flag's number, else the JSON's, else (for "auto") the fallback; None where neither gives one."""
    given, value = getattr(config, flag), json.given(KEY_OF_FLAG[flag])
    if given is not None:
        return given
    return fallback if value == "auto" else None if value is None else float(value)


def _rate(
    config: RunConfig, optimizer: type, arguments: Mapping[str, Any], engine: EngineSettings, global_batch: int
) -> tuple[float, list[str]]:
    """--lr, else the JSON's rate, else the optimizer's default; after --lr-scale-by-batch, which a line says.

    Raises:
        UserError: "auto" without --lr.
    """
    lr = arguments.get("lr") if config.lr is None else config.lr
    if config.lr is None and KEY_OF_FLAG["lr"] in engine.json.auto:
        raise UserError(f'{engine.path}: optimizer.params.lr is "auto" and there is no --lr; give one')
    lr = float(inspect.signature(optimizer.__init__).parameters["lr"].default if lr is None else lr)
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


def _unreached(config: RunConfig, steps_per_epoch: int, run: int, of_task: Sequence[str]) -> list[str]:
    """Lines about counts of steps and epochs, those of the task among them, that the run ends before."""
    counted = {"max_steps": 1, "check_replicas": 1, **dict.fromkeys(("mixup_off_epoch", *of_task), steps_per_epoch)}
    given = {name: getattr(config, name) or 0 for name in counted}
    length = f"the run has {run:,} steps, {run / steps_per_epoch:.3g} epochs"
    return [
        f"{spelling(name)} {given[name]} is not reached: {length}"
        for name, steps in counted.items()
        # What acts after an epoch needs a step of the next one.
        if given[name] and given[name] * steps + ("epoch" in name) > run
    ]


def _check_one_schedule(config: RunConfig, json: DeepSpeedJson, path: str) -> None:
    """Reject flags of a schedule next to the JSON's scheduler, except those that fill an "auto" of its parameters."""
    names = [name for name, key in SCHEDULER_KEY_OF_FLAG.items() if key not in json.auto]
    both = [spelling(n) for n in names if n in config.model_fields_set and getattr(config, n) != config.default_of(n)]
    if both:
        kind = json.given("scheduler.type")
        way_out = f'keep one (a block, --set \'scheduler={{"type":"{kind}",…}}\', overrides those of a recipe)'
        raise UserError(f'{path} has a "scheduler" ({kind}) and {", ".join(both)} asks for another; {way_out}')


def _fill_scheduler(
    config: RunConfig, json: DeepSpeedJson, per_epoch: int, horizon: int
) -> tuple[dict[str, float], list[str]]:
    """The flags' values for "auto" in the JSON's scheduler, except the rate after warm-up; and lines for people.

    Raises:
        UserError: a warm-up that does not fit into the run.
    """
    warmup, notes = 1, []
    if "scheduler.params.warmup_num_steps" in json.auto:
        warmup, notes = _warmup_steps(config, per_epoch, horizon)
        check_warmup(warmup, horizon)
        if warmup < 2:
            notes.append(f"scheduler.params.warmup_num_steps: DeepSpeed warms up for at least 2 steps, not {warmup}")
    # From 0 where no flag says otherwise, as in Hugging Face's integration.
    lowest = config.warmup_lr if "warmup_lr" in config.model_fields_set else 0.0
    return {"warmup_min_lr": lowest, "warmup_num_steps": max(1, warmup), "total_num_steps": horizon}, notes


def _warmup_steps(config: RunConfig, steps_per_epoch: int, horizon: int) -> tuple[int, list[str]]:
    """Those of the flags, to the letter; else 5 epochs, or a tenth of the horizon where that is less, with a line."""
    if config.warmup_steps is not None:
        return config.warmup_steps, []
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * steps_per_epoch), []
    if config.sched == "constant":
        return 0, []
    by_timm = DEFAULT_WARMUP_EPOCHS * steps_per_epoch
    warmup = min(by_timm, horizon // 10)
    if warmup == by_timm:
        return warmup, []
    note = (
        f"warming up for a tenth of {horizon} steps, {warmup}, and not for timm's default of "
        f"{DEFAULT_WARMUP_EPOCHS} epochs, {by_timm} (--warmup-steps or --warmup-epochs decides)"
    )
    return warmup, [note]
