"""Real photographs in class folders whose names are hard to write down, and a short run on them."""

from __future__ import annotations

from pathlib import Path

import oracle
from curves import train_in
from project import ROOT
from ranks import RankPool

NAMES = ("7, of “spades”", "[bold]z", "Größe\\l")
"""Class names in the order of the logits: a comma, quotation marks, markup, letters beyond ASCII, a backslash."""
NUM_VAL = 13


def make_folders(folder: Path, real_images: Path) -> Path:
    """`train/` and `val/` with CIFAR-10's airplanes, automobiles and birds under other names."""
    for split, archive, count in (("train", "train", 60), ("val", "test", 10 * NUM_VAL)):
        oracle.cifar_folder(real_images / "cifar10" / f"{archive}.tar", folder / "all", count, split)
        kept = zip(NAMES, ("airplane", "automobile", "bird"), strict=True)
        (folder / split).mkdir(parents=True)
        for name, theirs in kept:
            (folder / "all" / split / theirs).rename(folder / split / name)
    return folder


def short_run(ranks: RankPool, data: Path, output: Path, *more: object) -> Path:
    """Two steps on two ranks."""
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", oracle.IMG_SIZE, "--data-dir", data]
    argv += ["--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "-b", 8, "--max-steps", 2]
    argv += ["--workers", 0, "--crop-pct", 0.9, "--warmup-steps", 0, "--output", output, *more]
    train_in(ranks, 2, argv)
    return output
