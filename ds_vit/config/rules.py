"""Which flags cannot stand together: contradictions, numbers out of range, and flags that would have no effect."""

from __future__ import annotations

from ds_vit.config.durations import Interval, parse_seconds
from ds_vit.config.flags import FIELDS, RunConfig, default_of, spelling
from ds_vit.fault_tolerance.errors import UserError

EITHER = (("warmup_steps", "warmup_epochs"), ("freeze", "linear_probe"))
"""Flags of which one excludes the other."""

# What evaluation alone looks at; every other flag is about training.
_EVALUATION_NAMES = """
    deepspeed_config pp tp tp_across_hosts sequence_parallel class_parallel pp_partition task mask_ratio decoder_dim
    decoder_depth decoder_heads norm_pix_loss model model_kwargs num_classes
    img_size initial_checkpoint dataset data_dir train_split val_split dataset_download workers on_bad_image mean std
    interpolation crop_pct crop_mode bce_loss norm_dtype tf32 batch_size output seed validation_batch_size eval_only
    stall_seconds verbose
"""
_EVALUATION = frozenset(_EVALUATION_NAMES.split())


def check(config: RunConfig, explicit: frozenset[str]) -> None:
    """Refuse what cannot be, what contradicts itself, and what would have no effect.

    Raises:
        UserError: says which flags, with their numbers, and what to do.
    """

    def written(name: str) -> bool:
        """Whether the flag was given and asks for something: neither its default nor a neutral value."""
        value = getattr(config, name)
        return name in explicit and value != default_of(name) and value not in FIELDS[name].metadata["neutral"]

    if not config.deepspeed_config:
        raise UserError("--deepspeed_config FILE is missing; ds_configs/ has one for each ZeRO stage and precision")
    _check_ranges(config)
    _check_checkpoints(config)
    if not config.dataset and not config.data_dir:
        raise UserError("no data: give --data-dir DIR with train/ and val/ in it, or --dataset digits")
    if config.freeze and config.linear_probe:
        raise UserError("--linear-probe freezes all but the head already; drop --freeze")
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise UserError("--warmup-steps and --warmup-epochs are both given; keep one")
    if config.drop and "drop_rate" in config.model_kwargs:
        rate = config.model_kwargs["drop_rate"]
        raise UserError(f"--drop {config.drop} and --model-kwargs drop_rate={rate} are both given; keep one")
    for name, reason in _idle_flags(config):
        if written(name):
            raise UserError(f"{spelling(name)} has no effect {reason}; drop it")


def _check_ranges(config: RunConfig) -> None:
    def must(ok: bool, name: str, what: str) -> None:
        if not ok:
            raise UserError(f"{spelling(name)} must be {what}, not {getattr(config, name)}")

    for name in ("drop", "drop_path"):
        must(0 <= getattr(config, name) < 1, name, "at least 0 and below 1")
    for name in (
        "hflip",
        "vflip",
        "grayscale_prob",
        "gaussian_blur_prob",
        "reprob",
        "mixup_prob",
        "mixup_switch_prob",
    ):
        must(0 <= getattr(config, name) <= 1, name, "between 0 and 1")
    must(0 <= config.smoothing < 1, "smoothing", "at least 0 and below 1")
    for name in (
        "epochs",
        "max_steps",
        "img_size",
        "num_classes",
        "log_interval",
        "recount",
        "validation_batch_size",
        "lr_base_size",
    ):
        value = getattr(config, name)
        must(value is None or value >= 1, name, "at least 1")
    for name in (
        "workers",
        "eval_interval",
        "warmup_steps",
        "warmup_epochs",
        "mixup",
        "cutmix",
        "aug_repeats",
        "grad_stats_interval",
        "rollback",
        "check_replicas",
    ):
        value = getattr(config, name)
        must(value is None or value >= 0, name, "at least 0")
    for name in ("lr", "min_lr", "warmup_lr", "weight_decay", "clip_grad", "stall_seconds"):
        value = getattr(config, name)
        must(value is None or (value >= 0 and value < float("inf")), name, "a number >= 0")
    must(config.layer_decay is None or 0 < config.layer_decay <= 1, "layer_decay", "above 0 and at most 1")
    must(0 <= config.model_ema_decay < 1, "model_ema_decay", "at least 0 and below 1")
    must(config.spike_factor is None or config.spike_factor > 1, "spike_factor", "above 1")
    must(0 < config.wsd_decay_fraction <= 1, "wsd_decay_fraction", "above 0 and at most 1")
    for name in ("mean", "std"):
        value = getattr(config, name)
        must(value is None or len(value) in (1, 3), name, "one number or three")
    must(config.std is None or min(config.std) > 0, "std", "above 0")


def _check_checkpoints(config: RunConfig) -> None:
    """What the flags of checkpoints and interruption must be."""
    Interval.parse(config.checkpoint_interval, "--checkpoint-interval")
    if config.time_limit:
        parse_seconds(config.time_limit, "--time-limit")
    if config.keep_checkpoints < 0:
        raise UserError(f"--keep-checkpoints must be at least 0 (0 keeps all), not {config.keep_checkpoints}")
    if config.stop_before_seconds is not None and config.stop_before_seconds < 0:
        raise UserError(f"--stop-before-seconds must be at least 0, not {config.stop_before_seconds}")
    if config.resume == "auto" and not config.output:
        raise UserError("--resume auto looks for checkpoints in the run's folder: give it by --output DIR")


def idle_names(config: RunConfig) -> set[str]:
    """The flags that do nothing beside these others, by their recipe names."""
    return {name for name, _ in _idle_flags(config)}


def _idle_flags(config: RunConfig) -> list[tuple[str, str]]:
    """(flag, why it does nothing here) for this combination."""
    idle: list[tuple[str, str]] = []
    if config.no_aug:
        names = (
            "scale ratio hflip vflip color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob aa reprob remode "
            "recount train_interpolation train_crop_mode"
        )
        idle += [(name, "under --no-aug") for name in names.split()]
    if config.aa not in ("", "none") and "3a" not in config.aa:  # 3-Augment is the one policy that keeps the jitter
        names = ("color_jitter", "color_jitter_prob")
        idle += [(name, "under --aa, which replaces the colour jitter") for name in names]
    elif not config.color_jitter:
        idle += [("color_jitter_prob", "without --color-jitter")]
    if not config.reprob:
        idle += [(name, "without --reprob") for name in ("remode", "recount")]
    mixing = config.mixup > 0 or config.cutmix > 0 or config.cutmix_minmax is not None
    if not mixing:
        idle += [(n, "without --mixup or --cutmix") for n in ("mixup_prob", "mixup_switch_prob", "mixup_off_epoch")]
    elif config.mixup == 0 or (config.cutmix == 0 and config.cutmix_minmax is None):
        idle += [("mixup_switch_prob", "unless --mixup and --cutmix are both on")]
    if config.cutmix_minmax is not None:
        idle += [("cutmix", "beside --cutmix-minmax, which draws the box itself")]
    if not config.bce_loss:
        idle += [(name, "without --bce-loss") for name in ("bce_sum", "bce_target_thresh")]
    if config.checkpoint_interval == "0" and config.resume == "none":
        idle += [("rollback", "without --checkpoint-interval: there is nothing to go back to")]
    if config.resume == "none":
        idle += [(name, "without --resume") for name in ("allow_batch_change", "allow_schedule_change")]
    if config.eval_only:
        names = [name for name in FIELDS if name not in _EVALUATION]
        idle += [(name, "with --eval-only (weights are given by --initial-checkpoint)") for name in names]
    elif not config.val_split:
        names = ["eval_interval", "validation_batch_size", "crop_pct", "crop_mode"]
        names += [] if config.no_aug else ["interpolation"]  # which training without augmentation resizes by
        idle += [(name, "with --val-split '': nothing is evaluated") for name in names]
    if config.tp == 1:
        names = ("sequence_parallel", "class_parallel", "tp_across_hosts")
        idle += [(name, "without --tp") for name in names]
    if config.pp == 1:
        idle += [("pp_partition", "without --pp")]
    if config.dataset == "digits":
        idle += [(n, "with --dataset digits") for n in ("data_dir", "train_split", "val_split", "dataset_download")]
    elif not config.dataset.startswith("torch/"):
        idle += [("dataset_download", "unless --dataset is a torch/… name")]
    if config.warmup_steps == 0 or config.warmup_epochs == 0:
        idle += [("warmup_lr", "without warm-up")]
    if config.sched == "constant":
        idle += [("min_lr", "with --sched constant")]
    if config.lr_scale_by_batch == "none":
        idle += [("lr_base_size", "without --lr-scale-by-batch")]
    if not config.model_ema:
        idle += [(name, "without --model-ema") for name in ("model_ema_decay", "model_ema_warmup")]
    if config.sched != "wsd":
        idle += [("wsd_decay_fraction", "unless --sched wsd")]
    return idle
