"""A text tower of timm's own blocks next to a timm ViT: the model of CLIP and SigLIP.

Radford et al. 2021 (https://arxiv.org/abs/2103.00020), Zhai et al. 2023 (https://arxiv.org/abs/2303.15343); sizes,
initial values and norms are those of open_clip's configurations. The text tower is `model.text`, and its parameters
have the prefix `text.`; the logit scale and bias belong to its last layer, which the last pipeline stage has. The image
tower is timm's model, whose classifier is the projection to the common width.

Shapes: B samples, L tokens of a caption, D width of the text tower, E common width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import AttentionPoolLatent, GELUTanh, LayerNorm, QuickGELU, trunc_normal_
from timm.models.vision_transformer import Block
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, did_you_mean
from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import BlockLayer, EmbedLayer, HeadLayer, Layer, TokenCount, part_of_model, take_apart
from ds_vit.models.zoo import ModelSpec, create_model


@dataclass(frozen=True)
class TextSettings:
    """Settings of a text tower.

    Attributes:
        vocab_size: ids are below it.
        context_length: L.
        end_id: id of the end token, which `pool` "end" looks for.
        pad_id: id of the tokens after it.
        width: D.
        depth: blocks.
        heads: attention heads.
        mlp_ratio: of the blocks.
        causal: a token attends to those before it only.
        pool: where the features of a caption come from: "end" for its end token, "last" for its last token, or "map"
            for attention pooling.
        activation: of the blocks.
        eps: of the norms.
        drop_path_rate: stochastic depth rate of the last block, from 0 at the first.
        embed_dim: E; None for the width of the image tower, which then has no projection (SigLIP).
        projection_bias: of the text projection.

    Raises:
        UserError: a width that the heads do not divide.
    """

    vocab_size: int = 49408
    context_length: int = 77
    end_id: int = 49407
    pad_id: int = 0
    width: int = 512
    depth: int = 12
    heads: int = 8
    mlp_ratio: float = 4.0
    causal: bool = True
    pool: str = "end"
    activation: type[nn.Module] = nn.GELU
    eps: float = 1e-5
    drop_path_rate: float = 0.0
    embed_dim: int | None = 512
    projection_bias: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            near = max(1, round(self.width / self.heads)) * self.heads
            raise UserError(
                f"--text-width {self.width} must be a multiple of --text-heads {self.heads}; the nearest is {near}"
            )

    @property
    def reads_padding(self) -> bool:
        """Whether the features of a caption depend on the tokens after its end token."""
        return self.pool != "end" or not self.causal


_CLIP = TextSettings()
_SIGLIP = TextSettings(
    vocab_size=32000,
    context_length=64,
    end_id=1,
    pad_id=1,
    causal=False,
    pool="last",
    activation=GELUTanh,
    eps=1e-6,
    embed_dim=None,
    projection_bias=True,
)
TEXT_MODELS: dict[str, TextSettings] = {
    "clip_base": _CLIP,
    "clip_large": replace(_CLIP, width=768, heads=12, embed_dim=768),
    "clip_huge": replace(_CLIP, width=1024, depth=24, heads=16, embed_dim=1024),
    "clip_gigantic": replace(_CLIP, width=1280, depth=32, heads=20, embed_dim=1280),
    "clip_base_quickgelu": replace(_CLIP, activation=QuickGELU),
    "clip_large_quickgelu": replace(_CLIP, width=768, heads=12, embed_dim=768, activation=QuickGELU),
    "siglip_base": replace(_SIGLIP, width=768, depth=12, heads=12),
    "siglip_large": replace(_SIGLIP, width=1024, depth=24, heads=16),
    "siglip_so400m": replace(_SIGLIP, width=1152, depth=27, heads=16, mlp_ratio=3.7362),
}
"""The text towers of open_clip's ViT-B-16, ViT-L-14, ViT-H-14, ViT-bigG-14 and …-quickgelu, and SigLIP's."""


def text_settings(name: str) -> TextSettings:
    """The settings of --text-model.

    Raises:
        UserError: there is no such tower.
    """
    if name not in TEXT_MODELS:
        raise UserError(
            f"there is no --text-model {name}; there is {', '.join(TEXT_MODELS)}{did_you_mean(name, TEXT_MODELS)}"
        )
    return TEXT_MODELS[name]


class TextTower(nn.Module):
    """The description of a text tower, with the members that timm's ViTs have where others read them.

    Attributes:
        settings: its sizes.
        initial_logits: initial values of the logit scale (its logarithm) and, for SigLIP, the logit bias.
    """

    def __init__(self, settings: TextSettings, embed_dim: int, initial_logits: tuple[float, ...]) -> None:
        """Args: as the attributes, and E."""
        super().__init__()
        width, norm = settings.width, partial(LayerNorm, eps=settings.eps)
        of_blocks: dict[str, Any] = {
            "num_heads": settings.heads,
            "mlp_ratio": settings.mlp_ratio,
            "norm_layer": norm,
            "act_layer": settings.activation,
        }
        self.settings, self.initial_logits = settings, initial_logits
        rates = torch.linspace(0, settings.drop_path_rate, settings.depth, device="cpu").tolist()
        self.token_embed = nn.Embedding(settings.vocab_size, width)
        self.pos_embed = nn.Parameter(torch.empty(1, settings.context_length, width))
        self.blocks = nn.ModuleList(Block(width, qkv_bias=True, drop_path=rate, **of_blocks) for rate in rates)
        self.norm = norm(width)
        self.attn_pool = AttentionPoolLatent(width, **of_blocks) if settings.pool == "map" else None
        self.head = nn.Linear(width, embed_dim, bias=settings.projection_bias)
        self.logit_scale = nn.Parameter(torch.empty(1))
        if len(initial_logits) > 1:
            self.logit_bias = nn.Parameter(torch.empty(1))

    def init_weights(self, needs_reset: bool = True) -> None:
        """The initial values of CLIP's text transformer, the logit scale and bias among them."""
        width, depth = self.settings.width, self.settings.depth
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.token_embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.01)
        for block in self.blocks:
            nn.init.normal_(block.attn.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.attn.proj.weight, std=(2 * depth * width) ** -0.5)
            nn.init.normal_(block.mlp.fc1.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(block.mlp.fc2.weight, std=(2 * depth * width) ** -0.5)
        if self.attn_pool is not None:
            for module in self.attn_pool.modules():
                if isinstance(module, nn.Linear):
                    trunc_normal_(module.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=width**-0.5)
        for name, value in zip(("logit_scale", "logit_bias"), self.initial_logits, strict=False):
            nn.init.constant_(getattr(self, name), value)


class ContrastiveModel(nn.Module):
    """Mixed in before the class of a timm ViT by `create_contrastive_model`: the description of both towers.

    Attributes:
        text: the text tower.
        common_dim: E.
    """

    further_towers: ClassVar = ("text",)
    common_dim: int

    def init_weights(self, needs_reset: bool = True) -> None:
        """timm's initial values for the image tower, CLIP's for its projection."""
        super().init_weights(needs_reset=needs_reset)
        if isinstance(self.head, nn.Linear):
            nn.init.normal_(self.head.weight, std=self.head.in_features**-0.5)


def create_contrastive_model(
    spec: ModelSpec, settings: TextSettings, initial_logits: tuple[float, ...], *, for_training: bool = True
) -> ContrastiveModel:
    """The description of an image and a text tower, on the meta device without memory.

    Args:
        spec: the image tower. Its number of classes is ignored: its classifier is the projection, without bias.
        settings: of the text tower.
        initial_logits: as `TextTower`'s.
        for_training: as in `create_model`.

    Raises:
        UserError: as `create_model`.
    """
    model = create_model(replace(spec, num_classes=1), for_training=for_training)
    width = model.head.in_features
    embed_dim = settings.embed_dim or width
    model.num_classes = settings.embed_dim or 0
    with torch.device("meta"):
        model.head = nn.Linear(width, embed_dim, bias=False) if settings.embed_dim else nn.Identity()
        text = TextTower(settings, embed_dim, initial_logits)
    model.head_init_scale = 0.0  # Eva's, which scales a bias too
    mix_in(model, ContrastiveModel)
    model.common_dim = embed_dim
    model.text = text
    return model


class TextEmbed(EmbedLayer):
    """Token ids to tokens. Where the head needs the place of the end token, it travels after everything else."""

    settings: TextSettings

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """As `Layer.example`: ids of captions, int64 [B, L]."""
        return (torch.empty(samples, self.pos_embed.shape[1], dtype=torch.int64, device="meta"),)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids int64 [B, L] -> tokens [B, L, D]."""
        return self.token_embed(ids) + self.pos_embed

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(ids int64 [B, L], keys int64 [B], …) -> (tokens, keys, …), with places of the end tokens int64 [B]."""
        ids, keys, *carried = inputs
        tokens = self.embed(ids)
        if self.settings.pool != "end":
            return (tokens, keys, *carried)
        # The first one: where the end token pads too, the others follow it.
        return (tokens, keys, *carried, (ids == self.settings.end_id).int().argmax(dim=1))


class TextBlockLayer(BlockLayer):
    """One timm block of a text tower, `blocks.<index>.…`.

    Attributes:
        causal: a token attends to those before it only.
    """

    causal: bool = False

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As `BlockLayer.forward`."""
        tokens, keys, *rest = inputs
        tokens = self.block(tokens, is_causal=self.causal)
        return (tokens, keys, *rest)


class TextHead(HeadLayer):
    """Tokens to features: final norm, pooling, projection; and the logit scale and bias, next to the features.

    The last columns of the outputs are `logit_scale` and `logit_bias`, the same in each row. So the loss reads them
    through the forward pass of their owner, around which ZeRO-3 gathers them, on the pipeline stage that has them.
    """

    settings: TextSettings
    initial_logits: tuple[float, ...]

    def pooled(self, tokens: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Tokens [B, L, D] -> [B, D], normed."""
        if self.attn_pool is not None:
            return self.attn_pool(self.norm(tokens))
        if places is None:
            return self.norm(tokens[:, -1])
        return self.norm(tokens[torch.arange(len(tokens), device=tokens.device), places])

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """(tokens [B, L, D], keys int64 [B], …) -> [B, E + 1 or 2]; at the end of a chain also the outputs so far."""
        tokens, keys, *carried = inputs
        places = carried.pop() if self.settings.pool == "end" else None
        features = self.head(self.pooled(tokens, places))
        logits = [self.logit_scale, self.logit_bias] if len(self.initial_logits) > 1 else [self.logit_scale]
        outputs = torch.cat((features, torch.cat(logits).expand(len(tokens), -1)), dim=1)
        return self.pass_on(outputs, keys, carried)


@take_apart.register
def _(model: TextTower) -> list[Layer]:
    """A `TextEmbed`, a `TextBlockLayer` for each block, a `TextHead`."""
    layers: list[Layer] = [
        part_of_model(model, TextEmbed, ("token_embed", "pos_embed")),
        *(TextBlockLayer(index, block) for index, block in enumerate(model.blocks)),
        part_of_model(model, TextHead, ("norm", "attn_pool", "head", "logit_scale", "logit_bias")),
    ]
    for layer in layers:
        layer.num_tokens = TokenCount(model.settings.context_length, 0)
        if isinstance(layer, TextBlockLayer):
            layer.causal = model.settings.causal
    return layers
