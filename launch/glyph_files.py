"""Save three characters that `--dataset glyphs` holds out as PNG files, and the names of all that it holds out.

python launch/held_out_glyphs.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.data import open_source

SHOWN = ("latin capital letter e with acute", "latin small letter u with diaeresis", "latin small letter a with breve")


def main(folder: str) -> None:
    """Write `<name>.png` for each of `SHOWN`, and `names.txt`."""
    source = open_source("glyphs", None, "validation")
    names = [source.captions(index)[0] for index in range(len(source))]
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "names.txt").write_text("\n".join(names) + "\n")
    for name in SHOWN:
        source.image(names.index(name)).save(Path(folder) / f"{name.replace(' ', '-')}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
