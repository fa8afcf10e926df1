"""What a process of the loader gives, on files of ImageNet's size that are made for it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ds_vit.launching.process import Process
from ds_vit.tools.measure import mean_over_ranks

_PICTURES = 32


def images_per_worker(device: torch.device) -> float:
    """Images that one process of a loader makes ready in a second while all ranks have one (a collective).

    Of JPEG files of ImageNet's mean size, 500 x 375 pixels and about 110 kB, cropped to 224 and flipped.

    Args:
        device: that this rank computes on.
    """
    from ds_vit.config.shipped import or_shipped
    from ds_vit.tools.bench_data import STAGES, bench_data

    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "train", "pictures")
        files.mkdir(parents=True)
        for number in range(_PICTURES):
            _picture(number).save(files / f"{number}.jpg", quality=90)
        words = ["--deepspeed_config", or_shipped("ds_configs/cpu_zero0_fp32.json"), "--data-dir", folder]
        words += ["--model", "vit_tiny_patch16_224", "-b", "8", "--val-split", "", "--workers", "0"]
        seconds = bench_data(
            [*words, "--color-jitter", "0"], _PICTURES, Process("none", 0, 1, device.index or 0, 1)
        ).seconds
    return 1 / mean_over_ranks(sum(seconds[stage] for stage in STAGES[:-1]), device)


def _picture(seed: int) -> Image.Image:
    """Shapes at several scales and grain, whose files are as long as photographs'."""
    draws = np.random.default_rng(seed)
    pixels = np.zeros((375, 500, 3))
    for scale, weight in ((8, 60.0), (32, 30.0), (125, 12.0)):
        small = Image.fromarray(draws.integers(0, 256, (scale, scale, 3), dtype=np.uint8)).resize((500, 375))
        pixels += weight / 128 * (np.asarray(small) - 128.0)
    pixels += draws.normal(128.0, 19.0, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
