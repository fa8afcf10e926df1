"""Draw the promise: the loss curves of eight layouts on top of each other, and how far each is from the first.

    .venv/bin/python docs/benchmarks/curves_picture.py --output docs/images/curves.svg

Each layout trains the same small ViT on the digits through the launcher, on CPU ranks in fp32, with crops, mixup and
drop-path on; one of them is stopped half-way and goes on in another layout. Takes some minutes, and matplotlib
(launch/setup.sh plot).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_vit.config.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
GLOBAL_BATCH = 64
COMMON = (
    *("--recipe", str(ROOT / "launch" / "recipes" / "digits.yaml"), "--workers", "0", "--val-split", ""),
    *("--model-kwargs", "patch_size=4", "embed_dim=96", "depth=6", "num_heads=4"),
    *("--mixup", "0.2", "--drop-path", "0.1"),
    *("--warmup-epochs", "1", "--log-interval", "1", "--checkpoint-interval", "0"),
)
# Name → ranks, ZeRO stage, micro-batch, further flags.
LAYOUTS = {
    "1 rank": (1, 0, 64, ()),
    "ZeRO-1, 2 ranks": (2, 1, 32, ()),
    "ZeRO-2, 2 ranks, 4 micro-batches": (2, 2, 8, ()),
    "ZeRO-3, 4 ranks": (4, 3, 16, ()),
    "2 tensor slices": (2, 1, 64, ("--tp", "2")),
    "2 pipeline stages": (2, 1, 16, ("--pp", "2")),
    "2 stages x 2 slices": (4, 1, 16, ("--pp", "2", "--tp", "2", "--grad-checkpointing")),
}
RESUMED = "ZeRO-3, 2 ranks; stopped, then 1 rank"


def train(folder: Path, ranks: int, stage: int, micro_batch: int, words: tuple[str, ...], steps: int) -> None:
    """One run through DeepSpeed's launcher, its words in a file beside it."""
    degrees = dict(zip(words[::2], words[1::2], strict=False))
    replicas = ranks // (int(degrees.get("--pp", 1)) * int(degrees.get("--tp", 1)))
    accumulation = GLOBAL_BATCH // (replicas * micro_batch)
    command = [Path(sys.executable).parent / "deepspeed", "--quiet", "--num_accelerators", ranks]
    command += [ROOT / "launch/train.py"]
    command += ["--deepspeed_config", ROOT / f"ds_configs/cpu_zero{stage}_fp32.json", *COMMON, *words]
    command += ["-b", micro_batch, "--grad-accum-steps", accumulation, "--max-steps", steps, "--output", folder]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(ROOT)
    with folder.with_suffix(".log").open("a") as log:
        subprocess.run([*map(str, command)], check=True, env=environ, stdout=log, stderr=log)


def curves(parent: Path, steps: int) -> dict[str, list[float]]:
    """The losses of every layout."""
    found = {}
    for number, (name, (ranks, stage, micro_batch, words)) in enumerate(LAYOUTS.items()):
        print(name, file=sys.stderr)
        train(parent / f"{number}", ranks, stage, micro_batch, words, steps)
        found[name] = [row["loss"] for row in RunFolder(parent / f"{number}").rows("train")]
    print(RESUMED, file=sys.stderr)
    resumed = parent / "resumed"
    train(resumed, 2, 3, 32, ("--checkpoint-interval", str(steps // 2)), steps // 2)
    train(resumed, 1, 1, 64, ("--resume", "auto", "--checkpoint-interval", "0"), steps)
    found[RESUMED] = [row["loss"] for row in RunFolder(resumed).rows("train")]
    return found


def draw(found: dict[str, list[float]], path: Path) -> None:
    """The curves above, the deviations below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    (_, first), *_ = found.items()
    for number, (name, losses) in enumerate(found.items()):
        steps = range(1, len(losses) + 1)
        width = 1.2 + 0.9 * (len(found) - number)  # those behind are wider, so that all are seen
        above.plot(steps, losses, linewidth=width, label=name)
        apart = [max(abs(a - b) / abs(b), 1e-9) for a, b in zip(losses, first, strict=True)]
        if number:
            below.semilogy(steps, apart, linewidth=1, color=f"C{number}")
    above.set_ylabel("training loss")
    above.set_title(f"{len(found)} layouts, one curve", loc="left", fontsize=11, fontweight="bold")
    above.legend(fontsize=8, ncols=2, frameon=False)
    below.set_ylim(5e-10, 1e-1)
    below.set_ylabel("relative deviation\nfrom the first")
    below.set_xlabel("optimizer step")
    below.grid(alpha=0.3)
    above.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Train, draw, and print the largest deviation of each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="FILE", type=Path, help="png, svg or pdf")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps [%(default)s]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = curves(Path(folder), arguments.steps)
    draw(found, arguments.output)
    first = found["1 rank"]
    for name, losses in found.items():
        print(f"{name}: {max(abs(a - b) / abs(b) for a, b in zip(losses, first, strict=True)):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
