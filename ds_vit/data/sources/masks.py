"""Images with masks: in folders, in the rows of Hugging Face data sets, and in shards.

    DIR/train/images/a.jpg  DIR/train/masks/a.png      or      DIR/images/train/a.jpg  DIR/masks/train/a.png
    DIR/labels.csv

An image and its mask have the same path below the two folders, without the extension. A mask has one whole number per
pixel. The classes are those of labels.csv, else the values 0 to N - 1 of --num-classes N. `Labels` turns the
values into classes, 0 to C - 1, and `IGNORED`.

Shapes: H x W a file's pixels, C classes.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from PIL import Image

from ds_vit.data.augment.steps import Size
from ds_vit.data.decode import ImageDecodeError, readable
from ds_vit.data.sources import listing
from ds_vit.data.sources.combined import Subset
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.folders import FileSource, read_table, require_utf8, walk
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, enumerate_some

_LAYOUTS = "DIR/train/images and DIR/train/masks, or DIR/images/train and DIR/masks/train (and val for train)"
_COLUMNS = ("mask", "annotation", "label", "segmentation", "seg_map")
_FORMS = ("hfds", "parquet", "wds")
_CLASS = re.compile(r"[0-9]{1,5},(#[0-9a-fA-F]{6})?")
T = TypeVar("T")
IGNORED = -1
"""The class number of pixels that count in no loss and no metric."""
MOST_CLASSES = 2**15 - 1
"""Masks travel as int16."""
MOST_VALUE = 2**16 - 1
"""The largest value of a mask's pixel that may be a class."""
MASK_EXTENSIONS = (".png", ".tif", ".tiff", ".npy")

_READERS = 16  # threads that read masks
_UNKNOWN = -2  # a value that is neither a class nor ignored
_OUTSIDE = MOST_VALUE + 1  # stands for all values that 16 bits do not hold


def default_palette(num_classes: int) -> np.ndarray:
    """Colours for classes without any, uint8 [C, 3]: those of PASCAL VOC (Everingham et al. 2010).

    The bits of a class number, three at a time, are the bits of red, green and blue, the highest first.
    """
    bits = np.arange(num_classes)[:, None, None] >> np.arange(24).reshape(8, 3) & 1  # [C, place, channel]
    return (bits << np.arange(7, -1, -1)[:, None]).sum(axis=1).astype(np.uint8)


# ---- files -----------------------------------------------------------------------------------------------------------


def decode_mask(data: bytes, name: str) -> np.ndarray:
    """The values of a mask's file, whole numbers [H, W]; of a palette file the numbers of its colours.

    Args:
        data: the file's bytes.
        name: its name, for messages.

    Raises:
        ImageDecodeError: it is damaged.
        UserError: it has several channels, or values that are no whole numbers.
    """
    file, is_array = io.BytesIO(data), data.startswith(np.lib.format.MAGIC_PREFIX)
    with readable(name):
        values = np.load(file) if is_array else np.asarray(Image.open(file))
    values = values.view(np.uint8) if values.dtype == bool else values
    if values.ndim != 2 or values.dtype.kind not in "ui":
        rule = "a mask has one whole number per pixel: save class numbers, not colours, as PNG (palette or grey)"
        raise UserError(f"{name} holds {values.dtype} values in the shape {list(values.shape)}; {rule}, TIFF or npy")
    return values


def size_of_mask(file: BinaryIO, name: str) -> Size:
    """The (height, width) of a mask's file, from its header.

    Raises:
        ImageDecodeError: the header is damaged.
    """
    with readable(name):
        is_array = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        file.seek(0)
        if not is_array:
            return Image.open(file).size[::-1]
        np.lib.format.read_magic(file)
        height, width = np.lib.format.read_array_header_1_0(file)[0][:2]
        return height, width


class Labels:
    """The classes of a data set's masks.

    Args:
        names: of the classes, in the order of their numbers.
        values: of their pixels in files; all differ, from 0 to `MOST_VALUE`.
        ignored: values that belong to no class; negative ones are in no mask.
        rule: what the classes are and what to do about another value, for the message.

    Attributes:
        colours: of the classes, uint8 [C, 3]; if nothing else sets them, those of their values in `default_palette`.
    """

    def __init__(self, names: Sequence[str], values: Sequence[int], ignored: Iterable[int], rule: str) -> None:
        self.names, self.values, self._rule = tuple(names), np.array(values, dtype=np.int64), rule
        self.colours = default_palette(max(values) + 1)[self.values]
        self.table = np.full(_OUTSIDE + 1, _UNKNOWN, dtype=np.int16)
        self.table[[value for value in ignored if value >= 0]] = IGNORED
        self.table[self.values] = np.arange(len(values))

    def classes(self, mask: np.ndarray, name: str) -> np.ndarray:
        """The class of each pixel, int16 [H, W]; `IGNORED` for pixels without one.

        Args:
            mask: values of a file, [H, W].
            name: of the file, for messages.

        Raises:
            UserError: a value is neither a class nor ignored.
        """
        is_small = mask.dtype.kind == "u" and mask.dtype.itemsize <= 2
        places = mask if is_small else np.where((mask < 0) | (mask >= _OUTSIDE), _OUTSIDE, mask)
        classes = self.table[places]
        if (unknown := classes == _UNKNOWN).any():
            values, counts = np.unique(mask[unknown], return_counts=True)
            shown = enumerate_some([f"{value} ({count:,})" for value, count in zip(values, counts, strict=True)])
            number = f"{int(counts.sum()):,} of {mask.size:,} pixels"
            raise UserError(f"{name}: {number} have values that are neither a class nor ignored: {shown}; {self._rule}")
        return classes


def require_same_size(name: str, image: Size, mask: Size) -> None:
    """Raise UserError unless an image and its mask have the same (height, width).

    Args:
        name: of the image.
        image: its size, turned or not as --exif-rotation says.
        mask: the size of its mask.
    """
    if tuple(image) != tuple(mask):
        sizes = f"the image has {image[0]}x{image[1]} pixels (height x width) and its mask {mask[0]}x{mask[1]}"
        turned = "; if EXIF turns the image and not the mask, set --exif-rotation as the masks were drawn"
        way_out = "save the mask at the size of its image, or leave both out"
        raise UserError(f"{name}: {sizes}; {way_out}{turned if tuple(image) == tuple(mask[::-1]) else ''}")


def pixels_of_classes(mask: np.ndarray, num_classes: int) -> np.ndarray:
    """How many pixels of a mask [H, W] are ignored, and how many each class has, int64 [1 + C]."""
    return np.bincount(mask.ravel() + 1, minlength=num_classes + 1)


def of_masks(source: Source, entry: str, indices: Iterable[int], function: Callable[[Any], T]) -> Iterator[T]:
    """A function of an entry of some samples, read by threads; damaged masks are left out.

    Raises:
        UserError: a mask is invalid.
        OSError: a file cannot be read.
    """

    def read(index: int) -> list[T]:
        try:
            return [function(source.entry(entry, index))]
        except ImageDecodeError:
            return []

    with ThreadPoolExecutor(_READERS) as threads:
        yield from chain.from_iterable(threads.map(read, indices))


# ---- classes ---------------------------------------------------------------------------------------------------------


def find_labels(folder: str, num_classes: int | None, ignore_index: int | None, reduce_zero_label: bool) -> Labels:
    """The classes of a folder: those of its labels.csv, else of --num-classes.

    Args:
        folder: of the data.
        num_classes: of the flag.
        ignore_index: of the flag; -1 for no value, None for 255 where that is no class of labels.csv.
        reduce_zero_label: whether 0 is no class either.

    Raises:
        UserError: neither says what the classes are, a malformed table, or a class that a flag leaves out.
    """
    path, first = os.path.join(folder, listing.LABELS_FILE), int(reduce_zero_label)
    way_out = "or pass --ignore-index VALUE"
    if os.path.isfile(path):
        rows = _read_labels(path)
        rule = f"the {len(rows)} classes are those of {path}: list the value there, {way_out}"
        if num_classes not in (None, len(rows)):
            raise UserError(f"--num-classes {num_classes}: {path} has {len(rows)} classes; drop the flag")
    elif num_classes is not None:
        rows = [(first + number, f"class {number}", "") for number in range(num_classes)]
        rule = f"--num-classes {num_classes} stands for {first} to {rows[-1][0]}: raise it, {way_out}"
    else:
        raise UserError(
            f"{folder} has no {listing.LABELS_FILE}, so that nothing says what the classes are: write one (a header "
            "index,name, then a row per class: the pixel value and the name), or pass --num-classes N for the pixel "
            f"values {first} to {'N' if first else 'N - 1'}"
        )
    values, names, colours = zip(*rows, strict=True)
    if ignore_index is None:
        ignore_index = -1 if 255 in values else 255
    ignored = {ignore_index: f"--ignore-index {ignore_index}"} | ({0: "--reduce-zero-label"} if first else {})
    for value in ignored.keys() & {*values}:
        way_out = "drop the flag, remove the class, or pass --ignore-index -1 if each value counts"
        raise UserError(f"{folder}: the value {value} is a class, which {ignored[value]} leaves out; {way_out}")
    if len(names) > MOST_CLASSES:
        raise UserError(f"{folder}: masks have at most {MOST_CLASSES:,} classes, not {len(names):,}")
    labels = Labels(names, values, ignored, rule)
    if all(colours):
        labels.colours = np.array([[*bytes.fromhex(colour)] for colour in colours], dtype=np.uint8)
    return labels


def _read_labels(path: str) -> list[tuple[int, str, str]]:
    """The value, name and colour (rrggbb, or "") of each class of a labels.csv."""
    (_, header), *rows = [*read_table(path, ",")] or [("", [""])]
    found: dict[str, tuple[int, str, str]] = {}
    if [cell.strip() for cell in header] not in (["index", "name"], ["index", "name", "colour"]) or not rows:
        raise UserError(f"{path} must have the header 'index,name' or 'index,name,colour', then a row per class")
    for where, cells in rows:
        index, name, colour = (*(require_utf8(cell, where).strip() for cell in cells), "")[:3]
        if not _CLASS.fullmatch(f"{index},{colour}") or int(index) > MOST_VALUE or not name:
            row = f"the pixel value (0 to {MOST_VALUE}), the name, and in a column colour #rrggbb"
            raise UserError(f"{where}: a class has {row}, not {','.join(cells)!r}")
        if name in found or int(index) in (value for value, *_ in found.values()):
            raise UserError(f"{where}: another row has the index {index} or the name {name}")
        found[name] = int(index), name, colour[1:]
    return [*found.values()]


# ---- pairs of files --------------------------------------------------------------------------------------------------


def find_splits(folder: str) -> dict[str, tuple[str, str]]:
    """The folders of images and of masks of each split, by its name, in either layout."""
    found = {}
    for form in ("{name}/{kind}", "{kind}/{name}"):
        for path in sorted(Path(folder).glob(form.format(name="*", kind="images"))):
            name = path.parts[-2 if form.endswith("{kind}") else -1]
            masks = os.path.join(folder, form.format(name=name, kind="masks"))
            if not listing.hidden(name) and os.path.isdir(path) and os.path.isdir(masks):
                found[name] = (str(path), masks)
    return found


def pair_files(images: str, masks: str) -> tuple[list[tuple[str, str]], str]:
    """Pair the images below one folder with the masks below another.

    Returns:
        Each image with its mask in the images' natural order, and what is wrong with the names of the files ("" if
        nothing is).
    """
    roots, problems = (images, masks), []
    sides: tuple[dict[str, str], dict[str, str]] = {}, {}
    for root, side, extensions in zip(roots, sides, (listing.IMAGE_EXTENSIONS, MASK_EXTENSIONS), strict=True):
        for path in listing.in_natural_order(walk(root)):
            stem, extension = posixpath.splitext(path)
            if extension.lower() not in extensions or listing.hidden(path):
                continue
            if (other := side.setdefault(stem, path)) != path:
                why = "have one path without extension, by which images and masks are paired"
                problems.append(f"{root}: {other} and {path} {why}; rename or remove one")
    if not sides[0]:
        problems.append(f"{images} holds no images ({listing.SUPPORTED})")
    for here, there in ((0, 1), (1, 0)):
        if lone := [path for stem, path in sides[here].items() if stem not in sides[there]]:
            number = f"{len(lone)} of {len(sides[here])} files of {roots[here]}"
            problems.append(f"{number} have no partner in {roots[there]}: {enumerate_some(lone)}")
    if sides[0].keys() != sides[1].keys():
        rule = f"an image and its mask ({' '.join(MASK_EXTENSIONS)}) have the same path without extension"
        problems.append(f"{rule}: add what is missing, or remove the other")
    return [(path, sides[1][stem]) for stem, path in sides[0].items() if stem in sides[1]], "; ".join(problems)


# ---- sources ---------------------------------------------------------------------------------------------------------


class MaskSource(Subset):
    """Images with masks. Their entries are "image", "mask" (classes, int16 [H, W], -1 where ignored), "mask_size" (its
    header's (H, W)), and of the classes "values" (in files, int64 [C]) and "colours".

    A target is the multi-hot vector of the classes in the mask, which is decoded for it.

    Args:
        images: of all samples.
        masks: the files of their masks, in the same order.
        labels: the classes.
        key: the entry of `masks` that has them.
    """

    def __init__(self, images: Source, masks: Source, labels: Labels, key: str = "image") -> None:
        super().__init__(images, np.arange(len(images)))
        self.class_names, self.multi_label = labels.names, True
        self._labels, self._masks, self._key = labels, masks, key
        own = {f".{key}{extension}": len(images) for extension in listing.IMAGE_EXTENSIONS}
        self.left_out = Counter(images.left_out) - Counter(own)  # masks without an image stay
        self.entries = ("image", "mask", "mask_size", "values", "colours")

    def entry(self, name: str, index: int) -> Any:
        """As `Source.entry`."""
        if name in ("values", "colours"):
            return getattr(self._labels, name)
        if name not in ("mask", "mask_size"):
            return super().entry(name, index)
        masks, where = self._masks, self._masks.describe(index) + ("" if self._key == "image" else f"[{self._key}]")
        with open(where, "rb") if os.path.isfile(where) else io.BytesIO(masks.entry(self._key, index)) as file:
            if name == "mask_size":
                return size_of_mask(file, where)
            return self._labels.classes(decode_mask(file.read(), where), where)

    def target(self, index: int) -> np.ndarray:
        """As `Source.target`, except that the mask is decoded."""
        return (pixels_of_classes(self.entry("mask", index), self.num_classes)[1:] > 0).astype(np.float32)

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`: the names of the files and the classes; no mask is read."""
        names = np.array([name.encode() for name in self.class_names], dtype=np.bytes_)
        return *super().identity(), names, self._labels.table


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_masks(dataset: str, folder: str, split: str, classes: tuple[int | None, int | None, bool]) -> MaskSource:
    """A split of --dataset and --data-dir.

    Args:
        dataset: hfds/PATH, parquet/PATH, wds/PATH, or "" for `folder`.
        folder: a --data-dir; "" for none.
        split: its name.
        classes: what `find_labels` takes after the folder.

    Raises:
        NoSuchSplit: there is no such split.
        UserError: no data, data without masks, or masks without their images.
    """
    form, _, path = (dataset or folder).partition("/")
    if form in _FORMS and (dataset or not os.path.exists(folder)):
        source = open_source(f"{form}/{path}" if dataset else "", folder, split, labels=False)
        folder = os.path.join(folder, path) if dataset else path
        key = next((name for name in _COLUMNS if source.has(name)), "")
        if not key:
            has = f"has the images {', '.join(source.entries)} and none named {', '.join(_COLUMNS)}"
            way_out = "name the files KEY.mask.png" if form == "wds" else "rename_column and save it again"
            raise UserError(f"{source.describe(0)} {has}: {way_out}")
        folder = os.path.dirname(folder) if folder.endswith(".tar") else folder
        return MaskSource(source, source, find_labels(folder, *classes), key)
    if dataset or not folder:
        what = f"--dataset {dataset} has no masks" if dataset else "no data"
        ways = "--dataset scenes, hfds/PATH, parquet/PATH or wds/PATH"
        raise UserError(f"{what}: pass {ways}, or --data-dir DIR with {_LAYOUTS}")
    if not os.path.isdir(folder):
        raise UserError(f"--data-dir {folder} is no folder")
    splits = find_splits(folder)
    roots = next((splits[name] for name in listing.synonyms_of(split) if name in splits), None)
    if roots is None:
        where = f"{split}/images with {split}/masks"
        raise listing.no_such_split(folder, split, where, f". The layouts are {_LAYOUTS}")
    pairs, problem = pair_files(*roots)
    if problem:
        raise UserError(problem)
    targets = np.zeros(len(pairs), dtype=np.int64)
    images, masks = (FileSource(roots[at], [pair[at] for pair in pairs], targets) for at in (0, 1))
    return MaskSource(images, masks, find_labels(folder, *classes))
