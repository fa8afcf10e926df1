"""A timm ViT with a projection head, and a teacher with its own: the model of DINO and iBOT.

Caron et al. 2021 (https://arxiv.org/abs/2104.14294), Zhou et al. 2022 (https://arxiv.org/abs/2111.07832), with the
choices of DINOv2 (Oquab et al. 2024, https://arxiv.org/abs/2304.07193; facebookresearch/dinov2): one head for class
tokens and patches, initial values, and a mask token that replaces patches before the positions are added.

The student's backbone is the main tower and has timm's names; `dino_head`, `teacher` and `teacher_head` are further
towers. A backbone gives all its normed tokens in training and the class token in evaluation. It takes images of several
sizes in one step. Weight normalisation of the prototypes is a function of the weight, so the weight is one parameter,
and the norm of a prototype is fixed at 1: the losses divide its logits by the length of its row.

Shapes: B images, S tokens, D width of the ViT, N patches, R rows of a head call, E width of the bottleneck, K
prototypes (K / tp of a rank where they are sharded).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from torch import nn

from ds_vit.config.schema import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import EmbedLayer, HeadLayer, Layer, TokenCount, encoder_layers, head_layer, take_apart
from ds_vit.models.sequential import check_sizes
from ds_vit.models.zoo import ModelSpec, TimmViT, create_model
from ds_vit.parallel.tensor.plans import PLANS, ShardingPlan
from ds_vit.tasks.dino.rope import CoordinateDraws, draw_coordinates

HEAD, TEACHER, TEACHER_HEAD = "dino_head", "teacher", "teacher_head"
"""The further towers."""
PATCH_NORM, LOCAL_NORM = "patch_norm", "local_cls_norm"
"""Final norms in addition to timm's `norm`: of patches, and of the class and register tokens of local crops."""


class LastLayer(nn.Module):
    """The weight-normalised last layer without its product: the losses multiply by it, a few rows at a time.

    Args:
        count: K.
        width: E.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight, float32 [K / tp, E], and the lengths of its rows [K / tp], through which no gradient passes."""
        # A teacher's are read after other forward passes, before which ZeRO-3 frees the parameter's memory.
        weight = self.weight.to(torch.float32, copy=not torch.is_grad_enabled())
        return weight.view_as(weight), torch.linalg.vector_norm(weight.detach(), dim=-1)


PLANS[LastLayer] = ShardingPlan(
    lambda module: {"--prototypes": module.weight.shape[0]}, sharded_class=LastLayer, vectors=("weight",)
)


class ProjectionHead(nn.Module):
    """The description of a head: three linear maps with GELU between them, and prototypes.

    Args:
        in_dim: D.
        config: the flags, with K, the width of two hidden layers and E.

    Attributes:
        config: as above.
        images_per_sample: of its layer.
    """

    attn_pool: ClassVar[None] = None
    pretrained_cfg: ClassVar[dict[str, Any]] = {"architecture": "the projection head"}
    images_per_sample: tuple[float, float] = (1.0, 1.0)

    def __init__(self, in_dim: int, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        hidden, bottleneck = config.head_hidden_dim, config.head_bottleneck_dim
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, bottleneck),
        )
        self.last_layer = LastLayer(config.prototypes, bottleneck)

    def get_classifier(self) -> nn.Module:
        """As timm's: it has none."""
        return nn.Identity()

    def init_weights(self, needs_reset: bool = True) -> None:
        """DINOv2's initial values."""
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        bound = self.config.head_bottleneck_dim**-0.5
        nn.init.uniform_(self.last_layer.weight, -bound, bound)


class ProjectionHeadLayer(Layer):
    """The one layer of a head's tower."""

    def __init__(self, head: ProjectionHead) -> None:
        """Args: a copy that `take_apart` made."""
        super().__init__()
        self.mlp, self.last_layer = head.mlp, head.last_layer
        self.num_tokens = TokenCount(1, 0)

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """As `Layer.example`: rows [R, D]."""
        first = self.mlp[0]
        return (torch.empty(samples, first.in_features, dtype=first.weight.dtype, device="meta"),)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows [R, D], …) -> rows of length 1, float32 [R, E], and what `LastLayer` gives.

        The prototypes are read within the forward pass of their owner, around which ZeRO-3 gathers them, and gradients
        return to it.
        """
        return F.normalize(self.mlp(inputs[0]).float(), dim=-1), *self.last_layer()


class TokenViT(nn.Module):
    """Mixed in before the class of a timm ViT: a backbone whose last layer gives tokens in training.

    Attributes:
        images_per_sample: of its layers.
        reads_patches: whether other tokens than the class token are read in training.
    """

    images_per_sample: tuple[float, float] = (1.0, 1.0)
    reads_patches: bool = True


class SelfDistillationViT(TokenViT):
    """The same for the student, which has a mask token and describes all towers.

    Attributes:
        mask_token: replaces the embedding of masked patches [1, 1, D].
        draws_coordinates: whether rotary positions are drawn in training (rope.py).
        added_kwargs: arguments of timm's constructor that the spec lacks.
    """

    further_towers: ClassVar = (HEAD, TEACHER, TEACHER_HEAD)
    draws_coordinates: bool
    added_kwargs: Mapping[str, Any]

    def init_weights(self, needs_reset: bool = True) -> None:
        """timm's initial values, and DINOv2's of the mask token."""
        super().init_weights(needs_reset=needs_reset)
        nn.init.zeros_(self.mask_token)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's groups; the mask token belongs to the stem, like the class token, and further norms to the norm."""
        groups = super().group_matcher(coarse)
        norms = (rf"^(?:{PATCH_NORM}|{LOCAL_NORM})\.", (99999,))  # the last layer, as timm writes it
        return {**groups, "stem": rf"{groups['stem']}|mask_token", "blocks": [*groups["blocks"], norms]}


def create_self_distillation(spec: ModelSpec, config: RunConfig, *, for_training: bool = True) -> SelfDistillationViT:
    """The description of student, teacher and their heads, on the meta device without memory.

    The teacher has no drop-path, no dropout and no norm of local crops, and is frozen.

    Args:
        spec: the backbone. Its number of classes is ignored: there is no classifier.
        config: the flags.
        for_training: as in `create_model`.

    Raises:
        UserError: as `create_model`; a head that reads more than the class token, patch dropout, overlapping patches,
            images that are not square or no multiple of the patch size, local crops that cannot be told from global
            ones, or other positions than DINOv3's to draw.
    """
    spec, added = replace(spec, num_classes=0), {}
    model = create_model(spec, for_training=for_training, classifier=False)
    if model.global_pool != "token" and model.cls_token is not None and "global_pool" not in spec.model_kwargs:
        # DINOv3's features are its class tokens, and timm's names of it pool patches.
        added = {"global_pool": "token"}
        spec = replace(spec, model_kwargs={**spec.model_kwargs, **added})
        model = create_model(spec, for_training=for_training, classifier=False)
    _check_backbone(model, spec, config)
    none = dict.fromkeys(("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"), 0.0)
    still = replace(spec, drop_path_rate=0.0, model_kwargs={**spec.model_kwargs, **none})
    teacher = create_model(still, for_training=for_training, classifier=False)
    reads_patches, draws = config.ibot_weight > 0, CoordinateDraws.of(config) is not None
    mix_in(teacher, TokenViT, reads_patches=reads_patches)
    mix_in(model, SelfDistillationViT, reads_patches=reads_patches, draws_coordinates=draws, added_kwargs=added)
    if config.untie_cls_and_patch_norms:
        for tower in (model, teacher):
            tower.add_module(PATCH_NORM, copy.deepcopy(tower.norm))
    if config.untie_global_and_local_cls_norm:
        model.add_module(LOCAL_NORM, copy.deepcopy(model.norm))
    with torch.device("meta"):
        model.mask_token = nn.Parameter(torch.empty(1, 1, model.embed_dim))
        towers = (ProjectionHead(model.embed_dim, config), teacher, ProjectionHead(model.embed_dim, config))
    for name, tower in zip(SelfDistillationViT.further_towers, towers, strict=True):
        model.add_module(name, tower)
    for tower in towers[1:]:
        tower.requires_grad_(False)
    _count_crops(model, config)
    return model


def local_size(config: RunConfig, model: TimmViT) -> int:
    """--local-crops-size; by default the multiple of the patch size that is nearest to 96."""
    patch = model.patch_embed.patch_size[0]
    return config.local_crops_size or max(1, round(96 / patch)) * patch


def masked_share(config: RunConfig) -> float:
    """Of the global crops' patches, expected; 0 without iBOT."""
    return config.mask_sample_probability * sum(config.mask_ratio_min_max) / 2 if config.ibot_weight else 0.0


def _count_crops(model: SelfDistillationViT, config: RunConfig) -> None:
    """Set how many images one sample brings to each tower, for estimates of memory and time.

    A small crop counts by its share of a large one's tokens.
    """
    patch, patches, prefix = model.patch_embed.patch_size[0], model.patch_embed.num_patches, model.num_prefix_tokens
    num_local = config.local_crops_number
    of_locals = num_local * (prefix + (local_size(config, model) // patch) ** 2) / (prefix + patches)
    model.images_per_sample = 2.0 + of_locals, max(2.0, of_locals)
    model.teacher.images_per_sample = 2.0, 2.0
    rows = 2.0 + 2.0 * patches * masked_share(config)
    model.dino_head.images_per_sample = rows + num_local, rows + num_local
    model.teacher_head.images_per_sample = rows, rows


def _check_backbone(model: TimmViT, spec: ModelSpec, config: RunConfig) -> None:
    """Reject a backbone that cannot be trained this way, or not with these flags."""
    if model.global_pool != "token" or model.cls_token is None:
        raise UserError(
            f"--task dino reads the class token, and {spec.name!r} has global_pool {model.global_pool!r} and "
            f"{'a' if model.cls_token is not None else 'no'} class token; add --model-kwargs class_token=true "
            "global_pool=token"
        )
    if not isinstance(model.patch_drop, (nn.Identity, type(None))):
        raise UserError(
            f"model_kwargs patch_drop_rate {model.patch_drop.prob}: --task dino masks patches and predicts them, and "
            "those that are left out have no prediction; drop patch_drop_rate"
        )
    height, width = model.patch_embed.img_size
    if height != width:
        raise UserError(f"--task dino takes square crops, and {spec.name!r} has images of {height} x {width}")
    check_sizes(model, spec.name, [height])
    local = local_size(config, model)
    if config.local_crops_number:
        check_sizes(model, spec.name, [local], "--local-crops-size")
    if config.untie_global_and_local_cls_norm and local == height:
        raise UserError(
            "--untie-global-and-local-cls-norm: local crops are recognised by their size, and both kinds have "
            f"{local} pixels; give another --local-crops-size"
        )
    rope = getattr(model, "rope", None)
    if CoordinateDraws.of(config) is not None and not isinstance(rope, RotaryEmbeddingDinoV3):
        raise UserError(
            "--rope-shift-coords, --rope-jitter-coords and --rope-rescale-coords change DINOv3's rotary positions, and "
            f"{spec.name!r} has {'others' if rope is not None else 'none'}; take a name with dinov3, or drop the flags"
        )


class MaskedEmbed(EmbedLayer):
    """Mixed in before the class of an `EmbedLayer`: masks patches.

    Attributes:
        mask_token: of the student; the teacher has none.
    """

    takes_sizes = True

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
        """(images [B, C, height, width], keys int64 [B], mask bool [B, N] or None) -> (tokens [B, S, D], keys)."""
        images, keys, mask, *_ = (*inputs, None)
        self._mask = mask
        try:
            return super().forward((images, keys))
        finally:
            self._mask = None

    def patches(self, images: torch.Tensor) -> torch.Tensor:
        """As `EmbedLayer.patches`."""
        patches = super().patches(images)
        if self._mask is None:
            return patches
        mask = self._mask.view(*patches.shape[:-1], 1)
        return torch.where(mask, self.mask_token.to(patches.dtype).view(-1), patches)


class TokensHead(HeadLayer):
    """Mixed in before the class of a `HeadLayer`: in training it gives tokens [B, S, D] after the final norm.

    S is 1 where the last block has computed only the class token. Evaluation has timm's norm, which is that of class
    and register tokens.

    Attributes:
        patch_norm: of the patches, if they have a separate one.
        local_cls_norm: of local crops, if they have a separate one. Their patches are read by no loss.
        num_global_patches: of a global crop.
    """

    patch_norm: nn.Module | None
    local_cls_norm: nn.Module | None
    num_global_patches: int

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(tokens [B, S, D], keys int64 [B], …) -> normed tokens [B, S, D]; in evaluation, class tokens [B, D]."""
        if not self.training:
            return super().forward(inputs)
        tokens, count = inputs[0], self.num_tokens
        if self.local_cls_norm is not None and count.num_patches != self.num_global_patches:
            return self.local_cls_norm(tokens)
        if self.patch_norm is None:
            return self.norm(tokens)
        prefix, patches = tokens.split([count.num_prefix_tokens, count.num_patches], dim=1)
        return torch.cat((self.norm(prefix), self.patch_norm(patches)), dim=1)


@take_apart.register
def _(model: TokenViT) -> list[Layer]:
    """As timm's: depth + 2 layers."""
    layers = encoder_layers(model)
    embed, head = layers[0], head_layer(model)
    head.num_tokens = embed.num_tokens
    layers[-1].head_reads_only_class_token = not model.reads_patches
    mix_in(embed, MaskedEmbed)
    norms = {name: getattr(model, name, None) for name in (PATCH_NORM, LOCAL_NORM)}
    mix_in(head, TokensHead, num_global_patches=model.patch_embed.num_patches, **norms)
    if isinstance(model, SelfDistillationViT):
        embed.mask_token = model.mask_token
        if model.draws_coordinates:
            draw_coordinates(embed, layers[1:])
    for layer in (*layers, head):
        layer.images_per_sample = model.images_per_sample
    return [*layers, head]


@take_apart.register
def _(model: ProjectionHead) -> list[Layer]:
    """One layer."""
    layer = ProjectionHeadLayer(model)
    layer.images_per_sample = model.images_per_sample
    return [layer]
