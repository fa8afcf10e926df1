"""Norms that compute in fp32 inside a 16-bit model.

Mixed-precision training keeps them there (Apex's O2; Meta's billion-parameter ViTs "needed it to converge", see
docs/numerics.md). Input, weight and bias are cast up, the result is cast back to the input's type.
"""

from __future__ import annotations

import timm.layers
import torch
from torch import nn
from torch.nn import functional as F


def norms_in_fp32(module: nn.Module) -> int:
    """Make every layer norm, RMS norm and group norm inside `module` compute in fp32, in place; names stay.

    Returns:
        How many there were.
    """
    norms = [m for m in module.modules() if isinstance(m, (*_LAYER_NORMS, *_RMS_NORMS, nn.GroupNorm))]
    for norm in norms:
        # Through the instance: the class, by which tensor parallelism and timm recognise a norm, stays.
        norm.forward = _forward_of(norm)
    return len(norms)


_LAYER_NORMS = (nn.LayerNorm,)
_RMS_NORMS = (nn.RMSNorm, timm.layers.RmsNorm)


def _up(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def _forward_of(norm: nn.Module):  # noqa: ANN202
    def layer_norm(x: torch.Tensor) -> torch.Tensor:
        out = F.layer_norm(x.float(), norm.normalized_shape, _up(norm.weight), _up(norm.bias), norm.eps)
        return out.to(x.dtype)

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), norm.normalized_shape, _up(norm.weight), norm.eps).to(x.dtype)

    def group_norm(x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x.float(), norm.num_groups, _up(norm.weight), _up(norm.bias), norm.eps).to(x.dtype)

    if isinstance(norm, _LAYER_NORMS):
        return layer_norm
    return rms_norm if isinstance(norm, _RMS_NORMS) else group_norm
