"""From a plan to a running engine: layers, initial values, tensor slices, stages, optimizer, loss, DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from ds_vit.engine.base import Engine
from ds_vit.engine.pipeline import PipeEngine, StagedViT
from ds_vit.engine.plain import PlainEngine
from ds_vit.engine.workarounds import leave_products_alone
from ds_vit.models import (
    CheckpointFunction,
    Layer,
    SequentialViT,
    initialise,
    no_weight_decay_names,
    recompute_all,
    recompute_from_host_memory,
    recompute_selectively,
    timm_names,
)
from ds_vit.optim.build import attach, build_optimizer, parameter_groups
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.tensor import gather_logits
from ds_vit.training.layer_converters import layer_converters
from ds_vit.training.plan import Plan


def build_engine(plan: Plan, device: torch.device, groups: Groups) -> Engine:
    """This rank's part of the plan's model, initialised and wrapped by DeepSpeed (a collective)."""
    if plan.config.tf32:
        torch.set_float32_matmul_precision("high")
    if plan.deepspeed.checkpointing.selective:
        leave_products_alone()
    layers = _build_layers(plan, device, groups)
    tp = groups.tensor_parallel(sequence_parallel=plan.config.sequence_parallel)
    cut_over_classes = tp if plan.model.class_parallel else None
    loss = plan.model.task.loss(cut_over_classes)
    fields = plan.model.task.fields(training=True)
    shared: dict[str, Any] = {
        "groups": groups,
        "input_names": [field.name for field in fields if field.stage == "first"],
    }
    if cut_over_classes is not None:
        shared["whole_outputs"] = lambda logits: gather_logits(logits, plan.model.task.num_classes, cut_over_classes)
    config, interval = dict(plan.deepspeed.json), plan.deepspeed.checkpointing.interval
    function = recompute_function(plan)
    engine: Engine
    if plan.parallel.layout.pp == 1:
        model = SequentialViT(layers, checkpoint_interval=interval, checkpoint_function=function if interval else None)
        optimizer = _optimizer(plan, model, device)
        engine = PlainEngine(model, optimizer, loss, config, **shared)
    else:
        targets = [field.name for field in fields if field.stage == "last"]
        staged = StagedViT(
            layers,
            plan.model.bounds,
            groups,
            loss,
            targets,
            checkpoint_interval=interval,
            checkpoint_function=function,
        )
        optimizer = _optimizer(plan, staged, device)
        engine = PipeEngine(staged, optimizer, config, **shared)
    if optimizer is not None:
        attach(optimizer, engine.zero_map, plan.model.whole, plan.config.layer_decay)
    return engine


def _build_layers(plan: Plan, device: torch.device, groups: Groups) -> list[Layer]:
    """The model's layers, those of this rank's stage filled.

    They are filled one at a time, each converted before the next one (layer_converters.py), so that no rank holds more
    than one layer whole.
    """
    whole, bounds, stage = plan.model.whole, plan.model.bounds, plan.parallel.stage
    layers = plan.model.task.layers(whole)
    converters = layer_converters(plan, groups)

    def on_layer(layer: Layer) -> None:
        for convert in converters:
            convert(layer)

    initialise(
        whole,
        layers[bounds[stage] : bounds[stage + 1]],
        seed=plan.config.seed,
        device=device,
        # DeepSpeed casts a whole model itself, and expects a partitioned one to be in its type already.
        dtype=getattr(torch, plan.deepspeed.precision.compute) if plan.deepspeed.zero_stage == 3 else torch.float32,
        checkpoint=plan.model.initial_checkpoint,
        on_layer=on_layer,
    )
    return layers


def _optimizer(plan: Plan, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer | None:
    wanted = plan.optimizer
    if wanted is None:
        return None
    names = timm_names(model)
    parameters = [(names[local], p) for local, p in model.named_parameters()]
    undecayed = no_weight_decay_names(plan.model.whole)
    groups = parameter_groups(parameters, wanted.weight_decay, undecayed, wanted.fallback)
    # With the optimizer offloaded, its step runs on the CPU.
    zero = plan.deepspeed.json.get("zero_optimization", {})
    offloaded = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    return build_optimizer(wanted.cls, groups, wanted.arguments, torch.device("cpu") if offloaded else device)


def recompute_function(plan: Plan) -> CheckpointFunction:
    """What runs a group of blocks whose activations are recomputed: `function(run, *tensors)`."""
    told = plan.deepspeed.checkpointing
    if told.selective:
        return recompute_selectively
    return recompute_from_host_memory if told.cpu else recompute_all
