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


def layer_norms(zero_map: ZeroMap, grads: Sequence[torch.Tensor]) -> dict[str, float]:
    """Norm of each layer's gradient, inf where it is not finite (a collective of all ranks).

    Args:
        zero_map: the map of this rank.
        grads: of each shard, flat.
    """
    own = (
        (segment.name, float(segment.of(grad).double().square().sum()))
        for shard, grad in zip(zero_map.shards, grads, strict=True)
        for segment in shard.segments
        if zero_map.counts(segment)
    )
    return layer_norms_of(zero_map, own)


def layer_norms_of(zero_map: ZeroMap, squares: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Norm of each layer, inf where it is not finite (a collective of all ranks).

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
    return {layer: math.sqrt(s) if math.isfinite(s) else math.inf for layer, s in zip(rows, sums.tolist(), strict=True)}
