"""A layer or RMS norm over features that are spread over the tensor-parallel ranks.

Each rank normalises its share of the features by statistics of all of them. Forward and backward each exchange two
numbers per token (one for an RMS norm). Mean and variance are combined from each rank's own mean and centred sum of
squares (Chan et al. 1979), since a sum of squares of uncentred values cancels.

Shapes: x [..., d], d features of this rank, t * d in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_vit.parallel.tensor.collectives import TensorParallel, stack_over_group, sum_over_group


def _mean_and_rstd(x: torch.Tensor, eps: float, tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
    own_mean = x.mean(-1, keepdim=True)
    own_square = (x - own_mean).square().mean(-1, keepdim=True)
    means, squares = stack_over_group(torch.stack((own_mean, own_square)), tp).unbind(1)
    mean = means.mean(0)
    variance = (squares + (means - mean).square()).mean(0)
    return mean, torch.rsqrt(variance + eps)


class _ShardedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        centred: bool,
        tp: TensorParallel,
    ) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if centred:
            mean, rstd = _mean_and_rstd(wide, eps, tp)
            normal = (wide - mean) * rstd
        else:
            rstd = torch.rsqrt(sum_over_group(wide.square().mean(-1, keepdim=True), tp) / tp.size + eps)
            normal = wide * rstd
        ctx.save_for_backward(normal, rstd, weight)
        ctx.centred, ctx.tp, ctx.dtype = centred, tp, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = normal if weight is None else normal * weight
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, rstd, weight = ctx.saved_tensors
        grad = grad.to(normal.dtype)
        d_normal = grad if weight is None else grad * weight
        means = [(d_normal * normal).mean(-1, keepdim=True)]
        if ctx.centred:
            means.append(d_normal.mean(-1, keepdim=True))
        along, *constant = sum_over_group(torch.stack(means), ctx.tp) / ctx.tp.size
        d_x = d_normal - normal * along
        if constant:
            d_x = d_x - constant[0]
        d_weight = None if weight is None else (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return (d_x * rstd).to(ctx.dtype), d_weight, d_bias, None, None, None


class ShardedNorm(nn.Module):
    """What `convert` makes of a timm layer norm (`centred`) or RMS norm over sharded features: this rank's [d]."""

    centred: bool
    tp: TensorParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d] -> the same, in x's type; computed in float32 at least."""
        return _ShardedNorm.apply(x, self.weight, getattr(self, "bias", None), self.eps, self.centred, self.tp)
