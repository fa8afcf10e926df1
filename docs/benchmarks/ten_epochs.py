"""Ten epochs of DeiT III's recipe on a tenth of CIFAR-10, in timm's train.py and in launch/train.py.

    python docs/benchmarks/ten_epochs.py --timm-train FILE --data-dir DIR [--seeds 5] [--jobs 1]
    python docs/benchmarks/ten_epochs.py [--write]

FILE is train.py of https://github.com/huggingface/pytorch-image-models; the archives of PyPI do not have it. It runs on
the installed timm. DIR has the folders train and test, each with a folder of images per class. The programs take turns;
a run is one process on one core. Finished runs are kept in --folder. The figures go to docs/benchmarks/ten_epochs.json.
The second command prints the tables of these figures, and --write puts them into docs/from_timm.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_tables import between, table  # in this folder

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "from_timm.md"
PROGRAMS = ("timm", "ds_vit")
TRAIN_IMAGES, TEST_IMAGES = 500, 200  # of each class
VIT = ("patch_size=8", "embed_dim=96", "depth=6", "num_heads=3")

# Flags of both programs: those of launch/recipes/deit3_small.yaml, for a smaller model and run.
SHARED = (
    *("--model", "deit3_small_patch16_224", "--num-classes", "10", "--img-size", "32", "--drop-path", "0.05"),
    *("-b", "64", "-vb", "250", "-j", "0", "--log-interval", "50"),
    *("--lr", "4e-3", "--weight-decay", "0.05", "--clip-grad", "1.0", "--sched", "cosine"),
    *("--warmup-epochs", "1", "--warmup-lr", "1e-6", "--min-lr", "1e-5"),
    *("--bce-loss", "--bce-target-thresh", "0", "--smoothing", "0", "--mixup", "0.8", "--cutmix", "1.0"),
    *("--aa", "3a", "--color-jitter", "0.3", "--train-interpolation", "bicubic", "--crop-pct", "1.0"),
)


class Difference(NamedTuple):
    """Flags that differ: timm's words, those here, and the reason."""

    timm: tuple[str, ...]
    ds_vit: tuple[str, ...]
    why: str


DIFFERENCES = (
    Difference(
        ("--opt", "lamb"),
        (
            *("--deepspeed_config", "ds_configs/cpu_zero1_fp32.json"),
            *("--set", "optimizer.type=Lamb", "optimizer.params.eps=1e-6"),
        ),
        "the optimizer is in the DeepSpeed JSON; 1e-6 is the `eps` of timm's LAMB",
    ),
    Difference(("--sched-on-updates",), (), "always on here"),
    Difference(
        ("--mixup-mode", "pair"), (), "each pair always has its own draw here; timm's default is one draw per batch"
    ),
    Difference(
        ("--model-kwargs", *VIT, "img_size=32"), ("--model-kwargs", *VIT), "`--img-size` sets the model's size here"
    ),
)

# Starts an unmodified train.py on the CPU. Commits without --device have the GPU as a default argument.
START = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("train", sys.argv[1])
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
train.parser.set_defaults(device="cpu")
cuda, cpu = torch.device("cuda"), torch.device("cpu")
for function in (train.train_one_epoch, train.validate):
    function.__defaults__ = tuple(cpu if one == cuda else one for one in function.__defaults__ or ())
del sys.argv[0]
train.main()
"""


def command(program: str, images: Path, output: Path, seed: int, epochs: int, timm_train: Path) -> list[str]:
    """The command line of a run whose results are written to the folder `output`."""
    own = [word for one in DIFFERENCES for word in (one.timm if program == "timm" else one.ds_vit)]
    start = ["-c", START, timm_train] if program == "timm" else ["launch/train.py"]
    folder = ["--output", output.parent, "--experiment", output.name] if program == "timm" else ["--output", output]
    words = [*start, "--data-dir", images, *SHARED, *own, "--epochs", epochs, "--seed", seed, *folder]
    return [str(word) for word in words]


def top1(program: str, output: Path) -> float:
    """Top-1 on the test images after the last epoch, in percent."""
    if program == "timm":
        with (output / "summary.csv").open() as file:
            return float(list(csv.DictReader(file))[-1]["eval_top1"])
    return float(json.loads((output / "summary.json").read_text())["last_top1"])


def measure(program: str, output: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Train, unless the folder has a finished run; accuracy, seconds and memory of the whole process."""
    done = output.with_suffix(".json")
    if not done.exists():
        shutil.rmtree(output, ignore_errors=True)
        environ = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        load, started = os.getloadavg()[0], time.perf_counter()
        with output.with_suffix(".log").open("w") as log:
            child = subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=environ, stdout=log, stderr=log)
            _, status, usage = os.wait4(child.pid, 0)  # the resources of this child only
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{program} ended with code {child.returncode}; {log.name} says why")
        figures = {
            "top1": top1(program, output),
            "seconds": time.perf_counter() - started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
            "load": load,
        }
        done.write_text(json.dumps({key: round(value, 3) for key, value in figures.items()}))
    return json.loads(done.read_text())


def copy_images(source: Path, folder: Path) -> None:
    """The first images of each class of CIFAR-10, in the folders train and val."""
    for split, name, number in (("train", "train", TRAIN_IMAGES), ("test", "val", TEST_IMAGES)):
        for of_class in sorted(path for path in (source / split).iterdir() if path.is_dir()):
            target = folder / name / of_class.name
            target.mkdir(parents=True, exist_ok=True)
            for image in sorted(of_class.iterdir())[:number]:
                shutil.copy(image, target)


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """All runs, the programs in turns, and what they ran on."""
    folder, timm_train = args.folder.resolve(), args.timm_train.resolve()
    copy_images(args.data_dir, folder / "images")
    runs = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for seed in range(args.seeds):
            for program in PROGRAMS if seed % 2 == 0 else PROGRAMS[::-1]:
                output = folder / f"{program}-{seed}"
                argv = command(program, folder / "images", output, seed, args.epochs, timm_train)
                runs.append((program, seed, pool.submit(measure, program, output, argv)))
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "torchvision", "timm", "deepspeed")},
        "timm_train": {
            "commit": args.timm_commit,
            "sha256": hashlib.sha256(timm_train.read_bytes()).hexdigest(),
        },
        "epochs": args.epochs,
        "jobs": args.jobs,
        "commands": {
            program: command(program, Path("IMAGES"), Path("RUNS/0"), 0, args.epochs, Path("train.py"))
            for program in PROGRAMS
        },
        "runs": [{"program": program, "seed": seed, **run.result()} for program, seed, run in runs],
    }


def machine() -> str:
    """Processor, number of cores, memory."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.machine())
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model}, {os.cpu_count()} cores, {gigabytes:.0f} GB"


def tables(found: Mapping[str, Any]) -> str:
    """Figures of both programs, and the flags that differ."""
    timm, ours = ([run for run in found["runs"] if run["program"] == program] for program in PROGRAMS)
    rows = []
    for name, key, unit, digits in (
        ("top-1, %", "top1", 1.0, 1),
        ("CPU time, s", "cpu_seconds", 1.0, 0),
        ("wall time, s, median", "seconds", 1.0, 0),  # other programs may have run during some
        ("peak resident memory, MB", "peak_bytes", 1e6, 0),
    ):
        both = [[run[key] / unit for run in runs] for runs in (timm, ours)]
        middle = [statistics.median(values) if key == "seconds" else statistics.mean(values) for values in both]
        deviations = ["" if key == "seconds" else f" ± {statistics.stdev(one):,.{digits}f}" for one in both]
        cells = [f"{mean:,.{digits}f}{deviation}" for mean, deviation in zip(middle, deviations, strict=True)]
        rows.append(
            [name, *cells, f"{middle[1] - middle[0]:+.1f}" if key == "top1" else f"x {middle[1] / middle[0]:.2f}"]
        )
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    loads = [run["load"] for run in found["runs"]]
    header = f"{found['epochs']} epochs, {len(timm)} seeds, mean ± deviation"
    flags = [[code(one.timm), code(one.ds_vit), one.why] for one in DIFFERENCES]
    return "\n\n".join(
        [
            table((header, "timm", "ds_vit", "difference or ratio"), rows),
            f"{found['date']}; {found['machine']}; {found['jobs']} runs at a time; load average {min(loads):.1f} to "
            f"{max(loads):.1f} when the runs started; {versions}; `train.py` of timm's commit "
            f"{found['timm_train']['commit'][:10]}.",
            table(("flags of timm", "flags here", "why"), flags),
        ]
    )


def code(words: Sequence[str]) -> str:
    """Words as code, or nothing."""
    return f"`{' '.join(words)}`" if words else ""


def main() -> None:
    """Measure if asked to, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm-train", type=Path, metavar="FILE", help="timm's train.py; without it nothing is run")
    parser.add_argument("--timm-commit", default="unknown", help="its commit, which the figures name")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="CIFAR-10 as folders of images")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "ten_epochs", help="of the runs")
    parser.add_argument("--result", type=Path, default=RESULT, help="JSON file of the figures")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each program, 2 or more")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument("--write", action="store_true", help="into docs/from_timm.md, between its two comments")
    args = parser.parse_args()
    if (args.timm_train is None) != (args.data_dir is None):
        parser.error("--timm-train and --data-dir are given together")
    if args.timm_train:
        args.result.write_text(json.dumps(measure_all(args), indent=1) + "\n")
    text = tables(json.loads(args.result.read_text()))
    if args.write:
        PAGE.write_text(between(PAGE.read_text(), "ten epochs", text))
    else:
        print(text)


if __name__ == "__main__":
    main()
