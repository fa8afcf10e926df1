"""What stands here for a flag of timm's train.py (and of its forks' habits) that is none of ours.

timm's flags by its release 1.0.31 (https://github.com/huggingface/pytorch-image-models, train.py).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_JSON = "it is decided by the DeepSpeed JSON"

# By recipe names, as patterns of fnmatch; the first that fits counts. What follows "there is no flag --x; ".
_HINTS = {
    "c config": "a YAML file of flags is given by --recipe FILE",
    "d": "the data set is named by --dataset NAME, a folder by --data-dir DIR",
    "data": "the data folder is given by --data-dir DIR",
    # precision, optimizer, compilation
    "opt": f'{_JSON}: "optimizer": {{"type": "AdamW", "params": {{"lr": "auto"}}}}; docs/optimizers.md lists the types',
    "opt_eps opt_betas opt_kwargs momentum": f'{_JSON}: "optimizer": {{…, "params": {{"betas": [0.9, 0.999], …}}}}',
    "clip_mode": "gradients are clipped by their global norm: --clip-grad",
    "amp amp_* *_amp model_dtype": f'{_JSON}: "bf16": {{"enabled": true}}, "fp16" or "torch_autocast"; ds_configs/ has '
    "a file for each",
    "torchscript fuser": "a run trains the eager model; a trained one is exported by ds-vit export RUN --to onnx",
    "torchcompile": "blocks are compiled by --compile",
    "torchcompile_mode": "torch.compile's mode is given by --compile-mode beside --compile",
    "torchcompile_*": "there are --compile and --compile-mode alone",
    "channels_last fast_norm": "ViTs gain nothing from it; drop it (--norm-dtype model computes norms in 16 bits)",
    "device device_modules": "DeepSpeed finds the accelerator; DS_ACCELERATOR=cpu in the environment chooses the CPU",
    "no_ddp_bb synchronize_step": "DeepSpeed exchanges the gradients; drop it",
    # weights
    "pretrained_path": "weights are given as a file in timm's names: --initial-checkpoint FILE (ds-vit "
    "import brings other names)",
    "no_resume_opt": "--initial-checkpoint FILE starts from the weights alone",
    "start_epoch start_step": "--resume auto goes on where the run in --output was interrupted",
    # model
    "gp": "the constructor's arguments are given by --model-kwargs global_pool=avg",
    "in_chans": "images are RGB here; drop it",
    "input_size": "images are square RGB here: --img-size 224",
    "head_init_scale head_init_bias": "heads start as timm's models have them; drop it",
    "drop_connect": "timm's newer name for it is --drop-path",
    "drop_block bn_momentum bn_eps sync_bn dist_bn split_bn": "ViTs have no layer that it is for; drop it",
    "model_ema_v2": "there is one average: --model-ema",
    "model_ema_force_cpu": "the average is cut over the ranks as the optimizer's state is, and evaluated: --model-ema",
    # learning rate
    "lr_base": "--lr is the base where --lr-scale-by-batch linear (or sqrt) is given, for a batch of --lr-base-size",
    "lr_base_scale": "write --lr-scale-by-batch linear or sqrt",
    "sched_on_updates": "the learning rate is set at every optimizer step always; drop it",
    "lr_noise lr_noise_* lr_cycle_* lr_k_decay decay_milestones decay_epochs decay_steps decay_rate dr patience_epochs "
    "patience_steps cooldown_epochs cooldown_steps": "the schedules are --sched cosine, linear, constant and wsd, "
    "without cycles, steps or noise; or one of DeepSpeed's in the JSON",
    "warmup_prefix": "as by timm's default, the decay is counted from the run's first step; drop it",
    "layer_decay_*": "there is --layer-decay alone",
    "num_steps": "the length in optimizer steps is given by --max-steps",
    "epoch_repeats": "give more --epochs; --aug-repeats shows a sample several times in one epoch",
    # data, augmentation, loss
    "class_map": "classes are named by their folders, or by labels.csv beside the images (docs/data.md)",
    "input_img_mode input_key target_key dataset_trust_remote_code train_num_samples val_num_samples": "it is for data "
    "sets that are not read here; image folders, tar files and torchvision's are (docs/data.md)",
    "aug_splits jsd_loss resplit": "augmentation splits and their Jensen-Shannon loss are not here; drop it",
    "mixup_mode": "pairs are mixed, each by a draw of its own (timm's pair mode); drop it",
    "mixup_off_step": "it is counted in epochs: --mixup-off-epoch",
    "bce_pos_weight": "classes have equal weights; drop it",
    "pin_mem no_prefetcher use_multi_epochs_loader loader_prefetch_factor": "the input pipeline does what is best for "
    "the device by itself; drop it",
    "worker_seeding": "what is random is drawn from the sample's key, whatever the worker: --seed alone decides",
    "save_images": "--log-samples writes which samples each step used",
    "naflex_*": "images of several sizes in one batch are not here; drop it",
    "kd_* distill_loss_weight task_loss_weight": "there is no distillation here; drop it",
    # what is written
    "experiment": "--output DIR is the run's own folder",
    "log_dir": "everything is written to --output DIR",
    "checkpoint_hist": "--keep-checkpoints N",
    "recovery_interval num_saves": "--checkpoint-interval 500 (steps) or 30m (time)",
    "val_interval num_evals": "--eval-interval N, in epochs",
    "num_logs": "--log-interval N, in optimizer steps",
    "eval_metric": "the best checkpoint is the one of the task's own metric, top-1 in classification; drop it",
    "tta": "evaluation looks at one crop; drop it",
    "log_wandb wandb_project": f'{_JSON}: "wandb": {{"enabled": true, "project": …}}; TensorBoard is written anyway',
    "wandb_*": f'{_JSON}: "wandb": {{"enabled": true, "group": …, "team": …}}',
}


def timm_hint(name: str) -> str | None:
    """What stands here for a flag of timm's.

    Args:
        name: by its recipe name, with underscores.

    Returns:
        A clause for people; None for a name that is not timm's.
    """
    fits = (hint for names, hint in _HINTS.items() if any(fnmatchcase(name, pattern) for pattern in names.split()))
    return next(fits, None)
