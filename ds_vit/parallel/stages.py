"""Where the pipeline is cut into stages; known before a process group exists."""

from __future__ import annotations

import itertools

import torch

from ds_vit.config import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import balance, check_bounds, layer_costs, take_apart


def stage_bounds(config: RunConfig, model: torch.nn.Module, frozen: frozenset[str]) -> tuple[int, ...]:
    """Where the pipeline is cut: --pp-partition, or balanced by FLOPs and activation bytes.

    Raises:
        UserError: bounds that do not fit, more stages than layers, or a stage with nothing to train.
    """
    layers = take_apart(model)
    if config.pp_partition:
        try:
            bounds = [int(piece) for piece in config.pp_partition.split(",")]
        except ValueError:
            message = f"--pp-partition {config.pp_partition!r} is not a list of whole numbers such as 0,7,14"
            raise UserError(message) from None
        bounds = check_bounds(bounds, len(layers), config.pp)
    elif config.pp == 1:
        bounds = [0, len(layers)]
    else:
        costs = layer_costs(model, layers)
        bounds = balance([c.flops for c in costs], [c.activation_bytes for c in costs], config.pp)
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        names = {name for layer in layers[start:stop] for name, _ in layer.named_parameters()}
        if names <= frozen:
            raise UserError(
                f"pipeline stage {stage} (layers {start} to {stop - 1}) has nothing to train, which DeepSpeed's "
                "pipeline cannot do (DeepSpeed #5071); freeze less, or use --pp 1"
            )
    return tuple(bounds)
