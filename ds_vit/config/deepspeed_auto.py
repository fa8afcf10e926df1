"""What a DeepSpeed JSON leaves open: "auto", old names, numbers in quotation marks, and an optimizer that is not there.

`settle` reads the blocks as DeepSpeed's own models read them, and `with_optimizer` fills the optimizer block; what
hangs on the flags, the model and the batch becomes numbers in `deepspeed_json.resolve`, by training/plan/deepspeed.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from pydantic import BaseModel

from ds_vit.config import deepspeed_keys
from ds_vit.config.deepspeed_rules import current_names
from ds_vit.fault_tolerance.errors import UserError

# "auto" in optimizer.params, less lr and weight_decay, which the flags give: the first two as Hugging Face's
# TrainingArguments fill them (adam_beta1, adam_beta2, adam_epsilon), the last as timm's --momentum.
AUTO_PARAMS: Mapping[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8, "momentum": 0.9}
_FROM_FLAGS = ("lr", "weight_decay")
# What stands as "auto" in these is resolved from the model, the machine and the flags.
RESOLVED_LATER = frozenset(
    {
        "bf16.enabled",
        "fp16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    }
)


def settle(data: Mapping[str, Any]) -> dict[str, Any]:
    """The file as DeepSpeed's own models read it, after `deepspeed_keys.check_keys`.

    In the blocks that DeepSpeed reads by a pydantic model "auto" means the default, a number or a truth value may stand
    in quotation marks, and ZeRO's offload has an old spelling. Whatever this package reads, it reads afterwards.

    Returns:
        A new file with the values that DeepSpeed would see. An "auto" of `RESOLVED_LATER` is left.
    """
    out = dict(data)
    for block, value in data.items():
        model = deepspeed_keys.block_model(block)
        if model is not None and isinstance(value, Mapping):
            current = current_names(value) if block == "zero_optimization" else value
            kept = {k: v for k, v in current.items() if not (v == "auto" and f"{block}.{k}" not in RESOLVED_LATER)}
            out[block] = _as_read(kept, model(**kept))
    return out


def _as_read(block: Mapping[str, Any], parsed: BaseModel) -> dict[str, Any]:
    """The block with its strings replaced where DeepSpeed reads them as numbers or truth values."""
    names = {field.alias or name: name for name, field in type(parsed).model_fields.items()}
    out: dict[str, Any] = {}
    for key, value in block.items():
        seen = getattr(parsed, names.get(key, key), value)
        if isinstance(value, Mapping) and isinstance(seen, BaseModel):
            out[key] = _as_read({k: v for k, v in value.items() if v != "auto"}, seen)
        else:
            quoted = isinstance(value, str) and value != "auto" and isinstance(seen, (bool, int, float))
            out[key] = (int(seen.value) if isinstance(seen, Enum) else seen) if quoted else value
    return out


def with_optimizer(data: Mapping[str, Any], path: str, *, lr: float | None = None) -> tuple[dict[str, Any], list[str]]:
    """The file with an optimizer whose `params` are numbers, but for "auto" in lr and weight_decay.

    Args:
        data: the JSON.
        path: named in messages.
        lr: the flag's.

    Returns:
        The new file, and lines that say what was filled in. A file without an `optimizer` trains with AdamW.

    Raises:
        UserError: "auto" where nothing resolves it, a number in quotation marks, or neither an optimizer nor --lr.
    """
    block = data.get("optimizer")
    if block is None:
        if lr is None:
            raise UserError(f'{path} has no "optimizer", and AdamW needs --lr: give one, or write the block')
        params = {"lr": "auto", **{key: AUTO_PARAMS[key] for key in ("betas", "eps")}, "weight_decay": "auto"}
        said = [f'{path} has no "optimizer": AdamW with betas 0.9 and 0.999, eps 1e-8 and the flags\' rate and decay']
        return {**data, "optimizer": {"type": "AdamW", "params": params}}, said
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise UserError(f"{path}: optimizer.params must be a block {{…}}, not {params!r}")
    filled = {key: AUTO_PARAMS[key] for key, value in params.items() if value == "auto" and key in AUTO_PARAMS}
    for key, value in params.items():
        if value == "auto" and key not in (*AUTO_PARAMS, *_FROM_FLAGS):
            known = ", ".join(sorted((*AUTO_PARAMS, *_FROM_FLAGS)))
            raise UserError(f'{path}: "optimizer.params.{key}" cannot be "auto"; those that can are {known}')
        _refuse_quoted_number(f"optimizer.params.{key}", value, path)
    said = [f'optimizer.params.{key} "auto" is {value}' for key, value in filled.items()]
    return {**data, "optimizer": {**block, "params": {**params, **filled}}}, said


def _refuse_quoted_number(name: str, value: Any, path: str) -> None:
    """DeepSpeed hands these to the optimizer and the scheduler as they stand, and they end in a TypeError."""
    for item in value if isinstance(value, (list, tuple)) else (value,):
        try:
            number = isinstance(item, str) and float(item) is not None
        except ValueError:
            number = False
        if number:
            raise UserError(f'{path}: {name}: "{item}" in quotation marks is not a number; write {item}')


def check_scheduler(data: Mapping[str, Any], path: str) -> None:
    """Have DeepSpeed's scheduler look at its arguments before there is a process group.

    Args:
        data: the JSON with every "auto" resolved.
        path: named in messages.

    Raises:
        UserError: an unknown scheduler, an argument that it does not take, or one of torch's.
    """
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    block = data.get("scheduler")
    if not block:
        return
    kind = block.get("type")
    known = [name for name in lr_schedules.VALID_LR_SCHEDULES if hasattr(lr_schedules, name)]
    if kind not in known:
        why = "is torch's, whose place in its course no checkpoint here can hold" if _is_torchs(kind) else "is unknown"
        raise UserError(f"{path}: scheduler.type {kind!r} {why}; use one of {', '.join(known)}, or --sched")
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise UserError(f"{path}: scheduler.params must be a block {{…}}, not {params!r}")
    cls = getattr(lr_schedules, kind)
    for key, value in params.items():
        if key not in inspect.signature(cls.__init__).parameters:
            raise UserError(f"{path}: scheduler.params.{key}: {kind} has no such argument")
        if key != "warmup_type":
            _refuse_quoted_number(f"scheduler.params.{key}", value, path)
    talks, logger.disabled = logger.disabled, True  # it will say the same of the real optimizer
    try:
        cls(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9), **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{path}: scheduler.params of {kind}: {error}") from error
    finally:
        logger.disabled = talks


def _is_torchs(kind: Any) -> bool:
    return isinstance(kind, str) and hasattr(torch.optim.lr_scheduler, kind)
