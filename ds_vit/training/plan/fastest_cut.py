"""`--pp-partition auto`: layers dealt to pipeline stages by playing DeepSpeed's schedule with what they cost."""

from __future__ import annotations

import dataclasses

import torch

from ds_vit.config.batch import BatchSizes
from ds_vit.models import BlockLayer, Layer, compute_class_token, kept_by_layers
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.stages import are_trained, check_trained, untrained
from ds_vit.planner.layers import as_a_rank_has_them
from ds_vit.planner.schedule import StageCost, fastest_bounds, play, stage_costs
from ds_vit.planner.work import work_of_layers
from ds_vit.training.plan.deepspeed import DeepSpeedPlan
from ds_vit.training.plan.model import ModelPlan


def cut_by_playing(model: ModelPlan, told: DeepSpeedPlan, layout: Layout, batch: BatchSizes) -> ModelPlan:
    """The model with the stages of the fastest step, where the flag asks for it.

    A layer takes as long as its products of matrices: those that a rank has, and runs again where it recomputes. So
    every rank finds the same bounds, whatever accelerator it has.

    Args:
        model: with balanced stages.
        told: the JSON's types, and what is recomputed.
        layout: degrees.
        batch: micro-batches of a step.

    Raises:
        UserError: more stages than layers, or a stage with nothing to train in every cut.
    """
    config = model.task.config
    if config.pp_partition != "auto" or layout.pp == 1:
        return model
    layers = as_a_rank_has_them(
        model.task.layers(model.whole),
        tp=layout.tp,
        sequence_parallel=config.sequence_parallel,
        class_parallel=model.class_parallel,
        compute=told.precision.compute,
        norms_fp32=config.norm_dtype == "float32",
        frozen=model.frozen,
    )
    for layer in layers:
        compute_class_token(layer)
    dtype = getattr(torch, told.precision.compute)
    kept = [one.bytes for one in kept_by_layers(model.whole, layers, dtype)]
    again = told.checkpointing.interval > 0 and not told.checkpointing.selective  # which keeps the products
    costs = [
        _cost(layer, work.forward.flops, work.backward.flops, again)
        for layer, work in zip(layers, work_of_layers(model.whole, layers, dtype), strict=True)
    ]
    m = batch.accumulation
    trained = are_trained(layers, model.frozen)
    bounds = fastest_bounds(costs, kept, layout.pp, m, is_legal=lambda bounds: not untrained(bounds, trained))
    check_trained(bounds, trained)
    balanced, fastest = (play(stage_costs(costs, cut), m).seconds for cut in (model.bounds, bounds))
    gain = balanced / fastest - 1
    than = ",".join(map(str, model.bounds))
    note = f"--pp-partition auto: {','.join(map(str, bounds))}"
    note += f", a step {gain:.1%} faster than with the balanced {than}" if gain > 5e-4 else ", as fast as balanced"
    return dataclasses.replace(model, bounds=tuple(bounds), notes=(*model.notes, note))


def _cost(layer: Layer, forward: float, backward: float, again: bool) -> StageCost:
    """In FLOPs for an image."""
    return StageCost(forward, backward + (forward if again and isinstance(layer, BlockLayer) else 0.0))
