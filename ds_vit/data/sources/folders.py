"""Sources in folders.

Samples and classes are numbered as timm's readers number them: natural order of the paths, a class is the name of the
innermost folder. Folders that merge or nest by this rule are an error, and hidden ones are left out.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from ds_vit.data.decode import undecodable
from ds_vit.data.sources import listing
from ds_vit.data.sources.captions import NOT_UTF_8
from ds_vit.data.sources.source import ArraySource, Source
from ds_vit.data.sources.tars import TarSource
from ds_vit.fault_tolerance.errors import LATIN_1, UserError, enumerate_some


def open_folder(data_dir: str, split: str, classes: Sequence[str] | None, allow_empty: bool, labelled: bool) -> Source:
    """Open `data_dir/<split>` or `data_dir/<split>.tar`; see `open_source`."""
    location = find_split(data_dir, split, or_whole=not labelled)
    if os.path.isfile(location):
        return TarSource(location, [location], labelled=labelled)
    if os.path.isfile(os.path.join(location, listing.LABELS_FILE)):
        return MultiLabelSource(location, classes)
    entries = [os.path.join(location, name) for name in sorted(listing.names_in(location)) if not listing.hidden(name)]
    tars = [path for path in entries if path.lower().endswith(".tar")]
    if tars and any(map(os.path.isdir, entries)):
        raise UserError(f"{location} holds class folders and {len(tars)} tar files; move one kind elsewhere")
    if tars:
        return TarSource(location, tars, labelled=labelled)
    return FolderSource(location, allow_empty=allow_empty, labelled=labelled)


def find_split(data_dir: str, split: str, *, or_whole: bool = False) -> str:
    """The folder or tar file of a split; of a name and its synonyms the name itself goes first.

    Args:
        data_dir: the folder of the splits.
        split: its name.
        or_whole: whether a folder without any split is itself the training split.

    Raises:
        UserError: no such folder, no such split in it.
    """
    if os.path.isfile(data_dir):
        raise UserError(f"--data-dir {data_dir} is a file; pass the folder that holds <split>/ or <split>.tar")
    if not os.path.isdir(data_dir):
        raise UserError(f"--data-dir {data_dir} does not exist")
    for name in listing.synonyms_of(split):
        path = os.path.join(data_dir, name)
        if os.path.isdir(path):
            return path
        if os.path.isfile(f"{path}.tar"):
            return f"{path}.tar"
    inside = [name for name in listing.names_in(data_dir) if not listing.hidden(name)]
    if or_whole and split in listing.TRAIN_NAMES and not listing.splits_in(data_dir):
        return data_dir
    parent, own = os.path.split(os.path.normpath(data_dir))
    hint = f"a split has a folder for each class: {split}/<class>/<image>"
    if own in (*listing.TRAIN_NAMES, *listing.VAL_NAMES):
        hint = f"give the folder above it, {parent or '.'}"
    elif (of_classes := _holds_classes(data_dir)) or (or_whole and any(map(listing.is_image, inside))):
        if not own.strip("."):
            parent, own = os.path.normpath(os.path.join(data_dir, "..")), Path(data_dir).resolve().name
        words = ["--data-dir", parent or ".", "--train-split" if split in listing.TRAIN_NAMES else "--val-split", own]
        hint = f"it holds {'class folders' if of_classes else 'images'} and no splits: {shlex.join(words)}"
        if split in listing.TRAIN_NAMES:
            hint += " --val-fraction 0.1 trains on nine tenths of each class"
    elif any(map(listing.is_image, inside)):
        hint = f"its images are in no folders; {listing.WITHOUT_CLASSES}"
    elif tars := sum(name.endswith(".tar") for name in inside):
        hint = f"for its {tars} tar files as WebDataset shards: --dataset wds/{data_dir}"
    raise listing.no_such_split(data_dir, split, f"{split}/ and no {split}.tar", f"; {hint}")


def _holds_classes(folder: str) -> bool:
    """Whether a folder without splits holds folders of images; one of them may be called test."""
    inside = [path for path in Path(folder).iterdir() if path.is_dir() and not listing.hidden(path.name)]
    has_splits = any(name != "test" for name in listing.splits_in(folder))
    return not has_splits and any(listing.is_image(name) for path in inside for name in listing.names_in(str(path)))


def walk(root: str) -> list[str]:
    """All regular files under `root`, as paths relative to it with forward slashes.

    A hidden folder is in the list itself, not what is in it: `is_image` leaves it out, and `suffix_counts` counts it.
    Links are followed, except one to a folder that it lies in: it would list the same images again and again.

    Raises:
        UserError: a folder cannot be listed; or a pipe, a socket or a device is named like an image, and reading it
            would block for ever.
    """
    paths: list[str] = []
    # Each folder comes with the identities of the folders around it and its own.
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while pending:
        relative, around = pending.pop()
        folder = os.path.join(root, relative)
        try:
            status = os.stat(folder)
            with os.scandir(folder) as listed:
                entries = list(listed)
        except OSError as error:
            raise listing.unlistable(folder, error) from error
        if (status.st_dev, status.st_ino) in around:
            continue
        around |= {(status.st_dev, status.st_ino)}
        for entry in entries:
            path = posixpath.join(relative, entry.name)
            if listing.hidden(entry.name):
                paths.append(path)
                continue
            link = entry.is_symlink()  # only a link needs a stat, which is slow on a shared file system
            if os.path.isdir(entry.path) if link else entry.is_dir():
                pending.append((path, around))
            elif not os.path.exists(entry.path) or os.path.isfile(entry.path) if link else entry.is_file():
                paths.append(path)  # a broken link fails where it is read
            elif listing.is_image(path):
                raise UserError(f"{entry.path} is a pipe, a socket or a device, not a file; remove or rename it")
    return paths


def is_broken_link(path: str, error: OSError) -> bool:
    """Whether a file cannot be opened because it is a link to nothing, or to itself."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and os.path.islink(path)


class FileSource(ArraySource):
    """Images in separate files, below one folder. A broken link counts as damaged.

    Another error may occur on one host only, where others have read the sample's label; so it ends the run.
    """

    class_names: tuple[str, ...] = ()

    def __init__(self, root: str, paths: list[str], targets: np.ndarray) -> None:
        self._root = root
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)
        self._targets = targets

    def encoded(self, index: int) -> bytes:
        path = self.describe(index)
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError as error:
            if not is_broken_link(path, error):
                raise
            raise undecodable(path, OSError(f"a broken link to {os.readlink(path)}")) from error

    def describe(self, index: int) -> str:
        return os.path.join(self._root, self.path(index))


class ImageFiles(FileSource):
    """Images by their paths, without labels. A file that cannot be read counts as one that cannot be decoded."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__("", paths, np.full(len(paths), -1))

    def encoded(self, index: int) -> bytes:
        try:
            return super().encoded(index)
        except OSError as error:
            raise undecodable(self.describe(index), OSError(error.strerror)) from error

    def target(self, index: int) -> int:
        raise LookupError(f"{self.describe(index)} has no label")


def find_images(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The image files that are given: a file itself, whatever its name, and all images below a folder.

    Returns:
        Paths in the order given, those of a folder in natural order.

    Raises:
        UserError: no path is given, something else than a path, one does not exist, or a folder has no images in it.
    """
    found: list[str] = []
    try:
        names = [os.fspath(path) for path in paths]
    except TypeError as error:
        raise UserError(f"images are given as paths of files and folders ({error})") from None
    for path in names:
        if not os.path.exists(path):
            raise UserError(f"{path} does not exist; give image files, or a folder of them")
        if not os.path.isdir(path):
            found.append(path)
            continue
        found += [os.path.join(path, name) for name in listing.images_among(walk(path), path)]
    if not found:
        raise UserError("no images are given; give image files, or a folder of them")
    return found


class FolderSource(FileSource):
    """An ImageFolder: `root/**/<class>/<image>`.

    Args:
        root: the folder.
        allow_empty: whether a class folder without images is a class.
        labelled: as for `list_images`; without labels an empty folder is no class.

    Raises:
        UserError: what `list_images` refuses, or (unless allowed) a class folder without any image.
    """

    def __init__(self, root: str, *, allow_empty: bool = False, labelled: bool = True) -> None:
        folders = {path: posixpath.dirname(path) for path in walk(root)}
        images, classes, self.left_out = listing.list_images(folders, root, labelled=labelled)
        empty = _empty_classes(root, images) if labelled or (allow_empty and classes[0]) else []
        if empty and not allow_empty:
            inside = [path for path in folders if path.startswith(tuple(f"{folder}/" for folder in empty))]
            found = listing.described_counts(listing.suffix_counts(inside))
            counted = f"{len(empty)} class folders without images: {enumerate_some(empty)} (files in there: {found})"
            raise UserError(f"{root}: {counted}; remove them, or pass --allow-empty-classes")
        # The empty ones are in the list for their names only.
        self.class_names, numbers = listing.number_classes([*classes, *map(posixpath.basename, empty)])
        super().__init__(root, images, numbers[: len(images)])


def _empty_classes(root: str, images: Sequence[str]) -> list[str]:
    """The folders without images next to class folders, as paths below `root`; hidden ones are left out."""
    holding = {posixpath.dirname(path) for path in images}
    parents = {posixpath.dirname(folder) for folder in holding} - holding
    above = {folder[:end] for folder in holding for end, letter in enumerate(folder) if letter == "/"}
    found = []
    for parent in sorted(parents):
        with os.scandir(os.path.join(root, parent)) as entries:
            names = sorted(entry.name for entry in entries if os.path.isdir(entry) and not listing.hidden(entry.name))
        found += [path for name in names if (path := posixpath.join(parent, name)) not in holding | above]
    return found


class MultiLabelSource(FileSource):
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
        table = os.path.join(root, listing.LABELS_FILE)
        rows = dict(_rows_of_table(table))
        files = {path for path in walk(root) if not listing.hidden(path)} - {listing.LABELS_FILE}
        if not rows:
            raise UserError(f"{table} lists no images")
        if missing := sorted(set(rows) - files):
            raise UserError(
                f"{table} lists {len(missing)} files that are not below {root} or hidden, the first is {missing[0]}"
            )
        self.left_out = dict(listing.suffix_counts(files - set(rows)))
        labels = {label for of_file in rows.values() for label in of_file}
        names = listing.in_natural_order(labels) if classes is None else classes
        if unknown := sorted(labels - set(names)):
            counted = f"{len(unknown)} labels that the training split lacks"
            raise UserError(f"{table} has {counted}: {enumerate_some(unknown)}")
        self.class_names = tuple(names)
        numbers = {name: number for number, name in enumerate(names)}
        paths = listing.in_natural_order(rows)
        # Row i's labels are labels[bounds[i]:bounds[i + 1]].
        self._bounds = np.cumsum([0, *(len(rows[path]) for path in paths)])
        flat = [number for path in paths for number in sorted(numbers[label] for label in rows[path])]
        super().__init__(root, paths, np.array(flat, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def target(self, index: int) -> np.ndarray:
        target = np.zeros(self.num_classes, dtype=np.float32)
        target[self._targets[self._bounds[index] : self._bounds[index + 1]]] = 1.0
        return target

    def identity(self) -> tuple[np.ndarray, ...]:
        return *super().identity(), self._bounds


def _rows_of_table(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    seen: set[str] = set()
    rows = read_table(path, ",")
    where, header = next(rows, (f"{path}, line 1", []))
    if header != ["file", "labels"]:
        raise UserError(f"{where}: the header must be 'file,labels', not {','.join(header)!r}")
    for where, (file, labels) in rows:
        name = posixpath.normpath(file)
        if name in seen:
            raise UserError(f"{where}: {name} is listed twice")
        seen.add(name)
        each = require_utf8(labels, where).split(";")
        yield name, tuple(dict.fromkeys(listing.class_name(label.strip()) for label in each if label.strip()))


# ---- tables in text files --------------------------------------------------------------------------------------------

# The captions of images (`csv/…`) and the labels of multi-label data (labels.csv). A cell is quoted as in RFC 4180 if
# it begins and ends with a quote: it may hold separators, line ends and doubled quotes. Any other quote belongs to
# the text: `"Quoted" start` has its quotes. A quote that begins a cell and is not closed is an error, where other
# readers take the next rows into the cell. Lines end with \n, \r\n or \r.

_SEPARATORS = ("\t", ",", ";", "|")


def read_table(path: str, separator: str = "") -> Iterator[tuple[str, list[str]]]:
    """The rows of a table, the header first: where each begins, for messages, and its cells.

    Bytes that are not UTF-8 become surrogates, because names of files may have them.

    Args:
        path: of the table.
        separator: of the columns; "" for the first of tab, comma, semicolon and bar that the header has.

    Raises:
        UserError: a quote that is not closed, or a row of another number of columns than the header.
    """
    num_columns = 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = enumerate(file, 1)
        for number, line in lines:
            where, row = f"{path}, line {number}", line.removesuffix("\n")
            if "\0" in row:
                raise UserError(f"{where}: a NUL byte; unpack a compressed table, and convert UTF-16 by iconv to UTF-8")
            if not row:
                continue
            separator = separator or next((one for one in _SEPARATORS if one in row), ",")
            cells = _cells(row, separator) if '"' in row else row.split(separator)
            if cells is None:  # up to the line that closes the quote: one with an odd number of them
                rest = [row]
                for _, following in lines:
                    rest.append(following.removesuffix("\n"))
                    if following.count('"') % 2:
                        break
                cells = _cells("\n".join(rest), separator)
                if cells is None or any(_holds_rows(cell, separator) for cell in cells):
                    raise UserError(f"{where}: a quote is not closed; close it at the end of the cell, or remove it")
            num_columns = num_columns or len(cells)
            if len(cells) != num_columns:
                raise UserError(f"{where}: {len(cells)} columns in place of the {num_columns} of the header")
            yield where, cells


@cache
def _cell(separator: str) -> re.Pattern[str]:
    """One cell and what ends it: the text in its quotes, else its text as it stands, and the separator or nothing."""
    split = re.escape(separator)
    quoted, closed = r'"([^"]*(?:""[^"]*)*)"', r'"[^"\n]*(?:""[^"\n]*)*"'
    other = rf'(?:{closed}[^{split}\n]|[^"{split}\n])[^{split}\n]*|'
    return re.compile(rf"(?:{quoted}(?={split}|\Z)|({other}))({split}|\Z)")


def _cells(row: str, separator: str) -> list[str] | None:
    """The cells of a row with quotes; None if a quote is not closed in it."""
    cells, at = [], 0
    while found := _cell(separator).match(row, at):
        cells.append(found[2] if found[1] is None else found[1].replace('""', '"'))
        at = found.end()
        if not found[3]:
            return cells
    return None


def _holds_rows(cell: str, separator: str) -> bool:
    """Whether a cell of several lines has a line of columns with the name of an image: rows that a quote took in."""
    return "\n" in cell and any(
        separator in line and any(map(listing.is_image, line.split(separator))) for line in cell.split("\n")
    )


def require_utf8(text: str, where: str) -> str:
    """A text of a table as it is.

    Raises:
        UserError: it has bytes that are not UTF-8.
    """
    if found := NOT_UTF_8.search(text):
        raise UserError(f"{where}, column {found.start() + 1} of its text: not UTF-8; {LATIN_1}")
    return text
