"""Norms of gradients by layer, over all ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ds_vit.parallel.zero_map import ZeroMap


def layers_of(names: Sequence[str]) -> dict[str, str]:
    """timm name → layer, in the model's order: "embed", "blocks.0", …, "head".

    A masked autoencoder has "decoder_embed" (with the mask token) after its blocks, then "decoder_blocks.0", ….
    """
    found, layers = False, {}
    for name in sorted(names, key=lambda name: name == "mask_token"):  # before the blocks in the model, after them here
        stem = "decoder_embed" if name == "mask_token" else name
        match = re.match(r"(blocks|decoder_blocks|layers|stages)\.\d+|decoder_embed", stem)
        found = found or bool(match)
        is_behind = found or name.startswith("head")  # of a frozen model the blocks may not be among the names
        layers[name] = match[0] if match else ("head" if is_behind else "embed")
    return layers


def worst_layer(zero_map: ZeroMap, squares: Iterable[tuple[str, float]]) -> tuple[str, float]:
    """The layer with the largest gradient, or one that is not finite, and its norm or inf (a collective of all ranks).

    Args:
        zero_map: the map of this rank.
        squares: this rank's sums of squares, with the timm name of the parameter that each belongs to.
    """
    layers = layers_of(zero_map.names)
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(layers.values()))}
    sums = torch.zeros(len(rows), dtype=torch.float64)
    for name, square in squares:
        sums[rows[layers[name]]] += square
    sums = sums.to(zero_map.device)
    dist.all_reduce(sums)
    norms = [math.sqrt(total) if math.isfinite(total) else math.inf for total in sums.tolist()]
    return max(zip(rows, norms, strict=True), key=lambda item: item[1])
