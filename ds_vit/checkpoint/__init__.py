"""Checkpoints without a layout: safetensors with timm's names, whole shapes, fp32; written and read by all ranks."""

from ds_vit.checkpoint.folder import (
    Checkpoint,
    Damaged,
    checkpoints,
    commit,
    discard,
    folder_name,
    forget_best_after,
    mark_best,
    marked,
    newest,
    open_checkpoint,
    partial_folder,
    prune,
    remove_leftovers,
    step_of,
)
from ds_vit.checkpoint.tensors import FileEntry, TensorSpec, TensorWriter, index_of, save_weights, split_files
from ds_vit.models.weight_files import TensorFiles

__all__ = [
    "Checkpoint",
    "Damaged",
    "FileEntry",
    "TensorFiles",
    "TensorSpec",
    "TensorWriter",
    "checkpoints",
    "commit",
    "discard",
    "folder_name",
    "forget_best_after",
    "index_of",
    "mark_best",
    "marked",
    "newest",
    "open_checkpoint",
    "partial_folder",
    "prune",
    "remove_leftovers",
    "save_weights",
    "split_files",
    "step_of",
]
