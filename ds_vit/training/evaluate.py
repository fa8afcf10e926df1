"""Exact evaluation: every validation image is counted once, for any number of ranks and any remainder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_vit.engine.base import EVAL_CHUNK, Engine, EvalInputs


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over a whole split; percentages, and the mean loss in nats."""

    top1: float
    top5: float
    loss: float
    images: int


def evaluate(
    engine: Engine,
    batches: Iterator[EvalInputs],
    num_batches: int,
    *,
    bce: bool = False,
    between: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Count right answers over all ranks (a collective; every rank brings the same number of batches).

    Args:
        engine: runs the model.
        batches: (images [B, 3, H, W], keys [B], targets [B] or multi-hot [B, C], valid bool [B]); rows that are not
            valid are padding and count nowhere.
        num_batches: how many this rank brings.
        bce: the loss is binary cross-entropy (multi-label); else softmax cross-entropy without smoothing.
        between: called on every rank after every 32 batches (a collective); what it raises ends the evaluation.

    Returns:
        The same figures on every rank. For multi-hot targets an image counts as right at top-k when one of its labels
        is among the k highest logits.

    Raises:
        ValueError: no image was valid.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=engine.device)  # right at 1, right at 5, loss, images
    for start in range(0, num_batches, EVAL_CHUNK):
        if start:
            between()
        for logits, targets, valid in engine.forward_batches(batches, min(EVAL_CHUNK, num_batches - start)):
            totals += count(logits, targets, valid, bce=bce)
    top1, top5, loss, images = engine.sum(totals).tolist()
    if not images:
        raise ValueError("the validation split has no image that can be decoded")
    return Accuracy(100.0 * top1 / images, 100.0 * top5 / images, loss / images, int(images))


def count(logits: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, *, bce: bool = False) -> torch.Tensor:
    """Float64 [right at 1, right at 5, summed loss, images] of the valid rows of a batch.

    Args:
        logits: fp32 [B, C].
        targets: int64 [B] or multi-hot float32 [B, C].
        valid: bool [B].
        bce: binary cross-entropy, averaged over classes.
    """
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    if targets.dim() == 1:
        hits = ranked == targets[:, None]
        dense = F.one_hot(targets, logits.shape[1]).to(logits.dtype) if bce else None
    else:
        hits = targets.gather(1, ranked) > 0
        dense = targets
    if bce:
        losses = F.binary_cross_entropy_with_logits(logits, dense, reduction="none").mean(1)
    else:
        losses = F.cross_entropy(logits, targets, reduction="none")
    rows = torch.stack([hits[:, 0], hits.any(1), losses, torch.ones_like(losses)], dim=1).double()
    return torch.where(valid[:, None], rows, 0.0).sum(0)
