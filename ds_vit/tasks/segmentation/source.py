"""Images with masks: in folders, and in the rows of Hugging Face data sets.

    DIR/train/images/a.jpg  DIR/train/masks/a.png      or      DIR/images/train/a.jpg  DIR/masks/train/a.png
    DIR/labels.csv

An image and its mask have the same path below the two folders, without the extension. The classes are those of
labels.csv, else the values 0 to N - 1 of --num-classes N.
"""

from __future__ import annotations

import copy
import io
import os
import posixpath
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ds_vit.config import RunConfig
from ds_vit.data.masks import MASK_EXTENSIONS, MOST_CLASSES, MaskValues, decode_mask, size_of_mask
from ds_vit.data.sources.combined import first_part, part_of
from ds_vit.data.sources.folders import FileSource, read_table, require_utf8, walk
from ds_vit.data.sources.hugging_face import HuggingFaceSource, open_hugging_face
from ds_vit.data.sources.source import (
    LABELS_FILE,
    ArraySource,
    Source,
    described_counts,
    hidden,
    images_among,
    in_natural_order,
    no_such_split,
    shortened,
    suffix_counts,
    synonyms_of,
)
from ds_vit.fault_tolerance.errors import UserError, did_you_mean
from ds_vit.tasks.segmentation.scenes import open_scenes

IMAGES, MASKS = "images", "masks"
_LAYOUTS = "DIR/train/images and DIR/train/masks, or DIR/images/train and DIR/masks/train (and val for train)"
_COLUMNS = ("mask", "annotation", "label", "segmentation", "seg_map")
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_FORMS = ("hfds/", "parquet/")


# ---- classes ---------------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """The classes of masks.

    Attributes:
        names: in the order of their numbers.
        values: which values of the files are which class.
        colours: of the classes, uint8 [C, 3]; None where nothing says.
    """

    names: tuple[str, ...]
    values: MaskValues
    colours: np.ndarray | None = None


def find_labels(
    folder: str, num_classes: int | None, *, ignore_index: int = 255, reduce_zero_label: bool = False
) -> Labels:
    """The classes of a folder: those of its labels.csv, else --num-classes.

    Raises:
        UserError: neither says what the classes are, a malformed table, or a class that a flag leaves out.
    """
    path = os.path.join(folder, LABELS_FILE)
    colours, first = None, int(reduce_zero_label)
    if os.path.isfile(path):
        rows = _read_labels(path)
        where, way_out = path, f"; list the value in {path}, or pass --ignore-index VALUE"
        values, names = [value for value, _, _ in rows], [name for _, name, _ in rows]
        if rows[0][2]:
            colours = np.array([list(bytes.fromhex(colour[1:])) for _, _, colour in rows], dtype=np.uint8)
    elif num_classes is not None:
        where, way_out = f"--num-classes {num_classes}", "; raise --num-classes, or pass --ignore-index VALUE"
        values = [*range(first, first + num_classes)]
        names = [f"class {number}" for number in range(num_classes)]
    else:
        raise UserError(
            f"{folder} has no {LABELS_FILE}, so that nothing says what the classes are: write one (a header "
            "index,name, then a row per class: the pixel value and the name), or pass --num-classes N for the pixel "
            f"values {first} to {'N' if first else 'N - 1'}"
        )
    if len(names) > MOST_CLASSES:
        raise UserError(f"{where}: {len(names):,} classes; masks have at most {MOST_CLASSES:,}")
    if reduce_zero_label and 0 in values:
        raise UserError(f"{where} lists the index 0, which --reduce-zero-label leaves out; remove one of the two")
    if ignore_index in values:
        way = "pass --ignore-index -1 if every value counts, or the value that does not"
        raise UserError(f"{where} has the class {ignore_index}, which --ignore-index {ignore_index} leaves out; {way}")
    ignored = [*([0] if reduce_zero_label else []), *([ignore_index] if ignore_index >= 0 else [])]
    return Labels(tuple(names), MaskValues(values, ignored, way_out), colours)


def _read_labels(path: str) -> list[tuple[int, str, str]]:
    """(value, name, colour or "") of the classes in a labels.csv."""
    table = read_table(path, ",")
    where, header = next(table, (f"{path}, line 1", []))
    header = [cell.strip() for cell in header]
    if header not in (["index", "name"], ["index", "name", "colour"]):
        raise UserError(f"{where}: the header must be 'index,name' or 'index,name,colour', not {','.join(header)!r}")
    rows: list[tuple[int, str, str]] = []
    for where, cells in table:
        index, name, colour = (require_utf8(cell, where).strip() for cell in (*cells, "")[:3])
        if not re.fullmatch(r"-?[0-9]{1,9}", index):
            raise UserError(f"{where}: the index {index!r} is no whole number; it is the value of the class in masks")
        if not name or (colour and not _COLOUR.fullmatch(colour)):
            raise UserError(f"{where}: " + (f"the colour {colour!r} is not #rrggbb" if name else "a class has no name"))
        if known := [row for row in rows if row[0] == int(index) or row[1] == name]:
            raise UserError(f"{where}: {index},{name} has the index or the name of {known[0][0]},{known[0][1]}")
        if rows and bool(rows[0][2]) != bool(colour):
            raise UserError(f"{where}: some classes have a colour and some have none; give each one, or none")
        rows.append((int(index), name, colour))
    if not rows:
        raise UserError(f"{path} lists no classes")
    return rows


# ---- pairs of files --------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Images and masks of two folders, by their paths there.

    Attributes:
        images: that have a mask, in natural order.
        masks: of these images.
        no_mask: images without one.
        no_image: masks without one.
        others: the other files.
    """

    images: list[str]
    masks: list[str]
    no_mask: list[str]
    no_image: list[str]
    others: list[str]


def find_splits(folder: str) -> dict[str, tuple[str, str]]:
    """The folders of images and of masks of each split, by its name, in either layout."""

    def inside(*names: str) -> list[str]:
        path = os.path.join(folder, *names)
        return sorted(name for name in os.listdir(path) if not hidden(name)) if os.path.isdir(path) else []

    found = {name: (os.path.join(folder, IMAGES, name), os.path.join(folder, MASKS, name)) for name in inside(IMAGES)}
    found |= {name: (os.path.join(folder, name, IMAGES), os.path.join(folder, name, MASKS)) for name in inside()}
    return {name: both for name, both in found.items() if all(map(os.path.isdir, both))}


def pair_files(images: str, masks: str) -> Pairs:
    """Pair the images below one folder with the masks below another.

    Raises:
        UserError: there are no images or no masks, or two of them share a stem.
    """
    image_paths, mask_paths = walk(images), walk(masks)
    image_of = _by_stem(images_among(image_paths, images), images, "image")
    files = [path for path in mask_paths if posixpath.splitext(path)[1].lower() in MASK_EXTENSIONS and not hidden(path)]
    mask_of = _by_stem(in_natural_order(files), masks, "mask")
    if not mask_of:
        found = f"files found: {described_counts(suffix_counts(mask_paths))}; supported are {' '.join(MASK_EXTENSIONS)}"
        raise UserError(f"{masks} holds no masks ({found})")
    both = [stem for stem in image_of if stem in mask_of]
    return Pairs(
        [image_of[stem] for stem in both],
        [mask_of[stem] for stem in both],
        [path for stem, path in image_of.items() if stem not in mask_of],
        [path for stem, path in mask_of.items() if stem not in image_of],
        [*{*image_paths}.difference(image_of.values()), *{*mask_paths}.difference(files)],
    )


def _by_stem(paths: Iterable[str], root: str, what: str) -> dict[str, str]:
    """Path without extension → path."""
    found: dict[str, str] = {}
    for path in paths:
        if (other := found.setdefault(posixpath.splitext(path)[0], path)) != path:
            why = f"an {IMAGES[:-1]} and its mask share their path without extension"
            raise UserError(f"{root}: {other} and {path} would be one {what}, because {why}; rename or remove one")
    return found


# ---- sources ---------------------------------------------------------------------------------------------------------


class MaskSource(ArraySource):
    """Images with masks. Their entries are "image", "mask" (classes, int16 [H, W], -1 where ignored), "mask_size" (its
    header's (H, W)), "values" (of the classes in files, int64 [C]) and, where the labels have them, "colours".

    A target is the multi-hot vector of the classes in the mask, which is decoded for it.
    """

    multi_label = True
    labels: Labels

    def set_labels(self, labels: Labels) -> None:
        """Take the classes."""
        self.labels, self.class_names = labels, labels.names
        self.entries = ("image", "mask", "mask_size", "values", *(("colours",) if labels.colours is not None else ()))

    @abstractmethod
    def open_mask(self, index: int) -> BinaryIO:
        """The file of a sample's mask."""

    @abstractmethod
    def describe_mask(self, index: int) -> str:
        """Where the mask comes from, for messages."""

    def entry(self, name: str, index: int) -> Any:
        """As `Source.entry`."""
        if name in ("values", "colours") and name in self.entries:
            return self.labels.values.values if name == "values" else self.labels.colours
        if name not in ("mask", "mask_size"):
            return super().entry(name, index)
        where = self.describe_mask(index)
        with self.open_mask(index) as file:
            if name == "mask_size":
                return size_of_mask(file, where)
            data = file.read()
        return self.labels.values.classes(decode_mask(data, where), where)

    def target(self, index: int) -> np.ndarray:
        """As `Source.target`, except that the mask is decoded."""
        mask = self.entry("mask", index)
        return (np.bincount(mask[mask >= 0], minlength=self.num_classes) > 0).astype(np.float32)

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`: the names of the files and the classes; no mask is read."""
        names = np.array([name.encode() for name in self.class_names], dtype=np.bytes_)
        return *super().identity(), names, self.labels.values.values, self.labels.values.ignored


class MaskFolders(MaskSource, FileSource):
    """Images below one folder and masks below another.

    Args:
        images: the folder of the images.
        masks: the folder of the masks.
        labels: the classes.

    Raises:
        UserError: what `pair_files` refuses, or a file without its partner.
    """

    def __init__(self, images: str, masks: str, labels: Labels) -> None:
        pairs = pair_files(images, masks)
        if problem := unpaired(images, masks, pairs):
            raise UserError(problem)
        super().__init__(images, pairs.images, np.zeros(len(pairs.images), dtype=np.int64))
        self._mask_root = masks
        self._masks = np.array([os.fsencode(path) for path in pairs.masks], dtype=np.bytes_)
        self.left_out = dict(suffix_counts(pairs.others))
        self.set_labels(labels)

    def describe_mask(self, index: int) -> str:
        """As `MaskSource.describe_mask`: its path."""
        return os.path.join(self._mask_root, os.fsdecode(self._masks[index]))

    def open_mask(self, index: int) -> BinaryIO:
        """As `MaskSource.open_mask`."""
        return open(self.describe_mask(index), "rb")

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`."""
        return *super().identity(), self._masks


def unpaired(images: str, masks: str, pairs: Pairs) -> str:
    """What is wrong with the pairs of two folders; "" if nothing."""
    sides = ((pairs.no_mask, images, masks, "mask"), (pairs.no_image, masks, images, "image"))
    found = [
        f"{len(alone)} of {len(alone) + len(pairs.masks)} files in {here} have no {what} in {there}: {shortened(alone)}"
        for alone, here, there, what in sides
        if alone
    ]
    rule = f"an image and its mask ({' '.join(MASK_EXTENSIONS)}) have the same path without extension"
    return f"{'; '.join(found)}; {rule}: add what is missing, or remove the other" if found else ""


class MaskTable(MaskSource, HuggingFaceSource):
    """Rows of Arrow or parquet files with a column of images and one of masks.

    Args:
        labels: the classes.
        files: as for `HuggingFaceSource`.

    Raises:
        UserError: as `HuggingFaceSource`, or no column of masks.
    """

    def __init__(self, labels: Labels, files: Sequence[str]) -> None:
        super().__init__(files)
        self.set_labels(labels)

    def _read_classes(self, classes: Sequence[str] | None) -> None:
        import pyarrow as pa

        table = self._tables[0]
        types = {name: table.data.schema.field(name).type for name in _COLUMNS if name in table.column_names}
        named = [
            name
            for name, kind in types.items()
            if name != self._image and (pa.types.is_struct(kind) or pa.types.is_binary(kind))
        ]
        if not named:
            has = f"it has {', '.join(table.column_names)}: rename_column and save it again"
            raise UserError(f"{self._files[0]} has no Image column of masks named {', '.join(_COLUMNS)}; {has}")
        self._targets = np.zeros(len(self), dtype=np.int64)
        self._mask_rows = copy.copy(self)
        self._mask_rows._image = named[0]

    def describe_mask(self, index: int) -> str:
        """As `MaskSource.describe_mask`: the row and the column."""
        return f"{self.describe(index)}, {self._mask_rows._image}"

    def open_mask(self, index: int) -> BinaryIO:
        """As `MaskSource.open_mask`."""
        return io.BytesIO(self._mask_rows.encoded(index))


# ---- by the flags ----------------------------------------------------------------------------------------------------


def open_segmentation(config: RunConfig, folder: str, split: str) -> Source:
    """A split of --dataset and --data-dir, as `Task.open_source`.

    Args:
        config: the flags.
        folder: a --data-dir; "" for none.
        split: its name; `train[:10%]` is a part of it.

    Raises:
        NoSuchSplit: there is no such split.
        UserError: no data, data without masks, or masks without their images.
    """
    split, percent = part_of(split)
    dataset = config.dataset
    if not dataset and folder.startswith(_FORMS) and not os.path.exists(folder):
        dataset, folder = folder, ""
    labels = partial(
        find_labels,
        num_classes=config.num_classes,
        ignore_index=config.ignore_index,
        reduce_zero_label=config.reduce_zero_label,
    )
    if dataset == "scenes":
        source: Source = open_scenes(split)
    elif dataset.startswith(_FORMS):
        folder = os.path.join(folder, dataset.partition("/")[2])
        source = open_hugging_face(folder, split, make=partial(MaskTable, labels(folder)))
    elif dataset:
        known = ["scenes", *(f"{form}PATH" for form in _FORMS)]
        near = did_you_mean(dataset, known)
        raise UserError(
            f"--dataset {dataset} has no masks{near}; --task segmentation takes {', '.join(known)}, or --data-dir "
            f"DIR without it: {_LAYOUTS}"
        )
    elif not folder:
        raise UserError(f"no data: pass --data-dir DIR: {_LAYOUTS}")
    else:
        images, masks = _folders_of(folder, split)
        source = MaskFolders(images, masks, labels(folder))
    return source if percent == 100 else first_part(source, percent)


def _folders_of(folder: str, split: str) -> tuple[str, str]:
    """The folders of images and of masks of a split."""
    if not os.path.isdir(folder):
        raise UserError(f"--data-dir {folder} is no folder")
    splits = find_splits(folder)
    for name in synonyms_of(split):
        if name in splits:
            return splits[name]
    raise no_such_split(folder, split, f"{split}/{IMAGES} with {split}/{MASKS}", f". The layouts are {_LAYOUTS}")
