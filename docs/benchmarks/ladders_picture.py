"""Draw the ladders that the JSON files of this folder have recorded, with the published gains.

    .venv/bin/python docs/benchmarks/ladders_picture.py --output docs/images/ladders.svg

Measures nothing: docs/results.md says by which commands its figures were measured, and on what. Needs matplotlib
(launch/setup.sh plot).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


LADDERS = {
    "faster_vit_ladder": "Meta AI's faster ViT training",
    "scaling_ladder": "Scaling vision platforms",
    "bridgetower_ladder": "Hugging Face's BridgeTower",
}
"""By the stem of the JSON file."""
IMG_SIZE = re.compile(r"(?:--img-size |_)(\d+)$")
IN_ALL = re.compile(r"([\d.]+)(?: in all(?: at (\d+) px)?| at (\d+) px)")


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="FILE", type=Path, help="png, svg or pdf")
    output = parser.parse_args().output
    benches: list[tuple[str, dict[str, Any]]] = []
    for stem, title in LADDERS.items():
        record = json.loads(Path(__file__).with_name(f"{stem}.json").read_text())
        benches += [(title, bench) for bench in record["benches"]]
    heights = [len(bench["ours"]) for _, bench in benches]
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 1.2 + 0.3 * sum(heights) + 0.5 * len(heights)), layout="constrained")
    for axes, (title, bench) in zip(figure.subplots(len(benches), 1, height_ratios=heights), benches, strict=True):
        pixels = IMG_SIZE.findall(bench["options"])
        for number, name in enumerate(bench["ours"]):
            ratio = bench["ratios"].get(name, {}).get("the first")
            height = ratio["images_per_second"] if ratio else 1.0
            axes.barh(-number, height, color="#4a7fb5" if ratio else "#9a9a9a", height=0.6)
            if ratio:
                axes.hlines(-number, ratio["low"], ratio["high"], color="black", linewidth=1)
            factors = IN_ALL.findall(bench["published"].get(name, ""))
            published = [float(factor) for factor, *size in factors if "".join(size) in ("", *pixels)]
            axes.plot(published, [-number] * len(published), "D", color="#c23b22", markersize=5)
        axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
        axes.set_yticks([-number for number in range(len(bench["ours"]))], list(bench["ours"]), fontsize=8)
        axes.set_xlim(0.0, 2.4)
        axes.grid(axis="x", alpha=0.3)
        ranks = bench["layout"].split(" x ")[1].removeprefix("dp ")
        heading = [title, *(f"{size} px" for size in pixels), f"{ranks} rank{'s' * (ranks != '1')}"]
        axes.set_title(", ".join(heading), loc="left", fontsize=9, fontweight="bold")
    axes.plot([], [], color="#4a7fb5", linewidth=4, label="measured on a CPU, with the range over the turns")
    axes.plot([], [], "D", color="#c23b22", markersize=5, label="published, in all, on GPUs or Gaudi2")
    axes.legend(loc="upper center", bbox_to_anchor=(0.2, -0.35), ncols=2, fontsize=8, frameon=False)
    axes.set_xlabel("images per second over those of the first rung", fontsize=8)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
