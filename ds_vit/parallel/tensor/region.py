"""The modules that replace parts of timm's sub-layers: entering and leaving a region, and dropout on a share.

Shapes: B samples, S tokens, D width, t ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_vit.models.keyed_drop import KeyedDropout
from ds_vit.models.layers import TokenCount
from ds_vit.parallel.tensor.collectives import (
    TensorParallel,
    copy_to_region,
    gather_to_region,
    reduce_from_region,
    scatter_from_region,
)


@dataclass(frozen=True)
class Region:
    """Where each rank computes a share of the heads or hidden features of all tokens.

    Attributes:
        tp: the group; its `sequence_parallel` says what tokens look like outside.
        num_tokens: of the whole sequence.
    """

    tp: TensorParallel
    num_tokens: TokenCount

    def enter(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        """Tokens as they are outside -> [B, S, D]; backward sums the ranks' gradients."""
        if not self.tp.sequence_parallel:
            return copy_to_region(x, self.tp)
        count = self.num_tokens.training if training else self.num_tokens.evaluating
        return gather_to_region(x, count, self.tp)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's summand [B, S, D] -> the sum, as tokens are outside."""
        return scatter_from_region(x, self.tp) if self.tp.sequence_parallel else reduce_from_region(x, self.tp)


class Entered(nn.Module):
    """Mixed in before a timm sub-layer whose own forward is right for a share: enters the region at its input."""

    region: Region

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the sub-layer's, of tokens as they are outside."""
        return super().forward(self.region.enter(x, self.training), *args, **kwargs)


class RowLinear(nn.Linear):
    """A linear map with sharded input features; the whole bias is added once, to the sum."""

    region: Region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, this rank's] -> [B, S, D] as tokens are outside."""
        out = self.region.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class SummandLinear(nn.Linear):
    """A linear map with sharded input features, one of several whose sum leaves the region at once."""

    region: Region

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, S, this rank's] -> (summand [B, S, D] without the bias, the bias to add to the sum or None).

        The bias is a copy: ZeRO-3 frees a parameter when its owner's forward ends.
        """
        return F.linear(x, self.weight), None if self.bias is None else self.bias.clone()


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
