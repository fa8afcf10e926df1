"""WebDataset shards on this machine's disks (`--dataset wds/…`), read at random through the indexes beside them."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from timm.utils.misc import natural_key

from ds_vit.data.sources.folders import NoSuchSplit, synonyms_of
from ds_vit.data.sources.listing import number_classes
from ds_vit.data.sources.shard_index import open_indexes, state_of
from ds_vit.data.sources.source import Source, below_common_folder
from ds_vit.fault_tolerance.errors import UserError, read_text

CLASSES_FILE = "classes.json"
"""The names of the classes in the order of their numbers, beside the shards."""

PLAN_FILE = "{}.shards.json"
"""What `ds-vit shards` makes of a split: how many shards, of what."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_NUMBERED = re.compile(r"(.*?)(\d+)\.tar")

_MOST_OPEN = 256  # files; a process may have 1,024 on most systems


def open_shards(location: str, split: str, classes: Sequence[str] | None = None) -> ShardSource:
    """Open one split of WebDataset shards.

    Args:
        location: the folder of the shards, or the training split's shards themselves (`DIR/train-{000..127}.tar`).
        split: its name: `train` is `DIR/train-*.tar`, else `DIR/train/*.tar`, else `DIR/train.tar`. Or its shards
            (`val-{00..07}.tar`), from the folder.
        classes: the training split's, when this is the validation split.

    Raises:
        UserError: no such folder or split, a shard is missing, or what `ShardSource` refuses.
    """
    folder, of_training = os.path.split(location) if location.endswith(".tar") else (location, "")
    names = synonyms_of(split)
    if split.endswith(".tar"):
        shards = _expanded(os.path.join(folder, split))
    elif of_training and "train" in names:
        shards = _expanded(location)
    else:
        shards = _of_split(folder or ".", names)
    return ShardSource(shards, _class_names(os.path.dirname(shards[0])), classes)


def shard_name(split: str, number: int) -> str:
    """The shard's name as `ds-vit shards` gives it, counted from 0."""
    return f"{split}-{number:06}.tar"


def expand_braces(pattern: str) -> list[str]:
    """What a shell makes of braces: `a-{08..10}.tar` is `a-08.tar a-09.tar a-10.tar`, and `{a,b}` is `a b`."""
    pieces = []
    for number, piece in enumerate(_BRACES.split(pattern)):
        numbers = _RANGE.fullmatch(piece) if number % 2 else None
        if numbers:
            first, last = numbers.groups()
            pieces.append([f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)])
        else:
            pieces.append(piece.split(",") if number % 2 else [piece])
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _expanded(pattern: str) -> list[str]:
    """The shards of a pattern, all of which must be there."""
    named = expand_braces(pattern)
    missing = [path for path in named if not os.path.isfile(path)]
    if missing or not named:
        raise UserError(
            f"{pattern}: {len(missing)} of {len(named)} shards are missing"
            + (f", the first is {missing[0]}" if missing else "")
            + "; correct the range, or bring the shards"
        )
    return named


def _of_split(folder: str, names: Sequence[str]) -> list[str]:
    """The shards of a split by its name: those that were planned, else those that are there."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder of shards {folder}; give wds/FOLDER, or wds/FOLDER/train-{{000..127}}.tar")
    for name in names:
        if os.path.isfile(plan := os.path.join(folder, PLAN_FILE.format(name))):
            return _planned(folder, name, plan)
    for name, form in itertools.product(names, ("{}-*.tar", "{}/*.tar", "{}.tar")):
        if shards := sorted(glob.glob(os.path.join(glob.escape(folder), form.format(name))), key=natural_key):
            _check_no_gap(shards)
            return shards
    found = sorted(name for name in os.listdir(folder) if name.endswith(".tar"))
    raise NoSuchSplit(
        f"{folder} has no shards {names[0]}-*.tar (synonyms tried: {', '.join(names[1:]) or 'none'}); it holds "
        + (", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "no .tar files")
    )


def _planned(folder: str, name: str, plan: str) -> list[str]:
    shards = [os.path.join(folder, shard_name(name, number)) for number in range(_json(plan)["shards"])]
    missing = [path for path in shards if not os.path.isfile(path)]
    if missing:
        raise UserError(
            f"{plan} tells of {len(shards)} shards, and {len(missing)} are missing, the first is {missing[0]}; start "
            "the same ds-vit shards again to make them, or bring them"
        )
    return shards


def _check_no_gap(shards: Sequence[str]) -> None:
    """Refuse numbered shards of which one in the middle is missing."""
    numbered = [_NUMBERED.fullmatch(path) for path in shards]
    for before, after in itertools.pairwise(numbered):
        if before and after and before[1] == after[1] and int(after[2]) > int(before[2]) + 1:
            missing = f"{before[1]}{int(before[2]) + 1:0{len(before[2])}}.tar"
            raise UserError(
                f"{missing} is missing between {before[0]} and {after[0]}; bring it, or name the shards that there are "
                f"to be: {os.path.basename(before[1])}{{{before[2]}..{after[2]}}}.tar"
            )


def _class_names(folder: str) -> list[str] | None:
    path = os.path.join(folder, CLASSES_FILE)
    if not os.path.exists(path):
        return None
    names = _json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise UserError(f"{path} must be a list of class names that differ, in the order of their numbers")
    return names


def _json(path: str) -> Any:
    try:
        return json.loads(read_text(path, ""))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON ({error})") from None


class ShardSource(Source):
    """Samples of WebDataset shards, numbered as they stand in them.

    An image is one positioned read, so that forked workers may share the open files.

    Args:
        shards: the tar files, in their order.
        names: the class names in the order of their numbers, where something says so. Without it, class numbers are
            their own names, and class names are numbered in natural order.
        classes: the training split's, when this is the validation split: it need not have an example of each.

    Raises:
        UserError: shards that are damaged, a sample without a label, a label that is none of the classes.
    """

    def __init__(
        self, shards: Sequence[str], names: Sequence[str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        indexes = open_indexes(shards)
        self._shards = tuple(shards)
        self._shard_of = np.repeat(np.arange(len(shards), dtype=np.int32), [len(index.paths) for index in indexes])
        self._paths = np.concatenate([index.paths for index in indexes])
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._sizes = np.concatenate([index.sizes for index in indexes])
        kinds = {suffix for index in indexes for suffix in index.left_out}
        self.left_out = {suffix: sum(index.left_out.get(suffix, 0) for index in indexes) for suffix in kinds}
        labels = [index.labels for index in indexes]
        if any(part.dtype.kind == "S" for part in labels):
            labels = [part.astype(np.bytes_) for part in labels]
        self.class_names, self._targets = self._numbered(np.concatenate(labels), names, classes)
        self._states = [index.state for index in indexes]
        self._open: dict[int, BinaryIO] = {}

    def _numbered(
        self, labels: np.ndarray, names: Sequence[str] | None, classes: Sequence[str] | None
    ) -> tuple[tuple[str, ...], np.ndarray]:
        """Class names, and each sample's number among them."""
        by_name = labels.dtype.kind == "S"
        known = names if names is not None else classes
        if not by_name:
            numbers = labels
            known = known if known is not None else [str(number) for number in range(int(labels.max()) + 1)]
            wrong = (numbers < 0) | (numbers >= len(known))
        else:
            found, place = np.unique(labels, return_inverse=True)
            found_names = [name.decode() for name in found]
            known = known if known is not None else number_classes(found_names)[0]
            number_of = {name: number for number, name in enumerate(known)}
            numbers = np.array([number_of.get(name, -1) for name in found_names], dtype=np.int64)[place]
            wrong = numbers < 0
        if wrong.any():
            first = int(wrong.argmax())
            label = labels[first].decode() if by_name else int(labels[first])
            raise UserError(
                f"{self.describe(first)} has the label {label!r}, and the {len(known)} classes "
                + (
                    f"({', '.join(known[:3])}, ...) have no such name"
                    if by_name
                    else f"have the numbers 0 to {len(known) - 1}"
                )
                + f"; {int(wrong.sum())} of {len(labels)} samples are like it"
            )
        return tuple(known), numbers

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        number = int(self._shard_of[index])
        if number not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            file = open(self._shards[number], "rb", buffering=0)  # noqa: SIM115 - kept for later samples
            if state_of(file) != self._states[number]:
                raise UserError(f"{self._shards[number]} has changed since its index was read; start again")
            self._open[number] = file
        return os.pread(self._open[number].fileno(), int(self._sizes[index]), int(self._offsets[index]))

    def target(self, index: int) -> int:
        return int(self._targets[index])

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return below_common_folder(self._paths), self._targets

    def describe(self, index: int) -> str:
        return f"{self._shards[self._shard_of[index]]}:{os.fsdecode(self._paths[index])}"
