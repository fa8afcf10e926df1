"""The losses of CLIP and SigLIP over the global batch, without the matrix of all pairs.

A rank compares its own rows with the columns of all ranks, a few rows at a time, and computes the gradients of these
rows in the same pass: what waits for the backward pass are the gradients of features, whose size grows linearly with
the global batch. The mean of the ranks' losses is the loss of the global batch.

Shapes: G pairs of the global batch, B of this rank (its rows), C rows at a time, E width of the features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

ROWS_AT_ONCE = 256

_Terms = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(logits [C, G], column that each row belongs to [C]) → (loss of each row [C], its gradient [C, G])."""


def _softmax(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each row."""
    rows = torch.arange(len(labels), device=labels.device)
    gradient = logits.softmax(dim=1)
    gradient[rows, labels] -= 1.0
    return F.cross_entropy(logits, labels, reduction="none"), gradient


def _sigmoid(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Binary cross-entropy of all pairs of each row, summed."""
    signs = torch.full_like(logits, -1.0)
    signs[torch.arange(len(labels), device=labels.device), labels] = 1.0
    margins = logits * signs
    return -F.logsigmoid(margins).sum(dim=1), -signs * (-margins).sigmoid()


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply fp32 matrices in fp32 under --tf32 too: 10 bits of a logit of up to 100 would be 0.05 in the loss."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _RowsAgainstColumns(torch.autograd.Function):
    """Mean over this rank's rows of their losses against all columns; gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        columns: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor,
        first: int,
        terms: _Terms,
    ) -> torch.Tensor:
        """rows [B, E], columns [G, E], scale and bias scalars; row i belongs to column first + i."""
        differentiated = any(ctx.needs_input_grad)
        total = rows.new_zeros((), dtype=torch.float64)
        d_rows, d_columns = torch.zeros_like(rows), torch.zeros_like(columns)
        d_scale, d_bias = torch.zeros_like(total), torch.zeros_like(total)
        with _full_precision():
            for start in range(0, len(rows), ROWS_AT_ONCE):
                part = slice(start, min(start + ROWS_AT_ONCE, len(rows)))
                labels = torch.arange(first + part.start, first + part.stop, device=rows.device)
                products = (rows[part] * scale) @ columns.T
                losses, d_logits = terms(products + bias, labels)
                total += losses.sum(dtype=torch.float64)
                if differentiated:
                    d_scale += (d_logits * products).sum(dtype=torch.float64) / scale
                    d_bias += d_logits.sum(dtype=torch.float64)
                    d_logits *= scale / len(rows)
                    d_rows[part] = d_logits @ columns
                    d_columns.addmm_(d_logits.T, rows[part])
        of_scalars = (one.div(len(rows)).to(scale.dtype) for one in (d_scale, d_bias))
        ctx.save_for_backward(d_rows, d_columns, *of_scalars)
        return total.div(len(rows)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(grads[0] * gradient for gradient in ctx.saved_tensors), None, None


def clip_loss(
    images: torch.Tensor,
    texts: torch.Tensor,
    logits: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
    first: int,
) -> torch.Tensor:
    """The symmetric cross-entropy of Radford et al. 2021 over this rank's rows.

    Args:
        images: normalised features of this rank's images [B, E], in float32 or float64.
        texts: those of their captions, alike.
        logits: the logarithm of the logit scale [1].
        gather: [B, E] → [G, E] over the ranks, differentiable.
        first: place of this rank's first pair in the global batch.

    Returns:
        Scalar; its mean over the ranks is the loss of the global batch.
    """
    scale = logits[0].exp()
    none = torch.zeros_like(scale)
    of_images = _RowsAgainstColumns.apply(images, gather(texts), scale, none, first, _softmax)
    of_texts = _RowsAgainstColumns.apply(texts, gather(images), scale, none, first, _softmax)
    return (of_images + of_texts) / 2


def bridge_tower_loss(
    images: torch.Tensor,
    texts: torch.Tensor,
    both: torch.Tensor,
    logits: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
    first: int,
) -> torch.Tensor:
    """The loss of transformers' `BridgeTowerForContrastiveLearning`: one direction of each of three pairs.

    Texts are compared with images, texts with the embeddings of both together, and images with these.

    Args:
        images: as for `clip_loss`.
        texts: as for `clip_loss`.
        logits: as for `clip_loss`.
        gather: as for `clip_loss`.
        first: as for `clip_loss`.
        both: features of image and text together [B, E].

    Returns:
        As `clip_loss`.
    """
    scale = logits[0].exp()
    none = torch.zeros_like(scale)
    all_images, all_both = gather(images), gather(both)
    pairs = ((texts, all_images), (texts, all_both), (images, all_both))
    losses = [_RowsAgainstColumns.apply(rows, columns, scale, none, first, _softmax) for rows, columns in pairs]
    return torch.stack(losses).mean()


def siglip_loss(
    images: torch.Tensor,
    texts: torch.Tensor,
    logits: torch.Tensor,
    gather: Callable[[torch.Tensor], torch.Tensor],
    first: int,
) -> torch.Tensor:
    """The sigmoid loss of Zhai et al. 2023 of this rank's images with all texts.

    Args:
        images: as for `clip_loss`.
        texts: as for `clip_loss`.
        gather: as for `clip_loss`.
        first: as for `clip_loss`.
        logits: the logarithm of the logit scale, and the logit bias [2].

    Returns:
        As `clip_loss`.
    """
    return _RowsAgainstColumns.apply(images, gather(texts), logits[0].exp(), logits[1], first, _sigmoid)
