"""Several crops of an image: DINO's multi-crop augmentation (Caron et al. 2021), keyed by view.

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
from ds_vit.data.augment.colours import as_pixels
from ds_vit.data.augment.on_device import Crop, Cut
from ds_vit.data.augment.steps import Operation, RandomBlur, RandomResizedCrop, Size, apply
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
