"""What distillation gives a small ViT on the digits: a student alone, and the same student with a larger teacher.

    python docs/benchmarks/distilling_digits.py [--seeds 5] [--jobs 1]

One teacher of 0.7 million parameters is trained on all training images first (launch/recipes/digits.yaml, 20 epochs).
For each seed a student of 60 thousand then trains on a tenth of them, with their labels only and with the teacher.
Everything else is the same for both. The settings were chosen by one run of each kind with seed 100.
The figures are written to docs/benchmarks/distilling_digits.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ds_vit.tools.bench import device_name, versions

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_suffix(".json")
SHARED = [
    *("--deepspeed_config", "ds_configs/cpu_zero1_fp32.json", "--recipe", "launch/recipes/digits.yaml"),
    *("--eval-interval", 0, "--workers", 0, "--checkpoint-interval", 0),
]
TEACHER = ["-b", 64, "--epochs", 20, "--warmup-epochs", 2]
STUDENT = [
    *("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=3", "--smoothing", 0, "--lr", 0.002),
    *("--train-split", "train[:10%]", "-b", 48, "--epochs", 400, "--warmup-epochs", 20),
]
DISTILLED = ["--task-loss-weight", 0.1, "--kd-temperature", 4]


def train(output: Path, *words: object) -> float:
    """Train, unless the folder has a complete run; top-1 on the validation split in percent."""
    summary = output / "summary.json"
    if not summary.exists():
        argv = [sys.executable, "launch/train.py", *SHARED, *words, "--output", output]
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in argv], cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(summary.read_text())["last_top1"])


def described(values: Sequence[float]) -> dict[str, object]:
    """Mean, standard deviation and values."""
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values), "values": list(values)}


def main() -> None:
    """Train all runs, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "distilling_digits", help="of the runs")
    parser.add_argument("--seeds", type=int, default=5, help="students of each kind, 2 or more")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    args = parser.parse_args()
    folder = args.folder.resolve()
    teacher = train(folder / "teacher", *TEACHER)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            [
                pool.submit(train, folder / f"{name}-{seed}", *STUDENT, "--seed", seed, *more)
                for name, more in (
                    ("alone", []),
                    ("distilled", ["--kd-checkpoint", folder / "teacher", *DISTILLED]),
                )
            ]
            for seed in range(args.seeds)
        ]
        alone, distilled = zip(*([run.result() for run in pair] for pair in runs), strict=True)
    gains = [b - a for a, b in zip(alone, distilled, strict=True)]
    figures = {
        "command": "python docs/benchmarks/distilling_digits.py",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {device_name(torch.device('cpu'))}",
        "versions": versions(),
        "flags": [str(word) for word in [*SHARED, *STUDENT, *DISTILLED]],
        "teacher": teacher,
        "alone": described(alone),
        "distilled": described(distilled),
        "gain": described(gains),
    }
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"teacher {teacher:.2f} %")
    for name in ("alone", "distilled", "gain"):
        one = described({"alone": alone, "distilled": distilled, "gain": gains}[name])
        print(f"{name:<10} {one['mean']:.2f} ± {one['deviation']:.2f}")


if __name__ == "__main__":
    main()
