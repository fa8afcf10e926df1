"""Random erasing (Zhong et al. 2017): boxes are drawn with the sample, pixels are erased in the batch on its device.

As in timm's RandomErasing, images are normalised already, so that "const" erases to the mean colour and noise is
standard normal. The noise is a pure function of the sample's key and the pixel's place, on every device.
"""

from __future__ import annotations

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.draws import seeded
from ds_vit.data.augment.steps import Size


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
        with seeded(key, "erase"):
            self._erasing._erase(recorder, 3, *size, torch.float32)
        boxes = np.zeros((self.max_boxes, 4), dtype=np.int32)
        boxes[: len(recorder.boxes)] = np.array(recorder.boxes, dtype=np.int32).reshape(-1, 4)
        return boxes


def box_mask(boxes: torch.Tensor, size: Size) -> torch.Tensor:
    """Which pixels lie in a box.

    Args:
        boxes: (top, left, bottom, right), integers [B, 4].
        size: height and width.

    Returns:
        bool [B, 1, H, W] on the device of `boxes`.
    """
    top, left, bottom, right = (edge[:, None] for edge in boxes.unbind(1))
    rows = torch.arange(size[0], device=boxes.device)
    columns = torch.arange(size[1], device=boxes.device)
    inside_rows = (rows >= top) & (rows < bottom)
    inside_columns = (columns >= left) & (columns < right)
    return (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]


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
    rows = touched.to(device, non_blocking=True)
    row_keys = keys[touched].to(device, non_blocking=True)
    row_boxes = boxes[touched].to(device, non_blocking=True)
    part = images[rows]
    if mode == "pixel":
        fill = randomness.normal(row_keys, "erase/noise", part.shape[1:])
    for number in range(boxes.shape[1]):
        if mode == "rand":
            fill = randomness.normal(row_keys, f"erase/color/{number}", (3, 1, 1))
        elif mode == "const":
            fill = torch.zeros((), device=device)
        part = torch.where(box_mask(row_boxes[:, number], size), fill, part)
    images[rows] = part
    return images
