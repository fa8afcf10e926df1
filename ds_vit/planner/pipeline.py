"""Splits a list of layers into pipeline stages, and estimates the time of a training step.

Without a flag the stages are balanced by FLOPs and memory (`balance`), `--pp-partition 0,7,14` gives them, and
`--pp-partition auto` searches those with the fastest step on DeepSpeed's 1F1B schedule (`fastest_bounds`). All are
pure functions of the model and the flags, so that every rank finds the same bounds on any accelerator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.conversions import compute_class_token
from ds_vit.models.layers import MAIN_TOWER, BlockLayer, Layer, take_apart_towers
from ds_vit.planner.counting import kept_by_layers, layer_flops, work_of_layers

StageCost = tuple[float, float]
"""The cost of one micro-batch in a layer or a stage: (forward pass, backward pass), in seconds or in FLOPs."""


def stage_bounds(partition: str, pp: int, model: torch.nn.Module, frozen: frozenset[str]) -> tuple[int, ...]:
    """The bounds of the stages: those of the flag, or balanced ones ("auto" starts from these too).

    Without a pipeline they are those of the main tower, and every other tower runs separately.

    Args:
        partition: --pp-partition.
        pp: number of stages.
        model: the unsharded model, on the meta device.
        frozen: timm names of the parameters that are not trained.

    Raises:
        UserError: bounds that do not fit, more stages than layers, or a stage with nothing to train.
    """
    towers = take_apart_towers(model)
    layers = towers[MAIN_TOWER] if pp == 1 else [layer for tower in towers.values() for layer in tower]
    if partition not in ("", "auto"):
        try:
            bounds = [int(piece) for piece in partition.split(",")]
        except ValueError:
            message = f"--pp-partition {partition!r} is not a list of whole numbers such as 0,7,14, nor auto"
            raise UserError(message) from None
        check_bounds(bounds, len(layers), pp)
    elif pp == 1:
        bounds = [0, len(layers)]
    else:
        bounds = balance(layer_flops(layers), [layer.bytes for layer in kept_by_layers(layers)], pp)
    if partition != "auto" and pp > 1:
        check_trained(bounds, are_trained(layers, frozen))
    return tuple(bounds)


def check_bounds(bounds: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Check the explicit bounds of `--pp-partition`.

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


def are_trained(layers: Sequence[Layer], frozen: frozenset[str]) -> list[bool]:
    """For each layer, whether it has a parameter that is not frozen."""
    return [any(layer.prefix + name not in frozen for name, _ in layer.named_parameters()) for layer in layers]


def check_trained(bounds: Sequence[int], trained: Sequence[bool]) -> None:
    """Reject a stage whose parameters are all frozen.

    Raises:
        UserError: a stage has nothing to train; names the first.
    """
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if not any(trained[start:stop]):
            raise UserError(
                f"pipeline stage {stage} (layers {start} to {stop - 1}) has nothing to train, which DeepSpeed's "
                "pipeline cannot do (DeepSpeed #5071); freeze less, or use --pp 1"
            )


def balance(flops: Sequence[float], activation_bytes: Sequence[float], num_stages: int) -> list[int]:
    """Bounds of contiguous stages that minimise the work of the busiest stage.

    Under 1F1B stage i of p keeps the activations of up to p - i micro-batches. Of equally fast bounds those with the
    smallest peak are taken.

    Args:
        flops: of each layer.
        activation_bytes: of one micro-batch, kept by each layer for its backward pass.
        num_stages: p.

    Returns:
        p + 1 numbers: stage i has the layers bounds[i] to bounds[i + 1] - 1.

    Raises:
        UserError: fewer layers than stages.
    """
    layers = len(flops)
    if num_stages > layers:
        raise UserError(
            f"{layers} layers cannot be split into --pp {num_stages} stages; --pp may be 1 to {layers} for this model"
        )
    work, memory = ([0.0, *itertools.accumulate(values)] for values in (flops, activation_bytes))

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


def pipeline_time(stages: Sequence[StageCost], micro_batches: int) -> float:
    """The time of a step on DeepSpeed's training schedule (1F1B) without transfers, in the unit of the costs.

    Stage s runs micro-batch i forward at tick 2i + s and backward at tick 2i + 2p - 1 - s. Equal stages take m + p - 1
    times the time of one micro-batch, of which (p - 1) / (m + p - 1) is bubble (Narayanan et al. 2021, section 2.2.1).

    Args:
        stages: the cost of a micro-batch in each of the p stages.
        micro_batches: m, of a step.
    """
    p = len(stages)
    m = min(micro_batches, 2 * p)  # after its start a step runs at the pace of the slowest stage
    clock = [0.0] * p
    ends: dict[tuple[int, int, int], float] = {}  # of each pass: (0 forward or 1 backward, stage, micro-batch)
    for tick, s in itertools.product(range(2 * (m + p - 1)), range(p)):
        is_backward = (tick + s) % 2
        i = (tick + s + 1) // 2 - p if is_backward else (tick - s) // 2
        if 0 <= i < m:
            # The first stage waits for no forward pass, and the last one for no backward pass of another stage.
            received = ends.get((is_backward, s + 1 if is_backward else s - 1, i), 0.0)
            clock[s] = ends[is_backward, s, i] = max(clock[s], received) + stages[s][is_backward]
    return max(clock) + (micro_batches - m) * max(map(sum, stages))


def stage_costs(layers: Sequence[StageCost], bounds: Sequence[int]) -> list[StageCost]:
    """The cost of each stage: the sum of the costs of its layers."""
    parts = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [(sum(ahead for ahead, _ in part), sum(back for _, back in part)) for part in parts]


_MAX_EXHAUSTIVE = 1000  # partitions that are all tried: 12 blocks in up to 4 stages have fewer


def fastest_bounds(
    layers: Sequence[StageCost],
    activation_bytes: Sequence[float],
    stages: int,
    micro_batches: int,
    is_allowed: Callable[[Sequence[int]], bool] = lambda bounds: True,
) -> list[int]:
    """The bounds with the fastest step; of equally fast ones those with the smallest peak of activations.

    If there are at most 1,000 partitions, all are tried. Else the search starts from the balanced bounds and moves one
    bound, or two neighbouring ones, by one layer for as long as the step gets faster.

    Args:
        layers: the cost of each layer.
        activation_bytes: of one micro-batch, kept by each layer for its backward pass.
        stages: p.
        micro_batches: m, of a step.
        is_allowed: whether bounds may be chosen.

    Returns:
        p + 1 numbers, as those of `balance`.

    Raises:
        UserError: fewer layers than stages.
    """

    @cache
    def score(bounds: tuple[int, ...]) -> tuple[float, float]:
        if not is_allowed(bounds):
            return math.inf, math.inf
        sizes = (sum(activation_bytes[start:stop]) for start, stop in itertools.pairwise(bounds))
        peak = max(min(stages - stage, micro_batches) * size for stage, size in enumerate(sizes))
        return pipeline_time(stage_costs(layers, bounds), micro_batches), peak

    best = tuple(balance([ahead + back for ahead, back in layers], activation_bytes, stages))
    if math.comb(len(layers) - 1, stages - 1) <= _MAX_EXHAUSTIVE:
        inner = itertools.combinations(range(1, len(layers)), stages - 1)
        best = min(((0, *bounds, len(layers)) for bounds in inner), key=score)
        return list(best)
    while score(better := min(_neighbours(best), key=score, default=best)) < score(best):
        best = better
    return list(best)


def _neighbours(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Valid bounds in which one bound, or two neighbouring ones, moved by one layer."""
    inner = range(1, len(bounds) - 1)
    moves = [{place: step} for place in inner for step in (-1, 1)]
    pairs = itertools.product(itertools.pairwise(inner), itertools.product((-1, 1), repeat=2))
    moves += [dict(zip(places, steps, strict=True)) for places, steps in pairs]
    for move in moves:
        moved = tuple(bound + move.get(place, 0) for place, bound in enumerate(bounds))
        if all(a < b for a, b in itertools.pairwise(moved)):
            yield moved


def fastest_stages(
    layers: Sequence[Layer], balanced: Sequence[int], micro_batches: int, *, frozen: frozenset[str], recomputed: bool
) -> tuple[tuple[int, ...], str]:
    """`--pp-partition auto`: the bounds with the fastest step by FLOPs, and a line that says what they gain.

    Args:
        layers: from `layers_of_rank`; `compute_class_token` changes the last block in place.
        balanced: bounds from `stage_bounds`.
        micro_batches: m, of a step.
        frozen: timm names of the parameters that are not trained.
        recomputed: whether blocks repeat their matrix products in the backward pass.

    Raises:
        UserError: more stages than layers, or a stage with nothing to train whatever the bounds.
    """
    for layer in layers:
        compute_class_token(layer)
    costs = []
    for layer, work in zip(layers, work_of_layers(layers), strict=True):
        repeated = work.forward.flops if recomputed and isinstance(layer, BlockLayer) else 0.0
        costs.append((work.forward.flops, work.backward.flops + repeated))
    activation_bytes = [kept.bytes for kept in kept_by_layers(layers)]
    trained = are_trained(layers, frozen)

    def all_train(bounds: Sequence[int]) -> bool:
        return all(any(trained[start:stop]) for start, stop in itertools.pairwise(bounds))

    bounds = fastest_bounds(costs, activation_bytes, len(balanced) - 1, micro_batches, all_train)
    check_trained(bounds, trained)
    slow, fast = (pipeline_time(stage_costs(costs, choice), micro_batches) for choice in (balanced, bounds))
    note = f"--pp-partition auto: {','.join(map(str, bounds))}"
    gain = f", a step {slow / fast - 1:.1%} faster than with the balanced {','.join(map(str, balanced))}"
    return tuple(bounds), note + (gain if slow / fast - 1 > 5e-4 else ", as fast as balanced")
