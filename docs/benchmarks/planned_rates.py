"""The planner's rates beside published ones, and an epoch's hours by the size of the model, as tables of Markdown.

    DS_ACCELERATOR=cpu .venv/bin/python docs/benchmarks/planned_rates.py

Those of docs/planning.md, which says where the published figures are from. Nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from typing import Any

from ds_vit.cli import main as command

SIZES = {
    "86M": "vit_base_patch16_224",
    "0.3B": "vit_large_patch16_224",
    "0.6B": "vit_huge_patch14_224",
    "1.0B": "vit_giant_patch14_224",
    "1.8B": "vit_gigantic_patch14_224",
    "3B": "vit_3b_patch14_224",
    "e, 3.9B": "vit_e_patch14_224",
    **{f"{size}B": f"vit_{size}b_patch14_224" for size in (5, 10, 15, 22, 25, 60, 120)},
}
IMAGES = 1_281_167  # of ImageNet-1k's training split


def layouts(model: str, gpus: int, gpu: str, *words: str) -> list[dict[str, Any]]:
    """Those that fit, the fastest first."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        command(["plan", "--model", model, "--gpus", str(gpus), "--gpu", gpu, *words, "--json"])
    return json.loads(out.getvalue())["layouts"]


def row(*cells: object) -> None:
    """Of a table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def main() -> int:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    row("", "published", "planned", "planned / published")
    row(*["---"] * 4)
    for what, model, gpu, published in (
        ("NeMo ViT-g/14, 8 H100, images/s per GPU (29 % MFU)", "vit_giant_patch14_224", "h100", 178),
        ("NeMo ViT-g/14, 8 A100 (44 %)", "vit_giant_patch14_224", "a100", 87),
        ("PLSC ViT-B/16, 8 A100", "vit_base_patch16_224", "a100", 448),
    ):
        best = layouts(model, 8, gpu)[0]
        rate = best["images_per_second"] / 8
        row(what, published, f"{rate:,.0f} ({100 * best['mfu']:.0f} %)", f"{rate / published:.2f}")
    for what, model, gpus, batch, published in (
        ("stable-pretraining ViT-L/16, 2 H200, two views", "vit_large_patch16_224", 2, 256, (960, 930, 703)),
        ("stable-pretraining ViT-e/14, 8 H200, two views", "vit_e_patch14_224", 8, 512, (225, 214, 83)),
    ):
        words = ("--global-batch", str(batch), "--pp", "1", "--tp", "1")
        by_stage = [layouts(model, gpus, "h200", *words, "--zero", stage)[0] for stage in ("2", "2", "3")]
        rates = [one["images_per_second"] / 2 for one in by_stage]
        row(
            f"{what} per image, DDP / FSDP2 / ZeRO-3",
            " / ".join(map(str, published)),
            " / ".join(f"{rate:,.0f}" for rate in rates),
            " / ".join(f"{rate / other:.2f}" for rate, other in zip(rates, published, strict=True)),
        )
    print()
    row("", *SIZES)
    row(*["---"] * (len(SIZES) + 1))
    best = {size: layouts(model, 128, "a100", "--link", "ib200")[0] for size, model in SIZES.items()}
    row("hours", *(f"{IMAGES / one['images_per_second'] / 3600:.2g}" for one in best.values()))
    row("MFU, %", *(f"{100 * one['mfu']:.0f}" for one in best.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
