"""The equivalent of each flag of timm's train.py and of open_clip's trainer that ds_vit does not have: text, flags, or
values of the JSON.

Flags of timm 1.0.31 (https://github.com/huggingface/pytorch-image-models, train.py) and open_clip 3.3.0
(https://github.com/mlfoundations/open_clip, src/open_clip_train/params.py). Error messages and `ds-vit from-timm` read
the same table.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_vit.config.deepspeed_json import overlay

Given = Mapping[str, Sequence[str]]
"""Flags of a command, by their recipe names, each with its words."""


class Answer(NamedTuple):
    """The equivalent of a flag of timm's; there is none if `words` and `values` are empty.

    Attributes:
        note: a clause for people.
        words: flags of ds_vit.
        values: of the DeepSpeed JSON, by dotted name.
    """

    note: str = ""
    words: tuple[str, ...] = ()
    values: Mapping[str, Any] = MappingProxyType({})

    @property
    def text(self) -> str:
        """The clause that follows "there is no flag --x; "."""
        parts = []
        if self.values:
            parts.append(f"it is decided by the DeepSpeed JSON: {json.dumps(overlay({}, self.values, ''))[1:-1]}")
        if self.words:
            parts.append(f"write {' '.join(self.words)}")
        return "; ".join([*parts, *([self.note] if self.note else [])])


_Entry = Callable[[Sequence[str], Given], Answer]


def _flag(flag: str, note: str = "") -> _Entry:
    """A flag of ds_vit with the same words."""
    return lambda words, given: Answer(note, (flag, *words))


def _value(key: str, note: str = "") -> _Entry:
    """A value of the JSON."""
    return lambda words, given: Answer(note, values={key: _number(words[0]) if words else True})


def _frozen_text_of_open_clip(words: Sequence[str], given: Given) -> Answer:
    """The frozen groups of a text tower of 12 blocks: embeddings, each block, the norm in the last one; projection."""
    unlocked = _number(words[0]) if words else None
    if not isinstance(unlocked, int):
        return Answer("--freeze takes patterns of names: text.token_embed text.pos_embed 'text.blocks.[0-9]'")
    if unlocked < 1:
        return Answer("", ("--lock-text",))
    if unlocked > 13:
        return Answer("then all of a text tower of 12 blocks is trained; drop it")
    last = 12 - unlocked  # of the frozen blocks
    names = ["text.token_embed", "text.pos_embed"]
    names += [f"'text.blocks.[0-{min(last, 9)}]'"] if last >= 0 else []
    names += [f"'text.blocks.1[0-{last - 10}]'"] if last >= 10 else []
    names += ["text.norm"] if unlocked == 1 else []
    return Answer("for 12 blocks; the projection counts as a layer in open_clip", ("--freeze", *names))


def _number(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _first(given: Given, name: str, default: str = "") -> str:
    """The first word of a flag of the command."""
    return next(iter(given.get(name, ())), default)


OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sgd": ("SGD", {"nesterov": True}),
    "nesterov": ("SGD", {"nesterov": True}),
    "momentum": ("SGD", {}),
    "adam": ("Adam", {"adam_w_mode": False}),
    "adamw": ("AdamW", {}),
    "nadam": ("NAdam", {}),
    "nadamw": ("NAdam", {"decoupled_weight_decay": True}),
    "radam": ("RAdam", {}),
    "radamw": ("RAdam", {"decoupled_weight_decay": True}),
    "adamax": ("Adamax", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "rmsprop": ("RMSprop", {"alpha": 0.9}),
    "lamb": ("Lamb", {}),
    "lambc": ("Lamb", {"trust_clip": True}),
    "lars": ("Lars", {}),
    "larc": ("Lars", {"trust_clip": True}),
    "nlars": ("Lars", {"nesterov": True}),
    "lion": ("Lion", {}),
    "muon": ("Muon", {}),
    "nmuon": ("Muon", {"nesterov": True}),
}
"""timm's name of an optimizer → its type in the JSON, and its `params`."""
_WITH_MOMENTUM = ("SGD", "RMSprop", "Lars", "Muon")


def _optimizer(words: Sequence[str], given: Given) -> Answer:
    name = words[0].lower() if words else "adamw"
    if name not in OPTIMIZERS:
        return Answer(f"there is no optimizer {name} here; docs/optimizers.md lists those of the DeepSpeed JSON")
    kind, params = OPTIMIZERS[name]
    if kind in _WITH_MOMENTUM:
        params = {"momentum": _number(_first(given, "momentum", "0.9")), **params}
    block = {"lr": "auto", **params, "weight_decay": "auto"}
    return Answer(
        "docs/optimizers.md lists the types",
        values={"optimizer.type": kind, **{f"optimizer.params.{key}": value for key, value in block.items()}},
    )


def _momentum(words: Sequence[str], given: Given) -> Answer:
    kind, _ = OPTIMIZERS.get(_first(given, "opt", "sgd").lower(), ("", {}))
    if kind and kind not in _WITH_MOMENTUM:
        return Answer(f"{kind} has no momentum; drop it")
    return _value("optimizer.params.momentum")(words, given)


def _optimizer_arguments(words: Sequence[str], given: Given) -> Answer:
    pairs = [word.split("=", 1) for word in words if "=" in word]
    if not pairs:
        return Answer("arguments of the optimizer are in optimizer.params of the DeepSpeed JSON")
    return Answer(values={f"optimizer.params.{key}": _number(value) for key, value in pairs})


def _precision(words: Sequence[str], given: Given) -> Answer:
    names = [*given.get("amp_dtype", ()), *given.get("model_dtype", ())]
    kind = "fp16" if names[:1] in (["float16"], ["half"]) else "bf16"
    return Answer('or "fp16" or "torch_autocast"; ds_configs/ has a file for each', values={f"{kind}.enabled": True})


def _precision_of_open_clip(words: Sequence[str], given: Given) -> Answer:
    name = words[0] if words else "amp"
    if name == "fp32":
        return Answer("it is what a JSON without bf16, fp16 and torch_autocast has; drop it")
    if name.startswith("amp"):
        dtype = "bfloat16" if name.startswith("amp_bf") else "float16"
        return Answer(values={"torch_autocast.enabled": True, "torch_autocast.dtype": dtype})
    kind = "fp16" if name.endswith("fp16") else "bf16"
    return Answer("weights are updated in fp32", values={f"{kind}.enabled": True})


def _schedule_of_open_clip(words: Sequence[str], given: Given) -> Answer:
    names = {"const": "constant", "const-cooldown": "wsd"}
    return Answer("", ("--sched", *(names.get(word, word) for word in words)))


def _base_rate(words: Sequence[str], given: Given) -> Answer:
    if "lr" in given:
        return Answer("--lr is given, and the rate; drop it")
    optimizer = _first(given, "opt", "sgd").lower()
    scale = _first(given, "lr_base_scale") or (
        "sqrt" if any(word in optimizer for word in ("ada", "lamb")) else "linear"
    )
    return Answer("for a batch of --lr-base-size", ("--lr", *words, "--lr-scale-by-batch", scale))


def _experiment(words: Sequence[str], given: Given) -> Answer:
    parent = _first(given, "output", "output/train")
    return Answer("it is the run's own folder", ("--output", str(PurePath(parent, *words))))


# By recipe names, as patterns of fnmatch; the first match counts. Text means that nothing can be translated.
_HINTS: Mapping[str, str | _Entry] = {
    "c config": _flag("--recipe", "a YAML file of flags"),
    "d": _flag("--dataset", "a folder is given by --data-dir DIR"),
    "data": _flag("--data-dir"),
    # precision, optimizer, compilation
    "opt": _optimizer,
    "opt_eps": _value("optimizer.params.eps"),
    "opt_betas": lambda words, given: Answer(values={"optimizer.params.betas": [_number(word) for word in words]}),
    "opt_kwargs": _optimizer_arguments,
    "momentum": _momentum,
    "clip_mode": "gradients are clipped by their global norm: --clip-grad",
    "amp amp_* *_amp model_dtype": _precision,
    "torchscript fuser": "a run trains the eager model; a trained one is exported by ds-vit export RUN --to onnx",
    "torchcompile": lambda words, given: Answer("it compiles the blocks", ("--compile",)),
    "torchcompile_mode": _flag("--compile-mode"),
    "torchcompile_*": "there are only --compile and --compile-mode",
    "channels_last fast_norm": "ViTs gain nothing from it; drop it (--norm-dtype model computes norms in 16 bits)",
    "device device_modules": "DeepSpeed finds the accelerator; DS_ACCELERATOR=cpu in the environment chooses the CPU",
    "no_ddp_bb synchronize_step": "DeepSpeed exchanges the gradients; drop it",
    # weights
    "pretrained_path": _flag("--initial-checkpoint", "in timm's names (ds-vit import brings other names)"),
    "no_resume_opt": "--initial-checkpoint FILE starts from the weights only",
    "start_epoch start_step": "--resume auto resumes the run in --output",
    # model
    "gp": lambda words, given: Answer("", ("--model-kwargs", *(f"global_pool={word}" for word in words))),
    "in_chans": "images are RGB here; drop it",
    "input_size": lambda words, given: Answer("images are square RGB here", ("--img-size", *words[-1:])),
    "head_init_scale head_init_bias": "heads are initialised as in timm's models; drop it",
    "drop_connect": _flag("--drop-path", "timm's newer name"),
    "drop_block bn_momentum bn_eps sync_bn dist_bn split_bn": "ViTs have no such layer; drop it",
    "model_ema_v2": lambda words, given: Answer("there is one average", ("--model-ema",)),
    "model_ema_force_cpu": "the average is sharded over ranks like the optimizer's state: --model-ema",
    # learning rate
    "lr_base": _base_rate,
    "lr_base_scale": "write --lr-scale-by-batch linear or sqrt next to --lr",
    "sched_on_updates": "the learning rate is set at every optimizer step; drop it",
    "lr_noise lr_noise_* lr_cycle_* lr_k_decay decay_milestones decay_epochs decay_steps decay_rate dr patience_epochs "
    "patience_steps cooldown_epochs cooldown_steps": "the schedules are --sched cosine, linear, constant and wsd, "
    "without cycles, steps or noise; or one of DeepSpeed's in the JSON",
    "warmup_prefix": "as by timm's default, the decay is counted from the run's first step; drop it",
    "layer_decay_*": "there is only --layer-decay",
    "num_steps": _flag("--max-steps", "the length in optimizer steps"),
    "epoch_repeats": "give more --epochs; --aug-repeats shows a sample several times in one epoch",
    # data, augmentation, loss
    "class_map": "classes are named by their folders, or by labels.csv next to the images (docs/data.md)",
    "input_img_mode input_key target_key dataset_trust_remote_code": "it is for datasets that are not supported; image "
    "folders, tar files and torchvision's are (docs/data.md)",
    "train_num_samples val_num_samples": "samples are counted when the data is opened; drop it",
    "aug_splits jsd_loss resplit": "augmentation splits and their Jensen-Shannon loss are not here; drop it",
    "mixup_mode": "pairs are mixed, each by a separate draw (timm's pair mode); drop it",
    "mixup_off_step": "it is counted in epochs: --mixup-off-epoch",
    "bce_pos_weight": "classes have equal weights; drop it",
    "pin_mem no_prefetcher use_multi_epochs_loader loader_prefetch_factor": "the input pipeline chooses this "
    "itself; drop it",
    "worker_seeding": "random numbers depend on the sample's key, not on the worker: only --seed matters",
    "save_images": "--log-samples writes which samples each step used",
    "naflex_*": "images of several sizes in one batch are not here; drop it",
    "kd_student_feature_dim kd_teacher_feature_dim": "both widths are read from the models; drop it",
    # what is written
    "experiment": _experiment,
    "log_dir": "everything is written to --output DIR",
    "checkpoint_hist": _flag("--keep-checkpoints"),
    "recovery_interval": _flag("--checkpoint-interval", "in steps, or 30m, a time"),
    "num_saves": "--checkpoint-interval 500 (steps) or 30m (time)",
    "val_interval": _flag("--eval-interval", "in epochs"),
    "num_evals": "--eval-interval N, in epochs",
    "num_logs": "--log-interval N, in optimizer steps",
    "tta": "evaluation uses one crop; drop it",
    # open_clip's: data
    "train_data": "--data-dir DIR has images with .txt files; --dataset wds/DIR, csv/FILE, parquet/DIR (docs/data.md)",
    "val_data": "the evaluation split is --val-split of the same data (docs/data.md)",
    "dataset_type": "it is the first word of --dataset: wds/DIR, csv/FILE, parquet/DIR, hfds/DIR",
    "dataset_resampled train_data_upsampling_factors": "an epoch shows each sample once; several --data-dir are mixed "
    "by --data-weights",
    "imagenet_val": _flag("--zeroshot", "with open_clip's sentences: --zeroshot-templates openai"),
    "imagenet_v2": "a run evaluates one data set by --zeroshot; ds-vit eval RUN --zeroshot DIR evaluates others",
    "zeroshot_frequency": _flag("--eval-interval", "in epochs"),
    "val_frequency": _flag("--eval-interval", "in epochs"),
    # loss, model
    "siglip": lambda words, given: Answer("", ("--task", "siglip")),
    "local_loss gather_with_grad": "always so: each rank compares its rows with those of all ranks, and gradients flow "
    "back to them; drop it",
    "loss_dist_impl": "the gathered features are compared a few rows at a time in every layout; drop it",
    "accum_freq": _flag("--grad-accum-steps", "the loss is that of the global batch all the same"),
    "pretrained_image": lambda words, given: Answer("it is for the image tower", ("--pretrained",)),
    "force_quick_gelu": lambda words, given: Answer(
        "with an image tower of timm's clip_quickgelu names", ("--text-model", "clip_base_quickgelu")
    ),
    "force_patch_dropout": lambda words, given: Answer(
        "", ("--model-kwargs", *(f"patch_drop_rate={x}" for x in words))
    ),
    "force_image_size": _flag("--img-size"),
    "force_context_length": _flag("--context-length"),
    "image_mean": _flag("--mean"),
    "image_std": _flag("--std"),
    "image_interpolation": _flag("--interpolation"),
    "image_resize_mode": "evaluation has --crop-mode center, border or squash; drop it",
    "aug_cfg": "each setting has a flag: --scale, --ratio, --color-jitter and others; drop it",
    "lock_text_unlocked_layers": _frozen_text_of_open_clip,
    "force_custom_text": "there is one kind of text tower; drop it",
    "lock_image_freeze_bn_stats": "models with BatchNorm are not trained here; drop it",
    "lock_text_freeze_layer_norm": "norms are frozen with their layers; drop it",
    "coca_*": "CoCa is not here; drop it",
    "distill_model distill_pretrained": "only classifiers are distilled here (--kd-model-name); drop it",
    "use_bnb_linear": "linear layers in 8 bits are not here; drop it",
    "trace": "a run trains the eager model; drop it",
    # optimizer
    "precision": _precision_of_open_clip,
    "beta1 beta2": "the DeepSpeed JSON has both in optimizer.params.betas",
    "eps": _value("optimizer.params.eps"),
    "wd": _flag("--weight-decay"),
    "warmup": _flag("--warmup-steps"),
    "grad_clip_norm": _flag("--clip-grad"),
    "use_bn_sync": "ViTs have no such layer; drop it",
    "skip_scheduler": lambda words, given: Answer("", ("--sched", "constant")),
    "lr_scheduler": _schedule_of_open_clip,
    "epochs_cooldown lr_cooldown_end lr_cooldown_power": "--sched wsd decays in the last --wsd-decay-fraction of a run",
    # ranks and what is written
    "horovod dist_url dist_backend no_set_device_rank ddp_static_graph": "the launcher and DeepSpeed connect the "
    "ranks; drop it",
    "logs name": "the run's folder is --output DIR",
    "log_local copy_codebase remote_sync remote_sync_frequency remote_sync_protocol": "rank 0 writes --output; drop it",
    "log_every_n_steps": _flag("--log-interval"),
    "save_frequency": "--checkpoint-interval epoch, 500 (steps) or 30m (time)",
    "save_most_recent delete_previous_checkpoint": "--keep-checkpoints N keeps the newest; drop it",
    "report_to": "TensorBoard's events are always written, --wandb adds Weights & Biases; drop it",
    "wandb_project_name": _flag("--wandb-project"),
    "wandb_notes": "drop it",
    "debug": "--verbose shows DeepSpeed's log",
    "cache_dir": "weights are cached where HF_HOME in the environment says",
    "wandb_tags wandb_resume_id": 'the DeepSpeed JSON has "wandb": {"enabled": true, "group": …, "team": …}; drop it',
}
_SWITCHES = """
    amp native_amp apex_amp no_resume_opt torchscript channels_last fast_norm no_ddp_bb synchronize_step model_ema_v2
    model_ema_force_cpu sched_on_updates warmup_prefix layer_decay_no_opt_scale jsd_loss resplit sync_bn split_bn
    pin_mem no_prefetcher use_multi_epochs_loader worker_seeding save_images naflex_loader
    dataset_trust_remote_code dataset_resampled siglip local_loss gather_with_grad pretrained_image force_quick_gelu
    force_custom_text lock_image_freeze_bn_stats lock_text_freeze_layer_norm use_bnb_linear trace use_bn_sync
    skip_scheduler horovod no_set_device_rank ddp_static_graph log_local copy_codebase save_most_recent
    delete_previous_checkpoint debug
"""
_SEVERAL = """
    opt_betas opt_kwargs lr_noise decay_milestones wandb_tags input_size torchcompile image_mean image_std aug_cfg
"""


def _entry(name: str) -> str | _Entry | None:
    fits = (entry for names, entry in _HINTS.items() if any(fnmatchcase(name, one) for one in names.split()))
    return next(fits, None)


def words_of(name: str) -> int | None:
    """The number of words that a flag of timm's or open_clip's takes: 0, 1, or None for all up to the next flag.

    Args:
        name: by its recipe name.
    """
    if _entry(name) is None:
        return None
    if name in _SWITCHES.split():
        return 0
    return None if name in _SEVERAL.split() or name.startswith("naflex_") else 1


def timm_answer(name: str, words: Sequence[str] = (), given: Given = MappingProxyType({})) -> Answer | None:
    """The equivalent of a flag of timm's or open_clip's.

    Args:
        name: by its recipe name, with underscores.
        words: its words.
        given: all flags of the command.

    Returns:
        None for a name that is neither's.
    """
    entry = _entry(name)
    return Answer(entry) if isinstance(entry, str) else entry and entry(words, given)


def split_words(
    words: Sequence[str], actions: Mapping[str, argparse.Action] = MappingProxyType({})
) -> tuple[dict[str, tuple[str, list[str]]], list[str]]:
    """Assign the words of a command to its flags.

    Args:
        words: of the command.
        actions: the flags of ds_vit, as argparse has them; other flags take as many words as timm's.

    Returns:
        Name of a flag → (as it was typed, its words); and the words that follow no flag.
    """
    flags: dict[str, tuple[str, list[str]]] = {}
    stray: list[str] = []
    room: int | None = 0
    for word in words:
        if re.match(r"-(?![\d.])", word):  # a flag, not a negative number
            flag, equals, value = word.partition("=")
            action = actions.get(flag)
            name = action.dest if action else flag.lstrip("-").replace("-", "_")
            flags[name] = last = (flag, [value] if equals else [])
            # "?" is --grad-checkpointing, a switch of timm's.
            by_nargs: dict[Any, Any] = {None: 1, "?": 0, "+": None, "*": None}
            room = by_nargs.get(action.nargs, action.nargs) if action else words_of(name)
            room = 0 if equals else room
        elif room is None or room > 0:
            last[1].append(word)
            room = None if room is None else room - 1
        else:
            stray.append(word)
    return flags, stray
