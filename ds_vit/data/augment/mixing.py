"""Random erasing, mixup and CutMix: drawn with the sample, done in the batch on its device.

As in timm, images are normalised, then erased, then mixed, so that "const" erases to the mean colour and noise is
standard normal. The noise is a pure function of the sample's key and the pixel's place, on every device.

Rows 2p and 2p + 1 of the global batch are mixed: timm's `pair` mode, with partners that do not depend on the
micro-batch. (timm pairs the first row of a rank's batch with its last.) Each pair has one lambda and one box, drawn by
timm's Mixup from the key of row 2p; images and targets of both partners are mixed with them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.augment.steps import Size, seed_generators
from ds_vit.device import send_all


class _BoxRecorder:
    """Stands in for an image tensor and notes the boxes that are assigned to."""

    def __init__(self) -> None:
        self.boxes: list[tuple[int, int, int, int]] = []

    def __setitem__(self, place: tuple[slice, slice, slice], pixels: torch.Tensor) -> None:
        _, rows, columns = place
        self.boxes.append((rows.start, columns.start, rows.stop, columns.stop))


class ErasingBoxes:
    """Draws the boxes that `--reprob` and `--recount` erase, by timm's RandomErasing."""

    def __init__(self, augment: AugmentConfig) -> None:
        self.max_boxes = augment.recount
        # Mode "const" draws no colours: those come from the key, on the device.
        self._erasing = RandomErasing(augment.reprob, max_count=augment.recount, mode="const", device="cpu")

    def draw(self, key: int, size: Size) -> np.ndarray:
        """Boxes of (top, left, bottom, right), int32 [recount, 4]; all zero where there is none."""
        recorder = _BoxRecorder()
        seed_generators(key, "erase")
        self._erasing._erase(recorder, 3, *size, torch.float32)
        boxes = np.zeros((self.max_boxes, 4), dtype=np.int32)
        boxes[: len(recorder.boxes)] = np.array(recorder.boxes, dtype=np.int32).reshape(-1, 4)
        return boxes


def lines_of(boxes: torch.Tensor, size: Size) -> list[torch.Tensor]:
    """Which rows and columns lie in boxes, integers [..., 4]: bool [..., 1, H, 1] and [..., 1, 1, W]."""
    top, left, bottom, right = boxes[..., None, None, None].unbind(-4)
    rows, columns = torch.arange(size[0])[:, None], torch.arange(size[1])
    return [(rows >= top) & (rows < bottom), (columns >= left) & (columns < right)]


def erase(images: torch.Tensor, boxes: torch.Tensor, keys: torch.Tensor, mode: str) -> torch.Tensor:
    """Erase boxes of normalised images.

    Args:
        images: float32 [R, 3, H, W], changed in place.
        boxes: int32 [R, N, 4] on the CPU (the rows to touch are chosen without waiting for the device).
        keys: sample keys, int64 [R] on the CPU.
        mode: "const" for zero, "rand" for one normal colour a box, "pixel" for normal noise.

    Returns:
        `images`.
    """
    device, size = images.device, (images.shape[2], images.shape[3])
    touched = torch.nonzero(boxes.flatten(1).any(dim=1)).flatten()
    if not len(touched):
        return images
    names = [f"erase/color/{number}" for number in range(boxes.shape[1])] if mode == "rand" else ["erase/noise"]
    draws = torch.stack([randomness.normal_bits(keys[touched], name) for name in names], dim=1)
    rows, high, wide, bits = send_all(device, touched, *lines_of(boxes[touched], size), draws)
    part, masks = images[rows], high & wide
    shape = (3, 1, 1) if mode == "rand" else part.shape[1:]
    fills = [0.0] if mode == "const" else list(randomness.normal(bits, shape))
    for number in range(boxes.shape[1]):
        part = torch.where(masks[:, number], fills[number % len(fills)], part)
    images[rows] = part
    return images


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
        seed_generators(key, "mix")
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
    is_cutmix = mix.box.any(dim=1)
    share = torch.where(is_cutmix, 1.0, mix.lam)[:, None, None, None]
    known = mix.partner, share, 1.0 - share, *lines_of(mix.box, (images.shape[2], images.shape[3]))
    rows, lam, rest, high, wide = send_all(images.device, *known)
    partner = images[rows]
    mixed = own * lam + partner * rest
    return torch.where(high & wide, partner, mixed) if bool(is_cutmix.any()) else mixed


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
