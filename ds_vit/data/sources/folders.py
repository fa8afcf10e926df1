"""Sources in folders.

Samples and classes are numbered as timm's readers number them (natural order of the paths, a class is the name of the
innermost folder), with ties broken by the plain name, so that the numbering never depends on the file system. Names
and offsets are held in NumPy arrays: a list of a million strings would be copied into every worker, page by page, by
its reference counts.
"""

from __future__ import annotations

import csv
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from timm.utils.misc import natural_key

from ds_vit.data.decode import undecodable
from ds_vit.data.sources.class_checks import empty_classes, without_images
from ds_vit.data.sources.listing import LABELS_FILE, list_images, number_classes
from ds_vit.data.sources.source import IMAGE_EXTENSIONS, Source, below_common_folder
from ds_vit.data.sources.tars import TarSource
from ds_vit.fault_tolerance.errors import UserError

# timm.data.dataset_factory's own synonyms.
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("validation", "val", "valid", "eval", "evaluation")


class NoSuchSplit(UserError):
    """A folder of data without a split of that name."""


def open_folder(
    data_dir: str, split: str, classes: Sequence[str] | None = None, *, allow_empty: bool = False
) -> Source:
    """Open `data_dir/<split>` or `data_dir/<split>.tar`; see `open_source`."""
    location = find_split(data_dir, split)
    if os.path.isfile(location):
        return TarSource(location, [location])
    if os.path.isfile(os.path.join(location, LABELS_FILE)):
        return MultiLabelSource(location, classes)
    entries = sorted(os.listdir(location))
    tars = [os.path.join(location, name) for name in entries if name.lower().endswith(".tar")]
    folders = any(os.path.isdir(os.path.join(location, name)) for name in entries)
    if tars and folders:
        raise UserError(
            f"{location} holds class folders and {len(tars)} tar files, so that it is unclear which are the data; "
            "move one kind elsewhere"
        )
    return TarSource(location, tars) if tars else FolderSource(location, allow_empty=allow_empty)


def find_split(data_dir: str, split: str) -> str:
    """The folder or tar file of a split; a name and its synonyms stand for each other, the name itself goes first.

    Raises:
        UserError: no such folder, no such split in it.
    """
    if not os.path.isdir(data_dir):
        if os.path.isfile(data_dir):
            raise UserError(
                f"--data-dir {data_dir} is a file; pass the folder that holds <split>/ or <split>.tar for both splits"
            )
        raise UserError(f"--data-dir {data_dir} does not exist")
    names = synonyms_of(split)
    for name in names:
        if os.path.isdir(folder := os.path.join(data_dir, name)):
            return folder
        if os.path.isfile(tar := os.path.join(data_dir, f"{name}.tar")):
            return tar
    found = sorted(name for name in os.listdir(data_dir) if not name.startswith("."))
    above, own = os.path.split(os.path.normpath(data_dir))
    hint = f"give the folder above it, {above or '.'}" if own in (*TRAIN_NAMES, *VAL_NAMES) else ""
    raise NoSuchSplit(
        f"{data_dir} has no {split}/ and no {split}.tar (synonyms tried: {', '.join(names[1:]) or 'none'}); it holds "
        + (", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing")
        + f"; {hint or f'a split has a folder for each class: {split}/<class>/<image>'}"
    )


def synonyms_of(split: str) -> list[str]:
    """The names that a split may have in place of each other, its own first."""
    synonyms = next((names for names in (TRAIN_NAMES, VAL_NAMES) if split in names), ())
    return [split, *(name for name in synonyms if name != split)]


def _walk(root: str) -> list[str]:
    """All files under `root`, as paths relative to it with forward slashes."""
    paths = []
    for folder, _, files in os.walk(root, followlinks=True):
        relative = os.path.relpath(folder, root).replace(os.sep, "/")
        paths += files if relative == "." else [f"{relative}/{name}" for name in files]
    return paths


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class _FileSource(Source):
    """Images in files of their own, below one folder."""

    def __init__(self, root: str, paths: list[str]) -> None:
        self._root = root
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self._paths)

    def encoded(self, index: int) -> bytes:
        return _read(self.describe(index))

    def path(self, index: int) -> str:
        """Where the image is below the split's folder, with forward slashes."""
        return os.fsdecode(self._paths[index])

    def describe(self, index: int) -> str:
        return os.path.join(self._root, self.path(index))


class ImageFiles(_FileSource):
    """Images by their paths, without labels. A file that cannot be read counts as one that cannot be decoded."""

    class_names = ()

    def __init__(self, paths: list[str]) -> None:
        super().__init__("", paths)

    def encoded(self, index: int) -> bytes:
        try:
            return super().encoded(index)
        except OSError as error:
            raise undecodable(self.describe(index), OSError(error.strerror)) from error

    def target(self, index: int) -> int:
        raise LookupError(f"{self.describe(index)} has no label")


def find_images(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The images that files and folders stand for: a file itself, whatever its name, and all images below a folder.

    Returns:
        Paths in the order given, those of a folder in natural order.

    Raises:
        UserError: a path does not exist, or a folder has no images in it.
    """
    found: list[str] = []
    for path in [os.fspath(path) for path in paths]:
        if not os.path.isdir(path):
            if not os.path.exists(path):
                raise UserError(f"{path} does not exist; give image files, or a folder of them")
            found.append(path)
            continue
        files = _walk(path)
        images = [name for name in files if posixpath.splitext(name)[1].lower() in IMAGE_EXTENSIONS]
        if not images:
            raise UserError(
                f"{path} holds no images ({len(files)} other files; read are {' '.join(sorted(IMAGE_EXTENSIONS))})"
            )
        found += [os.path.join(path, name) for name in sorted(images, key=lambda name: (natural_key(name), name))]
    return found


class FolderSource(_FileSource):
    """An ImageFolder: `root/<class>/**/<image>`.

    Args:
        root: the folder.
        allow_empty: a class folder without images is a class all the same.

    Raises:
        UserError: no images, none in a class folder, or (unless allowed) a class folder without any.
    """

    def __init__(self, root: str, *, allow_empty: bool = False) -> None:
        paths = _walk(root)
        labels = [posixpath.basename(posixpath.dirname(path)) for path in paths]
        listing = list_images(paths, labels, root)
        images = [paths[number] for number in listing.files]
        empty = empty_classes(root, images)
        if empty and not allow_empty:
            raise UserError(without_images(root, empty, paths))
        super().__init__(root, images)
        self.left_out = dict(listing.left_out)
        # The empty ones stand in the list for their names alone.
        of_empty = [posixpath.basename(folder) for folder in empty]
        self.class_names, numbers = number_classes([*listing.labels, *of_empty])
        self._targets = numbers[: len(images)]

    def target(self, index: int) -> int:
        return int(self._targets[index])

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return below_common_folder(self._paths), self._targets


class MultiLabelSource(_FileSource):
    """Images with any number of labels each: `root/labels.csv` of `file,labels` with labels joined by `;`.

        file,labels
        images/0001.jpg,dog;grass
        images/0002.jpg,

    Targets are multi-hot float32 vectors over the classes given, else over the labels found, in natural order.

    Raises:
        UserError: a malformed line, a file that is missing or listed twice, a label that is not in `classes`.
    """

    multi_label = True

    def __init__(self, root: str, classes: Sequence[str] | None = None) -> None:
        rows = dict(self._rows(os.path.join(root, LABELS_FILE)))
        files = set(_walk(root)) - {LABELS_FILE}
        missing = sorted(set(rows) - files)
        if missing:
            raise UserError(
                f"{os.path.join(root, LABELS_FILE)} lists {len(missing)} files that are not below {root}, "
                f"the first is {missing[0]}"
            )
        if not rows:
            raise UserError(f"{os.path.join(root, LABELS_FILE)} lists no images")
        self.left_out = dict(Counter(posixpath.splitext(path)[1].lower() for path in files - set(rows)))
        paths = sorted(rows, key=lambda path: (natural_key(path), path))
        super().__init__(root, paths)
        if classes is None:
            names, _ = number_classes([label for labels in rows.values() for label in labels])
        else:
            names = tuple(classes)
        numbers = {name: number for number, name in enumerate(names)}
        unknown = sorted({label for labels in rows.values() for label in labels} - set(names))
        if unknown:
            raise UserError(
                f"{os.path.join(root, LABELS_FILE)} has {len(unknown)} labels that the training split lacks: "
                + ", ".join(unknown[:5])
            )
        self.class_names = names
        # Row i's labels are labels[bounds[i]:bounds[i + 1]].
        self._labels = np.array(
            [number for path in paths for number in sorted(numbers[label] for label in rows[path])], dtype=np.int64
        )
        self._bounds = np.cumsum([0, *(len(rows[path]) for path in paths)])

    @staticmethod
    def _rows(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        seen: set[str] = set()
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            if (header := next(reader, [])) != ["file", "labels"]:
                raise UserError(f"{path}, line 1: the header must be 'file,labels', not {','.join(header)!r}")
            for row in reader:
                if not row:
                    continue
                if len(row) != 2 or not row[0]:
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(row)} columns in place of 2 (file,labels joined by ';')"
                    )
                name = posixpath.normpath(row[0])
                if name in seen:
                    raise UserError(f"{path}, line {reader.line_num}: {name} is listed twice")
                seen.add(name)
                yield name, tuple(dict.fromkeys(label.strip() for label in row[1].split(";") if label.strip()))

    def target(self, index: int) -> np.ndarray:
        target = np.zeros(self.num_classes, dtype=np.float32)
        target[self._labels[self._bounds[index] : self._bounds[index + 1]]] = 1.0
        return target

    def told_apart_by(self) -> tuple[np.ndarray, ...]:
        return below_common_folder(self._paths), self._labels, self._bounds
