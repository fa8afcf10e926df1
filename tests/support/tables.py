"""Hugging Face data sets on disk for tests, as `datasets` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ds_vit.data.sources.source import Source

NUM_FILES = 2


def write_tables(folder: Path, source: Source, kind: str, **changes: object) -> None:
    """The samples of a folder's or tar's source as Arrow or parquet files of an image and a label column.

    Args:
        folder: for the files.
        source: has `encoded` and `path`.
        kind: "arrow" or "parquet".
        changes: `labels`, `label_type`, `names`, or `columns` (of an image and a label) that are not the source's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(len(source))
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = [{"bytes": source.encoded(number), "path": source.path(number)} for number in numbers]
    labels = changes.get("labels", [source.target(number) for number in numbers])
    columns = changes.get("columns", ("image", "label"))
    names = changes.get("names", source.class_names)
    features = {columns[0]: {"_type": "Image"}, columns[1]: {"_type": "ClassLabel", "names": list(names or [])}}
    noted = {"huggingface": json.dumps({"info": {"features": features}})} if names is not None else {}
    kind_of_label = changes.get("label_type", pa.int64())
    schema = pa.schema({columns[0]: image, columns[1]: kind_of_label}, noted)
    table = pa.table([pa.array(images, image), pa.array(labels, kind_of_label)], schema=schema)
    half = -(-len(source) // NUM_FILES)
    for number in range(NUM_FILES):
        path, part = folder / f"data-{number:05}-of-{NUM_FILES:05}.{kind}", table.slice(number * half, half)
        if kind == "parquet":
            pq.write_table(part, path, row_group_size=4)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                writer.write_table(part, max_chunksize=4)
