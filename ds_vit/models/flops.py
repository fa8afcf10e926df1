"""Floating-point operations of a timm ViT, counted on the meta device from the shapes of its matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.flop_counter import FlopCounterMode

from ds_vit.models.activations import kept_by_layers
from ds_vit.models.alike import look_at_each
from ds_vit.models.layers import Layer, take_apart
from ds_vit.models.zoo import TimmViT


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
    for layer, flops in zip(layers, _layer_flops(model, layers), strict=True):
        sizes = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.ndim > 1}
        trained = sum(size for name, size in sizes.items() if name not in frozen)
        goes_back = goes_back or any(name not in frozen for name, _ in layer.named_parameters())
        forward += flops
        training += flops * (1 + goes_back + (trained / sum(sizes.values()) if sizes else goes_back))
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
    layers = layers or take_apart(model)
    kept = [kept.bytes for kept in kept_by_layers(model, layers)]
    return [LayerCost(*cost) for cost in zip(_layer_flops(model, layers), kept, strict=True)]


def _layer_flops(model: TimmViT, layers: Sequence[Layer]) -> list[int]:
    for layer in layers:
        layer.eval()
    return [flops for flops, _ in look_at_each(model, layers, _count, images=1)]


def _count(layer: Layer, value: Any) -> tuple[int, Any]:
    """A layer's FLOPs, and what it makes of `value`."""
    # With gradients on: without, torch 2.15's module tracker fails on the expanded latent of attention pooling.
    with FlopCounterMode(display=False) as counter:
        value = layer(value)
    return counter.get_total_flops(), value
