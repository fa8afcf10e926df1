"""Hugging Face data sets on this machine's disks (`--dataset hfds/…`): what `save_to_disk` wrote, or parquet files.

Arrow files are mapped into memory, and any image is read directly. Single images of a parquet file cannot be: it is
converted to an Arrow file next to it, once. Nothing is fetched.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_vit.data.decode import undecodable
from ds_vit.data.sources.captions import CaptionKeys, Captions, clean_captions
from ds_vit.data.sources.source import (
    TRAIN_NAMES,
    VAL_NAMES,
    ArraySource,
    below_common_folder,
    check_labels,
    class_name,
    in_natural_order,
    no_such_split,
    one_at_a_time,
    synonyms_of,
    written_by_many,
)
from ds_vit.fault_tolerance.errors import UserError, first_line

_FORMS = ("{}/*.arrow", "{}/*.parquet", "{}-*.arrow", "{}-*.parquet", "data/{}-*.parquet", "{}.arrow", "{}.parquet")
_OF_ONE_SPLIT = ("*.arrow", "*.parquet")
_CAPTIONS = ("caption", "captions", "text", "title", "sentence", "sentences")
_IMAGES, _LABELS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "cls")
_OF = re.compile(r"-(\d+)-of-(\d+)\.\w+$")
_MADE = ".parquet.arrow"
_MADE_OF = b"ds_vit made of"  # size and time of change of the parquet file
_ROWS_AT_ONCE = 256


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
        UserError: pyarrow is not installed, no such folder or split, or what `HuggingFaceSource` refuses.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(
            "hfds/… and parquet/… are read by pyarrow, which is not installed: pip install pyarrow"
        ) from None
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder {folder}; give hfds/FOLDER with what datasets' save_to_disk wrote")
    forms = [form.format(name) for name, form in itertools.product(synonyms_of(split), _FORMS)]
    for form in [*forms, *_OF_ONE_SPLIT] if split in TRAIN_NAMES else forms:
        found = glob.glob(os.path.join(glob.escape(folder), form))
        # Without what `datasets` or `_as_arrow` derived from them, and without another split.
        others = ("cache-", *(() if form in forms else (*VAL_NAMES, "test")))
        own = [path for path in found if not path.endswith(_MADE) and not os.path.basename(path).startswith(others)]
        if own:
            return HuggingFaceSource(in_natural_order(own), classes, captions)
    raise no_such_split(folder, split, f"{split}/ and no {split}-*.parquet")


class HuggingFaceSource(ArraySource):
    """Rows of Arrow or parquet files with an image column (bytes of files) and a column of class numbers or captions.

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
        self._files = [_as_arrow(path) if path.endswith(".parquet") else path for path in files]
        tables = self._map()
        schema = tables[0].schema
        features = _features(schema)
        named = _named(schema, captions.image, "--csv-img-key", files[0]) if captions else ""
        self._image = named or _column(schema, features, "Image", _IMAGES, files[0])
        for path, table in zip(files, tables, strict=True):
            if table.schema.names != schema.names:
                raise UserError(f"{path} has other columns than {files[0]}")
        self._bounds = np.cumsum([0, *(table.num_rows for table in tables)])
        if not self._bounds[-1]:
            raise UserError(f"{files[0]} holds no rows")
        if captions is None:
            self._read_classes(tables, features, classes)
        else:
            self.set_captions(_captions(tables, captions, files[0]))
        self._find_pieces(tables)

    def _read_classes(self, tables: Sequence[Any], features: dict[str, Any], classes: Sequence[str] | None) -> None:
        where = self._files[0]
        try:
            label = _column(tables[0].schema, features, "ClassLabel", _LABELS, where)
        except UserError as error:
            return self.drop_classes(int(self._bounds[-1]), str(error))
        self._targets = np.concatenate([_numbers(table[label], label, where) for table in tables])
        known = features.get(label, {}).get("names") or classes
        self.class_names = tuple(map(class_name, known or map(str, range(int(self._targets.max()) + 1))))
        valid = (self._targets >= 0) & (self._targets < self.num_classes)
        check_labels(self, self._targets, valid, self.class_names)

    def _map(self) -> list[Any]:
        """Map the files into memory; a forked worker has them, one that was spawned maps them itself."""
        import pyarrow as pa

        tables = []
        for path in self._files:
            try:
                mapped = pa.memory_map(path)
                try:
                    tables.append(pa.ipc.open_stream(mapped).read_all())
                except pa.ArrowInvalid:
                    tables.append(pa.ipc.open_file(mapped).read_all())
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{path} cannot be read as an Arrow file ({first_line(error)})") from None
        return tables

    def _find_pieces(self, tables: Sequence[Any]) -> None:
        """Where each piece of the image column begins, so that a row is found without a walk through all of them."""
        self._pieces = [piece for table in tables for piece in table[self._image].chunks]
        self._starts = np.cumsum([0, *map(len, self._pieces)])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pieces": []}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        self._find_pieces(self._map())

    def encoded(self, index: int) -> bytes:
        piece = int(np.searchsorted(self._starts, index, side="right")) - 1
        value = self._pieces[piece][index - int(self._starts[piece])].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if data is None and not (isinstance(value, dict) and value.get("path")):
            raise undecodable(self.describe(index), ValueError("its row has no image"))
        if not isinstance(data, bytes):
            raise UserError(f"{self.describe(index)} holds no image, only a path; save the data set with its images")
        return data

    def identity(self) -> tuple[np.ndarray, ...]:
        paths: list[bytes] = []
        for piece in self._pieces:
            named = hasattr(piece.type, "get_field_index") and piece.type.get_field_index("path") >= 0
            if not named or piece.field("path").null_count:
                return super().identity()  # no names, or not for each
            paths += map(os.fsencode, piece.field("path").to_pylist())
        return below_common_folder(np.array(paths, dtype=np.bytes_)), *super().identity()

    def describe(self, index: int) -> str:
        file = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return f"{self._files[file]}[{index - int(self._bounds[file])}]"


def _numbers(column: Any, name: str, where: str) -> np.ndarray:
    """Class numbers, int64; -1 where there is none."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        kind = f"the column {name} is of {column.type}, not of whole numbers"
        raise UserError(f"{where}: {kind}; datasets' class_encode_column makes numbers of names")
    return column.cast(pa.int64()).fill_null(-1).to_numpy()


def _captions(tables: Sequence[Any], keys: CaptionKeys, where: str) -> Captions:
    """The captions of each row: a text, or a list of texts."""
    import pyarrow as pa

    schema = tables[0].schema
    usual = [name for name in _CAPTIONS if name in schema.names]
    name = _named(schema, keys.caption, "--csv-caption-key", where) or (usual[0] if usual else "")
    if not name:
        names = f"none of the names {', '.join(_CAPTIONS)}; it has {', '.join(schema.names)}"
        raise UserError(f"{where} has no column of captions by {names}: name it by --csv-caption-key")
    kind = schema.field(name).type
    text = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
        raise UserError(f"{where}: the column {name} is of {kind}, not of texts or lists of texts")
    values = (value for table in tables for piece in table[name].chunks for value in piece.to_pylist())
    return Captions.of(clean_captions([value] if isinstance(value, str) else value or ()) for value in values)


def _named(schema: Any, name: str, flag: str, where: str) -> str:
    """A column that a flag names; "" where it names none."""
    if name and name not in schema.names:
        raise UserError(f"{where} has no column {name}, as {flag} says; it has {', '.join(schema.names)}")
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


def _features(schema: Any) -> dict[str, Any]:
    """What `datasets` notes of each column: its kind, and the names of classes."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: kind for name, kind in found.items() if isinstance(kind, dict)}


def _column(schema: Any, features: dict[str, Any], kind: str, names: Sequence[str], where: str) -> str:
    """The one column of a kind, else the first of the usual names."""
    of_kind = [name for name in schema.names if features.get(name, {}).get("_type") == kind]
    usual = [name for name in names if name in schema.names and (name in of_kind or not of_kind)]
    if not (usual or of_kind):
        has = f"it has {', '.join(schema.names)}: rename_column and save it again"
        raise UserError(f"{where} has no {kind} column and none of the names {', '.join(names)}; {has}")
    return (usual or of_kind)[0]


def _as_arrow(path: str) -> str:
    """The Arrow file next to a parquet file; made if there is none that fits it, whole or not at all."""
    found = os.stat(path)
    state = f"{found.st_size} {found.st_mtime_ns}".encode()
    arrow = f"{path}.arrow"
    if not _is_made_of(arrow, state):
        with one_at_a_time(path):
            if not _is_made_of(arrow, state):
                _convert(path, arrow, state)
    return arrow


def _is_made_of(arrow: str, state: bytes) -> bool:
    import pyarrow as pa

    with contextlib.suppress(OSError, pa.ArrowInvalid), pa.memory_map(arrow) as mapped:
        return (pa.ipc.open_stream(mapped).schema.metadata or {}).get(_MADE_OF) == state
    return False


def _convert(path: str, arrow: str, state: bytes) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with written_by_many(arrow) as partial, pq.ParquetFile(path) as file:
            schema = file.schema_arrow.with_metadata({**(file.schema_arrow.metadata or {}), _MADE_OF: state})
            with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be converted to {arrow} ({first_line(error)})") from None
