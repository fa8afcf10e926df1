"""Several crops of an image, keyed by view: DINO's multi-crop augmentation (Caron et al. 2021), and masks of them.

Each view is a pure function of the sample's key and the view's number: two large (global) views, then the small (local)
ones. A view is a random-resized crop, a flip, colour jitter, grey, blur and, in the second view, solarise, with the
probabilities of DINO's code (facebookresearch/dino, main_dino.py). As there, the blur is Pillow's.

Shapes: B samples, H x W the model's input, n local views of L x L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.on_device import Crop, Cut
from ds_vit.data.augment.steps import Operation, RandomBlur, RandomResizedCrop, Size, apply, as_pixels
from ds_vit.data.augment.transforms import TrainTransform
from ds_vit.data.decode import Jpeg
from ds_vit.data.settings import NUM_GLOBAL, CropConfig, ImageConfig

_BLUR, _BLUR_OF_LOCAL = (1.0, 0.1), 0.5  # probabilities, of each global view
_SOLARIZE = (0.0, 0.2)


def view_keys(keys: np.ndarray, num_views: int) -> np.ndarray:
    """The keys of the first views of samples, of which two are global: int64 [B, num_views].

    Args:
        keys: of the samples, int64 [B].
        num_views: of each.
    """
    mixed = randomness.mix_array(randomness.mix_array(keys, 0), randomness.name_key("crop"))
    return randomness.mix_array(mixed[:, None], np.arange(num_views))


def _transform(size: Size, scale: tuple[float, float], blur: float, solarize: float) -> TrainTransform:
    steps = [
        transforms.RandomHorizontalFlip(0.5),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        transforms.RandomGrayscale(0.2),
        transforms.RandomApply([RandomBlur((0.1, 2.0))], p=blur),
        transforms.RandomSolarize(threshold=128, p=solarize),
    ]
    crop = RandomResizedCropAndInterpolation(size, scale=scale, interpolation="bicubic")
    return TrainTransform(RandomResizedCrop(crop), steps)


class MultiCrop:
    """All views of an image.

    Args:
        image: the size of the global views.
        crops: how many views there are and how much of the image each shows.
        augment: where to augment, and how to decode; its other settings have no effect.

    Attributes:
        cuts: whether views are only cut out of the image, for the device to do the rest.
        shapes: of the global views of a sample [2, 3, H, W] and, if there are any, of the local ones [n, 3, L, L].
    """

    def __init__(self, image: ImageConfig, crops: CropConfig, augment: AugmentConfig) -> None:
        small, num_local = (crops.local_size, crops.local_size), crops.num_local
        self.cuts = augment.augment_on == "device"
        self.shapes = ((NUM_GLOBAL, 3, *image.img_size), (num_local, 3, *small))[: 2 if num_local else 1]
        self._passes_files = self.cuts and augment.decode == "fast"
        local = _transform(small, crops.local_scale, _BLUR_OF_LOCAL, solarize=0.0)
        large = (_transform(image.img_size, crops.global_scale, *of) for of in zip(_BLUR, _SOLARIZE, strict=True))
        self.transforms = (*large, *[local] * num_local)

    def draw(self, key: int, size: Size) -> list[tuple[Any, list[Operation]]]:
        """The crop's parameters and the operations of each view, for the sample `key` and an image of `size`."""
        keys = view_keys(np.array([key]), len(self.transforms))[0].tolist()
        return [transform.draw(key, size) for transform, key in zip(self.transforms, keys, strict=True)]

    def decoded(self, image: Image.Image | Jpeg, drawn: Sequence[tuple[Any, list[Operation]]]) -> Image.Image | Jpeg:
        """The image of which all views are taken, decoded once; a file that the device decodes as it is.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        if not isinstance(image, Jpeg):
            return image
        if self._passes_files and image.for_another_decoder() is not None:
            return image
        sizes = [shape[-2:] for shape in self.shapes for _ in range(shape[0])]
        whole = replace(image, fast=False) if self.cuts else image
        return whole.decoded([(box, size) for ((box, _), _), size in zip(drawn, sizes, strict=True)])

    def __call__(self, image: Image.Image | Jpeg, key: int) -> list[torch.Tensor | list[Cut]]:
        """The views of an RGB image, the global ones first: uint8 of `shapes`, or how the device makes them.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        size = image.height, image.width
        drawn = self.draw(key, size)
        image = self.decoded(image, drawn)
        if not self.cuts:
            views = [
                as_pixels(apply(transform.crop.apply(image, crop), operations))
                for transform, (crop, operations) in zip(self.transforms, drawn, strict=True)
            ]
            return [torch.stack(part) for part in (views[:NUM_GLOBAL], views[NUM_GLOBAL:]) if part]
        cuts = []
        for number, ((box, interpolation), operations) in enumerate(drawn):
            top, left, height, width = box
            file = None
            if isinstance(image, Jpeg):  # the bytes are sent once for the global views and once for the local ones
                is_first = number in (0, NUM_GLOBAL)
                data, file = np.frombuffer(image.data if is_first else b"", dtype=np.uint8), (image.name, size)
            else:
                data = np.asarray(image.crop((left, top, left + width, top + height))).reshape(-1)
            cuts.append(Cut(data, Crop(data.size, box, interpolation.value, operations, file)))
        return [part for part in (cuts[:NUM_GLOBAL], cuts[NUM_GLOBAL:]) if part]


# ---- block masks -----------------------------------------------------------------------------------------------------

# Of iBOT (Zhou et al. 2022): which patches of a view are hidden from the student. The blocks are BEiT's (Bao et al.
# 2022, algorithm 1) with DINOv2's bounds (Oquab et al. 2023, dinov2/data/masking.py). DINOv2 masks a fixed share of a
# rank's batch with stratified ratios. Here each view draws both from its own key, since a draw for a batch would
# depend on the layout. Shapes: V views, N = rows x columns patches of a view, A views whose mask is not complete.

_LEAST_PATCHES = 4  # of a block's drawn area
_LARGEST_SHARE = 0.5  # of the patches, in one block
_LOG_ASPECT = float(np.log(0.3))  # height over width is log-uniform in [0.3, 1 / 0.3]
_ATTEMPTS = 10  # to place a block


def block_masks(
    keys: np.ndarray, grid: tuple[int, int], probability: float, ratio_min_max: tuple[float, float]
) -> np.ndarray:
    """The masks of views, each a pure function of the view's key.

    A view is masked with `probability`. Its ratio is uniform in `ratio_min_max`, and ratio x N, rounded down, is the
    most patches that are masked. Blocks are placed until there is no room: a block that adds no patch, or more than are
    left, is drawn again, ten times at most. So a mask may have a few patches less, and on a small grid none.

    Args:
        keys: of the views, int64 [V].
        grid: rows and columns of patches.
        probability: that a view is masked.
        ratio_min_max: smallest and largest share of a masked view's patches.

    Returns:
        bool [V, N], row by row of the grid; True where a patch is masked.
    """
    rows, columns = grid
    bits = randomness.mix_array(keys, randomness.name_key("block mask"))
    low, high = ratio_min_max
    ratio = low + (high - low) * _uniform(bits, 1)
    is_masked = _uniform(bits, 0) < probability
    left = np.where(is_masked, (ratio * (rows * columns)).astype(np.int64), 0)  # patches that may still be masked
    masks = np.zeros((len(keys), rows, columns), dtype=bool)
    failed = np.zeros(len(keys), dtype=np.int64)  # attempts at the current block
    number = 2  # of the draw
    row, column = np.arange(rows), np.arange(columns)
    while (active := np.flatnonzero((left > 0) & (failed < _ATTEMPTS))).size:
        area_draw, aspect_draw, top_draw, left_draw = (_uniform(bits[active], number + n) for n in range(4))
        number += 4
        most = np.minimum(left[active], _LARGEST_SHARE * rows * columns)
        area = _LEAST_PATCHES + (most - _LEAST_PATCHES) * area_draw
        aspect = np.exp(_LOG_ASPECT * (1.0 - 2.0 * aspect_draw))
        height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        at_row = np.floor(top_draw * (rows - height + 1))[:, None]
        at_column = np.floor(left_draw * (columns - width + 1))[:, None]
        in_rows = (row >= at_row) & (row < at_row + height[:, None])
        in_columns = (column >= at_column) & (column < at_column + width[:, None])
        new = in_rows[:, :, None] & in_columns[:, None, :] & ~masks[active]  # [A, rows, columns]
        added = new.sum(axis=(1, 2))
        placed = (height < rows) & (width < columns) & (added > 0) & (added <= most)
        masks[active[placed]] |= new[placed]
        left[active] -= np.where(placed, added, 0)
        failed[active] = np.where(placed, 0, failed[active] + 1)
    return masks.reshape(len(keys), rows * columns)


def _uniform(bits: np.ndarray, number: int) -> np.ndarray:
    """Draw `number` of each key, float64 in [0, 1) with 53 random bits."""
    return (randomness.mix_array(bits, number).view(np.uint64) >> np.uint64(11)) * 2.0**-53
