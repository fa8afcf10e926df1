"""Segmentation: a timm ViT whose patch tokens a head turns into logits of each class on a grid.

The head is one linear layer, as in linear segmentation probes, or two transposed convolutions that make the grid four
times as fine (the simple feature pyramid of Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object
Detection", https://arxiv.org/abs/2203.16527, up to its finest level). Its parameters are named `seg_head.…`; all others
have timm's names.

Shapes: B images, K windows of an image, S tokens, D width, C classes, gh x gw patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from timm.layers import LayerNorm2d
from torch import nn

from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import EmbedLayer, HeadLayer, Layer, encoder_layers, take_apart
from ds_vit.models.zoo import ModelSpec, TimmViT, create_model, require_all_patches

HEAD = "seg_head."
"""How the names of the head's parameters begin."""
_CONV_WIDTH = 256


def make_head(kind: str, width: int, num_classes: int) -> nn.Module:
    """The head of --seg-head on tokens of this width; "conv" makes the grid four times as fine."""
    if kind == "linear":
        return nn.Linear(width, num_classes)
    layers: list[nn.Module] = []
    for inputs in (width, _CONV_WIDTH):
        layers += [nn.ConvTranspose2d(inputs, _CONV_WIDTH, 2, stride=2), LayerNorm2d(_CONV_WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(_CONV_WIDTH, num_classes, 1))


def grid_of_logits(head: nn.Module, patches: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Normed patch tokens [B, gh * gw, D] -> logits [B, C, gh, gw], of the conv head [B, C, 4 gh, 4 gw]."""
    if isinstance(head, nn.Linear):
        return head(patches).transpose(1, 2).unflatten(2, grid)
    return head(patches.transpose(1, 2).unflatten(2, grid))


class Segmenter(nn.Module):
    """Mixed in before the class of a timm ViT by `create_segmenter`, and before that of its last layer: called on
    images [B, 3, h, w], it gives logits.

    Attention pooling is kept so that files of the backbone fit, but nothing reaches it: it is not trained.

    Attributes:
        seg_head: see `make_head`.
        grid_size: patches of an image in (height, width).
    """

    grid_size: tuple[int, int]

    def get_classifier(self) -> nn.Module:
        """The layer whose outputs are the classes."""
        return self.seg_head if isinstance(self.seg_head, nn.Linear) else self.seg_head[-1]

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Tokens [B, S, D] after the norm -> logits [B, C, gh, gw], of the conv head [B, C, 4 gh, 4 gw].

        With `pre_logits` the features of the images, the mean of their patch tokens [B, D].
        """
        patches = self.fc_norm(x[:, self.num_prefix_tokens :])  # of a model that norms after pooling
        return patches.mean(dim=1) if pre_logits else grid_of_logits(self.seg_head, patches, self.grid_size)


def create_segmenter(spec: ModelSpec, head: str, *, for_training: bool = True) -> TimmViT:
    """The description of a `Segmenter`, on the meta device its structure, names and shapes without memory.

    `take_apart`, `initialise`, `layer_flops`, `check_degree` and `shard_layer` accept it and its layers like timm's.

    Args:
        spec: the backbone and the number of classes.
        head: the kind of head.
        for_training: as in `create_model`.

    Raises:
        UserError: as `create_model`; patch dropout, or pixels outside all patches.
    """
    model = create_model(replace(spec, num_classes=0), for_training=for_training, classifier=False)
    require_all_patches(model, spec.name)
    mix_in(model, Segmenter)
    model.num_classes, model.grid_size = spec.num_classes, model.patch_embed.grid_size
    with torch.device("meta"):
        model.seg_head = make_head(head, model.embed_dim, spec.num_classes)
    if model.attn_pool is not None:
        model.attn_pool.requires_grad_(False)
    return model


class _WindowEmbed(EmbedLayer):
    """Mixed in before an embedding: evaluation's windows [B, K, 3, h, w] are images, which later layers see."""

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        return super().embed(images.flatten(0, -4))


class SegmentationHeadLayer(Segmenter, HeadLayer):
    """The end of a `Segmenter`: final norm and head."""

    global_pool = "avg"  # it reads the patches

    def __init__(self, model: Segmenter) -> None:
        """Args: a copy that `take_apart` made."""
        super().__init__()
        self.norm, self.fc_norm, self.attn_pool = model.norm, model.fc_norm, model.attn_pool
        self.seg_head = model.seg_head
        self.num_prefix_tokens, self.grid_size = model.num_prefix_tokens, model.grid_size


@take_apart.register
def _(model: Segmenter) -> list[Layer]:
    """An `EmbedLayer` that also takes windows, a `BlockLayer` for each block, a `SegmentationHeadLayer`."""
    layers, head = encoder_layers(model), SegmentationHeadLayer(model)
    mix_in(layers[0], _WindowEmbed)
    head.num_tokens = layers[-1].num_tokens
    return [*layers, head]
