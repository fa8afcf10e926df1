"""The memory of a rank of a run: its configuration in the form that planner/memory.py takes."""

from __future__ import annotations

from collections.abc import Mapping

from ds_vit.models import Layer, compute_class_token
from ds_vit.optim.build import states_per_element
from ds_vit.optim.muon import Muon
from ds_vit.planner import memory
from ds_vit.planner.memory import MemoryRules, RankMemory, StageMemory, memory_by_stage, memory_of_layers
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.resolve.optimizer import OptimizerConfig


def estimate(config: EngineConfig) -> list[RankMemory]:
    """The memory of a rank of each pipeline stage."""
    return [stage.of(config.batch) for stage in by_stage(config)]


def by_stage(config: EngineConfig) -> list[StageMemory]:
    """The memory of a rank of each pipeline stage, by the micro-batch."""
    model, optimizer = config.model, config.optimizer
    found = memory_of_layers(
        model.whole,
        layers_of_rank(config),
        compute=config.precision.compute,
        states=states_per_element(optimizer.cls, optimizer.arguments) if optimizer else 0,
        fallback=(optimizer.fallback if optimizer else None) or frozenset(),
        trains=optimizer is not None,
    )
    return memory_by_stage(found, model.bounds, rules_of_run(config), trains=optimizer is not None)


def rules_of_run(config: EngineConfig) -> MemoryRules:
    """The settings that memory and time depend on."""
    return MemoryRules.of_json(
        config.json,
        pp=config.layout.pp,
        dp=config.layout.dp,
        tp=config.layout.tp,
        compute=config.precision.compute,
        autocast="autocast" in config.precision.name,
        average=config.averaged,
        whole_matrices=config.optimizer is not None and issubclass(config.optimizer.cls, Muon),
        checkpointing=config.checkpointing,
    )


def layers_of_rank(config: EngineConfig) -> list[Layer]:
    """The layers of all stages on the meta device, each as the first rank of a tensor-parallel group has it."""
    layers = memory.layers_of_rank(
        config.model.task.layers(config.model.whole),
        tp=config.layout.tp,
        sequence_parallel=config.sequence_parallel,
        class_parallel=config.model.class_parallel,
        compute=config.precision.compute,
        norms_fp32=config.norms_fp32,
        frozen=config.model.frozen,
    )
    if config.model.reads_class_token:
        for layer in layers:
            compute_class_token(layer)
    return layers


def num_states(optimizer: OptimizerConfig, sizes: Mapping[str, int]) -> int:
    """How many numbers the optimizer keeps of parameters.

    Args:
        optimizer: which one.
        sizes: elements by timm name, of those that are trained.
    """
    each = states_per_element(optimizer.cls, optimizer.arguments)
    return memory.num_states(each, optimizer.fallback or frozenset(), sizes)
