"""Images with captions in every form: the same pairs, what does not match, and what is damaged."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from micro_batches import load
from picture_folders import encoded, made
from shards import write_shard

from ds_vit.config import parser as flags
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.config.schema import TASKS
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources import shards
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.listing import NoSuchSplit
from ds_vit.data.sources.source import Source
from ds_vit.data.text import build_tokenizer
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.task import Task
from ds_vit.training.resolve.data import _open_sources

NUM_PAIRS = 14
NAMES = [f"{('cat', 'dog')[number % 2]}/{number:02}.png" for number in range(NUM_PAIRS)]
NAMES.sort()
TEXTS = [tuple(f"ä picture, no. {number} ({c})" for c in range(1 + number % 3)) for number in range(NUM_PAIRS)]
IMAGES = [encoded(number) for number in range(NUM_PAIRS)]
DEFAULT = CaptionKeys()
FORMS = {
    "folder": ("", "{}/folder", DEFAULT),
    "csv": ("csv/{}/folder/train", None, CaptionKeys("image", "text", ";")),
    "txt": ("wds/{}/txt", None, DEFAULT),
    "json": ("wds/", "{}/json", DEFAULT),
    "json key": ("", "wds/{}/key", CaptionKeys(caption="said")),
    "arrow": ("hfds/arrow", "{}", CaptionKeys("picture", "said")),
    "parquet": ("parquet/{}/parquet", None, DEFAULT),
}
SETTINGS = {"image": ImageConfig((8, 8)), "augment": AugmentConfig(no_aug=True), "mix": MixConfig()}
TOKENIZER = build_tokenizer("bytes", 40)


def write_rows(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]], separator: str = "\t") -> Path:
    """A table."""
    with open(made(path), "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])
    return path


def write_form(root: Path, form: str, images: Sequence[bytes | None], texts: list[tuple[str | bytes, ...]]) -> None:
    """The pairs of `NAMES` in a form; a text that is bytes is not UTF-8."""
    lines = [b"\n".join(t if isinstance(t, bytes) else t.encode() for t in of_one) for of_one in texts]
    if form in ("folder", "csv"):
        for name, image, text in zip(NAMES, images, lines, strict=True):
            made(root / "folder" / "train" / name).write_bytes(image)
            (root / "folder" / "train" / name).with_suffix(".txt").write_bytes(text + b"\n\n" if text else b" \n")
    if form == "csv":
        rows = [(name, text) for name, of_one in zip(NAMES, texts, strict=True) for text in of_one or ("",)]
        write_rows(root / "folder" / "train" / "train.csv", ("text", "image"), [(t, n) for n, t in rows], ";")
    if form in ("txt", "json", "json key"):
        folder = {"json key": "key"}.get(form, form)
        for shard, numbers in enumerate((range(5), range(5, NUM_PAIRS))):
            files: dict[str, bytes] = {}
            for number in numbers:
                stem, few = NAMES[number].removesuffix(".png"), texts[number]
                one_or_all = few[0] if len(few) == 1 else few
                fields = {"width": 9, "said" if form == "json key" else "caption": one_or_all}
                own = {".txt": lines[number]} if form == "txt" else {".json": json.dumps(fields).encode()}
                others = {".txt": b"another"} if form == "json key" else {}
                files |= {stem + suffix: data for suffix, data in {**own, ".png": images[number], **others}.items()}
            write_shard(root / folder / f"train-{shard:03}.tar", files)
    if form in ("arrow", "parquet"):
        columns = ("picture", "said") if form == "arrow" else ("image", "caption")
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        rows = [image and {"bytes": image, "path": name} for image, name in zip(images, NAMES, strict=True)]
        arrays = [pa.array(rows, kind), pa.array([[*of_one] for of_one in texts], pa.list_(pa.string()))]
        table = pa.table([*arrays, pa.array(range(NUM_PAIRS))], names=[*columns, "number"])
        path = made(root / form / f"data-0.{form}")
        if form == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=4)


def open_form(root: Path, form: str, split: str = "train") -> Source:
    """A form's pairs."""
    dataset, data_dir, keys = FORMS[form]
    return open_source(dataset.format(root), data_dir and data_dir.format(root), split, labels=keys)


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    for form in FORMS:
        write_form(root, form, IMAGES, TEXTS)
    return root


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_folder(forms, form):
    """Would catch other pairs, another order, and a source that a worker cannot share or a spawned one not open."""
    source, folder = open_form(forms, form), open_form(forms, "folder")
    assert source.has_captions
    assert (source.class_names, source.target(3)) == ((), 0)
    assert [source.captions(number) for number in range(NUM_PAIRS)] == TEXTS
    assert [source.encoded(number) for number in range(NUM_PAIRS)] == IMAGES
    assert source.fingerprint == folder.fingerprint, "a run of one form resumes on another"
    again = pickle.loads(pickle.dumps(source))
    assert again.captions(5) == TEXTS[5]
    options = {**SETTINGS, "stop": 4, "tokenizer": TOKENIZER}
    ours, theirs = (load(s, Share(0, 1, 5), num_workers=n, **options).tensors() for s, n in ((source, 1), (folder, 0)))
    assert torch.equal(ours["texts"], theirs["texts"])
    assert torch.equal(ours["images"], theirs["images"])


@pytest.mark.parametrize("form", ["txt", "arrow", "folder"])
def test_without_a_task_for_text_captions_are_not_read(forms, form):
    """Would catch a classification that reads captions, or whose index is the one with captions."""
    dataset, data_dir, _ = FORMS[form]
    if form == "folder":
        source = open_source(dataset, data_dir.format(forms), "train")
        assert source.class_names == ("cat", "dog")
        assert not source.has_captions
    else:
        with pytest.raises(UserError, match=r"label|no Image column"):
            open_source(dataset.format(forms), data_dir and data_dir.format(forms), "train")
    with pytest.raises(UserError, match=r"csv/x\.csv has captions and no classes; it is for tasks with text"):
        open_source("csv/x.csv", None, "train")


def test_the_index_of_captions(tmp_path, monkeypatch):
    """Would catch shards scanned at each start, or captions of another key, or of a shard that has changed."""
    write_form(tmp_path, "json key", IMAGES, TEXTS)
    scanned, read = [], shards.read_index
    monkeypatch.setattr(shards, "read_index", lambda shard, *args: scanned.append(shard) or read(shard, *args))
    shard = f"wds/{tmp_path}/key/train-000.tar"
    for key, expected in (("said", TEXTS[0]), ("said", TEXTS[0]), ("", ("another",))):
        assert open_source(shard, None, "train", labels=CaptionKeys(caption=key)).captions(0) == expected
    assert len(scanned) == 2
    write_shard(tmp_path / "key" / "train-000.tar", {"a.png": IMAGES[0], "a.txt": b"a new one"})
    assert open_source(shard, None, "train", labels=DEFAULT).captions(0) == ("a new one",)


# Pairs that do not match


def _without(*patterns: str) -> Callable[[Path], object]:
    return lambda root: [path.unlink() for one in patterns for path in (root / "folder" / "train").glob(one)]


def _table(text: bytes) -> Callable[[Path], object]:
    return lambda root: (root / "folder" / "train" / "train.csv").write_bytes(text)


def _shard(folder: str, files: dict[str, bytes]) -> Callable[[Path], object]:
    return lambda root: write_shard(root / folder / "train-000.tar", {"a.png": b"", **files})


LATIN_1 = "not UTF-8; if it is Latin-1, convert the file: iconv -f LATIN1"
SEPARATED = "the columns by the separator ';' are filepath,title; give --csv-img-key, or --csv-s"
BARE = r"train-000.tar: 1 images, 1 without a caption \(a\)"
MISMATCHES = [
    ("folder", _without("*/*.txt"), r"14 images, 14 without a caption \(cat/00.png, .*\)"),
    ("folder", _without("dog/03.png", "dog/05.png"), r"12 images, 2 captions .* \(dog/03.txt, dog/05.txt\); add what"),
    ("folder", _without("*/*"), "no images"),
    ("csv", _without("dog/03.png"), r"train.csv: 13 images, 1 captions without an image \(dog/03.png\)"),
    ("csv", _table(b"image;text\na.png\n"), "train.csv, line 2: 1 columns in place of the 2 of the header"),
    ("csv", _table(b"image;text\ncat/00.png;caf\xe9\n"), f"train.csv, line 2, column 4 of its text: {LATIN_1}"),
    ("csv", _table(b"image;text;text\ncat/00.png;a;b\n"), "has two columns text"),
    ("csv", _table(b"image;text\n"), "lists no images"),
    ("csv", _table(b"image; text\n"), "no column text; the columns .* are image, ' text'; give --csv-c"),
    ("csv", _table(b"filepath,title\n"), f"has no column image; {SEPARATED}"),
    ("txt", _shard("txt", {"b/c.txt": b"x", "b/c.cls": b"1"}), rf"{BARE} and 1 captions without an image \(b/c\)"),
    ("json key", _shard("key", {"a.json": b'{"said": 3}'}), "a.json: said is neither a text nor a list of texts"),
    ("json key", _shard("key", {"a.json": b'{"caption": "x"}'}), BARE),
]


@pytest.mark.parametrize(("form", "change", "message"), MISMATCHES)
def test_pairs_that_do_not_match_are_named(tmp_path, form, change, message):
    """Would catch a run that hangs or trains on pairs that are none, and an error that names no file."""
    write_form(tmp_path, form, IMAGES, TEXTS)
    change(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_form(tmp_path, form)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (CaptionKeys("picture", "title"), "no column title, as --csv-caption-key says; it has picture, said, number"),
        (CaptionKeys("picture", "number"), "the column number is of int64, not of texts or lists of texts"),
        (CaptionKeys("image"), "has no column image, as --csv-img-key says"),
        (CaptionKeys("picture"), "no column of captions by none of the names caption, .*: name it by --csv-caption"),
    ],
)
def test_columns_that_are_not_there(forms, keys, message):
    """Would catch a traceback of pyarrow, or numbers as captions."""
    with pytest.raises(UserError, match=message):
        open_source("hfds/arrow", str(forms), "train", labels=keys)


# Damage


@pytest.mark.parametrize("form", ["folder", "csv", "txt", "json", "parquet"])
def test_damaged_pairs_are_found(tmp_path, form):
    """Would catch a caption that is taken from another pair, and an image that is lost with its row."""
    images: list[bytes | None] = [b"no image" if number == 4 else image for number, image in enumerate(IMAGES)]
    if form == "parquet":
        images[4] = None
    texts: list[tuple[str | bytes, ...]] = [() if number % 5 == 2 else text for number, text in enumerate(TEXTS)]
    if form in ("folder", "txt"):
        texts[9] = (b"fine", b"\xff\xfe not UTF-8")
    bad = {n for n, text in enumerate(texts) if not text} | {4} | ({9} if form in ("folder", "txt") else set())
    write_form(tmp_path, form, images, texts)
    source = open_form(tmp_path, form)
    assert {n for n in range(NUM_PAIRS) if not source.captions(n)} == bad - {4}
    with pytest.raises(ImageDecodeError, match="cannot be decoded"):
        source.image(4)


MISSING = {
    "folder": [b"", b" \n", None],
    "csv": [""],
    "txt": [b"", b"\n", None],
    "json": [b'""', b"null", b"NaN", b"[]", b'[null, ""]', None],
    "parquet": [None, "", " "],
}


@pytest.mark.parametrize("form", MISSING)
def test_missing_captions_are_damaged_pairs(tmp_path, form):
    """Would catch a missing caption that ends the run in one form and is replaced in another (img2dataset #46)."""
    captions = [*MISSING[form], "there"]
    names = [f"{number}.png" for number in range(len(captions))]
    files = dict(zip(names, IMAGES, strict=False))
    for name, caption in zip(names, captions, strict=True):
        stem, data = name.removesuffix(".png"), b"there" if caption == "there" else caption
        if form in ("folder", "txt") and data is not None:
            files[f"{stem}.txt"] = data
        if form == "json":
            data = b'"there"' if caption == "there" else caption
            files[f"{stem}.json"] = b"{}" if data is None else b'{"caption": ' + data + b"}"
    if form in ("folder", "csv"):
        for name, data in files.items():
            made(tmp_path / "train" / name).write_bytes(data)
    if form == "folder":  # the caption that has no file gets a broken link
        (tmp_path / "train" / "2.txt").symlink_to("nowhere")
    if form == "csv":
        write_rows(tmp_path / "train" / "train.csv", ("filepath", "title"), [*zip(names, captions, strict=True)])
    if form in ("txt", "json"):
        write_shard(tmp_path / "train-0.tar", files)
    if form == "parquet":
        images = [{"bytes": image, "path": name} for name, image in files.items()]
        table = pa.table([images, pa.array(captions, pa.string())], names=["image", "caption"])
        pq.write_table(table, tmp_path / "train-0.parquet")
    dataset = {"folder": "", "csv": f"csv/{tmp_path}/train", "parquet": f"parquet/{tmp_path}"}
    source = open_source(dataset.get(form, f"wds/{tmp_path}"), str(tmp_path), "train", labels=DEFAULT)
    assert [source.captions(n) for n in range(len(names))] == [()] * (len(names) - 1) + [("there",)]


def test_lines_of_a_caption(tmp_path):
    """Would catch a caption that ends at U+0085, U+2028 or a form feed (datasets #3729)."""
    texts = {"a": "red\x85sofa", "b": "first\u2028second", "c": "page\x0cbreak", "d": "one\r\ntwo\rthree\n"}
    for name, text in texts.items():
        made(tmp_path / "train" / f"{name}.png").write_bytes(IMAGES[0])
        (tmp_path / "train" / f"{name}.txt").write_bytes(text.encode())
    source = open_source("", str(tmp_path), "train", labels=DEFAULT)
    assert [source.captions(n) for n in range(4)] == [*((t,) for t in [*texts.values()][:3]), ("one", "two", "three")]


def test_spellings_of_a_file_are_one_image(tmp_path):
    """Would catch an image that is trained on once for each spelling of its path."""
    made(tmp_path / "images" / "a.png").write_bytes(IMAGES[0])
    paths = ("images/a.png", "./images/a.png", "images//a.png", "images/../images/a.png", f"{tmp_path}/images/a.png")
    table = write_rows(tmp_path / "train.tsv", ("filepath", "title"), [(path, path) for path in paths])
    source = open_source(f"csv/{table}", None, "train", labels=DEFAULT)
    assert [source.captions(number) for number in range(len(source))] == [paths]


# Splits and flags


def test_tables_of_several_splits(forms, tmp_path):
    """Would catch a validation split that is the training table, and the reverse."""
    rows = [(str(forms / "folder" / "train" / name), "x") for name in NAMES]
    train = write_rows(tmp_path / "train.csv", ("filepath", "title"), rows)
    write_rows(tmp_path / "val.tsv", ("filepath", "title"), rows[:3])
    write_rows(tmp_path / "more.csv", ("filepath", "title"), rows[:5])
    for dataset, split, number in (
        (f"csv/{tmp_path}", "train", 14),
        (f"csv/{tmp_path}", "validation", 3),
        (f"csv/{train}", "train[:50%]", 7),
        (f"csv/{train}", "more.csv", 5),
    ):
        assert len(open_source(dataset, None, split, labels=DEFAULT)) == number
    assert len(open_source("csv/train.csv", str(tmp_path), "train", labels=DEFAULT)) == 14
    with pytest.raises(
        NoSuchSplit, match=r"train.csv is the table of training; name that of validation by --val-split"
    ):
        open_source(f"csv/{train}", None, "validation", labels=DEFAULT)
    with pytest.raises(UserError, match="there is no table"):
        open_source("csv/nowhere.csv", None, "train", labels=DEFAULT)


def test_a_folder_of_parquet_files_is_not_another_split(forms, tmp_path):
    """Would catch a run that trains on its evaluation split."""
    shutil.copy(forms / "parquet" / "data-0.parquet", tmp_path / "test-0.parquet")
    with pytest.raises(NoSuchSplit):
        open_source(f"parquet/{tmp_path}", None, "train", labels=DEFAULT)


class _WithText(Classification):
    settings = TASKS["clip"][1]
    identity = Task.identity
    has_classes = False
    has_text = True


@pytest.mark.parametrize("form", ["csv", "arrow"])
def test_from_flags(forms, form):
    """Would catch flags that do not reach the data, and a mixture of pairs that loses its captions."""
    words = {
        "csv": ["--dataset", f"csv/{forms}/folder/train", "--csv-separator", ";", "--csv-img-key", "image"],
        "arrow": ["--data-dir", f"hfds/{forms}/arrow", f"hfds/{forms}/arrow", "--csv-img-key", "picture"],
    }[form]
    key = {"csv": "text", "arrow": "said"}[form]
    words += ["--csv-caption-key", key, "--val-fraction", "0.2", "--task", f"{__name__}:_WithText"]
    config = flags.parse(["--deepspeed_config", "x.json", *words])
    train, val, (line,) = _open_sources(config)
    assert (len(train), len(val)) == {"csv": (11, 3), "arrow": (22, 6)}[form]
    assert {text for n in range(len(train)) for text in train.captions(n)} < {
        text for of_one in TEXTS for text in of_one
    }
    assert line.startswith(f"--val-fraction 0.2: {len(val)} of the {len(train) + len(val)} images")
    assert "classes" not in line
    task = object.__new__(_WithText)
    task.config = config
    assert "tokenizer" in task.identity()
    assert not [name for name in task.identity() if name.startswith("csv_")], "a run resumes on another form"
