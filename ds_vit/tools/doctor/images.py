"""`ds-vit doctor --images DIR`: decode every image of a data set in parallel and list what needs attention."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from rich.console import Console
from rich.progress import track

from ds_vit.data.decode import ImageDecodeError, describe_depth, orientation, to_rgb, undecodable
from ds_vit.data.masks import MaskValues, decode_mask, require_same_size
from ds_vit.data.sources.folders import walk
from ds_vit.data.sources.source import IMAGE_EXTENSIONS, LABELS_FILE, hidden, is_image
from ds_vit.data.sources.tars import members_of
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.metrics import say as print_lines
from ds_vit.tasks.segmentation.source import find_labels, find_splits, pair_files

_UNREAD = frozenset({".heic", ".heif", ".avif"})
_FATAL = frozenset({"broken", "unpaired", "size", "values"})
_SHOWN = 50  # files of a kind


class Problem(NamedTuple):
    """A file that needs attention.

    Attributes:
        kind: a key of `_ADVICE`.
        file: its path, or archive and member.
        reason: for people.
    """

    kind: str
    file: str
    reason: str = ""


class _Pair(NamedTuple):
    """An image, its mask, and the values that masks may have where labels.csv says so."""

    image: str
    mask: str
    values: MaskValues | None


def check_images(folder: str, console: Console) -> int:
    """Carry out `ds-vit doctor --images`; gives the exit code: 0, or 65 where an image or mask cannot be
    decoded, lacks the other, or a mask does not fit.

    Args:
        folder: with images and tar shards, at any depth; of a folder for segmentation, masks are checked too.
        console: gets the list and a progress bar.

    Raises:
        UserError: there is no such folder, no image in it, or a malformed labels.csv of masks.
    """
    if not Path(folder).is_dir():
        raise UserError(f"--images {folder}: there is no such folder")
    files = sorted(_files(folder))
    if not files:
        raise UserError(
            f"--images {folder}: no images and no .tar files (read are {' '.join(sorted(IMAGE_EXTENSIONS))})"
        )
    splits = find_splits(folder)
    pairs, found = _pairs(folder, splits)
    of_masks = tuple(os.path.join(masks, "") for _, masks in splits.values())
    tasks = [*(path for path in files if not path.startswith(of_masks)), *pairs]
    count = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(_examine, tasks, chunksize=min(64, len(tasks) // 64 + 1))
        for number, problems in track(results, "decoding", len(tasks), console=Console(file=sys.stderr)):
            count += number
            found += problems
    _show(console, folder, count, found)
    if pairs:
        print_lines(console, f"{len(pairs):,} masks were compared with their images")
    return exit_codes.UNREADABLE if any(problem.kind in _FATAL for problem in found) else exit_codes.OK


def _pairs(folder: str, splits: Mapping[str, tuple[str, str]]) -> tuple[list[_Pair], list[Problem]]:
    """The images with masks of a folder's splits, and what is wrong with their names."""
    pairs: list[_Pair] = []
    found: list[Problem] = []
    values = None
    if splits and os.path.isfile(os.path.join(folder, LABELS_FILE)):
        known = find_labels(folder, None, -1, False).values.values.tolist()
        values = MaskValues(known, {255} - {*known})
    for roots in splits.values():
        try:
            images, masks, _, problem = pair_files(*roots)
        except UserError as error:
            images, masks, problem = [], [], str(error)
        found += [Problem("unpaired", roots[0], problem)] if problem else []
        for image, mask in zip(images, masks, strict=True):
            pairs.append(_Pair(os.path.join(roots[0], image), os.path.join(roots[1], mask), values))
    return pairs, found


def _problem_of_pair(pair: _Pair) -> Problem | None:
    kind, size = "values", None
    with contextlib.suppress(Exception), Image.open(pair.image) as image:  # a damaged one is listed as an image
        size = image.height, image.width
    try:
        mask = decode_mask(Path(pair.mask).read_bytes(), pair.mask)
        if pair.values is not None:
            pair.values.classes(mask, pair.mask)
        kind = "size"
        require_same_size(pair.image, size or mask.shape, mask.shape)
    except ImageDecodeError as error:
        return Problem("broken", pair.mask, error.reason)
    except UserError as error:
        return Problem(kind, pair.mask, str(error).removeprefix(f"{pair.mask}: "))
    return None


def _files(folder: str) -> Iterator[str]:
    for path in walk(folder):
        if os.path.splitext(path)[1].lower() in {*IMAGE_EXTENSIONS, *_UNREAD, ".tar"} and not hidden(path):
            yield os.path.join(folder, path)


def _examine(path: str | _Pair) -> tuple[int, list[Problem]]:
    """(images in the file, their problems)."""
    if isinstance(path, _Pair):
        return 0, [problem for problem in [_problem_of_pair(path)] if problem]
    if not path.lower().endswith(".tar"):
        return 1, [problem for problem in [_problem(path, lambda: Path(path).read_bytes())] if problem]
    found: list[Problem | None] = []
    count = 0
    try:
        with open(path, "rb") as archive:
            for name, _, offset, size in members_of(archive, path):
                if is_image(name):
                    count += 1
                    read = partial(os.pread, archive.fileno(), size, offset)
                    found.append(_problem(f"{path}: {name}", read))
    except (OSError, UserError) as error:
        found.append(Problem("broken", path, str(error)))
    return count, [problem for problem in found if problem]


def _problem(name: str, read: Callable[[], bytes]) -> Problem | None:
    if os.path.splitext(name)[1].lower() in _UNREAD:
        return Problem("unread", name)
    data = b""
    try:
        data = read()
        with Image.open(io.BytesIO(data)) as image:
            mode = image.mode
            turned = orientation(to_rgb(image)) > 1
    except Exception as error:  # whatever a decoder says of a damaged file
        return Problem("broken", name, undecodable(name, error, len(data)).reason)
    if turned:
        return Problem("rotated", name)
    return Problem("scaled", name, f"mode {mode}") if describe_depth(mode) else None


_ADVICE = {
    "broken": ("cannot be decoded", "replace these files, or train with --on-bad-image skip"),
    "unread": ("are in a format that training leaves out", "convert them: mogrify -format jpg -quality 95 {files}"),
    "rotated": (
        "are stored turned, which EXIF says and training ignores by default, as timm does",
        "if they should be upright: --exif-rotation on, or mogrify -auto-orient {files}",
    ),
    "unpaired": ("folders of images and masks do not pair", "training stops at them"),
    "size": ("are masks of another size than their image", "save each at the size of its image"),
    "values": ("are masks with values that are no class", f"list them in {LABELS_FILE}, or pass --ignore-index VALUE"),
    "scaled": ("have 16 bits per pixel", "training scales them to 8; for another scale convert them"),
}


def _show(console: Console, folder: str, count: int, found: list[Problem]) -> None:
    say = partial(print_lines, console)
    say(f"{count:,} images in {folder}: {len(found):,} need attention" if found else f"{count:,} images: all are sound")
    for kind, of_kind in itertools.groupby(sorted(found), key=lambda problem: problem.kind):
        problems = [*of_kind]
        what, advice = _ADVICE[kind]
        say(f"\n{len(problems):,} {what}; {advice.format(files=shlex.quote(problems[0].file) + ' …')}")
        for problem in problems[:_SHOWN]:
            say(f"  {problem.file}" + (f": {problem.reason}" if problem.reason else ""))
        if len(problems) > _SHOWN:
            say(f"  … and {len(problems) - _SHOWN:,} more")
