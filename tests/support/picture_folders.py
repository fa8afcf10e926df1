"""Pictures for tests, in folders and as bytes, and a tiny run on a tiny folder of them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from project import ROOT

CPU = str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")
TINY = [
    *("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=2"),
    *("--img-size", "16", "--workers", "0", "--max-steps", "2", "-b", "4", "--warmup-steps", "0"),
]


def smooth_photo(height: int = 40, width: int = 52, seed: int = 0) -> Image.Image:
    """Smooth colours with an edge: no two operations change it in the same way."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    image = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    image[height // 3 : height // 2, : width // 2] //= 3
    return Image.fromarray(image)


def write_photos(root: Path, count: int, *kinds: str, height: int = 18, width: int = 24) -> Path:
    """Smooth photos of different sizes, the least one of these sides, in `train/` and three classes.

    They are files of each kind in turn. Returns the last one's path.
    """
    for number in range(count):
        path = made(root / "train" / f"class{number % 3}" / f"{number}.{kinds[number % len(kinds)]}")
        smooth_photo(height + number % 7, width + number % 9, number).save(path)
    return path


def noise(number: int) -> Image.Image:
    """Small, another image for each number."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 7, 3), dtype=np.uint8))


def encoded(number: int, kind: str = "PNG") -> bytes:
    """`noise` as the bytes of a file."""
    buffer = io.BytesIO()
    noise(number).save(buffer, kind)
    return buffer.getvalue()


def made(path: Path) -> Path:
    """A file's path whose folder is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_images(root: Path, *names: str) -> None:
    """PNG images, the n-th of which is `noise(n)`, whatever the suffix says (Pillow reads the content)."""
    for number, name in enumerate(names):
        made(root / name).write_bytes(encoded(number))


def picture(path: Path, seed: int = 0) -> None:
    """A small random PNG."""
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(made(path))


def make_folder(folder: Path) -> Path:
    """Two classes, 6 images for training and 4 for evaluation."""
    for split, count in (("train", 3), ("val", 2)):
        for label in ("cat", "dog"):
            for number in range(count):
                picture(folder / split / label / f"{number}.png", seed=number)
    return folder
