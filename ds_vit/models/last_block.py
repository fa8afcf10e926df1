"""The last block computed for the class token only, where the head reads no other.

After the attention of a ViT's last block no token depends on another one. Tokens that the head does not read have no
part in the loss and no gradient, so in training the last attention computes the class token only, and projection, MLP
and final norm run on one token of an image instead of all. In evaluation every token is computed: pictures show them.

Shapes: B samples, S tokens, D width, H heads, K head width.
"""

from __future__ import annotations

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch.nn import functional as F

from ds_vit.models.keyed_drop import KeyedDropout, convert
from ds_vit.models.layers import BlockLayer, Layer


class ClassTokenAttention(Attention):
    """timm's `Attention` whose only query is the class token, in training."""

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """x [B, S, D] -> [B, 1, D], or [B, S, D] in evaluation; as timm's."""
        if not self.training:
            return super().forward(x, attn_mask, is_causal)
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q[:, :, :1]), self.k_norm(k)
        if self.fused_attn:
            out = F.scaled_dot_product_attention(q, k, v)
        else:  # TIMM_FUSED_ATTN=0
            out = (self.scale * q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        out = self.norm(out.transpose(1, 2).reshape(batch, 1, self.attn_dim))
        return self.proj_drop(self.proj(out))


class ClassTokenBlock(Block):
    """timm's `Block` that returns only the class token, in training."""

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """x [B, S, D] -> [B, 1, D], or [B, S, D] in evaluation; as timm's."""
        if not self.training:
            return super().forward(x, attn_mask, is_causal)
        x = x[:, :1] + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def compute_class_token(layer: Layer) -> None:
    """Restrict the last block to what the head reads, in training, in place; parameters and their names stay.

    Args:
        layer: filled, and cut already where it is cut. One whose tokens are all read is left as it is, and so is a kind
            of block or attention other than timm's plain ones, and dropout, whose masks are drawn for all elements.
    """
    if not isinstance(layer, BlockLayer) or not layer.class_token_is_read_alone:
        return
    block = layer.block
    if type(block) is not Block or type(block.attn) is not Attention or block.attn.gate is not None:
        return
    if any(isinstance(module, KeyedDropout) for module in block.modules()):
        return
    convert(block, ClassTokenBlock)
    convert(block.attn, ClassTokenAttention)
