"""Run folders of each task as an earlier version left them, in `tests/old_runs`.

    .venv/bin/python tests/support/old_runs.py [TASK …]

makes them. Each archive has `run`, which ended at step 8 of its schedule, the rows of the same training to step 12,
`whole.jsonl`, and what its command names. The models have some thousand parameters.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "old_runs"
ROOT = FOLDER.parents[1]
STOPPED, STEPS = 8, 12

TINY = ["--model", "vit_tiny_patch16_224", "--img-size", "8"]
TINY += ["--model-kwargs", "patch_size=4", "embed_dim=8", "depth=2", "num_heads=2"]
TEXT = ["--dataset", "glyphs", "--text-width", "8", "--text-depth", "1", "--text-heads", "1", "--embed-dim", "8"]
TEXT += ["--context-length", "24"]
TASKS = {
    "classification": [*TINY, "--dataset", "digits", "--set", "optimizer.type=Lamb", "--model-ema"],
    "distillation": [*TINY, "--dataset", "digits", "--kd-checkpoint", "teacher", "--mixup", "0.8"],
    "mae": ["--task", "mae", *TINY, "--dataset", "digits", "--decoder-dim", "8", "--decoder-depth", "1"],
    "clip": ["--task", "clip", *TINY, *TEXT],
    "siglip": ["--task", "siglip", *TINY, *TEXT],
    "bridgetower": ["--task", "bridgetower", "--model", "local-dir:pretrained", "--pretrained", "--dataset", "glyphs"],
    "dino": ["--task", "dino", *TINY, "--dataset", "digits", "--local-crops-size", "4", "--prototypes", "16"],
}
TASKS["classification"] += ["--drop-path", "0.2"]
TASKS["mae"] += ["--decoder-heads", "1"]
TASKS["bridgetower"] += ["--context-length", "24", "--freeze", "bridgetower.*"]
TASKS["dino"] += ["--local-crops-number", "2", "--head-hidden-dim", "8", "--head-bottleneck-dim", "8"]


LENGTH = ["--epochs", "2", "-b", "128", "--workers", "0", "--log-interval", "1", "--checkpoint-interval", "8"]


def command(task: str, output: str, steps: int) -> list[str]:
    """The words of a run of a task that ends at a step of its schedule's two epochs."""
    config = ROOT / "ds_configs" / "cpu_zero1_fp32.json"
    return [*TASKS[task], *LENGTH, "--max-steps", str(steps), "--output", output, "--deepspeed_config", str(config)]


def _train(folder: Path, words: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, str(ROOT / "launch" / "train.py"), *words], cwd=folder, check=True, env=environment)


def _write_pretrained(folder: Path) -> None:
    import torch
    from bridge_towers import tiny_model

    model = tiny_model(0.1, features=8, num_attention_heads=1, intermediate_size=8)
    # The towers have at least 64 features: of two values each and frozen, they take little room in the archive.
    torch.manual_seed(0)
    for parameter in model.bridgetower.parameters():
        parameter.data.copy_(0.1 * torch.randn_like(parameter).sign() + (parameter.ndim == 1))
    model.save_pretrained(folder)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for task in sys.argv[1:] or TASKS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if task == "bridgetower":
                _write_pretrained(folder / "pretrained")
            if task == "distillation":
                _train(folder, command("classification", "teacher", 2))
            _train(folder, command(task, "whole", STEPS))
            _train(folder, command(task, "run", STOPPED))
            shutil.copy(folder / "whole" / "metrics.jsonl", folder / "whole.jsonl")
            shutil.rmtree(folder / "whole")
            shutil.rmtree(folder / "teacher" / "checkpoints", ignore_errors=True)
            with tarfile.open(FOLDER / f"{task}.tar.xz", "w:xz", preset=9) as archive:
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and path.suffix not in (".html", ".png") and "tensorboard" not in path.parts:
                        archive.add(path, path.relative_to(folder))
        print(task, (FOLDER / f"{task}.tar.xz").stat().st_size)


if __name__ == "__main__":
    main()
