"""Draw the ratios that docs/benchmarks/step_cpu.md has recorded: ours over plain timm, DDP and FSDP2, step for step.

    .venv/bin/python docs/benchmarks/speed_picture.py --output docs/images/speed.svg

Measures nothing: the page says by which commands its figures were measured, and on what. Needs matplotlib
(launch/setup.sh plot).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_vit.monitoring.figures import new_figure, save_figure

PAGE = Path(__file__).with_name("step_cpu.md")
RATIO = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)")


def recorded(text: str) -> list[tuple[str, float, float, float]]:
    """(what, ratio, its quartiles) of each cell of the tables of ratios in the page's last section."""
    found, header = [], []
    for line in text.rpartition("\n## ")[2].splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        ratios = [RATIO.fullmatch(cell) for cell in cells]
        if any(ratios):
            named = zip(header, ratios, strict=False)
            found += [(f"{cells[0]}, {name}", *map(float, one.groups())) for name, one in named if one]
        elif line.startswith("|") and not line.startswith("|-"):
            header = cells
    return found


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="FILE", type=Path, help="png, svg or pdf")
    arguments = parser.parse_args()
    names, ratios, lows, highs = zip(*recorded(PAGE.read_text()), strict=True)
    figure = new_figure(8.5, 0.6 + 0.3 * len(names))
    axes = figure.subplots()
    places = range(len(names), 0, -1)
    axes.barh(places, ratios, height=0.65, color=["#0b8a5f" if ratio >= 1 else "#7f93ad" for ratio in ratios])
    axes.hlines(places, lows, highs, color="black", linewidth=1)
    for place, ratio in zip(places, ratios, strict=True):
        axes.text(0.02, place, f"{ratio:.2f}", va="center", color="white", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_title(
        "images a second of a training step, over the peer's (CPU)", loc="left", fontsize=10, fontweight="bold"
    )
    save_figure(figure, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
