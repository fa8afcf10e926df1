"""`ds-vit from-timm 'COMMAND'`: a command of timm's train.py as one of ds_vit's, and its DeepSpeed JSON.

Flags that ds_vit does not have are translated by the table of `timm_flags.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ds_vit.config.deepspeed_json import load_json, overlay
from ds_vit.config.parser import build_parser, from_values, or_shipped, read_words
from ds_vit.config.schema import FIELDS
from ds_vit.config.timm_flags import split_words, timm_answer
from ds_vit.fault_tolerance.errors import UserError

JSON_FILE = "deepspeed.json"
_BASE = "ds_configs/zero1_bf16_auto.json"
_REJECTED = "still rejected"
_OF_BF16 = ("bf16", "data_types", "communication_data_type")


@dataclass(frozen=True)
class Translation:
    """A translated command of timm's.

    Attributes:
        words: the command, its launcher included.
        json: the contents of `JSON_FILE`.
        notes: a line for each flag without an equivalent, and for each problem of the translated command.
    """

    words: tuple[str, ...]
    json: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def is_rejected(self) -> bool:
        """Whether the translated command is still invalid."""
        return any(note.startswith(_REJECTED) for note in self.notes)

    def __str__(self) -> str:
        """A script for the shell, the notes as comments."""
        notes = "".join(f"# {note}\n" for note in self.notes)
        text = json.dumps(self.json, indent=2)
        return f"{notes}cat > {JSON_FILE} <<'EOF'\n{text}\nEOF\n{shlex.join(self.words)}"


def translate(command: Sequence[str]) -> Translation:
    """Translate a command.

    Args:
        command: its words, or the whole of it as one.

    Raises:
        UserError: unbalanced quotes.
    """
    try:
        words = shlex.split(command[0]) if len(command) == 1 else list(command)
    except ValueError as error:
        raise UserError(f"{command[0]!r} is not a shell command: {error}") from None
    launcher, words = _split_launcher([word for word in words if word.strip()])
    given, stray = split_words(words, build_parser()._option_string_actions)
    if stray:
        given = {"data_dir": ("--data-dir", stray), **given}
    typed = {name: values for name, (_, values) in given.items()}
    # timm's defaults that differ from ds_vit's.
    defaults = {"opt": "sgd"} if "lr" in given else {"opt": "sgd", "lr_base": "0.1"}
    epochs = "".join(typed.get("epochs", ()))
    if epochs.isdecimal() and 5 < int(epochs) < 50:  # elsewhere the warm-up is timm's, or timm's takes the whole run
        defaults["warmup_epochs"] = "5"
    for name, value in defaults.items():
        given.setdefault(name, ("--" + name.replace("_", "-"), [value]))
    out: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    notes: list[str] = []
    for name, (flag, own) in given.items():
        answer = timm_answer(name, own, typed)
        if name in FIELDS or answer is None:
            if flag not in out or flag == "--model-kwargs":  # else an answer has taken it up, as --experiment --output
                out.setdefault(flag, []).extend(own)
            continue
        values |= answer.values
        if answer.words:
            out |= _by_flag(answer.words, out)
        elif not answer.values:
            notes.append(f"left out: {' '.join([flag, *own])}: {answer.note}")
    data = load_json(or_shipped(_BASE))
    del data["optimizer"]
    if not values.get("bf16.enabled"):
        data = {key: value for key, value in data.items() if key not in _OF_BF16}
    data = overlay(data, values, JSON_FILE)
    flags = [word for flag, own in out.items() for word in (flag, *own)]
    try:
        from_values(read_words(build_parser(), flags) | {"deepspeed_config": data})
    except UserError as error:
        notes += [f"{_REJECTED}: {problem}" for problem in error.problems]
    return Translation((*launcher, "--deepspeed_config", JSON_FILE, *flags), data, tuple(notes))


def _split_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher of ds_vit's training, and the words after timm's train.py."""
    at = next((at for at, word in enumerate(words) if PurePath(word).suffix in (".py", ".sh")), -1)
    launcher, rest = words[: at + 1], words[at + 1 :]
    if launcher and launcher[-1].endswith(".sh"):  # timm's distributed_train.sh: the number of ranks comes first
        return ["torchrun", "--nproc_per_node", *rest[:1], or_shipped("launch/train.py")], rest[1:]
    if [PurePath(word).name.rstrip("0123456789.") for word in launcher[:-1]] in ([], ["python"]):
        return ["ds-vit", "train"], rest
    return [*launcher[:-1], or_shipped("launch/train.py")], rest


def _by_flag(words: Sequence[str], out: dict[str, list[str]]) -> dict[str, list[str]]:
    """Flags with their words; --model-kwargs adds to the words in `out`."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            flags[flag] = list(out.get(flag, ())) if flag == "--model-kwargs" else []
        else:
            flags[flag].append(word)
    return flags
