"""The equivalents here of the flags of timm's train.py and of open_clip's trainer: one table.

It has each of their flags that ds_vit does not have, and those that mean something else there. Error messages, `ds-vit
from-timm` and `ds-vit from-open-clip` read it.

Flags of timm 1.0.31 (https://github.com/huggingface/pytorch-image-models, train.py) and open_clip 3.3.0
(https://github.com/mlfoundations/open_clip, src/open_clip_train/params.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
        block = json.dumps(overlay({}, self.values, ""))[1:-1]
        parts = [f"it is decided by the DeepSpeed JSON: {block}"] if block else []
        parts += [f"write {shlex.join(self.words)}"] if self.words else []
        return "; ".join([*parts, *([self.note] if self.note else [])])


Entry = str | Mapping[str, str] | Callable[[Sequence[str], Given], str | Answer]
"""An answer; answers by patterns of the flag's words, of which the first match counts; or a function of the words and
of all flags of the command. An answer as text is

    = --flag {} key.of.json={}; note    the equivalent: flags of ds_vit, and values of the DeepSpeed JSON
    ! note                              refused
    note                                there is no equivalent

where {} is replaced by the words of the flag.
"""


def _read(entry: Entry, words: Sequence[str], given: Given) -> Answer:
    """The answer of an entry."""
    if isinstance(entry, str):
        answer: str | Answer = entry
    elif isinstance(entry, Mapping):
        typed = " ".join(words)
        answer = next(text for key, text in entry.items() if any(fnmatchcase(typed, x) for x in key.split() or [""]))
    else:
        answer = entry(words, given)
    if isinstance(answer, Answer):
        return answer
    if not answer.startswith("= "):
        return Answer(answer.removeprefix("! "), is_refused=answer.startswith("! "))
    equivalent, _, note = answer[2:].partition("; ")
    flags: list[str] = []
    values: dict[str, Any] = {}
    for piece in equivalent.split():
        key, is_value, value = piece.partition("=")
        if is_value and "." in key:
            values[key] = parse_literal(value.replace("{}", "".join(words)))
        else:
            flags += [piece.replace("{}", word) for word in words] if "{}" in piece else [piece]
    return Answer(note.replace("{}", " ".join(words)), tuple(flags), values)


def _first(given: Given, name: str, default: str = "") -> str:
    """The first word of a flag of the command."""
    return next(iter(given.get(name, ())), default)


# ---- precision, optimizer and learning rate --------------------------------------------------------------------------

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


def _params(values: Mapping[str, Any]) -> str:
    """Arguments of the optimizer in an answer."""
    return " ".join(f"optimizer.params.{name}={value}" for name, value in values.items())


def _optimizer(words: Sequence[str], given: Given) -> str:
    name = words[0].lower().removeprefix("timm/") if words else "adamw"
    if name not in OPTIMIZERS:
        return f"! there is no optimizer {name} here; docs/optimizers.md lists those of the DeepSpeed JSON"
    kind, params = OPTIMIZERS[name]
    if kind in _WITH_MOMENTUM:
        params = {"momentum": _first(given, "momentum", "0.9"), **params}
    block = f"= optimizer.type={kind} {_params({'lr': 'auto', **params, 'weight_decay': 'auto'})}"
    if kind == "Lamb" and "clip_grad" not in given and "grad_clip_norm" not in given:
        return f"{block} --clip-grad 1.0; timm's LAMB limits the gradient's norm to 1 itself"
    return block + "; torch's NAdam, which timm's only resembles" * (name == "nadamw")


def _momentum(words: Sequence[str], given: Given) -> str:
    kind, _ = OPTIMIZERS.get(_first(given, "opt", "sgd").lower(), ("", {}))
    if kind and kind not in _WITH_MOMENTUM:
        return f"{kind} has no momentum; drop it"
    return f"= {_params({'momentum': words[0] if words else 0.9})}"


def _optimizer_arguments(words: Sequence[str], given: Given) -> Answer:
    pairs = (word.split("=", 1) for word in words if "=" in word)
    values = {f"optimizer.params.{key}": parse_literal(value) for key, value in pairs}
    return Answer("arguments of the optimizer are in optimizer.params of the DeepSpeed JSON", values=values)


def _betas(words: Sequence[str], given: Given) -> str:
    texts = words if "opt_betas" in given else (_first(given, "beta1", "0.9"), _first(given, "beta2", "0.999"))
    return f"= {_params({'betas': '[' + ','.join(texts) + ']'})}"


def _precision(words: Sequence[str], given: Given) -> str:
    of_timm = _first(given, "amp_dtype") or _first(given, "model_dtype")
    name = of_timm or _first(given, "precision", "amp")
    if name.endswith("32") or ("amp_dtype" in given and not {"amp", "native_amp", "apex_amp"} & given.keys()):
        return "fp32 is the precision of a JSON without bf16, fp16 and torch_autocast; drop it"
    is_bf16 = "bf" in name
    if "model_dtype" in given or not (of_timm or name.startswith("amp")):
        return f"= {'bf16' if is_bf16 else 'fp16'}.enabled=True; weights are updated in fp32"
    if is_bf16:
        return "= torch_autocast.enabled=True torch_autocast.dtype=bfloat16"
    flag = "--precision amp_bf16" if "precision" in given else "--amp-dtype bfloat16"
    note = f'fp16 with a loss scale, which a CPU does not have; there "bfloat16" ({flag})'
    return f"= torch_autocast.enabled=True torch_autocast.dtype=float16; {note}"


def _base_rate(words: Sequence[str], given: Given) -> str:
    if "lr" in given:
        return "--lr is given, and the rate; drop it"
    is_adaptive = any(word in _first(given, "opt", "sgd").lower() for word in ("ada", "lamb"))
    scale = _first(given, "lr_base_scale") or ("sqrt" if is_adaptive else "linear")
    return f"= --lr {{}} --lr-scale-by-batch {scale}"


def _epochs(words: Sequence[str], given: Given) -> str:
    """timm's default warm-up is 5 epochs of any run; ds_vit's is the same from 50 epochs on, and else a tenth."""
    epochs = "".join(words)
    if "warmup_epochs" in given or not epochs.isdecimal() or int(epochs) >= 50:
        return "= --epochs {}"
    if int(epochs) > 5:
        return "= --epochs {} --warmup-epochs 5"
    return "= --epochs {}; timm warms up for 5 epochs, here all of the run; ds_vit for a tenth"


def _cooldown(words: Sequence[str], given: Given) -> str:
    try:
        share = float(*words) / float(_first(given, "epochs", "32"))
    except (TypeError, ValueError):
        return "--sched wsd decays in the last --wsd-decay-fraction of a run"
    return f"= --wsd-decay-fraction {share:g}"


def _interval(words: Sequence[str], given: Given) -> str:
    both = {word for name in ("val_frequency", "zeroshot_frequency") for word in given.get(name, ())} or {*words}
    note = "; one interval, in epochs, for both evaluations" * (len(both) > 1)
    return f"= --eval-interval {''.join(sorted(both, key=lambda word: (len(word), word))[:1])}{note}"


# ---- models of open_clip ---------------------------------------------------------------------------------------------

_SIZES = {"B": "base", "L": "large", "H": "huge", "g": "giant", "bigG": "gigantic", "SO400M": "so400m"}
_MODELS = re.compile(r"ViT-(?:(B|L|H|g|bigG)-(\d+)|(B|L|SO400M)-(\d+)-(SigLIP))(?:-(\d+))?(-quickgelu)?")


def _towers(words: Sequence[str], given: Given) -> str:
    """The towers of open_clip's ViT-B-16, ViT-L-14-336-quickgelu, ViT-B-16-SigLIP-256 and their like."""
    name = _first(given, "model")
    parts = _MODELS.fullmatch(name)
    quick = "_quickgelu" * bool(parts and (parts[7] or "force_quick_gelu" in given))
    if parts is None or (quick and parts[1] not in ("B", "L")):
        return f"! {name} has no counterpart; docs/from_open_clip.md lists those that have"
    size, note, tokenizer = _SIZES[parts[1] or parts[3]], "", "clip"
    family, text = f"clip{quick}", f"clip_{'huge' if size == 'giant' else size}{quick}"
    if parts[5]:
        family, text, tokenizer = "siglip", f"siglip_{size}", "tokenizer.json"
        note = f"; tokenizer.json and tokenizer_config.json are those of timm/{name} on the Hub"
    model = f"vit_{size}_patch{parts[2] or parts[4]}_{family}_{parts[6] or 224}"
    task = "siglip" if "siglip" in given else "clip"
    return f"= --task {task} --model {model} --text-model {text} --tokenizer {tokenizer}{note}"


def _unlocked_groups(words: Sequence[str], given: Given) -> str:
    groups = _first(given, "lock_image_unlocked_groups")
    if groups.isdecimal() and "SigLIP" not in _first(given, "model"):
        groups = str(max(int(groups) - 1, 0))
    return f"= --lock-image-unlocked-groups {groups}"


def _frozen_text(words: Sequence[str], given: Given) -> str:
    """The frozen groups of a text tower of 12 blocks: embeddings, each block, the norm in the last one; projection."""
    unlocked = parse_literal(_first(given, "lock_text_unlocked_layers", *words[:1]))
    if not isinstance(unlocked, int):
        return "--freeze takes patterns of names: text.token_embed text.pos_embed 'text.blocks.[0-9]'"
    if unlocked < 1:
        return "= --lock-text"
    if unlocked > 13:
        return "then all of a text tower of 12 blocks is trained; drop it"
    last = 12 - unlocked  # of the frozen blocks
    names = ["text.token_embed", "text.pos_embed"]
    names += [f"text.blocks.[0-{min(last, 9)}]"] if last >= 0 else []
    names += ["text.blocks.10", "text.blocks.11"][: max(last - 9, 0)]
    names += ["text.norm"] if unlocked == 1 else []
    return f"= --freeze {' '.join(names)}; for 12 blocks; the projection counts as a layer in open_clip"


def _lock_text(words: Sequence[str], given: Given) -> str:
    return _frozen_text(["0"], given) if "lock_text" in given else "it has no effect without --lock-text"


# ---- data and folders ------------------------------------------------------------------------------------------------

_KINDS = {"csv": "csv", "tsv": "csv", "tar": "wds", "webdataset": "wds"}


def _tables_and_shards(words: Sequence[str], given: Given) -> str | Answer:
    """The data of open_clip: its three flags together."""
    sources = _first(given, "train_data").split("::")
    named = _first(given, "dataset_type", "auto")
    kind = _KINDS.get(sources[0].rpartition(".")[2] if named == "auto" else named)
    if kind is None or any(":" in source for source in sources):
        return "! a run trains on tar files or tables on disk, not on a pipe or a URL (docs/data.md)"
    paths = [f"{kind}/{source}" for source in sources]
    data = ("--dataset", *paths) if len(paths) == 1 else ("--data-dir", *paths)
    val = _first(given, "val_data")
    if val and not PurePath(val).is_absolute():  # --val-split counts from the folder of the training data
        val = os.path.relpath(val, os.path.dirname(sources[0]))
    return Answer("", (*data, "--val-split", val))


def _upsampling(words: Sequence[str], given: Given) -> str:
    """open_clip draws a source's shards by its factor; the share of a source is in proportion to their number too."""
    sources, factors = _first(given, "train_data").split("::"), "".join(words).split("::")
    shards = [math.prod(int(b) - int(a) + 1 for a, b in re.findall(r"{(\d+)\.\.(\d+)}", source)) for source in sources]
    try:
        shares = [f"{float(factor) * number:g}" for factor, number in zip(factors, shards, strict=True)]
    except ValueError:
        return "! several --data-dir are mixed by --data-weights"
    if len(shares) < 2:
        return "there is one source; drop it"
    return f"= --data-weights {' '.join(shares)}; a factor times the number of shards, as there"


def _weights(words: Sequence[str], given: Given) -> str:
    return "--resume replaces it" if _first(given, "resume") else "= --initial-checkpoint {}"


def _timms_folder(words: Sequence[str], given: Given) -> Answer:
    """timm's --output and --experiment, which together name a folder of several runs, and one of them."""
    folder = PurePath(_first(given, "output", "output/train"), *given.get("experiment", ()))
    note = "the run's own folder; timm makes one in it, named by time and model" * ("experiment" not in given)
    return Answer(note, ("--output", str(folder)))


def _open_clips_folder(words: Sequence[str], given: Given) -> str | Answer:
    if "name" not in given:
        return "without --name the run's folder is runs/TIME-MODEL"
    return Answer("", ("--output", str(PurePath(_first(given, "logs", "logs"), _first(given, "name")))))


# ---- the table -------------------------------------------------------------------------------------------------------

_NO_LAYER, _EAGER = "ViTs have no such layer; drop it", "a run trains the eager model (ds-vit export RUN --to onnx)"
_CLIPPING = "gradients are clipped by their global norm: --clip-grad"
_CHECKPOINT = {
    "": "it names no checkpoint",
    "latest": "= --resume auto",
    "*/* *.*": "= --initial-checkpoint {}; only weights: optimizer, schedule and average start anew",
    "*": "! nothing is downloaded by a tag: --initial-checkpoint takes a file or a folder",
}
# Flags by recipe names, as patterns of fnmatch; the first match counts. A name with "!" takes no word, one with "+" all
# words up to the next flag, and others one.
_RENAMED = """
    data=--data-dir torchcompile_mode=--compile-mode drop_connect=--drop-path val_interval=--eval-interval
    accum_freq=--grad-accum-steps force_context_length=--context-length wd=--weight-decay warmup=--warmup-steps
    image_mean+=--mean image_std+=--std grad_clip_norm=--clip-grad lr_cooldown_end=--min-lr
    log_every_n_steps=--log-interval wandb_project_name=--wandb-project num_steps=--max-steps
"""
_OF_TIMM: Mapping[str, Entry] = {
    "dataset d": {
        "hfids/* tfds/*": "! such data is not read here (docs/data.md)",
        "hfds/*": "= --dataset {}; a folder on disk, from save_to_disk or of parquet; the Hub is not read",
        "wds wds/": "= --dataset wds/",
        "wds/*": "= --dataset wds/; the tar files of --data-dir; the name in {} chooses none",
        "torch/*": "= --dataset {}",
        "*": "timm reads the folders of --data-dir under this name, which ds_vit does without it",
    },
    "epochs": _epochs,
    "resume": _CHECKPOINT,
    "initial_checkpoint": _weights,
    "output": _timms_folder,
    "aug_repeats": "= --aug-repeats {}; on one rank too, where timm's has no effect",
}
"""Flags of ds_vit that mean something else in a command of timm's."""
_OF_OPEN_CLIP: Mapping[str, Entry] = {
    "model siglip! force_quick_gelu!": _towers,
    "train_data val_data dataset_type": _tables_and_shards,
    "pretrained resume": _CHECKPOINT,
    "lock_image!": "= --lock-image; the projection, which open_clip's own ViTs count as a group, is always trained",
    "lock_image_unlocked_groups": _unlocked_groups,
    "lock_text! lock_text_unlocked_layers": _lock_text,
    "logs name": _open_clips_folder,
}
"""The same of open_clip's, and flags that are translated together there."""
_UNKNOWN: Mapping[str, Entry] = {
    **{name: f"= {flag} {{}}" for name, _, flag in (pair.partition("=") for pair in _RENAMED.split())},
    # other names
    "d": "= --dataset {}; a folder is given by --data-dir DIR",
    "c config": "= --recipe {}; a YAML file of the flags of ds_vit",
    "model_ema_v2!": "= --model-ema",
    "siglip!": "= --task siglip",
    "imagenet_val": "= --zeroshot {} --zeroshot-templates openai",
    "gp": "= --model-kwargs global_pool={}",
    "force_patch_dropout": "= --model-kwargs patch_drop_rate={}",
    # precision, optimizer, compilation
    "opt": _optimizer,
    "opt_eps eps": "= optimizer.params.eps={}",
    "opt_betas+ beta1 beta2": _betas,
    "opt_kwargs+": _optimizer_arguments,
    "momentum": _momentum,
    "clip_mode": {"norm": _CLIPPING, "*": f"! {_CLIPPING}"},
    "amp! native_amp! apex_amp! amp_* model_dtype precision": _precision,
    "torchscript! fuser trace!": _EAGER,
    "torchcompile+": "= --compile; only the blocks, by inductor",
    "torchcompile_*": "there are only --compile and --compile-mode",
    "channels_last! fast_norm!": "ViTs gain nothing from it; drop it (--norm-dtype model computes norms in 16 bits)",
    "device device_modules": "DeepSpeed finds the accelerator; DS_ACCELERATOR=cpu in the environment chooses the CPU",
    "no_ddp_bb! synchronize_step! horovod! dist_url dist_backend no_set_device_rank! ddp_static_graph!": "the launcher "
    "and DeepSpeed connect the ranks; drop it",
    # weights
    "pretrained_path": "= --initial-checkpoint {}; in timm's names (ds-vit import brings other names)",
    "no_resume_opt!": "--initial-checkpoint FILE starts from the weights only",
    "start_epoch start_step": "--resume auto resumes the run in --output",
    "pretrained_image!": "= --pretrained; it is for the image tower",
    "cache_dir": "weights are cached where HF_HOME in the environment says",
    # model
    "in_chans": {"3": "images are RGB here; drop it", "*": "! images are RGB here; drop it"},
    "input_size+ force_image_size+": lambda words, _: f"= --img-size {''.join(words[-1:])}; images are square RGB here",
    "head_init_scale head_init_bias": "heads are initialised as in timm's models; drop it",
    "drop_block bn_momentum bn_eps sync_bn! dist_bn split_bn! use_bn_sync! lock_image_freeze_bn_stats!": _NO_LAYER,
    "model_ema_force_cpu!": "the average is sharded over ranks like the optimizer's state: --model-ema",
    "force_quick_gelu!": "= --text-model clip_base_quickgelu; with an image tower of timm's clip_quickgelu names",
    "lock_text_unlocked_layers": _frozen_text,
    "force_custom_text!": "there is one kind of text tower; drop it",
    "lock_text_freeze_layer_norm!": "norms are frozen with their layers; drop it",
    "coca_*": "! CoCa is not here",
    "distill_model distill_pretrained": "! only classifiers are distilled here (--kd-model-name)",
    "use_bnb_linear!": "linear layers in 8 bits are not here; drop it",
    # learning rate
    "lr_base": _base_rate,
    "lr_base_scale": "write --lr-scale-by-batch linear or sqrt next to --lr",
    "sched_on_updates!": "the learning rate is set at every optimizer step; drop it",
    "cooldown_epochs cooldown_steps": "timm trains them after --epochs; here a run ends with --epochs",
    "lr_noise+": "! the learning rate has no noise here",
    "lr_noise_* lr_cycle_* lr_k_decay decay_milestones+ decay_epochs decay_steps decay_rate dr patience_epochs "
    "patience_steps": "the schedules are --sched cosine, linear, constant and wsd, without cycles, steps or noise; or "
    "one of DeepSpeed's in the JSON",
    "warmup_prefix!": "as by timm's default, the decay is counted from the run's first step; drop it",
    "layer_decay_no_opt_scale! layer_decay_*": "there is only --layer-decay",
    "epoch_repeats": "give more --epochs; --aug-repeats shows a sample several times in one epoch",
    "skip_scheduler!": "= --sched constant",
    "lr_scheduler": {"const": "= --sched constant", "const-cooldown": "= --sched wsd", "*": "= --sched {}"},
    "epochs_cooldown": _cooldown,
    "lr_cooldown_power": "--sched wsd decays by one shape; drop it",
    # data, augmentation, loss
    "class_map": "classes are named by their folders, or by labels.csv next to the images (docs/data.md)",
    "input_img_mode input_key target_key dataset_trust_remote_code!": "it is for datasets that are not supported; "
    "image folders, tar files and torchvision's are (docs/data.md)",
    "train_num_samples val_num_samples": "samples are counted when the data is opened; drop it",
    "aug_splits jsd_loss! resplit!": "! augmentation splits and their Jensen-Shannon loss are not here",
    "mixup_mode": "pairs are mixed, each by a separate draw (timm's pair mode); drop it",
    "mixup_off_step": "it is counted in epochs: --mixup-off-epoch",
    "bce_pos_weight": "! classes have equal weights",
    "pin_mem! no_prefetcher! use_multi_epochs_loader! loader_prefetch_factor": "the input pipeline chooses this "
    "itself; drop it",
    "worker_seeding!": "random numbers depend on the sample's key, not on the worker: only --seed matters",
    "save_images!": "--log-samples writes which samples each step used",
    "naflex_loader! naflex_*+": "! images of several sizes in one batch are not here",
    "kd_student_feature_dim kd_teacher_feature_dim": "both widths are read from the models; drop it",
    "image_interpolation": "= --train-interpolation {}; evaluation keeps the model's filter: --interpolation",
    "image_resize_mode": {
        "shortest": "= --crop-mode center",
        "longest": "= --crop-mode border",
        "*": "= --crop-mode {}",
    },
    "aug_cfg+": "! each setting has a flag: --scale, --ratio, --color-jitter, --reprob, --recount",
    "train_data dataset_type": "--data-dir DIR has images with .txt files; --dataset wds/DIR, csv/FILE, parquet/DIR, "
    "hfds/DIR (docs/data.md)",
    "val_data": "the evaluation split is --val-split of the same data (docs/data.md)",
    "dataset_resampled!": "an epoch shows each sample once, without replacement",
    "train_data_upsampling_factors": _upsampling,
    "imagenet_v2": "a run evaluates one data set by --zeroshot; ds-vit eval RUN --zeroshot DIR evaluates others",
    "zeroshot_frequency val_frequency": _interval,
    "local_loss! gather_with_grad! loss_dist_impl": "always so: each rank compares its rows with those of all ranks, "
    "a few at a time, and gradients flow back to them; drop it",
    "tta": "evaluation uses one crop; drop it",
    # output
    "experiment": _timms_folder,
    "log_dir logs name": "the run's folder is --output DIR",
    "checkpoint_hist": "= --keep-checkpoints {}; the newest, and the best one; timm keeps the best",
    "recovery_interval": "= --checkpoint-interval {}; in steps, or 30m, a time",
    "save_frequency": {
        "0": "= --checkpoint-interval 0",
        "1": "= --checkpoint-interval epoch",
        "*": "= --checkpoint-interval epoch; open_clip saves every {} epochs",
    },
    "num_saves num_evals num_logs": "--checkpoint-interval, --eval-interval and --log-interval say how often",
    "log_local! copy_codebase! remote_sync remote_sync_*": "rank 0 writes --output; drop it",
    "save_most_recent!": "checkpoints/latest names the newest; drop it",
    "delete_previous_checkpoint!": "= --keep-checkpoints 1; and the best one",
    "report_to": {
        "*wandb* *all*": "= --wandb; TensorBoard's events are always written",
        "*": "TensorBoard's events are always written",
    },
    "wandb_notes": "drop it",
    "wandb_tags+ wandb_resume_id": 'the DeepSpeed JSON has "wandb": {"enabled": true, "group": …, "team": …}; drop it',
    "debug!": "--verbose shows DeepSpeed's log",
}
"""Flags that ds_vit does not have."""


ENTRIES = {"": _UNKNOWN, "timm": {**_OF_TIMM, **_UNKNOWN}, "open_clip": {**_OF_OPEN_CLIP, **_UNKNOWN}}
"""Trainer → the flags of its commands; "" is ds_vit."""


def _find(name: str, origin: str) -> tuple[str, Entry]:
    """The pattern that matches the recipe name of a flag, and its entry; "" and "" without one."""
    pairs = ((pattern, entry) for patterns, entry in ENTRIES[origin].items() for pattern in patterns.split())
    return next((pair for pair in pairs if fnmatchcase(name, pair[0].rstrip("!+"))), ("", ""))


def timm_answer(
    name: str, words: Sequence[str] = (), given: Given = MappingProxyType({}), origin: str = ""
) -> Answer | None:
    """The equivalent of a flag of timm's or open_clip's.

    Args:
        name: by its recipe name, with underscores.
        words: its words.
        given: all flags of the command.
        origin: "timm" or "open_clip" for a whole command of its trainer, in which flags of ds_vit have its meaning.

    Returns:
        None for a name that is neither's, and for a flag of ds_vit with the same meaning.
    """
    pattern, entry = _find(name, origin)
    return _read(entry, words, given) if pattern else None


def words_of(name: str, origin: str = "", action: argparse.Action | None = None) -> int | None:
    """The number of words that a flag takes: 0, 1 or more, or None for all up to the next flag.

    Args:
        name: by its recipe name.
        origin: as for `timm_answer`.
        action: of a flag of ds_vit, as argparse has it; timm's or open_clip's of this name goes before it.
    """
    pattern, _ = _find(name, origin)
    if action is not None and not pattern:
        by_nargs: dict[Any, Any] = {None: 1, "?": 0, "+": None, "*": None}  # "?" is --grad-checkpointing, timm's switch
        return by_nargs.get(action.nargs, action.nargs)
    return {"!": 0, "+": None, "": None}.get(pattern[-1:], 1)


def split_words(
    words: Sequence[str], actions: Mapping[str, argparse.Action] = MappingProxyType({}), origin: str = ""
) -> tuple[dict[str, tuple[str, list[str]]], list[str]]:
    """Assign the words of a command to its flags.

    Args:
        words: of the command.
        actions: the flags of ds_vit, as argparse has them; other flags take as many words as timm's or open_clip's.
        origin: as for `timm_answer`.

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
            room = 0 if equals else words_of(name, origin, action)
        elif room is None or room > 0:
            last[1].append(word)
            room = None if room is None else room - 1
        else:
            stray.append(word)
    return flags, stray
