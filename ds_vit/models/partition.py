"""Where to cut a list of layers into pipeline stages: a pure function of what the layers cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

from ds_vit.fault_tolerance.errors import UserError


def balance(flops: Sequence[float], activation_bytes: Sequence[float], num_stages: int) -> list[int]:
    """Bounds of contiguous stages with the least work in the busiest one.

    Under 1F1B the stage i of p keeps the activations of up to p - i micro-batches; among equally fast cuts the one
    with the smallest such peak is taken.

    Args:
        flops: of each layer.
        activation_bytes: that each layer keeps for its backward pass, of one micro-batch.
        num_stages: p.

    Returns:
        p + 1 numbers: stage i has the layers from the i-th up to, and without, the next.

    Raises:
        UserError: fewer layers than stages.
    """
    layers = len(flops)
    if num_stages > layers:
        raise UserError(
            f"{layers} layers cannot be cut into --pp {num_stages} stages; --pp may be 1 to {layers} for this model"
        )
    work, memory = ([0.0] for _ in range(2))
    for f, b in zip(flops, activation_bytes, strict=True):
        work.append(work[-1] + f)
        memory.append(memory[-1] + b)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, tuple[int, ...]]:
        """(busiest stage's work, largest peak, bounds) of the layers from `start` on in the stages from `stage` on."""
        if stage == num_stages - 1:
            return work[layers] - work[start], memory[layers] - memory[start], (layers,)
        options = []
        for stop in range(start + 1, layers - (num_stages - 1 - stage) + 1):
            later_work, later_peak, bounds = best(stage + 1, stop)
            peak = (memory[stop] - memory[start]) * (num_stages - stage)
            options.append((max(work[stop] - work[start], later_work), max(peak, later_peak), (stop, *bounds)))
        return min(options)

    return [0, *best(0, 0)[2]]


def check_bounds(bounds: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Explicit bounds of `--pp-partition`, checked.

    Raises:
        UserError: not p + 1 rising numbers from 0 to the number of layers.
    """
    fits = len(bounds) == num_stages + 1 and bounds[0] == 0 and bounds[-1] == num_layers
    if not fits or any(a >= b for a, b in itertools.pairwise(bounds)):
        even = ",".join(str(round(i * num_layers / num_stages)) for i in range(num_stages + 1))
        raise UserError(
            f"--pp-partition {','.join(map(str, bounds))}: --pp {num_stages} needs {num_stages + 1} rising numbers "
            f"from 0 to the model's {num_layers} layers (embedding, blocks, head), for example {even}"
        )
    return list(bounds)
