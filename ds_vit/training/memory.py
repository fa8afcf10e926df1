"""How much memory a rank will need: an estimate from shapes alone, before anything is built.

What DeepSpeed keeps at each ZeRO stage is counted from shapes and types; activations are estimated from what autograd
keeps of one image in fp32. Not counted: ZeRO's buckets, copies for the time of a step, the loader, and what a GPU's
context, its libraries and its allocator take (2 to 3 GB).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_vit.models import Layer, layer_costs, take_apart
from ds_vit.models.flops import LayerCost
from ds_vit.models.layers import BlockLayer
from ds_vit.optim.build import STATES_OF_FALLBACK, states_per_element
from ds_vit.parallel.tensor import TensorParallel, cut_layer
from ds_vit.training.plan import OptimizerPlan, Plan

# Bytes of activations over those of fp32, at an MLP ratio of 4. Under autocast the residual stream stays in fp32.
_OF_FP32 = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "autocast-bf16": 36 / 64, "autocast-fp16": 36 / 64}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one pipeline stage, the first of its tensor-parallel group.

    Attributes:
        parameters: how many it works with, its tensor slice of each (ZeRO-3 keeps a share of them).
        weights: in the type of the forward pass.
        gradients: of a step, as they wait for the update.
        masters: copies of the weights that ZeRO updates, in fp32 unless the JSON says bf16.
        optimizer: the optimizer's state.
        average: of the weights, with --model-ema.
        activations: that wait for the backward pass at the fullest moment; estimated.
    """

    parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer: int
    average: int
    activations: int


def estimate(plan: Plan) -> list[RankMemory]:
    """What a rank of each pipeline stage needs."""
    model, layout = plan.model, plan.parallel.layout
    costs = layer_costs(model.whole)
    layers = take_apart(model.whole)
    tp = TensorParallel(0, layout.tp, None, plan.config.sequence_parallel)
    found = []
    for stage, (start, stop) in enumerate(itertools.pairwise(model.bounds)):
        of_stage = layers[start:stop]
        waiting, live = _activations(plan, of_stage, costs[start:stop]) if plan.optimizer else (0, 0)
        for layer in of_stage:
            cut_layer(layer, tp, class_parallel=model.class_parallel)
        # 1F1B: stage i of p has up to p - i micro-batches under way.
        under_way = min(layout.pp - stage, plan.data.batch.accumulation)
        found.append(_of_stage(plan, of_stage, waiting * under_way + live))
    return found


def num_states(optimizer: OptimizerPlan, sizes: Mapping[str, int]) -> int:
    """How many numbers the optimizer keeps of parameters.

    Args:
        optimizer: which one.
        sizes: elements by timm name, of those that are trained.
    """
    each, fallback = states_per_element(optimizer.cls, optimizer.arguments), optimizer.fallback or frozenset()
    return sum(size * (STATES_OF_FALLBACK if name in fallback else each) for name, size in sizes.items())


def _of_stage(plan: Plan, layers: Sequence[Layer], activations: int) -> RankMemory:
    """The states of these layers, whose parameters are cut already."""
    optimizer, stage, dp = plan.optimizer, plan.deepspeed.zero_stage, plan.parallel.layout.dp
    sizes = {name: parameter.numel() for layer in layers for name, parameter in layer.named_parameters()}
    of_type = 4 if plan.deepspeed.precision.compute == "float32" else 2
    types, bf16 = plan.deepspeed.json.get("data_types") or {}, plan.deepspeed.json.get("bf16") or {}
    of_gradient = 4 if types.get("grad_accum_dtype") in ("fp32", "float32", "float") else of_type
    of_master = 2 if bf16.get("bf16_master_weights_and_grads") else 4  # and of the optimizer's states
    weights = of_type * sum(sizes.values()) // (dp if stage == 3 else 1)
    if optimizer is None:
        return RankMemory(sum(sizes.values()), weights, 0, 0, 0, 0, 0)
    trained = {name: size for name, size in sizes.items() if name not in plan.model.frozen}
    states = num_states(optimizer, trained)
    elements = sum(trained.values())
    share = dp if stage else 1
    return RankMemory(
        parameters=sum(sizes.values()),
        weights=weights,
        gradients=of_gradient * elements // (dp if stage >= 2 else 1),
        masters=of_master * elements // dp if stage else 0,
        optimizer=of_master * states // share,
        average=4 * elements // share if plan.config.model_ema else 0,
        activations=activations,
    )


def _activations(plan: Plan, layers: Sequence[Layer], costs: Sequence[LayerCost]) -> tuple[int, int]:
    """(bytes that a micro-batch leaves for its backward pass, bytes more of what is recomputed at a time)."""
    told, tp = plan.deepspeed, plan.parallel.layout.tp
    kept = []
    for layer, cost in zip(layers, costs, strict=True):
        # Of a block's 32 values a token and channel, at an MLP ratio of 4, tp cuts 24 (Korthikanti et al. 2022).
        share = (
            (1 / tp if plan.config.sequence_parallel else (8 + 24 / tp) / 32) if isinstance(layer, BlockLayer) else 1
        )
        kept.append(cost.activation_bytes * _OF_FP32[told.precision.name] * share * plan.data.batch.micro_batch)
    interval = told.checkpointing.interval
    if not interval:
        return round(sum(kept)), 0
    of_type = 2 if told.precision.compute != "float32" else 4
    tokens = layers[0].num_tokens.training / (tp if plan.config.sequence_parallel else 1)
    inputs = of_type * tokens * plan.model.whole.embed_dim * plan.data.batch.micro_batch
    parts = [sum(kept[i : i + interval]) for i in range(0, len(kept), interval)]
    return round(0 if told.checkpointing.cpu else inputs * len(parts)), round(max(parts))
