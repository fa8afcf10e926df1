"""`--pp-partition auto`: the pipeline stages with the fastest step, once the batch is known."""

from __future__ import annotations

import dataclasses

import torch

from ds_vit.config.batch import BatchSizes
from ds_vit.parallel.layout import Layout
from ds_vit.planner.memory import layers_of_rank
from ds_vit.planner.pipeline import fastest_stages
from ds_vit.training.resolve.deepspeed import DeepSpeedSettings
from ds_vit.training.resolve.model import ModelConfig


def cut_by_playing(model: ModelConfig, told: DeepSpeedSettings, layout: Layout, batch: BatchSizes) -> ModelConfig:
    """The model with the stages of the fastest step, where the flag asks for it.

    Args:
        model: with balanced stages.
        told: the JSON's types, and what is recomputed.
        layout: degrees.
        batch: micro-batches of a step.

    Raises:
        UserError: more stages than layers, or a stage with nothing to train whatever the bounds.
    """
    config = model.task.config
    if config.pp_partition != "auto" or layout.pp == 1:
        return model
    layers = layers_of_rank(
        model.task.layers(model.whole),
        tp=layout.tp,
        sequence_parallel=config.sequence_parallel,
        class_parallel=model.class_parallel,
        compute=told.precision.compute,
        norms_fp32=config.norm_dtype == "float32",
        frozen=model.frozen,
    )
    bounds, note = fastest_stages(
        model.whole,
        layers,
        model.bounds,
        batch.accumulation,
        frozen=model.frozen,
        dtype=getattr(torch, told.precision.compute),
        recomputed=told.checkpointing.interval > 0 and not told.checkpointing.selective,
    )
    return dataclasses.replace(model, bounds=bounds, notes=(*model.notes, note))
