"""How much memory a rank of a planned run will need: the plan's layers and JSON, as planner/memory.py takes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ds_vit.models import Layer, compute_class_token
from ds_vit.optim.build import states_per_element
from ds_vit.optim.muon import Muon
from ds_vit.planner import memory
from ds_vit.planner.layers import as_a_rank_has_them, memory_of_layers
from ds_vit.planner.layers import as_computed as in_types
from ds_vit.planner.layers import num_states as states_of
from ds_vit.planner.memory import MemoryRules, RankMemory, StageMemory, of_stage, on_device
from ds_vit.training.plan import OptimizerPlan, Plan

__all__ = ["as_computed", "by_stage", "estimate", "in_host_memory", "layers_of_rank", "num_states", "on_device"]


def estimate(plan: Plan) -> list[RankMemory]:
    """What a rank of each pipeline stage needs."""
    return [stage.of(plan.data.batch) for stage in by_stage(plan)]


def by_stage(plan: Plan) -> list[StageMemory]:
    """What a rank of each pipeline stage needs, as far as it does not hang on the batch arithmetic."""
    model, optimizer, told, pp = plan.model, plan.optimizer, plan.deepspeed, plan.parallel.layout.pp
    rules = rules_of_run(plan)
    found = memory_of_layers(
        model.whole,
        layers_of_rank(plan),
        compute=told.precision.compute,
        states=states_per_element(optimizer.cls, optimizer.arguments) if optimizer else 0,
        fallback=(optimizer.fallback if optimizer else None) or frozenset(),
        trains=optimizer is not None,
    )
    return [
        of_stage(found[start:stop], rules, pp - stage, trains=optimizer is not None)
        for stage, (start, stop) in enumerate(itertools.pairwise(model.bounds))
    ]


def rules_of_run(plan: Plan) -> MemoryRules:
    """What of a run decides on its memory and its time."""
    told = plan.deepspeed
    return MemoryRules.of_json(
        told.json,
        pp=plan.parallel.layout.pp,
        dp=plan.parallel.layout.dp,
        tp=plan.parallel.layout.tp,
        compute=told.precision.compute,
        autocast="autocast" in told.precision.name,
        average=plan.config.model_ema,
        whole_matrices=plan.optimizer is not None and issubclass(plan.optimizer.cls, Muon),
        checkpointing=told.checkpointing,
    )


def layers_of_rank(plan: Plan) -> list[Layer]:
    """The layers of all stages on the meta device, each as the first rank of a tensor-parallel group has it."""
    layers = as_a_rank_has_them(
        plan.model.task.layers(plan.model.whole),
        tp=plan.parallel.layout.tp,
        sequence_parallel=plan.config.sequence_parallel,
        class_parallel=plan.model.class_parallel,
        compute=plan.deepspeed.precision.compute,
        norms_fp32=plan.config.norm_dtype == "float32",
        frozen=plan.model.frozen,
    )
    if plan.model.reads_class_token:
        for layer in layers:
            compute_class_token(layer)
    return layers


def as_computed(plan: Plan, layer: Layer) -> None:
    """Give a layer the types that it has in the run, in place."""
    in_types(layer, plan.deepspeed.precision.compute, norms_fp32=plan.config.norm_dtype == "float32")


def in_host_memory(plan: Plan) -> frozenset[str]:
    """The fields of `RankMemory` that the JSON's offload keeps beside the accelerator."""
    return memory.in_host_memory(plan.deepspeed.json)


def num_states(optimizer: OptimizerPlan, sizes: Mapping[str, int]) -> int:
    """How many numbers the optimizer keeps of parameters.

    Args:
        optimizer: which one.
        sizes: elements by timm name, of those that are trained.
    """
    each = states_per_element(optimizer.cls, optimizer.arguments)
    return states_of(each, optimizer.fallback or frozenset(), sizes)
