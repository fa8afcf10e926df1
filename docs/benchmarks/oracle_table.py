"""Make the table of docs/numerics.md: how far a run is from a plain single-process loop of timm and torch.

    .venv/bin/python docs/benchmarks/oracle_table.py

These are plain runs of `tests/parallel/test_layouts.py` with AdamW: for each ZeRO stage and number of ranks the whole
batch at once and in four micro-batches, with and without activation checkpointing. A cell holds the largest relative
deviation of these four runs over all their steps. Needs CIFAR-10's train.tar, looked for as the tests
do: in `$DS_VIT_TEST_DATA`, else in ../shared/data seen from the project.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import oracle  # noqa: E402
import torch  # noqa: E402
from curves import largest_deviation, train_in  # noqa: E402
from ranks import RankPool  # noqa: E402

NUM_IMAGES = 64
STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2, 4)
VARIANTS = [(pieces, words) for pieces in (1, 4) for words in ((), ("--grad-checkpointing",))]
COLUMNS = ("loss", "grad_norm")

Deviations = dict[tuple[int, int], dict[str, float]]
"""(ZeRO stage, ranks) → column of metrics.jsonl → largest relative deviation."""


def measure(archive: Path, folder: Path) -> Deviations:
    """Train every layout on the first images of a tar of class folders, and compare with the plain loop."""
    oracle.cifar_folder(archive, folder, NUM_IMAGES, "train")
    oracle.write_weights(folder / "weights.safetensors", num_classes=10)
    plain = oracle.train_plainly(folder).rows
    pool = RankPool()
    found: Deviations = {}
    for stage in STAGES:
        for world in WORLD_SIZES:
            worst = dict.fromkeys(COLUMNS, 0.0)
            for pieces, words in VARIANTS:
                batch = ("-b", NUM_IMAGES // world // pieces, "--grad-accum-steps", pieces)
                with tempfile.TemporaryDirectory() as output:
                    layout, run = (1, world, 1, stage), Path(output, "run")
                    rows = train_in(pool, world, oracle.command(folder, "adamw", layout, run, *batch, *words))
                worst = {c: max(worst[c], largest_deviation(plain, rows, c)) for c in COLUMNS}
            found[stage, world] = worst
            print(f"ZeRO-{stage}, {world} ranks: {worst}", file=sys.stderr, flush=True)
    return found


def markdown(found: Deviations) -> str:
    """The table as docs/numerics.md has it."""
    head = ["", *(f"{world} rank{'s' if world > 1 else ''}" for world in WORLD_SIZES)]
    rows = [head, ["---"] * len(head)]
    for stage in STAGES:
        cells = [" / ".join(f"{found[stage, world][c]:.1e}" for c in COLUMNS) for world in WORLD_SIZES]
        rows.append([f"ZeRO-{stage}", *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    """Measure, and print the table with date and versions."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    archive = Path(os.environ.get("DS_VIT_TEST_DATA", ROOT.parent / "shared" / "data")) / "cifar10" / "train.tar"
    if not archive.is_file():
        print(f"{archive} does not exist; set DS_VIT_TEST_DATA to the folder that holds cifar10/", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # as a rank has
    torch.manual_seed(0)  # timm draws the initial weights from the process's generator
    with tempfile.TemporaryDirectory() as folder:
        found = measure(archive, Path(folder))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "deepspeed"))
    print(markdown(found))
    print(f"\n{time.strftime('%Y-%m-%d')}, CPU, python {platform.python_version()}, {versions}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
