"""In-place conversions of a layer that has its weights: types, a class-token-only last block, no-op members.

DeepSpeed's 16-bit modes cast parameters only. Mixed-precision training keeps norms in fp32 (Apex's O2; see
docs/numerics.md): input, weight and bias are cast up, and the result is cast back to the input's type. Buffers get the
type of the weights.

After the attention of a ViT's last block no token depends on another one. Tokens that the head does not read do not
change the loss and have no gradient. So in training the last attention computes the class token only, and projection,
MLP and final norm run on one token of an image instead of all. Evaluation computes every token, for visualisation.

Shapes: B samples, S tokens, D width, H heads, K head width.
"""

from __future__ import annotations

import timm.layers
import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn import functional as F

from ds_vit.models.keyed_drop import KeyedDropout, convert
from ds_vit.models.layers import BlockLayer, Layer


def norms_in_fp32(module: nn.Module) -> int:
    """Make every layer norm, RMS norm and group norm in `module` compute in fp32, in place; names do not change.

    Returns:
        The number of norms.
    """
    norms = [m for m in module.modules() if isinstance(m, (nn.LayerNorm, *_RMS_NORMS, nn.GroupNorm))]
    for norm in norms:
        # Set on the instance, because tensor parallelism and timm recognise a norm by its class.
        norm.forward = _forward_of(norm)
    return len(norms)


def cast_block_buffers(layer: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of a block, in place: DeepSpeed casts parameters only (ZeRO 1 and 2).

    timm concatenates BEiT's and EVA's key bias, a buffer of zeros, with parameters, and would get fp32. Rotary tables
    are outside the block and stay exact.

    Args:
        layer: any layer; one without a `block` is not changed.
        dtype: the model's compute type.
    """
    if not hasattr(layer, "block"):
        return
    for module in layer.block.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


_CHANNELS_FIRST = (
    timm.layers.LayerNorm2d,
    timm.layers.LayerNorm2dFp32,
    timm.layers.LayerNormAct2d,
    timm.layers.LayerNormAct2dFp32,
)
_RMS_NORMS = (nn.RMSNorm, timm.layers.RmsNorm)


def _to_fp32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def _forward_of(norm: nn.Module):  # noqa: ANN202
    def layer_norm(x: torch.Tensor) -> torch.Tensor:
        # The most frequent norm: `norm.weight` and `F.layer_norm` would cost six more Python calls.
        weight, bias = norm._parameters["weight"], norm._parameters["bias"]
        weight, bias = weight if weight is None else weight.float(), bias if bias is None else bias.float()
        return torch.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def layer_norm_2d(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x.movedim(1, -1)).movedim(-1, 1)

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, norm.normalized_shape, _to_fp32(norm.weight), norm.eps)

    def group_norm(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, norm.num_groups, _to_fp32(norm.weight), _to_fp32(norm.bias), norm.eps)

    # The channels-first classes come first, because they inherit from nn.LayerNorm.
    kinds = {_CHANNELS_FIRST: layer_norm_2d, nn.LayerNorm: layer_norm, _RMS_NORMS: rms_norm, nn.GroupNorm: group_norm}
    normalize = next(function for kind, function in kinds.items() if isinstance(norm, kind))

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = normalize(x.float()).to(x.dtype)
        # timm's GroupNormAct and LayerNormAct, in the convolutional stems of hybrid models, end with an activation.
        return norm.act(norm.drop(out)) if hasattr(norm, "act") else out

    return forward


class ClassTokenAttention(Attention):
    """timm's `Attention`; in training its only query is the class token."""

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
    """timm's `Block`; in training it returns only the class token."""

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """x [B, S, D] -> [B, 1, D], or [B, S, D] in evaluation; as timm's."""
        if not self.training:
            return super().forward(x, attn_mask, is_causal)
        x = x[:, :1] + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def compute_class_token(layer: Layer) -> None:
    """Make the last block compute only the class token in training, in place; parameters keep their names.

    Args:
        layer: a layer that has its weights and, under tensor parallelism, is sharded. It is not changed if the head
            reads other tokens too, if its block or attention is not timm's plain one, or if it has dropout, whose masks
            are drawn for all elements.
    """
    if not isinstance(layer, BlockLayer) or not layer.head_reads_only_class_token:
        return
    block = layer.block
    if type(block) is not Block or type(block.attn) is not Attention or block.attn.gate is not None:
        return
    if any(isinstance(module, KeyedDropout) for module in block.modules()):
        return
    convert(block, ClassTokenBlock)
    convert(block.attn, ClassTokenAttention)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def skip_idle_modules(layer: Layer) -> None:
    """Replace the calls of a block's no-op members by calls of a function; they stay submodules with their names.

    A module costs the host four Python calls, and timm's block has up to nine that return what they receive.
    """
    if not isinstance(layer, BlockLayer):
        return
    for module in layer.block.modules():
        for name, member in module.named_children():
            # Attention reads the rate of its `attn_drop`.
            if type(member) is nn.Identity or (type(member) is nn.Dropout and member.p == 0 and name != "attn_drop"):
                module.__dict__[name] = _unchanged
