"""Settings of a DeepSpeed JSON that depend on each other, on the layout or on the machine.

The rules that need only the file are in `deepspeed_keys.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_vit.config.deepspeed_keys import switched_on, value_of
from ds_vit.fault_tolerance.errors import UserError


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


def zero_stage(data: Mapping[str, Any]) -> int:
    """The ZeRO stage, 0 without ZeRO."""
    return int(value_of(data, "zero_optimization.stage") or 0)


MASTERS_IN_BF16 = "bf16.bf16_master_weights_and_grads"


def sums_in_fp32(data: Mapping[str, Any]) -> bool:
    """Whether micro-batches are summed in fp32; a file without a type is resolved by `with_fp32_sums`."""
    return value_of(data, "data_types.grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")


def with_fp32_sums(data: Mapping[str, Any], selected: Precision, accumulation: int) -> Mapping[str, Any]:
    """The file, with several micro-batches of a 16-bit model summed in fp32 where it names no type.

    DeepSpeed's default is the model's type at ZeRO-2 and 3; a 16-bit sum of 16 micro-batches has 1.2 times the error.
    """
    silent = value_of(data, "data_types.grad_accum_dtype") is None and not value_of(data, MASTERS_IN_BF16)
    if accumulation == 1 or selected.compute == "float32" or not silent:
        return data
    return {**data, "data_types": {**(data.get("data_types") or {}), "grad_accum_dtype": "fp32"}}


MOST_IN_BUCKET = 2**24
LEAST_BUCKETS = 8


def elements_of_bucket(data: Mapping[str, Any], parameters: int) -> int:
    """Elements of a bucket of engine/flat_gradient.py at most, unless one parameter has more.

    Gradients are held twice until their bucket is full: whatever `reduce_bucket_size` says, that is at most an eighth
    of them, and 2**24.
    """
    size = value_of(data, "zero_optimization.reduce_bucket_size")
    given = MOST_IN_BUCKET if size in (None, "auto") else int(size)
    return max(1, min(given, MOST_IN_BUCKET, parameters // LEAST_BUCKETS))


def check_pipeline(data: Mapping[str, Any], path: str, pp: int) -> None:
    """Reject settings that DeepSpeed's pipeline engine lacks.

    Raises:
        UserError: with the nearest legal choice.
    """
    if pp == 1:
        return
    stage = zero_stage(data)
    if stage > 1:
        raise UserError(f"{path}: ZeRO stage {stage} does not work with --pp {pp}; use stage 1, or --pp 1")
    for key in ("wall_clock_breakdown", "flops_profiler"):
        if data.get(key) is True or switched_on(data.get(key)):
            raise UserError(f'{path}: "{key}" crashes DeepSpeed 0.19.8 with --pp {pp}; delete it')


def check_grad_norm(data: Mapping[str, Any], path: str, *, clip: float) -> None:
    """Reject `compute_grad_norm` false where clipping needs the norm."""
    if clip > 0 and value_of(data, "zero_optimization.compute_grad_norm") is False:
        raise UserError(
            f'{path}: "zero_optimization.compute_grad_norm": false leaves no norm for gradient_clipping {clip:g}; '
            "delete one of them, or set it to 0"
        )


def precision(data: Mapping[str, Any], path: str, *, on_cpu: bool) -> Precision:
    """The number formats that the file selects.

    Raises:
        UserError: two at once, fp16 on a CPU, or a wrapper that DeepSpeed 0.19.8 gets wrong.
    """
    enabled = [block for block in ("bf16", "fp16", "torch_autocast") if switched_on(data.get(block))]
    if len(enabled) > 1:
        raise UserError(f"{path}: {' and '.join(enabled)} are enabled at once; keep one")
    if not enabled:
        return Precision("fp32", "float32")
    kind = enabled[0]
    if kind == "torch_autocast":
        name = str(data[kind].get("dtype", "bfloat16")).removeprefix("torch.")
        name = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(name, name)
        if name not in ("bf16", "fp16"):
            raise UserError(f'{path}: torch_autocast.dtype {name!r} is not a 16-bit type; use "bfloat16" or "float16"')
        kind = f"autocast-{name}"
    if kind.endswith("fp16") and on_cpu:
        raise UserError(f"{path}: {kind} needs a GPU and this machine has none; use bf16 or fp32")
    if kind in ("bf16", "fp16") and zero_stage(data) == 0:
        raise UserError(
            f"{path}: {kind}.enabled at ZeRO stage 0 makes DeepSpeed 0.19.8 take an optimizer step before training; "
            'use stage 1, or "torch_autocast": {"enabled": true} as in ds_configs/zero0_bf16.json'
        )
    return Precision(kind, {"bf16": "bfloat16", "fp16": "float16"}.get(kind, "float32"))


def check_types(data: Mapping[str, Any], selected: Precision, path: str) -> None:
    """Reject names of types and modules that DeepSpeed would look up after the ranks have met.

    Args:
        data: the JSON.
        selected: its precision.
        path: named in messages.

    Raises:
        UserError: names the key and its valid values.
    """
    from deepspeed.runtime.config import DtypeEnum

    types = data.get("data_types") or {}
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        name = types.get(key)
        if name is None:
            continue
        try:
            dtype = str(DtypeEnum(name).value)
        except (KeyError, ValueError):
            raise UserError(f'{path}: data_types.{key} must be "fp32", "bf16" or "fp16", not {name!r}') from None
        has_to_match = key == "param_dtype" or (key == "grad_accum_dtype" and zero_stage(data) == 0)
        if has_to_match and dtype != f"torch.{selected.compute}":
            raise UserError(
                f"{path}: data_types.{key} {name!r} must be the model's type, {selected.compute}, at ZeRO stage "
                f'{zero_stage(data)}; delete it, or enable "bf16" or "fp16"'
            )
    modules = value_of(data, "torch_autocast.lower_precision_safe_modules") or ()
    if not isinstance(modules, (list, tuple)):
        raise UserError(f"{path}: torch_autocast.lower_precision_safe_modules must be a list […], not {modules!r}")
    for name in modules:
        package, _, cls = str(name).rpartition(".")
        try:
            getattr(importlib.import_module(package), cls)
        except (ImportError, AttributeError, ValueError):
            where = f"{path}: torch_autocast.lower_precision_safe_modules"
            raise UserError(f'{where}: there is no {name!r}; write a class such as "torch.nn.Linear"') from None


def activation_checkpointing(data: Mapping[str, Any], path: str, *, flag: str) -> Checkpointing:
    """Activation checkpointing from the JSON's two blocks and the flag.

    Args:
        data: the JSON.
        path: of the file, for messages.
        flag: --grad-checkpointing: "", "full" (each block, or the JSON's interval), "selective" or a number of blocks.

    Raises:
        UserError: the flag contradicts the JSON, or the interval is not a whole number.
    """
    name = f"{path}: pipeline.activation_checkpoint_interval"
    interval = value_of(data, "pipeline.activation_checkpoint_interval")
    block = data.get("activation_checkpointing")
    cpu = bool((block or {}).get("cpu_checkpointing", False))
    selective = flag == "selective"
    if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 0):
        raise UserError(f"{name} must be a whole number >= 0, not {interval!r}")
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
