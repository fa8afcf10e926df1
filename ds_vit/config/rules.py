"""Rules between flags: values out of range, contradictions, and flags without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from ds_vit.config.augmentation import AugmentConfig, all_sizes
from ds_vit.config.flag import Scope
from ds_vit.config.schema import FIELDS, KEY_OF_FLAG, RunConfig, default_of, is_requested, names_with, spelling
from ds_vit.config.units import Interval, parse_set

EXCLUSIVE = (
    ("warmup_steps", "warmup_epochs"),
    ("freeze", "linear_probe"),
    ("pretrained", "initial_checkpoint"),
    ("img_size_schedule", "train_img_sizes"),
    ("auto_batch", "batch_size"),
    ("auto_batch", "grad_accum_steps"),
)
"""Pairs of flags of which a run takes one."""
REPLACES = (*EXCLUSIVE, ("val_fraction", "val_split"), ("memory", "batch_size"), ("memory", "grad_accum_steps"))
"""Pairs of flags of which one on the command line replaces the other in a recipe."""


def find_problems(config: RunConfig, explicit: frozenset[str], idle: Mapping[str, str]) -> Iterator[str]:
    """Missing flags, contradictions and flags without effect, for people.

    Args:
        config: values that are valid by themselves (`parser.read_values`).
        explicit: the names of those that were given.
        idle: from `idle_flags`.
    """
    if not config.deepspeed_config:
        shipped = "ds_configs/zero1_bf16.json, on a CPU with ds_configs/cpu_zero1_fp32.json"
        yield f"--deepspeed_config FILE is missing; begin with {shipped}"
    if not config.dataset and not config.data_dir:
        yield "no data: give --data-dir DIR with train/ and val/ in it, or --dataset digits"
    yield from _contradictions(config)
    for name, reason in idle.items():
        if is_requested(name, config, explicit):
            yield f"{spelling(name)} has no effect {reason}; drop it"


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Problems between valid flags."""

    def written(name: str) -> str:
        value = getattr(config, name)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        return spelling(name) + ("" if value is True else f" {shown}")

    for pair in EXCLUSIVE:
        if all(getattr(config, name) != default_of(name) for name in pair):
            yield f"{written(pair[0])} and {written(pair[1])} are both given; keep one"
    values = parse_set(config.set)
    for name, key in KEY_OF_FLAG.items():
        if key in values and getattr(config, name) != default_of(name):
            yield f"{written(name)} and --set {key} are both given; keep one"
    if config.drop and "drop_rate" in config.model_kwargs:
        rate = config.model_kwargs["drop_rate"]
        yield f"--drop {config.drop} and --model-kwargs drop_rate={rate} are both given; keep one"
    if config.resume == "auto" and not config.output:
        yield "--resume auto looks for checkpoints in the run's folder: give it by --output DIR"
    if config.rollback and Interval.parse(config.checkpoint_interval, "--checkpoint-interval").seconds:
        interval = f"--checkpoint-interval {config.checkpoint_interval}"
        yield f"--rollback {config.rollback} does not work with {interval}; give it in steps, or epoch"
    num_folders = 1 if isinstance(config.data_dir, str) else len(config.data_dir)
    if num_folders > 1 and len(config.data_weights) not in (0, num_folders):
        yield f"--data-weights has {len(config.data_weights)} numbers for the {num_folders} folders of --data-dir"
    sizes_flag = "--img-size-schedule" if config.img_size_schedule else "--train-img-sizes"
    sizes = all_sizes(config.img_size_schedule, config.train_img_sizes)
    if sizes and config.img_size not in (None, sizes[-1]):
        yield f"{sizes_flag} ends at {sizes[-1]}, and --img-size is {config.img_size}; make them equal, or drop it"
    if config.compile:
        for is_set, words in (
            (config.grad_checkpointing == "selective", "--grad-checkpointing selective needs single operations"),
            (bool(sizes), f"{sizes_flag} changes the shapes"),
        ):
            if is_set:
                yield f"{words}, and --compile makes one graph of fixed shapes; drop one of them"


_AUGMENT_NAMES = " ".join(f.name for f in fields(AugmentConfig) if f.name != "no_aug")
_NOT_OF_EVALUATION = " ".join(name for name in FIELDS if name not in names_with(Scope.EVALUATION))
_OF_VALIDATION = (
    "val_fraction eval_interval eval_metric validation_batch_size crop_pct crop_mode eval_knn eval_linear_probe "
    "interpolation"
)


def _reads(config: RunConfig, *forms: str) -> bool:
    """Whether --dataset or --data-dir names data in one of these forms."""
    folders = [config.data_dir] if isinstance(config.data_dir, str) else config.data_dir
    return any(name.startswith(forms) for name in (config.dataset, *folders))


# (flags, the condition under which they have no effect, the end of "--flag has no effect …"); the first reason counts.
_IDLE: tuple[tuple[str, Callable[[RunConfig], Any], str], ...] = (
    (_AUGMENT_NAMES, lambda c: c.no_aug, "under --no-aug"),
    # 3-Augment is the one policy that keeps the jitter.
    (
        "color_jitter color_jitter_prob",
        lambda c: c.aa and "3a" not in c.aa,
        "under --aa, which replaces the colour jitter",
    ),
    ("decode", lambda c: c.train_crop_mode in ("rkrc", "rkrr"), "with --train-crop-mode rkrc or rkrr: whole images"),
    ("max_bad_images", lambda c: c.on_bad_image == "error", "with --on-bad-image error"),
    ("mixup_prob mixup_switch_prob mixup_off_epoch", lambda c: not c.active, "without --mixup or --cutmix"),
    (
        "mixup_switch_prob",
        lambda c: c.active and (c.mixup == 0 or (c.cutmix == 0 and c.cutmix_minmax is None)),
        "unless --mixup and --cutmix are both on",
    ),
    ("cutmix", lambda c: c.cutmix_minmax is not None, "with --cutmix-minmax, which draws the box itself"),
    (
        "rollback",
        lambda c: c.checkpoint_interval == "0" and c.resume == "none",
        "with --checkpoint-interval 0: there is no checkpoint to return to",
    ),
    ("allow_batch_change allow_schedule_change", lambda c: c.resume == "none", "without --resume"),
    (_NOT_OF_EVALUATION, lambda c: c.eval_only, "with --eval-only (weights are given by --initial-checkpoint)"),
    (
        _OF_VALIDATION,
        lambda c: not (c.eval_only or c.val_split or c.zeroshot),
        "with --val-split '': nothing is evaluated",
    ),
    (
        "val_fraction eval_knn eval_linear_probe",
        lambda c: c.zeroshot and not c.val_split,
        "with --val-split '': only --zeroshot is evaluated",
    ),
    ("val_split", lambda c: c.val_fraction is not None, "with --val-fraction, which splits --train-split"),
    ("sequence_parallel class_parallel tp_across_hosts", lambda c: c.tp == 1, "without --tp"),
    ("pp_partition", lambda c: c.pp == 1, "without --pp"),
    ("data_weights", lambda c: isinstance(c.data_dir, str), "with one --data-dir"),
    ("data_dir val_split dataset_download exif_rotation", lambda c: c.dataset == "digits", "with --dataset digits"),
    ("data_dir val_split dataset_download exif_rotation", lambda c: c.dataset == "glyphs", "with --dataset glyphs"),
    ("csv_separator", lambda c: not _reads(c, "csv/"), "without csv/…"),
    (
        "csv_img_key",
        lambda c: not _reads(c, "csv/", "hfds/", "parquet/"),
        "without csv/…, hfds/… or parquet/…",
    ),
    (
        "csv_caption_key",
        lambda c: not _reads(c, "csv/", "hfds/", "parquet/", "wds/"),
        "without csv/…, hfds/…, parquet/… or wds/…",
    ),
    ("dataset_download", lambda c: not c.dataset.startswith("torch/"), "unless --dataset is a torch/… name"),
    ("warmup_lr", lambda c: 0 in (c.warmup_steps, c.warmup_epochs), "without warm-up"),
    ("min_lr", lambda c: c.sched == "constant", "with --sched constant"),
    ("wsd_decay_fraction", lambda c: c.sched != "wsd", "unless --sched wsd"),
    (
        "resample_patch_embed",
        lambda c: not (c.pretrained or c.initial_checkpoint),
        "without --pretrained or --initial-checkpoint",
    ),
    ("lr_base_size", lambda c: c.lr_scale_by_batch == "none", "without --lr-scale-by-batch"),
    (
        "kd_distill_type kd_loss_type kd_temperature kd_token_distill_type distill_loss_weight task_loss_weight",
        lambda c: not (c.kd_model_name or c.kd_checkpoint),
        "without a teacher: --kd-model-name or --kd-checkpoint",
    ),
    ("kd_loss_type", lambda c: c.kd_distill_type != "logit", "unless --kd-distill-type logit"),
    ("kd_token_distill_type", lambda c: c.kd_distill_type != "token", "unless --kd-distill-type token"),
    ("kd_temperature", lambda c: c.kd_distill_type == "feature", "with --kd-distill-type feature"),
    ("kd_temperature", lambda c: c.kd_loss_type == "hard", "with --kd-loss-type hard"),
    ("kd_temperature", lambda c: c.kd_token_distill_type == "hard", "with --kd-token-distill-type hard"),
    ("remode recount", lambda c: not c.reprob, "without --reprob"),
    ("bce_sum bce_target_thresh", lambda c: not c.bce_loss, "without --bce-loss"),
    ("model_ema_decay model_ema_warmup", lambda c: not c.model_ema, "without --model-ema"),
    ("compile_mode", lambda c: not c.compile, "without --compile"),
    ("memory", lambda c: not c.auto_batch, "without --auto-batch"),
    ("zeroshot_templates", lambda c: not c.zeroshot, "without --zeroshot"),
    ("color_jitter_prob", lambda c: not c.color_jitter, "without --color-jitter"),
    ("lock_image_unlocked_groups", lambda c: not c.lock_image, "without --lock-image"),
)


def idle_flags(config: RunConfig) -> dict[str, str]:
    """Each flag without effect in this combination, by its recipe name → why."""
    idle: dict[str, str] = {}
    for names, applies, reason in _IDLE:
        if applies(config):
            idle = {**dict.fromkeys(names.split(), reason), **idle}
    if config.no_aug:
        idle.pop("interpolation", None)  # training without augmentation resizes by it
    return idle
