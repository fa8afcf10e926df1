"""The equivalent of each flag of timm's train.py and of open_clip's trainer that ds_vit does not have: text, flags, or
values of the JSON.

Flags of timm 1.0.31 (https://github.com/huggingface/pytorch-image-models, train.py) and open_clip 3.3.0
(https://github.com/mlfoundations/open_clip, src/open_clip_train/params.py). Error messages, `ds-vit from-timm` and
`ds-vit from-open-clip` read the same table; `timm_command.py` has the flags that mean something else there than here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from ds_vit.config.deepspeed_json import overlay
from ds_vit.config.units import parse_literal

Given = Mapping[str, Sequence[str]]
"""Flags of a command, by their recipe names, each with its words."""


class Answer(NamedTuple):
    """The equivalent of a flag of timm's; there is none if `words` and `values` are empty.

    Attributes:
        note: a clause for people; of an equivalent, the difference.
        words: flags of ds_vit.
        values: of the DeepSpeed JSON, by dotted name.
        is_refused: a run without the flag would train something else.
    """

    note: str = ""
    words: tuple[str, ...] = ()
    values: Mapping[str, Any] = MappingProxyType({})
    is_refused: bool = False

    @property
    def text(self) -> str:
        """The clause that follows "there is no flag --x; "."""
        parts = []
        if self.values:
            parts.append(f"it is decided by the DeepSpeed JSON: {json.dumps(overlay({}, self.values, ''))[1:-1]}")
        if self.words:
            parts.append(f"write {shlex.join(self.words)}")
        return "; ".join([*parts, *([self.note] if self.note else [])])


Entry = str | Callable[[Sequence[str], Given], Answer]
"""The equivalent of a flag, from its words and all flags of the command. Text means that nothing can be translated."""


def flag(words: str, note: str = "", names: Mapping[str, str] = MappingProxyType({}), *, last: bool = False) -> Entry:
    """Flags of ds_vit, which the words of the given one follow, or in which each replaces a "{}".

    Args:
        words: as they are written.
        note: the difference.
        names: word → the word here.
        last: take the last word only.
    """

    def translated(own: Sequence[str], given: Given) -> Answer:
        renamed = [names.get(word, word) for word in own]
        out = [
            one
            for word in words.split()
            for one in ([word.replace("{}", x) for x in renamed] if "{}" in word else [word])
        ]
        return Answer(note, (*out, *([] if "{}" in words else renamed[-1:] if last else renamed)))

    return translated


def refused(note: str) -> Entry:
    """A flag without which a run would train something else."""
    return lambda words, given: Answer(note, is_refused=True)


def frozen_text(words: Sequence[str], given: Given) -> Answer:
    """The frozen groups of a text tower of 12 blocks: embeddings, each block, the norm in the last one; projection."""
    unlocked = parse_literal(words[0]) if words else None
    if not isinstance(unlocked, int):
        return Answer("--freeze takes patterns of names: text.token_embed text.pos_embed 'text.blocks.[0-9]'")
    if unlocked < 1:
        return Answer("", ("--lock-text",))
    if unlocked > 13:
        return Answer("then all of a text tower of 12 blocks is trained; drop it")
    last = 12 - unlocked  # of the frozen blocks
    names = ["text.token_embed", "text.pos_embed"]
    names += [f"text.blocks.[0-{min(last, 9)}]"] if last >= 0 else []
    names += ["text.blocks.10", "text.blocks.11"][: max(last - 9, 0)]
    names += ["text.norm"] if unlocked == 1 else []
    return Answer("for 12 blocks; the projection counts as a layer in open_clip", ("--freeze", *names))


def first(given: Given, name: str, default: str = "") -> str:
    """The first word of a flag of the command."""
    return next(iter(given.get(name, ())), default)


_PLAIN = "AdamW NAdam RAdam Adamax Adagrad Adadelta Lamb Lars Lion Muon"
_VARIANTS = {
    "nesterov": "sgd=SGD nesterov=SGD nlars=Lars nmuon=Muon",
    "trust_clip": "lambc=Lamb larc=Lars",
    "decoupled_weight_decay": "nadamw=NAdam radamw=RAdam",
}
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{kind.lower(): (kind, {}) for kind in _PLAIN.split()},
    **{x.split("=")[0]: (x.split("=")[1], {key: True}) for key, names in _VARIANTS.items() for x in names.split()},
    **{"momentum": ("SGD", {}), "adam": ("Adam", {"adam_w_mode": False}), "rmsprop": ("RMSprop", {"alpha": 0.9})},
}
"""timm's name of an optimizer → its type in the JSON, and its `params`."""
_WITH_MOMENTUM = ("SGD", "RMSprop", "Lars", "Muon")


def _optimizer(words: Sequence[str], given: Given) -> Answer:
    name = words[0].lower().removeprefix("timm/") if words else "adamw"
    if name not in OPTIMIZERS:
        text = f"there is no optimizer {name} here; docs/optimizers.md lists those of the DeepSpeed JSON"
        return Answer(text, is_refused=True)
    kind, params = OPTIMIZERS[name]
    if kind in _WITH_MOMENTUM:
        params = {"momentum": parse_literal(first(given, "momentum", "0.9")), **params}
    block = {"lr": "auto", **params, "weight_decay": "auto"}
    values = {"optimizer.type": kind, **{f"optimizer.params.{key}": value for key, value in block.items()}}
    if kind == "Lamb" and "clip_grad" not in given and "grad_clip_norm" not in given:
        return Answer("timm's LAMB limits the gradient's norm to 1 itself", ("--clip-grad", "1.0"), values)
    return Answer("torch's NAdam, which timm's only resembles" * (name == "nadamw"), (), values)


def _momentum(words: Sequence[str], given: Given) -> Answer:
    kind, _ = OPTIMIZERS.get(first(given, "opt", "sgd").lower(), ("", {}))
    if kind and kind not in _WITH_MOMENTUM:
        return Answer(f"{kind} has no momentum; drop it")
    return Answer(values={"optimizer.params.momentum": parse_literal(words[0]) if words else 0.9})


def _optimizer_arguments(words: Sequence[str], given: Given) -> Answer:
    pairs = [word.split("=", 1) for word in words if "=" in word]
    if not pairs:
        return Answer("arguments of the optimizer are in optimizer.params of the DeepSpeed JSON")
    return Answer(values={f"optimizer.params.{key}": parse_literal(value) for key, value in pairs})


def _precision(words: Sequence[str], given: Given) -> Answer:
    of_open_clip, of_timm = first(given, "precision", "amp"), first(given, "amp_dtype") or first(given, "model_dtype")
    name = of_timm or of_open_clip
    if name.endswith("32") or ("amp_dtype" in given and not {"amp", "native_amp", "apex_amp"} & given.keys()):
        return Answer("fp32 is the precision of a JSON without bf16, fp16 and torch_autocast; drop it")
    is_bf16 = "bf" in name
    if "model_dtype" in given or not (of_timm or name.startswith("amp")):
        return Answer("weights are updated in fp32", values={f"{'bf16' if is_bf16 else 'fp16'}.enabled": True})
    flag = "--precision amp_bf16" if "precision" in given else "--amp-dtype bfloat16"
    note = f'fp16 with a loss scale, which a CPU does not have; there "bfloat16" ({flag})' * (not is_bf16)
    dtype = "bfloat16" if is_bf16 else "float16"
    return Answer(note, values={"torch_autocast.enabled": True, "torch_autocast.dtype": dtype})


def _betas(words: Sequence[str], given: Given) -> Answer:
    betas = [parse_literal(first(given, name, default)) for name, default in (("beta1", "0.9"), ("beta2", "0.999"))]
    return Answer(values={"optimizer.params.betas": betas})


def _interval(words: Sequence[str], given: Given) -> Answer:
    both = {word for name in ("val_frequency", "zeroshot_frequency") for word in given.get(name, ())} or {*words}
    note = "one interval, in epochs, for both evaluations" * (len(both) > 1)
    return Answer(note, ("--eval-interval", *sorted(both, key=parse_literal)[:1]))


def _cooldown(words: Sequence[str], given: Given) -> Answer:
    try:
        share = float(*words) / float(first(given, "epochs", "32"))
    except (TypeError, ValueError):
        return Answer("--sched wsd decays in the last --wsd-decay-fraction of a run")
    return Answer("", ("--wsd-decay-fraction", f"{share:g}"))


def _base_rate(words: Sequence[str], given: Given) -> Answer:
    if "lr" in given:
        return Answer("--lr is given, and the rate; drop it")
    optimizer = first(given, "opt", "sgd").lower()
    scale = first(given, "lr_base_scale") or (
        "sqrt" if any(word in optimizer for word in ("ada", "lamb")) else "linear"
    )
    return Answer("", ("--lr", *words, "--lr-scale-by-batch", scale))


def output_folder(words: Sequence[str], given: Given) -> Answer:
    """timm's --output and --experiment, which together name a folder of several runs, and one of them."""
    folder = PurePath(first(given, "output", "output/train"), *given.get("experiment", ()))
    note = "the run's own folder; timm makes one in it, named by time and model" * ("experiment" not in given)
    return Answer(note, ("--output", str(folder)))


def _upsampling(words: Sequence[str], given: Given) -> Answer:
    """open_clip draws a source's shards by its factor; the share of a source is in proportion to their number too."""
    sources, factors = first(given, "train_data").split("::"), "".join(words).split("::")
    shards = [math.prod(int(b) - int(a) + 1 for a, b in re.findall(r"{(\d+)\.\.(\d+)}", source)) for source in sources]
    try:
        shares = [f"{float(factor) * number:g}" for factor, number in zip(factors, shards, strict=True)]
    except ValueError:
        return Answer("several --data-dir are mixed by --data-weights", is_refused=True)
    if len(shares) < 2:
        return Answer("there is one source; drop it")
    return Answer("a factor times the number of shards, as there", ("--data-weights", *shares))


def _saved_each(words: Sequence[str], given: Given) -> Answer:
    epochs = "".join(words)
    note = f"open_clip saves every {epochs} epochs" * (epochs not in ("0", "1"))
    return Answer(note, ("--checkpoint-interval", "0" if epochs == "0" else "epoch"))


# Flags of other names or meanings here by recipe names, as patterns of fnmatch; the first match counts. A name with "!"
# takes no word, one with "+" all words up to the next flag, and others one.
_NO_LAYER, _EAGER = "ViTs have no such layer; drop it", "a run trains the eager model (ds-vit export RUN --to onnx)"
_RENAMED = """
    data=--data-dir torchcompile_mode=--compile-mode drop_connect=--drop-path val_interval=--eval-interval
    model_ema_v2!=--model-ema siglip!=--task=siglip skip_scheduler!=--sched=constant
    accum_freq=--grad-accum-steps force_context_length=--context-length
    image_mean+=--mean image_std+=--std wd=--weight-decay warmup=--warmup-steps grad_clip_norm=--clip-grad
    lr_cooldown_end=--min-lr log_every_n_steps=--log-interval wandb_project_name=--wandb-project
    imagenet_val=--zeroshot={}=--zeroshot-templates=openai
"""
_HINTS: Mapping[str, Entry] = {
    **{name: flag(words.replace("=", " ")) for name, _, words in (x.partition("=") for x in _RENAMED.split())},
    "c config": flag("--recipe", "a YAML file of the flags of ds_vit"),
    "d": flag("--dataset", "a folder is given by --data-dir DIR"),
    # precision, optimizer, compilation
    "opt": _optimizer,
    "opt_eps eps": lambda words, given: Answer(values={"optimizer.params.eps": parse_literal("".join(words))}),
    "opt_betas+": lambda words, given: Answer(values={"optimizer.params.betas": list(map(parse_literal, words))}),
    "beta1 beta2": _betas,
    "opt_kwargs+": _optimizer_arguments,
    "momentum": _momentum,
    "clip_mode": lambda words, given: Answer(
        "gradients are clipped by their global norm: --clip-grad", is_refused=[*words] != ["norm"]
    ),
    "amp! native_amp! apex_amp! amp_* model_dtype precision": _precision,
    "torchscript! fuser trace!": _EAGER,
    "torchcompile+": lambda words, given: Answer("only the blocks, by inductor", ("--compile",)),
    "torchcompile_*": "there are only --compile and --compile-mode",
    "channels_last! fast_norm!": "ViTs gain nothing from it; drop it (--norm-dtype model computes norms in 16 bits)",
    "device device_modules": "DeepSpeed finds the accelerator; DS_ACCELERATOR=cpu in the environment chooses the CPU",
    "no_ddp_bb! synchronize_step! horovod! dist_url dist_backend no_set_device_rank! ddp_static_graph!": "the launcher "
    "and DeepSpeed connect the ranks; drop it",
    # weights
    "pretrained_path": flag("--initial-checkpoint", "in timm's names (ds-vit import brings other names)"),
    "no_resume_opt!": "--initial-checkpoint FILE starts from the weights only",
    "start_epoch start_step": "--resume auto resumes the run in --output",
    "pretrained_image!": flag("--pretrained", "it is for the image tower"),
    "cache_dir": "weights are cached where HF_HOME in the environment says",
    # model
    "gp": flag("--model-kwargs global_pool={}"),
    "in_chans": lambda words, given: Answer("images are RGB here; drop it", is_refused=[*words] != ["3"]),
    "input_size+": flag("--img-size", "images are square RGB here", last=True),
    "force_image_size+": flag("--img-size", last=True),
    "head_init_scale head_init_bias": "heads are initialised as in timm's models; drop it",
    "drop_block bn_momentum bn_eps sync_bn! dist_bn split_bn! use_bn_sync! lock_image_freeze_bn_stats!": _NO_LAYER,
    "model_ema_force_cpu!": "the average is sharded over ranks like the optimizer's state: --model-ema",
    "force_quick_gelu!": flag("--text-model clip_base_quickgelu", "with an image tower of timm's clip_quickgelu names"),
    "force_patch_dropout": flag("--model-kwargs patch_drop_rate={}"),
    "lock_text_unlocked_layers": frozen_text,
    "force_custom_text!": "there is one kind of text tower; drop it",
    "lock_text_freeze_layer_norm!": "norms are frozen with their layers; drop it",
    "coca_*": refused("CoCa is not here"),
    "distill_model distill_pretrained": refused("only classifiers are distilled here (--kd-model-name)"),
    "use_bnb_linear!": "linear layers in 8 bits are not here; drop it",
    # learning rate
    "lr_base": _base_rate,
    "lr_base_scale": "write --lr-scale-by-batch linear or sqrt next to --lr",
    "sched_on_updates!": "the learning rate is set at every optimizer step; drop it",
    "cooldown_epochs cooldown_steps": "timm trains them after --epochs; here a run ends with --epochs",
    "lr_noise+": refused("the learning rate has no noise here"),
    "lr_noise_* lr_cycle_* lr_k_decay decay_milestones+ decay_epochs decay_steps decay_rate dr patience_epochs "
    "patience_steps": "the schedules are --sched cosine, linear, constant and wsd, "
    "without cycles, steps or noise; or one of DeepSpeed's in the JSON",
    "warmup_prefix!": "as by timm's default, the decay is counted from the run's first step; drop it",
    "layer_decay_no_opt_scale! layer_decay_*": "there is only --layer-decay",
    "num_steps": flag("--max-steps", "the length in optimizer steps"),
    "epoch_repeats": "give more --epochs; --aug-repeats shows a sample several times in one epoch",
    "lr_scheduler": flag("--sched", "", {"const": "constant", "const-cooldown": "wsd"}),
    "epochs_cooldown": _cooldown,
    "lr_cooldown_power": "--sched wsd decays by one shape; drop it",
    # data, augmentation, loss
    "class_map": "classes are named by their folders, or by labels.csv next to the images (docs/data.md)",
    "input_img_mode input_key target_key dataset_trust_remote_code!": "it is for datasets that are not supported; "
    "image folders, tar files and torchvision's are (docs/data.md)",
    "train_num_samples val_num_samples": "samples are counted when the data is opened; drop it",
    "aug_splits jsd_loss! resplit!": refused("augmentation splits and their Jensen-Shannon loss are not here"),
    "mixup_mode": "pairs are mixed, each by a separate draw (timm's pair mode); drop it",
    "mixup_off_step": "it is counted in epochs: --mixup-off-epoch",
    "bce_pos_weight": refused("classes have equal weights"),
    "pin_mem! no_prefetcher! use_multi_epochs_loader! loader_prefetch_factor": "the input pipeline chooses this "
    "itself; drop it",
    "worker_seeding!": "random numbers depend on the sample's key, not on the worker: only --seed matters",
    "save_images!": "--log-samples writes which samples each step used",
    "naflex_loader! naflex_*+": refused("images of several sizes in one batch are not here"),
    "kd_student_feature_dim kd_teacher_feature_dim": "both widths are read from the models; drop it",
    "image_interpolation": flag("--train-interpolation", "evaluation keeps the model's filter: --interpolation"),
    "image_resize_mode": flag("--crop-mode", "", {"shortest": "center", "longest": "border"}),
    "aug_cfg+": refused("each setting has a flag: --scale, --ratio, --color-jitter, --reprob, --recount"),
    "train_data": "--data-dir DIR has images with .txt files; --dataset wds/DIR, csv/FILE, parquet/DIR (docs/data.md)",
    "val_data": "the evaluation split is --val-split of the same data (docs/data.md)",
    "dataset_type": "it is the first word of --dataset: wds/DIR, csv/FILE, parquet/DIR, hfds/DIR",
    "dataset_resampled!": "an epoch shows each sample once, without replacement",
    "train_data_upsampling_factors": _upsampling,
    "imagenet_v2": "a run evaluates one data set by --zeroshot; ds-vit eval RUN --zeroshot DIR evaluates others",
    "zeroshot_frequency val_frequency": _interval,
    "local_loss! gather_with_grad!": "always so: each rank compares its rows with those of all ranks, and gradients "
    "flow back to them; drop it",
    "loss_dist_impl": "the gathered features are compared a few rows at a time in every layout; drop it",
    "tta": "evaluation uses one crop; drop it",
    # what is written
    "experiment": output_folder,
    "log_dir logs name": "the run's folder is --output DIR",
    "checkpoint_hist": flag("--keep-checkpoints", "the newest, and the best one; timm keeps the best"),
    "recovery_interval": flag("--checkpoint-interval", "in steps, or 30m, a time"),
    "save_frequency": _saved_each,
    "num_saves": "--checkpoint-interval 500 (steps) or 30m (time)",
    "num_evals": "--eval-interval N, in epochs",
    "num_logs": "--log-interval N, in optimizer steps",
    "log_local! copy_codebase! remote_sync remote_sync_*": "rank 0 writes --output; drop it",
    "save_most_recent!": "checkpoints/latest names the newest; drop it",
    "delete_previous_checkpoint!": flag("--keep-checkpoints 1", "and the best one"),
    "report_to": lambda words, given: Answer(
        "TensorBoard's events are always written", ("--wandb",) * any(x in "".join(words) for x in ("wandb", "all"))
    ),
    "wandb_notes": "drop it",
    "wandb_tags+ wandb_resume_id": 'the DeepSpeed JSON has "wandb": {"enabled": true, "group": …, "team": …}; drop it',
    "debug!": "--verbose shows DeepSpeed's log",
}


def _match(table: Mapping[str, Entry], name: str) -> tuple[str, Entry | None]:
    """The first pattern of a table that matches the recipe name of a flag, and its entry; "+" and None without one."""
    pairs = ((pattern, entry) for patterns, entry in table.items() for pattern in patterns.split())
    return next((pair for pair in pairs if fnmatchcase(name, pair[0].rstrip("!+"))), ("+", None))


def entry_in(table: Mapping[str, Entry], name: str) -> Entry | None:
    """The entry of a flag in a table, by its recipe name."""
    return _match(table, name)[1]


def words_of(name: str) -> int | None:
    """The number of words that a flag of timm's or open_clip's takes: 0, 1, or None for all up to the next flag.

    Args:
        name: by its recipe name.
    """
    pattern, _ = _match(_HINTS, name)
    return {"!": 0, "+": None}.get(pattern[-1], 1)


def timm_answer(name: str, words: Sequence[str] = (), given: Given = MappingProxyType({})) -> Answer | None:
    """The equivalent of a flag of timm's or open_clip's.

    Args:
        name: by its recipe name, with underscores.
        words: its words.
        given: all flags of the command.

    Returns:
        None for a name that is neither's.
    """
    return answer_of(entry_in(_HINTS, name), words, given)


def answer_of(entry: Entry | None, words: Sequence[str], given: Given) -> Answer | None:
    """The equivalent of a flag by its entry in a table; None without one."""
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
