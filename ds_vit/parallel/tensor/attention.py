"""Tensor-parallel attention for timm classes whose own forward needs features as wide as the input.

Each subclass computes the same as its timm class, with this rank's heads and hidden features. It overrides `forward`
only, so that `convert` can change the class of a module in place. Attention always goes through
`scaled_dot_product_attention`, whose scale is timm's; `ds_vit.models.zoo` rejects attention dropout.

Shapes: B samples, S tokens (inside the region all; outside, with sequence parallelism, a share), D width, H heads of
this rank, K head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent, DiffAttention, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from torch import nn

from ds_vit.parallel.tensor.collectives import Region, copy_to_region


def _split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, S, H * K] -> [B, H, S, K]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _merge_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, K] -> [B, S, H * K]."""
    return x.transpose(1, 2).flatten(2)


def _rotate(x: torch.Tensor, rope: torch.Tensor, num_prefix_tokens: int, half: bool) -> torch.Tensor:
    """Rotate x [B, H, S, K], except its prefix tokens."""
    prefix, patches = x[:, :, :num_prefix_tokens], x[:, :, num_prefix_tokens:]
    return torch.cat((prefix, apply_rot_embed_cat(patches, rope, half=half)), dim=2)


def _differential_attention(
    module: DiffAttention | DiffParallelScalingBlock,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Differential attention of projected q, k, v [B, S, H * 2K] -> [B, S, H * 2K]; a head has two queries and keys."""
    q, k = module.q_norm(_split_heads(q, 2 * module.num_heads)), module.k_norm(_split_heads(k, 2 * module.num_heads))
    v = _split_heads(v, module.num_heads)
    first, second = (
        F.scaled_dot_product_attention(q[:, i::2], k[:, i::2], v, attn_mask=attn_mask, is_causal=is_causal)
        for i in (0, 1)
    )
    out = first - module._compute_lambda().type_as(q) * second
    return _merge_heads(module.sub_norm(out) * (1 - module.lambda_init))


class ShardedEvaAttention(EvaAttention):
    """timm's `EvaAttention` on this rank's heads."""

    region: Region

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Tokens [B, S, D] outside the region -> the same shape."""
        x = self.region.enter(x, self.training)
        gate = None if self.gate is None else self.gate(x).sigmoid()
        if self.qkv is None:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        elif self.q_bias is None:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
            q, k, v = qkv.chunk(3, dim=-1)
        q, k, v = (_split_heads(part, self.num_heads) for part in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (_rotate(part, rope, self.num_prefix_tokens, self.rotate_half).type_as(v) for part in (q, k))
        out = _merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal))
        out = self.norm(out)
        return self.proj_drop(self.proj(out if gate is None else out * gate))


class ShardedDiffAttention(DiffAttention):
    """timm's `DiffAttention` on this rank's heads."""

    region: Region

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Tokens [B, S, D] outside the region -> the same shape."""
        q, k, v = self.qkv(self.region.enter(x, self.training)).chunk(3, dim=-1)
        out = _differential_attention(self, q, k, v, attn_mask, is_causal)
        return self.proj_drop(self.proj(self.norm(out)))


class ShardedAttentionPoolLatent(AttentionPoolLatent):
    """timm's `AttentionPoolLatent` on this rank's heads. The latent queries are replicated."""

    region: Region

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [B, S, D], the same on every rank -> pooled [B, D]."""
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        k, v = self.kv(self.region.enter(x, self.training)).chunk(2, dim=-1)
        latent = copy_to_region(self.latent, self.region.tp).expand(len(x), -1, -1)
        if isinstance(self.q, nn.Identity):
            width = k.shape[-1]
            q = latent.narrow(-1, self.region.tp.rank * width, width)
        else:
            q = self.q(latent)
        q, k, v = (_split_heads(part, self.num_heads) for part in (q, k, v))
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=attn_mask)
        out = self.proj_drop(self.proj(_merge_heads(out)))
        out = out + self.mlp(self.norm(out))
        if self.pool == "token":
            return out[:, 0]
        return out.mean(1) if self.pool == "avg" else out


class ShardedParallelScalingBlock(ParallelScalingBlock):
    """timm's `ParallelScalingBlock` on this rank's heads and hidden features; attention and MLP share one region."""

    region: Region

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """Projected q, k, v [B, S, H * K] -> [B, S, H * K]."""
        q, k, v = (_split_heads(part, self.num_heads) for part in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        return _merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal))

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Tokens [B, S, D] outside the region -> the same shape."""
        projected = self.in_proj(self.region.enter(self.in_norm(x), self.training))
        hidden, q, k, v = projected.split(self.in_split, dim=-1)
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias
        attended = self.attend(q, k, v, attn_mask, is_causal)
        hidden = self.mlp_drop(self.mlp_act(hidden))
        if self.out_proj is not None:
            out = self.out_proj(torch.cat((attended, hidden), dim=-1))
        else:
            # Both return their bias apart: it is added once, after the sum over the ranks.
            attention_summand, attention_bias = self.attn_out_proj(attended)
            mlp_summand, mlp_bias = self.mlp_out_proj(hidden)
            out = self.region.leave(attention_summand + mlp_summand)
            for bias in (attention_bias, mlp_bias):
                out = out if bias is None else out + bias.to(out.dtype)
        return x + self.drop_path(self.ls(out))


class ShardedDiffParallelScalingBlock(DiffParallelScalingBlock):
    """As `ShardedParallelScalingBlock`, with differential attention."""

    region: Region
    attend = _differential_attention
    forward = ShardedParallelScalingBlock.forward
