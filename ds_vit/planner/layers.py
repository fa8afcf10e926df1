"""The layers of a model as one rank has them, on the meta device: cut, in the types of the run, frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ds_vit.models import (
    BlockLayer,
    GoingBack,
    Kept,
    Layer,
    TimmViT,
    cast_block_buffers,
    freeze,
    kept_by_layers,
    made_going_back,
    norms_in_fp32,
)
from ds_vit.optim.build import STATES_OF_FALLBACK
from ds_vit.parallel.tensor import TensorParallel, cut_layer
from ds_vit.parallel.tensor.region import Entered
from ds_vit.planner.memory import LayerMemory


def as_a_rank_has_them(
    layers: Sequence[Layer],
    *,
    tp: int,
    sequence_parallel: bool,
    class_parallel: bool,
    compute: str,
    norms_fp32: bool,
    frozen: frozenset[str] = frozenset(),
) -> list[Layer]:
    """The layers, changed in place: of the first rank of a tensor-parallel group.

    Args:
        layers: all of a model, whole.
        tp: tensor-parallel degree.
        sequence_parallel: between the cut parts each rank holds a share of the tokens.
        class_parallel: the classifier is cut over classes.
        compute: torch's name of the weights' type.
        norms_fp32: norms compute in fp32.
        frozen: timm names of what is not trained.
    """
    group = TensorParallel(0, tp, None, sequence_parallel)
    for layer in layers:
        freeze(layer, frozen)
        if tp > 1:
            cut_layer(layer, group, class_parallel=class_parallel)
        as_computed(layer, compute, norms_fp32=norms_fp32)
    return list(layers)


def as_computed(layer: Layer, compute: str, *, norms_fp32: bool) -> None:
    """Give a layer the types that it has in the run, in place."""
    if compute == "float32":
        return
    dtype = getattr(torch, compute)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    cast_block_buffers(layer, dtype)
    if norms_fp32:
        norms_in_fp32(layer)


def memory_of_layers(
    model: TimmViT, layers: Sequence[Layer], *, compute: str, states: int, fallback: frozenset[str], trains: bool = True
) -> list[LayerMemory]:
    """What each layer of a rank has and keeps.

    Args:
        model: the whole one, for its images.
        layers: from `as_a_rank_has_them`.
        compute: torch's name of the weights' type.
        states: numbers that the optimizer keeps of an element.
        fallback: timm names of which it keeps another number.
        trains: False for evaluation alone, which keeps nothing.
    """
    dtype = getattr(torch, compute)
    if not trains:
        kept_of_none, back_of_none = Kept(0, None, 0, 0, 0, 0), GoingBack(())
        sizes_of_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        return [LayerMemory(size, 0, 0, kept_of_none, back_of_none, False) for size in sizes_of_layers]
    kept, back = kept_by_layers(model, layers, dtype), made_going_back(model, layers, dtype)
    found = []
    for layer, of_layer, made in zip(layers, kept, back, strict=True):
        sizes = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.requires_grad}
        found.append(
            LayerMemory(
                parameters=sum(p.numel() for p in layer.parameters()),
                trained=sum(sizes.values()),
                states=num_states(states, fallback, sizes),
                kept=of_layer,
                back=made,
                is_block=isinstance(layer, BlockLayer),
            )
        )
    return found


def cut_regions(layers: Sequence[Layer]) -> list[int]:
    """Of each layer, how many cut parts it has, after each of which the tokens are summed over the group."""
    return [
        sum(isinstance(module, Entered) for module in layer.modules()) if isinstance(layer, BlockLayer) else 0
        for layer in layers
    ]


def num_states(states: int, fallback: frozenset[str], sizes: Mapping[str, int]) -> int:
    """How many numbers an optimizer keeps of parameters, by their elements; the other arguments are as above."""
    return sum(size * (STATES_OF_FALLBACK if name in fallback else states) for name, size in sizes.items())
