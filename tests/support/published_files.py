"""DeepSpeed files as the world writes them, and the smallest run for them."""

from __future__ import annotations

from typing import Any

WIDTH = 24
RUN = [
    *("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=8", f"embed_dim={WIDTH}", "depth=1"),
    *("num_heads=2", "--img-size", "16", "--dataset", "digits", "--val-split", "", "--no-aug", "--workers", "0"),
    *("--max-steps", "4", "--log-interval", "1"),
]
_DYNAMIC_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_FP16 = {"enabled": "auto", **_DYNAMIC_SCALE, "initial_scale_power": 16}
_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
_BATCH = dict.fromkeys(("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
_HUGGING_FACE = {**_BATCH, "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False}
_TO_CPU = {"device": "cpu", "pin_memory": True}
_STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
# huggingface/transformers, its documentation of DeepSpeed: ds_config_zero2.json and ds_config_zero3.json.
ZERO2: dict[str, Any] = {
    "fp16": _FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": _ADAMW,
    "scheduler": {"type": "WarmupLR", "params": _WARMUP},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": _TO_CPU,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    **_HUGGING_FACE,
}
ZERO3: dict[str, Any] = {
    "fp16": _FP16,
    "bf16": {"enabled": "auto"},
    "optimizer": _ADAMW,
    "scheduler": {"type": "WarmupDecayLR", "params": {**_WARMUP, "total_num_steps": "auto"}},
    "zero_optimization": {
        **_STAGE3,
        "offload_optimizer": _TO_CPU,
        "offload_param": _TO_CPU,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **_HUGGING_FACE,
}

# Where a file stands → what it says.
FILES: dict[str, dict[str, Any]] = {
    "huggingface/transformers tests/deepspeed/ds_config_zero2.json": ZERO2,
    "huggingface/transformers docs ds_config_zero3.json": ZERO3,
    "haotian-liu/LLaVA scripts/zero3_offload.json": {
        **ZERO3,
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": _WARMUP},
        "zero_optimization": {
            **_STAGE3,
            "offload_optimizer": _TO_CPU,
            "offload_param": _TO_CPU,
            "gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 1e5,
    },
}
