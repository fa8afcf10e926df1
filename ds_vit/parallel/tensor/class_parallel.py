"""The classifier sharded over classes: losses that move four numbers per sample, and the gathered logits.

Rank r of t holds the classes from r * ceil(C / t) on; the last ranks hold fewer than ceil(C / t), or none, and pad.
The softmax cross-entropy never holds a row of all logits: each rank reduces its own classes to their largest logit,
their sum of exponentials and two sums over the targets, and these are combined (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867). Its gradient needs nothing more to be moved.

Shapes: B samples, C classes, c = ceil(C / t) classes of a rank with padding, n real classes of this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_vit.parallel.tensor.collectives import TensorParallel, stack_over_group, sum_over_group

CLASSES_WORTH_SHARDING = 8192
"""Sharding the classifier pays if it takes at least so many classes off each rank.

At 16 bytes per weight (parameter, gradient and fp32 optimizer state) and width 1024 they take 128 MiB; the collectives
that sharding costs are of a fixed, small size.
"""


def pays(num_classes: int, size: int) -> bool:
    """Whether to shard the classifier over `size` ranks: ImageNet-21k's over 2, ImageNet-1k's never."""
    return num_classes - -(-num_classes // size) >= CLASSES_WORTH_SHARDING


def own_classes(num_classes: int, tp: TensorParallel) -> tuple[int, int]:
    """(first, count) of this rank's real classes."""
    share = tp.share_of(num_classes)
    first = min(tp.rank * share, num_classes)
    return first, min(share, num_classes - first)


def _own_top(logits: torch.Tensor) -> torch.Tensor:
    """[..., n] → [...]: the largest logit of this rank's classes."""
    if not logits.shape[-1]:  # not -inf: it is multiplied by zero
        return logits.new_full(logits.shape[:-1], torch.finfo(logits.dtype).min)
    return logits.amax(-1)


def log_softmax(logits: torch.Tensor, tp: TensorParallel | None) -> torch.Tensor:
    """[..., n] on each rank: log softmax over the classes of all ranks (a collective). No gradient passes.

    The largest logit of all ranks is subtracted first, as torch does: log p of a sure class keeps its digits.
    """
    if tp is None:
        return logits.log_softmax(-1)
    own_top = _own_top(logits)
    own_sum = (logits - own_top[..., None]).exp().sum(-1)
    tops, sums = stack_over_group(torch.stack((own_top, own_sum)), tp).unbind(1)
    top = tops.amax(0)
    total = (sums * (tops - top).exp()).sum(0)
    return (logits - top[..., None]).sub_(total.log()[..., None])


class SoftmaxCrossEntropy(torch.autograd.Function):
    """Mean over the samples of sum_c -target_c * log softmax(logits)_c, from this rank's classes of both."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        """logits, targets float32 [B, n] -> scalar."""
        own_top = _own_top(logits)
        below_top = logits - own_top[:, None]
        exponentials = below_top.exp()
        own = torch.stack((own_top, exponentials.sum(-1), (targets * below_top).sum(-1), targets.sum(-1)))
        tops, sums, weighted, weights = stack_over_group(own, tp).unbind(1)
        top = tops.amax(0)
        total = (sums * (tops - top).exp()).sum(0)
        weight = weights.sum(0)
        loss = weight * total.log() - (weighted + weights * (tops - top)).sum(0)
        probabilities = exponentials * ((own_top - top).exp() / total)[:, None]
        ctx.save_for_backward((probabilities * weight[:, None] - targets) / len(logits))
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (d_logits,) = ctx.saved_tensors
        return grad * d_logits, None, None


class SoftmaxDivergence(torch.autograd.Function):
    """Mean over the samples of KL(softmax(teacher) || softmax(student)), from this rank's classes of both logits.

    It is summed over the differences of logarithms: cross-entropy minus entropy would cancel.
    """

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor, tp: TensorParallel | None) -> torch.Tensor:
        """student, teacher [B, n] -> scalar."""
        own, wanted = log_softmax(torch.stack((student, teacher)), tp)
        taught = wanted.exp()
        ctx.save_for_backward((own.exp() - taught) / len(student))
        divergence = (taught * (wanted - own)).sum() / len(student)
        return divergence if tp is None else sum_over_group(divergence, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (d_student,) = ctx.saved_tensors
        return grad * d_student, None, None


def gather_logits(logits: torch.Tensor, num_classes: int, tp: TensorParallel) -> torch.Tensor:
    """All classes' logits on every rank, for evaluation: [B, c] -> [B, C]. No gradient passes."""
    stacked = stack_over_group(logits.detach(), tp)
    return stacked.movedim(0, 1).flatten(1)[:, :num_classes]
