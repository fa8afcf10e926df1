"""Sources: what is found, how it is numbered, and what a person is told when it is not there."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import struct
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from picture_folders import encoded, noise, write_images
from PIL import Image
from shards import write_shard
from sklearn.datasets import load_digits
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key as timm_key

from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.folders import find_images
from ds_vit.data.sources.listing import natural_key
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tools.doctor.images import _files as doctors_files


def _tar(path: Path, folder: Path, prefix: str = "./") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for file in sorted(folder.rglob("*"), reverse=True):
            tar.add(file, arcname=prefix + str(file.relative_to(folder)), recursive=False)


NAMES = ("cat/10.png", "cat/9.png", "dog/a.jpg", "class10/x.jpeg", "class9/x.png", "deep/er/cow/z.png")


# Numbering


def test_a_folder_is_numbered_as_by_timm(tmp_path):
    """Would catch class numbers or samples that differ from timm's: weights trained there would not fit here."""
    write_images(tmp_path / "train", *NAMES)
    source = open_source("", str(tmp_path), "train")
    reader = ReaderImageFolder(str(tmp_path / "train"))
    assert source.class_names == ("cat", "class9", "class10", "cow", "dog")
    assert {name: number for number, name in enumerate(source.class_names)} == reader.class_to_idx
    assert [(source.describe(i), source.target(i)) for i in range(len(source))] == reader.samples
    expected = [Image.open(path).convert("RGB").tobytes() for path, _ in reader.samples]
    assert [source.image(i).tobytes() for i in range(len(source))] == expected


def test_a_tar_is_numbered_as_by_timm(tmp_path):
    """Would catch other labels or numbers of a tar's members; test_same_samples.py compares it with the folder."""
    write_images(tmp_path / "plain" / "train", *NAMES)
    _tar(tmp_path / "packed" / "train.tar", tmp_path / "plain" / "train")
    tar = open_source("", str(tmp_path / "packed"), "train")
    assert tar.describe(0) == f"{tmp_path / 'packed' / 'train.tar'}:cat/9.png"
    reader = ReaderImageInTar(str(tmp_path / "packed" / "train.tar"))
    assert {name: number for number, name in enumerate(tar.class_names)} == reader.class_name_to_idx
    assert [tar.target(i) for i in range(len(tar))] == list(reader.targets)
    first = tar.image(0).tobytes()
    assert pickle.loads(pickle.dumps(tar)).image(0).tobytes() == first  # without its open files


def test_the_same_data_elsewhere_has_the_same_fingerprint(tmp_path):
    """Would catch a run that cannot go on because its data were moved or packed."""
    write_images(tmp_path / "plain" / "train", *NAMES)
    shutil.copytree(tmp_path / "plain", tmp_path / "a" / "longer" / "way")
    _tar(tmp_path / "packed" / "train.tar", tmp_path / "plain" / "train")
    _tar(tmp_path / "outer" / "train.tar", tmp_path / "plain" / "train", prefix="data/train/")
    for name in ("cat", "class9", "class10", "deep", "dog"):
        _tar(tmp_path / "tars" / "train" / f"{name}.tar", tmp_path / "plain" / "train" / name)
    places = ("plain", "a/longer/way", "packed", "outer", "tars")
    prints = {place: open_source("", str(tmp_path / place), "train").fingerprint for place in places}
    assert set(prints.values()) == {prints["plain"]}


OTHER_DATA = {
    "an image of another name": {"dog/a.jpg": "dog/b.jpg"},
    "an image of another class": {"dog/a.jpg": "cat/a.jpg"},
    "an image less": {"dog/a.jpg": None},
    "a class of another name": {"dog/a.jpg": "hound/a.jpg", "dog/c.jpg": "hound/c.jpg"},
    "two classes swapped": {"class10/x.jpeg": "class9/x.jpeg", "class9/x.png": "class10/x.png"},
}


@pytest.mark.parametrize("what", OTHER_DATA)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_other_data_have_another_fingerprint(tmp_path, what, packed):
    """Would catch a resume on other data that happen to have as many images."""
    names = [*NAMES, "dog/c.jpg"]
    prints = []
    for kind, changes in (("before", {}), ("after", OTHER_DATA[what])):
        write_images(tmp_path / kind / "train", *(name for old in names if (name := changes.get(old, old))))
        if packed:
            _tar(tmp_path / f"{kind}-tar" / "train.tar", tmp_path / kind / "train")
        prints.append(open_source("", str(tmp_path / f"{kind}{'-tar' if packed else ''}"), "train").fingerprint)
    assert prints[0] != prints[1]


def test_several_labels_have_a_fingerprint(tmp_path):
    """Would catch labels that changed under the same names of files."""
    prints = []
    for kind, labels in (("a", "x;y"), ("b", "x;y"), ("c", "x"), ("d", "y;x")):
        write_images(tmp_path / kind / "train", "1.png", "2.png")
        (tmp_path / kind / "train" / "labels.csv").write_text(f"file,labels\n1.png,{labels}\n2.png,y\n")
        prints.append(open_source("", str(tmp_path / kind), "train").fingerprint)
    assert prints[0] == prints[1] == prints[3]
    assert prints[0] != prints[2]


@pytest.mark.parametrize("nested", [False, True], ids=["folder of tars", "tar of tars"])
def test_a_tar_for_each_class(tmp_path, nested):
    """Would catch labels that do not come from the tar's name, or offsets that ignore the outer tar."""
    for name in ("cat", "dog"):
        write_images(tmp_path / name, f"{name}1.png", f"{name}2.png")
        _tar(tmp_path / "tars" / f"{name}.tar", tmp_path / name, prefix="")  # timm takes ./ for a class named "."
    if nested:
        _tar(tmp_path / "data" / "train.tar", tmp_path / "tars", prefix="")
        root = tmp_path / "data" / "train.tar"
    else:
        (tmp_path / "data").mkdir()
        root = (tmp_path / "tars").rename(tmp_path / "data" / "train")
    source = open_source("", str(tmp_path / "data"), "train")
    reader = ReaderImageInTar(str(root))
    assert source.class_names == ("cat", "dog")
    assert reader.class_name_to_idx == {"cat": 0, "dog": 1}
    assert [source.target(i) for i in range(4)] == [0, 0, 1, 1] == list(reader.targets)
    images = [source.image(i).tobytes() for i in range(4)]
    assert images == [noise(0).tobytes(), noise(1).tobytes()] * 2


def test_numbering_does_not_depend_on_the_file_system_or_the_hash_seed(tmp_path):
    """Would catch hosts that disagree where timm's natural order leaves ties (01 and 1, a and A)."""
    names = [f"{letter}{number}" for letter in "Aabcdefgh" for number in ("01", "1")]
    write_images(tmp_path / "train", *(f"{name}/x.png" for name in reversed(names)), "a1/X.png", "a1/0x.png")
    source = open_source("", str(tmp_path), "train")
    assert source.class_names == tuple(sorted(names, key=lambda name: (name[0].lower(), name)))
    assert [path for i in range(len(source)) if (path := source.path(i)).startswith("a1/")] == [
        "a1/0x.png", "a1/X.png", "a1/x.png",
    ]  # fmt: skip


def test_names_of_classes_with_other_digits(tmp_path):
    """Would catch a traceback of timm's `natural_key` for digits that are no decimals."""
    names = ["10", "5²", "5m²3²", "²", "①", "②"]
    write_images(tmp_path / "train", *(f"{name}/{name}.png" for name in reversed(names)))
    assert open_source("", str(tmp_path), "train").class_names == ("5m²3²", "5²", "10", "²", "①", "②")
    assert [natural_key(name) for name in ("a10b2.png", "B", "", "7")] == [
        timm_key(name) for name in ("a10b2.png", "B", "", "7")
    ]


def test_more_kinds_of_images_than_timm_lists_and_a_count_of_the_rest(tmp_path):
    """Would catch a WebP that vanishes in silence, and files that are passed over uncounted."""
    write_images(tmp_path / "train", "a/1.webp", "a/2.BMP", "b/3.tiff", "b/4.gif", "b/5.ppm", "b/6.jpe")
    for name in ("a/notes.txt", "b/more.TXT", "a/.DS_Store", "README", "outside.png"):
        (tmp_path / "train" / name).write_text("no image")
    source = open_source("", str(tmp_path), "train")
    assert len(source) == 6
    assert source.left_out == {".txt": 2, "": 1, ".png": 1, "hidden": 1}


NO_PART = (
    "cat/.ipynb_checkpoints/1-checkpoint.png", ".thumbnails/1.png", "cat/@eaDir/1.png", "__MACOSX/cat/1.PNG",
    "lost+found/1.png", "$RECYCLE.BIN/1.png", "cat/._1.jpg", "dog/.1.png",
)  # fmt: skip


@pytest.mark.parametrize("form", ["folder", "tar", "folder of tars", "tar of tars"])
def test_hidden_and_system_files_are_no_part_of_a_data_set(tmp_path, form):
    """Would catch a class `.ipynb_checkpoints`, or macOS's `._1.jpg`, which is no image; the root may be hidden."""
    root = tmp_path / ".cache" / "data"
    write_images(tmp_path / "plain" / "train", "cat/1.png", "dog/2.JPG", *NO_PART)
    if form == "folder":
        shutil.move(tmp_path / "plain", root)
    elif form == "tar":
        _tar(root / "train.tar", tmp_path / "plain" / "train")
    else:
        for name in ("cat", "dog", "__MACOSX"):
            _tar(root / "train" / f"{name}.tar", tmp_path / "plain" / "train" / name)
        (root / "train" / "._cat.tar").write_bytes(b"no tar")
        (root / "train" / ".ipynb_checkpoints").mkdir()
        if form == "tar of tars":
            shutil.move(root / "train", tmp_path / "tars")
            _tar(root / "train.tar", tmp_path / "tars")
            (root / "._train.tar").write_bytes(b"no tar")
    source = open_source("", str(root), "train")
    assert (source.class_names, len(source)) == (("cat", "dog"), 2)
    assert source.left_out["hidden"] >= 3
    assert source.left_out.keys() == {"hidden"}


def test_hidden_files_are_left_out_by_each_reader(tmp_path):
    """Would catch one more reader with a rule of its own: captions, predict, doctor, several labels, shards."""
    write_images(tmp_path / "train", "1.png", "._1.png", ".git/2.png", "@eaDir/1.png")
    for name in ("1", "._1", "._3"):
        (tmp_path / "train" / f"{name}.txt").write_text("a cat\n")
    pairs = open_source("", str(tmp_path), "train", labels=CaptionKeys())
    assert [pairs.path(n) for n in range(len(pairs))] == ["1.png"]
    named = f"{tmp_path}/train/._1.png"
    assert find_images([tmp_path, named]) == [f"{tmp_path}/train/1.png", named]
    assert sorted(doctors_files(str(tmp_path))) == [f"{tmp_path}/train/1.png"]
    shard = tmp_path / "shards" / "train-0.tar"
    image = encoded(0)
    files = {"./a.png": image, "a.cls": b"0", "__MACOSX/a.png": image, "%2E_a.png": image, "%2E_a.cls": b"0"}
    write_shard(shard, files)
    assert len(open_source("wds/", str(shard.parent), "train")) == 1
    data = _multi_label(tmp_path / "several", "file,labels\n1.png,a\n.git/2.png,b\n", "1.png", ".git/2.png")
    with pytest.raises(UserError, match=r"1 files that are not below \S+ or hidden, the first is .git/2.png"):
        open_source("", str(data), "several")
    write_images(tmp_path / "empty", "a/._1.png", "b/1.png")
    with pytest.raises(UserError, match=r"class folders without images: a \(files in there: 1 hidden\)"):
        open_source("", str(tmp_path), "empty")


AMBIGUOUS = [
    (("ant/images/1.png", "bee/images/2.png"), "ant/images and bee/images would be one class 'images'"),
    (("x/cat/1.png", "y/cat/2.png", "dog/3.png"), "x/cat and y/cat would be one class 'cat'"),
    (("cat/1.png", "cat/more/2.png", "dog/3.png"), "cat and cat/more in it both hold images"),
    (("cat/1.png", "cat/a/b/2.png", "dog/3.png"), "cat and cat/a/b in it both hold images"),
]


@pytest.mark.parametrize(
    ("form", "names", "message"),
    [
        *((form, *row) for form in ("folder", "tar") for row in AMBIGUOUS),
        *((form, *AMBIGUOUS[0]) for form in ("folder of tars", "tar of tars")),
    ],
)
def test_folders_that_would_merge_or_nest_are_refused(tmp_path, form, names, message):
    """Would catch ant/images and bee/images as one class at 100 %, or a folder in a class folder as one more class."""
    train = tmp_path / "data" / "train"
    write_images(train, *names)
    for folder in [*train.iterdir()] if form.endswith("tars") else []:
        _tar(folder.with_suffix(".tar"), folder)
        shutil.rmtree(folder)
    if form.startswith("tar"):
        _tar(train.with_suffix(".tar"), train)
        shutil.rmtree(train)
    with pytest.raises(UserError, match=message):
        open_source("", str(tmp_path / "data"), "train")
    source = open_source("", str(tmp_path / "data"), "train", labels=False)
    assert (source.class_names, len(source), source.target(0)) == ((), len(names), 0)


def test_tars_of_the_same_class_folders_are_one_data_set(tmp_path):
    """Would catch parts of a data set refused because each of them has a folder ant."""
    for part in ("a", "b"):
        write_images(tmp_path / part, f"ant/{part}.png", f"bee/{part}.png")
        _tar(tmp_path / "data" / "train" / f"{part}.tar", tmp_path / part)
    source = open_source("", str(tmp_path / "data"), "train")
    assert [source.class_names[source.target(n)] for n in range(4)] == ["ant", "bee", "ant", "bee"]


@pytest.mark.parametrize("form", ["folder", "shards"])
def test_a_class_is_one_in_either_spelling(tmp_path, form):
    """Would catch a folder that macOS named, with é as two characters, as another class than the one of é in one."""
    composed, decomposed = "\u00e9t\u00e9", "e\u0301te\u0301"
    names = {"train": ("fox", "zebra", composed), "val": ("fox", "zebra", decomposed)}
    for split, classes in names.items():
        if form == "shards":
            files = {f"{n}{suffix}": data for n, name in enumerate(classes)
                     for suffix, data in ((".png", encoded(n)), (".cls", name.encode()))}  # fmt: skip
            write_shard(tmp_path / f"{split}-0.tar", files)
        else:
            write_images(tmp_path / split, *(f"{name}/1.png" for name in classes))
    train = open_source("wds/" * (form == "shards"), str(tmp_path), "train")
    val = open_source("wds/" * (form == "shards"), str(tmp_path), "val", classes=train.class_names)
    assert train.class_names == val.class_names == names["train"]
    assert sorted(val.target(n) for n in range(3)) == [0, 1, 2]
    if form == "folder":
        assert Path(val.path([val.target(n) for n in range(3)].index(2))).parent.name == decomposed
        write_images(tmp_path / "train", f"{decomposed}/2.png")
        with pytest.raises(UserError, match=f"{decomposed} and {composed} would be one class {composed!r}"):
            open_source("", str(tmp_path), "train")


UNLABELLED = {
    "flat": ("1.png", "test.png"),  # no split
    "nested": ("2023/01/1.png", "2024/01/2.png"),
    "mixed": ("1.png", "a/2.png", "a/b/3.png"),
}


@pytest.mark.parametrize("form", UNLABELLED)
@pytest.mark.parametrize("split", ["train", ""], ids=["split", "whole"])
def test_images_without_classes(tmp_path, form, split):
    """Would catch a tree of images that pretraining without labels refuses, or reads in part."""
    write_images(tmp_path / split, *UNLABELLED[form])
    source = open_source("", str(tmp_path), "train", labels=False)
    assert (source.class_names, len(source)) == ((), len(UNLABELLED[form]))
    assert {source.target(n) for n in range(len(source))} == {0}
    itself = " --val-split test_images" if form != "nested" and not split else ""
    with pytest.raises(UserError, match=rf"has no validation/.*{itself}"):
        open_source("", str(tmp_path), "validation", labels=False)


def test_class_folders_are_classes_without_need_too(tmp_path):
    """Would catch k-NN that has no classes, though the folders name them; and images for evaluation trained on."""
    write_images(tmp_path / "train", "ant/1.png", "bee/1.png")
    (tmp_path / "train" / "cow").mkdir()
    assert open_source("", str(tmp_path), "train", labels=False).class_names == ("ant", "bee")
    write_images(tmp_path / "typo" / "val", "ant/1.png")
    with pytest.raises(UserError, match=r"typo has no train/"):
        open_source("", str(tmp_path / "typo"), "train", labels=False)


# Splits


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (["train", "val"], "validation", "val"),
        (["train", "validation"], "val", "validation"),
        (["training"], "train", "training"),
        (["train", "val", "validation"], "val", "val"),
        (["train", "val", "validation"], "validation", "validation"),
        (["train", "test"], "test", "test"),
    ],
)
def test_split_names_stand_for_each_other(tmp_path, there, asked, found):
    """Would catch val/ not found under timm's default name `validation`, or a synonym that beats the name itself."""
    for name in there:
        write_images(tmp_path / name, f"{name}/1.png")
    assert open_source("", str(tmp_path), asked).class_names == (found,)


# Digits and torchvision


def test_digits_are_scikit_learns_split_once_and_for_all():
    """Would catch another layout of the file, a sample in both splits, an unbalanced split, or a moving hash."""
    expected, seen = load_digits(), []
    train, again, val = (open_source("digits", None, split) for split in ("train", "train", "validation"))
    assert train.fingerprint == again.fingerprint != val.fingerprint
    for split, size in ((train, 1442), (val, 355)):
        assert split.class_names == tuple("0123456789")
        numbers = [int(re.fullmatch(r"digits\[(\d+)\]", split.describe(i)).group(1)) for i in range(size)]
        pixels = np.stack([np.asarray(split.image(i)) for i in range(size)])
        assert (pixels == np.round(expected.images[numbers] * (255.0 / 16.0))[..., None]).all()
        targets = [split.target(i) for i in range(len(split))]
        assert targets == expected.target[numbers].tolist()
        assert np.ptp(np.bincount(targets, minlength=10)) <= 8
        seen += numbers
    assert sorted(seen) == list(range(1797))


def _fashion_mnist(root: Path, train: int, test: int) -> None:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", train), ("t10k", test)):
        pixels = np.arange(count * 28 * 28, dtype=np.uint64).astype(np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes())
        labels = bytes(i % 10 for i in range(count))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels)


def test_torchvision_names(tmp_path):
    """Would catch a grey image, a wrong split, or class names that are lost on the way through timm."""
    _fashion_mnist(tmp_path, train=30, test=10)
    train = open_source("torch/fashion_mnist", str(tmp_path), "train")
    val = open_source("torch/fashion_mnist", str(tmp_path), "validation", classes=train.class_names)
    assert (len(train), len(val), train.num_classes) == (30, 10, 10)
    assert [train.target(i) for i in (0, 9, 13)] == [0, 9, 3]
    assert (train.image(3).mode, train.image(3).size) == ("RGB", (28, 28))
    assert train.class_names[0] == "T-shirt/top"
    assert val.describe(4) == "torch/fashion_mnist[validation][4]"


# Multi-label


def _multi_label(root: Path, text: str, *images: str) -> Path:
    write_images(root, *images)
    (root / "labels.csv").write_bytes(text.encode(errors="surrogateescape"))
    return root.parent


def test_multi_label_targets(tmp_path):
    """Would catch labels on the wrong image or class, a label counted twice, or an unlabelled image lost."""
    text = "file,labels\nb/2.png,dog; cat;dog\n1.png,\nb/10.png,class10;class9\n"
    data = _multi_label(tmp_path / "train", text, "1.png", "b/2.png", "b/10.png", "b/unlisted.png")
    source = open_source("", str(data), "train")
    assert source.multi_label
    assert source.class_names == ("cat", "class9", "class10", "dog")
    assert [Path(source.describe(i)).name for i in range(3)] == ["1.png", "2.png", "10.png"]
    assert [source.target(i).tolist() for i in range(3)] == [[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0]]
    assert source.target(0).dtype == np.float32
    assert source.image(1).tobytes() == noise(1).tobytes()
    assert source.left_out == {".png": 1}


def test_a_multi_label_validation_split_takes_the_training_classes(tmp_path):
    """Would catch another numbering where the validation split lacks a class."""
    _multi_label(tmp_path / "train", "file,labels\n1.png,ant;bee;cow\n", "1.png")
    _multi_label(tmp_path / "val", "file,labels\n1.png,cow\n", "1.png")
    train = open_source("", str(tmp_path), "train")
    val = open_source("", str(tmp_path), "val", classes=train.class_names)
    assert val.target(0).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="1 labels that the training split lacks: cow"):
        open_source("", str(tmp_path), "val", classes=("ant", "bee"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.png,cat\n", "line 1: the header must be 'file,labels', not '1.png,cat'"),
        ("file,labels\n1.png,cat,dog\n", "line 2: 3 columns in place of the 2"),
        ('file,labels\n1.png,"cat\n2.png,dog\n', "line 2: a quote is not closed"),
        ("file,labels\n1.png,caf\udce9\n", "line 2, column 4 of its text: not UTF-8"),
        ("file,labels\n1.png,cat\n./1.png,dog\n", "line 3: 1.png is listed twice"),
        ("file,labels\n1.png,cat\n2.png,cat\n", "lists 1 files that are not below .*, the first is 2.png"),
        ("file,labels\n", "lists no images"),
    ],
)
def test_a_malformed_labels_file_is_refused_by_line(tmp_path, text, message):
    """Would catch a typing error in the labels that is trained on in silence."""
    data = _multi_label(tmp_path / "train", text, "1.png")
    with pytest.raises(ValueError, match=message):
        open_source("", str(data), "train")


# What people are told


def _files(root: Path) -> None:
    """What the cases of `REFUSED` name."""
    for name, files in {
        "empty": ("train/a/",), "heic": ("train/a/x.heic",), "flat": ("train/1.png", "train/2.png"),
        "both": ("train/a/1.png",), "pets": ("ant/1.png",),
    }.items():  # fmt: skip
        for file in files:
            path = root / name / file
            path.mkdir(parents=True) if file.endswith("/") else write_images(root / name, file)
    _tar(root / "packed" / "train.tar", root / "flat" / "train")
    _tar(root / "both" / "train" / "b.tar", root / "both" / "train" / "a")
    for kind, split in ((tarfile.LNKTYPE, "train"), (tarfile.SYMTYPE, "val")):
        for folder, name in (("links", "a/2.png"), ("tars", "b.tar"), ("texts", "a/README")):
            (root / folder).mkdir(exist_ok=True)
            with tarfile.open(root / folder / f"{split}.tar", "w") as tar:
                tar.add(root / "flat" / "train" / "1.png", "a/1.png")
                link = tarfile.TarInfo(name)
                link.type, link.linkname = kind, "a/1.png"
                tar.addfile(link)
    (root / "text").mkdir()
    (root / "text" / "train.tar").write_bytes(b"this is no tar file at all" * 100)


REFUSED = [
    ("digit", "", "train", "unknown data set 'digit'; the nearest is digits; known are"),
    ("torch/cifar", "", "train", "the nearest is torch/cifar10"),
    ("zzz", "", "train", "unknown data set 'zzz'; known are digits"),
    ("digits", "", "test", "digits has no split 'test'; it has train and validation"),
    ("torch/mnist", "", "trian", "torch/mnist has no split 'trian'"),
    ("torch/cifar10", "", "train", "torch/cifar10: torchvision finds no such data set .*--dataset-download"),
    ("torch/cifar10", None, "train", "--dataset torch/cifar10 needs --data-dir"),
    ("", None, "train", "pass --data-dir FOLDER"),
    ("", "absent", "train", "absent does not exist"),
    ("", "text/train.tar", "train", r"train.tar is a file; pass the folder"),
    ("", "text", "train", r"train.tar cannot be read as an uncompressed tar"),
    ("", "empty", "train", r"holds no images \(files found: none"),
    ("", "heic", "train", r"files found: 1 .heic; supported are .bmp .gif"),
    ("", "flat/train", "train", r"flat.train has no train/ .*; give the folder above it, \S+/flat$"),
    ("", "pets", "train", r"no splits: --data-dir \S+ --train-split pets --val-fraction 0.1 "),
    ("", "flat", "val", r"no val.tar .*validation.* it holds train; .* each class: val/<class>/<image>$"),
    ("", "flat", "train", "holds 2 images but no class folders.*; ds-vit predict, --task dino and --task mae need no"),
    ("", "pets/ant", "val", r"no val.tar .*; its images are in no folders; ds-vit predict, --task dino"),
    ("", "packed", "train", "holds 2 images but no class folders"),
    ("", "both", "train", "holds class folders and 1 tar files"),
    *(
        ("", folder, split, rf"{split}\.tar holds {name} as a link, which has no bytes")
        for folder, name in (("links", r"a/2\.png"), ("tars", r"b\.tar"))
        for split in ("train", "val")
    ),
]


@pytest.mark.parametrize(("dataset", "data_dir", "split", "message"), REFUSED)
def test_data_that_cannot_be_opened_are_refused_in_one_line(tmp_path, dataset, data_dir, split, message):
    """Would catch a traceback, an empty class, another split in place of a missing one, or a silent choice."""
    _files(tmp_path)
    folder = None if data_dir is None else str(tmp_path / data_dir)
    with pytest.raises(UserError, match=message) as error:
        open_source(dataset, folder, split)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_tar_may_hold_links_that_are_no_images(tmp_path, split):
    """Would catch a folder of images that is refused for the link of its README."""
    _files(tmp_path)
    assert len(open_source("", str(tmp_path / "texts"), split)) == 1


def test_a_pipe_that_is_named_like_an_image(tmp_path):
    """Would catch a loader that waits for ever, deaf to SIGTERM, for somebody to write into the pipe."""
    write_images(tmp_path / "train", "ant/1.png")
    os.mkfifo(tmp_path / "train" / "ant" / "notes")
    assert len(open_source("", str(tmp_path), "train")) == 1
    os.mkfifo(tmp_path / "train" / "ant" / "2.jpg")
    with pytest.raises(UserError, match=r"ant/2.jpg is a pipe, a socket or a device, not a file; remove or rename it"):
        open_source("", str(tmp_path), "train")


def test_a_folder_that_cannot_be_listed(tmp_path):
    """Would catch a class that is left out in silence, for want of a permission or by an error of the storage."""
    write_images(tmp_path / "train", "ant/1.png", "bee/1.png")
    scan = os.scandir

    def refuses(folder):
        if folder.endswith("bee"):
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    with mock.patch.object(os, "scandir", refuses), pytest.raises(UserError, match=r"train/bee cannot be listed: Perm"):
        open_source("", str(tmp_path), "train")


@pytest.mark.parametrize("folder", ["", "train"])
def test_a_split_that_cannot_be_listed(tmp_path, folder):
    """Would catch a traceback where the folder of the data or of a split may not be read."""
    write_images(tmp_path / "train", "ant/1.png")
    refused, names = tmp_path / folder, os.listdir

    def refuses(path):
        if str(path) == str(refused):
            raise PermissionError(13, "Permission denied", str(path))
        return names(path)

    with (
        mock.patch.object(os, "listdir", refuses),
        pytest.raises(UserError, match=rf"^{refused} cannot be listed: Permission denied; make"),
    ):
        open_source("", str(tmp_path), "train" if folder else "other")


def test_links_to_folders(tmp_path):
    """Would catch the images of a folder listed 40 times for a link that leads back to it, or a link not followed."""
    write_images(tmp_path / "train", "ant/1.png", "deep/dee/2.png")
    write_images(tmp_path / "elsewhere", "3.png")
    (tmp_path / "train" / "ant" / "back").symlink_to(tmp_path / "train")
    (tmp_path / "train" / "deep" / "dee" / "here").symlink_to(".")
    (tmp_path / "train" / "bee").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / "cow").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "train" / "bee")
    for name in ("train/ant/itself.png", "train/itself"):
        (tmp_path / name).symlink_to(Path(name).name)
    names = ["ant/1.png", "ant/itself.png", "bee/3.png", "cow/3.png", "deep/dee/2.png"]
    source = open_source("", str(tmp_path), "train")
    assert [source.path(i) for i in range(len(source))] == names


def test_class_sets_must_match(tmp_path):
    """Would catch class 3 of training being another animal than class 3 of validation."""
    write_images(tmp_path / "train", "ant/1.png", "bee/1.png", "cow/1.png")
    write_images(tmp_path / "val", "ant/1.png", "cow/1.png", "dog/1.png", "eel/1.png")
    train = open_source("", str(tmp_path), "train")
    message = (
        r"training split has 3 classes and the validation split 4, and they differ: 1 missing in the validation split "
        r"\(bee\), 2 missing in the training split \(dog, eel\)"
    )
    with pytest.raises(ValueError, match=message):
        open_source("", str(tmp_path), "val", classes=train.class_names)
    assert open_source("", str(tmp_path), "train", classes=train.class_names).class_names == train.class_names


def test_a_part_of_a_split():
    """A part that lacks classes of a folder sorted by class, that differs between runs, or whose labels are others'."""
    whole, tenth, hundredth = (open_source("digits", None, f"train{part}") for part in ("", "[:10%]", "[:1%]"))
    counts = np.bincount([whole.target(n) for n in range(len(whole))])
    found = np.bincount([tenth.target(n) for n in range(len(tenth))])
    assert found.tolist() == np.round(counts * 0.1).tolist()
    assert np.bincount([hundredth.target(n) for n in range(len(hundredth))]).tolist() == [1] * 10
    names = {whole.describe(n): n for n in range(len(whole))}
    for n in range(len(tenth)):
        same = names[tenth.describe(n)]
        assert (tenth.target(n), tenth.image(n).tobytes()) == (whole.target(same), whole.image(same).tobytes())
    own = {tenth.describe(n) for n in range(len(tenth))}
    assert {hundredth.describe(n) for n in range(len(hundredth))} <= own
    assert len({part.fingerprint for part in (whole, tenth, hundredth)}) == 3
    assert max(names[name] for name in own) > 0.9 * len(whole), "the first tenth of the file"
    assert open_source("digits", None, "train[:100%]").fingerprint == whole.fingerprint
    for wrong in ("train[10%]", "train[:0%]", "train[:101%]", "train[:10]"):
        with pytest.raises(UserError, match=r"a part of a split is written train\[:10%\]"):
            open_source("digits", None, wrong)
