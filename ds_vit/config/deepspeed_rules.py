"""Settings of a DeepSpeed JSON that depend on each other, on the flags, on the layout or on the machine.

What is said of a single key is in `deepspeed_verdicts.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_vit.config.deepspeed_json import MONITORS
from ds_vit.fault_tolerance.errors import UserError, first_line

if TYPE_CHECKING:
    from ds_vit.config.deepspeed_keys import DeepSpeedJson


@dataclass(frozen=True)
class Precision:
    """The number formats of a run.

    Attributes:
        name: "fp32", "bf16", "fp16", "autocast-bf16" or "autocast-fp16", as in summary.json.
        compute: torch dtype name of the parameters and inputs that the forward pass sees.
    """

    name: str
    compute: str


@dataclass(frozen=True)
class Checkpointing:
    """Activation checkpointing: every `interval` blocks (0: off), kept on the CPU if `cpu` is set.

    `selective`: the outputs of matrix products and attention are kept too.
    """

    interval: int = 0
    cpu: bool = False
    selective: bool = False


def sums_in_fp32(json: DeepSpeedJson) -> bool:
    """Whether micro-batches are summed in fp32; a file without a type is resolved by `with_fp32_sums`."""
    return json.data_types.grad_accum_dtype in ("fp32", "float32", "float", "torch.float32")


def with_fp32_sums(json: DeepSpeedJson, selected: Precision, accumulation: int) -> DeepSpeedJson:
    """The file, with several micro-batches of a 16-bit model summed in fp32 where it names no type.

    DeepSpeed's default is the model's type at ZeRO-2 and 3; a 16-bit sum of 16 micro-batches has 1.2 times the error.
    """
    named = json.data_types.grad_accum_dtype or json.bf16.bf16_master_weights_and_grads
    if accumulation == 1 or selected.compute == "float32" or named:
        return json
    return json.replace({"data_types.grad_accum_dtype": "fp32"})


MOST_IN_BUCKET = 2**24
LEAST_BUCKETS = 8


def elements_of_bucket(json: DeepSpeedJson, parameters: int) -> int:
    """Elements of a bucket of engine/flat_gradient.py at most, unless one parameter has more.

    Gradients are held twice until their bucket is full: whatever `reduce_bucket_size` says, that is at most an eighth
    of them, and 2**24.
    """
    return max(1, min(json.zero_optimization.reduce_bucket_size, MOST_IN_BUCKET, parameters // LEAST_BUCKETS))


def check_pipeline(json: DeepSpeedJson, path: str, pp: int) -> None:
    """Reject settings that DeepSpeed's pipeline engine lacks.

    Raises:
        UserError: with the nearest legal choice.
    """
    if pp == 1:
        return
    if json.zero_stage > 1:
        raise UserError(f"{path}: ZeRO stage {json.zero_stage} does not work with --pp {pp}; use stage 1, or --pp 1")
    crashing = {"wall_clock_breakdown": json.wall_clock_breakdown, "flops_profiler": json.flops_profiler.enabled}
    for key, is_on in crashing.items():
        if is_on:
            raise UserError(f'{path}: "{key}" crashes DeepSpeed 0.19.8 with --pp {pp}; delete it')


def check_grad_norm(json: DeepSpeedJson, path: str, *, clip: float) -> None:
    """Reject `compute_grad_norm` false where clipping needs the norm."""
    if clip > 0 and not json.zero_optimization.compute_grad_norm:
        raise UserError(
            f'{path}: "zero_optimization.compute_grad_norm": false leaves no norm for gradient_clipping {clip:g}; '
            "delete one of them, or set it to 0"
        )


def precision(json: DeepSpeedJson, path: str, *, on_cpu: bool) -> Precision:
    """The number formats that the file selects.

    Raises:
        UserError: two at once, fp16 on a CPU, or a wrapper that DeepSpeed 0.19.8 gets wrong.
    """
    enabled = [block for block in ("bf16", "fp16", "torch_autocast") if json.is_on(block)]
    if len(enabled) > 1:
        raise UserError(f"{path}: {' and '.join(enabled)} are enabled at once; keep one")
    if not enabled:
        return Precision("fp32", "float32")
    kind = enabled[0]
    if kind == "torch_autocast":
        name = json.torch_autocast.dtype.removeprefix("torch.")
        name = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(name, name)
        if name not in ("bf16", "fp16"):
            raise UserError(f'{path}: torch_autocast.dtype {name!r} is not a 16-bit type; use "bfloat16" or "float16"')
        kind = f"autocast-{name}"
    if kind.endswith("fp16") and on_cpu:
        raise UserError(f"{path}: {kind} needs a GPU and this machine has none; use bf16 or fp32")
    if kind in ("bf16", "fp16") and json.zero_stage == 0:
        raise UserError(
            f"{path}: {kind}.enabled at ZeRO stage 0 makes DeepSpeed 0.19.8 take an optimizer step before training; "
            'use stage 1, or "torch_autocast": {"enabled": true} as in ds_configs/zero0_bf16.json'
        )
    return Precision(kind, {"bf16": "bfloat16", "fp16": "float16"}.get(kind, "float32"))


def check_types(json: DeepSpeedJson, selected: Precision, path: str) -> None:
    """Reject types and modules that DeepSpeed would look up after the ranks have met.

    Args:
        json: the file.
        selected: its precision.
        path: named in messages.

    Raises:
        UserError: names the key and its valid values.
    """
    from deepspeed.runtime.config import DtypeEnum

    model_type, stage = f"torch.{selected.compute}", json.zero_stage
    for key in ("param_dtype", "grad_accum_dtype") if stage == 0 else ("param_dtype",):
        name = getattr(json.data_types, key)
        if name is not None and str(DtypeEnum(name).value) != model_type:
            raise UserError(
                f"{path}: data_types.{key} {name!r} must be the model's type, {selected.compute}, at ZeRO stage "
                f'{stage}; delete it, or enable "bf16" or "fp16"'
            )
    for name in json.torch_autocast.lower_precision_safe_modules:
        package, _, cls = name.rpartition(".")
        try:
            getattr(importlib.import_module(package), cls)
        except (ImportError, AttributeError, ValueError):
            where = f"{path}: torch_autocast.lower_precision_safe_modules"
            raise UserError(f'{where}: there is no {name!r}; write a class such as "torch.nn.Linear"') from None


def activation_checkpointing(json: DeepSpeedJson, path: str, *, flag: str) -> Checkpointing:
    """Activation checkpointing from the JSON's two blocks and the flag.

    Args:
        json: the file.
        path: of the file, for messages.
        flag: --grad-checkpointing: "", "full" (each block, or the JSON's interval), "selective" or a number of blocks.

    Raises:
        UserError: the flag contradicts the JSON.
    """
    name = f"{path}: pipeline.activation_checkpoint_interval"
    interval, block = json.pipeline.activation_checkpoint_interval, json.activation_checkpointing
    cpu, selective = block is not None and block.cpu_checkpointing, flag == "selective"
    if interval == 0 and (flag or block is not None):
        asker = "--grad-checkpointing" if flag else 'the block "activation_checkpointing"'
        raise UserError(f"{name} 0 turns activation checkpointing off and {asker} turns it on; delete one of them")
    asked = int(flag) if flag.isdecimal() else 1 if selective else None
    if asked is not None and interval not in (None, asked):
        raise UserError(f"{name} {interval} contradicts --grad-checkpointing {flag}; delete one of them")
    if selective and cpu:
        name = f"{path}: activation_checkpointing.cpu_checkpointing"
        raise UserError(f"{name} does not work with --grad-checkpointing selective; use --grad-checkpointing full")
    is_on = bool(flag) or block is not None
    return Checkpointing(asked or interval or int(is_on), cpu, selective)


# The part of a file that evaluation needs; it has no optimizer, no schedule and no accumulation.
_FOR_EVALUATION = {"train_micro_batch_size_per_gpu", "fp16", "bf16", "torch_autocast", "data_types", *MONITORS}


def for_evaluation(json: DeepSpeedJson, *, pp: int) -> DeepSpeedJson:
    """The part of a training file that evaluation needs: the precision, the micro-batch, the monitors.

    Of ZeRO only stage 3 matters, and only without a pipeline: parameters stay partitioned, so that a model that does
    not fit on one accelerator can be evaluated.

    Args:
        json: the file.
        pp: pipeline stages.
    """
    kept = _FOR_EVALUATION | ({"zero_optimization"} if json.zero_stage == 3 and pp == 1 else set())
    dropped = [key for key in json.dump() if key not in kept]
    return json.replace({}, [*dropped, "zero_optimization.offload_optimizer"])


# "auto" in optimizer.params, except lr and weight_decay, which come from flags: the first two as in Hugging Face's
# TrainingArguments, the last as timm's --momentum.
_AUTO_PARAMS: Mapping[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8, "momentum": 0.9}


def with_optimizer(json: DeepSpeedJson, path: str, *, lr: float | None = None) -> tuple[DeepSpeedJson, list[str]]:
    """The file with an optimizer whose `params` are numbers, except "auto" in lr and weight_decay.

    Args:
        json: the file.
        path: named in messages.
        lr: the flag's.

    Returns:
        The new file, and lines that say what was filled in. A file without an `optimizer` trains with AdamW.

    Raises:
        UserError: neither an optimizer nor --lr.
    """
    if json.optimizer is None:
        if lr is None:
            raise UserError(f'{path} has no "optimizer", and AdamW needs --lr: give one, or write the block')
        params = {"lr": "auto", **{key: _AUTO_PARAMS[key] for key in ("betas", "eps")}, "weight_decay": "auto"}
        note = f'{path} has no "optimizer": AdamW with betas 0.9 and 0.999, eps 1e-8 and the flags\' rate and decay'
        return json.replace({"optimizer": {"type": "AdamW", "params": params}}), [note]
    names = {f"optimizer.params.{key}": value for key, value in _AUTO_PARAMS.items()}
    filled = {name: value for name, value in names.items() if name in json.auto}
    return json.replace(filled), [f'{name} "auto" is {value}' for name, value in filled.items()]


def check_scheduler(json: DeepSpeedJson, path: str) -> None:
    """Build DeepSpeed's scheduler once, to check its arguments before there is a process group.

    Args:
        json: the file with every "auto" resolved.
        path: named in messages.

    Raises:
        UserError: an unknown scheduler, or an argument that it does not take.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    if json.scheduler is None or not json.given("scheduler"):
        return
    kind = json.scheduler.type or ""
    known = [name for name in lr_schedules.VALID_LR_SCHEDULES if hasattr(lr_schedules, name)]
    if kind not in known:
        raise UserError(f"{path}: scheduler.type {kind!r} is unsupported; use one of {', '.join(known)}, or --sched")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    was_disabled, logger.disabled = logger.disabled, True  # it logs the same for the real optimizer
    try:
        getattr(lr_schedules, kind)(optimizer, **json.scheduler.params)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{path}: scheduler.params of {kind}: {error}") from error
    finally:
        logger.disabled = was_disabled


def check_with_deepspeed(json: DeepSpeedJson, path: str) -> None:
    """Let DeepSpeed read the resolved file before there is a process group, and report its complaint in one line.

    Raises:
        UserError: DeepSpeed's own complaint.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without ranks DeepSpeed would compare the batch with one rank; `batch_sizes` has checked it.
    try:
        DeepSpeedConfig({key: value for key, value in json.dump().items() if key != "train_batch_size"})
    except Exception as error:  # any exception would come again as a traceback after the ranks have met
        raise UserError(f"{path}: DeepSpeed rejects it: {first_line(error)}") from error
