"""Floating-point operations of a timm ViT, counted on the meta device from the shapes of its matrix products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_vit.models.layers import take_apart
from ds_vit.models.zoo import TimmViT, image_size


def forward_flops(model: TimmViT) -> int:
    """Floating-point operations of the forward pass of one image: 2 for each multiply-add.

    Matrix products, convolutions and attention are counted; normalisation, activations and sums, a fraction of a per
    cent, are not. Half of it is what timm publishes as MACs; a training step costs three times as much.

    Args:
        model: from `create_model`, on the meta device; nothing is computed and no memory is used.
    """
    return sum(cost.flops for cost in layer_costs(model))


class LayerCost(NamedTuple):
    """What one layer costs for one image: forward FLOPs, and fp32 bytes of what its backward pass keeps."""

    flops: int
    activation_bytes: int


def layer_costs(model: TimmViT) -> list[LayerCost]:
    """The cost of each layer of `take_apart(model)`, counted on the meta device.

    Args:
        model: from `create_model`, on the meta device.
    """
    height, width = image_size(model)
    keys = torch.zeros(1, dtype=torch.int64, device="meta")
    value = (torch.empty(1, model.in_chans, height, width, device="meta"), keys)
    costs = []
    for layer in take_apart(model):
        layer.eval()
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[id(tensor.untyped_storage())] = tensor.numel() * tensor.element_size()
            return tensor

        weights = sum(p.numel() * p.element_size() for p in layer.parameters())
        # With gradients on: without, torch 2.15's module tracker fails on the expanded latent of attention pooling.
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            value = layer(value)
        costs.append(LayerCost(counter.get_total_flops(), max(0, sum(kept.values()) - weights)))
    return costs
