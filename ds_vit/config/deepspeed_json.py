"""DeepSpeed's JSON: read the file and --set, resolve every "auto", and let DeepSpeed check the result.

A file that works with DeepSpeed 0.19 works here. DeepSpeed ignores unknown top-level keys, crashes on some "auto"
values and checks the batch arithmetic after a floor division; these are rejected before any process group exists.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_vit.config import deepspeed_keys
from ds_vit.config.batch import BatchSizes
from ds_vit.config.schema import FIELDS, KEY_OF_FLAG
from ds_vit.fault_tolerance.errors import UserError, first_line, read_text


def derived_path(path: str | Path) -> Path:
    """The file next to a run's deepspeed.json that records the origin of its values; other JSON files have none."""
    return Path(path).with_suffix(".derived.json")


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file; one named `.hjson` may have comments and trailing commas.

    DeepSpeed reads every file as Hjson, which turns a line with a missing comma into one long string.

    Raises:
        UserError: the file is missing, malformed (with line and column), has a duplicate key, or is not an object.
    """
    path = Path(path)
    text = read_text(path, "--deepspeed_config ")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f'{path}: the key "{key}" is given twice in one block; keep one')
        return dict(pairs)

    try:
        data = (
            _load_hjson(text, unique, path) if path.suffix == ".hjson" else json.loads(text, object_pairs_hook=unique)
        )
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise UserError(
            f"{where}: malformed JSON: {error.msg} (comments and trailing commas need a file named .hjson)"
        ) from None
    except UserError:
        raise
    except (RecursionError, ValueError) as error:  # brackets without end, a number of thousands of digits
        raise UserError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is one JSON object, not a {type(data).__name__}")
    return data


def _load_hjson(text: str, unique: Callable, path: Path) -> Any:
    """Hjson without unquoted strings, which hide a missing comma."""
    import hjson

    try:
        data = hjson.loads(text, object_pairs_hook=unique)
    except hjson.HjsonDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}, column {error.colno}: malformed Hjson: {error.msg}") from None
    for leaf in leaves(data).values() if isinstance(data, dict) else ():
        if isinstance(leaf, str) and any(c in leaf for c in '{}":,\n'):
            line = text[: text.find(leaf)].count("\n") + 1
            raise UserError(f"{path}, line {line}: {leaf!r} would be one string; a comma is missing before or in it")
    return data


def overlay(data: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The JSON with the values of `parse_set` in it; missing blocks are created.

    Args:
        data: the file's.
        values: by dotted name.
        path: the file, named in messages.

    Raises:
        UserError: a part of a name is not a block in the file.
    """
    out = copy.deepcopy(dict(data))
    for key, value in values.items():
        *blocks, last = key.split(".")
        inner: Any = out
        for depth, name in enumerate(blocks, 1):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise UserError(f'--set {key}: "{".".join(blocks[:depth])}" in {path} is not a block but {inner!r}')
        inner[last] = value
    return out


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a JSON by their dotted names; an empty block counts as a value."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        out |= leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def wrong_numbers(data: Mapping[str, Any], path: str) -> dict[str, str]:
    """Keys of numbers that are not finite, or outside the range of the flag for the same key → what is wrong."""
    found, fields = {}, {key: FIELDS[name] for name, key in KEY_OF_FLAG.items()}
    for key, value in leaves(data).items():
        for item in _items(value):
            if isinstance(item, float) and not math.isfinite(item):
                found[key] = f"{path}: {key} must be a finite number, not {item}"
        span = fields[key].metadata["span"] if key in fields and key not in found else None
        if span and isinstance(value, (int, float)) and not span.holds(value):
            found[key] = f"{path}: {key} {span.words}, not {value}"
    return found


def _items(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (list, tuple)) else (value,)


# An "auto" in these is resolved later from the model, the machine and the flags; elsewhere it is DeepSpeed's default.
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
_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def check_and_read(data: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The file with the values that DeepSpeed reads, checked by every rule that needs nothing but the file.

    Returns:
        It, without unknown or removed keys; what is wrong with it, and what to do.
    """
    wrong = {**deepspeed_keys.wrong_keys(data, path), **wrong_numbers(data, path)}
    read = {
        key: {sub: item for sub, item in value.items() if f"{key}.{sub}" not in wrong}
        if isinstance(value, Mapping)
        else value
        for key, value in data.items()
        if key not in wrong
    }
    read, problems = as_deepspeed_reads(read, path)
    return read, [*wrong.values(), *problems, *deepspeed_keys.wrong_values(read, path)]


def as_deepspeed_reads(data: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The values as DeepSpeed's pydantic models read them.

    In these blocks "auto" means the default, quoted numbers and truth values are valid, and the offload settings of
    ZeRO have an old spelling.

    Returns:
        A new file, in which an "auto" of `RESOLVED_LATER` is kept; what the models reject, each in one line.
    """
    import pydantic

    stage = deepspeed_keys.value_of(data, "zero_optimization.stage")
    if isinstance(stage, (bool, float)):  # which pydantic reads as an integer
        return dict(data), [f"{path}: zero_optimization.stage {stage!r} does not exist; it may be 0, 1, 2 or 3"]
    out, problems = dict(data), []
    for block, value in data.items():
        model = deepspeed_keys.block_model(block)
        if model is None:
            continue
        aliases = {name: field.alias or name for name, field in model.model_fields.items()}
        given = {aliases.get(key, key): item for key, item in value.items()}
        later = {key: item for key, item in given.items() if item == "auto" and f"{block}.{key}" in RESOLVED_LATER}
        given = {key: item for key, item in given.items() if item != "auto"}
        try:
            read = model(**given).model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False)
        except pydantic.ValidationError as error:
            problems += [f"{path}: {_in_one_line(block, one)}" for one in error.errors()]
            continue
        except AssertionError as error:  # an old and a new name of one key
            problems.append(f"{path}: {block}: {error}")
            continue
        for old, new in _OLD_OFFLOAD.items():
            if given.pop(old, None) is not None and read.get(new):
                given[new] = read[new] = {"device": "cpu"}
        # The models drop deprecated keys; they stay, so that `idle_keys` names them.
        deprecated = {key: item for key, item in given.items() if key not in read}
        out[block] = deprecated | _given_only(read, given) | later
    return out, problems


def _given_only(read: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the given keys, without those that the models fill in."""
    return {
        key: _given_only(value, given[key]) if isinstance(value, Mapping) and isinstance(given[key], Mapping) else value
        for key, value in read.items()
        if key in given
    }


def _in_one_line(block: str, first: Mapping[str, Any]) -> str:
    """A complaint of a pydantic model, in one line."""
    name = ".".join([block, *map(str, first["loc"])])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    # For a rule between keys the input is the whole block, which is too long for a line.
    return f"{name}: {message}" + ("" if len(first["loc"]) == 0 else f", not {first.get('input')!r}")


# The part of a file that evaluation needs; it has no optimizer, no schedule and no accumulation.
_FOR_EVALUATION = (
    "train_micro_batch_size_per_gpu",
    *("fp16", "bf16", "torch_autocast", "data_types", *deepspeed_keys.MONITORS),
)


def for_evaluation(data: Mapping[str, Any], *, pp: int) -> dict[str, Any]:
    """The part of a training file that evaluation needs: the precision, the micro-batch, the monitors.

    Of ZeRO only stage 3 matters, and only without a pipeline: parameters stay partitioned, so that a model that does
    not fit on one accelerator can be evaluated.

    Args:
        data: the JSON.
        pp: pipeline stages.
    """
    out = {key: data[key] for key in _FOR_EVALUATION if key in data}
    zero = data.get("zero_optimization") or {}
    if zero.get("stage") == 3 and pp == 1:
        out["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return out


# "auto" in optimizer.params, except lr and weight_decay, which come from flags: the first two as in Hugging Face's
# TrainingArguments, the last as timm's --momentum.
AUTO_PARAMS: Mapping[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8, "momentum": 0.9}
_FROM_FLAGS = ("lr", "weight_decay")


def with_optimizer(data: Mapping[str, Any], path: str, *, lr: float | None = None) -> tuple[dict[str, Any], list[str]]:
    """The file with an optimizer whose `params` are numbers, except "auto" in lr and weight_decay.

    Args:
        data: the JSON.
        path: named in messages.
        lr: the flag's.

    Returns:
        The new file, and lines that say what was filled in. A file without an `optimizer` trains with AdamW.

    Raises:
        UserError: "auto" that nothing resolves, a quoted number, or neither an optimizer nor --lr.
    """
    block = data.get("optimizer")
    if block is None:
        if lr is None:
            raise UserError(f'{path} has no "optimizer", and AdamW needs --lr: give one, or write the block')
        params = {"lr": "auto", **{key: AUTO_PARAMS[key] for key in ("betas", "eps")}, "weight_decay": "auto"}
        note = f'{path} has no "optimizer": AdamW with betas 0.9 and 0.999, eps 1e-8 and the flags\' rate and decay'
        return {**data, "optimizer": {"type": "AdamW", "params": params}}, [note]
    given = _params_of(data, "optimizer", path)
    for key in [key for key, value in given.items() if value == "auto"]:
        if key not in (*AUTO_PARAMS, *_FROM_FLAGS):
            known = ", ".join(sorted((*AUTO_PARAMS, *_FROM_FLAGS)))
            raise UserError(f'{path}: "optimizer.params.{key}" cannot be "auto"; those that can are {known}')
    filled = {key: AUTO_PARAMS[key] for key, value in given.items() if value == "auto" and key in AUTO_PARAMS}
    notes = [f'optimizer.params.{key} "auto" is {value}' for key, value in filled.items()]
    return {**data, "optimizer": {**block, "params": {**given, **filled}}}, notes


def _params_of(data: Mapping[str, Any], block: str, path: str) -> Mapping[str, Any]:
    """The arguments of the optimizer or scheduler; quoted numbers, which DeepSpeed passes on as text, are rejected."""
    params = data[block].get("params") or {}
    if not isinstance(params, Mapping):
        raise UserError(f"{path}: {block}.params must be a block {{…}}, not {params!r}")
    for key, value in params.items():
        for item in _items(value):
            if isinstance(item, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", item.lower()):
                raise UserError(f'{path}: {block}.params.{key}: "{item}" is text, not a number; write {item}')
    return params


def check_scheduler(data: Mapping[str, Any], path: str) -> None:
    """Build DeepSpeed's scheduler once, to check its arguments before there is a process group.

    Args:
        data: the JSON with every "auto" resolved.
        path: named in messages.

    Raises:
        UserError: an unknown scheduler, or an argument that it does not take.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    if not data.get("scheduler"):
        return
    kind = data["scheduler"].get("type")
    known = [name for name in lr_schedules.VALID_LR_SCHEDULES if hasattr(lr_schedules, name)]
    if kind not in known:
        raise UserError(f"{path}: scheduler.type {kind!r} is unsupported; use one of {', '.join(known)}, or --sched")
    params = _params_of(data, "scheduler", path)
    was_disabled, logger.disabled = logger.disabled, True  # it logs the same for the real optimizer
    try:
        getattr(lr_schedules, kind)(
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9), **params
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{path}: scheduler.params of {kind}: {error}") from error
    finally:
        logger.disabled = was_disabled


def resolve(
    data: Mapping[str, Any],
    *,
    batch: BatchSizes,
    gradient_clipping: float,
    auto: Mapping[str, Any],
    path: str,
) -> dict[str, Any]:
    """The file that DeepSpeed receives: every "auto" replaced, the batch and the clipping always explicit.

    Args:
        data: the JSON.
        batch: the batch arithmetic.
        gradient_clipping: largest norm of the gradient, 0 for none.
        auto: values for "auto" by dotted name; None deletes the key, so that DeepSpeed's default holds.
        path: named in messages.

    Raises:
        UserError: "auto" that nothing resolves.
    """
    explicit = {**data, **batch.as_json(), "gradient_clipping": gradient_clipping}
    names = [name for name, value in leaves(explicit).items() if value == "auto"]
    for name in names:
        if name not in auto:
            raise UserError(f'{path}: "{name}" cannot be "auto"; those that can are {", ".join(sorted(auto))}')
    resolved = overlay(explicit, {name: auto[name] for name in names}, path)
    return deepspeed_keys.without(resolved, [name for name in names if auto[name] is None])


def check_with_deepspeed(resolved: Mapping[str, Any], path: str) -> None:
    """Let DeepSpeed read the resolved file before there is a process group, and report its complaint in one line.

    Raises:
        UserError: DeepSpeed's own complaint.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without ranks DeepSpeed would compare the batch with one rank; `batch_sizes` has checked it.
    try:
        DeepSpeedConfig({key: value for key, value in resolved.items() if key != "train_batch_size"})
    except Exception as error:  # any exception would come again as a traceback after the ranks have met
        raise UserError(f"{path}: DeepSpeed rejects it: {first_line(error)}") from error
