"""Opening a data set by its name: the embedded digits, torchvision's data sets, folders, tars, shards, tables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image
from timm.data import create_dataset

from ds_vit.data.decode import undecodable
from ds_vit.data.sources.folders import TRAIN_NAMES, VAL_NAMES, open_folder
from ds_vit.data.sources.hugging_face import open_hugging_face
from ds_vit.data.sources.shards import open_shards
from ds_vit.data.sources.source import Source
from ds_vit.data.sources.subset import first_part, part_of
from ds_vit.fault_tolerance.errors import UserError

# timm's torch/ names of fixed data sets; torch/inaturalist (needs a target type) and torch/image_folder
# (is what --data-dir alone means) are left out.
TORCH_NAMES = ("cifar10", "cifar100", "mnist", "kmnist", "fashion_mnist", "qmnist", "places365", "imagenet")

_IN_DATA_DIR = ("wds/", "hfds/")  # what --data-dir may begin with in place of --dataset


def _digits_file() -> Path:
    """What `sklearn.datasets.load_digits` reads; to import scikit-learn for it would take each rank 1.5 s."""
    sklearn = find_spec("sklearn")
    assert sklearn is not None, "scikit-learn is a dependency"
    assert sklearn.origin is not None
    return Path(sklearn.origin).with_name("datasets") / "data" / "digits.csv.gz"


class DigitsSource(Source):
    """scikit-learn's 1,797 handwritten digits, 8x8, without any download (Alpaydin and Kaynak 1998).

    Every fifth image of each class, in the order of the data set, is held out: 355 validation images and 1,442
    training images, in every run the same.
    """

    def __init__(self, train: bool) -> None:
        digits = np.loadtxt(
            _digits_file(), delimiter=",", dtype=np.int64
        )  # of each image its 64 pixels, then its class
        classes = digits[:, -1].copy()
        occurrence = np.zeros_like(classes)
        for number in range(10):
            of_class = classes == number
            occurrence[of_class] = np.arange(of_class.sum())
        held_out = occurrence % 5 == 4
        self._numbers = np.flatnonzero(~held_out if train else held_out)
        self._targets = classes[self._numbers]
        self._images = np.round(digits[self._numbers, :-1] * (255.0 / 16.0)).astype(np.uint8).reshape(-1, 8, 8)
        self.class_names = tuple(str(number) for number in range(10))

    def __len__(self) -> int:
        return len(self._targets)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._images[index]).convert("RGB")

    def target(self, index: int) -> int:
        return int(self._targets[index])

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return (self._targets,)

    def describe(self, index: int) -> str:
        return f"digits[{self._numbers[index]}]"


class TorchvisionSource(Source):
    """One of torchvision's data sets by timm's name for it (`torch/cifar10`)."""

    def __init__(self, name: str, data_dir: str, split: str, download: bool = False) -> None:
        if split not in (*TRAIN_NAMES, *VAL_NAMES, "test"):
            raise UserError(f"torch/{name} has no split {split!r}; it has train, validation and test")
        try:
            self._data = create_dataset(f"torch/{name}", root=data_dir, split=split, download=download)
        except (RuntimeError, FileNotFoundError) as error:
            raise UserError(
                f"torch/{name}: torchvision finds no such data set in {data_dir} ({str(error).splitlines()[0]}); "
                "correct --data-dir, or pass --dataset-download to fetch it"
            ) from error
        self._name = f"torch/{name}[{split}]"
        self._targets = np.asarray(self._data.targets, dtype=np.int64)
        if self._targets.ndim == 2:  # QMNIST keeps eight columns; the first is the class
            self._targets = self._targets[:, 0]
        self.class_names = tuple(", ".join(c) if isinstance(c, tuple) else str(c) for c in self._data.classes)

    def __len__(self) -> int:
        return len(self._targets)

    def image(self, index: int) -> Image.Image:
        try:
            return self._data[index][0].convert("RGB")
        except FileNotFoundError:
            raise
        except Exception as error:
            raise undecodable(self.describe(index), error) from error

    def target(self, index: int) -> int:
        return int(self._targets[index])

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return (self._targets,)

    def describe(self, index: int) -> str:
        return f"{self._name}[{index}]"


def open_source(
    dataset: str,
    data_dir: str | None,
    split: str,
    *,
    classes: Sequence[str] | None = None,
    download: bool = False,
    allow_empty: bool = False,
) -> Source:
    """Open one split of a data set.

    Args:
        dataset: "digits", "torch/<name>", "wds/<path of shards>" or "hfds/<folder>" (below `data_dir`, where that is
            given), or "" for what lies in `data_dir`: `<split>/` with class folders, with one tar a class or with
            images and a `labels.csv` (multi-label), or `<split>.tar` of class folders.
        data_dir: the folder of the data; not read for "digits". `wds/PATH` and `hfds/PATH` may stand here too.
        split: its name; timm's synonyms (train/training, val/validation/...) stand for each other. `train[:10%]` is a
            part of it, of each class as many images.
        classes: the training split's classes, when this is the validation split: both must have the same ones. A
            multi-label split takes its numbering from them and need not have an example of each.
        download: let torchvision fetch a `torch/` data set that is not there.
        allow_empty: a class folder without images is a class all the same.

    Raises:
        UserError: unknown data set, folder missing or without classes or images, classes that differ.
    """
    split, percent = part_of(split)
    if not dataset and data_dir and data_dir.startswith(_IN_DATA_DIR) and not os.path.exists(data_dir):
        dataset, data_dir = data_dir, None
    if dataset == "digits":
        if split not in (*TRAIN_NAMES, *VAL_NAMES):
            raise UserError(f"digits has no split {split!r}; it has train and validation")
        source: Source = DigitsSource(train=split in TRAIN_NAMES)
    elif dataset.startswith("torch/") and dataset[len("torch/") :] in TORCH_NAMES:
        if not data_dir:
            raise UserError(f"--dataset {dataset} needs --data-dir, the folder that holds it or that it is fetched to")
        source = TorchvisionSource(dataset[len("torch/") :], data_dir, split, download)
    elif dataset.startswith("wds/"):
        source = open_shards(_path_of(dataset, data_dir), split, classes)
    elif dataset.startswith("hfds/"):
        source = open_hugging_face(_path_of(dataset, data_dir), split, classes)
    elif not dataset:
        if not data_dir:
            raise UserError("no data: pass --data-dir FOLDER (with train/ and val/ in it) or --dataset digits")
        source = open_folder(data_dir, split, classes, allow_empty=allow_empty)
    else:
        known = ["digits", *(f"torch/{name}" for name in TORCH_NAMES), "wds/PATH", "hfds/PATH"]
        nearest = difflib.get_close_matches(dataset, known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise UserError(
            f"unknown data set {dataset!r}{hint}; known are {', '.join(known)}, or no --dataset and a --data-dir"
        )
    if classes is not None:
        _refuse_differing_classes(tuple(classes), source.class_names)
    return source if percent == 100 else first_part(source, percent)


def _path_of(dataset: str, data_dir: str | None) -> str:
    """`wds/PATH`: where that is, below `data_dir` if there is one."""
    kind, _, path = dataset.partition("/")
    if not path and not data_dir:
        raise UserError(f"--dataset {kind}/ needs a path: {kind}/PATH, or --data-dir")
    return os.path.join(data_dir or "", path)


def _refuse_differing_classes(train: tuple[str, ...], val: tuple[str, ...]) -> None:
    if train == val:
        return
    parts = []
    for missing, where in ((sorted(set(train) - set(val)), "validation"), (sorted(set(val) - set(train)), "training")):
        if missing:
            names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            parts.append(f"{len(missing)} missing in the {where} split ({names})")
    raise UserError(
        f"the training split has {len(train)} classes and the validation split {len(val)}, and they differ: "
        + (", ".join(parts) or "the same names in another order")
        + "; both splits must have the same class folders"
    )
