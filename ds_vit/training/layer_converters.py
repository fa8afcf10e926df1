"""What is done to a layer between its initial values and the engine: one function each, and one list of them.

A converter gets a layer that is whole and filled, and changes it in place; it is called for one layer at a time, so
that no rank holds more than one layer whole. A new one (fp8, other norms) is a function here and a line in `_IN_ORDER`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import deepspeed
import torch

from ds_vit.models import (
    Layer,
    cast_block_buffers,
    compute_class_token,
    compute_kept,
    freeze,
    norms_in_fp32,
    wants_kept,
)
from ds_vit.models.compiled import compile_block, compile_function
from ds_vit.parallel.groups import Groups, secondary_partition_group
from ds_vit.parallel.tensor import cut_layer
from ds_vit.training.plan import Plan

Converter = Callable[[Layer], object]


def layer_converters(plan: Plan, groups: Groups) -> tuple[Converter, ...]:
    """What a run does to each of its layers, in this order."""
    found = (make(plan, groups) for make in _IN_ORDER)
    return tuple(converter for converter in found if converter is not None)


def _cut(plan: Plan, groups: Groups) -> Converter | None:
    """This rank's tensor slice of the layer."""
    tp = groups.tensor_parallel(sequence_parallel=plan.config.sequence_parallel)
    return None if tp is None else partial(cut_layer, tp=tp, class_parallel=plan.model.class_parallel)


def _cast_buffers(plan: Plan, groups: Groups) -> Converter | None:
    """Buffers of the blocks in the type that the model computes in; DeepSpeed casts parameters alone."""
    if plan.deepspeed.precision.compute == "float32":
        return None
    return partial(cast_block_buffers, dtype=getattr(torch, plan.deepspeed.precision.compute))


def _keep_norms(plan: Plan, groups: Groups) -> Converter | None:
    """Norms that compute in fp32 beside a model in half precision."""
    wanted = plan.deepspeed.precision.compute != "float32" and plan.config.norm_dtype == "float32"
    return norms_in_fp32 if wanted else None


def _freeze(plan: Plan, groups: Groups) -> Converter | None:
    """What is not trained."""
    return partial(freeze, names=plan.model.frozen)


def _read_class_token(plan: Plan, groups: Groups) -> Converter | None:
    """The last block for the class token alone, where the head reads no other; a cut block computes all."""
    return compute_class_token if plan.model.reads_class_token else None


def _compute_kept(plan: Plan, groups: Groups) -> Converter | None:
    """Branches that are run on the samples alone that drop-path keeps; behind the cut, whose forwards they call.

    Estimates and trials of memory leave it out: all rows of a micro-batch may be kept, so that theirs is the most.
    """
    choice = plan.config.drop_path_compute
    if not plan.config.drop_path or choice == "all" or plan.config.compile:  # a graph is of one number of rows
        return None
    micro_batch = plan.data.batch.micro_batch

    def convert(layer: Layer) -> None:
        device = next(layer.parameters()).device.type
        compute_kept(layer, lambda rate: wants_kept(choice, rate, micro_batch, device))

    return convert


def _partition(plan: Plan, groups: Groups) -> Converter | None:
    """ZeRO-3's share of each parameter, of what is left of it by now."""
    if plan.deepspeed.zero_stage != 3:
        return None
    secondary = secondary_partition_group(plan.deepspeed.json)
    return lambda layer: deepspeed.zero.Init(
        module=layer,
        config_dict_or_path=dict(plan.deepspeed.json),
        data_parallel_group=groups.dp,
        mpu=groups.grid,
        zero_param_parallel_group=secondary,
    )


def _compile(plan: Plan, groups: Groups) -> Converter | None:
    """Blocks that run compiled."""
    if not plan.config.compile:
        return None
    return partial(compile_block, function=compile_function(plan.config.compile_mode))


_IN_ORDER = (_cut, _cast_buffers, _keep_norms, _freeze, _read_class_token, _compute_kept, _partition, _compile)
