"""ViT-Lite-7/8 on CIFAR-10 in one run that is stopped again and again, and resumed each time in another layout.

    python docs/benchmarks/vit_lite.py --data-dir DIR [--precision bf16] [--segment-minutes 30] [--minutes 300]
    python docs/benchmarks/vit_lite.py --data-dir DIR --control
    python docs/benchmarks/vit_lite.py --picture

The first command trains by launch/recipes/vit_lite_7_8_cifar10.yaml on at most two CPU ranks. --time-limit stops each
segment, in the middle of an epoch. The same command continues later, also after a crash, and also in another precision.
DIR has the folders train and test, each with a folder of images per class. The second command compares a few steps that
change the layout, in fp32, with the same steps in one layout. Both write docs/benchmarks/vit_lite.json; the third draws
docs/images/vit_lite.svg from it and needs matplotlib (launch/setup.sh plot).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from ten_epochs import machine  # in this folder

from ds_vit.config.run_folder import RunFolder
from ds_vit.monitoring.report.record import Record
from ds_vit.tools.bench import versions

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_suffix(".json")
PICTURE = ROOT / "docs" / "images" / "vit_lite.svg"
RECIPE = "launch/recipes/vit_lite_7_8_cifar10.yaml"
PUBLISHED = {"top1": 89, "epochs": 300, "source": "Hassani et al. 2021, arXiv 2104.05704"}
INTERRUPTED = 75  # exit code, see docs/checkpoints.md
MAX_ROWS = 300  # of the loss, in the JSON


class Layout(NamedTuple):
    """Ranks, ZeRO stage, micro-batch, accumulation; `flags` are the degrees. The global batch is 128."""

    ranks: int
    stage: int
    micro_batch: int
    accumulation: int
    flags: tuple[str, ...] = ()


LAYOUTS = (
    Layout(2, 1, 64, 1),
    Layout(2, 1, 128, 1, ("--tp", "2")),
    Layout(2, 1, 32, 4, ("--pp", "2")),
    Layout(2, 3, 64, 1),
    Layout(2, 2, 64, 1),
    Layout(1, 0, 128, 1),
)


CONFIGS = {"fp32": "cpu_zero{}_fp32", "bf16": "zero{}_bf16"}
"""Precision → the file in ds_configs, by ZeRO's stage."""
# Those of the files for GPUs are larger than this model.
BUCKETS = ("--set", "zero_optimization.reduce_bucket_size=500000", "zero_optimization.allgather_bucket_size=500000")


def train(folder: Path, layout: Layout, precision: str, data: Path, *words: object) -> int:
    """Train, or resume, in a layout; the output goes to files next to the folder.

    Returns:
        the exit code, 0 or `INTERRUPTED`.
    """
    command = ["bash", "launch/local.sh", "--num_ranks", layout.ranks]
    command += ["--logs", f"{folder}-logs", "launch/train.py"]
    command += ["--deepspeed_config", f"ds_configs/{CONFIGS[precision].format(layout.stage)}.json"]
    command += BUCKETS if layout.stage else ()
    command += ["--recipe", RECIPE, "--data-dir", data, "--val-split", "test", "-b", layout.micro_batch]
    command += ["--grad-accum-steps", layout.accumulation, *layout.flags, "--workers", 1]
    command += ["--on-bad-image", "error", "--output", folder, "--resume", "auto", *words]
    environ = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(2 // layout.ranks),
    }
    environ |= {"PYTHONPATH": str(ROOT), "DS_VIT_PYTHON": sys.executable}
    environ |= {"TIMM_FUSED_ATTN": "0", "THP_MEM_ALLOC_ENABLE": "1"}  # faster on a CPU, docs/performance.md
    log_path = folder.with_suffix(".log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("a") as log:
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=environ, stdout=log, stderr=log)
    if done.returncode not in (0, INTERRUPTED):
        raise SystemExit(f"ended with code {done.returncode}; {log_path} says why")
    return done.returncode


def train_in_segments(folder: Path, precision: str, data: Path, segment_seconds: float, stop_at: float) -> None:
    """Change the layout after each segment, until the epochs or the time are spent."""
    while (left := stop_at - time.time()) > 0:
        starts = RunFolder(folder).starts
        layout = LAYOUTS[len(starts.read_text().splitlines()) % len(LAYOUTS) if starts.exists() else 0]
        print(layout, file=sys.stderr, flush=True)
        limit = f"{min(segment_seconds, left):.0f}s"
        if train(folder, layout, precision, data, "--time-limit", limit, "--log-interval", 10) == 0:
            return


def of_run(folder: Path) -> dict[str, Any]:
    """Segments, evaluations and the loss of a run."""
    record = Record.read(folder)
    rows = list({row["step"]: row for row in RunFolder(folder).rows("train")}.values())
    evaluations = {row["step"]: row for row in RunFolder(folder).rows("eval")}
    keys = ("step", "epoch", "top1", "top5", "loss", "images")
    return {
        "parameters": record.summary["num_parameters"],
        "steps_an_epoch": record.last_start["schedule"]["total_steps"] // PUBLISHED["epochs"],
        "segments": [
            {"layout": one.layout, "first_step": one.done_before + 1, "last_step": one.done, "seconds": one.seconds}
            for one in record.launches
            if one.done > one.done_before
        ],
        "evaluations": [{key: row[key] for key in keys} for row in evaluations.values()],
        "rows": [[row["step"], row["loss"], row["epoch_loss"]] for row in rows[:: -(-len(rows) // MAX_ROWS)]],
    }


def train_control(folder: Path, data: Path, steps: int) -> None:
    """The same steps on one rank, and in all layouts, one after the other.

    There is no warm-up, so that the weights move at the full rate from the first step.
    """
    words = ("--val-split", "", "--warmup-epochs", 0, "--log-interval", 1)
    train(folder / "one", LAYOUTS[-1], "fp32", data, *words, "--max-steps", steps)
    for number, layout in enumerate(LAYOUTS, 1):
        train(folder / "changing", layout, "fp32", data, *words, "--max-steps", number * steps // len(LAYOUTS))


def of_control(folder: Path) -> dict[str, Any]:
    """The largest relative deviations of the run that changes its layout from that of one rank."""
    one, changing = (RunFolder(folder / name).rows("train") for name in ("one", "changing"))
    pairs = list(zip(one, changing, strict=True))
    return {
        "steps": len(pairs),
        "first_loss": one[0]["loss"],
        "last_loss": one[-1]["loss"],
        "deviation": {key: max(abs(a[key] - b[key]) / abs(a[key]) for a, b in pairs) for key in ("loss", "grad_norm")},
        "segments": [launch.layout for launch in Record.read(folder / "changing").launches],
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Loss above, accuracy below, by epoch; the segments shaded by their layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.2, 1])
    epoch, segments = found["steps_an_epoch"], found["segments"]
    layouts = list(dict.fromkeys(segment["layout"] for segment in segments))
    for segment in segments:
        start, end = (segment["first_step"] - 1) / epoch, segment["last_step"] / epoch
        for axes in (above, below):
            axes.axvspan(start, end, color=f"C{layouts.index(segment['layout'])}", alpha=0.25, linewidth=0)
    for number, name in enumerate(layouts):
        below.fill_between([], [], color=f"C{number}", alpha=0.25, label=name)
    steps, losses, _ = zip(*found["rows"], strict=True)
    above.plot([step / epoch for step in steps], losses, linewidth=0.8, color="black")
    above.set_ylabel("training loss")
    title = f"ViT-Lite-7/8 on CIFAR-10: one run, {len(segments)} segments in {len(layouts)} layouts"
    above.set_title(title, loc="left", fontsize=11, fontweight="bold")
    rows, published = found["evaluations"], found["published"]
    below.plot([row["step"] / epoch for row in rows], [row["top1"] for row in rows], "k.-", markersize=3)
    label = f"published after {published['epochs']} epochs"
    below.axhline(published["top1"], color="#c23b22", linestyle="--", linewidth=1, label=label)
    below.set_ylabel("top-1, %")
    below.set_xlabel("epoch")
    below.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def write(found: dict[str, Any], options: str = "") -> None:
    """Replace these entries of the JSON file; `options` are the command's."""
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    conditions = {
        "command": f"python docs/benchmarks/vit_lite.py --data-dir DIR{options}",
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine()}, load average {os.getloadavg()[2]:.0f} at the end",
        "versions": versions(),
        "recipe": RECIPE,
        "published": PUBLISHED,
    }
    RESULT.write_text(json.dumps(before | conditions | found, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Train, compare or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="CIFAR-10 as folders of images")
    parser.add_argument("--precision", choices=CONFIGS, default="bf16", help="[%(default)s]")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "vit_lite", help="of the runs [%(default)s]")
    parser.add_argument(
        "--segment-minutes", type=float, default=30, help="of a layout, its start included [%(default)s]"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no segment starts")
    parser.add_argument("--control", action="store_true", help="compare a few steps with the same steps in one layout")
    parser.add_argument("--control-steps", type=int, default=60, help="of each of its two runs [%(default)s]")
    parser.add_argument("--picture", action="store_true", help="draw what was measured")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    if args.picture:
        return draw(json.loads(RESULT.read_text()), PICTURE)
    if args.data_dir is None:
        parser.error("--data-dir is missing")
    data = args.data_dir.resolve()
    if args.control:
        train_control(folder / "control", data, args.control_steps)
        return write({"control": of_control(folder / "control")})
    train_in_segments(folder / "run", args.precision, data, 60 * args.segment_minutes, time.time() + 60 * args.minutes)
    write(of_run(folder / "run"), f" --segment-minutes {args.segment_minutes:g}")


if __name__ == "__main__":
    main()
