"""Images with captions in files: a text file next to each image, or a table of paths and captions (`csv/…`)."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ds_vit.data.sources import listing
from ds_vit.data.sources.captions import CaptionKeys, Captions, caption_lines, check_matches, clean_captions
from ds_vit.data.sources.folders import FileSource, find_split, is_broken_link, read_table, require_utf8, walk
from ds_vit.fault_tolerance.errors import UserError, enumerate_some

_THREADS = 16  # files are small, and often on a network
_TABLES = (".csv", ".tsv")


def open_pairs(data_dir: str, split: str) -> TextFileSource:
    """Open `data_dir/<split>`, a folder of images with a text file next to each.

    Raises:
        UserError: no such folder, or what `TextFileSource` refuses.
    """
    location = find_split(data_dir, split)
    if os.path.isfile(location):
        raise UserError(f"{location} is a tar; give images and captions in tars as shards: --dataset wds/{data_dir}")
    return TextFileSource(location)


class TextFileSource(FileSource):
    """Images of a folder, at any depth, each with a text file of its name: `x/1.jpg` and `x/1.txt`, a caption per line.

    Args:
        root: the folder.

    Raises:
        UserError: no images, no text files, or a text file without an image.
    """

    def __init__(self, root: str) -> None:
        files = walk(root)
        has_tars = any(path.lower().endswith(".tar") for path in files)
        shards = f"; for shards give --dataset wds/{os.path.dirname(root)}" if has_tars else ""
        images = listing.images_among(files, root, shards)
        named = [path for path in files if path.lower().endswith(".txt") and not listing.hidden(path)]
        texts = {posixpath.splitext(path)[0]: path for path in named}
        stems = [posixpath.splitext(path)[0] for path in images]
        bare = [path for path, stem in zip(images, stems, strict=True) if stem not in texts]
        check_matches(root, bare, [texts[stem] for stem in texts.keys() - {*stems}], len(images))
        taken = {*images, *texts.values()}
        self.left_out = dict(listing.suffix_counts(path for path in files if path not in taken))
        super().__init__(root, images, np.zeros(len(images), dtype=np.int64))

        def read(stem: str) -> tuple[str, ...]:
            if stem not in texts:
                return ()
            path = os.path.join(root, texts[stem])
            try:
                with open(path, "rb") as file:
                    return caption_lines(file.read())
            except OSError as error:
                if is_broken_link(path, error):
                    return ()
                raise

        with ThreadPoolExecutor(_THREADS) as pool:
            self.set_captions(Captions.of(pool.map(read, stems)))


def open_table(location: str, split: str, keys: CaptionKeys) -> TableSource:
    """Open one split of tables.

    Args:
        location: the table of the training split, or the folder of `train.csv` and `validation.csv` (or .tsv).
        split: its name, or that of its table in the folder.
        keys: of the columns.

    Raises:
        UserError: no such table, or what `TableSource` refuses.
    """
    folder = location if os.path.isdir(location) else os.path.dirname(location)
    if split.endswith(_TABLES):
        table = os.path.join(folder, split)
    elif not os.path.isdir(location):
        table = location
        if split not in listing.TRAIN_NAMES and os.path.isfile(location):
            way_out = f"name that of {split} by --val-split FILE.csv"
            raise listing.NoSuchSplit(f"{location} is the table of training; {way_out}")
    else:
        names = [name + suffix for name in listing.synonyms_of(split) for suffix in _TABLES]
        found = [path for name in names if os.path.isfile(path := os.path.join(folder, name))]
        if not found:
            raise listing.no_such_split(folder, split, f"{split}.csv")
        table = found[0]
    if not os.path.isfile(table):
        raise UserError(f"there is no table {table}; give csv/FILE, or csv/FOLDER with train.csv in it")
    return TableSource(table, keys)


class TableSource(FileSource):
    """Images of a table with a column of paths and one of captions, as open_clip reads it.

    Paths are absolute or relative to the table's folder. Rows of one file are one image with several captions.

    Args:
        table: the file.
        keys: of the columns; by default `filepath` and `title`.

    Raises:
        UserError: no such columns, a malformed row, a caption that is not UTF-8, or a file that is missing.
    """

    def __init__(self, table: str, keys: CaptionKeys) -> None:
        root = os.path.dirname(table)
        names: dict[str, str] = {}  # a file, in whatever spelling → its path as it comes first
        captions: dict[str, list[str]] = {}
        for path, caption in _rows(table, keys):
            first = names.setdefault(os.path.normpath(os.path.join(root, path)), os.path.normpath(path))
            captions.setdefault(first, []).append(caption)
        if not captions:
            raise UserError(f"{table} lists no images")
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(lambda path: os.path.isfile(os.path.join(root, path)), captions))
        missing = [path for path, is_there in zip(captions, found, strict=True) if not is_there]
        check_matches(table, (), missing, sum(found))
        super().__init__(root, list(captions), np.zeros(len(captions), dtype=np.int64))
        self.set_captions(Captions.of(map(clean_captions, captions.values())))


def _rows(table: str, keys: CaptionKeys) -> Iterator[tuple[str, str]]:
    """(path, caption) of each row."""
    rows = read_table(table, keys.separator)
    _, header = next(rows, ("", []))
    columns = []
    for flag, name in (("--csv-img-key", keys.image or "filepath"), ("--csv-caption-key", keys.caption or "title")):
        if header.count(name) != 1:
            number = "two columns" if name in header else "no column"
            by = f" by the separator {keys.separator!r}" if keys.separator else ""
            shown = [cell if cell == cell.strip() else repr(cell) for cell in header]
            has = f"the columns{by} are {enumerate_some(shown)}"
            raise UserError(f"{table} has {number} {name}; {has}; give {flag}, or --csv-separator")
        columns.append(header.index(name))
    for where, cells in rows:
        yield cells[columns[0]], require_utf8(cells[columns[1]], where)
