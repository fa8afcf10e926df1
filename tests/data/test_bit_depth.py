"""Images without 8 bits per channel: 16-bit grey is scaled, an unknown range is an error, all others are timm's."""

from __future__ import annotations

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from micro_batches import fields_of, load, loader_of
from picture_folders import CPU, TINY, made
from PIL import Image, ImageFile
from runs import resolved
from shards import write_shard
from timm.data import ImageDataset

from ds_vit.cli import main
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.decode import ImageDecodeError, decode, in_8_bits
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import as_source, open_source
from ds_vit.data.sources.source import Source, headers_of_some
from ds_vit.fault_tolerance.errors import UserError

DEEP = np.random.default_rng(0).integers(0, 65536, (9, 7), dtype=np.uint16)
DEEP[0, :4] = 0, 128, 129, 65535
EIGHT = np.round(DEEP * (255 / 65535)).astype(np.uint8)
SIZE = (9, 7)


def _saved(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


# What Pillow opens as I;16, as I;16B and (whatever its version) as I.
FILES = {
    "png": _saved(DEEP, "png"),
    "tif": _saved(DEEP, "tiff"),
    "tiff": _saved(Image.frombytes("I;16B", SIZE[::-1], DEEP.astype(">u2").tobytes()), "tiff"),
    "pgm": b"P5 7 9 65535\n" + DEEP.astype(">u2").tobytes(),
}


def _rgb(grey: np.ndarray) -> np.ndarray:
    return np.stack([grey] * 3, axis=-1)


def _in_folders(root: Path, files: dict[str, bytes]) -> Path:
    for number, (kind, data) in enumerate(files.items()):
        made(root / "train" / "ab"[number % 2] / f"{number}.{kind}").write_bytes(data)
    return root


@pytest.fixture
def folder(tmp_path) -> Path:
    return _in_folders(tmp_path / "folder", FILES)


def _sources(folder: Path) -> dict[str, Source]:
    """The files of a folder of class folders, those of a tar, and a program's images."""
    plain = open_source("", str(folder), "train")
    members = {plain.path(n): plain.encoded(n) for n in range(len(plain))}
    write_shard(folder.parent / "tar" / "train.tar", members)
    return {
        "folder": plain,
        "tar": open_source("", str(folder.parent / "tar"), "train"),
        "program": as_source([(Image.open(plain.describe(n)), 0) for n in range(len(plain))]),
    }


def test_16_bit_grey_is_scaled_in_every_source_and_by_every_way_to_decode(folder):
    """Would catch white images (pytorch/vision #2218), the upper byte in place of the rounded value, and a sibling."""
    image = ImageConfig(SIZE, crop_pct=1.0)
    for name, source in _sources(folder).items():
        for number in range(len(source)):
            assert np.array_equal(source.image(number), _rgb(EIGHT)), (name, source.describe(number))
        for how in ("exact", "fast") if source.encoded(0) else ("exact",):
            share = Share(0, 1, len(source))
            augment = AugmentConfig(no_aug=True, decode=how)
            training = load(source, share, stop=1, image=image, augment=augment)
            for batch in (*training, *loader_of(source, fields_of(source, image), EvalRows(len(source), share))):
                pixels = batch.packed["images"].pixels
                assert torch.equal(pixels, torch.from_numpy(_rgb(EIGHT)).permute(2, 0, 1).expand_as(pixels))


def _tiff(pixels: np.ndarray, bits: int, first: int) -> bytes:
    """A grey TIFF file of one strip: of 16 bits, or 12 packed ones; `first` is 0 where 0 is white, else 1."""
    height, width = pixels.shape
    data = pixels.astype("<u2").tobytes()
    if bits == 12:
        high, low = pixels.reshape(-1, 2).T
        data = np.stack([high >> 4, (high & 15) << 4 | low >> 8, low & 255], axis=1).astype(np.uint8).tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: first, 273: 110, 277: 1, 278: height}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def test_tiff_files_of_12_bits_and_with_white_at_0():
    """Would catch 12 bits that are scaled as 16, so nearly black, and 16 bits shown as a negative."""
    twelve = DEEP[:, :6] >> 4
    assert np.array_equal(decode(_tiff(twelve, 12, 1), "12"), _rgb(np.round(twelve / 4095 * 255).astype(np.uint8)))
    assert np.array_equal(decode(_tiff(DEEP, 16, 1), "16"), _rgb(EIGHT))
    assert np.array_equal(decode(_tiff(DEEP, 16, 0), "16"), _rgb(255 - EIGHT))


def test_arrays_of_a_program_give_what_files_give():
    """Would catch a layout that is refused or read as another one, and 16 bits that are cut to 8."""
    colours = np.random.default_rng(1).integers(0, 65536, (9, 8, 3), dtype=np.uint16)
    arrays = {
        "grey 16": (DEEP, _rgb(EIGHT)),
        "grey 16, big-endian": (Image.fromarray(DEEP), _rgb(EIGHT)),
        "grey 8": (EIGHT, _rgb(EIGHT)),
        "[H, W, 1]": (EIGHT[..., None], _rgb(EIGHT)),
        "[H, W, 1] 16": (DEEP[..., None], _rgb(EIGHT)),
        "[1, H, W]": (EIGHT[None], _rgb(EIGHT)),
        "[H, W, 3] 16": (colours, in_8_bits(colours)),
        "[3, H, W] 16": (colours.transpose(2, 0, 1), in_8_bits(colours)),
        "[3, H, W]": (in_8_bits(colours).transpose(2, 0, 1), in_8_bits(colours)),
    }
    for name, (array, expected) in arrays.items():
        assert np.array_equal(as_source([(array, 0)]).image(0), expected), name
    for what in ("float16", "float32", "float64", "int64"):
        with pytest.raises(UserError, match=f"the image is a {what} array .*, or convert it$"):
            as_source([((DEEP / 65535).astype(what), 0)])
    with pytest.raises(ImageDecodeError, match=r"^list\[0\]: .*its float32 pixels"):
        as_source([(Image.fromarray(DEEP.astype(np.float32)), 0)])


# The file, and what is wrong with it.
OTHERS = {
    "f.tif": (np.float32([[0.0, 1.0]]), "its float32 pixels, from 0.0 to 1.0, are no whole numbers of 8 or 16 bits"),
    "i.tif": (np.int32([[5, 65536]]), "its int32 pixels, from 5 to 65536, are no whole numbers of 8 or 16 bits"),
    "n.tif": (np.int32([[-1, 9]]), "its int32 pixels, from -1 to 9, are no whole numbers of 8 or 16 bits"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_unknown_range_is_an_error_that_names_the_file(tmp_path, name, capsys):
    """Would catch a black or a white image in silence, in training, in evaluation and in the doctor's list."""
    pixels, message = OTHERS[name]
    path = made(tmp_path / "train" / "a" / name)
    path.write_bytes(_saved(pixels, "tiff"))
    source, rows = open_source("", str(tmp_path), "train"), EvalRows(1, Share(0, 1, 1))
    fields = fields_of(source, ImageConfig((8, 8)))
    with pytest.raises(ImageDecodeError, match=re.escape(f"{path}: the image cannot be decoded (")) as caught:
        list(loader_of(source, fields, rows))
    assert f"{message}; convert them to one of these); repair or replace the file, or pass" in str(caught.value)
    (batch,) = loader_of(source, fields, rows, on_bad_image="skip")
    assert [(number, message in reason) for number, reason in batch.skipped] == [(0, True)]
    assert main(["doctor", "--images", str(tmp_path)]) == 65
    assert message in capsys.readouterr().out
    assert in_8_bits(np.int32([[0, 65535]])).tolist() == [[0, 255]]


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_of_16_bits(pixels: np.ndarray) -> bytes:
    """RGB, which Pillow does not write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def test_all_other_modes_are_timms(tmp_path):
    """Would catch a mode that goes another way than timm's `convert`: transparency, palettes, CMYK, two levels."""
    rgba = np.random.default_rng(2).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    palette, deep = image.convert("RGB").quantize(8), np.arange(65536).reshape(256, 256)
    files = {
        **{f"{mode}.png": _saved(image.convert("RGB").convert(mode), "png") for mode in ("1", "L", "RGB")},
        **{f"{mode}.png": _saved(image.convert(mode), "png") for mode in ("LA", "RGBA")},
        "P.png": _saved(palette, "png"),
        "P with transparency.png": _saved(palette, "png", transparency=3),
        "P with alphas.png": _saved(palette, "png", transparency=bytes([0, 9, 255])),
        **{f"{mode}.jpg": _saved(image.convert("RGB").convert(mode), "jpeg") for mode in ("L", "RGB", "CMYK", "YCbCr")},
        "RGB of 16 bits.png": _png_of_16_bits(np.stack([deep] * 3, axis=-1)),
        "PA.png": _saved(image.convert("PA"), "tiff"),
        "LAB.png": _saved(Image.merge("LAB", image.split()[:3]), "tiff"),
        "GIF.png": _saved(image, "gif"),
    }
    for name, data in files.items():
        made(tmp_path / "train" / "a" / name).write_bytes(data)
    ours, theirs = open_source("", str(tmp_path), "train"), ImageDataset(str(tmp_path / "train"))
    for number in range(len(files)):
        name = theirs.filename(number, basename=True)
        assert ours.describe(number).endswith(name)
        assert np.array_equal(ours.image(number), theirs[number][0]), name
    # Pillow keeps the upper byte of 16-bit colours, at most one grey level from the rounded value.
    found = np.asarray(decode(files["RGB of 16 bits.png"], ""))[..., 0].astype(int)
    assert np.abs(found - in_8_bits(deep)).max() == 1


def _notes(folder: Path) -> list[str]:
    words = [*TINY, "--deepspeed_config", CPU, "--data-dir", folder, "--val-split", ""]
    return [note for note in resolved(words).notes if "drawn by key" in note]


def test_the_start_says_what_it_found_in_200_headers(tmp_path, monkeypatch):
    """Would catch silence, a line about ordinary images, a count of all files, and a look that decodes them."""
    made(tmp_path / "train" / "a" / "000.png")
    for number in range(300):
        kind, pixels = ("tiff", DEEP.astype(np.float32)) if number == 7 else ("png", EIGHT if number % 3 else DEEP)
        (tmp_path / "train" / "a" / f"{number:03}.{kind}").write_bytes(_saved(pixels, kind))
    source = open_source("", str(tmp_path), "train")
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("an image was decoded"))
        found = [mode for mode, _ in headers_of_some(source)]
    assert len(found) == 200
    assert headers_of_some(source) == headers_of_some(open_source("", str(tmp_path), "train[:100%]"))
    said = f"{found.count('I;16')} of 200 files of train drawn by key are of mode I;16 (16 bits, scaled to 8)"
    assert 50 < found.count("I;16") < 90
    assert said in _notes(tmp_path)
    for path in (tmp_path / "train" / "a").iterdir():
        path.write_bytes(_saved(EIGHT, "png"))
    (tmp_path / "train" / "a" / "000.png").write_bytes(b"no image")
    assert _notes(tmp_path) == []
    assert headers_of_some(open_source("digits", None, "train"))[0] == ("", 0)


def test_the_doctor_lists_16_bit_images(folder, capsys):
    """Would catch 16-bit grey that is called sound without a word, in a folder and in a tar."""
    _sources(folder)
    for path, count in ((folder, 4), (folder.parent / "tar", 4)):
        assert main(["doctor", "--images", str(path)]) == 0
        said = capsys.readouterr().out
        assert f"{count} have 16 bits per pixel; training scales them to 8" in said
        assert re.search(r"/2\.tiff: mode I;16B$|2\.tiff: mode I;16B$", said, re.MULTILINE)
