"""Images with masks: in folders, and in the rows of Hugging Face data sets.

    DIR/train/images/a.jpg  DIR/train/masks/a.png      or      DIR/images/train/a.jpg  DIR/masks/train/a.png
    DIR/labels.csv

An image and its mask have the same path below the two folders, without the extension. The classes are those of
labels.csv, else the values 0 to N - 1 of --num-classes N.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_vit.config import RunConfig
from ds_vit.data.masks import (
    MASK_EXTENSIONS,
    MOST_CLASSES,
    MOST_VALUE,
    MaskValues,
    decode_mask,
    default_palette,
    pixels_of_classes,
    size_of_mask,
)
from ds_vit.data.sources.combined import Subset, first_part, part_of
from ds_vit.data.sources.folders import FileSource, read_table, require_utf8, walk
from ds_vit.data.sources.hugging_face import open_hugging_face
from ds_vit.data.sources.source import (
    LABELS_FILE,
    Source,
    hidden,
    images_among,
    in_natural_order,
    no_such_split,
    shortened,
    synonyms_of,
)
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.segmentation.scenes import open_scenes

_LAYOUTS = "DIR/train/images and DIR/train/masks, or DIR/images/train and DIR/masks/train (and val for train)"
_COLUMNS = ("mask", "annotation", "label", "segmentation", "seg_map")
_FORMS = ("hfds/", "parquet/")
_CLASS = re.compile(r"[0-9]{1,5},(#[0-9a-fA-F]{6})?")


# ---- classes ---------------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """The names of the classes in the order of their numbers, which values of files they are, and their colours, uint8
    [C, 3]: those of the table, else of the values in `default_palette`."""

    names: tuple[str, ...]
    values: MaskValues
    colours: np.ndarray


def find_labels(folder: str, num_classes: int | None, ignore_index: int, reduce_zero_label: bool) -> Labels:
    """The classes of a folder: those of its labels.csv, else of --num-classes.

    Args:
        folder: of the data.
        num_classes: of the flag.
        ignore_index: of the flag; -1 for no value.
        reduce_zero_label: whether 0 is no class either.

    Raises:
        UserError: neither says what the classes are, a malformed table, or a class that a flag leaves out.
    """
    path, first = os.path.join(folder, LABELS_FILE), int(reduce_zero_label)
    colours: list[str] = []
    way_out = "or pass --ignore-index VALUE"
    if os.path.isfile(path):
        values, names, colours = _read_labels(path)
        rule = f"the {len(names)} classes are those of {path}: list the value there, {way_out}"
        if num_classes not in (None, len(names)):
            raise UserError(f"--num-classes {num_classes}: {path} has {len(names)} classes; drop the flag")
    elif num_classes is not None:
        values = [*range(first, first + num_classes)]
        names = [f"class {number}" for number in range(num_classes)]
        rule = f"--num-classes {num_classes} stands for {first} to {values[-1]}: raise it, {way_out}"
    else:
        raise UserError(
            f"{folder} has no {LABELS_FILE}, so that nothing says what the classes are: write one (a header "
            "index,name, then a row per class: the pixel value and the name), or pass --num-classes N for the pixel "
            f"values {first} to {'N' if first else 'N - 1'}"
        )
    ignored = {ignore_index: f"--ignore-index {ignore_index}"} | ({0: "--reduce-zero-label"} if first else {})
    for value in ignored.keys() & {*values}:
        way_out = "drop the flag, remove the class, or pass --ignore-index -1 if each value counts"
        raise UserError(f"{folder}: the value {value} is a class, which {ignored[value]} leaves out; {way_out}")
    if len(names) > MOST_CLASSES:
        raise UserError(f"{folder}: masks have at most {MOST_CLASSES:,} classes, not {len(names):,}")
    palette = default_palette(max(values) + 1)[values]
    if colours and all(colours):
        palette = np.array([[*bytes.fromhex(colour)] for colour in colours], dtype=np.uint8)
    return Labels(tuple(names), MaskValues(values, ignored, rule), palette)


def _read_labels(path: str) -> tuple[list[int], list[str], list[str]]:
    """The values, names and colours (rrggbb, or "") of a labels.csv."""
    (_, header), *rows = [*read_table(path, ",")] or [("", [""])]
    found: dict[str, tuple[int, str]] = {}
    if [cell.strip() for cell in header] not in (["index", "name"], ["index", "name", "colour"]) or not rows:
        raise UserError(f"{path} must have the header 'index,name' or 'index,name,colour', then a row per class")
    for where, cells in rows:
        index, name, colour = (*(require_utf8(cell, where).strip() for cell in cells), "")[:3]
        if not _CLASS.fullmatch(f"{index},{colour}") or int(index) > MOST_VALUE or not name:
            row = f"the pixel value (0 to {MOST_VALUE}), the name, and in a column colour #rrggbb"
            raise UserError(f"{where}: a class has {row}, not {','.join(cells)!r}")
        if name in found or int(index) in (value for value, _ in found.values()):
            raise UserError(f"{where}: another row has the index {index} or the name {name}")
        found[name] = int(index), colour[1:]
    return [value for value, _ in found.values()], [*found], [colour for _, colour in found.values()]


# ---- pairs of files --------------------------------------------------------------------------------------------------


def find_splits(folder: str) -> dict[str, tuple[str, str]]:
    """The folders of images and of masks of each split, by its name, in either layout."""
    found = {}
    for form in ("{name}/{kind}", "{kind}/{name}"):
        for path in sorted(Path(folder).glob(form.format(name="*", kind="images"))):
            name = path.parts[-2 if form.endswith("{kind}") else -1]
            masks = os.path.join(folder, form.format(name=name, kind="masks"))
            if not hidden(name) and os.path.isdir(path) and os.path.isdir(masks):
                found[name] = (str(path), masks)
    return found


def pair_files(images: str, masks: str) -> tuple[list[str], list[str], str]:
    """Pair the images below one folder with the masks below another.

    Returns:
        The images with masks in natural order, their masks, and what is wrong with the files without a partner ("" if
        there are none).

    Raises:
        UserError: there are no images, or two of them or of the masks have one path without extension.
    """
    kept = [path for path in walk(masks) if posixpath.splitext(path)[1].lower() in MASK_EXTENSIONS and not hidden(path)]
    sides: list[dict[str, str]] = []
    for root, paths in ((images, images_among(walk(images), images)), (masks, in_natural_order(kept))):
        sides.append({})
        for path in paths:
            if (other := sides[-1].setdefault(posixpath.splitext(path)[0], path)) != path:
                why = "have one path without extension, by which images and masks are paired"
                raise UserError(f"{root}: {other} and {path} {why}; rename or remove one")
    image_of, mask_of = sides
    problems = []
    for own, here, other_side, there in ((image_of, images, mask_of, masks), (mask_of, masks, image_of, images)):
        if rest := [path for stem, path in own.items() if stem not in other_side]:
            problems.append(f"{len(rest)} of {len(own)} files of {here} have no partner in {there}: {shortened(rest)}")
    if problems:
        rule = f"an image and its mask ({' '.join(MASK_EXTENSIONS)}) have the same path without extension"
        problems.append(f"{rule}: add what is missing, or remove the other")
    both = [stem for stem in image_of if stem in mask_of]
    return [image_of[stem] for stem in both], [mask_of[stem] for stem in both], "; ".join(problems)


# ---- sources ---------------------------------------------------------------------------------------------------------


class MaskSource(Subset):
    """Images with masks. Their entries are "image", "mask" (classes, int16 [H, W], -1 where ignored), "mask_size" (its
    header's (H, W)), and of the classes "values" (in files, int64 [C]) and "colours".

    A target is the multi-hot vector of the classes in the mask, which is decoded for it.

    Args:
        images: of all samples.
        masks: the files of their masks, in the same order.
        labels: the classes.
    """

    def __init__(self, images: Source, masks: Source, labels: Labels) -> None:
        super().__init__(images, np.arange(len(images)))
        self.class_names, self._values, self._colours = labels
        self.multi_label, self._masks = True, masks
        self.entries = ("image", "mask", "mask_size", "values", "colours")

    def entry(self, name: str, index: int) -> Any:
        """As `Source.entry`."""
        if name in ("values", "colours"):
            return self._values.values if name == "values" else self._colours
        if name not in ("mask", "mask_size"):
            return super().entry(name, index)
        where = self._masks.describe(index)
        with open(where, "rb") if os.path.isfile(where) else io.BytesIO(self._masks.encoded(index) or b"") as file:
            if name == "mask_size":
                return size_of_mask(file, where)
            return self._values.classes(decode_mask(file.read(), where), where)

    def target(self, index: int) -> np.ndarray:
        """As `Source.target`, except that the mask is decoded."""
        return (pixels_of_classes(self.entry("mask", index), self.num_classes) > 0).astype(np.float32)

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`: the names of the files and the classes; no mask is read."""
        names = np.array([name.encode() for name in self.class_names], dtype=np.bytes_)
        return *super().identity(), names, self._values.table


def open_pairs(images: str, masks: str, labels: Labels) -> MaskSource:
    """The images below one folder with the masks below another.

    Raises:
        UserError: what `pair_files` refuses, or a file without a partner.
    """
    *paths, problem = pair_files(images, masks)
    if problem:
        raise UserError(problem)
    of_images, of_masks = (
        FileSource(root, of, np.zeros(len(of), dtype=np.int64)) for root, of in zip((images, masks), paths, strict=True)
    )
    return MaskSource(of_images, of_masks, labels)


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
    dataset, flags = config.dataset, (config.num_classes, config.ignore_index, config.reduce_zero_label)
    if not dataset and folder.startswith(_FORMS) and not os.path.exists(folder):
        dataset, folder = folder, ""
    source: Source
    if dataset == "scenes":
        source = open_scenes(split)
    elif dataset.startswith(_FORMS):
        folder = os.path.join(folder, dataset.partition("/")[2])
        rows = open_hugging_face(folder, split)
        source = MaskSource(rows, rows.of_column(_COLUMNS), find_labels(folder, *flags))
    elif dataset or not folder:
        what = f"--dataset {dataset} has no masks" if dataset else "no data"
        raise UserError(f"{what}: pass --dataset scenes, hfds/PATH or parquet/PATH, or --data-dir DIR with {_LAYOUTS}")
    else:
        source = open_pairs(*_folders_of(folder, split), find_labels(folder, *flags))
    return source if percent == 100 else first_part(source, percent)


def _folders_of(folder: str, split: str) -> tuple[str, str]:
    """The folders of images and of masks of a split."""
    if not os.path.isdir(folder):
        raise UserError(f"--data-dir {folder} is no folder")
    splits = find_splits(folder)
    for name in synonyms_of(split):
        if name in splits:
            return splits[name]
    raise no_such_split(folder, split, f"{split}/images with {split}/masks", f". The layouts are {_LAYOUTS}")
