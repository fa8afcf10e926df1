"""DeepSpeed's JSON: read it, see which precision and batch it asks for, and resolve every "auto".

A file that works with DeepSpeed 0.19 works here. DeepSpeed itself lets unknown top-level keys pass, crashes on some
"auto" values and checks the batch arithmetic after a floor division; all of that is caught here, before any process
group exists.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_rules import MONITORS, switched_on
from ds_vit.fault_tolerance.errors import UserError, first_line, read_text


@dataclass(frozen=True)
class Precision:
    """What a JSON file says about number formats.

    Attributes:
        name: "fp32", "bf16", "fp16", "autocast-bf16" or "autocast-fp16", as summary.json has it.
        compute: torch dtype name of the parameters and inputs that the forward pass sees.
    """

    name: str
    compute: str


@dataclass(frozen=True)
class Checkpointing:
    """Activation checkpointing: every `interval` blocks (0: off), kept on the CPU where `cpu` is set.

    `selective`: what matrix products and attention give is kept too.
    """

    interval: int = 0
    cpu: bool = False
    selective: bool = False


def derived_path(path: str | Path) -> Path:
    """The file beside a run's deepspeed.json that says where its values came from; no other JSON has one."""
    return Path(path).with_suffix(".derived.json")


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file; one named `.hjson` may have comments and trailing commas.

    DeepSpeed reads every file as Hjson, for which a missing comma makes one long string of what stands on the line.

    Raises:
        UserError: the file is missing, malformed (with line and column), has a key twice, or is not an object.
    """
    path = Path(path)
    text = read_text(path, "--deepspeed_config ")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(f'{path}: the key "{key}" stands twice in one block; keep one')
            seen[key] = value
        return seen

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        if path.suffix != ".hjson":
            place = f"line {error.lineno}, column {error.colno}"
            raise UserError(f"{path}, {place}: {_what_is_malformed(text, error)}") from None
        data = _load_hjson(text, unique, path)
    except UserError:
        raise
    except (RecursionError, ValueError) as error:  # brackets without end, a number of thousands of digits
        raise UserError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is one JSON object, not a {type(data).__name__}")
    return data


def _what_is_malformed(text: str, error: json.JSONDecodeError) -> str:
    """What json says, in words of its own for what Hjson would take."""
    before, after = text[: error.pos].rstrip(), text[error.pos :]
    if after.startswith(("//", "/*", "#")):
        return "JSON has no comments; delete them, or name the file .hjson"
    if after.lstrip(", \t\r\n").startswith(("}", "]")) and (before.endswith(",") or after.startswith(",")):
        return "JSON has no comma before a closing bracket; delete it, or name the file .hjson"
    return f"malformed JSON: {error.msg}"


def _load_hjson(text: str, unique: Callable, path: Path) -> Any:
    """Hjson less its strings without quotation marks, which swallow a missing comma."""
    import hjson

    try:
        data = hjson.loads(text, object_pairs_hook=unique)
    except hjson.HjsonDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}, column {error.colno}: malformed Hjson: {error.msg}") from None
    for leaf in _leaves(data):
        if isinstance(leaf, str) and any(c in leaf for c in '{}":,\n'):
            line = text[: text.find(leaf)].count("\n") + 1
            raise UserError(f"{path}, line {line}: {leaf!r} would be one string; a comma is missing before or in it")
    return data


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list):
        for value in data:
            yield from _leaves(value)
    else:
        yield data


def check_pipeline(data: Mapping[str, Any], path: str, pp: int) -> None:
    """Refuse what DeepSpeed's pipeline engine cannot do or gets wrong.

    Raises:
        UserError: with the nearest legal choice.
    """
    if pp == 1:
        return
    stage = data.get("zero_optimization", {}).get("stage", 0)
    if stage > 1:
        raise UserError(
            f"{path}: ZeRO stage {stage} does not go with --pp {pp}: DeepSpeed's pipeline takes stages 0 and 1; "
            "use stage 1, or --pp 1"
        )
    for key, asked in (
        ("wall_clock_breakdown", data.get("wall_clock_breakdown")),
        ("flops_profiler", switched_on(data.get("flops_profiler"))),
    ):
        if asked:
            raise UserError(
                f'{path}: "{key}" crashes DeepSpeed 0.19.8 with --pp {pp}; delete it (the start table has the FLOPs, '
                "metrics.jsonl the times)"
            )


def precision(data: Mapping[str, Any], path: str, *, on_cpu: bool) -> Precision:
    """Which number formats the file asks for.

    Raises:
        UserError: two at once, fp16 on a CPU, or a wrapper that DeepSpeed 0.19.8 gets wrong.
    """
    stage = data.get("zero_optimization", {}).get("stage", 0)
    enabled = [block for block in ("bf16", "fp16", "torch_autocast") if switched_on(data.get(block))]
    if len(enabled) > 1:
        raise UserError(f"{path}: {' and '.join(enabled)} are enabled at once; keep one")
    if not enabled:
        return Precision("fp32", "float32")
    kind = enabled[0]
    if kind == "torch_autocast":
        name = str(data[kind].get("dtype", "bfloat16")).removeprefix("torch.")
        name = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(name, name)
        if name not in ("bfloat16", "float16"):
            raise UserError(f'{path}: torch_autocast.dtype {name!r} is not a 16-bit type; use "bfloat16" or "float16"')
        kind = "autocast-bf16" if name == "bfloat16" else "autocast-fp16"
    if kind in ("fp16", "autocast-fp16") and on_cpu:
        raise UserError(f"{path}: {kind} needs a GPU and this machine has none; use bf16 or fp32")
    if kind == "bf16" and stage == 0:
        raise UserError(
            f"{path}: bf16.enabled at ZeRO stage 0 makes DeepSpeed 0.19.8 take an optimizer step before training; "
            'use stage 1, or "torch_autocast": {"enabled": true, "dtype": "bfloat16"} as in ds_configs/zero0_bf16.json'
        )
    if kind == "fp16" and stage == 0:
        raise UserError(
            f"{path}: fp16.enabled at ZeRO stage 0 makes DeepSpeed 0.19.8 take an optimizer step before training; "
            "use stage 1 as in ds_configs/zero1_fp16.json"
        )
    return Precision(kind, {"bf16": "bfloat16", "fp16": "float16"}.get(kind, "float32"))


def check_types(data: Mapping[str, Any], found: Precision, path: str) -> None:
    """Refuse names of types and of modules that DeepSpeed would look up after the ranks have met.

    Args:
        data: the JSON.
        found: the precision that it asks for.
        path: named in messages.

    Raises:
        UserError: names the key and what it may be.
    """
    from deepspeed.runtime.config import DtypeEnum

    types = data.get("data_types") or {}
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        try:
            given = None if types.get(key) is None else DtypeEnum(types[key]).value
        except (KeyError, ValueError):
            raise UserError(f'{path}: data_types.{key} must be "fp32", "bf16" or "fp16", not {types[key]!r}') from None
        if key == "param_dtype" and given is not None and str(given) != f"torch.{found.compute}":
            raise UserError(
                f"{path}: data_types.param_dtype {types[key]!r} is not what {found.name} computes in; delete it, or "
                'enable the block "bf16" or "fp16"'
            )
        stage = data.get("zero_optimization", {}).get("stage", 0)
        if key == "grad_accum_dtype" and stage == 0 and given is not None and str(given) != f"torch.{found.compute}":
            raise UserError(
                f"{path}: data_types.grad_accum_dtype {types[key]!r} at ZeRO stage 0 must be the model's type, "
                f"{found.compute}; delete it, or use stage 1"
            )
    modules = (data.get("torch_autocast") or {}).get("lower_precision_safe_modules") or ()
    if not isinstance(modules, (list, tuple)):
        raise UserError(f"{path}: torch_autocast.lower_precision_safe_modules must be a list […], not {modules!r}")
    for name in modules:
        package, _, cls = str(name).rpartition(".")
        try:
            getattr(importlib.import_module(package), cls)
        except (ImportError, AttributeError, ValueError):
            raise UserError(
                f"{path}: torch_autocast.lower_precision_safe_modules: there is no {name!r}; write the class with its "
                'module, such as "torch.nn.Linear"'
            ) from None


def activation_checkpointing(data: Mapping[str, Any], path: str, *, flag: str) -> Checkpointing:
    """What `pipeline.activation_checkpoint_interval`, the `activation_checkpointing` block and the flag ask for.

    Args:
        data: the JSON.
        path: of the file, for messages.
        flag: --grad-checkpointing: "" (nothing is asked for), full (each block, or as many as the JSON says), selective
            or a number of blocks.

    Raises:
        UserError: the flag asks for one thing and the JSON for another, or the interval is no whole number.
    """
    interval = data.get("pipeline", {}).get("activation_checkpoint_interval")
    block = data.get("activation_checkpointing")
    cpu = bool((block or {}).get("cpu_checkpointing", False))
    if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 0):
        raise UserError(
            f"{path}: pipeline.activation_checkpoint_interval must be a whole number >= 0, not {interval!r}"
        )
    if interval == 0 and (flag or block is not None):
        asker = "--grad-checkpointing" if flag else 'the block "activation_checkpointing"'
        raise UserError(
            f"{path}: pipeline.activation_checkpoint_interval 0 turns activation checkpointing off and {asker} turns "
            "it on; delete one of them"
        )
    selective = flag == "selective"
    asked = int(flag) if flag.isdecimal() else 1 if selective else None
    if asked is not None and interval is not None and interval != asked:
        blocks = "goes block by block" if selective else f"asks for {asked}"
        raise UserError(
            f"{path}: pipeline.activation_checkpoint_interval {interval} recomputes so many blocks together and "
            f"--grad-checkpointing {flag} {blocks}; delete one of them"
        )
    if selective and cpu:
        raise UserError(
            f"{path}: activation_checkpointing.cpu_checkpointing keeps a block's inputs in host memory, which are a "
            "small part of what --grad-checkpointing selective keeps; delete it, or say --grad-checkpointing full"
        )
    on = bool(flag) or block is not None
    return Checkpointing(asked or interval or int(on), cpu, selective)


# What evaluation reads of a file; it has no optimizer, no schedule and no accumulation.
_FOR_EVALUATION = ("train_micro_batch_size_per_gpu", "fp16", "bf16", "torch_autocast", "data_types", *MONITORS)


def for_evaluation(data: Mapping[str, Any], *, pp: int) -> dict[str, Any]:
    """The part of a training file that evaluation needs: the precision, the micro-batch, the monitors.

    Of ZeRO only stage 3 means something without an optimizer, and only without a pipeline: parameters stay
    partitioned, so a model that does not fit on one accelerator can be evaluated as it was trained.

    Args:
        data: the JSON.
        pp: pipeline stages.
    """
    out = {key: data[key] for key in _FOR_EVALUATION if key in data}
    zero = data.get("zero_optimization") or {}
    if zero.get("stage") == 3 and pp == 1:
        out["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return out


def resolve(
    data: Mapping[str, Any],
    *,
    batch: BatchSizes,
    gradient_clipping: float,
    auto: Mapping[str, Any],
    path: str,
) -> dict[str, Any]:
    """The file as DeepSpeed gets it: every "auto" replaced, the batch and the clipping always explicit.

    Args:
        auto: values for what stands as "auto" at a dotted name; None deletes the key, so that DeepSpeed's default
            holds.

    Raises:
        UserError: "auto" stands where nothing resolves it.
    """
    resolved = copy.deepcopy(dict(data))
    resolved |= batch.as_json()
    resolved["gradient_clipping"] = gradient_clipping

    def walk(block: dict[str, Any], prefix: str) -> None:
        for key in list(block):
            name = f"{prefix}{key}"
            if isinstance(block[key], dict):
                walk(block[key], f"{name}.")
            elif block[key] == "auto":
                if name not in auto:
                    raise UserError(f'{path}: "{name}" cannot be "auto"; those that can are {", ".join(sorted(auto))}')
                if auto[name] is None:
                    del block[key]
                else:
                    block[key] = auto[name]

    walk(resolved, "")
    return resolved


def check_with_deepspeed(resolved: Mapping[str, Any], path: str) -> None:
    """Have DeepSpeed read the resolved file before there is a process group; what it does not like, in one line.

    Raises:
        UserError: DeepSpeed's own complaint.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without ranks DeepSpeed would hold the batch against one; `batch_sizes` has looked at it.
    try:
        DeepSpeedConfig({key: value for key, value in resolved.items() if key != "train_batch_size"})
    except Exception as error:  # whatever it is, it would come again as a traceback after the ranks have met
        raise UserError(f"{path}: DeepSpeed does not take it: {first_line(error)}") from error
