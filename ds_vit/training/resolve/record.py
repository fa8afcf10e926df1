"""A run's own records: config.yaml, and the settings that a checkpoint stores and a resumed run compares."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from ds_vit.config import rules
from ds_vit.config.flag import Scope
from ds_vit.config.outside import is_outside, source_of
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.data.field import origins
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.tasks.registry import idle_flags
from ds_vit.training.resolve.optimizer import DEFAULT_EPOCHS
from ds_vit.training.run import Run


def flag_values(run: Run) -> dict[str, Any]:
    """The flags by their recipe names, with the numbers that the data and the length of the run decide."""
    values = {name: getattr(run.config, name) for name in run.config.flags()}
    values |= {"img_size": run.model.spec.img_size, **run.model.task.decided_flags}
    if run.schedule is not None:
        values["log_interval"] = run.output.log_interval
    return values


def resolved_flags(run: Run) -> dict[str, Any]:
    """The flags with everything that was resolved written in: a recipe that runs the same again.

    The batch and the optimizer's numbers are in deepspeed.json next to it.
    """
    config, optimizer, schedule = run.config, run.optimizer, run.schedule
    values = flag_values(run)
    values["deepspeed_config"] = "deepspeed.json"
    values["task_source"] = (is_outside(config.task) and source_of(type(run.model.task))) or None
    values |= dict.fromkeys({"output", "set", *KEY_OF_FLAG, *config.names_with(Scope.START)})
    values |= {
        "lr": optimizer and optimizer.lr,
        "lr_scale_by_batch": "none",  # done
        "lr_base_size": config.default_of("lr_base_size"),
        "grad_checkpointing": False,
        **{name: getattr(run.model.task.image, name) for name in PIXEL_FLAGS},
    }
    if run.engine.checkpointing.interval and config.grad_checkpointing:
        values["grad_checkpointing"] = config.grad_checkpointing
    if schedule is not None and schedule.rate is not None:
        values |= {"warmup_steps": schedule.rate.warmup_steps, "warmup_epochs": None}
        if config.epochs is None and config.max_steps is None:
            values["epochs"] = DEFAULT_EPOCHS
    # A resolved value of a flag that does nothing here (the crop of a split that is not evaluated) would be rejected.
    idle = {name for name in rules.idle_flags(config) if values[name] != config.default_of(name)}
    idle |= idle_flags(type(run.model.task)).keys()
    return {name: value for name, value in values.items() if value is not None and name not in idle}


def identity_of(run: Run) -> dict[str, Any]:
    """The settings that must be equal in a run that resumes from a checkpoint of this one."""
    config, model, source, sizes = run.config, run.model, run.data.train_source, run.data.sizes
    optimizer, schedule = run.training
    shapes, horizon, left = model.saved_shapes, schedule.horizon, optimizer.fallback
    scheduled = ", ".join(sorted(model.task.schedules(1, horizon)))
    of_fields = {field.name: field.identity() for field in origins(model.task.training_fields) if field.identity()}
    return {
        "task": config.task,
        **{tower: model.towers[tower].fingerprint for tower in model.task.fixed_towers},
        **model.task.identity(),
        **({"fields": of_fields} if of_fields else {}),
        "model": config.model,
        "num_classes": model.task.num_classes,
        "img_size": list(model.task.image.img_size),
        "img_size_schedule": sizes.in_words if sizes and config.img_size_schedule else "",
        "train_img_sizes": sorted(config.train_img_sizes),
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "seed": config.seed,
        "images": len(source),
        "class_names": list(source.class_names),
        "decode": config.decode,
        "mixture": [list(part) for part in source.mixture],
        "samples": source.fingerprint,
        "optimizer": optimizer.cls.__name__,
        **({"left_to_adamw": dict.fromkeys(sorted(left), "AdamW's")} if left is not None else {}),
        "trained": [name for name in shapes if name not in model.frozen],
        **({"task_schedules": f"{scheduled} over {horizon.total_steps} steps"} if scheduled else {}),
    }


def origin_of(run: Run) -> dict[str, Any]:
    """The origin of the run's weights, for the model card of an export.

    Returns:
        "task", "model", "data" (the data set, or the folders' names), "images" of the training split, "global_batch",
        and "initial_weights": the files that training started from, each with a hash; "" for random ones. A
        resumed run has the checkpoint's.
    """
    config, model, resume = run.config, run.model, run.output.resume
    folders = (config.data_dir,) if isinstance(config.data_dir, str) else config.data_dir
    files = dict.fromkeys(file for tower, file in model.towers.items() if tower not in model.task.fixed_towers)
    start = "; ".join(f"{file.source}, blake2b {file.fingerprint} of a sample of its values" for file in files)
    if resume is not None:
        start = resume.checkpoint.state.get("origin", {}).get("initial_weights", "")
    return {
        "task": config.task,
        "model": config.model,
        "data": config.dataset or ", ".join(Path(folder).resolve().name for folder in folders),
        "images": len(run.data.train_source),
        "global_batch": run.batch.global_batch,
        "initial_weights": start,
    }


def rates_of(run: Run) -> dict[str, Any]:
    """The source of the learning rate, as a checkpoint stores it: the flags' schedule, or the JSON's scheduler."""
    optimizer, schedule = run.training
    if schedule.rate is not None:
        return dataclasses.asdict(schedule.rate)
    block = dict(run.engine.json.given("scheduler"))
    if block.get("type") == "WarmupCosineLR":  # the one whose rates are shares of the optimizer's
        block["lr"] = optimizer.lr
    return block


def settings_of(run: Run) -> dict[str, Any]:
    """The settings that a checkpoint stores: flags, and the numbers of the JSON that the curve depends on.

    Those of the optimizer are by the JSON's keys and with its defaults; its rate, which a schedule sets, is not there.
    """
    optimizer, _ = run.training
    settings = {**resolved_flags(run), "batch_size": run.config.batch_size, "gradient_clipping": optimizer.clip}
    given = {**optimizer.arguments, "weight_decay": optimizer.weight_decay}
    for name, parameter in inspect.signature(optimizer.cls.__init__).parameters.items():
        if name != "lr" and parameter.default is not parameter.empty:
            settings[f"optimizer.params.{name}"] = given.get(name, parameter.default)
    return settings
