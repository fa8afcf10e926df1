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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import (
    EmbedLayer,
    HeadLayer,
    Layer,
    TokenCount,
    check_complete,
    copy_to_take_apart,
    encoder_layers,
    head_layer,
    take_apart,
)
from ds_vit.models.sequential import check_sizes
from ds_vit.models.zoo import ModelSpec, TimmViT, create_model
from ds_vit.parallel.tensor.plans import PLANS, ShardingPlan
from ds_vit.tasks.dino.rope import draw_coordinates

HEAD, TEACHER, TEACHER_HEAD = "dino_head", "teacher", "teacher_head"
"""The further towers."""
PATCH_NORM, LOCAL_NORM = "patch_norm", "local_cls_norm"
"""Final norms in addition to timm's `norm`: of patches, and of the class and register tokens of local crops."""


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the projection head; the defaults are DINOv2's.

    Attributes:
        prototypes: K.
        hidden_dim: width of its two hidden layers.
        bottleneck_dim: E.
    """

    prototypes: int = 65536
    hidden_dim: int = 2048
    bottleneck_dim: int = 256


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

    Attributes:
        in_dim: D.
        settings: of the head.
        images_per_sample: of its layer.
    """

    attn_pool: ClassVar[None] = None
    pretrained_cfg: ClassVar[dict[str, Any]] = {"architecture": "the projection head"}
    images_per_sample: tuple[float, float] = (1.0, 1.0)

    def __init__(self, in_dim: int, settings: HeadSettings) -> None:
        """Args: as the attributes."""
        super().__init__()
        self.in_dim, self.settings = in_dim, settings
        hidden, bottleneck = settings.hidden_dim, settings.bottleneck_dim
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, bottleneck),
        )
        self.last_layer = LastLayer(settings.prototypes, bottleneck)

    def get_classifier(self) -> nn.Module:
        """As timm's: it has none."""
        return nn.Identity()

    def init_weights(self, needs_reset: bool = True) -> None:
        """DINOv2's initial values."""
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        bound = self.settings.bottleneck_dim**-0.5
        nn.init.uniform_(self.last_layer.weight, -bound, bound)


class ProjectionHeadLayer(Layer):
    """The one layer of a head's tower."""

    def __init__(self, head: ProjectionHead) -> None:
        """Args: a `copy_to_take_apart`."""
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

    def untie_norm(self, name: str) -> None:
        """Add a final norm like the model's."""
        self.add_module(name, copy.deepcopy(self.norm))


class SelfDistillationViT(TokenViT):
    """The same for the student, which has a mask token and describes all towers.

    Attributes:
        mask_token: replaces the embedding of masked patches [1, 1, D].
        settings: of both heads.
        draws_coordinates: whether rotary positions are drawn in training (rope.py).
        added_kwargs: arguments of timm's constructor that the spec lacks.
    """

    further_towers: ClassVar = (HEAD, TEACHER, TEACHER_HEAD)
    settings: HeadSettings
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


def create_self_distillation(
    spec: ModelSpec,
    settings: HeadSettings,
    *,
    for_training: bool = True,
    reads_patches: bool = True,
    untied_norms: Collection[str] = (),
    draws_coordinates: bool = False,
) -> SelfDistillationViT:
    """The description of student, teacher and their heads, on the meta device without memory.

    The teacher has no drop-path and no dropout, and is frozen.

    Args:
        spec: the backbone. Its number of classes is ignored: there is no classifier.
        settings: of the heads.
        for_training: as in `create_model`.
        reads_patches: of both backbones.
        untied_norms: of `PATCH_NORM` and `LOCAL_NORM`; the teacher, which has no local crops, only has the former.
        draws_coordinates: of the student's rotary positions.

    Raises:
        UserError: as `create_model`; a head that reads more than the class token, patch dropout, overlapping patches,
            images that are not square or no multiple of the patch size, or other positions than DINOv3's to draw.
    """
    spec, added = replace(spec, num_classes=0), {}
    model = create_model(spec, for_training=for_training, classifier=False)
    if model.global_pool != "token" and model.cls_token is not None and "global_pool" not in spec.model_kwargs:
        # DINOv3's features are its class tokens, and timm's names of it pool patches.
        added = {"global_pool": "token"}
        spec = replace(spec, model_kwargs={**spec.model_kwargs, **added})
        model = create_model(spec, for_training=for_training, classifier=False)
    _check_backbone(model, spec)
    rope = getattr(model, "rope", None)
    if draws_coordinates and not isinstance(rope, RotaryEmbeddingDinoV3):
        raise UserError(
            "--rope-shift-coords, --rope-jitter-coords and --rope-rescale-coords change DINOv3's rotary positions, and "
            f"{spec.name!r} has {'others' if rope is not None else 'none'}; take a name with dinov3, or drop the flags"
        )
    none = dict.fromkeys(("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"), 0.0)
    still = replace(spec, drop_path_rate=0.0, model_kwargs={**spec.model_kwargs, **none})
    teacher = create_model(still, for_training=for_training, classifier=False)
    mix_in(teacher, TokenViT, reads_patches=reads_patches)
    of_student = {"settings": settings, "draws_coordinates": draws_coordinates, "added_kwargs": added}
    mix_in(model, SelfDistillationViT, reads_patches=reads_patches, **of_student)
    for norm in untied_norms:
        model.untie_norm(norm)
        if norm == PATCH_NORM:
            teacher.untie_norm(norm)
    with torch.device("meta"):
        model.mask_token = nn.Parameter(torch.empty(1, 1, model.embed_dim))
        towers = (ProjectionHead(model.embed_dim, settings), teacher, ProjectionHead(model.embed_dim, settings))
    for name, tower in zip(SelfDistillationViT.further_towers, towers, strict=True):
        model.add_module(name, tower)
    for tower in towers[1:]:
        tower.requires_grad_(False)
    return model


def count_crops(model: SelfDistillationViT, *, num_local: int, local_size: int, masked_share: float) -> None:
    """Set how many images one sample brings to each tower, for estimates of memory and time.

    A small crop counts by its share of a large one's tokens.

    Args:
        model: from `create_self_distillation`.
        num_local: local crops of a sample, next to two global ones.
        local_size: their side in pixels.
        masked_share: expected share of the global crops' patches that are masked.
    """
    patch, patches, prefix = model.patch_embed.patch_size, model.patch_embed.num_patches, model.num_prefix_tokens
    tokens_of_local = prefix + (local_size // patch[0]) * (local_size // patch[1])
    of_locals = num_local * tokens_of_local / (prefix + patches)
    model.images_per_sample = 2.0 + of_locals, max(2.0, of_locals)
    model.teacher.images_per_sample = 2.0, 2.0
    rows = 2.0 + 2.0 * patches * masked_share
    model.dino_head.images_per_sample = rows + num_local, rows + num_local
    model.teacher_head.images_per_sample = rows, rows


def _check_backbone(model: TimmViT, spec: ModelSpec) -> None:
    """Reject a backbone that cannot be trained this way."""
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
    own = copy_to_take_apart(model)
    layers = encoder_layers(own)
    embed, head = layers[0], head_layer(own)
    head.num_tokens = embed.num_tokens
    layers[-1].head_reads_only_class_token = not model.reads_patches
    mix_in(embed, MaskedEmbed)
    norms = {name: getattr(own, name, None) for name in (PATCH_NORM, LOCAL_NORM)}
    mix_in(head, TokensHead, num_global_patches=own.patch_embed.num_patches, **norms)
    if isinstance(model, SelfDistillationViT):
        embed.mask_token = own.mask_token
        if model.draws_coordinates:
            draw_coordinates(embed, layers[1:])
    for layer in (*layers, head):
        layer.images_per_sample = model.images_per_sample
    return check_complete([*layers, head], model)


@take_apart.register
def _(model: ProjectionHead) -> list[Layer]:
    """One layer."""
    layer = ProjectionHeadLayer(copy_to_take_apart(model))
    layer.images_per_sample = model.images_per_sample
    return check_complete([layer], model)
