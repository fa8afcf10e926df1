"""Casts that DeepSpeed's 16-bit modes leave out: norms compute in fp32, buffers get the type of the weights.

Mixed-precision training keeps norms in fp32 (Apex's O2; see docs/numerics.md). Input, weight and bias are cast up, the
result is cast back to the input's type.
"""

from __future__ import annotations

import timm.layers
import torch
from torch import nn
from torch.nn import functional as F


def norms_in_fp32(module: nn.Module) -> int:
    """Make every layer norm, RMS norm and group norm in `module` compute in fp32, in place; names do not change.

    Returns:
        How many there were.
    """
    norms = [m for m in module.modules() if isinstance(m, (*_LAYER_NORMS, *_RMS_NORMS, nn.GroupNorm))]
    for norm in norms:
        # On the instance: tensor parallelism and timm recognise a norm by its class, which must not change.
        norm.forward = _forward_of(norm)
    return len(norms)


def cast_block_buffers(layer: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of a block, in place: DeepSpeed casts parameters only (ZeRO 1 and 2).

    timm concatenates BEiT's and EVA's key bias, a buffer of zeros, with parameters, and would get fp32. Rotary tables
    are outside the block and stay exact.

    Args:
        layer: any; one without `block` is not changed.
        dtype: the model's compute type.
    """
    if not hasattr(layer, "block"):
        return
    for module in layer.block.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


_LAYER_NORMS = (nn.LayerNorm,)
_CHANNELS_FIRST = (
    timm.layers.LayerNorm2d,
    timm.layers.LayerNorm2dFp32,
    timm.layers.LayerNormAct2d,
    timm.layers.LayerNormAct2dFp32,
)
_RMS_NORMS = (nn.RMSNorm, timm.layers.RmsNorm)


def _up(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def _forward_of(norm: nn.Module):  # noqa: ANN202
    def layer_norm(x: torch.Tensor) -> torch.Tensor:
        # Of all norms the most frequent one: `norm.weight` and `F.layer_norm` would cost the host six more calls.
        weight, bias = norm._parameters["weight"], norm._parameters["bias"]
        weight, bias = weight if weight is None else weight.float(), bias if bias is None else bias.float()
        return torch.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    def layer_norm_2d(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x.movedim(1, -1)).movedim(-1, 1)

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, norm.normalized_shape, _up(norm.weight), norm.eps)

    def group_norm(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, norm.num_groups, _up(norm.weight), _up(norm.bias), norm.eps)

    # In this order: the norms of feature maps are layer norms.
    kinds = {_CHANNELS_FIRST: layer_norm_2d, _LAYER_NORMS: layer_norm, _RMS_NORMS: rms_norm, nn.GroupNorm: group_norm}
    normalize = next(function for kind, function in kinds.items() if isinstance(norm, kind))

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = normalize(x.float()).to(x.dtype)
        # timm's GroupNormAct and LayerNormAct, in the convolutional stems of hybrid models, end with an activation.
        return norm.act(norm.drop(out)) if hasattr(norm, "act") else out

    return forward
