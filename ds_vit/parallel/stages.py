"""Where the pipeline is cut into stages; known before a process group exists."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ds_vit.config import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import Layer, balance, check_bounds, layer_costs, take_apart


def stage_bounds(config: RunConfig, model: torch.nn.Module, frozen: frozenset[str]) -> tuple[int, ...]:
    """Where the pipeline is cut: --pp-partition, or (with "auto" for the time being) balanced by FLOPs and memory.

    Raises:
        UserError: bounds that do not fit, more stages than layers, or a stage with nothing to train.
    """
    layers = take_apart(model)
    if config.pp_partition not in ("", "auto"):
        try:
            bounds = [int(piece) for piece in config.pp_partition.split(",")]
        except ValueError:
            message = f"--pp-partition {config.pp_partition!r} is not a list of whole numbers such as 0,7,14, nor auto"
            raise UserError(message) from None
        bounds = check_bounds(bounds, len(layers), config.pp)
    elif config.pp == 1:
        bounds = [0, len(layers)]
    else:
        costs = layer_costs(model, layers)
        bounds = balance([c.flops for c in costs], [c.activation_bytes for c in costs], config.pp)
    if config.pp_partition != "auto":
        check_trained(bounds, are_trained(layers, frozen))
    return tuple(bounds)


def check_trained(bounds: Sequence[int], trained: Sequence[bool]) -> None:
    """Refuse a stage whose parameters are all frozen.

    Raises:
        UserError: there is one.
    """
    for stage in untrained(bounds, trained):
        start, stop = bounds[stage : stage + 2]
        raise UserError(
            f"pipeline stage {stage} (layers {start} to {stop - 1}) has nothing to train, which DeepSpeed's "
            "pipeline cannot do (DeepSpeed #5071); freeze less, or use --pp 1"
        )


def are_trained(layers: Sequence[Layer], frozen: frozenset[str]) -> list[bool]:
    """Of each layer, whether it has a parameter that is not frozen."""
    return [any(name not in frozen for name, _ in layer.named_parameters()) for layer in layers]


def untrained(bounds: Sequence[int], trained: Sequence[bool]) -> list[int]:
    """The stages none of whose layers is trained."""
    return [stage for stage, (start, stop) in enumerate(itertools.pairwise(bounds)) if not any(trained[start:stop])]
