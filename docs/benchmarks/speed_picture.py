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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


PAGE = Path(__file__).with_name("step_cpu.md")
RATIO = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)")
COLOURS = {0: "#0b8a5f", 1: "#2563c9", 3: "#c2571a"}


class Recorded(NamedTuple):
    """A cell of the page: its row, ZeRO's stage and precision, and the ratio with its quartiles."""

    row: str
    stage: int
    bf16: bool
    ratio: float
    low: float
    high: float


def recorded(text: str) -> list[Recorded]:
    """The cells of the tables of ratios in the page's last section."""
    found, header = [], []
    for line in text.rpartition("\n## ")[2].splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        ratios = [RATIO.fullmatch(cell) for cell in cells]
        if any(ratios):
            for name, one in zip(header, ratios, strict=False):
                if one:
                    told = f"{cells[0]} {name}"
                    stage = int(told.partition("ZeRO-")[2][0])
                    found.append(Recorded(_row(header[0], cells[0]), stage, "bf16" in told, *map(float, one.groups())))
        elif line.startswith("|") and not line.startswith("|-"):
            header = cells
    return found


def _row(table: str, cell: str) -> str:
    """What a row of a table is drawn as; ranks and images stand for the peer."""
    if table.startswith("two ranks"):
        return f"2 ranks: {cell.partition(',')[0]}, over DDP or FSDP2"
    return f"1 rank: {cell}, over timm" + (" compiled" if "--compile" in cell else "")


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="FILE", type=Path, help="png, svg or pdf")
    arguments = parser.parse_args()
    cells = recorded(PAGE.read_text())
    rows = list(dict.fromkeys(cell.row for cell in cells))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 1.0 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        own = [cell for cell in cells if cell.row == row]
        for place, cell in enumerate(own):
            y = -number + 0.28 - 0.56 * (place + 0.5) / len(own)
            colour = COLOURS[cell.stage]
            axes.hlines(y, cell.low, cell.high, color=colour, linewidth=1)
            axes.plot(cell.ratio, y, "s" if cell.bf16 else "o", color=colour, markersize=5)
    for stage, colour in COLOURS.items():
        axes.plot([], [], color=colour, linewidth=4, label=f"ZeRO-{stage}" + (" (over FSDP2)" if stage == 3 else ""))
    for marker, name in (("o", "fp32"), ("s", "bf16")):
        axes.plot([], [], marker, color="black", markersize=5, label=name)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_yticks([-number for number in range(len(rows))], rows, fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.08), ncols=5, fontsize=8, frameon=False)
    axes.set_title(
        "images per second of a training step, over the peer's (CPU)", loc="left", fontsize=10, fontweight="bold"
    )
    figure.savefig(arguments.output, dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
