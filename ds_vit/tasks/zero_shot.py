"""Zero-shot classification (`--zeroshot`): an image is of the class whose sentences are nearest to it.

A class is the mean of the normalised features of its name in several sentences, normalised again (Radford et al. 2021,
https://arxiv.org/abs/2103.00020, section 3.1.4).

Shapes: B images at once, C classes, T templates, E common width of both towers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo

from ds_vit.data.settings import ZeroShotData
from ds_vit.data.sources.combined import mixed
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, read_text, require_package, stripped_lines
from ds_vit.tasks.metrics import Batch, Figure, Means
from ds_vit.tasks.retrieval import places_of_partners

ZERO_SHOT = (
    Figure("zeroshot_top1", "zero-shot top-1", "%"),
    Figure("zeroshot_top5", "zero-shot top-5", "%", summed_up=False),
)
_SENTENCES = {"none": "{}", "simple": "a photo of a {}."}
_SPLIT = "validation"


def open_zero_shot(name: str, templates: str, data_dir: str | None = None) -> ZeroShotData:
    """Open the data set of `--zeroshot`, its validation split, and write the sentences of its classes.

    Args:
        name: what `--dataset` or `--data-dir` take, or a split in it: `DIR/test`, `wds/DIR/test`.
        templates: `--zeroshot-templates`.
        data_dir: the folder of a data set of torchvision.

    Raises:
        UserError: no such data, not one class an image, or no such templates.
    """
    try:
        source = _open_split(name, data_dir)
    except UserError as error:
        raise UserError(*(f"--zeroshot {name}: {problem}" for problem in error.problems)) from None
    if source.multi_label or not source.class_names:
        found = "several labels" if source.multi_label else "captions only"
        raise UserError(f"--zeroshot {name} needs one class an image, and these have {found}")
    source, words = _named_by_file(name, source)
    sentences = read_templates(templates)
    return ZeroShotData(source, tuple(line.replace("{}", word) for word in words for line in sentences))


def _open_split(name: str, data_dir: str | None) -> Source:
    dataset, path = _place(name)
    if not path:
        return open_source(name, data_dir if name.startswith("torch/") else None, _SPLIT)
    folder, split = os.path.split(os.path.abspath(path))
    if path.endswith(".tar"):
        return open_source(dataset, folder, split)
    try:
        return open_source(dataset, path, _SPLIT)
    except UserError as error:
        try:
            return open_source(dataset, folder, split)
        except UserError:
            raise error from None


def _place(name: str) -> tuple[str, str]:
    """The kind of data on disk, as `open_source` takes it, and its path; empty for other data."""
    kind = next((kind for kind in ("wds/", "hfds/", "parquet/") if name.startswith(kind)), "")
    return ("", name) if os.path.isdir(name) else (kind, name.removeprefix(kind) if kind else "")


def _named_by_file(name: str, source: Source) -> tuple[Source, tuple[str, ...]]:
    """A source and its classes' names for prompts: those of a classnames.txt where the data have numbers only.

    The file has a name a line, in the order of the numbers, in the folder of the data or that around it. The source
    then has all of its classes, as CLIP_benchmark has them, also those without an image.
    """
    path = _place(name)[1]
    folders = (path, os.path.dirname(os.path.abspath(path))) if path else ()
    file = next((file for folder in folders if os.path.isfile(file := os.path.join(folder, "classnames.txt"))), "")
    if not file or not all(each.isdigit() for each in source.class_names):
        return source, class_words(source.class_names)
    words = stripped_lines(read_text(file, ""))
    numbers = [str(number) for number in range(len(words))]
    if unknown := {*source.class_names} - {*numbers}:
        raise UserError(f"{file} names {len(words)} classes, and the images have the class {max(unknown)}")
    return mixed([source], (), numbers), words


def class_words(names: Sequence[str]) -> tuple[str, ...]:
    """The classes' names for prompts: open_clip's for ImageNet's numbers; others with spaces for underscores.

    Raises:
        UserError: numbers that are not ImageNet-1k's, or open_clip is not installed.
    """
    if not all(re.fullmatch(r"n\d{8}", name) for name in names):
        return tuple(name.replace("_", " ") for name in names)
    words = dict(zip(ImageNetInfo("imagenet-1k").label_names(), _of_open_clip("IMAGENET_CLASSNAMES"), strict=True))
    if unknown := [name for name in names if name not in words]:
        raise UserError(f"--zeroshot: {unknown[0]} is no class of ImageNet-1k; name the folders by words")
    return tuple(words[name] for name in names)


def read_templates(word: str) -> tuple[str, ...]:
    """The sentences of `--zeroshot-templates`, {} for the class: none, simple, openai, or a file with one per line.

    Raises:
        UserError: no such word or file, a line without {}, or open_clip is not installed.
    """
    if word == "openai":
        return tuple(template("{}") for template in _of_open_clip("OPENAI_IMAGENET_TEMPLATES"))
    if word in _SENTENCES:
        return (_SENTENCES[word],)
    if not os.path.isfile(word):
        known = (*_SENTENCES, "openai")
        near = did_you_mean(word, known)
        raise UserError(f"--zeroshot-templates {word} is none of {', '.join(known)}, and no file{near}")
    lines = stripped_lines(read_text(word, "--zeroshot-templates "))
    for line in lines or ("",):
        if "{}" not in line:
            raise UserError(f'--zeroshot-templates {word} needs {{}} for the class in each line; "{line}" has none')
    return lines


def _of_open_clip(name: str) -> Sequence:
    """A list of open_clip's zero-shot metadata."""
    with require_package("open_clip_torch", "--zeroshot with ImageNet's class names or --zeroshot-templates openai"):
        from open_clip import zero_shot_metadata
    return getattr(zero_shot_metadata, name)


class ZeroShotAccuracy(Means):
    """Top-1 and top-5 in percent. The logit scale is positive and decides nothing; of equal classes the first counts.

    Args:
        classes: sums or means of the features of each class's sentences, [C, E].
    """

    def __init__(self, classes: torch.Tensor) -> None:
        super().__init__(classes.device, *(figure.name for figure in ZERO_SHOT))
        self.classes = F.normalize(classes.double(), dim=1)
        self._numbers = torch.arange(len(classes), device=classes.device)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Normalised features of images float32 [B, E]; targets int64 [B]."""
        places = places_of_partners(outputs.double(), batch["targets"], self.classes, self._numbers)
        self.count((100.0 * (places < 1), 100.0 * (places < 5)), batch)
