"""The modules that replace parts of timm's sub-layers: entering and leaving a region, dropout and norms on a share.

A sharded norm normalises this rank's features by statistics of all of them. Forward and backward each exchange two
numbers per token (one for an RMS norm). Mean and variance are combined from each rank's own mean and centred sum of
squares (Chan et al. 1979), since a sum of squares of uncentred values cancels.

Shapes: B samples, S tokens, D width, t ranks; x [..., d] of a norm, d features of this rank, t * d in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_vit.models.keyed_drop import KeyedDropout
from ds_vit.models.linear import Linear
from ds_vit.parallel.tensor.collectives import Region, TensorParallel, stack_over_group, sum_over_group


class Entered(nn.Module):
    """Mixed in before a timm sub-layer whose own forward is right for a share: enters the region at its input."""

    region: Region

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the sub-layer's, of tokens as they are outside."""
        return super().forward(self.region.enter(x, self.training), *args, **kwargs)


class RowLinear(Linear):
    """Mixed in before a linear map with sharded input features; the whole bias is added once, to the sum."""

    region: Region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, this rank's] -> [B, S, D] as tokens are outside."""
        out, bias = self.region.leave(self.product(x)), self.bias
        return out if bias is None else out + bias.to(out.dtype)


class SummandLinear(Linear):
    """Mixed in before a linear map with sharded input features, one of several whose sum leaves the region at once."""

    region: Region

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, S, this rank's] -> (summand [B, S, D] without the bias, the bias to add to the sum or None).

        The bias is a copy: ZeRO-3 frees a parameter when its owner's forward ends.
        """
        bias = self.bias
        return self.product(x), None if bias is None else bias.clone()


class ShareDropout(KeyedDropout):
    """Dropout on a share of the tokens (`dim` 1) or of the features (-1), with its part of the mask of the whole."""

    tp: TensorParallel
    dim: int

    def uniform(self, row: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's part of the draws for the whole: [B, *shape].

        Draws are numbered row by row, so tokens that pad the sequence do not shift those of the others.
        """
        whole = list(shape)
        axis = self.dim - 1 if self.dim > 0 else len(shape) + self.dim
        whole[axis] *= self.tp.size
        return super().uniform(row, tuple(whole)).narrow(axis + 1, self.tp.rank * shape[axis], shape[axis])


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
    """A timm layer norm (`centred`) or RMS norm over sharded features, by `convert`: this rank's [d]."""

    centred: bool
    tp: TensorParallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d] -> the same, in x's type; computed in float32 at least."""
        return _ShardedNorm.apply(x, self.weight, getattr(self, "bias", None), self.eps, self.centred, self.tp)
