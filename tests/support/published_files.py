"""DeepSpeed files as the world writes them: what each says, and where it stands; and the smallest run for them.

Blocks that are refused as a whole are shortened.
"""

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
# Megatron-DeepSpeed, examples_deepspeed/{rebase,sequence_parallel}: the stage is what differs.
_MEGATRON = {
    "train_batch_size": 256,
    "steps_per_print": 1,
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {"enabled": True, **_DYNAMIC_SCALE, "loss_scale_window": 500, "initial_scale_power": 11},
    "wall_clock_breakdown": False,
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
    "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_config.json": {
        **_BATCH,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "fp16": _FP16,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            **_STAGE3,
            "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
    },
    # BLOOM. The batch of 2048 was 2 on each of 8 replicas.
    "bigscience-workshop/bigscience train/tr11-176B-ml/tr11-176B-ml.slurm": {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2048,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "microsoft/Megatron-DeepSpeed examples_deepspeed/sequence_parallel/ds_config_gbs256_mbs1_log1_zero3.json": {
        **_MEGATRON,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
    },
    "microsoft/Megatron-DeepSpeed ds_zero2_config_bf16.json": {
        "train_batch_size": 96,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "bfp16",
        "bfloat16": {"enabled": True, "loss_scale": 1.0},
    },
    "microsoft/DeepSpeedExamples cifar/ds_config.json": {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {
            **_DYNAMIC_SCALE,
            "enabled": True,
            "fp16_master_weights_and_grads": True,
            "loss_scale_window": 500,
            "initial_scale_power": 15,
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": True,
        },
    },
    "microsoft/DeepSpeedExamples cifar/ds_config_onebitlamb.json": {
        "train_batch_size": 1024,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "OneBitLamb", "params": {"lr": 5e-3, "weight_decay": 0.01, "freeze_step": 1000}},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False, "loss_scale": 0},
    },
    "microsoft/DeepSpeedExamples bing_bert/deepspeed_bsz64k_lamb_config_seq128.json": {
        "train_batch_size": 65536,
        "train_micro_batch_size_per_gpu": 64,
        "steps_per_print": 100,
        "prescale_gradients": False,
        "optimizer": {
            "type": "Lamb",
            "params": {
                "lr": 11e-3,
                "weight_decay": 0.01,
                "bias_correction": False,
                "max_coeff": 0.3,
                "min_coeff": 0.01,
            },
        },
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0},
        "sparse_attention": {"mode": "fixed", "block": 16},
    },
    # ViTs. BEiT's program writes its file; the numbers are its command line's (--batch_size 128 --lr 1.5e-3).
    "microsoft/unilm beit/utils.py": {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 128,
        "steps_per_print": 1000,
        "optimizer": {
            "type": "Adam",
            "adam_w_mode": True,
            "params": {
                "lr": 1.5e-3,
                "weight_decay": 0.05,
                "bias_correction": True,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
            },
        },
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 7, "loss_scale_window": 128},
    },
    "baaivision/EVA EVA-CLIP/rei/training/deepspeed_config.json": {
        "train_batch_size": 14848,
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 1,
        "gradient_accumulation_dtype": "fp32",
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, **_DYNAMIC_SCALE, "initial_scale_power": 16},
        "amp": {"enabled": False, "opt_level": "O2"},
        "optimizer": {"type": "LAMB", "params": {"betas": [0.9, 0.98], "eps": 1e-06, "eps_inside_sqrt": False}},
        "gradient_clipping": 5.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": _TO_CPU, "offload_param": _TO_CPU},
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    },
    "OpenGVLab/InternVL segmentation/zero_configs/adam_zero1_amp.json": {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.00004}},
        "amp": {"enabled": True, "opt_level": "O1"},
        "log": {"steps_per_print": 50},
        "wall_clock_breakdown": False,
    },
    "OpenGVLab/InternVL internvl_chat/zero_stage3_config.json": {
        "zero_optimization": {
            **_STAGE3,
            "reduce_bucket_size": 1e9,
            "stage3_prefetch_bucket_size": 1e9,
            "stage3_param_persistence_threshold": 1e7,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "fp16": {**_FP16, "auto_cast": True, "initial_scale_power": 32},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"},
        },
        **_HUGGING_FACE,
        "wall_clock_breakdown": True,
    },
}
