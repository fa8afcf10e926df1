"""The DeepSpeed JSON: read before the other parts of a run are resolved, written out after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from ds_vit.config import deepspeed_rules
from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_json import (
    BATCH_KEYS,
    MASTERS_IN_BF16,
    derived_path,
    leaves,
    load_json,
    overlay,
    value_of,
    without,
)
from ds_vit.config.deepspeed_keys import DeepSpeedJson, read_json
from ds_vit.config.deepspeed_rules import Precision
from ds_vit.config.deepspeed_verdicts import idle_keys, rejected
from ds_vit.config.flag import spelling
from ds_vit.config.rules import written
from ds_vit.config.schema import KEY_OF_FLAG, RunConfig
from ds_vit.config.units import parse_set
from ds_vit.engine.settings import EngineSettings
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import optimizer_class
from ds_vit.training.run import Run

T = TypeVar("T")
# Resolved from flag and file together; a flag with another key writes its value there.
_RESOLVED = {*BATCH_KEYS, "gradient_clipping", "optimizer.params.lr", "optimizer.params.weight_decay"}
PRECISIONS = ("bf16", "fp16", "torch_autocast")
IDLE = "DeepSpeed keys without effect in this run: "


def is_of_a_run(config: RunConfig) -> bool:
    """Whether a run wrote the JSON: its global batch counts, and the two other numbers of the batch follow."""
    return isinstance(config.deepspeed_config, str) and derived_path(config.deepspeed_config).is_file()


def read(config: RunConfig, *, on_cpu: bool) -> tuple[EngineSettings, dict[str, Any]]:
    """Read the JSON as far as possible without the rest of the run; its idle keys are left out.

    Returns:
        The settings, and the file's values with those of --set, before anything was resolved.

    Raises:
        UserError: invalid keys or values, or flags that contradict them.
    """
    source: Mapping[str, Any] | str = config.deepspeed_config  # the contents, from a program
    path, stored = ("deepspeed_config", source) if isinstance(source, Mapping) else (source, load_json(source))
    given = parse_set(config.set)
    # A default that was given (--no-wandb) has something to say where the file has a value.
    flags = [
        name
        for name, key in KEY_OF_FLAG.items()
        if key not in _RESOLVED
        and name in config.model_fields_set
        and (getattr(config, name) != config.default_of(name) or value_of(stored, key) is not None)
    ]
    file = overlay(stored, given | {KEY_OF_FLAG[name]: getattr(config, name) for name in flags}, path)
    if config.eval_only:
        file = without(file, ("optimizer", "scheduler"))  # nothing reads them
        if config.batch_size is not None and is_of_a_run(config):
            file = without(file, BATCH_KEYS)
    if given:
        path += f" with --set {' '.join(config.set)}"
    path += f" with {' '.join(written(name, config) for name in flags)}" if flags else ""
    json, wrong = read_json(file, path)
    refused = rejected(json, path)
    problems = [*wrong.values(), *(line for _, line in refused)]
    bad = {name.partition(".")[0] for name in (*wrong, *dict(refused))}

    def check(blocks: str, call: Callable[[], T]) -> T | None:
        """The result of a check that reads these blocks, if nothing is wrong in them; its problems join the others."""
        try:
            return None if bad & {*blocks.split()} else call()
        except UserError as error:
            problems.extend(error.problems)
            return None

    if config.wandb_project and not json.is_on("wandb") and "wandb" not in bad:
        problems.append("--wandb-project has no effect without --wandb; drop it")
    ways = f"{' '.join(PRECISIONS)} zero_optimization"
    precision = check(ways, lambda: deepspeed_rules.precision(_with_auto_precision(json, on_cpu), path, on_cpu=on_cpu))
    if precision is not None:
        check("data_types", lambda: deepspeed_rules.check_types(json, precision, path))
        check("", lambda: _check_types(config, precision, on_cpu))
    if config.eval_only:
        json = deepspeed_rules.for_evaluation(json, pp=config.pp)
    idle = idle_keys(json)
    notes = [f"{IDLE}{', '.join(idle)}"] if idle else []
    json = json.replace({}, idle)  # none of them can make DeepSpeed fail
    check(f"{ways} wall_clock_breakdown flops_profiler", lambda: deepspeed_rules.check_pipeline(json, path, config.pp))
    if not config.eval_only:
        with_optimizer = check("optimizer", lambda: deepspeed_rules.with_optimizer(json, path, lr=config.lr))
        json, filled = with_optimizer or (json, [])
        notes += filled
        if with_optimizer:
            check("optimizer", lambda: optimizer_of(json, path))
    checkpointing = check(
        "pipeline activation_checkpointing",
        lambda: deepspeed_rules.activation_checkpointing(json, path, flag=config.grad_checkpointing),
    )
    if problems or precision is None or checkpointing is None:
        raise UserError(*problems)
    return EngineSettings(path, json, precision, checkpointing, notes=tuple(notes)), file


def optimizer_of(json: DeepSpeedJson, path: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and arguments of the JSON's optimizer, as `optimizer_class`."""
    assert json.optimizer is not None, "read() fills it in"
    return optimizer_class(json.optimizer.type, json.optimizer.params, path)


def _check_types(config: RunConfig, precision: Precision, on_cpu: bool) -> None:
    """Reject --norm-dtype and --tf32 where they have no effect."""
    if config.norm_dtype == "model" and precision.compute == "float32":
        raise UserError(f"--norm-dtype model has no effect in {precision.name}: the model is in float32; drop it")
    if config.tf32 and (on_cpu or precision.compute != "float32"):
        why = "a CPU has no TF32 cores" if on_cpu else f"the model is in {precision.compute}"
        raise UserError(f"--tf32 has no effect: {why}; drop it")


def _with_auto_precision(json: DeepSpeedJson, on_cpu: bool) -> DeepSpeedJson:
    """Resolve "auto" precision: bf16 where the accelerator supports it, fp16 on older ones, neither on a CPU.

    Next to a precision that is named, "auto" is off.
    """
    enabled = {block: json.given(f"{block}.enabled") for block in PRECISIONS}
    chosen = ""
    if not on_cpu and True not in enabled.values():
        chosen = "bf16" if get_accelerator().is_bf16_supported() else "fp16"
    return json.replace({f"{block}.enabled": block == chosen for block in enabled if enabled[block] == "auto"})


def sum_micro_batches(engine: EngineSettings, batch: BatchSizes) -> EngineSettings:
    """Sum several micro-batches in fp32, or say which key sums them in 16 bits."""
    json, notes = deepspeed_rules.with_fp32_sums(engine.json, engine.precision, batch.accumulation), engine.notes
    keys = ("data_types.grad_accum_dtype", MASTERS_IN_BF16)
    chosen = next((key for key in keys if json.given(key)), None)
    if batch.accumulation > 1 and chosen and not deepspeed_rules.sums_in_fp32(json):
        notes = (*notes, f"micro-batches are summed in 16 bits, by {chosen}")
    return dataclasses.replace(engine, json=json, notes=tuple(dict.fromkeys(notes)))


def write_out(run: Run, file: Mapping[str, Any]) -> EngineSettings:
    """The engine's JSON with the resolved numbers. Bucket sizes follow the width, as in Hugging Face's integration.

    Args:
        run: with the engine from `read`.
        file: the values of the JSON before anything was resolved.

    Raises:
        UserError: a value that DeepSpeed itself rejects.
    """
    engine, optimizer, schedule, width = run.engine, run.optimizer, run.schedule, run.model.whole.embed_dim
    path, json = engine.path, engine.json
    always: dict[str, Any] = {**run.batch.as_json(), "gradient_clipping": 0.0}
    auto: dict[str, Any] = {
        "bf16.enabled": engine.precision.name == "bf16",
        "fp16.enabled": engine.precision.name == "fp16",
        "communication_data_type": None,
        "zero_optimization.reduce_bucket_size": width * width,
        "zero_optimization.allgather_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
    }
    if optimizer is not None and schedule is not None:
        always |= {"gradient_clipping": optimizer.clip, "optimizer.params.lr": optimizer.lr}
        always |= {} if optimizer.decay is None else {"optimizer.params.weight_decay": optimizer.decay}
        auto |= {f"scheduler.params.{key}": value for key, value in schedule.scheduler.items()}
    names = json.auto - always.keys()
    default = [name for name in names if auto[name] is None]
    json = json.replace(always | {name: auto[name] for name in names - {*default}}, default)
    deepspeed_rules.check_scheduler(json, path)
    deepspeed_rules.check_with_deepspeed(json, path)
    derived = dict.fromkeys(BATCH_KEYS, "batch arithmetic")
    if optimizer is not None:
        derived |= {
            "gradient_clipping": "DeepSpeed's default",
            KEY_OF_FLAG["lr"]: f"{optimizer.cls.__name__}'s default",
        }
    return dataclasses.replace(engine, json=json, origins=_origins(run.config, file, json, derived))


def _origins(
    config: RunConfig, file: Mapping[str, Any], json: DeepSpeedJson, derived: Mapping[str, str]
) -> dict[str, str]:
    """The origin of each value that is not the file's: --set, a flag, "auto", or what `derived` says of a key."""
    by_set, by_file, origins = leaves(parse_set(config.set)), leaves(file), {}
    flags = {
        key: (spelling(name), getattr(config, name))
        for name, key in KEY_OF_FLAG.items()
        if name in config.model_fields_set
    }
    if config.lr_scale_by_batch != "none":
        flags[KEY_OF_FLAG["lr"]] = ("--lr-scale-by-batch", json.given(KEY_OF_FLAG["lr"]))
    for name, value in leaves(json.dump()).items():
        flag, given = flags.get(name, ("", None))
        if given is not None and given == value:
            origins[name] = flag
        elif name in by_set and by_file[name] == value:
            origins[name] = "--set"
        elif by_file.get(name) != value:
            is_auto = by_file.get(name) == "auto" and name not in BATCH_KEYS
            origins[name] = '"auto"' if is_auto else derived.get(name, "default")
    return origins
