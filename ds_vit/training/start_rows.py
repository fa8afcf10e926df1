"""The table of a run's start, and its settings for TensorBoard's hparams."""

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
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.config.units import Interval
from ds_vit.engine.gradient_statistics import layers_of
from ds_vit.launching.process import Process, launch_words
from ds_vit.models import count_kept, no_weight_decay_names, num_parameters
from ds_vit.optim.build import rules_of
from ds_vit.optim.layer_decay import layer_scales
from ds_vit.planner.counting import Flops
from ds_vit.run_folder import RunFolder
from ds_vit.training.resolve import OptimizerConfig, Resolved
from ds_vit.training.resolve.deepspeed import DeepSpeedSettings
from ds_vit.training.step_log import few_rows

Rows = Sequence[tuple[str, str]]


def start_rows(resolved: Resolved, flops: Flops, device: torch.device, folder: Path) -> Rows:
    """The table of the start: model, layout, precision, batch arithmetic, steps.

    Args:
        resolved: the run.
        flops: of an image.
        device: where this rank computes.
        folder: the output folder.
    """
    data, model, deepspeed = resolved.data, resolved.model, resolved.deepspeed
    layout = f"{resolved.layout}, ZeRO-{deepspeed.zero_stage}"
    if resolved.layout.pp > 1:
        stages = " | ".join(str(b - a) for a, b in itertools.pairwise(model.bounds))
        layout += f", layers a stage {stages}"
    if resolved.config.sequence_parallel:
        layout += ", sequence parallel"
    if model.class_parallel:
        layout += ", classifier cut over classes"
    if interval := deepspeed.checkpointing.interval:
        blocks = "each block" if interval == 1 else f"every {interval} blocks"
        layout += f", {blocks} recomputed" + (" from inputs kept in host memory" if deepspeed.checkpointing.cpu else "")
        layout += " except matrix products and attention" if deepspeed.checkpointing.selective else ""
    images = f"{len(data.train_source):,} images in {data.train_source.num_classes} classes"
    left = len(data.train_source) - data.order.steps_per_epoch * data.batch.global_batch
    if resolved.optimizer is not None and left > 0 and not (data.order.aug_repeats or data.order.mixture):
        images += f" ({left:,} of them fill no global batch, others in each epoch)"
    if data.val_source is not None:
        images += f", {len(data.val_source):,} for evaluation"
    in_training = "" if resolved.optimizer is None else f", {flops.training / 1e9:.3f} G in training"
    return [
        ("model", resolved.config.model),
        ("parameters", _parameters(resolved)),
        ("FLOPs an image", f"{flops.forward / 1e9:.3f} G forward" + in_training),
        ("layout", layout),
        ("precision", _precision(resolved, device)),
        ("data", images),
        ("global batch", f"{data.batch}{_batch_origins(deepspeed)}"),
        *(_update_rows(resolved, resolved.optimizer, device) if resolved.optimizer is not None else []),
        *(
            [("--workers auto", f"{resolved.workers} a rank ({resolved.workers_reason})")]
            if resolved.workers_reason
            else []
        ),
        *([("--set", " ".join(resolved.config.set))] if resolved.config.set else []),
        ("output", str(folder)),
        *([("if it ends early", resume_command(folder, resolved.process))] if resolved.optimizer else []),
    ]


def _workers(resolved: Resolved) -> Rows:
    """How --workers auto was resolved."""
    reason = resolved.workers_reason
    return [("--workers auto", f"{resolved.workers} a rank ({reason})")] if reason else []


def settings_of(resolved: Resolved) -> tuple[dict[str, str | float], str, list[str]]:
    """What `Reporter.settings` takes: flags that are not at their default and what the JSON says; layout; figures."""
    deepspeed, layout = resolved.deepspeed, resolved.layout
    aside = {"deepspeed_config", "output", "set"}
    given = {name: getattr(resolved.config, name) for name in flags.FIELDS if name not in aside}
    given = {name: value for name, value in given.items() if value != flags.default_of(name)}
    # Names of folders need not be UTF-8, and TensorBoard's files must be.
    words = {name: os.fsencode(str(value)).decode("utf-8", "replace") for name, value in given.items()}
    values = {name: value if isinstance(value, (int, float)) else words[name] for name, value in given.items()}
    values |= {**asdict(layout), "zero_stage": deepspeed.zero_stage, "precision": deepspeed.precision.name}
    values |= {"global_batch": resolved.data.batch.global_batch}
    if resolved.optimizer is not None:
        values |= {"optimizer": resolved.optimizer.cls.__name__, "lr": resolved.optimizer.lr}
        values |= {"weight_decay": resolved.optimizer.weight_decay}
    evaluated = [f"eval/{figure.name}" for figure in resolved.model.task.figures] if resolved.data.val_source else []
    text = f"{layout}, ZeRO-{deepspeed.zero_stage}, {deepspeed.precision.name}: {resolved.data.batch}"
    return values, text, [*evaluated, "train/loss"]


def _batch_origins(deepspeed: DeepSpeedSettings) -> str:
    """Which numbers of the batch arithmetic stood in no JSON, and whose they are."""
    words = {"train_micro_batch_size_per_gpu": "micro-batch", "gradient_accumulation_steps": "accumulation"}
    given = [f"{word}: {deepspeed.origins[key]}" for key, word in words.items() if key in deepspeed.origins]
    return f" ({', '.join(given)})" if given else ""


def _parameters(resolved: Resolved) -> str:
    """How many, and how many of them are trained."""
    whole, frozen = resolved.model.whole, resolved.model.frozen
    if not frozen:
        return f"{num_parameters(whole):,}"
    trained = sum(parameter.numel() for name, parameter in whole.named_parameters() if name not in frozen)
    return f"{num_parameters(whole):,}, {trained:,} of them trained ({len(frozen)} tensors frozen)"


def _update_rows(resolved: Resolved, optimizer: OptimizerConfig, device: torch.device) -> Rows:
    """How many steps, and what each does."""
    schedule, warmup = "the JSON's scheduler", ""
    if optimizer.schedule is not None:
        steps = optimizer.schedule.warmup_steps
        schedule, warmup = optimizer.schedule.name, f", {steps:,} of warm-up" if steps else ", no warm-up"
    course = f"{resolved.data.order.steps_per_epoch:,} an epoch, schedule over {optimizer.horizon:,}{warmup}"
    of = {flag: resolved.deepspeed.origin(key) for flag, key in KEY_OF_FLAG.items()}
    decay = "" if optimizer.decay is None else f" ({of['weight_decay']})"
    update = f"{optimizer.cls.__name__}, lr {optimizer.lr:g} ({of['lr']}; {schedule})"
    update += f", weight decay {optimizer.weight_decay:g}{decay}"
    clip = optimizer.clip
    return [
        ("steps", f"{optimizer.total_steps:,} ({course})"),
        *few_rows(optimizer.total_steps, resolved.log_interval),
        ("checkpoints", _checkpoints(resolved)),
        ("optimizer", update + (f", clipped at {clip:g}" if clip else ", no clipping") + f" ({of['clip_grad']})"),
        *_image_sizes(resolved),
        *_drop_path(resolved, device),
        *_rules(resolved, optimizer),
    ]


def _checkpoints(resolved: Resolved) -> str:
    """When they are saved, which ones stay, and what an end without warning costs."""
    config = resolved.config
    interval = Interval.parse(config.checkpoint_interval, "--checkpoint-interval")
    if not interval:
        return "none but of the step that the run is interrupted at: what kills it costs all steps, and no best is kept"
    when = "at each epoch's end" if interval.epochs else f"every {interval}"
    kept = f"the newest {config.keep_checkpoints} and the best stay" if config.keep_checkpoints else "all stay"
    return f"{when}; {kept}"


def _precision(resolved: Resolved, device: torch.device) -> str:
    name = f"{resolved.deepspeed.precision.name} on {device.type}"
    if resolved.deepspeed.precision.compute != "float32" and resolved.config.norm_dtype == "float32":
        return f"{name}, norms in float32"
    return f"{name}, TF32 matrix products" if resolved.config.tf32 else name


def _image_sizes(resolved: Resolved) -> Rows:
    """Which images are trained on from which step on."""
    if (sizes := resolved.image_sizes) is None:
        return []
    return [("image size", f"{sizes.in_words}; FLOPs and memory are those of {sizes.sizes[-1]}")]


def _drop_path(resolved: Resolved, device: torch.device) -> Rows:
    """How many branches are run only on the samples that drop-path keeps."""
    micro_batch = resolved.data.batch.micro_batch
    choice = "all" if resolved.config.compile else resolved.config.drop_path_compute
    kept, number = count_kept(resolved.model.whole, choice, micro_batch, device.type)
    if not number:
        return []
    how = f"{kept} of {number} branches computed only for the samples that they keep" if kept else "all samples"
    return [("drop-path", f"up to {resolved.config.drop_path:g}, {how} ({choice})")]


def _rules(resolved: Resolved, optimizer: OptimizerConfig) -> Rows:
    """What single parameters get: weight decay, their layer's learning rate, an average."""
    rows: list[tuple[str, str]] = []
    model = resolved.model.whole
    trained = [name for name, _ in model.named_parameters() if name not in resolved.model.frozen]
    if optimizer.weight_decay:
        free = no_weight_decay_names(model).intersection(trained)
        rows.append(("no weight decay", f"{len(free)} of {len(trained)} tensors: vectors, biases and what timm names"))
    rows += rules_of(optimizer.cls).rows(trained, optimizer.fallback)
    if resolved.config.layer_decay not in (None, 1.0):
        scales, layers = layer_scales(model, resolved.config.layer_decay), layers_of(trained)
        # The parameters of a layer share a factor, except some that timm assigns elsewhere; the last has the layer's.
        by_layer = {layers[name]: optimizer.lr * scales[name] for name in trained}
        rows.append(("lr by layer", ", ".join(f"{layer} {lr:.3g}" for layer, lr in by_layer.items())))
    if resolved.config.model_ema:
        growing = " growing from 0" if resolved.config.model_ema_warmup else ""
        rows.append(("average", f"of the weights, decay {resolved.config.model_ema_decay:g}{growing}"))
    return rows


def resume_command(folder: Path, process: Process) -> str:
    """The command that resumes an interrupted run; the run's own recipe holds everything else.

    Args:
        folder: of the run.
        process: this rank.
    """
    program, count = sys.argv[0], process.world_size
    if Path(program).name in ("ds-vit", "cli.py"):  # "cli.py": by -m ds_vit.cli, as each rank of `ds-vit launch`
        one_host = f"ds-vit launch -n {count} train"
        several = "the same launcher and ds-vit train" if process.spans_hosts else one_host
        program = "ds-vit train" if count == 1 else several
    else:
        launcher = "python" if count == 1 else launch_words(process) or "the same launcher and"
        program = f"{launcher} {shlex.quote(program)}"
    words = ("--recipe", str(RunFolder(folder).config), "--output", str(folder), "--resume", "auto")
    return f"{program} {shlex.join(words)}"
