"""Classes that a run could not learn: folders without images, and those none of whose images can be decoded."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.sources.source import Source

_THREADS = 8  # Pillow decodes outside the interpreter's lock, and folders are often on a network


def empty_classes(root: str, images: Sequence[str]) -> list[str]:
    """The folders without images that stand beside class folders, as paths below `root`; hidden ones are left out.

    Args:
        root: of the split.
        images: paths below it.
    """
    holding = {posixpath.dirname(path) for path in images}
    parents = {posixpath.dirname(folder) for folder in holding} - holding
    above = {folder[:end] for folder in holding for end, letter in enumerate(folder) if letter == "/"}
    found = []
    for parent in sorted(parents):
        with os.scandir(os.path.join(root, parent)) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        found += [path for name in names if (path := posixpath.join(parent, name)) not in holding | above]
    return found


def without_images(root: str, empty: Sequence[str], paths: Sequence[str]) -> str:
    """The message about folders that `empty_classes` found.

    Args:
        root: of the split.
        empty: those folders.
        paths: of all files below it.
    """
    inside = tuple(f"{folder}/" for folder in empty)
    kinds = Counter(posixpath.splitext(path)[1].lower() for path in paths if path.startswith(inside))
    files = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in kinds.most_common(5))
    more = ", ..." if len(empty) > 5 else ""
    return (
        f"{root}: {len(empty)} class folder{'s' if len(empty) > 1 else ''} without images: "
        f"{', '.join(empty[:5])}{more} (files in there: {files or 'none'}); add images, remove the folders, or let "
        "them be classes without examples by --allow-empty-classes"
    )


def unreadable_classes(source: Source) -> dict[str, str]:
    """The classes none of whose images can be decoded, each with its first file and what is wrong with that.

    Args:
        source: with one class an image. Of a class whose first image is sound, no other one is looked at.
    """
    targets = np.array([source.target(number) for number in range(len(source))])
    order = np.argsort(targets, kind="stable")
    classes, starts = np.unique(targets[order], return_index=True)

    def first_error(members: np.ndarray) -> str:
        first = ""
        for number in members:
            try:
                source.image(int(number))
                return ""
            except ImageDecodeError as error:
                first = first or f"{source.describe(int(number))}: {error.reason}"
        return first

    with ThreadPoolExecutor(_THREADS) as pool:
        errors = pool.map(first_error, np.split(order, starts[1:]))
        return {source.class_names[number]: error for number, error in zip(classes, errors, strict=True) if error}
