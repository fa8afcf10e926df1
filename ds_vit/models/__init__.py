"""timm's ViTs as layers that DeepSpeed can train: names, layers, initial values, parameter groups."""

from ds_vit.models.bridge_tower import BridgeTower, BridgeTowerLayer, create_bridge_tower, model_folder
from ds_vit.models.checkpointing import CheckpointFunction, recompute_all, recompute_selectively
from ds_vit.models.dtypes import cast_block_buffers, norms_in_fp32
from ds_vit.models.kept_rows import compute_kept
from ds_vit.models.keyed_init import initialise
from ds_vit.models.last_block import compute_class_token
from ds_vit.models.layers import MAIN_TOWER, BlockLayer, Layer, take_apart, take_apart_towers, tower_of
from ds_vit.models.masked_autoencoder import (
    AutoencoderSettings,
    MaskedAutoencoder,
    create_autoencoder,
    decoder_names,
    masked_patches,
)
from ds_vit.models.param_groups import freeze, frozen_names, no_weight_decay_names
from ds_vit.models.projection import Projection, ProjectionLayer
from ds_vit.models.self_distillation import HeadSettings, SelfDistillationViT, create_self_distillation
from ds_vit.models.sequential import SequentialViT, Towers, giving_features, run_layers, timm_names
from ds_vit.models.text_tower import (
    TEXT_MODELS,
    ContrastiveModel,
    TextEmbed,
    TextSettings,
    create_contrastive_model,
    text_settings,
)
from ds_vit.models.zoo import (
    ModelSpec,
    TeacherSpec,
    TimmViT,
    create_model,
    image_size,
    names_and_shapes,
    num_parameters,
    supported_names,
)

__all__ = [
    "MAIN_TOWER",
    "TEXT_MODELS",
    "AutoencoderSettings",
    "BlockLayer",
    "BridgeTower",
    "BridgeTowerLayer",
    "CheckpointFunction",
    "ContrastiveModel",
    "HeadSettings",
    "Layer",
    "MaskedAutoencoder",
    "ModelSpec",
    "Projection",
    "ProjectionLayer",
    "SelfDistillationViT",
    "SequentialViT",
    "TeacherSpec",
    "TextEmbed",
    "TextSettings",
    "TimmViT",
    "Towers",
    "cast_block_buffers",
    "compute_class_token",
    "compute_kept",
    "create_autoencoder",
    "create_bridge_tower",
    "create_contrastive_model",
    "create_model",
    "create_self_distillation",
    "decoder_names",
    "freeze",
    "frozen_names",
    "giving_features",
    "image_size",
    "initialise",
    "masked_patches",
    "model_folder",
    "names_and_shapes",
    "no_weight_decay_names",
    "norms_in_fp32",
    "num_parameters",
    "recompute_all",
    "recompute_selectively",
    "run_layers",
    "supported_names",
    "take_apart",
    "take_apart_towers",
    "text_settings",
    "timm_names",
    "tower_of",
]
