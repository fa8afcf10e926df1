"""Hugging Face data sets on disk: every form is read, and one that is damaged gets a one-line error."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.io.parquet import ParquetDatasetReader
from picture_folders import encoded, write_images
from tables import write_tables

from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    write_images(root / "train", *(f"{('cat', 'dog')[number % 2]}/{number}.png" for number in range(10)))
    return root


@pytest.fixture(scope="module")
def plain(folder) -> Source:
    return open_source("", str(folder), "train")


def _same(source: Source, plain: Source) -> bool:
    numbers = range(len(plain))
    return (
        source.class_names == plain.class_names
        and [source.target(n) for n in numbers] == [plain.target(n) for n in numbers]
        and [source.encoded(n) for n in numbers] == [plain.encoded(n) for n in numbers]
    )


@pytest.mark.parametrize("way", ["save_to_disk", "one split", "parquet"])
def test_what_datasets_writes(folder, plain, tmp_path, way):
    """Would catch a file of the real library that is not understood."""
    features = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog"]), "img": datasets.Image()})
    rows = {
        "label": [plain.target(n) for n in range(10)],
        "img": [{"bytes": plain.encoded(n), "path": None} for n in range(10)],
    }
    data = datasets.Dataset.from_dict(rows, features=features)
    if way == "save_to_disk":
        datasets.DatasetDict({"train": data, "validation": data}).save_to_disk(
            str(tmp_path), num_shards={"train": 3, "validation": 1}
        )
        assert _same(open_source("hfds/", str(tmp_path), "val", classes=plain.class_names), plain)
    elif way == "one split":
        data.save_to_disk(str(tmp_path))
    else:
        (tmp_path / "data").mkdir()
        data.to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"))
    for dataset, data_dir in (("hfds/", str(tmp_path)), (f"hfds/{tmp_path}", None), ("", f"hfds/{tmp_path}")):
        source = open_source(dataset, data_dir, "train")
        assert _same(source, plain)
        assert source.image(3).tobytes() == plain.image(3).tobytes()


@pytest.mark.parametrize("writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_bare_arrow_file(plain, tmp_path, monkeypatch, writer):
    """Would catch a need for metadata of `datasets`, other integers, a mapped file that is pickled, and one that is
    read whole for a fingerprint."""
    table = pa.table(
        {
            "image": [plain.encoded(n) for n in range(10)],
            "label": pa.array([plain.target(n) for n in range(10)], pa.uint8()),
        }
    )
    path = str(tmp_path / "train.arrow")
    with pa.OSFile(path, "wb") as sink, writer(sink, table.schema) as file:
        file.write_table(table, max_chunksize=4)
    if writer is pa.ipc.new_file:  # datasets maps the other form itself
        monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", lambda _: pytest.fail("reads the file"))
    source = pickle.loads(pickle.dumps(open_source("hfds/", str(tmp_path), "train", classes=plain.class_names)))
    assert _same(source, plain)
    assert source.describe(7) == f"{path}[7]"


def test_a_parquet_file_is_converted_once_and_again_when_it_changes(plain, tmp_path, monkeypatch, capfd):
    """Would catch gigabytes that are written at each start, rows of a file that is not there, a converted file that
    nobody else can open, and bars of progress."""
    write_tables(tmp_path / "train", plain, "parquet")
    made = []
    for _ in range(2):
        source = pickle.loads(pickle.dumps(open_source("hfds/", str(tmp_path), "train")))
        assert source.describe(7) == str(tmp_path / "train" / "data-00001-of-00002.parquet[2]")
        assert _same(source, plain)
        assert source.fingerprint == plain.fingerprint, "a run of one form resumes on another"
        made.append({path: path.stat().st_mtime_ns for path in (tmp_path / "train").rglob("*.arrow")})
    assert len(made[0]) == 2
    assert made[0] == made[1]
    with monkeypatch.context() as patch:  # another user's
        refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
        patch.setattr(ParquetDatasetReader, "read", refuse)
        assert _same(open_source("hfds/", str(tmp_path), "train"), plain)
        (tmp_path / "train" / "data-00001-of-00002.parquet").touch()
        with pytest.raises(UserError, match=r"00001-of-00002\.parquet cannot be read \(.*Permission denied"):
            open_source("hfds/", str(tmp_path), "train")
    assert not capfd.readouterr().err
    write_tables(tmp_path / "train", plain, "parquet", labels=[1] * 10)
    assert open_source("hfds/", str(tmp_path), "train").target(0) == 1


def _cut(folder: Path) -> None:
    path = folder / "data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:300])


# What is written, what happens to it, and the message.
UNNAMED = {"names": None}
BROKEN = {
    "no label": ({"labels": [0, -1] * 5}, None, r"\[1\] has the label -1; the 2 classes .* 0 to 1; 5 of 10"),
    "label beyond the names": ({"names": ["cat"]}, None, "has the label 1; the 1 classes"),
    "null label": ({"labels": [None] * 10}, None, "has the label -1"),
    "words": ({"labels": ["cat", "dog"] * 5, "label_type": pa.string()}, None, "label is of string, not of whole"),
    "no image": ({"columns": ("x", "label"), **UNNAMED}, None, "has no Image column and none of the names image"),
    "no label column": ({"columns": ("image", "y"), **UNNAMED}, None, "it has image, y: rename_column"),
    "a file missing": ({}, lambda f: (f / "data-00000-of-00002.arrow").unlink(), "2 files 1 are missing, .* 00000"),
    "a file cut short": ({}, _cut, "00001-of-00002.arrow cannot be read "),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_tables_are_refused_in_one_line(plain, tmp_path, what):
    """Would catch a traceback of pyarrow's, or rows that are lost in silence."""
    changes, harm, message = BROKEN[what]
    write_tables(tmp_path / "train", plain, "arrow", **changes)
    if harm is not None:
        harm(tmp_path / "train")
    with pytest.raises(UserError, match=message) as error:
        open_source("hfds/", str(tmp_path), "train")
    assert "\n" not in str(error.value)
    if what == "no label column":  # a task without labels needs none
        assert open_source("hfds/", str(tmp_path), "train", labels=False).class_names == ()


def test_names_that_unicode_spells_alike(tmp_path):
    """Would catch the images of both counted as one class."""
    features = datasets.Features({"label": datasets.ClassLabel(names=["\u00e9", "e\u0301"]), "img": datasets.Image()})
    rows = {"label": [0, 1], "img": [{"bytes": encoded(1), "path": None}] * 2}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    source = open_source("hfds/", str(tmp_path), "train")
    assert [source.target(0), source.target(1)] == [0, 1]


def test_files_that_name_their_classes_in_another_order(tmp_path):
    """Would catch the numbers of one file read with another's names, and a refusal where no classes are needed."""

    def write(file: str, names: list[str]) -> None:
        features = datasets.Features({"label": datasets.ClassLabel(names=names), "img": datasets.Image()})
        rows = {"label": ["cat", names[0]], "img": [{"bytes": encoded(1), "path": None}] * 2}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / file))

    write("train-a.parquet", ["cat", "dog", "cow"])
    write("train-b.parquet", ["dog", "cat"])
    source = open_source("hfds/", str(tmp_path), "train")
    assert [source.class_names[source.target(number)] for number in range(4)] == ["cat", "cat", "cat", "dog"]
    write("train-c.parquet", ["cat", "elk"])
    with pytest.raises(UserError, match=r"c\.parquet has 1 classes that are not among the 3 of .*: elk; .*cast_"):
        open_source("hfds/", str(tmp_path), "train")
    assert len(open_source("hfds/", str(tmp_path), "train", labels=False)) == 6


@pytest.mark.parametrize("null", ["row", "bytes", "binary"])
def test_a_row_without_an_image_counts_as_damaged(tmp_path, null):
    """Would catch a run that one empty row ends, although it skips damaged images."""
    image = encoded(1)
    rows = {
        "row": [{"bytes": image, "path": "a.png"}, None],
        "bytes": [{"bytes": image, "path": "a.png"}, {"bytes": None, "path": None}],
        "binary": [image, None],
    }[null]
    kind = pa.binary() if null == "binary" else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    (tmp_path / "train").mkdir()
    table = pa.table({"image": pa.array(rows, kind), "label": [0, 1]})
    pq.write_table(table, tmp_path / "train" / "0.parquet")
    source = open_source("hfds/", str(tmp_path), "train")
    assert source.encoded(0) == image
    with pytest.raises(ImageDecodeError, match=r"0\.parquet\[1\]\[image\]: .* \(its row has no image\); .* --on-bad"):
        source.encoded(1)


def test_what_is_not_there(tmp_path, monkeypatch):
    """Would catch an import error in place of the command that helps."""
    with pytest.raises(UserError, match="there is no folder /nowhere; give hfds/FOLDER"):
        open_source("hfds//nowhere", None, "train")
    with pytest.raises(UserError, match=r"has no train/\*\.arrow and no train-\*\.parquet .* it holds nothing"):
        open_source("hfds/", str(tmp_path), "train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs datasets .*: pip install datasets"):
        open_source("hfds/", str(tmp_path), "train")
