"""From `EngineConfig` to a running engine: layers, initial values, tensor shards, stages, optimizer, loss, DeepSpeed.

A converter changes a layer in place between its initial values and the engine, one layer at a time, so that no rank
holds more than one layer whole. A new one (fp8, other norms) is a line of `layer_converters`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import Checkpointing, Precision
from ds_vit.engine.base import Engine
from ds_vit.engine.patches import plain_linear_at_zero3, tf32_products, torch_linear_restored
from ds_vit.engine.pipeline import PipeEngine, StagedViT
from ds_vit.engine.plain import PlainEngine
from ds_vit.models.checkpointing import (
    CheckpointFunction,
    recompute_all,
    recompute_from_host_memory,
    recompute_selectively,
)
from ds_vit.models.compiled import compile_block, compile_function, compiler_settings
from ds_vit.models.conversions import cast_block_buffers, compute_class_token, norms_in_fp32, skip_idle_modules
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import MAIN_TOWER, Layer, tower_of
from ds_vit.models.param_groups import freeze, no_weight_decay_names
from ds_vit.models.sequential import SequentialViT, Towers, timm_names
from ds_vit.optim.build import attach, build_optimizer, parameter_groups
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.tensor.shard import shard_layer
from ds_vit.training.resolve.model import ModelConfig
from ds_vit.training.resolve.optimizer import OptimizerConfig

Converter = Callable[[Layer], object]


@dataclass(frozen=True)
class EngineConfig:
    """How a model is computed, distributed and updated.

    Attributes:
        model: the model and its task.
        optimizer: None in evaluation only.
        layout: degrees of parallelism.
        stage: this rank's pipeline stage.
        local_world_size: ranks on this host; None where unknown.
        batch: sizes of a step's batches.
        json: the DeepSpeed JSON without "auto".
        precision: number formats.
        checkpointing: of activations.
        seed: of the initial values.
        sequence_parallel: shard the tokens between tensor-parallel regions.
        norms_fp32: compute norms in fp32, also in a model in half precision.
        tf32: compute fp32 matrix products in TF32.
        compile_mode: of torch.compile; None for eager blocks.
        graphs: the passes of a micro-batch are captured and replayed.
        averaged: the run keeps a moving average of the weights.
    """

    model: ModelConfig
    optimizer: OptimizerConfig | None
    layout: Layout
    stage: int
    local_world_size: int | None
    batch: BatchSizes
    json: DeepSpeedJson
    precision: Precision
    checkpointing: Checkpointing
    seed: int
    sequence_parallel: bool
    norms_fp32: bool
    tf32: bool
    compile_mode: str | None
    graphs: bool
    averaged: bool

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 without ZeRO."""
        return self.json.zero_stage

    @property
    def autocast(self) -> bool:
        """Whether torch casts the operands of each operation."""
        return "autocast" in self.precision.name

    @property
    def text(self) -> str:
        """Degrees, ZeRO stage and precision, for a line or a table."""
        return f"{self.layout}, ZeRO-{self.zero_stage}, {self.precision.name}"

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return getattr(torch, self.precision.compute)

    @property
    def recompute(self) -> CheckpointFunction:
        """Runs a group of blocks whose activations are recomputed: `function(run, *tensors)`."""
        if self.checkpointing.selective:
            return recompute_selectively
        return recompute_from_host_memory if self.checkpointing.cpu else recompute_all


def build_engine(config: EngineConfig, device: torch.device, groups: Groups) -> Engine:
    """This rank's part of the model, initialised and wrapped by DeepSpeed (a collective)."""
    with contextlib.ExitStack() as process_state:
        if config.tf32:
            process_state.enter_context(tf32_products())
        if config.compile_mode:
            process_state.enter_context(compiler_settings())
        if config.zero_stage == 3 and config.autocast:
            process_state.enter_context(torch_linear_restored())
            process_state.enter_context(plain_linear_at_zero3())
        engine = _build_engine(config, device, groups)
        engine.on_close.push(process_state.pop_all())
    return engine


def _build_engine(config: EngineConfig, device: torch.device, groups: Groups) -> Engine:
    towers = _build_towers(config, device, groups)
    task, whole = config.model.task, config.model.whole
    tp = groups.tensor_parallel(sequence_parallel=config.sequence_parallel) if config.model.class_parallel else None
    shared: dict[str, Any] = {"class_parallel": tp, "groups": groups}
    interval = config.checkpointing.interval
    engine_type: type[PlainEngine | PipeEngine] = PlainEngine
    model: Towers | StagedViT
    if config.layout.pp == 1:
        function = config.recompute if interval else None
        made = partial(SequentialViT, checkpoint_interval=interval, checkpoint_function=function)
        model = Towers({name: made(layers) for name, layers in towers.items()})
        shared["replays"] = config.graphs
    else:
        engine_type = PipeEngine
        model = StagedViT(
            towers[MAIN_TOWER],
            config.model.bounds,
            groups,
            task,
            [*task.towers(whole)],
            checkpoint_interval=interval,
            checkpoint_function=config.recompute,
        )
    optimizer = _build_optimizer(config, model, device)
    if config.dtype != torch.float32:
        shared["write_initial"] = partial(_write_initial, config, device, groups)
    engine = engine_type(model, optimizer, task, config.json, **shared)
    if optimizer is not None:
        assert config.optimizer is not None
        engine.rates = attach(optimizer, engine.zero_map, config.optimizer.factors)
    return engine


_Layers = dict[str, list[Layer]]  # by tower


def _build_towers(config: EngineConfig, device: torch.device, groups: Groups) -> _Layers:
    """The layers of each tower, or in a pipeline one list of all layers; those of this rank's stage are filled."""
    towers, of_stage = _layers_of_stage(config)
    # DeepSpeed casts a whole model itself, and expects a partitioned one to be in its type already.
    dtype = config.dtype if config.zero_stage == 3 else torch.float32
    _fill(config, device, of_stage, layer_converters(config, groups), dtype)
    return towers


def _layers_of_stage(config: EngineConfig) -> tuple[_Layers, _Layers]:
    """Layers without values: of each tower, or in a pipeline one list of all; and of each tower those of this stage."""
    task, bounds = config.model.task, config.model.bounds
    towers = task.towers(config.model.whole)
    if config.layout.pp == 1:
        return towers, towers
    chain = task.chain(towers)
    assert chain is not None, "resolve_model rejects such tasks in a pipeline"
    own = set(chain[bounds[config.stage] : bounds[config.stage + 1]])
    of_stage = {name: [layer for layer in layers if layer in own] for name, layers in towers.items()}
    return {MAIN_TOWER: chain}, of_stage


def _fill(
    config: EngineConfig, device: torch.device, towers: _Layers, converters: Sequence[Converter], dtype: torch.dtype
) -> None:
    """Initialise the layers of each tower in a type, and apply the converters to each."""

    def on_layer(layer: Layer) -> None:
        for convert in converters:
            convert(layer)

    for name, layers in towers.items():
        tower, weights = tower_of(config.model.whole, name), config.model.weights_of(name)
        initialise(tower, layers, seed=config.seed, device=device, dtype=dtype, checkpoint=weights, on_layer=on_layer)


def _write_initial(
    config: EngineConfig, device: torch.device, groups: Groups, write: Callable[[Mapping[str, torch.Tensor]], None]
) -> None:
    """Pass the initial values to `write` a second time, in fp32, a layer at a time.

    DeepSpeed makes its masters from the 16-bit model, which would start the run from rounded values.

    Args:
        write: takes the tensor slices of a layer by timm name.
    """

    def pass_on(layer: Layer) -> None:
        write({layer.prefix + name: parameter for name, parameter in layer.named_parameters()})
        layer.to_empty(device="meta")

    task, towers = config.model.task, _layers_of_stage(config)[1]
    for name in (*task.teachers, *task.fixed_towers):  # they hold averages, or are not saved
        towers.pop(name, None)
    _fill(config, device, towers, [*_sharding(config, groups), pass_on], torch.float32)


def _build_optimizer(
    config: EngineConfig, model: torch.nn.Module, device: torch.device
) -> torch.optim.Optimizer | None:
    wanted = config.optimizer
    if wanted is None:
        return None
    names = timm_names(model)
    parameters = [(names[local], p) for local, p in model.named_parameters()]
    undecayed = no_weight_decay_names(config.model.whole)
    groups = parameter_groups(parameters, wanted.weight_decay, undecayed, wanted.fallback)
    # With the optimizer offloaded, its step runs on the CPU.
    offloaded = "optimizer" in config.json.offloaded
    return build_optimizer(wanted.cls, groups, wanted.arguments, torch.device("cpu") if offloaded else device)


# ---- converters of a layer ------------------------------------------------------------------------------------------


def layer_converters(config: EngineConfig, groups: Groups) -> list[Converter]:
    """The converters of a run, in the order in which they are applied to each layer.

    ZeRO-3 partitions weights that are sharded, cast and frozen already.
    """
    converters = _sharding(config, groups)
    if config.dtype != torch.float32:
        converters.append(partial(cast_block_buffers, dtype=config.dtype))  # DeepSpeed casts only parameters
        if config.norms_fp32:
            converters.append(norms_in_fp32)
    converters.append(partial(freeze, names=config.model.frozen))
    if config.model.reads_class_token:
        converters.append(compute_class_token)
    converters.append(skip_idle_modules)  # the others find members by name
    if config.zero_stage == 3:
        converters.append(_partition(config, groups))
    if config.compile_mode:
        converters.append(partial(compile_block, function=compile_function(config.compile_mode)))
    return converters


def _sharding(config: EngineConfig, groups: Groups) -> list[Converter]:
    """Shards a layer over the tensor-parallel ranks, where there are several."""
    tp = groups.tensor_parallel(sequence_parallel=config.sequence_parallel)
    return [] if tp is None else [partial(shard_layer, tp=tp, class_parallel=config.model.class_parallel)]


def _partition(config: EngineConfig, groups: Groups) -> Converter:
    """ZeRO-3's share of each parameter."""
    json = config.json.replace({"zero_optimization.memory_efficient_linear": config.autocast}).dump()
    return lambda layer: deepspeed.zero.Init(
        module=layer, config_dict_or_path=json, data_parallel_group=groups.dp, mpu=groups.grid
    )
