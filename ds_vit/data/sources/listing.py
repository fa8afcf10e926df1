"""Which files of a data set are images, of which classes and splits: rules on their names, in timm's order."""

from __future__ import annotations

import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ds_vit.fault_tolerance.errors import UserError, enumerate_some

# timm lists .png, .jpg and .jpeg only, so that a folder of WebP files looks empty to it; Pillow reads all of these.
_SUFFIXES = ("png", "jpg", "jpeg", "jpe", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
IMAGE_EXTENSIONS = frozenset(f".{suffix}" for suffix in _SUFFIXES)
SUPPORTED = f"supported are {' '.join(sorted(IMAGE_EXTENSIONS))}"
LABELS_FILE = "labels.csv"
WITHOUT_CLASSES = "ds-vit predict, --task dino and --task mae need no classes"

# timm.data.dataset_factory's own synonyms.
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("validation", "val", "valid", "eval", "evaluation")

# What macOS, Windows, Synology and QNAP systems leave in folders and archives, in lower case. Names with a dot in front
# are hidden too: .DS_Store, ._x.jpg, .ipynb_checkpoints, .thumbnails.
_SYSTEM_NAMES = frozenset(
    (
        *("__macosx", "@eadir", "@__thumb", "@recycle", "#recycle", "#snapshot", "lost+found", "$recycle.bin"),
        *("system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    )
)


def hidden(path: str) -> bool:
    """Whether a path below a data set's root is no part of the data set: a component is hidden or a system's own.

    The root itself may have any name.
    """
    return any((part[:1] == "." and part.strip(".")) or part.lower() in _SYSTEM_NAMES for part in path.split("/"))


def is_image(path: str) -> bool:
    """Whether a path below a data set's root is an image of it: not hidden, with a suffix that we read."""
    return posixpath.splitext(path)[1].lower() in IMAGE_EXTENSIONS and not hidden(path)


def class_name(name: str) -> str:
    """A class by the name of its folder, which may spell é as one character or, from macOS, as two."""
    return unicodedata.normalize("NFC", name)


def natural_key(name: str) -> list[str | int]:
    """timm's key of natural order, which fails for digits that are no decimals, such as `5²` and `①`."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", name.lower()))]


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Sorted as timm sorts, with ties broken by the plain name: the result never depends on the file system."""
    return sorted(names, key=lambda name: (natural_key(name), name))


def suffix_counts(paths: Iterable[str]) -> Counter[str]:
    """How many files have each suffix, and how many are hidden."""
    return Counter("hidden" if hidden(path) else posixpath.splitext(path)[1].lower() for path in paths)


def described_counts(counts: Counter[str]) -> str:
    """`suffix_counts`, for messages."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in most[:5]) or "none"


def images_among(paths: Collection[str], where: str, more: str = "") -> list[str]:
    """The images among the files of a data set, in timm's order.

    Args:
        paths: of all files, below its root.
        where: the root, for messages.
        more: the end of the message.

    Raises:
        UserError: there are none.
    """
    images = in_natural_order(filter(is_image, paths))
    if not images:
        found = described_counts(suffix_counts(paths))
        raise UserError(f"{where} holds no images (files found: {found}; {SUPPORTED}){more}")
    return images


def list_images(
    class_folders: Mapping[str, str], where: str, *, labelled: bool = True
) -> tuple[list[str], list[str], dict[str, int]]:
    """Pick the images of a split, and the class of each.

    A class has the name of its folder, the innermost one, as timm has it.

    Args:
        class_folders: path → class folder of all files of a split ("" outside of class folders).
        where: the split, for messages.
        labelled: False for a task without labels: images count wherever they are. They have classes only if all of
            them are in class folders.

    Returns:
        Their paths in timm's order; their classes, "" for each where they have none; how many other files there are by
        suffix.

    Raises:
        UserError: there are no images, or folders that say two things about classes.
    """
    kept = images_among(class_folders, where)
    in_classes = [path for path in kept if class_folders[path]]
    if labelled and not in_classes:
        way_out = f"put each into a folder named as its class, or add {LABELS_FILE} for multi-label data"
        raise UserError(f"{where} holds {len(kept)} images but no class folders; {way_out}; {WITHOUT_CLASSES}")
    problem = _ambiguity({posixpath.dirname(path): class_folders[path] for path in in_classes})
    if labelled:
        if problem:
            raise UserError(f"{where}: {problem}")
        kept = in_classes
    classes = [posixpath.basename(class_folders[path]) for path in kept]
    if not labelled and (problem or "" in classes):
        classes = [""] * len(kept)
    taken = {*kept}
    return kept, classes, dict(suffix_counts(path for path in class_folders if path not in taken))


def _ambiguity(class_folders: Mapping[str, str]) -> str:
    """What two folders say differently about classes, and the way out; empty if nothing.

    Args:
        class_folders: folder with images → its class folder (another one only for folders in tars).
    """
    for folder in sorted(class_folders):
        for end in (end for end, letter in enumerate(folder) if letter == "/"):
            if (outer := folder[:end]) in class_folders:
                return (
                    f"{outer} and {folder} in it both hold images, so the class of the inner ones is not clear; move "
                    f"them up into {outer}, or away"
                )
    first: dict[str, str] = {}
    has_one = len({*class_folders.values()}) == 1  # in each of several tars: then the folders in it are no classes
    for folder, own in class_folders.items():
        place, name = folder if has_one else own, class_name(posixpath.basename(own))
        if (other := first.setdefault(name, place)) != place:
            return (
                f"{other} and {place} would be one class {name!r}, because a class has the name of the innermost "
                "folder; move their images up into the folders that name the classes, or rename one of the two"
            )
    return ""


def number_classes(labels: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names in the natural order of the labels, and the number of each label's, int64 [len(labels)].

    Without classes all labels are "": there are no names, and the numbers are 0.
    """
    names: dict[str, int] = {}
    numbers = {label: names.setdefault(class_name(label), len(names)) for label in in_natural_order(set(labels))}
    return tuple(filter(None, names)), np.array([numbers[label] for label in labels], dtype=np.int64)


# ---- splits ----------------------------------------------------------------------------------------------------------


class NoSuchSplit(UserError):
    """A folder of data without a split of that name."""


def synonyms_of(split: str) -> list[str]:
    """The names that a split may have in place of each other, its own first."""
    synonyms = next((names for names in (TRAIN_NAMES, VAL_NAMES) if split in names), ())
    return [split, *(name for name in synonyms if name != split)]


def names_in(folder: str) -> list[str]:
    """The names of what is in a folder.

    Raises:
        UserError: it cannot be listed.
    """
    try:
        return os.listdir(folder)
    except OSError as error:
        raise unlistable(folder, error) from error


def unlistable(folder: str, error: OSError) -> UserError:
    """The error about a folder that cannot be listed."""
    return UserError(f"{folder} cannot be listed: {error.strerror}; make it readable or move it")


def splits_in(folder: str) -> list[str]:
    """The folders and tars of a folder that are named as splits, without `.tar`: of training first."""
    names = {name.removesuffix(".tar") for name in names_in(folder)}
    return [name for name in (*TRAIN_NAMES, *VAL_NAMES, "test") if name in names]


def is_training(dataset: str, split: str) -> bool:
    """Whether a split of an embedded data set is the training split.

    Raises:
        UserError: it is not the validation split either.
    """
    if split not in (*TRAIN_NAMES, *VAL_NAMES):
        raise UserError(f"{dataset} has no split {split!r}; it has train and validation")
    return split in TRAIN_NAMES


def no_such_split(folder: str, split: str, wanted: str, hint: str = "") -> NoSuchSplit:
    """The error about a folder without a split, `wanted` says in which forms."""
    found = sorted(name for name in names_in(folder) if not hidden(name))
    synonyms = ", ".join(synonyms_of(split)[1:]) or "none"
    return NoSuchSplit(
        f"{folder} has no {wanted} (synonyms tried: {synonyms}); it holds {enumerate_some(found, 8)}{hint}"
    )
