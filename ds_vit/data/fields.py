"""The fields that tasks combine: an image, its classes, a caption.

On the device, images are normalised, then erased, then mixed: the order of timm's Mixup. Everything random was drawn
when the micro-batch was read or is keyed by its samples, so that a CPU and a GPU make the same tensors up to rounding.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.augment.mixing import ErasingBoxes, erase, mix_images, mix_targets
from ds_vit.data.augment.on_device import Crops, Cut, CuttingTransform, augmented, bytes_of_photo, packed
from ds_vit.data.augment.steps import Operation, RandomResizedCrop, uniform
from ds_vit.data.augment.transforms import FixedTransform, eval_transform, train_transform
from ds_vit.data.decode import Jpeg, open_image
from ds_vit.data.field import Field, Rows, Sample, stacked
from ds_vit.data.settings import ImageConfig
from ds_vit.data.slots import empty
from ds_vit.data.text import Tokenizer
from ds_vit.fault_tolerance.errors import UserError

_IN_CACHE = 2**17  # values of float32


# ---- images ----------------------------------------------------------------------------------------------------------


class Pictures(NamedTuple):
    """Images as they are sent.

    Attributes:
        pixels: uint8 [R, ..., 3, H, W]; with --augment-on device the crops to be augmented there.
        erase: boxes to erase (top, left, bottom, right), int32 [R, N, 4], or None.
    """

    pixels: torch.Tensor | Crops
    erase: torch.Tensor | None = None


class ImageField(Field):
    """An image, augmented in training, normalised, erased and mixed: [B, 3, H, W].

    Args:
        name: as for `Field`.
        image: size and normalisation.
        augment: of training; None for evaluation's transform.
        entry: bytes of a file, or pixels.

    Attributes:
        transform: of an image in the loader's processes.
        decoded: images that the loader decoded though a device decodes ("loader"), and the counts of `decode_on`.

    Raises:
        UserError: incompatible flags of augmentation.
    """

    is_heavy = True
    mixes = True

    def __init__(
        self, name: str, image: ImageConfig, augment: AugmentConfig | None = None, *, entry: str = "image"
    ) -> None:
        super().__init__(name, (3, *image.img_size), entry=entry)
        self.image, self.augment = image, augment
        self.decoder = augment.decode if augment else "exact"
        self.decoded: Counter[str] = Counter()
        self._boxes = ErasingBoxes(augment) if augment and augment.reprob > 0.0 and not augment.no_aug else None
        self.transform = self._transform()

    def _transform(self) -> Any:
        if self.augment is None:
            return eval_transform(self.image)
        transform = train_transform(self.image, self.augment)
        cuts = self.augment.augment_on == "device" and not self.augment.no_aug
        return CuttingTransform(transform, self.augment) if cuts else transform

    def opened(self, sample: Sample) -> Image.Image | Jpeg:
        """A sample's image, once for all fields that ask; of a JPEG file only what is cropped is decoded later.

        Raises:
            ImageDecodeError: it is damaged.
        """
        # A file that a device decodes would show its damage there, too late for a replacement.
        whole = sample.damage_counts and self.transform.cuts
        turn = self.image.exif_rotation

        def opened() -> Image.Image | Jpeg:
            return open_image(sample[self.entry], sample.name, self.decoder, whole=whole, exif_rotation=turn)

        return sample.once((self.entry, self.decoder, whole, turn), opened)

    def read(self, sample: Sample) -> Any:
        """The pixels uint8 [3, H, W], or how the device makes them (`Cut`)."""
        return self.transform(self.opened(sample), sample.key)

    def geometry(
        self, sample: Sample
    ) -> tuple[tuple[float, float, float, float], tuple[int, int], Sequence[Operation]]:
        """The place of a sample's pixels in its image, for fields that follow it. Nothing is decoded for it.

        Returns:
            The crop's (top, left, height, width) and the image's (height, width), in pixels of the file, and the
            operations that follow the resize of the crop: those that the sample's key draws in training.

        Raises:
            UserError: the crop of training is not --train-crop-mode rrc.
        """
        transform = self.transform.drawn if isinstance(self.transform, CuttingTransform) else self.transform
        image = self.opened(sample)
        size = image.height, image.width
        if isinstance(transform, FixedTransform):
            return transform.box(size), size, ()
        if not isinstance(transform.crop, RandomResizedCrop):
            raise UserError(f"{self.name} has fields that follow it: they need --train-crop-mode rrc")
        (box, _), operations = transform.draw(sample.key, size)
        return box, size, operations

    def blank(self) -> torch.Tensor:
        """Black; nothing where images have files of any size, which are in no evaluation."""
        return torch.zeros(0 if self.transform.cuts else self.shape, dtype=torch.uint8)

    def collate(self, values: Sequence[Any], rows: Rows) -> Pictures:
        """As `Field.collate`; boxes are drawn by the keys."""
        boxes = None
        if self._boxes is not None:
            size = self.image.img_size
            boxes = torch.from_numpy(np.stack([self._boxes.draw(key, size) for key in rows.keys.tolist()]))
        if not self.transform.cuts:
            return Pictures(stacked(values), boxes)
        cuts = [cut for value in values for cut in ([value] if isinstance(value, Cut) else value)]
        memory, views = empty((sum(cut.data.size for cut in cuts),)), self.shape[0] if len(self.shape) == 4 else 0
        return Pictures(packed(cuts, (self.shape[-2], self.shape[-1]), memory, num_views=views), boxes)

    def to_device(self, packed: Pictures, rows: Rows, device: torch.device) -> torch.Tensor:
        """As `Field.to_device`, float32."""
        pixels = packed.pixels
        if isinstance(pixels, Crops):
            self.decoded["loader"] += sum(crop.file is None for crop in pixels.crops)
            pixels = augmented(pixels, device, self.decoded)
        images = normalised(pixels.to(device, non_blocking=True), self.image)
        if packed.erase is not None:
            assert self.augment is not None, "there are boxes to erase in training only"
            images = erase(images, packed.erase, rows.keys, self.augment.remode)
        return images[: rows.num_rows] if rows.mix is None else mix_images(images, rows.num_rows, rows.mix)

    def resized(self, side: int) -> ImageField:
        """As `Field.resized`."""
        field = copy.copy(self)
        field.image, field.shape = replace(self.image, img_size=(side, side)), (*self.shape[:-2], side, side)
        field.transform = field._transform()
        return field

    def device_bytes(self) -> int:
        """As `Field.device_bytes`, where the device decodes and augments."""
        height, width = self.shape[-2:]
        return int(np.prod(self.shape[:-3])) * bytes_of_photo((height, width)) if self.transform.cuts else 0


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def normalised(pixels: torch.Tensor, image: ImageConfig) -> torch.Tensor:
    """(pixels / 255 - mean) / std of [..., 3, H, W], in float32."""
    images = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
    # On a CPU a few rows at once: all four passes over them then find them in the cache.
    few = max(1, _IN_CACHE // pixels[0].numel()) if pixels.device.type == "cpu" else len(pixels)
    mean, std = (_channels(values, pixels.device) for values in (image.mean, image.std))
    for out, row in zip(images.split(few), pixels.split(few), strict=True):
        torch.div(row, 255.0, out=out).sub_(mean).div_(std)
    return images


# ---- what belongs to an image ----------------------------------------------------------------------------------------


class LabelField(Field):
    """Class numbers int64 [B]; float32 [B, C] where an image has several labels, or pairs are mixed.

    Args:
        name: as for `Field`.
        num_classes: C of the model, at least the source's.
        multi_label: whether the source's targets are multi-hot.
        mix: of training, whose smoothing is in the targets of every epoch; None in evaluation. Without mixing,
            smoothing is the loss's.
    """

    mixes = True

    def __init__(self, name: str, num_classes: int, *, multi_label: bool = False, mix: MixConfig | None = None) -> None:
        soft = multi_label or (mix is not None and mix.active)
        shape, dtype = ((num_classes,), torch.float32) if soft else ((), torch.int64)
        super().__init__(name, shape, dtype, stage="last", entry="target")
        self._num_classes, self._multi_label, self._mix = num_classes, multi_label, mix

    def read(self, sample: Sample) -> Any:
        """The class number, or multi-hot [C]."""
        target = super().read(sample)
        return np.pad(target, (0, self._num_classes - len(target))) if self._multi_label else target

    def blank(self) -> torch.Tensor:
        """No class, or the first one."""
        return torch.zeros(self._num_classes) if self._multi_label else torch.zeros((), dtype=torch.int64)

    def collate(self, values: Sequence[Any], rows: Rows) -> torch.Tensor:
        """As `Field.collate`: class numbers until they are mixed."""
        return stacked(values)

    def to_device(self, packed: torch.Tensor, rows: Rows, device: torch.device) -> torch.Tensor:
        """As `Field.to_device`."""
        if self._mix is None or rows.mix is None:
            return super().to_device(packed, rows, device)
        targets = packed.to(device, non_blocking=True)
        return mix_targets(targets, rows.num_rows, rows.mix, self._num_classes, self._mix.smoothing)

    def example(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Class numbers, or one-hot."""
        classes = torch.randint(self._num_classes, (num_rows,), device=device)
        return F.one_hot(classes, self._num_classes).float() if self.shape else classes


class TextField(Field):
    """Token ids of a caption, int64 [B, L]: one drawn by the key in training, the first in evaluation.

    Args:
        name: as for `Field`.
        tokenizer: of the captions.
        draws: whether one is drawn.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, *, draws: bool) -> None:
        super().__init__(name, (tokenizer.context_length,), torch.int64, entry="captions")
        self._tokenizer, self._draws = tokenizer, draws

    def read(self, sample: Sample) -> np.ndarray:
        """Token ids [L]."""
        captions = super().read(sample)
        if not captions:
            raise sample.damaged("its caption is empty or not UTF-8")
        return self._tokenizer.encode(captions[int(uniform(sample.key, "caption") * len(captions)) * self._draws])

    def blank(self) -> torch.Tensor:
        """The empty caption."""
        return torch.from_numpy(self._tokenizer.encode(""))

    def example(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Captions of full length."""
        ids = torch.randint(min(256, self._tokenizer.vocab_size), (num_rows, *self.shape), device=device)
        ids[:, -1] = self._tokenizer.end_id
        return ids
