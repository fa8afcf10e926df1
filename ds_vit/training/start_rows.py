"""What a run shows of itself at its start: the rows of its table, and its settings for TensorBoard's hparams."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ds_vit import config as flags
from ds_vit.config.deepspeed_set import KEY_OF_FLAG
from ds_vit.config.durations import Interval
from ds_vit.config.run_folder import RunFolder
from ds_vit.models import Flops, count_kept, no_weight_decay_names, num_parameters
from ds_vit.monitoring.gradients import layers_of
from ds_vit.optim.build import rules_of
from ds_vit.optim.layer_decay import layer_scales
from ds_vit.training.plan import OptimizerPlan, Plan
from ds_vit.training.plan.deepspeed import DeepSpeedPlan
from ds_vit.training.step_log import few_rows

Rows = Sequence[tuple[str, str]]


def start_rows(plan: Plan, flops: Flops, device: torch.device, folder: Path) -> Rows:
    """The table of the start: model, layout, precision, batch arithmetic, steps.

    Args:
        plan: the run.
        flops: of an image.
        device: where this rank computes.
        folder: the output folder.
    """
    parallel, data, model, told = plan.parallel, plan.data, plan.model, plan.deepspeed
    layout = f"{parallel.layout}, ZeRO-{told.zero_stage}"
    if parallel.layout.pp > 1:
        stages = " | ".join(str(b - a) for a, b in itertools.pairwise(model.bounds))
        layout += f", layers a stage {stages}"
    if plan.config.sequence_parallel:
        layout += ", sequence parallel"
    if model.class_parallel:
        layout += ", classifier cut over classes"
    if interval := told.checkpointing.interval:
        blocks = "each block" if interval == 1 else f"every {interval} blocks"
        layout += f", {blocks} recomputed" + (" from inputs kept in host memory" if told.checkpointing.cpu else "")
        layout += " but for matrix products and attention" if told.checkpointing.selective else ""
    images = f"{len(data.train_source):,} images in {data.train_source.num_classes} classes"
    left = len(data.train_source) - data.order.steps_per_epoch * data.batch.global_batch
    if plan.optimizer is not None and left > 0 and not (data.order.aug_repeats or data.order.mixture):
        images += f" ({left:,} of them fill no global batch, others in each epoch)"
    if data.val_source is not None:
        images += f", {len(data.val_source):,} for evaluation"
    in_training = "" if plan.optimizer is None else f", {flops.training / 1e9:.3f} G in training"
    return [
        ("model", plan.config.model),
        ("parameters", _parameters(plan)),
        ("FLOPs an image", f"{flops.forward / 1e9:.3f} G forward" + in_training),
        ("layout", layout),
        ("precision", _precision(plan, device)),
        ("data", images),
        ("global batch", f"{data.batch}{_batch_origins(told)}"),
        *(_update_rows(plan, plan.optimizer, device) if plan.optimizer is not None else []),
        *([("--workers auto", f"{plan.workers} a rank ({plan.workers_from})")] if plan.workers_from else []),
        *([("--set", " ".join(plan.config.set))] if plan.config.set else []),
        ("output", str(folder)),
        *([("if it ends early", command_to_go_on(folder, plan.parallel.process.world_size))] if plan.optimizer else []),
    ]


def settings_of(plan: Plan) -> tuple[dict[str, str | float], str, list[str]]:
    """What `Reporter.settings` takes: flags that are not at their default and what the JSON says; layout; figures."""
    told, layout = plan.deepspeed, plan.parallel.layout
    aside = {"deepspeed_config", "output", "set"}
    given = {name: getattr(plan.config, name) for name in flags.FIELDS if name not in aside}
    given = {name: value for name, value in given.items() if value != flags.default_of(name)}
    # Names of folders need not be UTF-8, and TensorBoard's files must be.
    words = {name: os.fsencode(str(value)).decode("utf-8", "replace") for name, value in given.items()}
    values = {name: value if isinstance(value, (int, float)) else words[name] for name, value in given.items()}
    values |= {**asdict(layout), "zero_stage": told.zero_stage, "precision": told.precision.name}
    values |= {"global_batch": plan.data.batch.global_batch}
    if plan.optimizer is not None:
        values |= {"optimizer": plan.optimizer.cls.__name__, "lr": plan.optimizer.lr}
        values |= {"weight_decay": plan.optimizer.weight_decay}
    evaluated = [f"eval/{figure.name}" for figure in plan.model.task.figures] if plan.data.val_source else []
    text = f"{layout}, ZeRO-{told.zero_stage}, {told.precision.name}: {plan.data.batch}"
    return values, text, [*evaluated, "train/loss"]


def _batch_origins(told: DeepSpeedPlan) -> str:
    """Which numbers of the batch arithmetic stood in no JSON, and whose they are."""
    words = {"train_micro_batch_size_per_gpu": "micro-batch", "gradient_accumulation_steps": "accumulation"}
    given = [f"{word}: {told.origins[key]}" for key, word in words.items() if key in told.origins]
    return f" ({', '.join(given)})" if given else ""


def _parameters(plan: Plan) -> str:
    """How many, and how many of them are trained."""
    whole, frozen = plan.model.whole, plan.model.frozen
    if not frozen:
        return f"{num_parameters(whole):,}"
    trained = sum(parameter.numel() for name, parameter in whole.named_parameters() if name not in frozen)
    return f"{num_parameters(whole):,}, {trained:,} of them trained ({len(frozen)} tensors frozen)"


def _update_rows(plan: Plan, optimizer: OptimizerPlan, device: torch.device) -> Rows:
    """How many steps, and what each does."""
    schedule, warmup = "the JSON's scheduler", ""
    if optimizer.schedule is not None:
        steps = optimizer.schedule.warmup_steps
        schedule, warmup = optimizer.schedule.name, f", {steps:,} of warm-up" if steps else ", no warm-up"
    course = f"{plan.data.order.steps_per_epoch:,} an epoch, schedule over {optimizer.horizon:,}{warmup}"
    of = {flag: plan.deepspeed.origin(key) for flag, key in KEY_OF_FLAG.items()}
    decay = "" if optimizer.decay is None else f" ({of['weight_decay']})"
    update = f"{optimizer.cls.__name__}, lr {optimizer.lr:g} ({of['lr']}; {schedule})"
    update += f", weight decay {optimizer.weight_decay:g}{decay}"
    clip = optimizer.clip
    return [
        ("steps", f"{optimizer.total_steps:,} ({course})"),
        *few_rows(optimizer.total_steps, plan.config.log_interval),
        ("checkpoints", _checkpoints(plan)),
        ("optimizer", update + (f", clipped at {clip:g}" if clip else ", no clipping") + f" ({of['clip_grad']})"),
        *_image_sizes(plan),
        *_drop_path(plan, device),
        *_rules(plan, optimizer),
    ]


def _checkpoints(plan: Plan) -> str:
    """When they are saved, which ones stay, and what an end without warning costs."""
    config = plan.config
    interval = Interval.parse(config.checkpoint_interval, "--checkpoint-interval")
    if not interval:
        return "none but of the step that the run is interrupted at: what kills it costs all steps, and no best is kept"
    when = "at each epoch's end" if interval.epochs else f"every {interval}"
    kept = f"the newest {config.keep_checkpoints} and the best stay" if config.keep_checkpoints else "all stay"
    return f"{when}; {kept}"


def _precision(plan: Plan, device: torch.device) -> str:
    name = f"{plan.deepspeed.precision.name} on {device.type}"
    if plan.deepspeed.precision.compute != "float32" and plan.config.norm_dtype == "float32":
        return f"{name}, norms in float32"
    return f"{name}, TF32 matrix products" if plan.config.tf32 else name


def _image_sizes(plan: Plan) -> Rows:
    """Which images are trained on from which step on."""
    if (sizes := plan.image_sizes) is None:
        return []
    return [("image size", f"{sizes.in_words}; FLOPs and memory are those of {sizes.sizes[-1]}")]


def _drop_path(plan: Plan, device: torch.device) -> Rows:
    """How many branches are run on the samples alone that drop-path keeps."""
    micro_batch = plan.data.batch.micro_batch
    choice = "all" if plan.config.compile else plan.config.drop_path_compute
    kept, number = count_kept(plan.model.whole, choice, micro_batch, device.type)
    if not number:
        return []
    how = f"{kept} of {number} branches computed for the samples alone that they keep" if kept else "all samples"
    return [("drop-path", f"up to {plan.config.drop_path:g}, {how} ({choice})")]


def _rules(plan: Plan, optimizer: OptimizerPlan) -> Rows:
    """What single parameters get: weight decay, their layer's learning rate, an average."""
    rows: list[tuple[str, str]] = []
    model = plan.model.whole
    trained = [name for name, _ in model.named_parameters() if name not in plan.model.frozen]
    if optimizer.weight_decay:
        free = no_weight_decay_names(model).intersection(trained)
        rows.append(("no weight decay", f"{len(free)} of {len(trained)} tensors: vectors, biases and what timm names"))
    rows += rules_of(optimizer.cls).rows(trained, optimizer.fallback)
    if plan.config.layer_decay not in (None, 1.0):
        scales, layers = layer_scales(model, plan.config.layer_decay), layers_of(trained)
        # A layer's parameters share a factor, but for what timm puts elsewhere: the last one's is the layer's own.
        by_layer = {layers[name]: optimizer.lr * scales[name] for name in trained}
        rows.append(("lr by layer", ", ".join(f"{layer} {lr:.3g}" for layer, lr in by_layer.items())))
    if plan.config.model_ema:
        growing = " growing from 0" if plan.config.model_ema_warmup else ""
        rows.append(("average", f"of the weights, decay {plan.config.model_ema_decay:g}{growing}"))
    return rows


def command_to_go_on(folder: Path, num_ranks: int) -> str:
    """What a person types to go on with a run that was interrupted; its own recipe holds all else.

    Args:
        folder: of the run.
        num_ranks: that it has; of several, the launcher's own words are not known here.
    """
    program = sys.argv[0]
    if Path(program).name == "ds-vit":
        program = "ds-vit train"
    elif num_ranks == 1:
        program = f"python {shlex.quote(program)}"
    else:
        program = f"the same launcher and {shlex.quote(program)}"
    words = ("--recipe", str(RunFolder(folder).config), "--output", str(folder), "--resume", "auto")
    return f"{program} {shlex.join(words)}"
