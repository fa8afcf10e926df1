"""Which files of a source are its images, and the numbers of their classes."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from timm.utils.misc import natural_key

from ds_vit.data.sources.source import IMAGE_EXTENSIONS
from ds_vit.fault_tolerance.errors import UserError

LABELS_FILE = "labels.csv"


class Listing(NamedTuple):
    """The images among the files of a split: which files (numbers into the list given), and their labels."""

    files: list[int]
    labels: list[str]
    left_out: Counter[str]


def list_images(paths: list[str], labels: list[str], where: str) -> Listing:
    """Pick the images that lie in a class folder, in timm's order; count the rest by suffix."""
    kept, in_no_class, left_out = [], 0, Counter()
    for number, (path, label) in enumerate(zip(paths, labels, strict=True)):
        suffix = posixpath.splitext(path)[1].lower()
        is_image = suffix in IMAGE_EXTENSIONS
        if is_image and label:
            kept.append(number)
        else:
            left_out[suffix] += 1
            in_no_class += is_image
    if not kept:
        others = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in left_out.most_common(5))
        if in_no_class:
            raise UserError(
                f"{where} holds {in_no_class} images but no class folders; put each image into a folder named as its "
                f"class, or add {LABELS_FILE} for multi-label data"
            )
        raise UserError(
            f"{where} holds no images in class folders (files found: {others or 'none'}; read are "
            f"{' '.join(sorted(IMAGE_EXTENSIONS))})"
        )
    kept.sort(key=lambda number: (natural_key(paths[number]), paths[number]))
    return Listing(kept, [labels[number] for number in kept], left_out)


def number_classes(labels: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names in natural order, and the number of each label among them, int64 [len(labels)]."""
    names = sorted(set(labels), key=lambda name: (natural_key(name), name))
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(names), np.array([numbers[label] for label in labels], dtype=np.int64)
