"""The DeepSpeed JSON: read before the other parts of a run are resolved, written out after them."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ds_vit.config import RunConfig, deepspeed_json, deepspeed_rules
from ds_vit.config.batch import KEYS as BATCH_KEYS
from ds_vit.config.batch import BatchSizes, number_of
from ds_vit.config.deepspeed_json import leaves, overlay
from ds_vit.config.deepspeed_keys import idle_keys, switched_on, value_of, without
from ds_vit.config.deepspeed_rules import Checkpointing, Precision, sums_in_fp32
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.config.units import parse_set
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import optimizer_class
from ds_vit.parallel.layout import Layout

T = TypeVar("T")
IDLE = "DeepSpeed keys without effect in this run: "


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The JSON, and its number formats and recomputation.

    Attributes:
        path: the file, named in messages.
        json: between `read` and `write_out` the file without its idle keys; then what DeepSpeed gets, without "auto".
        precision: the number formats.
        checkpointing: of activations.
        file: the file with the values of --set, before anything was resolved.
        of_a_run: the file was written by a run: its global batch counts, and the two other numbers of the batch follow.
        origins: dotted name of a value in `json` → where it came from; values of the file have none.
        notes: lines for people.
    """

    path: str
    json: Mapping[str, Any]
    precision: Precision
    checkpointing: Checkpointing
    file: Mapping[str, Any] = field(default_factory=dict, repr=False)
    of_a_run: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 without ZeRO."""
        return int(self.json.get("zero_optimization", {}).get("stage", 0))

    @property
    def asks_for_gpu(self) -> bool:
        """Whether the file asks for a 16-bit type, by name or "auto"; a CPU is slow in it, or takes another."""
        blocks = (self.file.get(name) for name in ("bf16", "fp16", "torch_autocast"))
        return any(switched_on(block) or block.get("enabled") == "auto" for block in blocks if block)

    def origin(self, name: str) -> str:
        """The origin of a value of the JSON, for people."""
        return self.origins.get(name, "JSON")


def read(config: RunConfig, *, on_cpu: bool) -> DeepSpeedSettings:
    """Read the JSON as far as possible without the rest of the run.

    Raises:
        UserError: invalid keys or values, or flags that contradict them.
    """
    source: Mapping[str, Any] | str = config.deepspeed_config  # the contents, from a program
    given, of_a_run = parse_set(config.set), False
    monitor = {KEY_OF_FLAG[name]: value for name in ("wandb", "wandb_project") if (value := getattr(config, name))}
    if isinstance(source, Mapping):
        path, stored = "deepspeed_config", copy.deepcopy(dict(source))
    else:
        path, stored = source, deepspeed_json.load_json(source)
        of_a_run = deepspeed_json.derived_path(source).is_file()
    file = data = overlay(stored, given | monitor, path)
    if config.wandb_project and not switched_on(file.get("wandb")):
        raise UserError("--wandb-project has no effect without --wandb; drop it")
    if given:
        path += f" with --set {' '.join(config.set)}"
    path += " with --wandb" if monitor else ""
    data, problems = deepspeed_json.check_and_read(data, path)
    named = {*re.findall(r"\w+", " ".join(problems).replace(path, ""))}
    data = {key: value for key, value in data.items() if key not in named or not problems}

    def check(keys: str, call: Callable[[], T]) -> T | None:
        """The result of a check that reads these keys; what it raises is one of the problems."""
        try:
            return None if named & {*keys.split()} else call()
        except UserError as error:
            problems.extend(error.problems)
            return None

    ways = "bf16 fp16 torch_autocast zero_optimization"
    precision = check(ways, lambda: deepspeed_rules.precision(_with_auto_precision(data, on_cpu), path, on_cpu=on_cpu))
    if precision is not None:
        check("data_types", lambda: deepspeed_rules.check_types(data, precision, path))
        check("", lambda: _check_types(config, precision, on_cpu))
    for key in BATCH_KEYS:
        check(key, lambda key=key: number_of(data, key, path))
    if config.eval_only:
        data = deepspeed_json.for_evaluation(data, pp=config.pp)
    idle = idle_keys(data)
    notes = [f"{IDLE}{', '.join(idle)}"] if idle else []
    data = without(data, idle)  # none of them can make DeepSpeed fail
    check(f"{ways} wall_clock_breakdown flops_profiler", lambda: deepspeed_rules.check_pipeline(data, path, config.pp))
    if not config.eval_only:
        with_optimizer = check("optimizer", lambda: deepspeed_json.with_optimizer(data, path, lr=config.lr))
        data, filled = with_optimizer or (data, [])
        notes += filled
        if with_optimizer:
            check("optimizer", lambda: optimizer_class(data["optimizer"], path))
    checkpointing = check(
        "pipeline activation_checkpointing",
        lambda: deepspeed_rules.activation_checkpointing(data, path, flag=config.grad_checkpointing),
    )
    if problems or precision is None or checkpointing is None:
        raise UserError(*problems)
    origins = {**dict.fromkeys(leaves(given), "--set"), **dict.fromkeys(monitor, "--wandb")}
    return DeepSpeedSettings(path, data, precision, checkpointing, file, of_a_run, origins, tuple(notes))


def _check_types(config: RunConfig, precision: Precision, on_cpu: bool) -> None:
    """Reject --norm-dtype and --tf32 where they have no effect."""
    if config.norm_dtype == "model" and precision.compute == "float32":
        raise UserError(f"--norm-dtype model has no effect in {precision.name}: the model is in float32; drop it")
    if config.tf32 and (on_cpu or precision.compute != "float32"):
        why = "a CPU has no TF32 cores" if on_cpu else f"the model is in {precision.compute}"
        raise UserError(f"--tf32 has no effect: {why}; drop it")


def _auto_precision(on_cpu: bool) -> dict[str, bool]:
    """ "auto" for a 16-bit type: bf16 where the accelerator supports it, fp16 on older ones, neither on a CPU."""
    if on_cpu:
        return {"bf16": False, "fp16": False}
    from deepspeed.accelerator import get_accelerator

    has_bf16 = get_accelerator().is_bf16_supported()
    return {"bf16": has_bf16, "fp16": not has_bf16}


def _with_auto_precision(data: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """Resolve "auto" precision; next to a precision that is named, "auto" is off."""
    blocks = {
        block: data[block] for block in ("bf16", "fp16", "torch_autocast") if isinstance(data.get(block), Mapping)
    }
    named = any(block.get("enabled") != "auto" and switched_on(block) for block in blocks.values())
    for name, value in _auto_precision(on_cpu).items():
        if blocks.get(name, {}).get("enabled") == "auto":
            blocks[name] = {**blocks[name], "enabled": value and not named}
    return {**data, **blocks}


def sum_micro_batches(settings: DeepSpeedSettings, batch: BatchSizes) -> DeepSpeedSettings:
    """Sum several micro-batches in fp32, or say which key sums them in 16 bits."""
    json = deepspeed_rules.with_fp32_sums(settings.json, settings.precision, batch.accumulation)
    keys = ("data_types.grad_accum_dtype", deepspeed_rules.MASTERS_IN_BF16)
    chosen = next((key for key in keys if value_of(json, key)), None)
    notes = settings.notes
    if batch.accumulation > 1 and chosen and not sums_in_fp32(json):
        notes = (*notes, f"micro-batches are summed in 16 bits, by {chosen}")
    return dataclasses.replace(settings, json=json, notes=tuple(dict.fromkeys(notes)))


def write_out(
    settings: DeepSpeedSettings,
    batch: BatchSizes,
    layout: Layout,
    width: int,
    origins: Mapping[str, str],
    *,
    clip: float = 0.0,
    optimizer: Mapping[str, float] | None = None,
    scheduler: Mapping[str, float] | None = None,
) -> DeepSpeedSettings:
    """Write the resolved numbers into the JSON. Bucket sizes follow the width, as in Hugging Face's integration.

    Args:
        settings: from `read`.
        batch: the batch arithmetic.
        layout: of the run.
        width: of the model.
        origins: dotted name of a number in the JSON → where it came from, where that is not the JSON.
        clip: the largest norm of the gradient.
        optimizer: values of `optimizer.params` that flags decide; None in evaluation only.
        scheduler: values for "auto" in `scheduler.params`.

    Raises:
        UserError: "auto" where nothing resolves it, or a value that DeepSpeed itself rejects.
    """
    path = settings.path
    auto: dict[str, Any] = {
        "bf16.enabled": settings.precision.name == "bf16",
        "fp16.enabled": settings.precision.name == "fp16",
        "communication_data_type": None,
        "zero_optimization.reduce_bucket_size": width * width,
        "zero_optimization.allgather_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
        **{f"scheduler.params.{key}": value for key, value in (scheduler or {}).items()},
        **{f"optimizer.params.{key}": value for key, value in (optimizer or {}).items()},
    }
    json = deepspeed_json.resolve(settings.json, batch=batch, gradient_clipping=clip, auto=auto, path=path)
    if optimizer is not None:
        params = {**(json["optimizer"].get("params") or {}), **optimizer}
        json["optimizer"] = {**json["optimizer"], "params": params}
        deepspeed_json.check_scheduler(json, path)
    deepspeed_json.check_with_deepspeed(json, path)
    return dataclasses.replace(settings, json=json, origins=_origins(settings, json, origins))


def with_batch(settings: DeepSpeedSettings, batch: BatchSizes, origins: Mapping[str, str]) -> DeepSpeedSettings:
    """A JSON that is written out, with another batch arithmetic."""
    settings = sum_micro_batches(settings, batch)
    json = {**settings.json, **batch.as_json()}
    return dataclasses.replace(settings, json=json, origins={**settings.origins, **origins})


def _origins(settings: DeepSpeedSettings, json: Mapping[str, Any], known: Mapping[str, str]) -> dict[str, str]:
    """The origin of each value that is not the file's."""
    file, origins = leaves(settings.file), {}
    for name, value in leaves(json).items():
        if name in settings.origins and file.get(name) == value:
            origins[name] = settings.origins[name]
        elif name in known:
            origins[name] = known[name]
        elif file.get(name) != value:
            origins[name] = '"auto"' if file.get(name) == "auto" else "default"
    return origins
