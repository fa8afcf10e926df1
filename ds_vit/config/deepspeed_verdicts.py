"""What ds_vit says of each key of DeepSpeed's JSON: rejected values, keys without effect, and at which ZeRO stages.

Written for DeepSpeed 0.19. tests/config/test_deepspeed_verdicts.py trains with all keys, so it compares the table with
DeepSpeed itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_vit.config.deepspeed_json import MASTERS_IN_BF16, MONITORS, is_on

DeepSpeedJson = Any  # of deepspeed_keys.py, which reads this table


class Verdict(NamedTuple):
    """One or several keys whose values are rejected or have no effect.

    Attributes:
        names: dotted; ".x" is "zero_optimization.x".
        reason: of a rejection; it follows the key's name in the message, and ends with what to do. "": no effect.
        values: whether it is about a value that the file has.
        stages: the ZeRO stages at which it holds.
        when: whether the rest of the file makes it hold.
    """

    names: str
    reason: str
    values: Callable[[Any], bool] = bool
    stages: tuple[int, ...] = (0, 1, 2, 3)
    when: Callable[[DeepSpeedJson], bool] = lambda json: True

    def dotted(self) -> list[str]:
        """The dotted names."""
        return [f"zero_optimization{name}" if name.startswith(".") else name for name in self.names.split()]


def _is_given(value: Any) -> bool:
    return True


def _scatters(json: DeepSpeedJson) -> bool:
    return json.zero_optimization.reduce_scatter and not json.flat_gradients


def _is_missing(package: str) -> Callable[[Any], bool]:
    """Whether a monitor is on and its package is not installed."""
    return lambda block: is_on(block) and importlib.util.find_spec(package) is None


def _idle(names: str, values: Callable[[Any], bool] = _is_given, **where: Any) -> Verdict:
    """Keys that have no effect."""
    return Verdict(names, "", values, **where)


_ZERO_KEYS = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
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
_SCATTER = 'at ZeRO stage {stage} needs "reduce_scatter": false in DeepSpeed 0.19.8; delete it, or use stage 1'
_DIVIDES = "divides the gradients where it equals the number of data-parallel ranks (DeepSpeed 0.19.8); delete it"
_STATES = "bf16.bf16_optimizer_states"

VERDICTS = (
    # Rejected values.
    Verdict("autotuning", "is a launcher mode of DeepSpeed that rewrites the run; delete the block", is_on),
    Verdict("hybrid_engine", "is for generation during RLHF; delete the block", is_on),
    Verdict("data_efficiency", "replaces the data loader and its keyed order; delete the block", is_on),
    Verdict("expert_parallel", "needs a mixture of experts, which no ViT here has; delete the block", is_on),
    Verdict("tensor_parallel", "is AutoTP, which replaces ds_vit's sharding of the model; use --tp"),
    Verdict("sequence_parallel_size", "is Ulysses, which does not shard a ViT; delete the key", lambda v: v != 1),
    Verdict("data_parallel_size", "follows from the number of ranks, --pp and --tp; delete the key", _is_given),
    Verdict("weight_quantization", "changes the weights during training; delete the block"),
    Verdict(
        "managed_gradient_accumulation",
        "leaves accumulation to the caller; delete it",
        lambda v: v not in (True, "true"),
    ),
    Verdict(
        "gradient_allreduce_op",
        'makes the loss curve depend on the number of ranks; delete the key (the default is "mean")',
        lambda op: str(op).lower() != "mean",
    ),
    Verdict(
        "compile",
        "(DeepCompile) hides ZeRO's partitions from optimizers and checkpoints; delete the block and use --compile",
        lambda v: not isinstance(v, Mapping) or v.get("deepcompile") not in (None, False),
    ),
    Verdict("prescale_gradients", _SCATTER, bool, (2, 3), _scatters),
    Verdict("gradient_predivide_factor", _SCATTER, lambda v: v != 1, (2, 3), _scatters),
    Verdict("gradient_predivide_factor", _DIVIDES, lambda v: v != 1, (3,)),
    Verdict(
        ".compute_grad_norm",
        "false does not work with offload_optimizer in DeepSpeed 0.19.8; delete one of them",
        lambda v: v is False,
        when=lambda json: "optimizer" in json.offloaded,
    ),
    Verdict(".legacy_stage1", "is the old stage 1, which DeepSpeed removed; delete the key"),
    Verdict(".round_robin_gradients", "makes DeepSpeed 0.19.8 mix up parameters; delete it"),
    Verdict(".zenflow", _ZENFLOW, _is_given),
    Verdict(".offload_param.device", f'"nvme" {_NVME_PARAM}; use "cpu"', lambda v: v == "nvme"),
    Verdict(".offload_param.device", "needs stage 3; this file has stage {stage}", lambda v: v != "none", (0, 1, 2)),
    Verdict(".offload_optimizer.device", f'"nvme" {_NVME_OPTIMIZER}', lambda v: v == "nvme"),
    Verdict(
        ".offload_optimizer.device", "needs stage 1, 2 or 3; this file has stage {stage}", lambda v: v != "none", (0,)
    ),
    Verdict(".offload_optimizer.ratio", _RATIO, lambda v: v != 1),
    Verdict(".offload_optimizer.super_offload", _SUPER_OFFLOAD),
    Verdict(
        ".zero_quantized_weights .zero_quantized_nontrainable_weights .zero_quantized_gradients",
        _QUANTIZED,
        stages=(3,),
    ),
    Verdict(".zero_hpz_partition_size", _SECONDARY, lambda v: v != 1, (3,)),
    Verdict(".leaf_module .stage3_module_granularity_threshold", _LEAVES, stages=(3,)),
    Verdict("fp16.fp16_master_weights_and_grads", f'{_CPU_ADAM}, or use "{MASTERS_IN_BF16}" and "{_STATES}"'),
    Verdict(
        f"{MASTERS_IN_BF16} {_STATES}",
        f'works only together with the other of "{MASTERS_IN_BF16}" and "{_STATES}"; set both, or delete it',
        when=lambda json: not (json.given(MASTERS_IN_BF16) and json.given(_STATES)),
    ),
    Verdict(
        MASTERS_IN_BF16,
        f"with offload_optimizer {_CPU_ADAM}, or the offload",
        when=lambda json: json.is_on("bf16") and "optimizer" in json.offloaded,
    ),
    *(
        Verdict(block, f"needs the package {package}: pip install {package}, or delete it", _is_missing(package))
        for block, package in {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}.items()
    ),
    # Keys without effect. DeepSpeed's own checkpoints, loaders, optimizers, experts and log level.
    _idle("""
        checkpoint datastates_ckpt aio compile disable_allgather dataloader_drop_last vocabulary_size
        seq_parallel_communication_data_type use_data_before_expert_parallelism zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer log_level comms_logger optimizer.legacy_fusion
        pipeline.stages pipeline.partition pipeline.seed_layers pipeline.use_reentrant pipeline.pipe_partitioned
        pipeline.grad_partitioned
        .load_from_fp32_weights .elastic_checkpoint .pipeline_loading_checkpoint
        .stage3_gather_16bit_weights_on_model_save .stage3_gather_fp16_weights_on_model_save .allgather_partitions
        .cpu_offload_use_pin_memory .save_muon_momentum_buffer_in_memory .memory_efficient_linear
        .stage3_max_reuse_distance .stage3_use_all_reduce_for_fetch_params .log_trace_cache_warnings
        .offload_param.nvme_path .offload_param.buffer_count .offload_param.buffer_size .offload_param.max_in_cpu
        .offload_optimizer.nvme_path .offload_optimizer.buffer_count .offload_optimizer.pipeline_read
        .offload_optimizer.pipeline_write .offload_optimizer.fast_init .offload_optimizer.cpuadam_cores_perc
    """),
    # These have an effect in tensor-parallel models of DeepSpeed only; false is what holds anyway.
    _idle(
        """
        activation_checkpointing.partition_activations activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.number_checkpoints activation_checkpointing.synchronize_checkpoint_boundary
        activation_checkpointing.profile
        """,
        bool,
    ),
    _idle(
        """
        .stage3_prefetch_bucket_size .stage3_param_persistence_threshold .stage3_model_persistence_threshold
        .stage3_max_live_parameters .stage3_module_granularity_threshold .stage3_allgather_sequential .sub_group_size
        .zero_hpz_partition_size .zero_quantized_weights .zero_quantized_nontrainable_weights
        .zero_quantized_gradients .override_module_apply .enable_sanity_checks .leaf_module
        """,
        stages=(0, 1, 2),
    ),
    # runtime/engine.py passes the first four to the optimizer of stages 1 and 2 only; engine/zero3.py has no buckets.
    _idle(
        """
        .use_multi_rank_bucket_allreduce .allgather_bucket_size .ignore_unused_parameters .parameter_alignment
        .contiguous_gradients
        """,
        stages=(0, 3),
    ),
    _idle(".reduce_bucket_size", stages=(3,)),
    _idle(
        " ".join(f".{k}" for k in _ZERO_KEYS - {"stage", "offload_param", "offload_optimizer", "reduce_bucket_size"}),
        stages=(0,),
    ),
    # How DeepSpeed sums gradients and checks them: at ZeRO-3 and with offload of the optimizer only.
    _idle(
        """
        .overlap_comm .contiguous_gradients .reduce_scatter .use_multi_rank_bucket_allreduce .allgather_bucket_size
        .ignore_unused_parameters bf16.immediate_grad_update bf16.check_grad_overflow
        """,
        when=lambda json: json.flat_gradients,
    ),
    _idle(".offload_param .offload_optimizer", lambda block: bool(block) and block.get("device", "none") == "none"),
    # Blocks that are off, as they are by default.
    _idle(
        f"fp16 bf16 torch_autocast {' '.join(MONITORS)} flops_profiler "
        "autotuning hybrid_engine data_efficiency expert_parallel",
        lambda block: not is_on(block) and block not in ({}, {"enabled": False}),
    ),
)


NAMED = frozenset(name for verdict in VERDICTS for name in verdict.dotted())
"""Every dotted name in the table; those that no model has are known by it."""


def _holding(json: DeepSpeedJson) -> Iterator[tuple[str, Verdict]]:
    """Each key of the file, with the verdicts that hold for it."""
    for verdict in VERDICTS:
        for name in verdict.dotted():
            value = json.given(name)
            holds = value is not None and json.zero_stage in verdict.stages and verdict.values(value)
            if holds and verdict.when(json):
                yield name, verdict


def rejected(json: DeepSpeedJson, path: str) -> list[tuple[str, str]]:
    """The keys with a value that is rejected, and why.

    Args:
        json: the file.
        path: named in messages.
    """
    stage = str(json.zero_stage)
    return [
        (name, f'{path}: "{name}" {verdict.reason.replace("{stage}", stage)}')
        for name, verdict in _holding(json)
        if verdict.reason
    ]


def idle_keys(json: DeepSpeedJson) -> list[str]:
    """The dotted names of the keys, or whole blocks, that have no effect in this run."""
    idle = {name for name, verdict in _holding(json) if not verdict.reason}
    return sorted(name for name in idle if name.rpartition(".")[0] not in idle)
