"""DINO continued from weights of other images, next to DINO from random weights with the same number of steps.

    python docs/benchmarks/dino_continue.py --data-dir DIR [--seeds 3] [--jobs 2]

DIR has the folder `train` with a folder of images for each class of CIFAR-10. A small ViT is trained without labels on
20,000 images of the first five classes. Training then continues on 2,500 images of the other five, and starts from
random weights on the same images. k-NN rates the teacher on 5,000 other images of those five classes, before and after.

All settings are those of launch/recipes/dino_cifar.yaml, for every run, but the number of epochs. They were chosen on
CIFAR-10's test images, so the images that rate here are the last of each class in `train`: no choice has seen them.
The figures are written to docs/benchmarks/dino_continue.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ds_vit.tools.bench import device_name, versions

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_suffix(".json")
FIRST = ("airplane", "automobile", "bird", "cat", "deer")
SECOND = ("dog", "frog", "horse", "ship", "truck")
# Split → the classes, and which of the images of each class.
IMAGES = {
    "first/train": (FIRST, slice(4000)),
    "second/train": (SECOND, slice(500)),
    "second/val": (SECOND, slice(4000, 5000)),
}
BATCH = 64
STEPS_OF_FIRST, STEPS_OF_SECOND = 4 * (20_000 // BATCH), 20 * (2_500 // BATCH)
TRAIN = [
    *("--deepspeed_config", "ds_configs/cpu_zero1_fp32.json", "--recipe", "launch/recipes/dino_cifar.yaml"),
    *("--batch-size", BATCH, "--train-split", "train"),
]
ON_FIRST = ["--checkpoint-interval", 0, "--epochs", 4, "--val-split", "", "--eval-knn", 0, "--eval-interval", 0]
ON_SECOND = ["--checkpoint-interval", 0, "--epochs", 20, "--val-split", "val", "--eval-interval", 0]
EVALUATE = ["--val-split", "val", "--eval-only"]
RATED = ("random", "before", "scratch", "continued")
"""Random weights; those of the first half; both after training on the second half."""


def copy_images(source: Path, folder: Path) -> None:
    """The images of both halves, in their splits."""
    for split, (classes, which) in IMAGES.items():
        for of_class in classes:
            images = sorted((source / "train" / of_class).iterdir())[which]
            target = folder / split / of_class
            target.mkdir(parents=True, exist_ok=True)
            for image in images:
                shutil.copy(image, target)


def train(output: Path, data: Path, seed: int, *words: object) -> None:
    """Train or evaluate in one process, unless the folder has a complete run."""
    summary = output / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["exit"] != "completed":
        shutil.rmtree(output, ignore_errors=True)
        argv = [
            sys.executable,
            "launch/train.py",
            *TRAIN,
            "--data-dir",
            data,
            "--seed",
            seed,
            *words,
            "--output",
            output,
        ]
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        subprocess.run([str(word) for word in argv], cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)


def rate(folder: Path, seed: int) -> dict[str, float]:
    """All runs of a seed; k-NN top-1 in percent of each of `RATED`."""
    first, second = folder / "first", folder / "second"
    runs = {name: folder / f"{name}-{seed}" for name in ("first", *RATED)}
    train(runs["first"], first, seed, *ON_FIRST)
    start = ("--initial-checkpoint", folder / f"backbone-{seed}.safetensors")
    shutil.copy(runs["first"] / "teacher.safetensors", start[1])  # without its head next to it: the head is new
    train(runs["random"], second, seed, *EVALUATE)
    train(runs["before"], second, seed, *EVALUATE, *start)
    train(runs["scratch"], second, seed, *ON_SECOND)
    train(runs["continued"], second, seed, *ON_SECOND, *start)
    summaries = {name: json.loads((runs[name] / "summary.json").read_text()) for name in RATED}
    return {name: summary["last_knn_top1"] for name, summary in summaries.items()}


def described(values: Sequence[float]) -> dict[str, object]:
    """Mean, standard deviation and values."""
    return {"mean": statistics.mean(values), "deviation": statistics.stdev(values), "values": list(values)}


def main() -> None:
    """Train all runs, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="CIFAR-10 as folders of images")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "dino_continue", help="of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="2 or more")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, each on one core")
    asked = parser.parse_args()
    folder, load, started = asked.folder.resolve(), os.getloadavg()[0], time.perf_counter()
    copy_images(asked.data_dir, folder)
    with ThreadPoolExecutor(asked.jobs) as pool:
        by_seed = list(pool.map(lambda seed: rate(folder, seed), range(asked.seeds)))
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": device_name(torch.device("cpu")),
        "versions": versions(),
        "steps": {"first": STEPS_OF_FIRST, "second": STEPS_OF_SECOND},
        "knn_top1": {name: described([figures[name] for figures in by_seed]) for name in RATED},
        "gain_of_continuing": described([figures["continued"] - figures["scratch"] for figures in by_seed]),
        "wall_seconds": round(time.perf_counter() - started),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "load_at_start": round(load, 1),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    for name, figures in {**found["knn_top1"], "gain of continuing": found["gain_of_continuing"]}.items():
        print(f"{name:20} {figures['mean']:6.2f} ± {figures['deviation']:.2f}")


if __name__ == "__main__":
    main()
