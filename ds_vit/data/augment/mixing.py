"""Mixup and CutMix of adjacent pairs: timm's `pair` mode, with partners that do not depend on the micro-batch.

Rows 2p and 2p + 1 of the global batch are partners. Each pair has a lambda and a box of its own, drawn by timm's
Mixup from the key of row 2p; both partners are mixed with them, images as well as targets. (timm pairs the first row of
a rank's batch with its last, which depends on the batch size and the number of ranks.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target

from ds_vit.config.augmentation import MixConfig
from ds_vit.data.augment.draws import seeded
from ds_vit.data.augment.erasing import box_mask
from ds_vit.data.augment.steps import Size


class PairMix(NamedTuple):
    """How the rows of a micro-batch are mixed (B own rows).

    Attributes:
        partner: the row of the micro-batch, which may be an extra one, that each row is mixed with; int64 [B].
        lam: the share of the row itself in its target, and by mixup in its pixels; float32 [B], 1 for no mixing.
        box: CutMix's (top, left, bottom, right), which the partner fills; int32 [B, 4], all zero for mixup.
    """

    partner: torch.Tensor
    lam: torch.Tensor
    box: torch.Tensor


class PairDraws:
    """Draws a pair's lambda and box, by timm's Mixup."""

    def __init__(self, mix: MixConfig) -> None:
        self._mixup = Mixup(
            mixup_alpha=mix.mixup,
            cutmix_alpha=mix.cutmix,
            cutmix_minmax=mix.cutmix_minmax,
            prob=mix.mixup_prob,
            switch_prob=mix.mixup_switch_prob,
            mode="pair",
        )

    def draw(self, key: int, size: Size) -> tuple[float, tuple[int, int, int, int]]:
        """Lambda, and CutMix's box (all zero for mixup), of the pair whose first partner has the sample key `key`."""
        with seeded(key, "mix"):
            (lam,), (use_cutmix,) = self._mixup._params_per_elem(1)
            if not use_cutmix or lam == 1.0:
                return float(lam), (0, 0, 0, 0)
            (top, bottom, left, right), lam = cutmix_bbox_and_lam(
                (3, *size), lam, ratio_minmax=self._mixup.cutmix_minmax, correct_lam=self._mixup.correct_lam
            )
        return float(np.float32(lam)), (int(top), int(left), int(bottom), int(right))


def mix_images(images: torch.Tensor, num_rows: int, mix: PairMix) -> torch.Tensor:
    """Mix the images of a micro-batch.

    Args:
        images: normalised, float32 [R, 3, H, W]: the own rows, then extra partners.
        num_rows: B, how many are own rows.
        mix: on the CPU (whether anything is mixed is asked without waiting for the device).

    Returns:
        float32 [B, 3, H, W].
    """
    own = images[:num_rows]
    if bool((mix.lam == 1.0).all()):
        return own
    device = images.device
    partner = images[mix.partner.to(device, non_blocking=True)]
    is_cutmix = mix.box.any(dim=1)
    lam = torch.where(is_cutmix, 1.0, mix.lam).to(device, non_blocking=True)[:, None, None, None]
    mixed = own * lam + partner * (1.0 - lam)
    if bool(is_cutmix.any()):
        mask = box_mask(mix.box.to(device, non_blocking=True), (images.shape[2], images.shape[3]))
        mixed = torch.where(mask, partner, mixed)
    return mixed


def mix_targets(targets: torch.Tensor, num_rows: int, mix: PairMix, num_classes: int, smoothing: float) -> torch.Tensor:
    """Mixed and smoothed targets, by timm's mixup_target.

    Args:
        targets: class numbers int64 [R], or multi-hot float32 [R, C]: the own rows, then extra partners.
        num_rows: B, how many are own rows.
        mix: how they are mixed.
        num_classes: C.
        smoothing: label smoothing; a multi-hot target moves towards 0.5, as in timm.

    Returns:
        float32 [B, C] on the device of `targets`.
    """
    partner = targets[mix.partner.to(targets.device, non_blocking=True)]
    lam = mix.lam.to(targets.device, non_blocking=True)
    # mixup_target mixes row i with row -1 - i: the partners stand behind the own rows in reverse.
    both = torch.cat([targets[:num_rows], partner.flip(0)])
    soft = mixup_target(both, num_classes, torch.cat([lam, lam.flip(0)])[:, None], smoothing, targets.ndim == 2)
    return soft[:num_rows]
