"""Hugging Face data sets on this machine's disks (`--dataset hfds/…`): what `save_to_disk` wrote, or parquet files.

The library `datasets` maps Arrow files into memory, and any image is read directly. Single images of a parquet file
cannot be: it is converted to an Arrow file in a cache next to it, once. Nothing is fetched.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ds_vit.data.decode import undecodable
from ds_vit.data.sources import listing
from ds_vit.data.sources.captions import CaptionKeys, Captions, clean_captions
from ds_vit.data.sources.source import ArraySource, below_common_folder, check_labels
from ds_vit.fault_tolerance.errors import UserError, enumerate_some, first_line, require_package

_FORMS = ("{}/*.arrow", "{}/*.parquet", "{}-*.arrow", "{}-*.parquet", "data/{}-*.parquet", "{}.arrow", "{}.parquet")
_OF_ONE_SPLIT = ("*.arrow", "*.parquet")
_CAPTIONS = ("caption", "captions", "text", "title", "sentence", "sentences")
_IMAGES, _LABELS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "cls")
_OF = re.compile(r"-(\d+)-of-(\d+)\.\w+$")
_CACHE = ".datasets"  # a folder next to parquet files
_OLD = ".parquet.arrow"  # what earlier versions converted parquet files to


def open_hugging_face(
    folder: str, split: str, classes: Sequence[str] | None = None, captions: CaptionKeys | None = None
) -> HuggingFaceSource:
    """Open one split of a data set on disk.

    Args:
        folder: with a folder or files of each split (`train/*.arrow`, `data/train-*.parquet`, …), or with the files
            of a single split, which is then the training split.
        split: its name.
        classes: the training split's, when this is the validation split.
        captions: the columns of data with captions, whose classes are not read; None for data with classes.

    Raises:
        UserError: datasets is not installed, no such folder or split, or what `HuggingFaceSource` refuses.
    """
    with require_package("datasets", "data of hfds/… or parquet/…"):
        import datasets  # noqa: F401
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder {folder}; give hfds/FOLDER with what datasets' save_to_disk wrote")
    forms = [form.format(name) for name, form in itertools.product(listing.synonyms_of(split), _FORMS)]
    for form in [*forms, *_OF_ONE_SPLIT] if split in listing.TRAIN_NAMES else forms:
        found = glob.glob(os.path.join(glob.escape(folder), form))
        # Without what was derived from them, and without another split.
        others = ("cache-", *(() if form in forms else (*listing.VAL_NAMES, "test")))
        own = [path for path in found if not path.endswith(_OLD) and not os.path.basename(path).startswith(others)]
        if own:
            return HuggingFaceSource(listing.in_natural_order(own), classes, captions)
    raise listing.no_such_split(folder, split, f"{split}/*.arrow and no {split}-*.parquet")


class HuggingFaceSource(ArraySource):
    """Rows of Arrow or parquet files with an image column (bytes of files) and a column of class numbers or captions.

    Further columns of images are entries under their names.

    Args:
        files: in their order.
        classes: the training split's, when this is the validation split: what its class numbers mean where the files
            do not say.
        captions: the columns of data with captions; None for data with classes.

    Raises:
        UserError: a file is missing or damaged, has no such columns, or a label that is none of the classes.
    """

    def __init__(
        self, files: Sequence[str], classes: Sequence[str] | None = None, captions: CaptionKeys | None = None
    ) -> None:
        _check_all_there(files)
        self._files = files
        self._tables = [_load(path) for path in files]
        first = self._tables[0]
        named = _named(first, captions.image, "--csv-img-key", files[0]) if captions else ""
        self._image = named or _column(first, "Image", _IMAGES, files[0])
        known = (self._image, "image", "target", "captions")
        self._further = [name for name in _of_kind(first, "Image") if name not in known]
        self.entries = ("image", *self._further)
        for path, table in zip(files, self._tables, strict=True):
            if table.column_names != first.column_names:
                raise UserError(f"{path} has other columns than {files[0]}")
        self._bounds = np.cumsum([0, *map(len, self._tables)])
        if not self._bounds[-1]:
            raise UserError(f"{files[0]} holds no rows")
        if captions is None:
            self._read_classes(classes)
        else:
            self.set_captions(_captions(self._tables, captions, files[0]))

    def _read_classes(self, classes: Sequence[str] | None) -> None:
        first, where = self._tables[0], self._files[0]
        try:
            label = _column(first, "ClassLabel", _LABELS, where)
        except UserError as error:
            return self.drop_classes(len(self), str(error))
        labels = [_numbers(table.data[label], label, where) for table in self._tables]
        named = [_class_names(table, label) for table in self._tables]
        whole = np.concatenate(labels)
        known = next(filter(None, named), classes or [str(number) for number in range(int(whole.max()) + 1)])
        number_of = {name: number for number, name in enumerate(known)}
        for path, names in zip(self._files, named, strict=True):
            if unknown := [name for name in names if name not in number_of]:
                others = f"{len(unknown)} classes that are not among the {len(known)} of the files before it"
                way_out = "datasets' cast_column gives all files the same names"
                return self.drop_classes(len(self), f"{path} has {others}: {enumerate_some(unknown)}; {way_out}")
        self.class_names = tuple(known)
        self._targets = np.concatenate(
            [
                part if names in ([], known) else _number_over(number_of, names, part)
                for names, part in zip(named, labels, strict=True)
            ]
        )
        check_labels(self, whole, self._targets, self.class_names)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def _place(self, index: int) -> tuple[int, int]:
        """The file of a row, and the row's number in it."""
        file = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return file, index - int(self._bounds[file])

    def entry(self, name: str, index: int) -> Any:
        return self._bytes(name, index) if name in self._further else super().entry(name, index)

    def encoded(self, index: int) -> bytes:
        return self._bytes(self._image, index)

    def _bytes(self, column: str, index: int) -> bytes:
        file, row = self._place(index)
        value = self._tables[file].data.fast_slice(row, 1)[column][0].as_py()  # not decoded
        data = value.get("bytes") if isinstance(value, dict) else value
        if data is None and not (isinstance(value, dict) and value.get("path")):
            raise undecodable(f"{self.describe(index)}[{column}]", ValueError(f"its row has no {column}"))
        if not isinstance(data, bytes):
            where = f"{self.describe(index)}[{column}]"
            raise UserError(f"{where} holds no image, only a path; save the data set with its images")
        return data

    def identity(self) -> tuple[np.ndarray, ...]:
        paths: list[bytes] = []
        for piece in (piece for table in self._tables for piece in table.data[self._image].chunks):
            named = hasattr(piece.type, "get_field_index") and piece.type.get_field_index("path") >= 0
            if not named or piece.field("path").null_count:
                return super().identity()  # no names, or not for each
            paths += map(os.fsencode, piece.field("path").to_pylist())
        return below_common_folder(np.array(paths, dtype=np.bytes_)), *super().identity()

    def describe(self, index: int) -> str:
        file, row = self._place(index)
        return f"{self._files[file]}[{row}]"


def _load(path: str) -> Any:
    """The table of a file, mapped into memory; parquet is converted once, by the first process that opens it."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from datasets.io.parquet import ParquetDatasetReader

    disable_progress_bars()
    try:
        if path.endswith(".parquet"):
            cache = os.path.join(os.path.dirname(path), _CACHE)
            try:
                return ParquetDatasetReader(glob.escape(path), cache_dir=cache).read()
            except OSError:  # it takes locks in the cache, which may be another user's
                if (converted := _converted(path, cache)) is None:
                    raise
                return converted
        with open(path, "rb") as file:
            if file.read(6) != b"ARROW1":  # a stream, the form that datasets writes and maps
                return Dataset.from_file(path)
        # Without a fingerprint, datasets hashes the content, which it reads into memory.
        return Dataset(pa.ipc.open_file(pa.memory_map(path)).read_all(), fingerprint="not used")
    except Exception as error:  # the library's, pyarrow's and the system's
        raise UserError(f"{path} cannot be read ({first_line(error.__cause__ or error)})") from None


def _converted(path: str, cache: str) -> Any:
    """The rows of a parquet file that are in a cache already, found without a lock; None if they are not."""
    from datasets import Dataset, concatenate_datasets
    from datasets.io.parquet import ParquetDatasetReader

    with tempfile.TemporaryDirectory() as other:
        folder = ParquetDatasetReader(glob.escape(path), cache_dir=other).builder.cache_dir
        # Named by a hash of the file's path and time of change.
        found = glob.glob(os.path.join(glob.escape(cache), os.path.relpath(folder, other), "*.arrow"))
    return concatenate_datasets([*map(Dataset.from_file, sorted(found))]) if found else None


def _numbers(column: Any, name: str, where: str) -> np.ndarray:
    """Class numbers, int64; -1 where there is none."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        kind = f"the column {name} is of {column.type}, not of whole numbers"
        raise UserError(f"{where}: {kind}; datasets' class_encode_column makes numbers of names")
    return column.cast(pa.int64()).fill_null(-1).to_numpy()


def _class_names(table: Any, label: str) -> list[str]:
    """The names that a file gives its class numbers; empty if it gives none."""
    return [listing.class_name(name) for name in getattr(table.features[label], "names", None) or ()]


def _number_over(number_of: Mapping[str, int], names: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Class numbers by these names in place of the file's own, int64 [N]; -1 for a label that has no name."""
    numbers = np.array([*(number_of[name] for name in names), -1])
    return numbers[np.where((labels >= 0) & (labels < len(names)), labels, -1)]


def _captions(tables: Sequence[Any], keys: CaptionKeys, where: str) -> Captions:
    """The captions of each row: a text, or a list of texts."""
    import pyarrow as pa

    usual = [name for name in _CAPTIONS if name in tables[0].column_names]
    name = _named(tables[0], keys.caption, "--csv-caption-key", where) or (usual[0] if usual else "")
    if not name:
        names = f"none of the names {', '.join(_CAPTIONS)}; it has {', '.join(tables[0].column_names)}"
        raise UserError(f"{where} has no column of captions by {names}: name it by --csv-caption-key")
    kind = tables[0].data.schema.field(name).type
    text = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
        raise UserError(f"{where}: the column {name} is of {kind}, not of texts or lists of texts")
    values = (value for table in tables for piece in table.data[name].chunks for value in piece.to_pylist())
    return Captions.of(clean_captions([value] if isinstance(value, str) else value or ()) for value in values)


def _named(table: Any, name: str, flag: str, where: str) -> str:
    """A column that a flag names; "" where it names none."""
    if name and name not in table.column_names:
        raise UserError(f"{where} has no column {name}, as {flag} says; it has {', '.join(table.column_names)}")
    return name


def _check_all_there(files: Sequence[str]) -> None:
    """Refuse `…-00000-of-00008.arrow` of which not all eight are there."""
    numbered = [found for path in files if (found := _OF.search(path))]
    if numbered and len(numbered) == len(files):
        count = int(numbered[0][2])
        if missing := sorted(set(range(count)) - {int(found[1]) for found in numbered}):
            raise UserError(
                f"{files[0]}: of its {count} files {len(missing)} are missing, the first is {missing[0]:05}"
            )


def _of_kind(table: Any, kind: str) -> list[str]:
    """The columns of a kind of the library's features."""
    return [name for name, feature in table.features.items() if type(feature).__name__ == kind]


def _column(table: Any, kind: str, names: Sequence[str], where: str) -> str:
    """The one column of a kind, else the first of the usual names."""
    of_kind, images = _of_kind(table, kind), _of_kind(table, "Image")
    # A column of images may be named "label".
    known = of_kind or [name for name in table.column_names if name not in images]
    usual = [name for name in names if name in known]
    if not (usual or of_kind):
        has = f"it has {', '.join(table.column_names)}: rename_column and save it again"
        raise UserError(f"{where} has no {kind} column and none of the names {', '.join(names)}; {has}")
    return (usual or of_kind)[0]
