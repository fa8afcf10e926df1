"""`ds-vit doctor --images DIR`: decode every image of a data set in parallel and list what needs attention."""

from __future__ import annotations

import io
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from rich.console import Console
from rich.progress import track

from ds_vit.data.decode import ImageDecodeError, describe_depth, orientation, to_rgb, undecodable
from ds_vit.data.sources.folders import walk
from ds_vit.data.sources.listing import IMAGE_EXTENSIONS, LABELS_FILE, hidden, is_image
from ds_vit.data.sources.masks import Labels, decode_mask, find_labels, find_splits, pair_files, require_same_size
from ds_vit.data.sources.tars import members_of
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.metrics import say as print_lines

_UNREAD = frozenset({".heic", ".heif", ".avif"})
_FATAL = frozenset({"broken", "unpaired", "mask"})
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
    folder = str(Path(folder))  # paths of images and of pairs are compared
    files = sorted(_files(folder))
    if not files:
        raise UserError(
            f"--images {folder}: no images and no .tar files (read are {' '.join(sorted(IMAGE_EXTENSIONS))})"
        )
    mask_of, labels, found = _masks(folder)
    masks = {*mask_of.values()}
    tasks = [(path, mask_of.get(path)) for path in files if path not in masks]
    count = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(partial(_examine, labels=labels), tasks, chunksize=min(64, len(tasks) // 64 + 1))
        for number, problems in track(results, "decoding", len(tasks), console=Console(file=sys.stderr)):
            count += number
            found += problems
    _show(console, folder, count, found)
    if masks:
        values = "" if labels else f"; without {LABELS_FILE} their values were not checked"
        print_lines(console, f"{len(masks):,} masks were compared with their images{values}")
    return exit_codes.UNREADABLE if any(problem.kind in _FATAL for problem in found) else exit_codes.OK


def _masks(folder: str) -> tuple[dict[str, str], Labels | None, list[Problem]]:
    """Of a folder for segmentation: the mask of each image, the classes of its labels.csv, and unpaired files."""
    mask_of: dict[str, str] = {}
    found: list[Problem] = []
    splits, labels = find_splits(folder), None
    if splits and os.path.isfile(os.path.join(folder, LABELS_FILE)):
        labels = find_labels(folder, None, None, False)
    for images, masks in splits.values():
        pairs, problem = pair_files(images, masks)
        found += [Problem("unpaired", images, problem)] * bool(problem)
        mask_of.update((os.path.join(images, image), os.path.join(masks, mask)) for image, mask in pairs)
    return mask_of, labels, found


def _problem_of_mask(image: str, mask: str, labels: Labels | None) -> list[Problem]:
    try:
        found = decode_mask(Path(mask).read_bytes(), mask)
        if labels is not None:
            labels.classes(found, mask)
        with Image.open(image) as opened:
            require_same_size(image, (opened.height, opened.width), found.shape)
    except (UserError, OSError) as error:
        kind = "broken" if isinstance(error, ImageDecodeError) else "mask"
        return [Problem(kind, mask, getattr(error, "reason", "") or str(error).removeprefix(f"{mask}: "))]
    return []


def _files(folder: str) -> Iterator[str]:
    for path in walk(folder):
        if os.path.splitext(path)[1].lower() in {*IMAGE_EXTENSIONS, *_UNREAD, ".tar"} and not hidden(path):
            yield os.path.join(folder, path)


def _examine(task: tuple[str, str | None], labels: Labels | None) -> tuple[int, list[Problem]]:
    """(images in the file, their problems and those of the image's mask)."""
    path, mask = task
    if not path.lower().endswith(".tar"):
        of_mask = _problem_of_mask(path, mask, labels) if mask else []
        return 1, _problem(path, lambda: Path(path).read_bytes()) + of_mask
    found: list[Problem] = []
    count = 0
    try:
        with open(path, "rb") as archive:
            for name, _, offset, size in members_of(archive, path):
                if is_image(name):
                    count += 1
                    found += _problem(f"{path}: {name}", partial(os.pread, archive.fileno(), size, offset))
    except (OSError, UserError) as error:
        found.append(Problem("broken", path, str(error)))
    return count, found


def _problem(name: str, read: Callable[[], bytes]) -> list[Problem]:
    if os.path.splitext(name)[1].lower() in _UNREAD:
        return [Problem("unread", name)]
    data = b""
    try:
        data = read()
        with Image.open(io.BytesIO(data)) as image:
            mode = image.mode
            turned = orientation(to_rgb(image)) > 1
    except Exception as error:  # whatever a decoder says of a damaged file
        return [Problem("broken", name, undecodable(name, error, len(data)).reason)]
    if turned:
        return [Problem("rotated", name)]
    return [Problem("scaled", name, f"mode {mode}")] if describe_depth(mode) else []


_ADVICE = {
    "broken": ("cannot be decoded", "replace these files, or train with --on-bad-image skip"),
    "unread": ("are in a format that training leaves out", "convert them: mogrify -format jpg -quality 95 {files}"),
    "rotated": (
        "are stored turned, which EXIF says and training ignores by default, as timm does",
        "if they should be upright: --exif-rotation on, or mogrify -auto-orient {files}",
    ),
    "unpaired": ("folders of images and masks do not pair", "training stops at them"),
    "mask": ("are masks that training stops at", f"correct them, list their values in {LABELS_FILE} or ignore these"),
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
