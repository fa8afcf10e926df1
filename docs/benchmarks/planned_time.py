"""Planned against measured seconds of a step, in several layouts of one model on this machine's ranks.

    OMP_NUM_THREADS=1 .venv/bin/python docs/benchmarks/planned_time.py [--turns 20]

On two ranks that it starts itself; all layouts are held at the same time. A turn measures what
calibrate.py measures, then a step of each layout: machines are noisy, and a step is held against what the
machine could do in the same turn. Prints each layout's planned and measured time (fastest turns), their ratio (median,
least and most of the turns), what the planned one is made of, and the rank correlation (Spearman) of images per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from calibrate import Calibration  # in this folder
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from ds_vit.launching.process import discover
from ds_vit.planner.cost import StepTime
from ds_vit.tools.bench import make_ours, ranks_met, resolve_engine, seconds_of, versions
from ds_vit.training.cost import Cost
from ds_vit.training.run import Run

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8
LAYOUTS = {  # ZeRO stage, accumulated micro-batches, flags
    "dp 2, ZeRO-0": (0, 1, "-b 4"),
    "dp 2, ZeRO-1": (1, 1, "-b 4"),
    "dp 2, ZeRO-2": (2, 1, "-b 4"),
    "dp 2, ZeRO-3": (3, 1, "-b 4"),
    "dp 2, ZeRO-1, 4 x 1 images": (1, 4, "-b 1"),
    "dp 2, ZeRO-3, 4 x 1 images": (3, 4, "-b 1"),
    "dp 2, ZeRO-1, full recomputing": (1, 1, "-b 4 --grad-checkpointing"),
    "dp 2, ZeRO-1, selective recomputing": (1, 1, "-b 4 --grad-checkpointing selective"),
    "tp 2, ZeRO-1": (1, 1, "-b 8 --tp 2"),
    "tp 2, ZeRO-1, full recomputing": (1, 1, "-b 8 --tp 2 --grad-checkpointing"),
    "pp 2, ZeRO-1, 2 x 4 images": (1, 2, "-b 4 --pp 2"),
    "pp 2, ZeRO-1, 8 x 1 images": (1, 8, "-b 1 --pp 2"),
}


def measured(plans: dict[str, Run], calibration: Calibration, turns: int) -> list[dict[str, dict[str, float]]]:
    """Of each turn, the seconds of what is calibrated and of each layout's step, of the slowest rank (a collective)."""
    device, found = calibration.device, []
    with contextlib.ExitStack() as stack:
        steps = {name: make_ours(config, device, stack) for name, config in plans.items()}
        for step in [*steps.values()] * 3:  # the first ones make what later ones keep
            step()
        for _ in range(turns):
            calibrated, of_layouts = calibration.turn(0.1), {}
            for name, step in steps.items():
                dist.barrier()
                seconds = torch.tensor(seconds_of(step), dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                of_layouts[name] = float(seconds)
            found.append({"calibrated": calibrated, "layouts": of_layouts})
    return found


def main() -> int:
    """Plan, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--img-size", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20)
    arguments = parser.parse_args()
    process = discover()
    if process.launcher == "none":
        words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", *sys.argv]
        return subprocess.run([sys.executable, *words], check=False).returncode
    plans, of_model = {}, ["--model", arguments.model, "--model-kwargs", f"depth={arguments.depth}"]
    of_model += ["--img-size", str(arguments.img_size)]
    with tempfile.TemporaryDirectory() as folder:
        for name, (stage, accumulation, words) in LAYOUTS.items():
            told = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
            told["gradient_accumulation_steps"] = accumulation
            config = Path(folder) / "deepspeed.json"
            config.write_text(json.dumps(told))
            plans[name] = resolve_engine([*words.split(), *of_model, "--deepspeed_config", str(config)], process)
    with ranks_met(process) as device:
        calibration = Calibration(device)
        turns = measured(plans, calibration, arguments.turns)
    if process.rank:
        return 0
    looked_at = {name: Cost(config) for name, config in plans.items()}
    planned: dict[str, list[StepTime]] = {name: [] for name in plans}
    for turn in turns:
        seconds = turn["calibrated"]
        for name, one in looked_at.items():
            planned[name].append(one.step_time(calibration.accelerator(seconds), calibration.link(seconds)))
    show(arguments, planned, {name: [turn["layouts"][name] for turn in turns] for name in plans})
    return 0


def show(arguments: argparse.Namespace, planned: dict[str, list[StepTime]], measured: dict[str, list[float]]) -> None:
    """The table."""
    console = Console(width=160)
    model = f"{arguments.model} of {arguments.depth} blocks at {arguments.img_size}, batch {BATCH}"
    console.print(f"{model}; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    table = Table("layout", "planned s", "measured s", "planned / measured", "planned is made of, ms")
    rates = []
    for name, times in planned.items():
        seconds = [time.seconds for time in times]
        ratio = sorted(a / b for a, b in zip(seconds, measured[name], strict=True))
        parts = {
            key: statistics.median(getattr(time, key) for time in times) for key in vars(times[0]) if key != "hidden"
        }
        made_of = ", ".join(f"{key} {value * 1e3:.0f}" for key, value in parts.items() if value > 5e-4)
        spread = f"{statistics.median(ratio):.2f} ({ratio[0]:.2f} to {ratio[-1]:.2f})"
        table.add_row(name, f"{min(seconds):.3f}", f"{min(measured[name]):.3f}", spread, made_of)
        rates.append([statistics.median(1 / a for a in seconds), statistics.median(1 / b for b in measured[name])])
    console.print(table)
    console.print(f"rank correlation {spearmanr(*zip(*rates, strict=True)).statistic:.2f}")


if __name__ == "__main__":
    sys.exit(main())
