"""Save the first scenes of `--dataset scenes` as files, in the layout that `--task segmentation` reads.

python launch/scene_files.py FOLDER [HOW_MANY_TO_TRAIN [HOW_MANY_TO_VALIDATE]]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.data.sources.masks import IGNORED
from ds_vit.tasks.segmentation.scenes import SceneSource

IGNORE_INDEX = 255  # the default of --ignore-index


def save(source: SceneSource, folder: Path, how_many: int) -> None:
    """Write `images/<number>.png` and `masks/<number>.png`, with the classes' colours as the palette of the masks."""
    palette = np.zeros((256, 3), dtype=np.uint8)
    palette[: source.num_classes], palette[IGNORE_INDEX] = source.entry("colours", 0), 255
    for kind in ("images", "masks") if how_many else ():
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for index in range(how_many):
        source.image(index).save(folder / "images" / f"{index:03}.png")
        classes = source.entry("mask", index)
        mask = Image.fromarray(np.where(classes == IGNORED, IGNORE_INDEX, classes).astype(np.uint8))
        mask.putpalette(palette.tobytes())
        mask.save(folder / "masks" / f"{index:03}.png")


def main(folder: str, train: str = "240", validation: str = "40") -> None:
    """Write `train/`, `val/` and `labels.csv`."""
    source = SceneSource(train=True)
    save(source, Path(folder, "train"), int(train))
    save(SceneSource(train=False), Path(folder, "val"), int(validation))
    rows = zip(source.entry("values", 0), source.class_names, source.entry("colours", 0), strict=True)
    lines = [f"{value},{name},#{bytes(colour).hex()}" for value, name, colour in rows]
    Path(folder, "labels.csv").write_text("\n".join(["index,name,colour", *lines]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
