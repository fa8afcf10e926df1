"""Which flags cannot stand together: contradictions, numbers out of range, and flags that would have no effect."""

from __future__ import annotations

from dataclasses import fields

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.config.deepspeed_set import KEY_OF_FLAG, parse_set
from ds_vit.config.durations import Interval, parse_seconds, parse_steps
from ds_vit.config.flag import check_values
from ds_vit.config.flags import FIELDS, RunConfig, is_asked_for, spelling
from ds_vit.config.image_sizes import all_sizes
from ds_vit.config.sizes import parse_bytes
from ds_vit.fault_tolerance.errors import UserError

EITHER = (
    ("warmup_steps", "warmup_epochs"),
    ("freeze", "linear_probe"),
    ("pretrained", "initial_checkpoint"),
    ("val_fraction", "val_split"),
    ("img_size_schedule", "train_img_sizes"),
    *((name, by_hand) for name in ("auto_batch", "memory") for by_hand in ("batch_size", "grad_accum_steps")),
)
"""Flags of which one excludes the other."""

# What evaluation alone looks at; every other flag is about training.
_EVALUATION_NAMES = """
    deepspeed_config set pp tp tp_across_hosts sequence_parallel class_parallel pp_partition task mask_ratio decoder_dim
    decoder_depth decoder_heads norm_pix_loss model model_kwargs num_classes
    img_size pretrained initial_checkpoint resample_patch_embed
    dataset data_dir train_split val_split val_fraction dataset_download workers on_bad_image
    allow_empty_classes mean std
    interpolation crop_pct crop_mode bce_loss norm_dtype compile compile_mode tf32 batch_size output seed
    validation_batch_size eval_only eval_knn eval_linear_probe stall_seconds dry_run verbose
"""
_EVALUATION = frozenset(_EVALUATION_NAMES.split())


def check(config: RunConfig, explicit: frozenset[str]) -> None:
    """Refuse what cannot be, what contradicts itself, and what would have no effect.

    Raises:
        UserError: says which flags, with their numbers, and what to do.
    """

    if not config.deepspeed_config:
        raise UserError(
            "--deepspeed_config FILE is missing; ds_configs/ has one for each ZeRO stage and precision: begin with "
            "ds_configs/zero1_bf16.json on GPUs, with ds_configs/cpu_zero1_fp32.json on a CPU"
        )
    check_values(config)
    _ = config.augment, config.mix  # which look at their values together
    _check_checkpoints(config)
    if not config.dataset and not config.data_dir:
        raise UserError("no data: give --data-dir DIR with train/ and val/ in it, or --dataset digits")
    num_folders = 1 if isinstance(config.data_dir, str) else len(config.data_dir)
    if num_folders > 1 and len(config.data_weights) not in (0, num_folders):
        raise UserError(
            f"--data-weights has {len(config.data_weights)} numbers for the {num_folders} folders of --data-dir; give "
            "one for each"
        )
    if config.compile and config.drop_path_compute == "kept":
        raise UserError(
            "--drop-path-compute kept gives each step other numbers of rows, and --compile a graph is of one; drop one "
            "of them"
        )
    if config.compile and config.grad_checkpointing == "selective":
        raise UserError(
            "--grad-checkpointing selective tells single operations apart, which --compile makes one graph of; use "
            "--grad-checkpointing full, or drop --compile"
        )
    if config.img_size_schedule or config.train_img_sizes:
        _check_image_sizes(config)
    if config.freeze and config.linear_probe:
        raise UserError("--linear-probe freezes all but the head already; drop --freeze")
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise UserError("--warmup-steps and --warmup-epochs are both given; keep one")
    if config.pretrained and config.initial_checkpoint:
        raise UserError(
            f"--pretrained and --initial-checkpoint {config.initial_checkpoint} both say what to start from; keep one"
        )
    if config.drop and "drop_rate" in config.model_kwargs:
        rate = config.model_kwargs["drop_rate"]
        raise UserError(f"--drop {config.drop} and --model-kwargs drop_rate={rate} are both given; keep one")
    for name in ("batch_size", "grad_accum_steps"):
        if config.auto_batch and getattr(config, name) is not None:
            raise UserError(f"--auto-batch finds what {spelling(name)} {getattr(config, name)} says; keep one")
    if config.memory:
        parse_bytes(config.memory, "--memory")
    values = parse_set(config.set)
    for name, key in KEY_OF_FLAG.items():
        if key in values and getattr(config, name) is not None:
            raise UserError(f"{spelling(name)} {getattr(config, name)} and --set {key} are both given; keep one")
    for name, reason in _idle_flags(config):
        if is_asked_for(name, config, explicit):
            raise UserError(f"{spelling(name)} has no effect {reason}; drop it")


def _check_image_sizes(config: RunConfig) -> None:
    """What stands beside --img-size-schedule or --train-img-sizes."""
    if config.img_size_schedule and config.train_img_sizes:
        raise UserError("--img-size-schedule and --train-img-sizes both say which size a step has; keep one")
    flag = "--img-size-schedule" if config.img_size_schedule else "--train-img-sizes"
    largest = all_sizes(config.img_size_schedule, config.train_img_sizes)[-1]
    if config.img_size not in (None, largest):
        raise UserError(
            f"{flag} goes up to {largest}, at which the run is evaluated, and --img-size is {config.img_size}; make "
            "them the same, or drop --img-size"
        )
    if config.compile:
        raise UserError(f"{flag} gives the blocks other shapes on the way, and --compile a graph is of one; drop one")


def _check_checkpoints(config: RunConfig) -> None:
    """What the flags of checkpoints and interruption must be."""
    Interval.parse(config.checkpoint_interval, "--checkpoint-interval")
    if config.time_limit:
        parse_seconds(config.time_limit, "--time-limit")
    parse_steps(config.profile_steps, "--profile-steps")
    if config.resume == "auto" and not config.output:
        raise UserError("--resume auto looks for checkpoints in the run's folder: give it by --output DIR")


def idle_names(config: RunConfig) -> set[str]:
    """The flags that do nothing beside these others, by their recipe names."""
    return {name for name, _ in _idle_flags(config)}


def _idle_flags(config: RunConfig) -> list[tuple[str, str]]:
    """(flag, why it does nothing here) for this combination."""
    idle: list[tuple[str, str]] = []
    if config.no_aug:
        names = [f.name for f in fields(AugmentConfig) if f.name != "no_aug"]
        idle += [(name, "under --no-aug") for name in names]
    if config.aa not in ("", "none") and "3a" not in config.aa:  # 3-Augment is the one policy that keeps the jitter
        names = ["color_jitter", "color_jitter_prob"]
        idle += [(name, "under --aa, which replaces the colour jitter") for name in names]
    elif not config.color_jitter:
        idle += [("color_jitter_prob", "without --color-jitter")]
    if config.train_crop_mode in ("rkrc", "rkrr"):
        idle += [("decode", f"with --train-crop-mode {config.train_crop_mode}, which takes whole images")]
    if not config.reprob:
        idle += [(name, "without --reprob") for name in ("remode", "recount")]
    if not config.active:
        idle += [(n, "without --mixup or --cutmix") for n in ("mixup_prob", "mixup_switch_prob", "mixup_off_epoch")]
    elif config.mixup == 0 or (config.cutmix == 0 and config.cutmix_minmax is None):
        idle += [("mixup_switch_prob", "unless --mixup and --cutmix are both on")]
    if config.cutmix_minmax is not None:
        idle += [("cutmix", "beside --cutmix-minmax, which draws the box itself")]
    if not config.bce_loss:
        idle += [(name, "without --bce-loss") for name in ("bce_sum", "bce_target_thresh")]
    if config.checkpoint_interval == "0" and config.resume == "none":
        idle += [("rollback", "with --checkpoint-interval 0: there is nothing to go back to")]
    if config.resume == "none":
        idle += [(name, "without --resume") for name in ("allow_batch_change", "allow_schedule_change")]
    if config.eval_only:
        names = [name for name in FIELDS if name not in _EVALUATION]
        idle += [(name, "with --eval-only (weights are given by --initial-checkpoint)") for name in names]
    elif not config.val_split:
        names = ["val_fraction", "eval_interval", "validation_batch_size", "crop_pct", "crop_mode"]
        names += ["eval_knn", "eval_linear_probe"]
        names += [] if config.no_aug else ["interpolation"]  # which training without augmentation resizes by
        idle += [(name, "with --val-split '': nothing is evaluated") for name in names]
    if config.val_fraction is not None:
        idle += [("val_split", "with --val-fraction, which takes the images of evaluation from --train-split")]
    if not config.drop_path:
        idle += [("drop_path_compute", "without --drop-path")]
    if config.tp == 1:
        names = ["sequence_parallel", "class_parallel", "tp_across_hosts"]
        idle += [(name, "without --tp") for name in names]
    if config.pp == 1:
        idle += [("pp_partition", "without --pp")]
    if isinstance(config.data_dir, str):
        idle += [("data_weights", "with one --data-dir")]
    if config.dataset == "digits":
        idle += [(n, "with --dataset digits") for n in ("data_dir", "val_split", "dataset_download")]
    elif not config.dataset.startswith("torch/"):
        idle += [("dataset_download", "unless --dataset is a torch/… name")]
    if config.warmup_steps == 0 or config.warmup_epochs == 0:
        idle += [("warmup_lr", "without warm-up")]
    if config.sched == "constant":
        idle += [("min_lr", "with --sched constant")]
    if not (config.pretrained or config.initial_checkpoint):
        idle += [("resample_patch_embed", "without --pretrained or --initial-checkpoint")]
    if config.lr_scale_by_batch == "none":
        idle += [("lr_base_size", "without --lr-scale-by-batch")]
    if not config.model_ema:
        idle += [(name, "without --model-ema") for name in ("model_ema_decay", "model_ema_warmup")]
    if not config.compile:
        idle += [("compile_mode", "without --compile")]
    if not config.auto_batch:
        idle += [("memory", "without --auto-batch")]
    if config.sched != "wsd":
        idle += [("wsd_decay_fraction", "unless --sched wsd")]
    return idle
