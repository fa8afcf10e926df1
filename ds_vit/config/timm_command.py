"""`ds-vit from-timm 'COMMAND'`: a command of timm's train.py as one of ds_vit's, and its DeepSpeed JSON.

`ds-vit from-open-clip` does the same for open_clip's trainer. The equivalent of each flag is in `timm_flags.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from ds_vit.config.deepspeed_json import load_json, overlay, without
from ds_vit.config.flag import spelling
from ds_vit.config.parser import Parser, build_parser, from_values, or_shipped, read_words
from ds_vit.config.timm_flags import Given, split_words, timm_answer
from ds_vit.fault_tolerance.errors import UserError


class Origin(NamedTuple):
    """A trainer of another library.

    Attributes:
        name: of its library.
        command: of `ds-vit` that translates from it.
        program: matches its word in a command.
        defaults: those of its defaults that differ from ours, by its own names, with their words.
        differences: a flag, what is different here without it, and which flags, if any, the difference needs.
    """

    name: str
    command: str
    program: re.Pattern[str]
    defaults: Callable[[Given], dict[str, str]]
    differences: Sequence[tuple[str, str, str]]


_TIMM = Origin(
    "timm",
    "from-timm",
    re.compile(r"(.*/)?(train\.py|distributed_train\.sh)"),
    lambda given: {"opt": "sgd", **({} if "lr" in given else {"lr_base": "0.1"})},
    (
        ("model", "timm's default is resnet50, which is no ViT; here it is vit_base_patch16_224", ""),
        ("num_classes", "the head has the data's classes; timm's has those of the model, often 1,000", ""),
        ("sched_on_updates", "the learning rate changes at each step; timm's changes at each epoch without it", ""),
        ("mixup_mode", "each pair has its own draw; timm's default is one per batch", "mixup cutmix cutmix_minmax"),
    ),
)


_OURS = {"scale": "0.9 1.0", "hflip": "0", "color_jitter": "0", "train_interpolation": "bicubic", "warmup_lr": "0"}


def _open_clip_defaults(given: Given) -> dict[str, str]:
    defaults = {"model": "RN50", "train_data": "", "precision": "amp", "batch_size": "64", "epochs": "32", "wd": "0.2"}
    if not "".join(given.get("opt", ())).startswith("timm/"):
        defaults |= {"opt": "adamw", "beta1": "0.9", "beta2": "0.98", "eps": "1e-6", "lr": "5e-4"}  # a ViT's
    return {**defaults, "warmup": "0" if "skip_scheduler" in given else "10000", **_OURS}


_OPEN_CLIP = Origin(
    "open_clip",
    "from-open-clip",
    re.compile(r"open_clip_train\.main|training\.main|(.*/)?(open_clip_train|training)/main\.py"),
    _open_clip_defaults,
    (("seed", "open_clip's default is 0; here it is 42", ""),),
)
OTHERS = {"validate.py": "ds-vit eval RUN|FILE", "inference.py": "ds-vit predict RUN|FILE FOLDER"}
"""timm's other programs, and the commands that do their work."""
ORIGINS = {origin.command: origin for origin in (_TIMM, _OPEN_CLIP)}


_BASE = "ds_configs/zero1_bf16_auto.json"
_IDLE = re.compile(r"(--\S+) has no effect (.*); drop it")


@dataclass(frozen=True)
class Translation:
    """A translated command.

    Attributes:
        words: the command, its launcher included.
        json: the contents of the file that it names by --deepspeed_config.
        notes: a line for each flag without an equivalent or with another meaning, and for each problem of the
            translated command.
        is_rejected: whether it is still invalid.
    """

    words: tuple[str, ...]
    json: dict[str, Any]
    notes: tuple[str, ...]
    is_rejected: bool

    def __str__(self) -> str:
        """A script for the shell, the notes as comments. It replaces no file."""
        notes = "".join(f"# {note}\n" for note in self.notes)
        file = self.words[self.words.index("--deepspeed_config") + 1]
        write = f"[ -e {file} ] || cat > {file} <<'EOF'  # an existing file stays as it is"
        return f"{notes}{write}\n{json.dumps(self.json, indent=2)}\nEOF\n{' '.join(map(_quoted, self.words))}"


def translate(command: Sequence[str], origin: Origin = ORIGINS["from-timm"]) -> Translation:
    """Translate a command.

    Args:
        command: its words, or the whole of it as one.
        origin: the trainer that it starts.

    Raises:
        UserError: unbalanced quotes, or a command that does not start this trainer, or that only evaluates.
    """
    try:
        words = shlex.split(command[0]) if len(command) == 1 else list(command)
    except ValueError as error:
        raise UserError(f"{command[0]!r} is not a shell command: {error}") from None
    if "&&" in words:  # cd open_clip/src && torchrun …
        words = words[len(words) - words[::-1].index("&&") :]
    launcher, words = _split_launcher([word for word in words if word.strip()], origin)
    parser = build_parser()
    actions = parser._option_string_actions
    given, stray = split_words(words, actions, origin.name)
    if origin.name == "open_clip" and not {"train_data", "dataset_type"} & given.keys():
        way_out = "ds-vit eval RUN|FILE, with --zeroshot DIR for --imagenet-val"
        raise UserError(f"the command has no --train-data and only evaluates: {way_out}")
    if stray and origin.name == "timm":
        given, stray = {"data_dir": ("--data-dir", stray[:1]), **given}, stray[1:]
    for name, value in origin.defaults({name: own for name, (_, own) in given.items()}).items():
        given.setdefault(name, (spelling(name), value.split()))
    typed = {name: values for name, (_, values) in given.items()}
    out: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    notes = [
        f"{spelling(name)}: {text}"
        for name, text, needed in origin.differences
        if name not in given and (not needed or given.keys() & {*needed.split()})
    ]
    rejected = [f"{word!r} follows no flag" for word in stray]
    for name, (spelled, own) in given.items():
        answer = timm_answer(name, own, typed, origin.name)
        if answer is None:
            if spelled not in out or spelled == "--model-kwargs":  # else another flag has set it
                out.setdefault(spelled, []).extend(own)
            continue
        values |= answer.values
        for ours, words in split_words(answer.words, actions)[0].values():
            out[ours] = [*(out.get(ours, ()) if ours == "--model-kwargs" else ()), *words]
        said = f"{shlex.join([spelled, *own])}: {answer.note.removesuffix('; drop it')}"
        if answer.is_refused:
            rejected.append(said)
        elif answer.note and said not in notes:
            notes.append(said if answer.words or answer.values else f"left out: {said}")
    of_bf16 = () if values.get("bf16.enabled") else ("bf16", "data_types", "communication_data_type")
    data = overlay(without(load_json(or_shipped(_BASE)), ("optimizer", *of_bf16)), values, _BASE)
    while problems := _problems(parser, out, data):
        idle = {found[1]: found[2] for it in problems if (found := _IDLE.fullmatch(it)) and found[1] in out}
        notes += [f"left out: {flag}: it has no effect {reason}" for flag, reason in idle.items()]
        out = {flag: own for flag, own in out.items() if flag not in idle}
        if not idle:
            break
    rejected += problems
    notes += [f"still rejected: {problem}" for problem in rejected]
    file = f"deepspeed-{hashlib.sha256(json.dumps(data).encode()).hexdigest()[:6]}.json"
    return Translation((*launcher, "--deepspeed_config", file, *_flat(out)), data, tuple(notes), bool(rejected))


def _quoted(word: str) -> str:
    """A word for the shell, which still expands variables and `~` in it."""
    if re.fullmatch(r"[\w@%+=:,./{}$-]*\$[\w@%+=:,./{}$-]*", word):
        return f'"{word}"'
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


def _flat(flags: Mapping[str, Sequence[str]]) -> list[str]:
    return [word for flag, own in flags.items() for word in (flag, *own)]


def _problems(parser: Parser, flags: Mapping[str, Sequence[str]], data: Mapping[str, Any]) -> tuple[str, ...]:
    """Why training would reject these flags with this JSON."""
    try:
        from_values(read_words(parser, _flat(flags)) | {"deepspeed_config": data})
    except UserError as error:
        return error.problems
    return ()


def _split_launcher(words: list[str], origin: Origin) -> tuple[list[str], list[str]]:
    """The launcher of ds_vit's training, and the words after the trainer's program.

    Raises:
        UserError: the trainer is another one.
    """
    programs = ((at, it) for at, word in enumerate(words) for it in ORIGINS.values() if it.program.fullmatch(word))
    at, found = next(programs, (-1, None))
    if found is not origin:
        instead = next((OTHERS[name] for name in (PurePath(word).name for word in words) if name in OTHERS), "")
        reason = f"is none: {instead} does its work" if instead else "starts another program"
        reason = f"is one of {found.name}'s: ds-vit {found.command}" if found else reason
        start = " ".join(words[: max(at + 1, 3)]) or "an empty one"
        raise UserError(f"ds-vit {origin.command} takes a command of {origin.name}'s training, and {start} {reason}")
    launcher, rest = words[: at - 1 if words[at - 1 : at] == ["-m"] else at], words[at + 1 :]
    if words[at].endswith(".sh"):  # timm's distributed_train.sh: the number of ranks comes first
        return ["torchrun", "--nproc_per_node", *rest[:1], or_shipped("launch/train.py")], rest[1:]
    if [PurePath(word).name.rstrip("0123456789.") for word in launcher] in ([], ["python"]):
        return ["ds-vit", "train"], rest
    return [*launcher, or_shipped("launch/train.py")], rest
