"""WebDataset shards: what is read of them, the index beside them, and what a person is told when they do not fit."""

from __future__ import annotations

import os
import pickle
import re
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from picture_folders import encoded, noise
from shards import write_shard

from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.field import Sample
from ds_vit.data.fields import ImageField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources import shards, tars
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.shards import expand_braces
from ds_vit.fault_tolerance.errors import UserError


def _bytes(number: int) -> bytes:
    return noise(number).tobytes()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three training shards of four samples with classes 0 to 2, and one of validation."""
    for shard in range(3):
        files = {}
        for number in range(4 * shard, 4 * shard + 4):
            files |= {f"{number:04}.png": encoded(number), f"{number:04}.cls": str(number % 3).encode()}
        write_shard(tmp_path / f"train-{shard:03}.tar", files)
    write_shard(tmp_path / "val-000.tar", {"a.png": encoded(20), "a.cls": b"1"})
    return tmp_path


def _labels(source) -> list[int]:
    return [source.target(number) for number in range(len(source))]


# What is read


def test_a_field_reads_a_further_image_of_each_sample(tmp_path):
    # Catches: an entry that only masks read, the pixels of the sample's image in its place,
    # and one suffix for the entry in the whole shard.
    files = {"a.png": encoded(0), "a.depth.png": encoded(7), "a.cls": b"0"}
    files |= {"b.png": encoded(1), "b.depth.webp": b"of b", "b.cls": b"0"}
    write_shard(tmp_path / "train-0.tar", files)
    source, image = open_source("wds/", str(tmp_path), "train"), ImageConfig((8, 8), crop_pct=1.0)
    read = [ImageField(name, image, entry=name).read(Sample(source, 0, 0)) for name in ("image", "depth")]
    write_shard(tmp_path / "val-0.tar", {"b.png": files["a.depth.png"], "b.cls": b"0"})
    single = ImageField("image", image).read(Sample(open_source("wds/", str(tmp_path), "val"), 0, 0))
    assert torch.equal(read[1], single)
    assert not torch.equal(read[0], single)
    assert source.entry("depth", 1) == b"of b"
    # How samples are divided into shards does not decide which entries they have.
    write_shard(tmp_path / "train-1.tar", {"c.png": encoded(2), "c.cls": b"0"})
    source = open_source("wds/", str(tmp_path), "train")
    assert source.entry("depth", 1) == b"of b"
    with pytest.raises(ImageDecodeError, match=r"c\.png\[depth\]: .*its sample has no depth"):
        source.entry("depth", 2)


@pytest.mark.parametrize(
    ("dataset", "data_dir", "split"),
    [
        ("wds/", "{}", "train"),
        ("wds/{}", None, "train"),
        ("wds/{}/train-{{000..002}}.tar", None, "train"),
        ("wds/train-{{000..002}}.tar", "{}", "train"),
        ("wds/", "{}", "train-{{000..002}}.tar"),
        ("", "wds/{}/train-{{000..002}}.tar", "train"),
        ("wds/train-{{000..002}}.tar", "", "train"),
    ],
)
def test_ways_to_name_shards(folder, monkeypatch, dataset, data_dir, split):
    """Would catch a spelling of the docs that finds nothing, or other samples."""
    monkeypatch.chdir(folder)
    named = [name and name.format(folder) for name in (dataset, data_dir, split)]
    source = open_source(*named)
    assert len(source) == 12
    assert source.class_names == ("0", "1", "2")
    assert _labels(source) == [number % 3 for number in range(12)]
    assert [source.image(number).tobytes() for number in range(12)] == [_bytes(number) for number in range(12)]
    assert source.describe(5).endswith("train-001.tar:0005.png")
    if split == "train":
        val = open_source(named[0], named[1], "validation", classes=source.class_names)
        assert (len(val), val.num_classes, val.target(0)) == (1, 3, 1)
        assert val.image(0).tobytes() == _bytes(20)


def test_braces_are_a_shells():
    """Would catch lost leading zeros, or a second pair of braces that is not multiplied out."""
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{a,b}/{0..1}.tar") == ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]
    assert expand_braces("plain.tar") == ["plain.tar"]


def test_labels_of_json_and_by_name(tmp_path):
    """Would catch labels of a .json that are not read, and a name like WebDataset's `__key__` that is lost."""
    files = {
        "x/b.png": encoded(0),
        "x/b.json": b'{"label": "class10"}',
        "x/a.jpg": encoded(1, "JPEG"),
        "x/a.cls": b"class9\n",
        "x/a.txt": b"a caption",
        "x/c.seg.png": b"no sample's image",
        "x/c.webp": encoded(2),
        "x/c.json": b'{"cls": "class10", "other": 1}',
        "__meta__.json": b"{}",
        "__info__/x.png": b"",
        "x/__main__.png": encoded(3),
        "x/__main__.cls": b"class9",
    }
    write_shard(tmp_path / "train.tar", files)
    source = open_source("wds/", str(tmp_path), "train")
    assert source.class_names == ("class9", "class10")
    assert _labels(source) == [1, 0, 1, 0]
    assert [source.image(number).tobytes() for number in (0, 3)] == [_bytes(0), _bytes(3)]
    assert source.left_out == {".txt": 1, ".seg.png": 1, ".json": 1, "__info__/": 1}
    (tmp_path / "classes.json").write_text('["class10", "class9", "class11"]')
    named = open_source("wds/", str(tmp_path), "train")
    assert named.class_names == ("class10", "class9", "class11")
    assert _labels(named) == [0, 1, 0, 1]


def test_digits_with_leading_zeros(tmp_path):
    """Would catch two names that become one class, and numbers that WebDataset and timm read as 7 taken for names."""
    write_shard(tmp_path / "train-0.tar", {"a.png": PNG, "a.cls": b"007", "b.png": PNG, "b.cls": b"3"})
    numbered = open_source("wds/", str(tmp_path), "train")
    assert (numbered.class_names, _labels(numbered)) == (tuple("01234567"), [7, 3])
    write_shard(tmp_path / "train-1.tar", {"c.png": PNG, "c.cls": b"07", "d.png": PNG, "d.json": b'{"label": "x"}'})
    named = open_source("wds/", str(tmp_path), "train")
    assert (named.class_names, _labels(named)) == (("3", "007", "07", "x"), [1, 0, 2, 3])


def test_a_validation_split_of_digits_only(tmp_path):
    """Would catch digits that are names in training, because names stand among them, and numbers in validation."""
    write_shard(
        tmp_path / "train.tar", {"a.png": PNG, "a.cls": b"1", "b.png": PNG, "b.cls": b"2", "c.png": PNG, "c.cls": b"x"}
    )
    write_shard(tmp_path / "val.tar", {"a.png": PNG, "a.cls": b"1"})
    for classes, label in {("1", "2", "x"): "1", ("0", "1", "2"): "1", ("cat", "dog", "x"): "dog"}.items():
        source = open_source("wds/", str(tmp_path), "val", classes=classes, partly=True)
        assert source.class_names[source.target(0)] == label


# The index


def test_the_index_is_made_once_and_again_when_a_shard_changes(folder, monkeypatch):
    """Would catch a shard that is read whole at each start, and offsets of a shard that is no longer there."""
    first = open_source("wds/", str(folder), "train")
    assert sorted(path.name for path in folder.glob("*.npz")) == [f"train-00{n}.tar.index.npz" for n in range(3)]
    scanned = []
    read = shards.read_index
    monkeypatch.setattr(shards, "read_index", lambda shard, *args: scanned.append(shard) or read(shard, *args))
    again = open_source("wds/", str(folder), "train")
    assert not scanned
    assert (again.fingerprint, _labels(again)) == (first.fingerprint, _labels(first))
    write_shard(folder / "train-001.tar", {"new.png": encoded(30), "new.cls": b"2"})
    changed = open_source("wds/", str(folder), "train")
    assert scanned == [f"{folder}/train-001.tar"]
    assert len(changed) == 9
    assert changed.image(4).tobytes() == _bytes(30)
    (folder / "train-000.tar.index.npz").write_bytes(b"PK\x03\x04 half an index")
    assert open_source("wds/", str(folder), "train").fingerprint == changed.fingerprint
    with pytest.raises(UserError, match=r"train-001\.tar has changed since its index was read"):
        first.image(4)


def test_few_files_are_open_at_a_time_and_none_is_pickled(folder, monkeypatch):
    """Would catch a handle a shard (a process may open 1,024), and open files that a spawned worker is sent."""
    monkeypatch.setattr(tars, "_MOST_OPEN", 2)
    source = open_source("wds/", str(folder), "train")
    for number in (0, 4, 8, 0, 11):
        assert source.image(number).tobytes() == _bytes(number)
    assert len(source._open) == 2
    assert pickle.loads(pickle.dumps(source)).image(11).tobytes() == _bytes(11)


def test_one_process_makes_an_index(folder, monkeypatch):
    """Would catch every rank scanning every shard: while one does, the others wait and read what it wrote."""
    scanned, read = [], shards.read_index
    monkeypatch.setattr(shards, "read_index", lambda shard, *args: scanned.append(shard) or read(shard, *args))
    shard = str(folder / "train-000.tar")
    pool = ThreadPoolExecutor(3)
    with shards.one_at_a_time(shard):
        waiting = [pool.submit(shards.make_index, shard) for _ in range(3)]
        assert not any(one.done() for one in waiting)
        shards.save_index(shard, shards.read_index(shard))
        scanned.clear()
    pool.shutdown()
    assert len({len(one.result().paths) for one in waiting}) == 1
    assert not scanned


def test_a_folder_that_cannot_be_written_to(folder, monkeypatch):
    """Would catch a data set on a read-only disk that cannot be trained on."""

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", refuse)
    assert len(open_source("wds/", str(folder), "val")) == 1
    assert not list(folder.glob("val*index*"))


# What a person is told


def _linked(kind: bytes) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        with tarfile.open(folder / "train-001.tar", "w") as tar:
            link = tarfile.TarInfo("b.png")
            link.type, link.linkname = kind, "a.png"
            tar.addfile(link)

    return harm


def _without_end(shard: Path, size: int) -> None:
    shard.write_bytes(shard.read_bytes()[:size])


def _other(files: dict[str, bytes]) -> Callable[[Path], None]:
    return lambda folder: write_shard(folder / "train-001.tar", files)


def _cut_to(size: int) -> Callable[[Path], None]:
    return lambda folder: _without_end(folder / "train-001.tar", size)


PNG = encoded(0)
S = r"train-001\.tar"
BROKEN = {
    "cut in an image": (_cut_to(700), rf"{S} cannot be read as .*cut short"),
    "cut between two files": (_cut_to(4096), rf"{S} is cut short: after 2 s"),
    "empty": (_cut_to(0), rf"{S} cannot be read as an uncompressed tar"),
    "missing in the middle": (lambda f: (f / "train-001.tar").unlink(), rf"{S} is missing; .*000\.\.002"),
    "without a label": (
        _other({"a.png": PNG, "b.png": PNG, "b.cls": b"1"}),
        rf"1 of 10 samples have no label, the first is \S+{S}:a\.png; give",
    ),
    "without images": (_other({"a.cls": b"1"}), "holds no images"),
    "a dot in a name": (_other({"22.05.JPG": PNG, "22.05.cls": b"1"}), r"holds no images .*; 22.05.JPG: .* first dot"),
    "a name twice": (_other({"a.png": PNG, "./a.png": PNG}), rf"{S} holds a\.png twice"),
    "a label below 0": (
        _other({"a.png": PNG, "a.cls": b"-1"}),
        rf"{S}:a\.png has the label -1; the 3 classes are 0, 1, 2, .*numbers 0 to 2; 1 of 9 samples",
    ),
    "a label beyond classes.json": (
        lambda f: (f / "classes.json").write_text('["cat", "dog"]'),
        r"train-000\.tar:0002\.png has the label 2; the 2 classes are cat, dog, .*numbers 0 to 1; 4 of 12 samples",
    ),
    "a hard link": (_linked(tarfile.LNKTYPE), rf"{S} holds b\.png as a link, .* --hard-dereference$"),
    "a symbolic link": (_linked(tarfile.SYMTYPE), rf"{S} holds b\.png as a link, .* tar --dereference "),
    "a reserved folder only": (
        _other({"__x__/a.png": PNG, "__x__/a.cls": b"1"}),
        r"holds no images .*; __x__/ is left out, as by WebDataset: pack its files as \./__x__/",
    ),
    "json that is none": (_other({"a.png": PNG, "a.json": b"{"}), rf"{S}:a\.json is not JSON"),
    "a label that is a list": (
        _other({"a.png": PNG, "a.json": b'{"label": [1]}'}),
        r"the label \[1\] is neither a class number nor a class name",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("indexed", [False, True], ids=["at first", "with an older index"])
def test_broken_shards_are_refused_in_one_line(folder, what, indexed):
    """Would catch a traceback, a sample lost in silence, or an old index that hides what has happened to its shard."""
    if indexed:
        open_source("wds/", str(folder), "train")
    harm, message = BROKEN[what]
    harm(folder)
    with pytest.raises(UserError, match=message) as error:
        open_source("wds/", str(folder), "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "split", "message"),
    [
        ("wds/{}/train-{{000..003}}.tar", "train", r"1 of 4 shards are missing, the first is \S+/train-003\.tar"),
        ("wds/{}", "test", r"has no shards test-\*\.tar .* it holds train-000\.tar"),
        ("wds//nowhere", "train", "there is no folder of shards /nowhere"),
        ("wds/", "train", "needs a path"),
    ],
)
def test_shards_that_are_not_there(folder, dataset, split, message):
    """Would catch a traceback, a run on fewer shards than were named, or training shards taken for a test split."""
    with pytest.raises(UserError, match=message):
        open_source(dataset.format(folder), None, split)


def test_numbered_shards_are_named_by_a_pattern_that_works(tmp_path):
    """Would catch img2dataset's 00000.tar refused without a way to name them."""
    for number in range(3):
        write_shard(tmp_path / f"{number:05}.tar", {f"{number}.png": encoded(number), f"{number}.cls": b"0"})
    (tmp_path / "._00000.tar").write_bytes(b"no tar")
    with pytest.raises(
        UserError, match=r"name the shards, 'wds/\S+/\{00000..00002\}.tar', with --val-split ''"
    ) as error:
        open_source("wds/", str(tmp_path), "train")
    named = re.search(r"'(wds/.*?)'", str(error.value))[1]
    assert len(open_source(named, None, "train")) == 3
    with pytest.raises(UserError, match=rf"3 tar files as WebDataset shards: --dataset wds/{tmp_path}$"):
        open_source("", str(tmp_path), "train", labels=CaptionKeys())


def test_shards_without_labels(folder):
    """Would catch shards of images only, which pretraining without labels refuses, or an index that loses classes."""
    write_shard(folder / "train-001.tar", {"a.png": PNG, "b.png": PNG, "b.cls": b"1"})
    source = open_source("wds/", str(folder), "train", labels=False)
    assert (source.class_names, source.target(8), len(source)) == ((), 0, 10)
    write_shard(folder / "train-001.tar", {"b.png": PNG, "b.cls": b"1"})
    assert open_source("wds/", str(folder), "train", labels=False).class_names == ("0", "1", "2")
