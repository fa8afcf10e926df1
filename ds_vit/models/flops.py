"""Floating-point operations of a timm ViT, counted on the meta device from the shapes of its matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_vit.models.keyed_drop import KeyedDrop
from ds_vit.models.layers import BlockLayer, Layer, take_apart
from ds_vit.models.zoo import TimmViT, image_size


class Flops(NamedTuple):
    """Floating-point operations of one image: of the forward pass, and of a training step."""

    forward: int
    training: int


def count_flops(model: TimmViT, frozen: frozenset[str] = frozenset()) -> Flops:
    """Floating-point operations of one image, 2 for each multiply-add.

    Matrix products, convolutions and attention are counted; normalisation, activations and sums, a fraction of a per
    cent, are not. Half of the forward pass is what timm publishes as MACs; a training step of a model that is trained
    whole costs three times as much. Backward costs each layer as much as forward for its input's gradient, from the
    first layer that is trained on, and as much for its weights', by the share of them that is trained. Nothing goes
    back through what lies before.

    Args:
        model: from `create_model`, on the meta device; nothing is computed and no memory is used.
        frozen: names of the parameters that are not trained.
    """
    forward, training, goes_back = 0, 0.0, False
    layers = take_apart(model)
    for layer, cost in zip(layers, layer_costs(model, layers), strict=True):
        sizes = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.ndim > 1}
        trained = sum(size for name, size in sizes.items() if name not in frozen)
        goes_back = goes_back or any(name not in frozen for name, _ in layer.named_parameters())
        forward += cost.flops
        training += cost.flops * (1 + goes_back + (trained / sum(sizes.values()) if sizes else goes_back))
    return Flops(forward, round(training))


class LayerCost(NamedTuple):
    """What one layer costs for one image: forward FLOPs, and fp32 bytes of what its backward pass keeps."""

    flops: int
    activation_bytes: int


def layer_costs(model: TimmViT, layers: Sequence[Layer] | None = None) -> list[LayerCost]:
    """The cost of each layer of `take_apart(model)`, on the meta device; of blocks that are alike one is counted.

    Args:
        model: from `create_model`, on the meta device.
        layers: of `take_apart(model)`, where the caller has them; they are put into evaluation mode.
    """
    height, width = image_size(model)
    keys = torch.zeros(1, dtype=torch.int64, device="meta")
    value: Any = (torch.empty(1, model.in_chans, height, width, device="meta"), keys)
    costs: list[LayerCost] = []
    counted: tuple[Any, ...] | None = None
    for layer in layers or take_apart(model):
        layer.eval()
        looks = _looks(layer.block) if isinstance(layer, BlockLayer) else None
        # A block hands on what it was given, in the same shapes.
        if looks is not None and looks == counted:
            costs.append(costs[-1])
            continue
        cost, value = _count(layer, value)
        costs.append(cost)
        counted = looks
    return costs


def _looks(module: nn.Module) -> tuple[Any, ...]:
    """What decides on a module's cost in evaluation: its classes, settings and shapes, and not its weights' values."""
    if isinstance(module, (KeyedDrop, nn.Identity)):  # a first block without drop-path has none of it
        return ()
    settings = {name: repr(value) for name, value in vars(module).items() if not name.startswith("_")}
    shapes = [
        (name, tensor.shape)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    inner = [(name, child and _looks(child)) for name, child in module._modules.items()]
    return type(module), settings, shapes, inner


def _count(layer: Layer, value: Any) -> tuple[LayerCost, Any]:
    """A layer's cost, and what it makes of `value`."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[id(tensor.untyped_storage())] = tensor.numel() * tensor.element_size()
        return tensor

    weights = sum(p.numel() * p.element_size() for p in layer.parameters())
    # With gradients on: without, torch 2.15's module tracker fails on the expanded latent of attention pooling.
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        value = layer(value)
    return LayerCost(counter.get_total_flops(), max(0, sum(kept.values()) - weights)), value
