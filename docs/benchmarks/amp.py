"""A run in each number format, with and without a loss scale: time, precision, recall, F1, and gradients that are lost.

    python docs/benchmarks/amp.py --data-dir DIR [--device cuda] [--epochs 10] [--folder runs/amp] [FLAGS OF TRAINING]

The comparison is that of an account of automatic mixed precision (2024), which trained ResNet-50 on FashionMNIST for
ten epochs; here a small ViT takes its place. DIR has the folders train and val, each with a folder of images per class;
`--dataset digits` needs none. The recorded runs had the first 200 training and 100 test images of each class, by name:

    for class in CIFAR10/train/*; do
        mkdir -p DIR/{train,val}/${class##*/}
        cp $(ls -d $class/* | head -200) DIR/train/${class##*/}
        cp $(ls -d CIFAR10/test/${class##*/}/* | head -100) DIR/val/${class##*/}
    done

Finished runs are kept in --folder. The figures go to docs/benchmarks/amp.json; results_page.py makes the table.

DeepSpeed 0.19.8 and ds_vit reject fp16 on a CPU. The script overrides this check: torch then computes in fp16, so the
accuracy and the gradients are those of fp16. The time of these runs is not reported, because the CPU emulates fp16 and
is tens of times slower than in fp32.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.extend([str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)])
from ten_epochs import machine  # in this folder

from ds_vit.tools.bench import versions

ROOT = Path(__file__).resolve().parents[2]
FP16 = "zero1_fp16.json"
FORMATS = {
    "fp32": ("cpu_zero1_fp32.json", ()),
    "bf16": ("zero1_bf16.json", ()),
    "fp16 without a loss scale": (FP16, ("fp16.loss_scale=1",)),
    "fp16, loss scale 1024": (FP16, ("fp16.loss_scale=1024",)),
    "fp16, dynamic loss scale": (FP16, ()),
}
MODEL = (
    *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--workers", "0", "-b", "50", "--lr", "1e-3"),
    *("--warmup-epochs", "1"),
    *("--model-kwargs", "patch_size=8", "embed_dim=64", "depth=4", "num_heads=2", "--grad-stats-interval", "20"),
)
PRETEND = """
import sys
sys.path.insert(0, "tests/support")
from runs import pretend_fp16
from ds_vit.train import main
with pretend_fp16():
    sys.exit(main(sys.argv[1:]))
"""


def run(name: str, folder: Path, device: str, words: list[str]) -> dict[str, Any]:
    """A finished run's figures."""
    config, settings = FORMATS[name]
    output = folder / name.replace(" ", "-").replace(",", "")
    pretends = device == "cpu" and config == FP16
    if not (output / "cpu_seconds").exists():
        start = ["-c", PRETEND] if pretends else ["launch/train.py"]
        argv = [*start, "--deepspeed_config", f"ds_configs/{config}", *MODEL, "--output", str(output), *words]
        argv += ["--set", "zero_optimization.reduce_bucket_size=500000", *settings]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if device == "cpu":
            environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        child = subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=environ, stdout=sys.stderr)
        _, status, usage = os.wait4(child.pid, 0)  # the resources of this child only
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{name} ended with code {child.returncode}")
        (output / "cpu_seconds").write_text(str(usage.ru_utime + usage.ru_stime))
    seconds = float((output / "cpu_seconds").read_text())
    summary = json.loads((output / "summary.json").read_text())
    if device != "cpu":
        seconds = summary["wall_seconds"]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    gradients = [row for row in rows if row["kind"] == "gradients"]
    shares = {key: statistics.mean(row[key] for row in gradients) for key in ("zeros", "below_2^-24", "below_2^-14")}
    scales = [row["loss_scale"] for row in rows if row.get("loss_scale")]
    return {
        "seconds": None if pretends else seconds,
        "top1": summary["last_top1"],
        **classified(output / "predictions.csv"),
        **shares,
        "skipped_steps": sum(row["kind"] == "skip" for row in rows),
        "loss_scales": list(dict.fromkeys(scales)),
    }


def classified(file: Path) -> dict[str, float]:
    """Precision, recall and F1 in percent, means over the classes; a class that is never predicted has precision 0."""
    with file.open() as lines:
        pairs = [(row["class_number"], row["predicted_number"]) for row in csv.DictReader(lines)]
    found: dict[str, list[float]] = {"precision": [], "recall": [], "f1": []}
    for one in sorted({true for true, _ in pairs}):
        hits = pairs.count((one, one))
        predicted, true = (max(1, sum(pair[side] == one for pair in pairs)) for side in (1, 0))
        found["precision"].append(hits / predicted)
        found["recall"].append(hits / true)
        found["f1"].append(2 * hits / (predicted + true))
    return {name: 100 * statistics.mean(values) for name, values in found.items()}


def main() -> None:
    """Train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda [%(default)s]")
    parser.add_argument("--epochs", default="10", help="[%(default)s]")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "amp", help="of the runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="[%(default)s]")
    arguments, words = parser.parse_known_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    words += ["--epochs", arguments.epochs]
    result = {
        "command": f"python docs/benchmarks/amp.py --device {arguments.device} {shlex.join(words)}",
        "date": datetime.date.today().isoformat(),
        "machine": machine() if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "versions": versions(),
        "runs": {name: run(name, folder, arguments.device, words) for name in FORMATS},
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
