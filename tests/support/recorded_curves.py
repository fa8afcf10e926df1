"""The runs whose curves are recorded, and the recorder.

python tests/support/recorded_curves.py        # record anew, after a change that is meant to move the curves
"""

import json
import platform
from importlib import metadata
from pathlib import Path

import torch
from curves import train_in
from project import ROOT

FILE = Path(__file__).parent / "recorded_curves.json"
BASE = [
    *("--dataset", "digits", "--model", "vit_tiny_patch16_224", "--img-size", 16, "--workers", 0, "--max-steps", 4),
    *("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=4", "num_heads=4", "--drop-path", 0.2, "--epochs", 2),
    *("--aa", "rand-m9-mstd0.5-inc1", "--mixup", 0.8, "--cutmix", 1.0, "--reprob", 0.5, "--warmup-steps", 2),
    *("--log-interval", 1, "--lr", 2e-3),
]
# name: (ranks, ZeRO stage, micro-batch, accumulation, further flags); the global batch is always 16
RUNS = {
    "one rank": (1, 1, 16, 1, []),
    "dp2 ZeRO-3, recomputed": (2, 3, 4, 2, ["--grad-checkpointing"]),
    "dp2 ZeRO-0, averaged, layer decay": (2, 0, 8, 1, ["--model-ema", "--layer-decay", 0.7]),
    "tp2, sequence parallel, classes cut": (2, 2, 8, 2, ["--tp", 2, "--sequence-parallel", "--class-parallel", "on"]),
    "pp2, BCE": (2, 1, 4, 4, ["--pp", 2, "--bce-loss"]),
}


def environment() -> dict[str, str]:
    """What decides how kernels round."""
    versions = {name: metadata.version(name) for name in ("torch", "torchvision", "timm", "deepspeed", "numpy")}
    return {**versions, "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"}


def processor() -> str:
    """Maker, family and model: MKL has kernels of its own for each."""
    try:
        told = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    of = dict(map(str.strip, line.split(":", 1)) for line in told.splitlines() if ":" in line)
    return " ".join(of.get(key, "") for key in ("vendor_id", "cpu family", "model")).strip() or platform.processor()


def curve(ranks, world, stage, micro, accumulation, words) -> list[dict]:
    """What a run measured, without its times."""
    config = ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"
    argv = [*BASE, "-b", micro, "--grad-accum-steps", accumulation, "--deepspeed_config", config, *words]
    keys = ("kind", "step", "epoch", "loss", "lr", "grad_norm", "images_seen", "top1", "top5", "images")
    return [{key: row[key] for key in keys if key in row} for row in train_in(ranks, world, argv)]


if __name__ == "__main__":
    from ranks import RankPool

    runs = {name: curve(RankPool(), *run) for name, run in RUNS.items()}
    rows_of = {name: "[\n  " + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]" for name, rows in runs.items()}
    runs_text = ",\n ".join(f"{json.dumps(name)}: {rows}" for name, rows in rows_of.items())
    FILE.write_text(f'{{"environment": {json.dumps(environment())},\n"runs": {{\n {runs_text}\n}}}}\n')
