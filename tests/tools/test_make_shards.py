"""`ds-vit shards`: packing round-trips, starts again after a kill, and rejects bad input."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from picture_folders import made
from PIL import Image

from ds_vit import cli
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tools import shards


@pytest.fixture
def folder(tmp_path) -> Path:
    """12 training images in three classes and three of validation; two names that differ only by their suffix, and
    a folder that WebDataset would leave out."""
    for number in range(15):
        split = "train" if number < 12 else "val"
        name = f"i.{number}.png" if number else "i.9.jpg"
        path = tmp_path / "photos" / split / ("__set ü__" if number % 3 == 1 else "") / f"class{9 + number % 3}" / name
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(made(path))
    return tmp_path / "photos"


def _told(capsys, *words: object) -> str:
    assert cli.main(["shards", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_what_is_packed_is_what_was_there(folder, tmp_path, capsys):
    """Would catch a lost image, another order or label, and two files of one name that become one sample."""
    out = tmp_path / "out"
    killed = made(tmp_path / ".out.partial" / "train-000007.tar")
    killed.write_bytes(b"half")
    told = _told(capsys, folder, out, "--per-shard", 5, "--workers", 2)
    assert [line.partition(" of together")[0] for line in told.splitlines()[:2]] == [
        "train: 12 images in 3 shards",
        "val: 3 images in 1 shards",
    ]
    assert f"--dataset wds/{out}" in told
    for split in ("train", "val"):
        packed, plain = open_source("wds/", str(out), split), open_source("", str(folder), split)
        assert packed.fingerprint == plain.fingerprint, "a run of the folder resumes on the shards"
        assert packed.class_names == plain.class_names
        assert [packed.encoded(n) for n in range(len(packed))] == [plain.encoded(n) for n in range(len(plain))]
    train = [open_source("wds/", str(out), "train").describe(n).partition(".tar:")[2] for n in range(12)]
    (out / "train-000002.tar").unlink()
    with pytest.raises(UserError, match=r"train.shards.json: 1 of 3 shards are missing, .* \S+/train-000002\.tar"):
        open_source("wds/", str(out), "train")
    assert train[4:8] == ["class9/i.3.png", "class9/i.6.png", "class9/i.9.jpg", "class9/i.9.png"]
    assert not killed.parent.exists(), "a killed run's shards are gone"


def test_captions_are_packed_with_their_images(folder, tmp_path, capsys):
    """Would catch captions of another image, several that become one, and a damaged one that is repaired or lost."""
    for number, image in enumerate(sorted(folder.rglob("i.*"))):
        texts = [f"ä picture, no. {number}".encode(), *([b"again"] if number % 3 else [])]
        image.with_suffix(".txt").write_bytes(b"\n".join(texts) + b"\n" if number != 5 else b"\xff\xfe")
    out = tmp_path / "out"
    told = _told(capsys, folder, out, "--captions", "--per-shard", 5)
    assert told.startswith("train: 12 images in 3 shards")
    for split in ("train", "val"):
        packed = open_source("wds/", str(out), split, labels=CaptionKeys())
        plain = open_source("", str(folder), split, labels=CaptionKeys())
        assert packed.fingerprint == plain.fingerprint, "a run of the folder resumes on the shards"
        assert [packed.captions(n) for n in range(len(packed))] == [plain.captions(n) for n in range(len(plain))]
        assert [packed.encoded(n) for n in range(len(packed))] == [plain.encoded(n) for n in range(len(plain))]
    assert {len(packed.captions(n)) for n in range(3)} == {1, 2}
    assert not (out / "classes.json").exists()
    assert len(list(out.glob("*.captions.npz"))) == 4, "the index that training reads"
    next((folder / "train").rglob("*.txt")).unlink()
    assert cli.main(["shards", str(folder), str(tmp_path / "more"), "--captions"]) == 0
    packed, plain = (
        open_source(dataset, str(where), "train", labels=CaptionKeys())
        for dataset, where in (("wds/", tmp_path / "more"), ("", folder))
    )
    assert packed.fingerprint == plain.fingerprint, "an image without a text file stays a damaged pair"
    for file in folder.rglob("*.txt"):
        file.unlink()
    assert cli.main(["shards", str(folder), str(tmp_path / "none"), "--captions"]) == 2
    assert "12 without a caption" in capsys.readouterr().err


def test_names_with_line_ends(tmp_path, capsys):
    """Images that are left out of the shards' index, which finds the suffix behind the last line only."""
    for number, label in enumerate(("a", "b\nc")):
        Image.new("RGB", (8, 8)).save(made(tmp_path / "photos" / label / f"{number}\n.png"))
    _told(capsys, tmp_path / "photos", tmp_path / "out")
    packed = open_source("wds/", str(tmp_path / "out"), "photos")
    assert packed.fingerprint == open_source("", str(tmp_path), "photos").fingerprint


def test_class_folders_alone(folder, tmp_path, capsys):
    """Would catch class folders taken for splits, and shards next to a link in place of where it leads."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    _told(capsys, folder / "val", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["val-000000.tar"]
    assert (tmp_path / "out").is_symlink()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_run_that_is_ended_leaves_no_shards_and_no_processes(folder, tmp_path, capsys, number, code):
    """Would catch half a data set under its name, workers that outlive the command or that Ctrl-C ends before it, and
    a second command that removes the first one's shards."""
    for path in sorted((folder / "train").rglob("*.png")):
        for copy in range(40):
            path.with_stem(f"{path.stem}-{copy}").write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "ds_vit.cli", "shards", str(folder), str(tmp_path / "out"), "--per-shard", "20"]
    with subprocess.Popen(
        [*command, "--quality", "95", "--workers", "2"], start_new_session=True, stderr=-1
    ) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out.partial/*.tar")) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        second = cli.main(["shards", str(folder), str(tmp_path / "out")]), capsys.readouterr().err
        kept = list(tmp_path.glob(".out.partial/*.tar"))
        process.send_signal(signal.SIGCONT)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        said = process.stderr.read()
    assert kept
    assert second[0] == 2
    assert "another process packs into" in second[1]
    assert process.returncode == code, said
    assert b"Broken" not in said
    assert b"killed" not in said
    assert bool(list(tmp_path.glob(".out.partial"))) == (number == signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):  # until nobody of its session is left
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        pytest.fail("processes outlive the one that started them")


def test_resized_and_encoded_anew(folder, tmp_path, capsys):
    """Would catch the longer side resized, an enlarged image, a small one encoded for nothing."""
    _told(capsys, folder, tmp_path / "out", "--resize", 25)
    plain, packed = open_source("", str(folder), "train"), open_source("wds/", str(tmp_path / "out"), "train")
    for number in range(12):
        before, after = plain.image(number), packed.image(number)
        if before.height > 25:
            assert after.size == (round(40 * 25 / before.height), 25)
            assert packed.describe(number).endswith((".jpg", "i.9.png")), "which shares its stem with another file"
        else:
            assert packed.encoded(number) == plain.encoded(number)
    _told(capsys, folder, tmp_path / "small", "--quality", 10)
    small = open_source("wds/", str(tmp_path / "small"), "train")
    assert all(small.image(n).size == plain.image(n).size for n in range(12))
    buffer = io.BytesIO()
    plain.image(3).save(buffer, "JPEG", quality=10)
    assert small.encoded(3) == buffer.getvalue()


def test_a_damaged_file_is_told_and_kept(folder, tmp_path, capsys):
    """Would catch one bad file of a million that keeps all others from being packed, or that is left out in silence."""
    bad = folder / "train" / "__set ü__" / "class10" / "i.1.png"
    bad.write_bytes(b"no image")
    told = _told(capsys, folder, tmp_path / "out", "--resize", 25)
    assert f"train: 1 files are no images and went in as they are; the first is {bad}" in told
    source = open_source("wds/", str(tmp_path / "out"), "train")
    assert b"no image" in [source.encoded(number) for number in range(12)]


REFUSED = {
    "no folder": (["nowhere", "out"], "nowhere is no folder; give one with"),
    "no classes": (["photos/train/class9", "out"], "holds 4 images but no class folders"),
    "no images to a shard": (["photos", "out", "--per-shard", "0"], "--per-shard: must be at least 1, not 0"),
    "quality": (["photos", "out", "--quality", "101"], "--quality lies between 1 and 100, not 101"),
    "size": (["photos", "out", "--resize", "0"], "--resize: must be at least 1, not 0"),
    "workers": (["photos", "out", "--workers", "0"], "--workers: must be at least 1, not 0"),
    "split without classes": (["photos", "out"], "holds 1 images but no class .*; .* move photos/val elsewhere$"),
    "a broken link": (["photos", "out"], r"train/\S+: a broken link to nowhere; remove it; nothing was written$"),
    "not empty": (["photos", "photos/val"], "photos/val exists and is not an empty folder; give another one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_rejected(folder, tmp_path, capsys, monkeypatch, what):
    """Would catch shards of two kinds in one folder, or a traceback."""
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[what]
    if what == "split without classes":
        shutil.rmtree(folder / "val")
        made(folder / "val" / "0.png").write_bytes(next((folder / "train").rglob("*.png")).read_bytes())
    if what == "a broken link":
        next((folder / "train").rglob("*.png")).with_name("broken.png").symlink_to("nowhere")
    else:
        monkeypatch.setattr(shards, "_pack_split", lambda *_: pytest.fail("a split is packed first"))
    assert cli.main(["shards", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error
    assert not list(tmp_path.glob(".*.partial"))
