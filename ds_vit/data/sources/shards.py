"""WebDataset shards on this machine's disks (`--dataset wds/…`), read at random through the indexes next to them."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from ds_vit.data.sources.captions import CaptionKeys, Captions
from ds_vit.data.sources.shard_index import open_indexes, state_of
from ds_vit.data.sources.source import (
    check_labels,
    class_name,
    hidden,
    in_natural_order,
    no_such_split,
    number_classes,
    synonyms_of,
)
from ds_vit.data.sources.tars import PackedSource
from ds_vit.fault_tolerance.errors import UserError, read_text

CLASSES_FILE = "classes.json"
"""The names of the classes in the order of their numbers, next to the shards."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_NUMBERED = re.compile(r"(.*?)(\d+)\.tar")


def open_shards(
    location: str, split: str, classes: Sequence[str] | None = None, captions: CaptionKeys | None = None
) -> ShardSource:
    """Open one split of WebDataset shards.

    Args:
        location: the folder of the shards, or the training split's shards themselves (`DIR/train-{000..127}.tar`).
        split: its name: `train` is `DIR/train-*.tar`, else `DIR/train/*.tar`, else `DIR/train.tar`. Or its shards
            (`val-{00..07}.tar`), from the folder.
        classes: the training split's, when this is the validation split.
        captions: as for `open_indexes`; the images then have captions and no classes.

    Raises:
        UserError: no such folder or split, a shard is missing, or what `ShardSource` refuses.
    """
    folder, of_training = os.path.split(location) if location.endswith(".tar") else (location, "")
    if split.endswith(".tar"):
        shards = _expanded(os.path.join(folder, split))
    elif of_training and "train" in synonyms_of(split):
        shards = _expanded(location)
    else:
        shards = _of_split(folder or ".", split)
    if captions is not None:
        return ShardSource(shards, captions=captions)
    return ShardSource(shards, _class_names(os.path.dirname(shards[0])), classes)


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
    shards = expand_braces(pattern)
    missing = [path for path in shards if not os.path.isfile(path)]
    if missing or not shards:
        first = f", the first is {missing[0]}" if missing else ""
        counted = f"{len(missing)} of {len(shards)} shards are missing{first}"
        raise UserError(f"{pattern}: {counted}; correct the range, or bring the shards")
    return shards


def _of_split(folder: str, split: str) -> list[str]:
    """The shards of a split by its name."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder of shards {folder}; give wds/FOLDER, or wds/FOLDER/train-{{000..127}}.tar")
    for name, form in itertools.product(synonyms_of(split), ("{}-*.tar", "{}/*.tar", "{}.tar")):
        if shards := in_natural_order(glob.glob(os.path.join(glob.escape(folder), form.format(name)))):
            _check_no_gap(shards)
            return shards
    raise no_such_split(folder, split, f"shards {split}-*.tar", _pattern_hint(folder))


def _pattern_hint(folder: str) -> str:
    """How to name numbered shards without a split in their name, as img2dataset writes them: `{00000..00127}.tar`."""
    tars = in_natural_order([name for name in os.listdir(folder) if name.endswith(".tar") and not hidden(name)])
    numbered = [found for name in tars if (found := _NUMBERED.fullmatch(name))]
    if not numbered or len({found[1] for found in numbered}) > 1:
        return ""
    pattern = f"{numbered[0][1]}{{{numbered[0][2]}..{numbered[-1][2]}}}.tar"
    return f"; name the shards, 'wds/{os.path.join(folder, pattern)}', with --val-split '' if all are for training"


def _check_no_gap(shards: Sequence[str]) -> None:
    """Refuse numbered shards of which one in the middle is missing."""
    numbered = [_NUMBERED.fullmatch(path) for path in shards]
    for before, after in itertools.pairwise(numbered):
        if before and after and before[1] == after[1] and int(after[2]) > int(before[2]) + 1:
            missing = f"{before[1]}{int(before[2]) + 1:0{len(before[2])}}.tar"
            named = f"{os.path.basename(before[1])}{{{before[2]}..{after[2]}}}.tar"
            raise UserError(f"{missing} is missing; bring it, or name the shards to use, such as {named}")


def _class_names(folder: str) -> list[str] | None:
    path = os.path.join(folder, CLASSES_FILE)
    if not os.path.exists(path):
        return None
    try:
        names = json.loads(read_text(path, ""))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON ({error})") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise UserError(f"{path} must be a list of class names that differ, in the order of their numbers")
    return names


class ShardSource(PackedSource):
    """Samples of WebDataset shards, numbered in the order of the shards.

    Args:
        shards: the tar files, in their order.
        names: the class names in the order of their numbers, where something says so. Without it, class numbers are
            their names, and class names are numbered in natural order.
        classes: the training split's, when this is the validation split: it need not have an example of each.
        captions: as for `open_indexes`.

    Raises:
        UserError: shards that are damaged, a sample without a caption, a label that is none of the classes.
    """

    def __init__(
        self,
        shards: Sequence[str],
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        captions: CaptionKeys | None = None,
    ) -> None:
        indexes = open_indexes(shards, captions)
        super().__init__(
            shards,
            np.repeat(np.arange(len(shards), dtype=np.int32), [len(index.paths) for index in indexes]),
            np.concatenate([index.paths for index in indexes]),
            np.concatenate([index.offsets for index in indexes]),
            np.concatenate([index.sizes for index in indexes]),
        )
        self.left_out = dict(sum((Counter(index.left_out) for index in indexes), Counter()))
        self._states = [index.state for index in indexes]
        if texts := [index.captions for index in indexes if index.captions is not None]:
            self.set_captions(Captions.joined(texts))
            return
        labels = [index.labels for index in indexes]
        if any(part.dtype.kind == "S" for part in labels):
            labels = [part.astype(np.bytes_) for part in labels]
        whole = np.concatenate(labels)
        if whole.dtype.kind == "S" and len(bare := np.flatnonzero(whole == b"")):
            counted = f"{len(bare)} of {len(whole)} samples have no label, the first is {self.describe(bare[0])}"
            self.drop_classes(len(whole), f'{counted}; give each a .cls file, or a .json file with "label"')
            return
        self.class_names, self._targets = self._number(whole, names if names is not None else classes)

    def _number(self, labels: np.ndarray, known: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
        """Class names, and each sample's number among them."""
        if labels.dtype.kind == "S":
            found, place = np.unique(labels, return_inverse=True)
            found_names = [class_name(os.fsdecode(name)) for name in found]
            known = known if known is not None else number_classes(found_names)[0]
            number_of = {class_name(name): number for number, name in enumerate(known)}
            numbers = np.array([number_of.get(name, -1) for name in found_names], dtype=np.int64)[place]
        else:
            numbers = labels
            known = known if known is not None else [str(number) for number in range(int(labels.max()) + 1)]
        check_labels(self, labels, (numbers >= 0) & (numbers < len(known)), known)
        return tuple(known), numbers

    def open_tar(self, number: int) -> BinaryIO:
        file = super().open_tar(number)
        if state_of(file) != self._states[number]:
            raise UserError(f"{self._tars[number]} has changed since its index was read; start again")
        return file
