"""A block of a ViT with tokens first, (N, B, C), next to timm's with images first, (B, N, C): forward and backward.

    OMP_NUM_THREADS=1 .venv/bin/python docs/benchmarks/batch_second.py [--device cuda] [--output FILE]

The layout is the "batch-second" one of Meta AI's account of faster ViT training (2022), where `nn.MultiheadAttention`
asks for it. Norms and MLP are the same in both; attention reads its heads from the other layout. Both blocks have the
same weights, and their outputs and gradients are compared first. They take turns; the fastest turn of each counts, in
processor time on a CPU. It writes docs/benchmarks/batch_second.json; results_page.py makes the table. The experiment
stays out of ds_vit unless it is 3 % faster.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block

sys.path.extend([str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)])
from ten_epochs import machine  # in this folder

from ds_vit.tools.bench import seconds_of, versions

# model → width, heads, tokens with the class token, images
MODELS = {"ViT-Ti/16": (192, 3, 197, 16), "ViT-S/16": (384, 6, 197, 8), "ViT-B/16": (768, 12, 197, 4)}
IMAGES_ON_A_GPU = 128


class TokensFirst(torch.nn.Module):
    """timm's attention on (N, B, C)."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        """(N, B, C) → (N, B, C); a ViT passes no mask."""
        tokens, images, width = x.shape
        q, k, v = self.qkv(x).view(tokens, images, 3, self.num_heads, -1).permute(2, 1, 3, 0, 4).unbind(0)
        x = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.permute(2, 0, 1, 3).reshape(tokens, images, width))


def pair(
    width: int, heads: int, tokens: int, images: int, dtype: torch.dtype, device: str
) -> dict[str, tuple[Block, torch.Tensor]]:
    """Both blocks with the same weights, each with the same input in its layout."""
    torch.manual_seed(0)
    first = Block(width, heads, qkv_bias=True).to(device, dtype)
    second = copy.deepcopy(first)
    second.attn = TokensFirst(second.attn)
    x = torch.randn(images, tokens, width, device=device, dtype=dtype)
    inputs = [one.clone().requires_grad_() for one in (x, x.transpose(0, 1).contiguous())]
    return {"(B, N, C), timm": (first, inputs[0]), "(N, B, C)": (second, inputs[1])}


def step(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The output; gradients of weights and input are new afterwards."""
    block.zero_grad()
    x.grad = None
    y = block(x)
    y.backward(torch.ones_like(y))
    return y


def check(blocks: dict[str, tuple[Block, torch.Tensor]]) -> None:
    """Raise unless output and gradients are the same in both layouts, in fp32."""
    (first, x), (second, z) = blocks.values()
    pairs = [(step(first, x), step(second, z).transpose(0, 1)), (x.grad, z.grad.transpose(0, 1))]
    pairs += [(a.grad, b.grad) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def main() -> None:
    """Compare, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch's name [%(default)s]")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="[%(default)s]")
    arguments = parser.parse_args()
    rows, clock = [], time.process_time if arguments.device == "cpu" else time.perf_counter
    for model, (width, heads, tokens, images) in MODELS.items():
        images = images if arguments.device == "cpu" else IMAGES_ON_A_GPU
        check(pair(width, heads, tokens, 2, torch.float32, arguments.device))
        for dtype in (torch.float32, torch.bfloat16):
            blocks = pair(width, heads, tokens, images, dtype, arguments.device)
            seconds: dict[str, list[float]] = {name: [] for name in blocks}
            for turn in range(arguments.turns):
                for name in blocks if turn % 2 else reversed(blocks):
                    seconds[name].append(seconds_of(partial(step, *blocks[name]), clock=clock))
            first, second = (min(times) for times in seconds.values())
            rows.append(
                {"block": model, "images": images, "dtype": str(dtype)[6:], "seconds": seconds, "ratio": first / second}
            )
            print(
                f"{model}, {images} images, {rows[-1]['dtype']}: (N, B, C) gives {first / second:.3f} times (B, N, C)"
            )
    result = {
        "command": "python docs/benchmarks/batch_second.py",
        "date": datetime.date.today().isoformat(),
        "machine": machine() if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "versions": versions(),
        "blocks": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
