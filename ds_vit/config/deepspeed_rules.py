"""Rules about single keys of a DeepSpeed JSON: what does nothing in a run, and what DeepSpeed 0.19.8 gets wrong.

`deepspeed_keys.py` looks at the file and asks here. tests/config/test_json_walk.py runs every key and so holds the
rules to DeepSpeed.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

from ds_vit.fault_tolerance.errors import UserError

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")

_STAGE3_ONLY = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
)
# `reduce_bucket_size` at stage 0: engine/overlap.py.
_AT_EVERY_STAGE = ("stage", "offload_param", "offload_optimizer", "reduce_bucket_size")
# runtime/engine.py hands these to the optimizer of stages 1 and 2 alone.
_STAGES_1_AND_2 = (
    "use_multi_rank_bucket_allreduce",
    "allgather_bucket_size",
    "ignore_unused_parameters",
    "parameter_alignment",
)
_DEEPSPEEDS_CHECKPOINTS = "it steers DeepSpeed's own checkpoints"
_IDLE_ZERO = {
    "load_from_fp32_weights": _DEEPSPEEDS_CHECKPOINTS,
    "elastic_checkpoint": _DEEPSPEEDS_CHECKPOINTS,
    "pipeline_loading_checkpoint": _DEEPSPEEDS_CHECKPOINTS,
    "stage3_gather_16bit_weights_on_model_save": _DEEPSPEEDS_CHECKPOINTS,
    "gather_16bit_weights_on_model_save": _DEEPSPEEDS_CHECKPOINTS,
    "stage3_gather_fp16_weights_on_model_save": _DEEPSPEEDS_CHECKPOINTS,
    "allgather_partitions": "DeepSpeed 0.19.8 reads it and goes on as before",
    "cpu_offload_use_pin_memory": "DeepSpeed 0.19.8 has pin_memory in the offload blocks",
    "save_muon_momentum_buffer_in_memory": "Muon is not DeepSpeed's here",
}
_IDLE_TOP_LEVEL = {
    "checkpoint": _DEEPSPEEDS_CHECKPOINTS,
    "datastates_ckpt": _DEEPSPEEDS_CHECKPOINTS,
    "aio": "nothing is offloaded to NVMe here",
    "compile": "DeepSpeed's compiler is not asked; --compile compiles the blocks",
    "disable_allgather": "DeepSpeed 0.19.8 reads it and goes on as before",
    "dataloader_drop_last": "the sample order is ours",
    "vocabulary_size": "a ViT has no vocabulary",
    "seq_parallel_communication_data_type": "there is no Ulysses sequence parallelism",
    "use_data_before_expert_parallelism": "there are no experts",
    "zero_allow_untested_optimizer": "every optimizer offered here is tested with ZeRO",
    "zero_force_ds_cpu_optimizer": "offloaded steps use torch's optimizers, which need no JIT build",
    "log_level": "--verbose decides",
    "comms_logger": "its summary is printed nowhere, and it would wait for each collective; nsys sees them all",
}


# Blocks with a switch of their own; they are off unless it says otherwise.
_SWITCHED = (
    *("fp16", "bf16", "torch_autocast", *MONITORS, "flops_profiler"),
    *("autotuning", "hybrid_engine", "data_efficiency", "expert_parallel"),
)
_OF_NVME = {
    "offload_param": frozenset({"nvme_path", "buffer_count", "buffer_size", "max_in_cpu"}),
    "offload_optimizer": frozenset(
        {"nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"}
    ),
}


def switched_on(block: Any) -> bool:
    """Whether a block is there and says that it is enabled; "auto" says so too."""
    if not isinstance(block, Mapping):
        return False
    enabled = block.get("enabled", False)
    if isinstance(enabled, str):
        return enabled.lower() not in ("false", "0", "no", "n", "off", "f")  # what pydantic takes for false
    return enabled not in (False, None)


def sums_in_fp32(data: Mapping[str, Any]) -> bool:
    """Whether the JSON asks for gradients summed in fp32; where it says nothing, they are of the model's type."""
    # The names that `deepspeed.runtime.config.DtypeEnum` knows for it.
    return (data.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")


# What DeepSpeed does with gradients on their way over the ranks, and torch's reducer does not.
_ON_THEIR_WAY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("communication_data_type", (None, "fp32")),
    ("prescale_gradients", (None, False)),
    ("gradient_predivide_factor", (None, 1)),
)


def sums_going_back(data: Mapping[str, Any], *, pp: int, dp: int, tp: int) -> bool:
    """Whether torch's reducer sums the gradients while the backward pass runs (engine/overlap.py).

    It does where it gives what DeepSpeed would: data-parallel ranks alone, no ZeRO, sums that are plain ones; and not
    where micro-batches are accumulated, whose gradients would stand beside torch's buckets.
    """
    if int((data.get("zero_optimization") or {}).get("stage", 0)) != 0:
        return False
    return pp == tp == 1 < dp and data.get("gradient_accumulation_steps", 1) == 1 and sums_are_plain(data)


def sums_are_plain(data: Mapping[str, Any]) -> bool:
    """Whether nothing is done to fp32 gradients on their way over the ranks but to average them."""
    return all(data.get(key) in plain for key, plain in _ON_THEIR_WAY)


def idle(data: Mapping[str, Any]) -> dict[str, str]:
    """Dotted name of each known key, or of a whole block, that does nothing in this run → why."""
    out = {key: why for key, why in _IDLE_TOP_LEVEL.items() if key in data}
    zero = data.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    for key in zero:
        why = None
        if key in _IDLE_ZERO:
            why = _IDLE_ZERO[key]
        elif key in _STAGE3_ONLY and stage != 3:
            why = f"it acts at stage 3, this is stage {stage}"
        elif key in _STAGES_1_AND_2 and stage == 3:
            why = "it acts at stages 1 and 2, this is stage 3"
        elif stage == 0 and key not in _AT_EVERY_STAGE:
            why = "it acts at stages 1 to 3, this is stage 0"
        if why is not None:
            out[f"zero_optimization.{key}"] = why
    for block in ("offload_param", "offload_optimizer"):
        settings = zero.get(block) or {}
        if settings.get("device") == "cpu":
            for key in sorted(_OF_NVME[block] & settings.keys()):
                out[f"zero_optimization.{block}.{key}"] = "it is for the offload to NVMe, this goes to the CPU"
        elif settings.get("device", "none") == "none" and settings:
            out[f"zero_optimization.{block}"] = 'its device is "none"'
    for block in _SWITCHED:
        if block in data and not switched_on(data[block]) and set(data[block]) - {"enabled"}:
            out[block] = "it is not enabled"
    if "legacy_fusion" in (data.get("optimizer") or {}):
        out["optimizer.legacy_fusion"] = "it is for DeepSpeed's fused optimizers, and torch's are taken"
    for key in data.get("pipeline", {}):
        if key != "activation_checkpoint_interval":
            out[f"pipeline.{key}"] = "there is one pipeline stage, or this is set by ds_vit"
    checkpointing = data.get("activation_checkpointing", {})
    for key in ("partition_activations", "contiguous_memory_optimization", "number_checkpoints"):
        if checkpointing.get(key):
            out[f"activation_checkpointing.{key}"] = "it needs tensor parallelism or fixed shapes"
    for key in ("synchronize_checkpoint_boundary", "profile"):
        if checkpointing.get(key):
            out[f"activation_checkpointing.{key}"] = "checkpoints are torch's, which have no such switch"
    return out


def without_idle(data: Mapping[str, Any]) -> dict[str, Any]:
    """The file less what `idle` names: what DeepSpeed is not told, it cannot trip over."""
    out = copy.deepcopy(dict(data))
    for name in idle(data):
        *above, last = name.split(".")
        block = out
        for key in above:
            block = block[key]
        del block[last]
    return out


def current_names(zero: Mapping[str, Any]) -> dict[str, Any]:
    """ZeRO's block with the old switches of offload written as DeepSpeed reads them, `{"device": "cpu"}`."""
    out = dict(zero)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        asked = out.pop(old, None)
        if str(asked).lower() in ("true", "1", "yes", "y", "on", "t"):  # what pydantic takes for true
            out[new] = {"device": "cpu"}
    return out


# What DeepSpeed takes at stage 3, and why it cannot be here.
_REFUSED_STAGE3 = {
    "zero_quantized_weights": "rounds the weights on their way, which moves the curve, and needs a CUDA build",
    "zero_quantized_nontrainable_weights": "rounds the frozen weights, which moves the curve, and needs a CUDA build",
    "zero_quantized_gradients": "rounds the gradients on their way, which moves the curve, and needs a CUDA build",
}
# Parts that are fetched whole. DeepSpeed 0.19.8 hangs the release of a leaf's weights on the tensors that it is handed;
# a layer here is handed a tuple, and its weights are gone before their gradients are there.
_REFUSED_LEAVES = {
    "leaf_module": "is for a mixture of experts, and loses the weights of a ViT's layers in the backward pass",
    "stage3_module_granularity_threshold": "loses the weights of a ViT's layers in the backward pass",
}
_REFUSED_OFFLOAD = {
    "ratio": (1, "below 1 leaves a part of the steps to DeepSpeed's compiled CPU Adam; delete it"),
    "super_offload": (False, "needs DeepSpeed's compiled CPU Adam; delete it"),
}


def check_zero(zero: Mapping[str, Any], stage: int, path: str) -> None:
    """Refuse what ZeRO gets wrong, or what needs a build."""
    if zero.get("round_robin_gradients"):
        raise UserError(
            f'{path}: "zero_optimization.round_robin_gradients" lets DeepSpeed 0.19.8 mix parameters up; delete it'
        )
    if zero.get("zenflow") is not None:
        raise UserError(
            f'{path}: "zero_optimization.zenflow" updates parameters late and so moves the curve; delete it'
        )
    for block in ("offload_param", "offload_optimizer"):
        device = (zero.get(block) or {}).get("device", "none")
        if device == "nvme":
            raise UserError(
                f'{path}: "zero_optimization.{block}.device": "nvme" needs DeepSpeed\'s AIO build; use "cpu"'
            )
        if device != "none" and stage < (3 if block == "offload_param" else 1):
            needed = "stage 3" if block == "offload_param" else "stage 1, 2 or 3"
            raise UserError(f'{path}: "zero_optimization.{block}" needs {needed}; this file has stage {stage}')
    for key, (default, why) in _REFUSED_OFFLOAD.items():
        if (zero.get("offload_optimizer") or {}).get(key, default) != default:
            raise UserError(f'{path}: "zero_optimization.offload_optimizer.{key}" {why}')
    for key, why in (_REFUSED_STAGE3 | _REFUSED_LEAVES).items():
        if stage == 3 and zero.get(key):
            raise UserError(f'{path}: "zero_optimization.{key}" {why}; delete it')


def check_low_precision_masters(data: Mapping[str, Any], path: str) -> None:
    """Masters in 16 bits need DeepSpeed's compiled CPU Adam, unless the moments are in 16 bits too and on the GPU."""
    if (data.get("fp16") or {}).get("fp16_master_weights_and_grads"):
        raise UserError(
            f'{path}: "fp16.fp16_master_weights_and_grads" needs DeepSpeed\'s compiled CPU Adam; delete it, or use '
            'bf16 with "bf16_master_weights_and_grads" and "bf16_optimizer_states"'
        )
    bf16 = data.get("bf16") or {}
    masters, states = (bool(bf16.get(key)) for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"))
    if masters != states:
        there, missing = ("bf16_master_weights_and_grads", "bf16_optimizer_states")[:: 1 if masters else -1]
        raise UserError(f'{path}: "bf16.{there}" works only together with "{missing}": set both, or delete it')
    offloaded = (data.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none") != "none"
    if masters and offloaded and switched_on(bf16):
        raise UserError(
            f'{path}: "bf16.bf16_master_weights_and_grads" with "zero_optimization.offload_optimizer" needs '
            "DeepSpeed's compiled CPU Adam; delete one of them"
        )


def check_scaling(data: Mapping[str, Any], stage: int, path: str) -> None:
    """Refuse the scaling of gradients before they are summed where DeepSpeed lacks it or multiplies back wrongly."""
    factor = data.get("gradient_predivide_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
        raise UserError(f"{path}: gradient_predivide_factor must be a number above 0, not {factor!r}")
    zero = data.get("zero_optimization", {})
    for key, asked in (
        ("prescale_gradients", data.get("prescale_gradients")),
        ("gradient_predivide_factor", factor != 1),
    ):
        if asked and stage >= 2 and zero.get("reduce_scatter", True):
            raise UserError(
                f'{path}: "{key}" at ZeRO stage {stage} needs "reduce_scatter": false in DeepSpeed 0.19.8; '
                "delete it, or use stage 1"
            )
    if factor != 1 and stage == 3:
        raise UserError(
            f'{path}: "gradient_predivide_factor" at ZeRO stage 3 makes DeepSpeed 0.19.8 divide the gradients by it '
            "where it equals the number of data-parallel ranks; delete it"
        )


def check_monitors(data: Mapping[str, Any], path: str) -> None:
    """Refuse a monitor whose package is not there."""
    for block, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        if switched_on(data.get(block)) and importlib.util.find_spec(package) is None:
            raise UserError(
                f'{path}: "{block}" needs the package {package}: pip install {package}, or delete the block'
            )


def check_secondary_partition(data: Mapping[str, Any], path: str, *, dp: int, tp: int) -> None:
    """Refuse a `zero_hpz_partition_size` whose groups of ranks would not divide the data-parallel ones.

    DeepSpeed takes consecutive ranks of the world for a group.
    """
    zero = data.get("zero_optimization", {})
    size = zero.get("zero_hpz_partition_size", 1)
    if zero.get("stage", 0) != 3 or size <= 1:
        return
    key = f"zero_optimization.zero_hpz_partition_size {size}"
    if tp > 1:
        raise UserError(
            f"{path}: {key} does not go with --tp {tp}: DeepSpeed 0.19.8 takes consecutive ranks for a group, and with "
            "--tp they hold different slices; delete the key, or use --tp 1"
        )
    if dp % min(size, dp):
        fits = ", ".join(str(n) for n in range(2, dp + 1) if dp % n == 0)
        raise UserError(f"{path}: {key} does not divide the {dp} data-parallel ranks; it may be {fits}")


def check_grad_norm(data: Mapping[str, Any], path: str, *, clip: float) -> None:
    """Refuse to be without a gradient norm where there is clipping by it, or where DeepSpeed needs it."""
    zero = data.get("zero_optimization", {})
    if zero.get("compute_grad_norm", True) is not False:
        return
    key = f'{path}: "zero_optimization.compute_grad_norm": false'
    if clip > 0:
        raise UserError(
            f"{key} leaves nothing to clip by, and gradient_clipping is {clip:g}; delete one of them, or set the "
            "clipping to 0"
        )
    if switched_on(data.get("bf16")) and zero.get("stage") == 1 and sums_in_fp32(data):
        raise UserError(f"{key} does not go with bf16, stage 1 and gradients summed in fp32; delete it, or use stage 2")
