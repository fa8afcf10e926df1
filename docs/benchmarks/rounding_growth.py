"""How the rounding of a layout grows with training: ours against ours, and plain timm against plain timm.

    .venv/bin/python docs/benchmarks/rounding_growth.py

The quickstart's model on the digits, for 100 steps, at its own learning rate and at a tenth of it. "ds_vit" compares
ZeRO-1 on one rank with ZeRO-3 on two, with the recipe's augmentation; "plain timm" compares one process that takes a
batch whole with the same process taking it in two halves, without augmentation. Both comparisons start from a
deviation of one rounding error. Printed is the relative deviation of the loss.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import timm  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from curves import train_in, train_rows  # noqa: E402
from ranks import RankPool  # noqa: E402
from torchvision.transforms.functional import normalize, to_tensor  # noqa: E402

from ds_vit.data.sampler import SampleOrder  # noqa: E402
from ds_vit.data.sources.datasets import open_source  # noqa: E402
from ds_vit.optim.schedules import LearningRate  # noqa: E402

RECIPE = ROOT / "launch" / "recipes" / "digits.yaml"
STEPS, BATCH, WARMUP, HORIZON = 100, 64, 88, 880  # the recipe's 4 and 40 epochs of 22 steps
SHOWN = (1, 10, 20, 40, 60, 80, 100)


def ours(pool: RankPool, lr: float, world_size: int, stage: int) -> list[float]:
    """The losses of the recipe under a ZeRO stage, on 1 or 2 ranks with one global batch."""
    words = ["--recipe", RECIPE, "--lr", lr, "--max-steps", STEPS, "--log-interval", 1, "--workers", 0]
    words += ["--eval-interval", 0, "--deepspeed_config", ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"]
    return [row["loss"] for row in train_rows(train_in(pool, world_size, [*words, "-b", BATCH // world_size]))]


def plain(lr: float, pieces: int) -> list[float]:
    """The losses of timm and torch alone, one process, each batch in one or more pieces."""
    recipe = yaml.safe_load(RECIPE.read_text())
    torch.manual_seed(0)
    model = timm.create_model(recipe["model"], num_classes=10, img_size=recipe["img_size"], **recipe["model_kwargs"])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = LearningRate("cosine", lr, HORIZON, WARMUP)
    source = open_source("digits", None, "train")
    order = SampleOrder(len(source), BATCH, seed=42)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = schedule.lr(step)
        indices, _ = order.rows(step, range(BATCH))
        images = [source.image(int(i)).resize((recipe["img_size"],) * 2) for i in indices]
        pixels = torch.stack([normalize(to_tensor(image), [0.5] * 3, [0.5] * 3) for image in images])
        labels = torch.tensor([source.target(int(i)) for i in indices])
        total = 0.0
        for x, y in zip(pixels.chunk(pieces), labels.chunk(pieces), strict=True):
            loss = torch.nn.functional.cross_entropy(model(x), y, label_smoothing=0.1) / pieces
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> int:
    """Print one table: rows are comparisons, columns are steps."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    pool = RankPool()
    print("| | " + " | ".join(f"step {step}" for step in SHOWN) + " |\n|" + "---|" * (len(SHOWN) + 1))
    for lr in (2e-3, 2e-4):
        pairs = {
            "ds_vit, ZeRO-1 × 1 rank against ZeRO-3 × 2": (ours(pool, lr, 1, 1), ours(pool, lr, 2, 3)),
            "plain timm, whole against halves": (plain(lr, 1), plain(lr, 2)),
        }
        for name, (a, b) in pairs.items():
            found = [abs(a[step - 1] - b[step - 1]) / abs(a[step - 1]) for step in SHOWN]
            print(f"| {name}, lr {lr:g} | " + " | ".join(f"{value:.0e}" for value in found) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
