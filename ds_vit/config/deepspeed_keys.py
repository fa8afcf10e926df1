"""Which keys a DeepSpeed JSON may have: those that DeepSpeed 0.19 reads, less what it removed and what would not work.

`deepspeed_json.py` reads the file; rules about single keys stand in `deepspeed_rules.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from ds_vit.config.deepspeed_rules import (
    check_low_precision_masters,
    check_monitors,
    check_scaling,
    check_zero,
    idle,
    switched_on,
)
from ds_vit.fault_tolerance.errors import UserError

# Top-level keys of DeepSpeed 0.19.8: runtime/config.py reads them; tests/config/test_deepspeed_json.py compares.
_TOP_LEVEL_NAMES = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping optimizer scheduler fp16 bf16 torch_autocast data_types zero_optimization pipeline
    activation_checkpointing communication_data_type seq_parallel_communication_data_type prescale_gradients
    gradient_predivide_factor gradient_allreduce_op steps_per_print dump_state disable_python_gc disable_allgather
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler wall_clock_breakdown memory_breakdown
    comms_logger timers aio autotuning hybrid_engine data_efficiency checkpoint datastates_ckpt dataloader_drop_last
    log_level weight_quantization compile tensor_parallel expert_parallel use_data_before_expert_parallelism
    vocabulary_size tensorboard csv_monitor wandb comet sequence_parallel_size data_parallel_size
    """
TOP_LEVEL = frozenset(_TOP_LEVEL_NAMES.split())

# Sub-keys of the blocks whose readers in DeepSpeed let unknown ones pass in silence.
_SUB_KEYS: dict[str, frozenset[str]] = {
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "torch_autocast": frozenset({"enabled", "dtype", "lower_precision_safe_modules"}),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
    "pipeline": frozenset(
        {
            "stages",
            "partition",
            "seed_layers",
            "activation_checkpoint_interval",
            "use_reentrant",
            "pipe_partitioned",
            "grad_partitioned",
        }
    ),
    "activation_checkpointing": frozenset(
        {
            "partition_activations",
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        }
    ),
    "timers": frozenset({"throughput"}),
    "aio": frozenset(
        {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"}
    ),
    "flops_profiler": frozenset(
        {"enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file"}
    ),
}

_REMOVED = {
    "nebula": "DeepSpeed 0.19 removed Nebula checkpointing; delete the block",
    "compression_training": "DeepSpeed 0.19 removed compression; delete the block",
    "amp": 'DeepSpeed 0.19 removed Apex AMP; use "bf16", "fp16" or "torch_autocast"',
    "quantize_training": "DeepSpeed 0.19 removed quantised training; delete the block",
    "sparse_gradients": "DeepSpeed 0.19 removed sparse gradients; delete the key",
    "eigenvalue": "DeepSpeed 0.19 removed eigenvalue quantisation; delete the block",
    "sparse_attention": "DeepSpeed 0.19 removed sparse attention; delete the block",
    "elasticity": "DeepSpeed 0.19 removed elasticity; give train_batch_size and let the accumulation be computed",
    "graph_harvesting": "DeepSpeed 0.19 removed graph harvesting; delete the key",
    "curriculum_learning": "DeepSpeed 0.19 removed curriculum learning; delete the block",
    "progressive_layer_drop": "DeepSpeed 0.19 removed progressive layer drop; use --drop-path",
}
_REMOVED_ZERO = {
    "mics_shard_size": "DeepSpeed 0.19 removed MiCS; zero_hpz_partition_size is the nearest",
    "mics_hierarchical_params_gather": "DeepSpeed 0.19 removed MiCS; delete the key",
    "zeropp_loco_param": "DeepSpeed 0.19 removed LoCo; delete the key",
    "legacy_stage1": "DeepSpeed removed the old stage 1; delete the key",
}

# Blocks that DeepSpeed would act on in ways that would break the sample order, the model's cut or the promise.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "autotuning": (
        lambda v: switched_on(v),
        "is DeepSpeed's own launcher mode and rewrites this run; delete the block",
    ),
    "hybrid_engine": (switched_on, "is for generation during RLHF; delete the block"),
    "data_efficiency": (
        lambda v: switched_on(v),
        "replaces the data loader, whose order here is keyed; delete the block",
    ),
    "tensor_parallel": (lambda v: bool(v), "is DeepSpeed's AutoTP, which replaces our cut of the model; use --tp"),
    "expert_parallel": (
        lambda v: switched_on(v),
        "needs a mixture of experts, which no ViT here has; delete the block",
    ),
    "sequence_parallel_size": (lambda v: v not in (None, 1), "is Ulysses, which does not cut a ViT; delete the key"),
    "data_parallel_size": (lambda v: v is not None, "follows from the number of ranks, --pp and --tp; delete the key"),
    "weight_quantization": (lambda v: bool(v), "changes the weights during training; delete the block"),
    "managed_gradient_accumulation": (lambda v: v is False, "hands the accumulation to the caller; delete the key"),
    "gradient_allreduce_op": (
        lambda v: str(v).lower() != "mean",
        'makes the loss curve depend on the number of ranks; delete the key (the default is "mean")',
    ),
    "compile": (
        lambda v: not isinstance(v, Mapping) or v.get("deepcompile") not in (None, False),
        "(DeepCompile) puts ZeRO into the graph of a whole model, where optimizers and checkpoints do not find it; "
        "delete the block and compile by --compile",
    ),
}


# Keys of published files at which DeepSpeed never looked, and where it does.
_READ_ELSEWHERE = {
    "optimizer.adam_w_mode": "optimizer.params.adam_w_mode",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "log": "steps_per_print",
    "comms_config": "comms_logger",
    "stage3_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "stage3_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
}


def _nearest(key: str, known: frozenset[str], block: str = "") -> str:
    if elsewhere := _READ_ELSEWHERE.get(f"{block}{key}"):
        return f'; it reads "{elsewhere}"'
    close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.4)
    return f'; the nearest known key is "{close[0]}"' if close else ""


def block_model(block: str) -> type[pydantic.BaseModel] | None:
    """The pydantic model by which DeepSpeed reads a block, where it has one."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
    }
    return models.get(block)


def _block_keys(block: str) -> frozenset[str] | None:
    """The keys that DeepSpeed knows in a block, aliases included; None where the block is free."""
    model = block_model(block)
    if model is None:
        return _SUB_KEYS.get(block)
    return frozenset(name for key, field in model.model_fields.items() for name in (key, field.alias) if name)


def _check_values(block: str, value: Mapping[str, Any], path: str) -> None:
    """Let DeepSpeed's own model look at the values ("auto" aside), and say in one line what it does not like."""
    model = block_model(block)
    if model is None:
        return
    try:
        model(**{key: item for key, item in value.items() if item != "auto"})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        name = ".".join([block, *map(str, first["loc"])])
        given = first.get("input")
        # A rule between keys is broken by the whole block, which nobody wants to read.
        wrong = "" if isinstance(given, pydantic.BaseModel) else f", not {given!r}"
        raise UserError(f"{path}: {name}: {said}{wrong}") from None
    except AssertionError as error:  # an old and a new name of one key
        raise UserError(f"{path}: {block}: {error}") from None


def check_keys(data: Mapping[str, Any], path: str) -> None:
    """Refuse keys that DeepSpeed removed, never had, or that would change what a run means, and values that it refuses.

    Raises:
        UserError: names the key, the reason and the nearest thing that works.
    """
    for key, value in data.items():
        if key in _REMOVED:
            raise UserError(f'{path}: "{key}": {_REMOVED[key]}')
        if key == "bfloat16":
            raise UserError(f'{path}: "bfloat16" is the old name; call the block "bf16"')
        if key not in TOP_LEVEL:
            raise UserError(f'{path}: DeepSpeed 0.19 knows no key "{key}"{_nearest(key, TOP_LEVEL)}')
        if key in _REFUSED and _REFUSED[key][0](value):
            raise UserError(f'{path}: "{key}" {_REFUSED[key][1]}')
        known = _block_keys(key)
        if known is None:
            continue
        if not isinstance(value, Mapping):
            raise UserError(f'{path}: "{key}" must be a block {{…}}, not {value!r}')
        for sub in value:
            if key == "zero_optimization" and sub in _REMOVED_ZERO:
                raise UserError(f'{path}: "{key}.{sub}": {_REMOVED_ZERO[sub]}')
            if sub not in known:
                raise UserError(f'{path}: DeepSpeed 0.19 knows no key "{key}.{sub}"{_nearest(sub, known, f"{key}.")}')
    stage = data.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3, "0", "1", "2", "3", "auto"):
        raise UserError(f"{path}: zero_optimization.stage {stage!r} does not exist; it may be 0, 1, 2 or 3")
    for key, value in data.items():
        _check_values(key, value, path)


def check_rules(data: Mapping[str, Any], path: str) -> None:
    """Refuse what DeepSpeed takes and gets wrong, or what needs a build.

    Args:
        data: as DeepSpeed reads it (`deepspeed_auto.settle`).
        path: named in messages.

    Raises:
        UserError: names the key, the reason and the nearest thing that works.
    """
    zero = data.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    check_zero(zero, stage, path)
    every = data.get("steps_per_print", 1)
    if every is not None and (isinstance(every, bool) or not isinstance(every, (int, float)) or every <= 0):
        raise UserError(f"{path}: steps_per_print must be a number above 0, not {every!r}")
    check_low_precision_masters(data, path)
    check_scaling(data, stage, path)
    check_monitors(data, path)


def idle_keys(data: Mapping[str, Any]) -> list[str]:
    """One line for each known key that does nothing in this run: "key: why"."""
    return [f"{name}: {why}" for name, why in idle(data).items()]
