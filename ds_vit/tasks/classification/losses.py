"""The training loss, in fp32, by timm's own modules and rules (timm/loss)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from ds_vit.parallel.tensor.class_parallel import SoftmaxCrossEntropy, own_classes
from ds_vit.parallel.tensor.collectives import TensorParallel, reduce_from_region

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """The kind of loss and the treatment of its targets, for every form of the loss.

    Attributes:
        soft_targets: targets are float32 [B, C] with smoothing already inside (mixing), and used as they are, except
            for the threshold; else int64 [B] or multi-hot.
        smoothing: label smoothing of hard targets.
        bce: binary cross-entropy over classes in place of softmax cross-entropy.
        bce_sum: sum the binary cross-entropy over classes instead of averaging.
        bce_target_thresh: binarise the targets of binary cross-entropy above this, after smoothing; None: leave them.
        multi_label: targets are multi-hot [B, C]; smoothing then moves each one towards 1/2 (timm's `smooth_dense`).
    """

    soft_targets: bool
    smoothing: float
    bce: bool
    bce_sum: bool = False
    bce_target_thresh: float | None = None
    multi_label: bool = False

    @property
    def number_smoothing(self) -> float:
        """Label smoothing of class numbers int64 [B]; the mixing has smoothed soft targets: never a second time."""
        return 0.0 if self.soft_targets or self.multi_label else self.smoothing

    @property
    def multi_hot_smoothing(self) -> float:
        """How far multi-hot float32 [B, C] targets are moved towards 1/2."""
        return self.smoothing if self.multi_label and not self.soft_targets else 0.0


def build_loss(rule: LossRule) -> Loss:
    """The mean loss of a micro-batch: `loss(logits [B, C], targets) → scalar fp32`."""
    if rule.bce:
        module = BinaryCrossEntropy(
            smoothing=rule.multi_hot_smoothing or rule.number_smoothing,
            target_threshold=rule.bce_target_thresh,
            sum_classes=rule.bce_sum,
            smooth_dense=bool(rule.multi_hot_smoothing),
        )
    elif rule.soft_targets:
        module = SoftTargetCrossEntropy()
    else:

        def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits.float(), targets, label_smoothing=rule.number_smoothing)

        return smoothed
    return lambda logits, targets: module(logits.float(), targets)


def class_parallel_loss(rule: LossRule, tp: TensorParallel, num_classes: int) -> Loss:
    """`build_loss` for a classifier that is sharded over the classes.

    Args:
        rule: as for `build_loss`.
        tp: this rank's place in the group.
        num_classes: C, without padding.

    Returns:
        `loss(logits [B, c], targets) -> scalar fp32`, the same on every rank. The targets are those of all classes
        (int64 [B] or float32 [B, C]), the same on every rank. Softmax moves 4 numbers per sample and rank, BCE one.
    """
    first, count = own_classes(num_classes, tp)
    off_value = rule.number_smoothing / num_classes

    def own_targets(targets: torch.Tensor) -> torch.Tensor:
        """float32 [B, n]: what timm's losses make of the targets, this rank's classes of it."""
        if targets.ndim > 1:
            own = targets[:, first : first + count].float()
            if rule.multi_hot_smoothing:
                own = own * (1.0 - rule.multi_hot_smoothing) + 0.5 * rule.multi_hot_smoothing
        else:
            classes = torch.arange(first, first + count, device=targets.device)
            own = torch.where(targets[:, None] == classes, 1.0 - rule.number_smoothing + off_value, off_value)
        threshold = rule.bce_target_thresh if rule.bce else None
        return own if threshold is None else own.gt(threshold).float()

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own_logits = logits[:, :count].float()
        if not rule.bce:
            return SoftmaxCrossEntropy.apply(own_logits, own_targets(targets), tp)
        own_sum = F.binary_cross_entropy_with_logits(own_logits, own_targets(targets), reduction="sum")
        return reduce_from_region(own_sum, tp) / (len(logits) * (1 if rule.bce_sum else num_classes))

    return loss
