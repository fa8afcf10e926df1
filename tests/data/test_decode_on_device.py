"""--decode fast with --augment-on device: JPEG files are decoded where the model trains, by torchcodec."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from micro_batches import Loaded, load
from picture_folders import made, smooth_photo
from PIL import Image

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data import decode as decoding
from ds_vit.data.decode import File, ImageDecodeError, _require_decoder, decode, decode_on
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError

pytest.importorskip("simplejpeg")
decoders = pytest.importorskip("torchcodec.decoders")

CPU = torch.device("cpu")
IMAGE = ImageConfig(img_size=(24, 32))
MIX = MixConfig(mixup=0.8)
TURNED = Image.Exif()
TURNED[0x0112] = 6
STRAIGHT = Image.Exif()
STRAIGHT[0x0112] = 1
# How a file is saved, and whether it goes over as it is.
KINDS = {
    "4:2:0": ({"subsampling": "4:2:0"}, True),
    "4:4:4": ({"subsampling": "4:4:4"}, True),
    "grey": ({"mode": "L"}, True),
    "straight": ({"exif": STRAIGHT}, True),
    "turned": ({"exif": TURNED}, False),
    "progressive": ({"progressive": True}, False),
    "cmyk": ({"mode": "CMYK"}, False),
    "png": ({"format": "png"}, False),
}


def _bytes(seed: int, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    smooth_photo(60 + seed, 70, seed).convert(mode).save(file, **{"format": "jpeg"} | options)
    return file.getvalue()


def _files(datas: list[bytes]) -> list[File]:
    return [File(torch.frombuffer(bytearray(d), dtype=torch.uint8), f"{n}", (60 + n, 70)) for n, d in enumerate(datas)]


def _same_as_pillow(found: Iterable[list[torch.Tensor]], datas: list[bytes]) -> None:
    for pixels, data in zip(itertools.chain.from_iterable(found), datas, strict=True):
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(decode(data, "")))


def _folder(root: Path, files: dict[str, bytes]) -> Path:
    for number, (name, data) in enumerate(files.items()):
        made(root / "train" / "ab"[number % 2] / name).write_bytes(data)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    files = {f"{kind.replace(':', '')}.jpg": _bytes(n, **how) for n, (kind, (how, _)) in enumerate(KINDS.items())}
    return _folder(tmp_path_factory.mktemp("kinds"), files)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    """Six files; of one the quantisation tables are lost, which shows when it is decoded, and another is cut short."""
    files = {f"{n}.jpg": _bytes(n) for n in range(6)}
    files["0.jpg"] = files["0.jpg"].replace(b"\xff\xdb", b"\xff\xe5")
    files["1.jpg"] = files["1.jpg"][:-900]
    return _folder(tmp_path_factory.mktemp("damaged"), files)


def _augment(decode: str = "fast") -> AugmentConfig:
    return AugmentConfig(augment_on="device", decode=decode, aa="rand-m9-mstd0.5-inc1", reprob=0.5)


def _batches(folder: Path, decode: str = "fast", **options) -> Loaded:
    source = open_source("", str(folder), "train")
    share = Share(0, 1, 2, len(source) // 2)
    return load(source, share, stop=2, image=IMAGE, augment=_augment(decode), mix=MIX, **options)


def _images(batches: Loaded, device: str = "cpu") -> torch.Tensor:
    return batches.tensors(device)["images"]


@pytest.mark.parametrize("options", [{}, {"on_bad_image": "skip"}, {"num_workers": 1}], ids=str)
def test_files_go_over_and_give_what_the_workers_would_decode(folder, options):
    """Would catch another crop, row or draw, a file turned by EXIF, and files that are decoded here after all."""
    there = _batches(folder, **options)
    names = {Path(crop.file[0]).stem for batch in there for crop in batch.packed["images"].pixels.crops if crop.file}
    assert names == {kind.replace(":", "") for kind, (_, over) in KINDS.items() if over}
    assert torch.equal(_images(there), _images(_batches(folder, "exact")))


def test_a_damaged_file_ends_the_run_by_its_name(damaged):
    """Would catch a decoder's own error, which names no file, and one bad file that spoils its whole batch."""
    with pytest.raises(ImageDecodeError, match=r"^\S+/1\.jpg: the image cannot be decoded \(\d+ bytes; .*[Tt]runcated"):
        _batches(damaged)
    with pytest.raises(ImageDecodeError, match=r"^\S+/0\.jpg: the image cannot be decoded \(\d+ bytes; "):
        _images(_batches(damaged, on_bad_image="replace"))  # nothing is decoded ahead of the device


def test_odd_files_in_one_batch_end_as_on_the_cpu(tmp_path):
    """Would catch a size, depth or mode that the device takes for another, and a row that a bad file shifts."""

    def saved(image: Image.Image, kind: str = "png") -> bytes:
        file = io.BytesIO()
        image.save(file, kind)
        return file.getvalue()

    photo, grey16 = smooth_photo(60, 70), (np.arange(60 * 70).reshape(60, 70) * 15).astype(np.uint16)
    files = {
        "damaged.jpg": _bytes(0).replace(b"\xff\xdb", b"\xff\xe5"),
        "truncated.jpg": _bytes(1)[:-900],
        "pixel.jpg": saved(smooth_photo(1, 1), "jpeg"),
        "wide.jpg": saved(smooth_photo(8, 20_000), "jpeg"),
        "grey.jpg": _bytes(2, "L"),
        "16bit.png": saved(Image.fromarray(grey16)),
        "palette.png": saved(photo.convert("P")),
        "rgba.png": saved(photo.convert("RGBA")),
    }
    source, share = open_source("", str(_folder(tmp_path, files)), "train"), Share(0, 1, 8)
    found = []
    for on, how in (("cpu", "exact"), ("device", "exact"), ("device", "fast")):
        augment = AugmentConfig(augment_on=on, decode=how, color_jitter=0.0)
        batches = load(source, share, stop=3, image=IMAGE, augment=augment, mix=MIX, on_bad_image="skip")
        made = batches.tensors()
        found.append((made["images"], made["targets"], [batch.skipped for batch in batches]))
    (there, *labels), *others = found
    assert sum(map(len, labels[1])) == 6
    for images, *same in others:
        assert torch.equal(same[0], labels[0])
        assert [[row for row, _ in skipped] for skipped in same[1]] == [[row for row, _ in s] for s in labels[1]]
        apart = (images - there).abs() * 255 * torch.tensor(IMAGE.std)[:, None, None]
        assert apart.mean() < 0.5
        assert apart.max() < 8.5  # the bound of crops, docs/data.md
    assert torch.equal(others[0][0], others[1][0])


def test_what_the_device_cannot_decode_pillow_does(monkeypatch):
    """Would catch a batch that is lost to one file of an odd kind, and pixels of another shape that are taken."""
    datas = [*(_bytes(n) for n in range(3)), _bytes(3, exif=TURNED)]
    right = decoders.decode_jpeg

    def picky(files: list | bytes, **options: object) -> object:
        if isinstance(files, list) and any(bytes(file.numpy()) == datas[1] for file in files):
            raise RuntimeError("nvjpegDecode failed: 4")
        return right(files, **options)

    monkeypatch.setattr(decoders, "decode_jpeg", picky)
    _require_decoder.cache_clear()
    tally = Counter()
    _same_as_pillow(decode_on(CPU, _files(datas), tally), datas)
    assert tally == {"device": 4, "refused": 2, "large": 0}


def test_large_images_are_decoded_a_few_at_a_time(monkeypatch):
    """Would catch all images of a micro-batch in memory at once, and one that is lost between two calls."""
    datas = [_bytes(n) for n in range(5)]
    right, calls = decoders.decode_jpeg, []
    monkeypatch.setattr(decoders, "decode_jpeg", lambda files, **how: calls.append(len(files)) or right(files, **how))
    monkeypatch.setattr(decoding, "_AT_ONCE", 2 * 3 * 64 * 70)
    _same_as_pillow(decode_on(CPU, _files(datas)), datas)
    assert sum(calls) == 5
    assert max(calls) <= 3
    calls.clear()
    tally = Counter()
    monkeypatch.setattr(decoding, "_AT_ONCE", 3 * 62 * 70)  # the last two are larger
    _same_as_pillow(decode_on(CPU, _files(datas), tally), datas)
    assert calls[-2:] == [1, 1]
    assert tally == {"device": 5, "large": 2}


@pytest.mark.parametrize(
    ("refusal", "kind", "message"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", RuntimeError, "out of memory"),
        ("no nvJPEG here", UserError, r"cannot decode JPEG files on cpu \(no nvJPEG here\); drop --decode fast"),
    ],
)
def test_a_device_that_decodes_nothing_ends_the_run(monkeypatch, refusal, kind, message):
    """Would catch every image left to the training process, one after the other, in silence."""
    _require_decoder.cache_clear()

    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError(refusal)

    monkeypatch.setattr(decoders, "decode_jpeg", refuse)
    with pytest.raises(kind, match=message):
        list(decode_on(CPU, _files([_bytes(0)])))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_pixels_are_within_two_grey_levels(real_images, folder):
    """Would catch another crop, channels in another order, and nvJPEG's pixels farther from Pillow's than is said."""
    import tarfile

    with tarfile.open(real_images / "imagenet-sample" / "images.tar") as tar:
        members = [member for member in tar if member.isreg()][:64]
        datas = [tar.extractfile(member).read() for member in members]
    expected = [torch.from_numpy(np.array(decode(data, ""))).permute(2, 0, 1) for data in datas]
    files = [
        File(torch.frombuffer(bytearray(data), dtype=torch.uint8), "", tuple(pixels.shape[1:]))
        for data, pixels in zip(datas, expected, strict=True)
    ]
    found = list(itertools.chain.from_iterable(decode_on(torch.device("cuda"), files)))
    assert all(pixels.is_cuda for pixels in found)
    apart = [(a.cpu().float() - b.float()).abs().mean().item() for a, b in zip(found, expected, strict=True)]
    assert np.mean(apart) < 2.0
    assert max(apart) < 4.0
    there, here = (_images(_batches(folder, pin_memory=True), on) for on in ("cuda", "cpu"))
    assert ((there - here).abs().mean() * 255 * np.mean(IMAGE.std)) < 2.0
