"""The largest model that fits a rank's memory on each rung of `ladder.py --recipe scaling`.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 .venv/bin/python docs/benchmarks/largest_model.py

A model gets more blocks until it does not fit. That is planned for 8 A100, and planned and measured for two ranks of a
small memory: runs of two steps on the simulated device (tests/simulated_device), whose allocator has that limit, end or
run out of memory. It takes minutes and writes docs/benchmarks/largest_model.json; results_page.py makes the table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[2] / place) for place in ("", "tests", "tests/support", "docs/benchmarks")
)

import simulated_device
from ladder import flags_of_rungs, largest_model  # in this folder
from ranks import RankFailure, RankPool
from runs import run_quietly
from ten_epochs import machine  # in this folder

from ds_vit.launching.process import Process
from ds_vit.tools.bench import versions

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "scaling"
MODEL, GPUS, GPU_IMAGES = "vit_gigantic_patch14_224", 8, 32
GPU_MEMORY = 77_000_000_000  # of an A100-80GB, without the 3 GB that the planner leaves out
# DeepSpeed's defaults for ZeRO-3 keep or prefetch as much as all of a small model.
STAGE_3 = ("param_persistence_threshold=0", "prefetch_bucket_size=100000")
SMALL = (
    *("--dataset", "digits", "--val-split", "", "--workers", "0", "--max-steps", "2", "--img-size", "16"),
    *("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=4", "embed_dim=256", "num_heads=4"),
    *("--set", *(f"zero_optimization.stage3_{key}" for key in STAGE_3), "zero_optimization.reduce_bucket_size=100000"),
)
RANKS, IMAGES, MEMORY = 2, 32, 200_000_000


def train_within(library: Path, words: Sequence[str], said: str) -> None:
    """On a rank: a run on a device of so much memory, whose errors go into the file `said` with its rank."""
    simulated_device.start(library)
    simulated_device.set_memory_limit(MEMORY)
    code, _, errors = run_quietly(words)
    Path(f"{said}{os.environ['RANK']}").write_text(errors if code else "")


def fits(words: Sequence[str], blocks: int) -> bool:
    """Whether a run of so many blocks ends within the memory of two simulated devices."""
    on_rank = importlib.import_module(Path(__file__).stem).train_within  # ranks do not know __main__
    at = words.index("num_heads=4") + 1
    with tempfile.TemporaryDirectory() as folder:
        words = [*words[:at], f"depth={blocks}", *words[at:], "--output", f"{folder}/run"]
        failure = ""
        try:
            RankPool().run(RANKS, on_rank, simulated_device.library(), words, f"{folder}/rank", timeout=600)
        except RankFailure as error:  # a rank without memory ends the others
            failure = str(error)
        failure += "".join(file.read_text() for file in Path(folder).glob("rank*"))
    if failure and "Tried to allocate" not in failure:
        raise SystemExit(failure)
    return not failure


def edge(words: Sequence[str], blocks: int) -> int:
    """The most blocks that fit, near a guess."""
    if fits(words, blocks):
        while fits(words, blocks + 1):
            blocks += 1
        return blocks
    while blocks > 1 and not fits(words, blocks - 1):
        blocks -= 1
    return blocks - 1


def plan() -> dict[str, Any]:
    """The largest model of each rung on GPUs."""
    config = str(ROOT / "ds_configs" / "zero1_fp32.json")
    rungs = flags_of_rungs(["--model", MODEL], config, GPU_IMAGES, RECIPE, GPUS)
    largest = {
        name: largest_model(words, Process("none", 0, GPUS, 0, GPUS), GPU_MEMORY) for name, words in rungs.items()
    }
    return {"gpus": GPUS, "model": MODEL, "images": GPU_IMAGES, "memory_bytes": GPU_MEMORY, "largest": largest}


def check(name: str) -> dict[str, int]:
    """The blocks of a rung's largest model on the small memory."""
    config = str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")
    words = flags_of_rungs(SMALL, config, IMAGES, RECIPE, RANKS)[name]
    planned, _ = largest_model(words, Process("none", 0, RANKS, 0, RANKS), MEMORY)
    return {"planned": planned, "measured": edge(words, planned)}


def main() -> None:
    """Plan, measure, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    planned = plan()
    blocks = {name: check(name) for name in planned["largest"]}
    result = {
        "command": "python docs/benchmarks/largest_model.py",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "planned": planned,
        "checked": {"ranks": RANKS, "images": IMAGES, "memory_bytes": MEMORY, "blocks": blocks},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
