"""Megatron's tensor parallelism of timm's ViTs: layers sharded over a group of ranks; sequence parallelism."""

from ds_vit.parallel.tensor.class_parallel import (
    SoftmaxCrossEntropy,
    SoftmaxDivergence,
    gather_logits,
    log_softmax,
    own_classes,
    pays,
)
from ds_vit.parallel.tensor.collectives import (
    TensorParallel,
    copy_to_region,
    reduce_from_region,
    stack_over_group,
    sum_over_group,
)
from ds_vit.parallel.tensor.cut import check_cut, cut_layer, legal_degrees
from ds_vit.parallel.tensor.slices import TensorSlice, assemble, assemble_flat

__all__ = [
    "SoftmaxCrossEntropy",
    "SoftmaxDivergence",
    "TensorParallel",
    "TensorSlice",
    "assemble",
    "assemble_flat",
    "check_cut",
    "copy_to_region",
    "cut_layer",
    "gather_logits",
    "legal_degrees",
    "log_softmax",
    "own_classes",
    "pays",
    "reduce_from_region",
    "stack_over_group",
    "sum_over_group",
]
