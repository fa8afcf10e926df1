"""Make the table of docs/performance.md: what each way of --grad-checkpointing keeps, and what it computes twice.

    .venv/bin/python docs/benchmarks/recomputation.py --model vit_base_patch16_224 --batch-size 32

Counted on the meta device, in bf16 with norms in fp32, without weights: the bytes that wait for the backward pass;
those of the fullest moment, with what is live of the blocks that run again; and the matrix products and attention of a
forward and a backward pass (torch's FlopCounterMode). The last rows are ways that the flag has not: torchtitan's, which
keeps attention and every second product, and attention alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_vit.models.checkpointing import is_expensive, recompute_all, recompute_selectively
from ds_vit.models.conversions import cast_block_buffers, norms_in_fp32
from ds_vit.models.layers import BlockLayer, take_apart
from ds_vit.models.sequential import run_layers
from ds_vit.models.zoo import ModelSpec, create_model, image_size
from ds_vit.planner.counting import kept_by_layers, saved_storages


def keeping(choose: Callable[[], Callable[[Any], bool]]) -> Callable:
    """A checkpoint function that keeps what the operations give that are chosen; `choose` is asked for each block."""

    def contexts() -> Any:
        chosen = choose()
        return create_selective_checkpoint_contexts(lambda context, operation, *args, **kwargs: chosen(operation))

    return partial(recompute_all, context_fn=contexts, respect_saved_tensors_hooks=True)


def is_attention(operation: Any) -> bool:
    """Whether it is a fused attention."""
    return is_expensive(operation) and "attention" in str(operation)


def every_second() -> Callable[[Any], bool]:
    """Attention, and of the other expensive operations the first, the third and so on."""
    numbers = itertools.count()
    return lambda operation: is_attention(operation) or (is_expensive(operation) and next(numbers) % 2 == 0)


WAYS = {
    "(nothing)": (0, None),
    "`--grad-checkpointing`, or `full`": (1, recompute_all),
    "`--grad-checkpointing 2`": (2, recompute_all),
    "`--grad-checkpointing 4`": (4, recompute_all),
    "`--grad-checkpointing selective`": (1, recompute_selectively),
    "every second product, and attention": (1, keeping(every_second)),
    "attention alone": (1, keeping(lambda: is_attention)),
}


def fused_attention(*tensors: torch.Tensor, **_: Any) -> torch.Tensor:
    """In the place of torch's, which would write the scores out on the meta device."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors)[0]


def live_bytes(kept: list, interval: int, function: Callable | None) -> int | None:
    """Bytes of an image that are live of a group of blocks that run again; None for a way that the flag has not."""
    if not interval:
        return 0
    if function not in (recompute_all, recompute_selectively):
        return None
    expensive = kept[0].expensive_saved if function is recompute_selectively else 0
    return interval * kept[-1].bytes - kept[0].given_saved - expensive


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch-size", type=int, default=32)
    asked = parser.parse_args()
    model = create_model(ModelSpec(asked.model, num_classes=1000))
    layers = take_apart(model)
    for layer in layers:
        layer.train().to(torch.bfloat16)
        cast_block_buffers(layer, torch.bfloat16)
        norms_in_fp32(layer)
    found = kept_by_layers(layers)
    blocks = [kept for kept, layer in zip(found, layers, strict=True) if isinstance(layer, BlockLayer)]
    weights = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    images = torch.empty(asked.batch_size, model.in_chans, *image_size(model), dtype=torch.bfloat16, device="meta")
    keys = torch.empty(asked.batch_size, dtype=torch.int64, device="meta")
    torch.nn.functional.scaled_dot_product_attention = fused_attention
    print("| | waits | fullest moment | computed | more |\n|---|---|---|---|---|")
    once = 0
    for name, (interval, function) in WAYS.items():

        def forward(interval: int = interval, function: Any = function) -> torch.Tensor:
            return run_layers(layers, (images, keys), interval, function)

        saved, _ = saved_storages(forward, weights)
        waits = sum(storage.nbytes() for storage in saved.values())
        with FlopCounterMode(display=False) as counter:
            forward().sum().backward()
        flops = counter.get_total_flops()
        once = once or flops
        live = live_bytes(blocks, interval, function)
        fullest = "" if live is None else f"{(waits + asked.batch_size * live) / 1e9:.2f} GB"
        print(f"| {name} | {waits / 1e9:.2f} GB | {fullest} | {flops / 1e12:.2f} TFLOP | {(flops - once) / once:.1%} |")


if __name__ == "__main__":
    main()
