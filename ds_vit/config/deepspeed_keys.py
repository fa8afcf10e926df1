"""The keys of a DeepSpeed JSON: which ones exist, which values are rejected, and which keys have no effect.

Written for DeepSpeed 0.19. tests/config/test_json_walk.py trains with every key, so it compares these tables with
DeepSpeed itself.
"""

from __future__ import annotations

import copy
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_vit.fault_tolerance.errors import did_you_mean

if TYPE_CHECKING:
    import pydantic

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")

# The top-level keys that runtime/config.py reads; tests/config/test_deepspeed_json.py compares.
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

# The keys of the blocks for which DeepSpeed has no pydantic model; it ignores unknown keys in them.
_BLOCK_NAMES = {
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval use_reentrant pipe_partitioned "
    "grad_partitioned",
    "activation_checkpointing": "partition_activations contiguous_memory_optimization cpu_checkpointing "
    "number_checkpoints synchronize_checkpoint_boundary profile",
    "timers": "throughput",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
}

# Keys of published files that DeepSpeed never read, and the keys that it reads.
_READ_ELSEWHERE = {
    "optimizer.adam_w_mode": "optimizer.params.adam_w_mode",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "log": "steps_per_print",
    "comms_config": "comms_logger",
    "stage3_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "stage3_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
}


_MODELS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "wandb": "monitor.config:WandbConfig",
    "comet": "monitor.config:CometConfig",
}


def block_model(block: str) -> type[pydantic.BaseModel] | None:
    """The pydantic model by which DeepSpeed reads a block; None where it has none."""
    return pkgutil.resolve_name(f"deepspeed.{_MODELS[block]}") if block in _MODELS else None


def keys_of(block: str) -> frozenset[str] | None:
    """The keys that DeepSpeed knows in a block, aliases included; None where any key is allowed."""
    model = block_model(block)
    if model is None:
        return frozenset(_BLOCK_NAMES[block].split()) if block in _BLOCK_NAMES else None
    return frozenset(name for key, field in model.model_fields.items() for name in (key, field.alias) if name)


def wrong_keys(data: Mapping[str, Any], path: str) -> dict[str, str]:
    """Keys that DeepSpeed does not know or has removed → the reason, and the nearest key that works."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS

    found: dict[str, str] = {}
    for key, value in data.items():
        known = keys_of(key)
        if key == "bfloat16":
            found[key] = f'{path}: "bfloat16" is the old name; call the block "bf16"'
        elif reason := _why_wrong(key, TOP_LEVEL, _REMOVED_TOP_LEVEL_CONFIG_KEYS, path):
            found[key] = reason
        elif known is not None and not isinstance(value, Mapping):
            found[key] = f'{path}: "{key}" must be a block {{…}}, not {value!r}'
        elif known is not None:
            removed = _REMOVED_ZERO_CONFIG_KEYS if key == "zero_optimization" else {}
            names = {f"{key}.{name}" for name in known}
            reasons = {name: _why_wrong(name, names, removed, path) for name in (f"{key}.{sub}" for sub in value)}
            found |= {name: reason for name, reason in reasons.items() if reason}
    return found


def _why_wrong(name: str, known: frozenset[str] | set[str], removed: Mapping[str, str], path: str) -> str:
    """What is wrong with one dotted name; "" for nothing."""
    last = name.rpartition(".")[2]
    if last in removed:
        return f'{path}: "{name}": {removed[last].partition(" See ")[0].strip()} Delete it'
    if name not in known:
        elsewhere = _READ_ELSEWHERE.get(name)
        hint = (
            f'; it reads "{elsewhere}"' if elsewhere else did_you_mean(last, {key.rpartition(".")[2] for key in known})
        )
        return f'{path}: DeepSpeed 0.19 knows no key "{name}"{hint}'
    return ""


def switched_on(block: Any) -> bool:
    """Whether a block exists and is enabled; "auto" counts as enabled."""
    if not isinstance(block, Mapping):
        return False
    enabled = block.get("enabled", False)
    if isinstance(enabled, str):
        return enabled.lower() not in ("false", "0", "no", "n", "off", "f")  # the words that pydantic reads as false
    return enabled not in (False, None)


def value_of(data: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name; None where a part of it is missing."""
    value: Any = data
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


class BadValue(NamedTuple):
    """Values of one key that are rejected.

    Attributes:
        key: its dotted name; ".x" is "zero_optimization.x".
        matches: whether a value (never None) is one of them.
        reason: follows the key's name in the message, and ends with what to do; {value} and {stage} are filled in.
        stages: the ZeRO stages at which the rule holds.
        when: whether the rest of the file makes the rule hold.
    """

    key: str
    matches: Callable[[Any], bool]
    reason: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    when: Callable[[Mapping[str, Any]], bool] = lambda data: True

    @property
    def name(self) -> str:
        """The dotted name of the key."""
        return f"zero_optimization{self.key}" if self.key.startswith(".") else self.key


def _not_positive(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0


def _not_one(value: Any) -> bool:
    return value != 1


def _on(value: Any) -> bool:
    return value != "none"


def _is_given(value: Any) -> bool:
    return True


def takes_gradients(data: Mapping[str, Any]) -> bool:
    """Whether engine/flat_gradient.py sums the gradients: below ZeRO-3, without offload of the optimizer."""
    offload = value_of(data, "zero_optimization.offload_optimizer.device")
    return int(value_of(data, "zero_optimization.stage") or 0) < 3 and offload in (None, "none")


def _scatters(data: Mapping[str, Any]) -> bool:
    return value_of(data, "zero_optimization.reduce_scatter") is not False and not takes_gradients(data)


def _offloads_masters(data: Mapping[str, Any]) -> bool:
    return switched_on(data["bf16"]) and value_of(data, "zero_optimization.offload_optimizer.device") == "cpu"


def _lacks(key: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda data: not value_of(data, key)


def _is_missing(package: str) -> Callable[[Any], bool]:
    """Whether a monitor is on and its package is not installed."""
    return lambda block: switched_on(block) and importlib.util.find_spec(package) is None


_QUANTIZED = "rounds values in transit, which changes the loss curve, and needs a CUDA build; delete it"
_SECONDARY = "keeps a second copy of the weights near a rank, and ds_vit gathers them by layer; delete it"
_LEAVES = "frees the weights of a ViT's layers before the backward pass; it is for mixtures of experts: delete it"
# A compiler changes none of these reasons.
_CPU_ADAM = "works only with DeepSpeed's CPU Adam, and here torch's fused optimizer steps on the CPU; delete it"
_RATIO = "below 1 makes DeepSpeed 0.19.8 step a part of the weights at its first learning rate throughout; delete it"
_SUPER_OFFLOAD = "keeps Adam's moments in a second process, which no checkpoint reaches; delete it"
_ZENFLOW = "updates most of each weight late, which changes the loss curve; delete the block"
_NVME_OPTIMIZER = 'moves master weights and moments into files that checkpoints do not read; use "cpu"'
_NVME_PARAM = "allocates buffer_count x buffer_size elements of host memory (2 GB by default in fp32) for each layer"
_POSITIVE = "must be a number above 0, not {value}"
_SCATTER = 'at ZeRO stage {stage} needs "reduce_scatter": false in DeepSpeed 0.19.8; delete it, or use stage 1'
_MASTERS, _STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
REJECTIONS = (
    BadValue("autotuning", switched_on, "is a launcher mode of DeepSpeed that rewrites the run; delete the block"),
    BadValue("hybrid_engine", switched_on, "is for generation during RLHF; delete the block"),
    BadValue("data_efficiency", switched_on, "replaces the data loader and its keyed order; delete the block"),
    BadValue("expert_parallel", switched_on, "needs a mixture of experts, which no ViT here has; delete the block"),
    BadValue("tensor_parallel", bool, "is AutoTP, which replaces ds_vit's sharding of the model; use --tp"),
    BadValue("sequence_parallel_size", _not_one, "is Ulysses, which does not shard a ViT; delete the key"),
    BadValue("data_parallel_size", _is_given, "follows from the number of ranks, --pp and --tp; delete the key"),
    BadValue("weight_quantization", bool, "changes the weights during training; delete the block"),
    BadValue("managed_gradient_accumulation", lambda v: v is False, "leaves accumulation to the caller; delete it"),
    BadValue(
        "gradient_allreduce_op",
        lambda v: str(v).lower() != "mean",
        'makes the loss curve depend on the number of ranks; delete the key (the default is "mean")',
    ),
    BadValue(
        "compile",
        lambda v: not isinstance(v, Mapping) or v.get("deepcompile") not in (None, False),
        "(DeepCompile) hides ZeRO's partitions from optimizers and checkpoints; delete the block and use --compile",
    ),
    BadValue("steps_per_print", _not_positive, _POSITIVE),
    BadValue("prescale_gradients", bool, _SCATTER, (2, 3), _scatters),
    BadValue("gradient_predivide_factor", _not_positive, _POSITIVE),
    BadValue("gradient_predivide_factor", _not_one, _SCATTER, (2, 3), _scatters),
    BadValue(
        "gradient_predivide_factor",
        _not_one,
        "divides the gradients where it equals the number of data-parallel ranks (DeepSpeed 0.19.8); delete it",
        (3,),
    ),
    BadValue(".legacy_stage1", bool, "is the old stage 1, which DeepSpeed removed; delete the key"),
    BadValue(".round_robin_gradients", bool, "makes DeepSpeed 0.19.8 mix up parameters; delete it"),
    BadValue(".zenflow", _is_given, _ZENFLOW),
    BadValue(".offload_param.device", lambda v: v == "nvme", f'"nvme" {_NVME_PARAM}; use "cpu"'),
    BadValue(".offload_param.device", _on, "needs stage 3; this file has stage {stage}", (0, 1, 2)),
    BadValue(".offload_optimizer.device", lambda v: v == "nvme", f'"nvme" {_NVME_OPTIMIZER}'),
    BadValue(".offload_optimizer.device", _on, "needs stage 1, 2 or 3; this file has stage {stage}", (0,)),
    BadValue(".offload_optimizer.ratio", _not_one, _RATIO),
    BadValue(".offload_optimizer.super_offload", bool, _SUPER_OFFLOAD),
    BadValue(".zero_quantized_weights", bool, _QUANTIZED, (3,)),
    BadValue(".zero_quantized_nontrainable_weights", bool, _QUANTIZED, (3,)),
    BadValue(".zero_quantized_gradients", bool, _QUANTIZED, (3,)),
    BadValue(".zero_hpz_partition_size", _not_one, _SECONDARY, (3,)),
    BadValue(".leaf_module", bool, _LEAVES, (3,)),
    BadValue(".stage3_module_granularity_threshold", bool, _LEAVES, (3,)),
    BadValue("fp16.fp16_master_weights_and_grads", bool, f'{_CPU_ADAM}, or use "{_MASTERS}" and "{_STATES}"'),
    BadValue(_MASTERS, bool, f'works only together with "{_STATES}"; set both, or delete it', when=_lacks(_STATES)),
    BadValue(_STATES, bool, f'works only together with "{_MASTERS}"; set both, or delete it', when=_lacks(_MASTERS)),
    BadValue(_MASTERS, bool, f"with offload_optimizer {_CPU_ADAM}, or the offload", when=_offloads_masters),
    *(
        BadValue(block, _is_missing(package), f"needs the package {package}: pip install {package}, or delete it")
        for block, package in _MONITORS.items()
    ),
)


def wrong_values(data: Mapping[str, Any], path: str) -> list[str]:
    """The values that the table `REJECTIONS` rejects, and why.

    Args:
        data: with the values that DeepSpeed reads (`deepspeed_json.as_deepspeed_reads`).
        path: named in messages.
    """
    stage, problems = value_of(data, "zero_optimization.stage") or 0, []
    for rule in REJECTIONS:
        value = value_of(data, rule.name)
        if value is not None and stage in rule.stages and rule.matches(value) and rule.when(data):
            reason = rule.reason.replace("{value}", repr(value)).replace("{stage}", str(stage))
            problems.append(f'{path}: "{rule.name}" {reason}')
    return problems


# Keys that have no effect in ds_vit: DeepSpeed's own checkpoints, loaders, optimizers, experts and log level.
_IDLE_NAMES = """
    checkpoint datastates_ckpt aio compile disable_allgather dataloader_drop_last vocabulary_size
    seq_parallel_communication_data_type use_data_before_expert_parallelism zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer log_level comms_logger optimizer.legacy_fusion
    pipeline.stages pipeline.partition pipeline.seed_layers pipeline.use_reentrant pipeline.pipe_partitioned
    pipeline.grad_partitioned
    zero_optimization.load_from_fp32_weights zero_optimization.elastic_checkpoint
    zero_optimization.pipeline_loading_checkpoint zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.allgather_partitions zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.memory_efficient_linear
    zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_use_all_reduce_for_fetch_params
    zero_optimization.log_trace_cache_warnings
"""
# These have an effect in tensor-parallel models of DeepSpeed only; false is what holds anyway.
_IDLE_IF_SET = """
    partition_activations contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile
"""
_IN_STAGE_3 = """
    stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_max_live_parameters stage3_module_granularity_threshold
    stage3_allgather_sequential sub_group_size zero_hpz_partition_size
    zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    override_module_apply enable_sanity_checks leaf_module
"""
# runtime/engine.py passes the first four to the optimizer of stages 1 and 2 only; engine/zero3.py has no buckets.
_IN_STAGES_1_AND_2 = """
    use_multi_rank_bucket_allreduce allgather_bucket_size ignore_unused_parameters parameter_alignment
    contiguous_gradients
"""
_IN_EVERY_STAGE = "stage offload_param offload_optimizer"
STAGES_OF: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_IN_STAGE_3.split(), (3,)),
    **dict.fromkeys(_IN_STAGES_1_AND_2.split(), (1, 2)),
    **dict.fromkeys(_IN_EVERY_STAGE.split(), (0, 1, 2, 3)),
    "reduce_bucket_size": (0, 1, 2),
}
"""The ZeRO stages at which a key of `zero_optimization` has an effect; the others have one at stages 1 to 3."""
# How DeepSpeed sums gradients and checks them: at ZeRO-3 and with offload of the optimizer only.
_OF_ITS_SUMS = """
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.allgather_bucket_size
    zero_optimization.ignore_unused_parameters bf16.immediate_grad_update bf16.check_grad_overflow
"""
# Blocks with a key "enabled", which is false by default.
_SWITCHED = (
    *("fp16", "bf16", "torch_autocast", *MONITORS, "flops_profiler"),
    *("autotuning", "hybrid_engine", "data_efficiency", "expert_parallel"),
)
_FOR_NVME = {
    "offload_param": "nvme_path buffer_count buffer_size max_in_cpu",
    "offload_optimizer": "nvme_path buffer_count pipeline_read pipeline_write fast_init cpuadam_cores_perc",
}


def idle_keys(data: Mapping[str, Any]) -> list[str]:
    """The dotted names of the known keys, or whole blocks, that have no effect in this run."""
    zero = data.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    idle = {name for name in _IDLE_NAMES.split() if value_of(data, name) is not None}
    idle |= {f"zero_optimization.{key}" for key in zero if stage not in STAGES_OF.get(key, (1, 2, 3))}
    if takes_gradients(data):
        idle |= {name for name in _OF_ITS_SUMS.split() if value_of(data, name) is not None}
    names = [f"activation_checkpointing.{key}" for key in _IDLE_IF_SET.split()]
    idle |= {name for name in names if value_of(data, name)}
    for block, names_of_nvme in _FOR_NVME.items():
        settings = zero.get(block) or {}
        if settings.get("device") == "cpu":
            idle |= {f"zero_optimization.{block}.{key}" for key in names_of_nvme.split() if key in settings}
        elif settings and settings.get("device", "none") == "none":
            idle.add(f"zero_optimization.{block}")
    idle |= {block for block in _SWITCHED if set(data.get(block, ())) - {"enabled"} and not switched_on(data[block])}
    return sorted(name for name in idle if name.rpartition(".")[0] not in idle)


def without(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The file without some of its keys, by dotted names."""
    out = copy.deepcopy(dict(data))
    for name in names:
        block, _, last = name.rpartition(".")
        del (value_of(out, block) if block else out)[last]
    return out
