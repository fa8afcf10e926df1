"""From an image file's bytes to pixels: Pillow's own by default, whatever decodes them."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as F

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data import decode as decoding
from ds_vit.data.augment import steps
from ds_vit.data.augment.transforms import train_transform
from ds_vit.data.decode import ImageDecodeError, Jpeg, decode, open_image
from ds_vit.data.settings import ImageConfig

simplejpeg = pytest.importorskip("simplejpeg")


def _jpeg(seed: int = 0, size: tuple[int, int] = (150, 131), mode: str = "RGB", **options: object) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, "jpeg", **options)
    return file.getvalue()


KINDS = {
    f"{mode} {sampling} {'progressive' if progressive else 'baseline'}": _jpeg(
        mode=mode, progressive=progressive, **({"subsampling": sampling} if mode == "RGB" else {})
    )
    for mode, sampling, progressive in (
        *itertools.product(["RGB"], ["4:4:4", "4:2:2", "4:2:0"], [False, True]),
        ("L", "", False),
        ("CMYK", "", False),
    )
}

for _sampling in ("440", "411"):  # which Pillow does not write: upsampled in height alone, and by four
    KINDS[f"RGB {_sampling} baseline"] = simplejpeg.encode_jpeg(
        np.asarray(decode(KINDS["RGB 4:4:4 baseline"], "")), colorsubsampling=_sampling
    )


def _equal(image: Image.Image, other: Image.Image) -> bool:
    return image.mode == other.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(other))


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_jpeg_file_is_pillows(kind):
    """Would catch another upsampling or transform, a row too few above a crop's end, channels in another order."""
    expected, rng = decode(KINDS[kind], kind), random.Random(0)
    image = open_image(KINDS[kind], kind)
    if isinstance(image, Image.Image):
        assert "CMYK" in kind
        assert _equal(image, expected)
        return
    assert (image.width, image.height) == expected.size
    assert _equal(image.image(), expected)
    for _ in range(40):
        (top, bottom), (left, right) = (sorted(rng.sample(range(edge + 1), 2)) for edge in (131, 150))
        part = image.crop((top, left, bottom - top, right - left))
        assert _equal(part, expected.crop((left, top, right, bottom))), (top, left, bottom, right)


def test_what_is_damaged_is_so_for_pillow_too():
    """Would catch damage that passes, a sound file that is refused, and pixels other than Pillow's for broken data."""
    rng = random.Random(3)
    outcomes = {True: 0, False: 0}
    for number in range(400):
        data = bytearray(KINDS[rng.choice(sorted(KINDS))])
        place = rng.randrange(len(data))
        if number % 4 == 0:
            del data[place:]
        elif number % 4 == 1:
            data[place] ^= 1 << rng.randrange(8)
        elif number % 4 == 2:
            data[place : place + 30] = bytes(len(data[place : place + 30]))
        else:
            data[place:place] = b"\x07\xc1\x00\x12"
        try:
            expected = decode(bytes(data), "")
        except ImageDecodeError:
            expected = None
        try:
            image = open_image(bytes(data), "", whole=True)
            image = image.image() if isinstance(image, Jpeg) else image
        except ImageDecodeError:
            image = None
        assert (image is None) == (expected is None), number
        assert image is None or _equal(image, expected), number
        outcomes[image is None] += 1
    assert min(outcomes.values()) > 50


def test_bombs_and_other_decoders_are_left_to_pillow(monkeypatch):
    """Would catch a file of a few bytes that fills the memory, and curves that depend on what is installed."""
    decoding.has_exact_jpeg.cache_clear()
    right = decoding._decode
    monkeypatch.setattr(decoding, "_decode", lambda *args, **options: right(*args, **options) ^ np.uint8(1))
    try:
        assert isinstance(open_image(KINDS["RGB 4:4:4 baseline"], ""), Image.Image)
    finally:
        decoding.has_exact_jpeg.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    with pytest.raises(ImageDecodeError, match="decompression bomb"):
        open_image(KINDS["RGB 4:2:0 baseline"], "small.jpg")


@pytest.mark.parametrize("augment", [AugmentConfig(), AugmentConfig(aa="rand-m9-mstd0.5"), AugmentConfig(no_aug=True),
                                     AugmentConfig(train_crop_mode="rkrr", color_jitter_prob=0.5)])  # fmt: skip
def test_augmentation_of_a_file_is_that_of_its_image(augment):
    """Would catch a crop that is not the drawn one, and any way around Pillow that changes a pixel."""
    transform = train_transform(ImageConfig((40, 48)), augment)
    for number in range(20):
        key, data = randomness.mix(number), KINDS[sorted(KINDS)[number % len(KINDS)]]
        expected = transform(decode(data, ""), key)
        assert torch.equal(transform(open_image(data, ""), key), expected), number


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_pillows(name):
    """Would catch another grey, mean or rounding."""
    kind = steps.COLOURS[["brightness", "contrast", "saturation"].index(name)]
    rng = np.random.default_rng(4)
    for number in range(60):
        size = [(13, 17), (70, 65)][number % 2]
        pixels = rng.integers(0, rng.integers(2, 257), (*size, 3), dtype=np.uint8)
        factor = [0.0, 1.0, 2.0][number // 2] if number < 6 else float(rng.uniform(0, 2))
        expected = getattr(F, f"adjust_{name}")(Image.fromarray(pixels), factor)
        assert torch.equal(steps.as_pixels(expected), F.pil_to_tensor(expected))
        found = steps.adjust_colors(F.pil_to_tensor(Image.fromarray(pixels)), [(kind, factor)])
        assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(expected)), factor


@pytest.mark.parametrize(
    "augment", [AugmentConfig(vflip=0.5), AugmentConfig(aa="rand-m9-mstd0.5"), AugmentConfig(color_jitter_prob=0.5)]
)
def test_fast_does_what_exact_does(augment):
    """Would catch a flip that is lost, a step that is left out, and channels that change places, whatever follows."""
    transform = train_transform(ImageConfig((40, 48)), augment)
    for number in range(20):
        key, data = randomness.mix(number), KINDS["RGB 4:4:4 baseline"]
        exact, fast = (transform(open_image(data, "", how), key).float() for how in ("exact", "fast"))
        assert (exact - fast).abs().mean() < 2.0, number


def test_fast_is_within_two_grey_levels(real_images, tmp_path):
    """Would catch a scale that blurs, a crop that is shifted, and a `fast` that is the exact one."""
    import tarfile

    with tarfile.open(real_images / "imagenet-sample" / "images.tar") as tar:
        members = sorted((m for m in tar.getmembers() if m.isreg()), key=lambda m: -m.size)[:12]
        tar.extractall(tmp_path, members, filter="data")
    transform = train_transform(ImageConfig((64, 64)), AugmentConfig(color_jitter=0.0))
    differences = []
    for number, path in enumerate(sorted(Path(tmp_path).rglob("*.JPEG")) * 2):
        data, key = path.read_bytes(), randomness.mix(number)
        exact, fast = (transform(open_image(data, path.name, how), key) for how in ("exact", "fast"))
        differences.append((exact.float() - fast.float()).abs().mean().item())
    assert 0.0 < np.mean(differences) < 2.0
    assert max(differences) < 4.0
