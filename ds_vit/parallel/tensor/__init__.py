"""Tensor parallelism (Megatron's) of timm's ViTs: layers cut over a group of ranks, on tokens whole or shared."""

from ds_vit.parallel.tensor.class_parallel import class_parallel_loss, gather_logits, pays
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.parallel.tensor.cut import check_cut, cut_layer, legal_degrees
from ds_vit.parallel.tensor.slices import TensorSlice, assemble, assemble_flat

__all__ = [
    "TensorParallel",
    "TensorSlice",
    "assemble",
    "assemble_flat",
    "check_cut",
    "class_parallel_loss",
    "cut_layer",
    "gather_logits",
    "legal_degrees",
    "pays",
]
