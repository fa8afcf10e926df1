"""The losses of CLIP and SigLIP over the global batch, without the matrix of all pairs.

A rank compares its own rows with the columns of all ranks, a few rows at a time, and computes the gradients of these
rows in the same pass: what waits for the backward pass are the gradients of features, whose size grows linearly with
the global batch. The mean of the ranks' losses is the loss of the global batch.

Shapes: G pairs of the global batch, B of this rank (its rows), C rows at a time, E width of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ds_vit.device import matmul_precision

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
        with matmul_precision("highest"):  # under --tf32 too: 10 bits of a logit of up to 100 would be 0.05 in the loss
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


class PairLoss(NamedTuple):
    """A contrastive loss: the mean of the losses of some pairs of features.

    Attributes:
        pairs: which features are the rows and which the columns, by their places among `features`.
        terms: of the rows.
    """

    pairs: tuple[tuple[int, int], ...]
    terms: _Terms = _softmax

    def __call__(
        self,
        features: Sequence[torch.Tensor],
        logits: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor],
        first: int,
    ) -> torch.Tensor:
        """The loss of this rank's rows.

        Args:
            features: normalised, of this rank's images, their captions and what else is compared, each [B, E], in
                float32 or float64.
            logits: the logarithm of the logit scale, and the logit bias if the loss has one [1 or 2].
            gather: [B, E] → [G, E] over the ranks, differentiable.
            first: place of this rank's first pair in the global batch.

        Returns:
            Scalar; its mean over the ranks is the loss of the global batch.
        """
        scale = logits[0].exp()
        bias = logits[1] if len(logits) > 1 else torch.zeros_like(scale)
        gathered: dict[int, torch.Tensor] = {}
        losses = []
        for rows, columns in self.pairs:
            if columns not in gathered:
                gathered[columns] = gather(features[columns])
            losses.append(_RowsAgainstColumns.apply(features[rows], gathered[columns], scale, bias, first, self.terms))
        return torch.stack(losses).mean()


CLIP_LOSS = PairLoss(((0, 1), (1, 0)))
"""Radford et al. 2021: the symmetric cross-entropy of images and texts."""
SIGLIP_LOSS = PairLoss(((0, 1),), _sigmoid)
"""Zhai et al. 2023: the sigmoid loss of images with all texts."""
BRIDGE_TOWER_LOSS = PairLoss(((1, 0), (1, 2), (0, 2)))
"""Of transformers' `BridgeTowerForContrastiveLearning`: texts with images, and both with their features together."""
