"""How much memory a rank will need: an estimate from shapes alone, before anything is built.

What DeepSpeed keeps at each ZeRO stage is counted from shapes and types. Activations are counted on the meta device:
what autograd saves of an image in the layers as the rank has them, cut, cast and frozen (models/activations.py). Under
autocast, which the meta device does not know, they are estimated from fp32. Not counted: ZeRO's buckets, copies for the
time of a step, what the backward pass makes, the loader, and what a GPU's context, its libraries and its allocator take
(2 to 3 GB).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_rules import sums_in_fp32
from ds_vit.models import (
    BlockLayer,
    Kept,
    Layer,
    cast_block_buffers,
    freeze,
    kept_by_layers,
    norms_in_fp32,
)
from ds_vit.optim.build import STATES_OF_FALLBACK, states_per_element
from ds_vit.parallel.tensor import TensorParallel, cut_layer
from ds_vit.training.plan import OptimizerPlan, Plan

# Bytes of activations over those of fp32, at an MLP ratio of 4: under autocast the residual stream stays in fp32.
_AUTOCAST_OF_FP32 = 36 / 64


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

    @property
    def together(self) -> int:
        """All bytes."""
        return self.states + self.activations

    @property
    def states(self) -> int:
        """All bytes but those of activations: what no micro-batch changes."""
        return self.weights + self.gradients + self.masters + self.optimizer + self.average


@dataclass(frozen=True)
class StageMemory:
    """What a rank of one pipeline stage needs, by the micro-batch.

    Attributes:
        states: without activations.
        waiting: bytes of an image that wait for the backward pass.
        live: bytes of an image more, of what is recomputed at a time.
        ahead: micro-batches under way at most: stage i of p has p - i (1F1B).
    """

    states: RankMemory
    waiting: float
    live: float
    ahead: int

    def of(self, batch: BatchSizes) -> RankMemory:
        """With the activations of this micro-batch."""
        under_way = min(self.ahead, batch.accumulation)
        return replace(self.states, activations=round((self.waiting * under_way + self.live) * batch.micro_batch))


def estimate(plan: Plan) -> list[RankMemory]:
    """What a rank of each pipeline stage needs."""
    return [stage.of(plan.data.batch) for stage in by_stage(plan)]


def by_stage(plan: Plan) -> list[StageMemory]:
    """What a rank of each pipeline stage needs, as far as it does not hang on the batch arithmetic."""
    model, pp = plan.model, plan.parallel.layout.pp
    layers = layers_of_rank(plan)
    dtype = getattr(torch, plan.deepspeed.precision.compute)
    kept = kept_by_layers(model.whole, layers, dtype) if plan.optimizer else []
    found = []
    for stage, (start, stop) in enumerate(itertools.pairwise(model.bounds)):
        of_stage = layers[start:stop]
        waiting, live = _activations(plan, of_stage, kept[start:stop]) if plan.optimizer else (0.0, 0.0)
        found.append(StageMemory(_of_stage(plan, of_stage), waiting, live, pp - stage))
    return found


def layers_of_rank(plan: Plan) -> list[Layer]:
    """The layers of all stages on the meta device, each as the first rank of a tensor-parallel group has it."""
    tp = TensorParallel(0, plan.parallel.layout.tp, None, plan.config.sequence_parallel)
    layers = plan.model.task.layers(plan.model.whole)
    for layer in layers:
        freeze(layer, plan.model.frozen)
        if tp.size > 1:
            cut_layer(layer, tp, class_parallel=plan.model.class_parallel)
        as_computed(plan, layer)
    return layers


def as_computed(plan: Plan, layer: Layer) -> None:
    """Give a layer the types that it has in the run, in place."""
    compute = plan.deepspeed.precision.compute
    if compute == "float32":
        return
    dtype = getattr(torch, compute)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    cast_block_buffers(layer, dtype)
    if plan.config.norm_dtype == "float32":
        norms_in_fp32(layer)


def in_host_memory(plan: Plan) -> frozenset[str]:
    """The fields of `RankMemory` that the JSON's offload keeps beside the accelerator."""
    zero = plan.deepspeed.json.get("zero_optimization", {})
    fields = {"optimizer": ("masters", "optimizer"), "param": ("weights",)}
    offloaded = [key for key in fields if (zero.get(f"offload_{key}") or {}).get("device") == "cpu"]
    return frozenset(field for key in offloaded for field in fields[key])


def on_device(memory: RankMemory, in_host: frozenset[str]) -> RankMemory:
    """What of it lies in the accelerator's memory."""
    return replace(memory, **dict.fromkeys(in_host, 0))


def num_states(optimizer: OptimizerPlan, sizes: Mapping[str, int]) -> int:
    """How many numbers the optimizer keeps of parameters.

    Args:
        optimizer: which one.
        sizes: elements by timm name, of those that are trained.
    """
    each, fallback = states_per_element(optimizer.cls, optimizer.arguments), optimizer.fallback or frozenset()
    return sum(size * (STATES_OF_FALLBACK if name in fallback else each) for name, size in sizes.items())


def _of_stage(plan: Plan, layers: Sequence[Layer]) -> RankMemory:
    """The states of these layers, whose parameters are cut already."""
    optimizer, stage, dp = plan.optimizer, plan.deepspeed.zero_stage, plan.parallel.layout.dp
    sizes = {name: parameter.numel() for layer in layers for name, parameter in layer.named_parameters()}
    of_type = 4 if plan.deepspeed.precision.compute == "float32" else 2
    bf16 = plan.deepspeed.json.get("bf16") or {}
    of_gradient = 4 if sums_in_fp32(plan.deepspeed.json) else of_type
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
        activations=0,
    )


def _activations(plan: Plan, layers: Sequence[Layer], kept: Sequence[Kept]) -> tuple[float, float]:
    """Bytes of an image: (what waits for the backward pass, what is recomputed at a time besides).

    Args:
        plan: the run.
        layers: of a stage.
        kept: by each of an image.
    """
    told = plan.deepspeed.checkpointing
    autocast = "autocast" in plan.deepspeed.precision.name
    of_saved, of_dear = (_AUTOCAST_OF_FP32, 0.5) if autocast else (1.0, 1.0)
    waiting, live = 0.0, 0.0
    for are_recomputed, run in itertools.groupby(
        zip(layers, kept, strict=True), lambda pair: told.interval > 0 and isinstance(pair[0], BlockLayer)
    ):
        of_run = [kept for _, kept in run]
        if not are_recomputed:
            waiting += of_saved * sum(layer.bytes for layer in of_run)
            continue
        for start in range(0, len(of_run), told.interval):
            group = of_run[start : start + told.interval]
            first, again = group[0], of_saved * sum(layer.bytes for layer in group)
            if not again:  # frozen, and nothing before is trained: torch lets go of what it kept
                continue
            if not told.cpu:
                waiting += first.given
                again -= first.given_saved
            if told.selective:
                waiting += of_dear * first.dear
                again -= of_dear * first.dear_saved
            live = max(live, again)
    return waiting, live
