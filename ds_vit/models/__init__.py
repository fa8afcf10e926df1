"""timm's ViTs as layers that DeepSpeed can train: names, layers, initial values, FLOPs, parameter groups."""

from ds_vit.models.activations import GoingBack, Kept, kept_by_layers, made_going_back, saved_bytes
from ds_vit.models.alike import looks
from ds_vit.models.checkpointing import (
    CheckpointFunction,
    recompute_all,
    recompute_from_host_memory,
    recompute_selectively,
)
from ds_vit.models.dtypes import cast_block_buffers, norms_in_fp32
from ds_vit.models.flops import Flops, LayerCost, count_flops, layer_costs
from ds_vit.models.initial_checkpoint import InitialCheckpoint
from ds_vit.models.kept_rows import check_kept, compute_kept, count_kept, wants_kept
from ds_vit.models.keyed_init import initialise
from ds_vit.models.last_block import compute_class_token
from ds_vit.models.layers import BlockLayer, DecoderBlockLayer, EmbedLayer, HeadLayer, Layer, block_stacks, take_apart
from ds_vit.models.masked_autoencoder import (
    AutoencoderSettings,
    BridgeLayer,
    MaskedAutoencoder,
    PaintLayer,
    create_autoencoder,
    decoder_names,
    masked_patches,
    patchify,
    unpatchify,
)
from ds_vit.models.param_groups import classifier_names, freeze, frozen_names, no_weight_decay_names
from ds_vit.models.partition import balance, check_bounds
from ds_vit.models.pretrained import find_pretrained
from ds_vit.models.resolution import check_sizes, set_image_size
from ds_vit.models.sequential import BlockRun, SequentialViT, blocks_of, giving_features, run_layers, timm_names
from ds_vit.models.zoo import (
    ModelSpec,
    TimmViT,
    create_model,
    image_size,
    names_and_shapes,
    num_parameters,
    require_supported_name,
    supported_names,
)

__all__ = [
    "AutoencoderSettings",
    "BlockLayer",
    "BlockRun",
    "BridgeLayer",
    "CheckpointFunction",
    "DecoderBlockLayer",
    "EmbedLayer",
    "Flops",
    "GoingBack",
    "HeadLayer",
    "InitialCheckpoint",
    "Kept",
    "Layer",
    "LayerCost",
    "MaskedAutoencoder",
    "ModelSpec",
    "PaintLayer",
    "SequentialViT",
    "TimmViT",
    "balance",
    "block_stacks",
    "blocks_of",
    "cast_block_buffers",
    "check_bounds",
    "check_kept",
    "check_sizes",
    "classifier_names",
    "compute_class_token",
    "compute_kept",
    "count_flops",
    "count_kept",
    "create_autoencoder",
    "create_model",
    "decoder_names",
    "find_pretrained",
    "freeze",
    "frozen_names",
    "giving_features",
    "image_size",
    "initialise",
    "kept_by_layers",
    "layer_costs",
    "looks",
    "made_going_back",
    "masked_patches",
    "names_and_shapes",
    "no_weight_decay_names",
    "norms_in_fp32",
    "num_parameters",
    "patchify",
    "recompute_all",
    "recompute_from_host_memory",
    "recompute_selectively",
    "require_supported_name",
    "run_layers",
    "saved_bytes",
    "set_image_size",
    "supported_names",
    "take_apart",
    "timm_names",
    "unpatchify",
    "wants_kept",
]
