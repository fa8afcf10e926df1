"""From a `Run` to a running engine: layers, initial values, tensor shards, stages, optimizer, loss, DeepSpeed.

A converter changes a layer in place between its initial values and the engine, one layer at a time, so that no rank
holds more than one layer whole. A new one (fp8, other norms) is a line of `layer_converters`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch

from ds_vit.device import matmul_precision
from ds_vit.engine.base import Engine
from ds_vit.engine.patches import plain_linear_at_zero3, torch_linear_restored
from ds_vit.engine.pipeline import PipeEngine, StagedViT
from ds_vit.engine.plain import PlainEngine
from ds_vit.models.compiled import compile_block, compile_function, compiler_settings
from ds_vit.models.conversions import compute_class_token, skip_idle_modules
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import MAIN_TOWER, Layer, tower_of
from ds_vit.models.param_groups import no_weight_decay_names
from ds_vit.models.sequential import SequentialViT, Towers, timm_names
from ds_vit.optim.build import attach, build_optimizer, parameter_groups
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.tensor.shard import Converter, rank_converters
from ds_vit.training.run import Run


def build_engine(run: Run, device: torch.device, groups: Groups) -> Engine:
    """This rank's part of the model, initialised and wrapped by DeepSpeed (a collective)."""
    with contextlib.ExitStack() as process_state:
        if run.config.tf32:
            process_state.enter_context(matmul_precision("high"))
        if run.config.compile:
            process_state.enter_context(compiler_settings())
        if run.engine.zero_stage == 3 and run.engine.autocast:
            process_state.enter_context(torch_linear_restored())
            process_state.enter_context(plain_linear_at_zero3())
        engine = _build_engine(run, device, groups)
        engine.on_close.push(process_state.pop_all())
    return engine


def _build_engine(run: Run, device: torch.device, groups: Groups) -> Engine:
    towers, of_stage = _layers_of_stage(run)
    # DeepSpeed casts a whole model itself, and expects a partitioned one to be in its type already.
    dtype = run.engine.dtype if run.engine.zero_stage == 3 else torch.float32
    _fill(run, device, of_stage, layer_converters(run, groups), dtype)
    task, whole = run.model.task, run.model.whole
    tp = groups.tensor_parallel(run.config) if run.model.class_parallel else None
    shared: dict[str, Any] = {"class_parallel": tp, "groups": groups}
    interval = run.engine.checkpointing.interval
    engine_type: type[PlainEngine | PipeEngine] = PlainEngine
    model: Towers | StagedViT
    if run.layout.pp == 1:
        made = partial(SequentialViT, recompute_interval=interval, checkpoint_function=run.engine.recompute)
        model = Towers({name: made(layers) for name, layers in towers.items()})
        shared["replays"] = run.engine.graphs
    else:
        engine_type = PipeEngine
        model = StagedViT(
            towers[MAIN_TOWER],
            run.model.bounds,
            groups,
            task,
            [*task.towers(whole)],
            recompute_interval=interval,
            checkpoint_function=run.engine.recompute,
        )
    optimizer = _build_optimizer(run, model, device)
    if run.engine.dtype != torch.float32:
        shared["write_initial"] = partial(_write_initial, run, device, groups)
    engine = engine_type(model, optimizer, task, run.engine.json, **shared)
    if optimizer is not None:
        assert run.optimizer is not None
        engine.rates = attach(optimizer, engine.zero_map, run.optimizer.factors)
    return engine


_Layers = dict[str, list[Layer]]  # by tower


def _layers_of_stage(run: Run) -> tuple[_Layers, _Layers]:
    """Layers without values: of each tower, or in a pipeline one list of all; and of each tower those of this stage."""
    task, bounds = run.model.task, run.model.bounds
    towers = task.towers(run.model.whole)
    if run.layout.pp == 1:
        return towers, towers
    chain = task.chain(towers)
    assert chain is not None, "resolve_model rejects such tasks in a pipeline"
    own = set(chain[bounds[run.stage] : bounds[run.stage + 1]])
    of_stage = {name: [layer for layer in layers if layer in own] for name, layers in towers.items()}
    return {MAIN_TOWER: chain}, of_stage


def _fill(run: Run, device: torch.device, towers: _Layers, converters: Sequence[Converter], dtype: torch.dtype) -> None:
    """Initialise the layers of each tower in a type, and apply the converters to each."""

    def on_layer(layer: Layer) -> None:
        for convert in converters:
            convert(layer)

    for name, layers in towers.items():
        tower, weights, seed = tower_of(run.model.whole, name), run.model.towers.get(name), run.config.seed
        initialise(tower, layers, seed=seed, device=device, dtype=dtype, checkpoint=weights, on_layer=on_layer)


def _write_initial(
    run: Run, device: torch.device, groups: Groups, write: Callable[[Mapping[str, torch.Tensor]], None]
) -> None:
    """Pass the initial values to `write` a second time, in fp32, a layer at a time.

    DeepSpeed makes its masters from the 16-bit model, which would start the run from rounded values.

    Args:
        write: takes the tensor slices of a layer by timm name.
    """

    def pass_on(layer: Layer) -> None:
        write({layer.prefix + name: parameter for name, parameter in layer.named_parameters()})
        layer.to_empty(device="meta")

    task, towers = run.model.task, _layers_of_stage(run)[1]
    for name in (*task.teachers, *task.fixed_towers):  # they hold averages, or are not saved
        towers.pop(name, None)
    _fill(run, device, towers, [*_of_rank(run, groups, torch.float32), pass_on], torch.float32)


def _build_optimizer(run: Run, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer | None:
    wanted = run.optimizer
    if wanted is None:
        return None
    names = timm_names(model)
    parameters = [(names[local], p) for local, p in model.named_parameters()]
    undecayed = no_weight_decay_names(run.model.whole)
    groups = parameter_groups(parameters, wanted.weight_decay, undecayed, wanted.fallback)
    # With the optimizer offloaded, its step runs on the CPU.
    offloaded = "optimizer" in run.engine.json.offloaded
    return build_optimizer(wanted.cls, groups, wanted.arguments, torch.device("cpu") if offloaded else device)


# ---- converters of a layer ------------------------------------------------------------------------------------------


def layer_converters(run: Run, groups: Groups) -> list[Converter]:
    """The converters of a run, in the order in which they are applied to each layer.

    ZeRO-3 partitions weights that are sharded, cast and frozen already.
    """
    converters = _of_rank(run, groups, run.engine.dtype)
    if run.model.reads_class_token:
        converters.append(compute_class_token)
    converters.append(skip_idle_modules)  # the others find members by name
    if run.engine.zero_stage == 3:
        converters.append(_partition(run, groups))
    if run.config.compile:
        converters.append(partial(compile_block, function=compile_function(run.config.compile_mode)))
    return converters


def _of_rank(run: Run, groups: Groups, dtype: torch.dtype) -> list[Converter]:
    """The converters of layers with parameters of a type that the planner counts too."""
    options: dict[str, Any] = {"class_parallel": run.model.class_parallel, "dtype": dtype, "frozen": run.model.frozen}
    return rank_converters(run.config, groups.tensor_parallel(run.config), **options)


def _partition(run: Run, groups: Groups) -> Converter:
    """ZeRO-3's share of each parameter."""
    json = run.engine.json.replace({"zero_optimization.memory_efficient_linear": run.engine.autocast}).dump()
    return lambda layer: deepspeed.zero.Init(
        module=layer, config_dict_or_path=json, data_parallel_group=groups.dp, mpu=groups.grid
    )
