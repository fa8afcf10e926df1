"""Opening a data set by its name, and those that are no files: digits, torchvision's data sets, a program's own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont
from timm.data import create_dataset

from ds_vit import randomness
from ds_vit.data.decode import in_8_bits, to_rgb, undecodable
from ds_vit.data.sources.captions import CaptionKeys, Captions
from ds_vit.data.sources.combined import first_part, part_of
from ds_vit.data.sources.folders import open_folder
from ds_vit.data.sources.hugging_face import open_hugging_face
from ds_vit.data.sources.listing import TRAIN_NAMES, VAL_NAMES, is_training
from ds_vit.data.sources.pairs import open_pairs, open_table
from ds_vit.data.sources.shards import open_shards
from ds_vit.data.sources.source import ArraySource, Source
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, enumerate_some, first_line

# timm's torch/ names of fixed data sets; torch/inaturalist (needs a target type) and torch/image_folder
# (the meaning of --data-dir without --dataset) are left out.
TORCH_NAMES = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365", "imagenet")

_IN_DATA_DIR = ("wds/", "hfds/", "parquet/", "csv/")  # what --data-dir may begin with in place of --dataset


def _digits_file() -> Path:
    """What `sklearn.datasets.load_digits` reads; to import scikit-learn for it would take each rank 1.5 s."""
    sklearn = find_spec("sklearn")
    assert sklearn is not None, "scikit-learn is a dependency"
    assert sklearn.origin is not None
    return Path(sklearn.origin).with_name("datasets") / "data" / "digits.csv.gz"


class DigitsSource(ArraySource):
    """scikit-learn's 1,797 handwritten digits, 8x8, without any download (Alpaydin and Kaynak 1998).

    Every fifth image of each class, in the order of the data set, is held out: 355 validation images and 1,442
    training images, in every run the same.
    """

    def __init__(self, train: bool) -> None:
        # A row per image: its 64 pixels, then its class.
        digits = np.loadtxt(_digits_file(), delimiter=",", dtype=np.int64)
        classes = digits[:, -1].copy()
        occurrence = np.array([(classes[:place] == one).sum() for place, one in enumerate(classes)])
        held_out = occurrence % 5 == 4
        self._numbers = np.flatnonzero(~held_out if train else held_out)
        self._targets = classes[self._numbers]
        self._images = np.round(digits[self._numbers, :-1] * (255.0 / 16.0)).astype(np.uint8).reshape(-1, 8, 8)
        self.class_names = tuple(str(number) for number in range(10))

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._images[index]).convert("RGB")

    def describe(self, index: int) -> str:
        return f"digits[{self._numbers[index]}]"


class TorchvisionSource(ArraySource):
    """One of torchvision's data sets by timm's name for it (`torch/cifar10`)."""

    def __init__(self, name: str, data_dir: str, split: str, download: bool = False) -> None:
        if split not in (*TRAIN_NAMES, *VAL_NAMES, "test"):
            raise UserError(f"torch/{name} has no split {split!r}; it has train, validation and test")
        try:
            self._data = create_dataset(f"torch/{name}", root=data_dir, split=split, download=download)
        except (RuntimeError, FileNotFoundError) as error:
            reason = f"torchvision finds no such data set in {data_dir} ({first_line(error)})"
            raise UserError(f"torch/{name}: {reason}; correct --data-dir, or pass --dataset-download") from error
        self._name = f"torch/{name}[{split}]"
        self._targets = np.asarray(self._data.targets, dtype=np.int64)
        if self._targets.ndim == 2:  # QMNIST keeps eight columns; the first is the class
            self._targets = self._targets[:, 0]
        self.class_names = tuple(", ".join(c) if isinstance(c, tuple) else str(c) for c in self._data.classes)

    def image(self, index: int) -> Image.Image:
        try:
            return to_rgb(self._data[index][0])
        except FileNotFoundError:
            raise
        except Exception as error:
            raise undecodable(self.describe(index), error) from error

    def describe(self, index: int) -> str:
        return f"{self._name}[{index}]"


class DatasetSource(ArraySource):
    """A program's map-style torch `Dataset` of (image, class number) pairs, before any transform.

    The numbers of the classes are read from its `targets` (as torchvision's data sets have them), else from its items,
    each of which is then loaded once.

    Args:
        dataset: has a length; an item's image is a PIL image, or a uint8 or uint16 array [H, W],
            [H, W, C] or [C, H, W].
        class_names: of the training images, for a data set without `classes`; numbers hold for any `classes`.

    Raises:
        UserError: an object that is no such data set.
    """

    def __init__(self, dataset: Any, class_names: Sequence[str] | None = None) -> None:
        name = type(dataset).__name__
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UserError(f"a {name} is no data set: give a Source, or a torch Dataset with a length")
        self._dataset = dataset
        self._targets = _targets_of(dataset)
        if self._targets.shape != (len(dataset),) or not len(dataset):
            raise UserError(f"{name} is not (image, class number) for each of its {len(dataset)} items")
        names = getattr(dataset, "classes", None)
        if names is None or class_names == tuple(map(str, range(len(class_names or ())))):
            names = class_names
        largest = int(self._targets.max())
        self.class_names = tuple(map(str, names if names is not None else range(largest + 1)))
        if largest >= len(self.class_names) or (self._targets < 0).any():
            targets = f"targets from {self._targets.min()} to {largest}"
            raise UserError(f"{name} has {targets}, and {len(self.class_names)} classes are named")
        self.image(0)

    def image(self, index: int) -> Image.Image:
        """As `Source.image`."""
        try:
            image = self._dataset[index][0]
            if isinstance(image, np.ndarray) and image.dtype in (np.uint8, np.uint16):
                image = _image_of(image)
            if isinstance(image, Image.Image):
                return to_rgb(image)
        except (OSError, SyntaxError) as error:
            raise undecodable(self.describe(index), error) from error
        found = f"{image.dtype} array {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        kind = f"the image is a {found}, not a PIL image or a uint8 or uint16 array [H, W], [H, W, C] or [C, H, W]"
        raise UserError(f"{self.describe(index)}: {kind}; give the data set without its transform, or convert it")

    def describe(self, index: int) -> str:
        """As `Source.describe`."""
        return f"{type(self._dataset).__name__}[{index}]"


def _image_of(pixels: np.ndarray) -> Image.Image | np.ndarray:
    """An image of whole numbers [H, W], [H, W, C] or [C, H, W] of one to four channels; another array as it is."""
    if pixels.ndim == 3 and pixels.shape[2] > 4:
        pixels = pixels.transpose(1, 2, 0)
    if (channels := pixels.shape[2:]) not in ((), (1,), (2,), (3,), (4,)):
        return pixels
    return Image.fromarray(in_8_bits(pixels[..., 0] if channels == (1,) else pixels))


def _targets_of(dataset: Any) -> np.ndarray:
    """Class numbers of a torch data set, int64 [N]; empty if it has none."""
    try:
        given = getattr(dataset, "targets", None)
        if given is None:
            given = [dataset[index][1] for index in range(len(dataset))]
        return np.asarray(given).astype(np.int64, casting="same_kind")
    except (IndexError, KeyError, TypeError, ValueError):  # items that are no pairs, targets of several lengths
        return np.zeros(0, dtype=np.int64)


# ---- glyphs ----------------------------------------------------------------------------------------------------------

# `--dataset glyphs`: the characters of a font with their Unicode names as captions, without any download.
# `ds_vit/data/glyphs/` holds DejaVu Sans 2.35 with its licence, and names.txt: the characters of the font that have a
# name in Unicode 14. The list is a file because later versions of Python know further names. In that folder:
#
#     python -c "import unicodedata as u; from fontTools.ttLib import TTFont; \
#     [print(f'{c:04x} {u.name(chr(c)).lower()}') for c in sorted(TTFont('DejaVuSans.ttf').getBestCmap()) \
#     if u.name(chr(c), '')]" > names.txt

_FOLDER = Path(__file__).resolve().parents[1] / "glyphs"
_SIDE = 32  # of an image, in pixels
_SIZES, _ANGLES = (16, 20, 24), (-12, 0, 12)  # pixels an em; degrees, counter-clockwise
_NUM_VARIANTS = len(_SIZES) * len(_ANGLES)
_UPRIGHT = _NUM_VARIANTS // 2  # the variant of the middle size and angle
_HELD_OUT = 580


@cache
def read_names() -> tuple[tuple[str, str], ...]:
    """All (character, name) in the order of the code points."""
    lines = (_FOLDER / "names.txt").read_text(encoding="ascii").splitlines()
    return tuple((chr(int(code, 16)), name) for code, _, name in (line.partition(" ") for line in lines))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # The basic layout, which every build of Pillow has; for single characters Raqm's is the same.
    return ImageFont.truetype(_FOLDER / "DejaVuSans.ttf", size, layout_engine=ImageFont.Layout.BASIC)


def _glyph(character: str, size: int) -> Image.Image | None:
    """What a character covers, in white on black, without a margin; None for one that covers nothing."""
    left, top, right, bottom = _font(size).getbbox(character)
    if right <= left or bottom <= top:
        return None
    glyph = Image.new("L", (int(right - left), int(bottom - top)))
    ImageDraw.Draw(glyph).text((-left, -top), character, 255, _font(size))
    return glyph if glyph.getbbox() else None


def drawn(character: str, variant: int) -> Image.Image:
    """A character in black on white, centred, RGB: a pure function of its arguments.

    Args:
        character: of the font.
        variant: below 9; its size and its rotation.
    """
    size, angle = _SIZES[variant // len(_ANGLES)], _ANGLES[variant % len(_ANGLES)]
    image = Image.new("L", (_SIDE, _SIDE))
    glyph = _glyph(character, size)
    if glyph is not None:
        glyph.thumbnail((_SIDE, _SIDE))  # long arrows and domino tiles are wider
        image.paste(glyph, ((_SIDE - glyph.width) // 2, (_SIDE - glyph.height) // 2))
    image = image.rotate(angle, Image.Resampling.BICUBIC)
    return ImageChops.invert(image).convert("RGB")


def split_names(names: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the characters for training and of those held out for evaluation, ascending.

    Held out are new combinations of known words: each word of a held-out name is also in a name for training. The
    choice depends only on the list. Characters that cover nothing (spaces, controls) stay for training.
    """
    uses = Counter(word for _, name in names for word in set(name.split()))
    held_out: list[int] = []
    for number in np.argsort(randomness.sample_keys(0, 0, np.arange(len(names))), kind="stable").tolist():
        character, name = names[number]
        words = set(name.split())
        if len(words) > 1 and min(uses[word] for word in words) > 1 and _glyph(character, _SIZES[0]) is not None:
            held_out.append(number)
            uses.subtract(words)
        if len(held_out) == _HELD_OUT:
            break
    training = np.setdiff1d(np.arange(len(names)), held_out)
    return training, np.sort(held_out)


class GlyphSource(Source):
    """5,810 characters of DejaVu Sans: each in 9 sizes and rotations for training, 580 held out in one for evaluation.

    The caption is the character's name in lower case ("latin small letter a with acute"). There are no classes.
    """

    class_names = ()
    has_captions = True

    def __init__(self, train: bool) -> None:
        names = read_names()
        self._numbers = split_names(names)[0 if train else 1]
        self._variants = range(_NUM_VARIANTS) if train else range(_UPRIGHT, _UPRIGHT + 1)
        self._characters = "".join(names[number][0] for number in self._numbers)
        self._captions = Captions.of([names[number][1]] for number in self._numbers)

    def __len__(self) -> int:
        return len(self._numbers) * len(self._variants)

    def image(self, index: int) -> Image.Image:
        """As `Source.image`."""
        number, variant = divmod(index, len(self._variants))
        return drawn(self._characters[number], self._variants[variant])

    def target(self, index: int) -> int:
        """0: all images are of one kind."""
        return 0

    def captions(self, index: int) -> tuple[str, ...]:
        """As `Source.captions`."""
        return self._captions[index // len(self._variants)]

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`."""
        return self._numbers, np.array(self._variants), *self._captions.identity()

    def describe(self, index: int) -> str:
        """As `Source.describe`."""
        number, variant = divmod(index, len(self._variants))
        return f"glyphs[U+{ord(self._characters[number]):04X}, variant {self._variants[variant]}]"


def as_source(data: Any, class_names: Sequence[str] | None = None) -> Source:
    """A source of a program's data: a `Source` as it is, a torch data set as a `DatasetSource`."""
    return data if isinstance(data, Source) else DatasetSource(data, class_names)


def open_source(
    dataset: str,
    data_dir: str | None,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    download: bool = False,
    allow_empty: bool = False,
    labels: CaptionKeys | bool = True,
    partly: bool = False,
) -> Source:
    """Open one split of a data set.

    Args:
        dataset: "digits", "glyphs", "torch/<name>", "wds/<path of shards>", "hfds/<folder>", "parquet/<folder>" or
            "csv/<table>" (below `data_dir`, where that is given), or "" for what lies in `data_dir`: `<split>/` with
            class folders, with one tar per class or with images and a `labels.csv` (multi-label), or `<split>.tar` of
            class folders.
        data_dir: the folder of the data; not read for "digits" and "glyphs". `wds/PATH` and the like are accepted here
            too.
        split: its name; timm's synonyms (train/training, val/validation/...) replace each other. `train[:10%]` is a
            part of it, of each class as many images.
        classes: the training split's classes, when this is the validation split: both must have the same ones. A
            multi-label split takes its numbering from them and need not have an example of each.
        download: let torchvision fetch a `torch/` data set that is not there.
        allow_empty: a class folder without images is a class all the same.
        labels: True for classes; the keys of captions, for a task that reads those instead; False for a task without
            labels: images at any depth count, and they need no classes. A folder of images without splits is then the
            training split.
        partly: whether the split may lack some of `classes`.

    Raises:
        UserError: unknown data set, folder missing or without classes or images, classes that differ.
    """
    split, percent = part_of(split)
    captions = labels if isinstance(labels, CaptionKeys) else None
    if not dataset and data_dir and data_dir.startswith(_IN_DATA_DIR) and not os.path.exists(data_dir):
        dataset, data_dir = data_dir, None
    kind, _, name = dataset.partition("/")
    source: Source
    if dataset in ("digits", "glyphs"):
        source = (DigitsSource if dataset == "digits" else GlyphSource)(train=is_training(dataset, split))
    elif kind == "torch" and name in TORCH_NAMES:
        if not data_dir:
            raise UserError(f"--dataset {dataset} needs --data-dir, the folder that holds it or that it is fetched to")
        source = TorchvisionSource(name, data_dir, split, download)
    elif f"{kind}/" in _IN_DATA_DIR and "/" in dataset:
        if not name and not data_dir:
            raise UserError(f"--dataset {kind}/ needs a path: {kind}/PATH, or --data-dir")
        source = _open_path(kind, os.path.join(data_dir or "", name), split, classes, captions)
    elif not dataset:
        if not data_dir:
            raise UserError("no data: pass --data-dir FOLDER (with train/ and val/ in it) or --dataset digits")
        if captions is None:
            source = open_folder(data_dir, split, classes, allow_empty, bool(labels))
        else:
            source = open_pairs(data_dir, split)
    else:
        known = ["digits", "glyphs", *(f"torch/{name}" for name in TORCH_NAMES), *(f"{k}PATH" for k in _IN_DATA_DIR)]
        near = did_you_mean(dataset, known)
        raise UserError(f"unknown data set {dataset!r}{near}; known are {', '.join(known)}, or --data-dir without it")
    if labels and isinstance(source, ArraySource) and source.no_classes_because:
        raise UserError(source.no_classes_because)
    if classes is not None and tuple(classes) != source.class_names:
        _refuse_differing_classes({*classes}, {*source.class_names}, partly=partly)
        assert isinstance(source, ArraySource), f"{type(source).__name__} has other classes"
        source.number_over(classes)
    return source if percent == 100 else first_part(source, percent)


def _open_path(kind: str, path: str, split: str, classes: Sequence[str] | None, captions: CaptionKeys | None) -> Source:
    """A split of `wds/PATH`, `hfds/PATH`, `parquet/PATH` or `csv/PATH`."""
    if kind == "wds":
        return open_shards(path, split, classes, captions)
    if kind != "csv":
        return open_hugging_face(path, split, classes, captions)
    if captions is None:
        raise UserError(f"--dataset csv/{path} has captions and no classes; it is for tasks with text")
    return open_table(path, split, captions)


def _refuse_differing_classes(train: set[str], val: set[str], *, partly: bool) -> None:
    """Raise UserError if one split lacks classes of the other; `partly`: the validation split may."""
    lacking = {"validation": sorted(train - val), "training": sorted(val - train)}
    parts = [f"{len(of)} missing in the {where} split ({enumerate_some(of)})" for where, of in lacking.items() if of]
    if val - train or (parts and not partly):
        raise UserError(
            f"the training split has {len(train)} classes and the validation split {len(val)}, and they differ: "
            f"{', '.join(parts)}; both splits must have the same class folders"
        )
