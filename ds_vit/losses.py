"""The training loss, in fp32, by timm's own modules and rules (timm/loss)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build_loss(
    *,
    soft_targets: bool,
    smoothing: float,
    bce: bool,
    bce_sum: bool = False,
    bce_target_thresh: float | None = None,
    multi_label: bool = False,
) -> Loss:
    """The mean loss of a micro-batch: `loss(logits [B, C], targets) → scalar fp32`.

    Args:
        soft_targets: targets are float32 [B, C] with smoothing already inside (mixing); else int64 [B] or multi-hot.
        smoothing: label smoothing of hard targets.
        bce: binary cross-entropy over classes in place of softmax cross-entropy.
        bce_sum: sum the binary cross-entropy over classes instead of averaging.
        bce_target_thresh: binarise soft targets above this.
        multi_label: targets are multi-hot [B, C]; smoothing then moves each one towards 1/2 (timm's `smooth_dense`).

    Raises:
        ValueError: multi-label targets without binary cross-entropy.
    """
    if multi_label and not bce:
        raise ValueError("this data set has several labels an image: softmax cannot fit them; add --bce-loss")
    if bce:
        module = BinaryCrossEntropy(
            smoothing=0.0 if soft_targets else smoothing,
            target_threshold=bce_target_thresh,
            sum_classes=bce_sum,
            smooth_dense=multi_label,
        )
    elif soft_targets:
        module = SoftTargetCrossEntropy()
    else:

        def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)

        return smoothed
    return lambda logits, targets: module(logits.float(), targets)
