"""From flags, recipe and JSON to a plan of the run: everything is opened, checked and resolved, nothing is started.

Whatever is wrong with a run is found here, before any process group exists and before anything is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ds_vit import config as flags
from ds_vit.config import RunConfig, deepspeed_auto, deepspeed_json, deepspeed_keys
from ds_vit.config.deepspeed_rules import check_grad_norm, check_secondary_partition, without_idle
from ds_vit.data import AugmentConfig, ImageConfig, MixConfig, SampleOrder, Share, Source, open_source
from ds_vit.data.augment.transforms import train_transform
from ds_vit.data.settings import PIXEL_FLAGS, resolve_pixels
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.models import (
    InitialCheckpoint,
    ModelSpec,
    frozen_names,
    image_size,
    names_and_shapes,
)
from ds_vit.optim.build import check_layer_decay, check_weight_decay, optimizer_class, rules_of
from ds_vit.optim.schedules import Schedule
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.placement import check_tp_inside_hosts
from ds_vit.parallel.stages import stage_bounds
from ds_vit.parallel.tensor import check_cut, pays
from ds_vit.tasks import Task, find_task, idle_flags
from ds_vit.training.lr import DEFAULT_EPOCHS, learning_rate, make_schedule, scaled_by_batch, steps, warmup_of_the_json
from ds_vit.training.resume import Resume, check_same_run, check_same_schedule, keep_global_batch
from ds_vit.training.resume import find as find_resume

DEFAULT_WEIGHT_DECAY = 2e-5  # timm's, for an "auto" in the JSON
DEFAULT_STALL_SECONDS = 300.0  # below the ten minutes after which NCCL gives up, with less to say


@dataclass(frozen=True)
class Plan:
    """A run, resolved: what `train.py` carries out.

    `step` counts optimizer steps. The schedule is None where the JSON's scheduler sets the learning rate. A plan of
    evaluation alone has no optimizer, no rate and no steps.
    """

    config: RunConfig
    task: Task
    process: Process
    layout: Layout
    deepspeed: Mapping[str, Any]
    batch: deepspeed_json.BatchSizes
    precision: deepspeed_json.Precision
    checkpointing: deepspeed_json.Checkpointing
    class_parallel: bool  # the classifier is cut over classes
    bounds: tuple[int, ...]  # stage i has the layers from bounds[i] up to, and without, bounds[i + 1]
    model: torch.nn.Module  # on the meta device: names and shapes
    initial_checkpoint: InitialCheckpoint | None
    frozen: frozenset[str]
    image: ImageConfig
    augment: AugmentConfig
    mix: MixConfig
    train_source: Source
    val_source: Source | None
    order: SampleOrder
    optimizer: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None
    fallback: frozenset[str] | None  # what the optimizer gives another update; None where all are treated alike
    weight_decay: float
    lr: float | None
    schedule: Schedule | None
    total_steps: int
    horizon: int
    notes: tuple[str, ...]
    resume: Resume | None = None
    stop_at: float | None = None  # time.time() at which a scheduler or --time-limit ends the run

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this the run that it is: a checkpoint of another one cannot be gone on from."""
        return {
            "task": self.config.task,
            **self.task.identity(),
            "model": self.config.model,
            "num_classes": self.config.num_classes,
            "img_size": list(self.image.img_size),
            "shapes": {name: list(shape) for name, shape in names_and_shapes(self.model).items()},
            "seed": self.config.seed,
            "images": len(self.train_source),
            "class_names": list(self.train_source.class_names),
            "samples": self.train_source.fingerprint,
            "optimizer": self.optimizer[0].__name__,
            **rules_of(self.optimizer[0]).identity(self.fallback),
            "trained": [name for name in names_and_shapes(self.model) if name not in self.frozen],
        }

    @property
    def rates(self) -> dict[str, Any]:
        """What sets the learning rate, as a checkpoint has it: the flags' schedule, or the JSON's scheduler."""
        if self.schedule is not None:
            return dataclasses.asdict(self.schedule)
        block = dict(self.deepspeed["scheduler"])
        if block.get("type") == "WarmupCosineLR":  # the one whose rates are shares of the optimizer's
            block["lr"] = self.lr
        return block

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.deepspeed.get("zero_optimization", {}).get("stage", 0))

    @property
    def stall_seconds(self) -> float:
        """How long a rank may make no progress; 0 for no limit, the default of one rank alone."""
        if self.config.stall_seconds is not None:
            return self.config.stall_seconds
        return DEFAULT_STALL_SECONDS if self.layout.world_size > 1 else 0.0

    @property
    def pipeline_stage(self) -> int:
        """Which pipeline stage this rank is in."""
        return self.layout.stage(self.process.rank)

    @property
    def has_images(self) -> bool:
        """Whether this rank's stage takes images: the first one."""
        return self.pipeline_stage == 0

    @property
    def has_targets(self) -> bool:
        """Whether this rank's stage takes targets: the last one."""
        return self.pipeline_stage == self.layout.pp - 1

    @property
    def share(self) -> Share:
        """This rank's share of a global batch."""
        return Share(
            dp_rank=self.layout.dp_rank(self.process.rank),
            dp_size=self.layout.dp,
            micro_batch=self.batch.micro_batch,
            accumulation=self.batch.accumulation,
        )


def prepare(
    config: RunConfig, explicit: frozenset[str], process: Process, *, on_cpu: bool, stop_at: float | None = None
) -> Plan:
    """Resolve a run.

    Args:
        config: the flags and the recipe.
        explicit: which of them were given.
        process: this rank.
        on_cpu: there is no accelerator.
        stop_at: `time.time()` at which the scheduler or --time-limit ends the run.

    Raises:
        UserError: one message for people, with the numbers and the way out.
    """
    task_type = find_task(config, explicit)
    path = config.deepspeed_config
    data = deepspeed_json.load_json(path)
    deepspeed_keys.check_keys(data, path)
    data = deepspeed_auto.settle(data)
    precision = deepspeed_json.precision(_with_auto_precision(data, on_cpu), path, on_cpu=on_cpu)
    deepspeed_json.check_types(data, precision, path)
    if config.eval_only:
        data = deepspeed_json.for_evaluation(data, pp=config.pp)
    notes = [f"idle in this run: {line}" for line in deepspeed_keys.idle_keys(data)]
    data = without_idle(data)
    if not config.eval_only:
        data, filled = deepspeed_auto.with_optimizer(data, path, lr=config.lr)
        notes += filled
    layout = Layout.of_world(process.world_size, config.pp, config.tp)
    check_tp_inside_hosts(layout, process, config.tp_across_hosts)
    deepspeed_json.check_pipeline(data, path, config.pp)
    check_secondary_partition(data, path, dp=layout.dp, tp=config.tp)
    _check_types(config, precision, on_cpu)
    if precision.name == "autocast-fp16" and not config.eval_only:
        _check_one_loss_scale(config, data, path)
    checkpointing = deepspeed_json.activation_checkpointing(data, path, flag=config.grad_checkpointing)
    batch = deepspeed_json.batch_sizes(
        data, path, dp=layout.dp, batch_size=config.batch_size, grad_accum_steps=config.grad_accum_steps
    )
    if config.stop_before_seconds is not None and stop_at is None:
        raise UserError(
            "--stop-before-seconds has no effect: no Slurm job says when it ends (SLURM_JOB_END_TIME); "
            "give --time-limit"
        )
    resume = find_resume(config)
    if resume is not None:
        fixed = isinstance(data.get("train_batch_size"), int)
        batch, kept = keep_global_batch(batch, resume, fixed=fixed, allow=config.allow_batch_change)
        notes += [*resume.notes, *kept]
    rule = None if config.eval_only else _update_rule(config, data, batch, path, notes)

    train_source, val_source = _open_sources(config)
    for split, source in ((config.train_split, train_source), (config.val_split, val_source)):
        if source is not None and source.left_out:
            files = ", ".join(f"{count} {suffix}" for suffix, count in sorted(source.left_out.items()))
            notes.append(f"{split}: files that are not images are left out: {files}")
    num_classes = (config.num_classes or train_source.num_classes) if task_type.has_classes else 0
    if task_type.has_classes and num_classes < train_source.num_classes:
        raise UserError(
            f"--num-classes {num_classes} is smaller than the {train_source.num_classes} classes of the data; "
            f"use {train_source.num_classes} or more, or leave the flag out"
        )
    spec = ModelSpec(
        name=config.model,
        num_classes=num_classes,
        img_size=config.img_size,
        drop_path=config.drop_path if "drop_path" in explicit else None,
        model_kwargs={**config.model_kwargs, **({"drop_rate": config.drop} if config.drop else {})},
    )
    model = task_type.create_model(spec, config, for_training=not config.eval_only)
    # A run that goes on has its weights from the checkpoint.
    starts = bool(config.initial_checkpoint) and resume is None
    initial = InitialCheckpoint(config.initial_checkpoint, model) if starts else None
    if initial is not None and initial.newly_initialised:
        names = initial.newly_initialised
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        notes.append(f"not in {config.initial_checkpoint}, newly initialised: {shown}")

    if config.tp > 1:
        check_cut(model, config.tp)
    frozen = frozen_names(model, config.freeze, config.linear_probe)
    bounds = stage_bounds(config, model, frozen)
    if config.pp > 1 and not config.eval_only:
        bubble = (config.pp - 1) / (batch.accumulation + config.pp - 1)
        line = f"pipeline: {batch.accumulation} micro-batches through {config.pp} stages, bubble {bubble:.0%} of a step"
        notes.append(line + (" (more accumulation makes it smaller)" if batch.accumulation < config.pp else ""))
    if config.check_replicas:
        _check_has_replicas(config, layout, data.get("zero_optimization", {}).get("stage", 0))
    image, augment, mix = _pixels(config, model)
    if mix.active and batch.global_batch % 2:
        raise UserError(
            f"--mixup and --cutmix mix pairs, and the global batch of {batch} is odd; make it even or turn mixing off"
        )
    resolved_config = dataclasses.replace(config, num_classes=num_classes)
    task = task_type(resolved_config, image, augment, mix, train_source, model)
    task.loss(None)  # says now what it would say on the ranks
    if not task.loss_is_mean_of_samples and batch.accumulation * layout.dp > 1:
        raise UserError(
            f"--task {task.name} compares the samples of a batch with each other, and {batch} would cut it into "
            "batches of their own; use one data-parallel rank without accumulation"
        )
    # Evaluation takes nothing in this order, and its batch may be larger than the training split.
    in_order = min(batch.global_batch, len(train_source)) if config.eval_only else batch.global_batch
    order = SampleOrder(len(train_source), in_order, config.seed, config.aug_repeats)
    fallback, total_steps, horizon, schedule = None, 0, 0, None
    scheduler: dict[str, Any] = {}
    if rule is not None:
        fallback = rules_of(rule.optimizer).fallback(model, rule.arguments)
        total_steps, horizon = steps(config, order.steps_per_epoch)
        schedule = make_schedule(config, explicit, data, order.steps_per_epoch, horizon, rule.lr, path, notes)
        scheduler = {
            # From 0 where no flag says otherwise, as in Hugging Face's integration.
            "warmup_min_lr": config.warmup_lr if "warmup_lr" in explicit else 0.0,
            "warmup_max_lr": rule.lr,
            "warmup_num_steps": warmup_of_the_json(config, data, order.steps_per_epoch, horizon, notes),
            "total_num_steps": horizon,
        }
    resolved = _resolve_json(data, batch, rule, model, scheduler, precision, path)
    plan = Plan(
        config=resolved_config,
        task=task,
        process=process,
        layout=layout,
        deepspeed=resolved,
        batch=batch,
        precision=precision,
        checkpointing=checkpointing,
        bounds=bounds,
        class_parallel=_class_parallel(config, num_classes),
        model=model,
        initial_checkpoint=initial,
        frozen=frozen,
        image=image,
        augment=augment,
        mix=mix,
        train_source=train_source,
        val_source=val_source,
        order=order,
        optimizer=rule and (rule.optimizer, {**rule.arguments, "lr": rule.lr}),
        fallback=fallback,
        weight_decay=(rule and rule.decay) or 0.0,
        lr=rule and rule.lr,
        schedule=schedule,
        total_steps=total_steps,
        horizon=horizon,
        notes=tuple(notes),
        resume=resume,
        stop_at=stop_at,
    )
    if resume is None:
        return plan
    changes = check_same_run(resume, plan.identity, resolved_flags(plan))
    changes += check_same_schedule(resume, plan.rates, batch.global_batch, allow=config.allow_schedule_change)
    return dataclasses.replace(plan, notes=(*plan.notes, *changes))


@dataclass(frozen=True)
class _UpdateRule:
    """What an optimizer step does: the optimizer and its arguments, the rate, weight decay and clipping."""

    optimizer: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    lr: float
    decay: float | None
    clip: float


def _update_rule(
    config: RunConfig, data: Mapping[str, Any], batch: deepspeed_json.BatchSizes, path: str, notes: list[str]
) -> _UpdateRule:
    """The JSON's optimizer and what the flags say to it; lines for people are added to `notes`."""
    optimizer, arguments = optimizer_class(data.get("optimizer") or {}, path)
    notes += rules_of(optimizer).notes(arguments)
    if config.layer_decay not in (None, 1.0):
        check_layer_decay(optimizer, arguments)
    lr = learning_rate(config, optimizer, arguments, path)
    lr, scaling = scaled_by_batch(config, lr, batch.global_batch)
    notes += scaling
    clip = _from_json_or_flag(config, "clip_grad", data.get("gradient_clipping"), 0.0, path, "gradient_clipping")
    if clip is None:
        clip = 1.0  # DeepSpeed's own default; written down, so that it can be seen
        notes.append(f"{path} does not mention gradient_clipping: DeepSpeed's default 1.0 holds")
    check_grad_norm(data, path, clip=clip)
    decay = _from_json_or_flag(
        config,
        "weight_decay",
        arguments.get("weight_decay"),
        DEFAULT_WEIGHT_DECAY,
        path,
        "optimizer.params.weight_decay",
    )
    check_weight_decay(optimizer, decay)
    return _UpdateRule(optimizer, arguments, lr, decay, clip)


def _check_types(config: RunConfig, precision: deepspeed_json.Precision, on_cpu: bool) -> None:
    """Refuse --norm-dtype and --tf32 where they would do nothing."""
    if config.norm_dtype == "model" and precision.compute == "float32":
        raise UserError(f"--norm-dtype model has no effect in {precision.name}: the model is in float32; drop it")
    if config.tf32 and (on_cpu or precision.compute != "float32"):
        why = "a CPU has no TF32 cores" if on_cpu else f"the model is in {precision.compute}"
        raise UserError(f"--tf32 has no effect: {why}; drop it")


def _check_one_loss_scale(config: RunConfig, data: Mapping[str, Any], path: str) -> None:
    """Refuse float16 autocast without ZeRO where ranks share a model: DeepSpeed gives each a loss scale of its own."""
    if data.get("zero_optimization", {}).get("stage", 0) == 0 and config.pp * config.tp > 1:
        raise UserError(
            f"{path}: torch_autocast in float16 at ZeRO stage 0 keeps a loss scale of its own on every rank, which "
            f'--pp {config.pp} --tp {config.tp} cannot have; use stage 1, or "dtype": "bfloat16"'
        )


def _check_has_replicas(config: RunConfig, layout: Layout, stage: int) -> None:
    """Refuse --check-replicas where there is nothing to compare."""
    flag = f"--check-replicas {config.check_replicas}"
    if layout.dp * layout.tp == 1:
        raise UserError(f"{flag} has no effect with {layout}: no two ranks hold the same weights; drop it")
    if stage == 3:
        raise UserError(f"{flag} has no effect at ZeRO stage 3, where every weight exists once; use stage 0 to 2")


def _class_parallel(config: RunConfig, num_classes: int) -> bool:
    """--class-parallel, "auto" resolved."""
    if config.tp == 1 or config.class_parallel == "off":
        return False
    return config.class_parallel == "on" or pays(num_classes, config.tp)


def _auto_precision(on_cpu: bool) -> dict[str, bool]:
    """What "auto" means for a 16-bit type: bf16 where the GPU has it, fp16 on older ones, neither on a CPU."""
    has_bf16 = not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return {"bf16": has_bf16, "fp16": not on_cpu and not has_bf16}


def _with_auto_precision(data: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    out = dict(data)
    for block, value in _auto_precision(on_cpu).items():
        if isinstance(out.get(block), Mapping) and out[block].get("enabled") == "auto":
            out[block] = {**out[block], "enabled": value}
    return out


def _from_json_or_flag(config: RunConfig, flag: str, value: Any, fallback: float, path: str, key: str) -> float | None:
    """A number that the JSON gives or leaves to a flag ("auto"); None where neither of them speaks."""
    given = getattr(config, flag)
    if value == "auto" or (value is None and given is not None):
        return fallback if given is None else given
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise UserError(f'{path}: {key} must be a number >= 0 or "auto", not {value!r}')
    if given is not None and given != value:
        raise UserError(f'{path} fixes {key} to {value} and {flags.spelling(flag)} says {given}; write "auto" there')
    return float(value)


def _open_sources(config: RunConfig) -> tuple[Source, Source | None]:
    """The training split, and the evaluation split with the same classes; None for --val-split ''.

    Evaluation alone can do without a training split (--train-split ''): the evaluation split stands for both, and
    then it must have an example folder of every class, because nothing else says which class has which number.
    """
    opened = partial(open_source, config.dataset, config.data_dir or None, download=config.dataset_download)
    if config.eval_only and not config.val_split:
        raise UserError("there is nothing to evaluate without a --val-split")
    if config.eval_only and not config.train_split:
        source = opened(config.val_split)
        if config.num_classes not in (None, source.num_classes):
            raise UserError(
                f"--val-split {config.val_split} has {source.num_classes} classes, the model {config.num_classes}, and "
                "without a training split nothing says which is which; name the --train-split that has them all"
            )
        return source, source
    if not config.train_split:
        raise UserError("--train-split '' has no meaning but in evaluation; name the training split")
    train = opened(config.train_split)
    return train, opened(config.val_split, classes=train.class_names) if config.val_split else None


def _pixels(config: RunConfig, model: torch.nn.Module) -> tuple[ImageConfig, AugmentConfig, MixConfig]:
    """Settings of the pixels: the flags', else the model's own (timm's resolve_data_config)."""
    image = ImageConfig(image_size(model), **resolve_pixels(vars(config), model))
    augment = config.augment
    train_transform(image, augment)  # says now what it would say in a loader's worker
    return image, augment, config.mix


def _resolve_json(
    data: Mapping[str, Any],
    batch: deepspeed_json.BatchSizes,
    rule: _UpdateRule | None,
    model: torch.nn.Module,
    scheduler: Mapping[str, Any],
    precision: deepspeed_json.Precision,
    path: str,
) -> dict[str, Any]:
    """The JSON as DeepSpeed gets it. Bucket sizes follow the width, as in Hugging Face's integration."""
    width = model.embed_dim
    auto = {
        "optimizer.params.lr": rule and rule.lr,
        "optimizer.params.weight_decay": rule and rule.decay,
        **{f"scheduler.params.{key}": value for key, value in scheduler.items()},
        "bf16.enabled": precision.name == "bf16",
        "fp16.enabled": precision.name == "fp16",
        "communication_data_type": None,
        "zero_optimization.reduce_bucket_size": width * width,
        "zero_optimization.allgather_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
    }
    clip = 0.0 if rule is None else rule.clip
    resolved = deepspeed_json.resolve(data, batch=batch, gradient_clipping=clip, auto=auto, path=path)
    if rule is None:
        deepspeed_json.check_with_deepspeed(resolved, path)
        return resolved
    params = dict(resolved["optimizer"].get("params") or {})
    params["lr"] = rule.lr
    if rule.decay is not None:
        params["weight_decay"] = rule.decay
    resolved["optimizer"] = {**resolved["optimizer"], "params": params}
    deepspeed_auto.check_scheduler(resolved, path)
    deepspeed_json.check_with_deepspeed(resolved, path)
    return resolved


# Flags of how this process was started, which another start will answer for itself.
_OF_THIS_START = ("resume", "allow_batch_change", "allow_schedule_change", "stop_before_seconds", "time_limit")


def resolved_flags(plan: Plan) -> dict[str, Any]:
    """The flags with everything that was found out written in: a recipe that runs the same again.

    The batch and the optimizer's numbers stand in deepspeed.json beside it.
    """
    config = plan.config
    values = {name: getattr(config, name) for name in flags.FIELDS}
    values["deepspeed_config"] = "deepspeed.json"
    of_the_json = ("batch_size", "grad_accum_steps", "weight_decay", "clip_grad")
    for name in ("output", *of_the_json, *_OF_THIS_START, *idle_flags(type(plan.task))):
        values[name] = None
    values |= {
        "lr": plan.lr,
        "lr_scale_by_batch": "none",  # done
        "lr_base_size": flags.default_of("lr_base_size"),
        "grad_checkpointing": False,
        **{name: getattr(plan.image, name) for name in PIXEL_FLAGS},
    }
    if plan.checkpointing.interval and config.grad_checkpointing:
        values["grad_checkpointing"] = True
    if plan.schedule is not None:
        values |= {"warmup_steps": plan.schedule.warmup_steps, "warmup_epochs": None}
        if config.epochs is None and config.max_steps is None:
            values["epochs"] = DEFAULT_EPOCHS
    # What was found out for a flag that does nothing here (the crop of a split that is not evaluated) would be refused.
    idle = {name for name in flags.idle_names(config) if values[name] != flags.default_of(name)}
    return {name: value for name, value in values.items() if value is not None and name not in idle}
