"""The training loss, in fp32, by timm's own modules and rules (timm/loss)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from ds_vit.config.schema import RunConfig
from ds_vit.parallel.tensor.class_parallel import SoftmaxCrossEntropy, own_classes
from ds_vit.parallel.tensor.collectives import TensorParallel, reduce_from_region

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _smoothing(config: RunConfig) -> float:
    """Label smoothing of hard targets: mixing has smoothed soft ones, never a second time."""
    return 0.0 if config.active else config.smoothing


def build_loss(config: RunConfig) -> Loss:
    """The mean loss of a micro-batch: `loss(logits [B, C], targets) → scalar fp32`.

    Targets are int64 [B], or float32 [B, C]: multi-hot ones, which smoothing moves towards 1/2 (timm's `smooth_dense`),
    or those of mixed images.
    """
    smoothing = _smoothing(config)
    if config.bce_loss:
        module = BinaryCrossEntropy(
            smoothing=smoothing,
            target_threshold=config.bce_target_thresh,
            sum_classes=config.bce_sum,
            smooth_dense=True,
        )
    elif config.active:
        module = SoftTargetCrossEntropy()
    else:
        return lambda logits, targets: F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
    return lambda logits, targets: module(logits.float(), targets)


def class_parallel_loss(config: RunConfig, tp: TensorParallel, num_classes: int) -> Loss:
    """`build_loss` for a classifier that is sharded over the classes.

    Args:
        config: as for `build_loss`.
        tp: this rank's place in the group.
        num_classes: C, without padding.

    Returns:
        `loss(logits [B, c], targets) -> scalar fp32`, the same on every rank. The targets are those of all classes
        (int64 [B] or float32 [B, C]), the same on every rank. Softmax moves 4 numbers per sample and rank, BCE one.
    """
    first, count = own_classes(num_classes, tp)
    smoothing = _smoothing(config)

    def own_targets(targets: torch.Tensor) -> torch.Tensor:
        """float32 [B, n]: what timm's losses make of the targets, this rank's classes of it."""
        if targets.ndim > 1:
            own = targets[:, first : first + count].float()
            if smoothing:
                own = own * (1.0 - smoothing) + 0.5 * smoothing
        else:
            classes = torch.arange(first, first + count, device=targets.device)
            off_value = smoothing / num_classes
            own = torch.where(targets[:, None] == classes, 1.0 - smoothing + off_value, off_value)
        threshold = config.bce_target_thresh if config.bce_loss else None
        return own if threshold is None else own.gt(threshold).float()

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own_logits = logits[:, :count].float()
        if not config.bce_loss:
            return SoftmaxCrossEntropy.apply(own_logits, own_targets(targets), tp)
        own_sum = F.binary_cross_entropy_with_logits(own_logits, own_targets(targets), reduction="sum")
        return reduce_from_region(own_sum, tp) / (len(logits) * (1 if config.bce_sum else num_classes))

    return loss
