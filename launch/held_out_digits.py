"""Save the first images of the digits' validation split, which no run trains on, as PNG files of 8 x 8 pixels.

python launch/held_out_digits.py FOLDER [HOW_MANY]
"""

from __future__ import annotations

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.data.sources.datasets import open_source


def main(folder: str, how_many: str = "3") -> None:
    """Write `<number>-is-a-<digit>.png` for each."""
    source = open_source("digits", None, "validation")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for index in range(int(how_many)):
        source.image(index).save(Path(folder) / f"{index + 1}-is-a-{source.class_names[source.target(index)]}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
