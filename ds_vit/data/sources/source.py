"""What a source of images is, and what all kinds of sources share.

A source is a finite list of (image, target) pairs with named classes, or of images with captions. It is opened once, in
the main process, and read in any number of worker processes.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from ds_vit import randomness
from ds_vit.data.decode import decode, orientation
from ds_vit.data.sources.captions import Captions
from ds_vit.fault_tolerance.errors import UserError

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

_ROWS_AT_ONCE = 1 << 16  # of a fingerprint: no second copy of millions of names
_HEADERS = 200  # files
_THREADS = 8  # Pillow decodes outside the interpreter's lock, and folders are often on a network


class Source(ABC):
    """A finite, indexable set of images with labels, captions or both.

    Attributes:
        class_names: the classes, in the order of their numbers; empty for images without labels, whose targets are 0.
        has_captions: whether its images have captions.
        multi_label: whether a target is a multi-hot vector (float32 [C]) in place of a class number.
        entries: what `entry` knows in addition to "target" and "captions".
        left_out: how many files were found that are not images we read, by suffix ("" for none).
        mixture: (images, rows of an epoch) of each part of a weighted mixture (`SampleOrder`).
    """

    class_names: tuple[str, ...]
    has_captions: bool = False
    multi_label: bool = False
    entries: Collection[str] = ("image",)
    left_out: Mapping[str, int] = {}
    mixture: tuple[tuple[int, int], ...] = ()

    @property
    def num_classes(self) -> int:
        """How many classes targets are numbered over."""
        return len(self.class_names)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of which samples these are: their names within the data set, labels and captions, not their pixels.

        The same for the same images in a folder that was moved, or in a tar of it. A million names take 0.1 s.
        """
        return fingerprint_of(self.identity(), str(len(self)))

    def identity(self) -> tuple[np.ndarray, ...]:
        """What `fingerprint` hashes, in the order of the samples; by default their targets and captions."""
        targets = np.array([self.target(index) for index in range(len(self))])
        if not self.has_captions:
            return (targets,)
        return targets, *Captions.of(self.captions(index) for index in range(len(self))).identity()

    @abstractmethod
    def __len__(self) -> int: ...

    def has(self, entry: str) -> bool:
        """Whether the samples have an entry."""
        return {"target": bool(self.class_names), "captions": self.has_captions}.get(entry, entry in self.entries)

    def entry(self, name: str, index: int) -> Any:
        """An entry of a sample, read when it is asked for: "image" (its file's bytes, or pixels), "target", "captions".

        Raises:
            OSError: its file cannot be read.
        """
        if name == "image":
            data = self.encoded(index)
            return self.image(index) if data is None else data
        if name not in ("target", "captions"):
            raise LookupError(f"{type(self).__name__} has no entry {name!r}")
        return self.target(index) if name == "target" else self.captions(index)

    def encoded(self, index: int) -> bytes | None:
        """The bytes of an image's file; None in a source of pixels, which overrides `image`.

        Raises:
            OSError: its file cannot be read.
        """
        return None

    def image(self, index: int) -> Image.Image:
        """Decode one image, to RGB.

        Raises:
            ImageDecodeError: its content cannot be decoded.
            OSError: its file cannot be read.
        """
        data = self.encoded(index)
        assert data is not None, f"{type(self).__name__} has neither encoded() nor image()"
        return decode(data, self.describe(index))

    @abstractmethod
    def target(self, index: int) -> int | np.ndarray:
        """The class number, or the float32 multi-hot vector [C]; nothing is decoded for it."""

    def captions(self, index: int) -> tuple[str, ...]:
        """All captions of one image, where `has_captions`; nothing is decoded for it.

        An empty tuple means that they are damaged: the image then counts as damaged too.
        """
        raise LookupError(f"{self.describe(index)} has no captions")

    @abstractmethod
    def describe(self, index: int) -> str:
        """Where the image comes from (a file's name), for messages."""


def fingerprint_of(arrays: Iterable[np.ndarray], prefix: str = "") -> str:
    """A hash of arrays, their types and shapes, and of a text before them."""
    digest = hashlib.blake2b(prefix.encode(), digest_size=16)
    for array in arrays:
        digest.update(f";{array.dtype.str}{array.shape}".encode())
        for first in range(0, len(array), _ROWS_AT_ONCE):
            digest.update(np.ascontiguousarray(array[first : first + _ROWS_AT_ONCE]).view(np.uint8).data)
    return digest.hexdigest()


class ArraySource(Source):
    """A source that holds names and class numbers in NumPy arrays.

    A list of a million strings would be copied into every worker, page by page, by its reference counts.
    """

    _targets: np.ndarray  # int64 [N]
    _paths: np.ndarray | None = None  # bytes [N], with forward slashes
    _captions: Captions | None = None
    no_classes_because: str = ""
    """Why the images have no classes; only a task without labels takes them then."""

    def __len__(self) -> int:
        return len(self._targets)

    def set_captions(self, captions: Captions) -> None:
        """Give the images captions in place of classes."""
        self._captions, self.has_captions = captions, True
        self.class_names, self._targets = (), np.zeros(len(captions), dtype=np.int64)

    def number_over(self, classes: Sequence[str]) -> None:
        """Number the classes, one per image, over these names, among which they are."""
        number_of = {name: number for number, name in enumerate(classes)}
        self._targets = np.array([number_of[name] for name in self.class_names])[self._targets]
        self.class_names = tuple(classes)

    def drop_classes(self, num_images: int, reason: str) -> None:
        """Leave the images without classes."""
        self.class_names, self._targets, self.no_classes_because = (), np.zeros(num_images, dtype=np.int64), reason

    def captions(self, index: int) -> tuple[str, ...]:
        return super().captions(index) if self._captions is None else self._captions[index]

    def target(self, index: int) -> int | np.ndarray:
        return int(self._targets[index])

    def path(self, index: int) -> str:
        """Where the image is within the data set, with forward slashes."""
        assert self._paths is not None, f"{type(self).__name__} has no paths"
        return os.fsdecode(self._paths[index])

    def identity(self) -> tuple[np.ndarray, ...]:
        names = () if self._paths is None else (below_common_folder(self._paths),)
        return *names, self._targets, *(() if self._captions is None else self._captions.identity())


def below_common_folder(paths: np.ndarray) -> np.ndarray:
    """Names of files without the folders that all of them lie in.

    Args:
        paths: bytes [N] with forward slashes, N >= 1.

    Returns:
        uint8 [N, W], each name padded with zeros to the longest; a view.
    """
    letters = np.ascontiguousarray(paths).view(np.uint8).reshape(len(paths), -1)
    same = np.ones(letters.shape[1], dtype=bool)
    for first in range(0, len(letters), _ROWS_AT_ONCE):
        same &= (letters[first : first + _ROWS_AT_ONCE] == letters[0]).all(axis=0)
    common = len(same) if same.all() else int(same.argmin())
    return letters[:, paths[0][:common].rfind(b"/") + 1 :]


# ---- listing ---------------------------------------------------------------------------------------------------------


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


def shortened(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, for messages."""
    return (", ".join(names[:most]) or "nothing") + (", ..." if len(names) > most else "")


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


def check_labels(source: Source, labels: np.ndarray, valid: np.ndarray, classes: Sequence[str]) -> None:
    """Raise UserError if a label is not one of the classes.

    Args:
        source: describes a sample.
        labels: as the files have them, [N].
        valid: bool [N].
        classes: their names.
    """
    if valid.all():
        return
    first = int(valid.argmin())
    label = os.fsdecode(labels[first]) if isinstance(labels[first], bytes) else int(labels[first])
    raise UserError(
        f"{source.describe(first)} has the label {label!r}; the {len(classes)} classes are {shortened(classes)}, with "
        f"the numbers 0 to {len(classes) - 1}; {int((~valid).sum())} of {len(labels)} samples have such a label"
    )


def headers_of_some(source: Source) -> list[tuple[str, int]]:
    """The mode and `orientation` of up to 200 files, drawn by key; ("", 0) if one is no image or cannot be read.

    No image is decoded.
    """

    def header(number: int) -> tuple[str, int]:
        path = source.describe(number)
        try:
            with Image.open(path if os.path.isfile(path) else io.BytesIO(source.encoded(number) or b"")) as image:
                return image.mode, orientation(image)
        except Exception:
            return "", 0

    size = len(source)
    drawn = randomness.permute(np.arange(min(size, _HEADERS)), size, randomness.name_key("headers"))
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(header, drawn.tolist()))


# ---- splits ----------------------------------------------------------------------------------------------------------


class NoSuchSplit(UserError):
    """A folder of data without a split of that name."""


def synonyms_of(split: str) -> list[str]:
    """The names that a split may have in place of each other, its own first."""
    synonyms = next((names for names in (TRAIN_NAMES, VAL_NAMES) if split in names), ())
    return [split, *(name for name in synonyms if name != split)]


def no_such_split(folder: str, split: str, wanted: str, hint: str = "") -> NoSuchSplit:
    """The error about a folder without a split, `wanted` says in which forms."""
    found = sorted(name for name in os.listdir(folder) if not hidden(name))
    synonyms = ", ".join(synonyms_of(split)[1:]) or "none"
    return NoSuchSplit(f"{folder} has no {wanted} (synonyms tried: {synonyms}); it holds {shortened(found, 8)}{hint}")
