"""Megatron's f and g, and their counterparts for sequence parallelism, as autograd functions over a given group.

f and g: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3. Sequence parallelism: Korthikanti et al.
2022, https://arxiv.org/abs/2205.05198, section 4.2. Inside a *region* every rank holds all tokens and a share of the
heads or hidden features. Outside, a rank holds all features of all tokens, or with sequence parallelism all features of
its share of the tokens: ceil(S / t) of them, the last shares padded with zeros.

No function changes its input. Every collective is one of `all_reduce`, `all_gather_into_tensor` and
`reduce_scatter_tensor` of `torch.distributed`, looked up at the call, so that a test can count the bytes.

Shapes: B samples, S tokens, D features, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ds_vit.config.schema import RunConfig
from ds_vit.models.layers import TokenCount


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in its tensor-parallel group.

    Attributes:
        rank: 0 to size - 1 within the group.
        size: ranks of the group.
        group: the process group; its rank order is the order of the shards. With None nothing is exchanged, for
            counting shapes and memory only.
        sequence_parallel: outside the regions each rank holds a share of the tokens.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    sequence_parallel: bool = False

    @classmethod
    def planned(cls, config: RunConfig) -> TensorParallel:
        """The first rank of the flags' tensor-parallel group, without the group."""
        return cls(0, config.tp, None, config.sequence_parallel)

    @property
    def with_all_tokens(self) -> TensorParallel:
        """The same place, for layers that work on all tokens."""
        return replace(self, sequence_parallel=False)

    def share_of(self, count: int) -> int:
        """ceil(count / size): the tokens or classes of each rank, padding included."""
        return -(-count // self.size)


def sum_over_group(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The sum of the ranks' tensors, as a new tensor of the same shape."""
    out = x.clone(memory_format=torch.contiguous_format)
    if tp.group is not None:
        dist.all_reduce(out, group=tp.group)
    return out


def stack_over_group(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """The ranks' tensors [...], stacked by rank: [t, ...]."""
    out = x.new_empty(tp.size * x.numel())
    if tp.group is not None:
        dist.all_gather_into_tensor(out, x.reshape(-1), group=tp.group)
    return out.view(tp.size, *x.shape)


_TokenFunction = Callable[[torch.Tensor, int, TensorParallel], torch.Tensor]
"""(tensor, S of the whole sequence or 0 if it is not used, group) → tensor."""


def _padded(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """[B, S, D] -> [B, t * ceil(S / t), D], zeros appended."""
    missing = tp.share_of(x.shape[1]) * tp.size - x.shape[1]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _identity(x: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    return sum_over_group(x, tp)


def _own_share(x: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    """[B, S, D] -> [B, ceil(S / t), D]: this rank's tokens."""
    share = tp.share_of(x.shape[1])
    return _padded(x, tp)[:, tp.rank * share : (tp.rank + 1) * share].clone(memory_format=torch.contiguous_format)


def _all_tokens(share: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    """[B, ceil(S / t), D] on each rank -> [B, S, D], the padding dropped."""
    assert share.shape[1] == tp.share_of(num_tokens), f"{share.shape[1]} tokens are not the share of {num_tokens}"
    stacked = stack_over_group(share, tp)
    return stacked.movedim(0, 1).flatten(1, 2)[:, :num_tokens].contiguous()


def _sum_of_own_share(x: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    """[B, S, D] on each rank -> [B, ceil(S / t), D]: this rank's tokens of the sum over the ranks."""
    by_rank = _padded(x, tp).unflatten(1, (tp.size, -1)).movedim(1, 0)
    out = x.new_empty(by_rank[0].shape)
    if tp.group is not None:
        dist.reduce_scatter_tensor(out.view(-1), by_rank.reshape(-1), group=tp.group)
    return out


class _Pair(torch.autograd.Function):
    """Applies one of the functions above in the forward pass, and its dual in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, function: _TokenFunction, dual: _TokenFunction, num_tokens: int, tp: TensorParallel
    ) -> torch.Tensor:
        ctx.dual, ctx.num_tokens, ctx.tp = dual, num_tokens, tp
        return function(x, num_tokens, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.dual(grad, ctx.num_tokens, ctx.tp), None, None, None, None


def copy_to_region(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """f: identity forward, all-reduce backward. For a replicated tensor that every rank's shard reads."""
    return _Pair.apply(x, _identity, _sum, 0, tp)


def reduce_from_region(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """g: all-reduce forward, identity backward. Every rank's summand -> the sum."""
    return _Pair.apply(x, _sum, _identity, 0, tp)


def gather_to_region(share: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    """All-gather forward, reduce-scatter backward: tokens [B, ceil(S / t), D] -> [B, S, D] (S = `num_tokens`)."""
    return _Pair.apply(share, _all_tokens, _sum_of_own_share, num_tokens, tp)


def scatter_from_region(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Reduce-scatter forward, all-gather backward: every rank's summand [B, S, D] -> a share [B, ceil(S / t), D]."""
    return _Pair.apply(x, _sum_of_own_share, _all_tokens, x.shape[1], tp)


def split_tokens(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Split forward, all-gather backward: tokens [B, S, D], the same on every rank -> a share [B, ceil(S / t), D]."""
    return _Pair.apply(x, _own_share, _all_tokens, x.shape[1], tp)


def join_tokens(share: torch.Tensor, num_tokens: int, tp: TensorParallel) -> torch.Tensor:
    """All-gather forward, split backward: shares -> [B, S, D], of which every rank then computes the same."""
    return _Pair.apply(share, _all_tokens, _own_share, num_tokens, tp)


@dataclass(frozen=True)
class Region:
    """A part of the model in which each rank computes a share of the heads or hidden features of all tokens.

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
        return gather_to_region(x, self.num_tokens.count(training), self.tp)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's summand [B, S, D] -> the sum, as tokens are outside."""
        return scatter_from_region(x, self.tp) if self.tp.sequence_parallel else reduce_from_region(x, self.tp)
