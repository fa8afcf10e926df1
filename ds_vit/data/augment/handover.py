"""What a loader's worker hands over for augmentation on the device: pixels of the crops, and all that was drawn.

The worker draws by the very steps that a CPU would apply (transforms.py), cuts the crop's box out of the decoded image
and does nothing else. What follows is a list of operations by name; batched.py applies them. Under --decode fast a JPEG
file goes over as it is, to be decoded there too.

Shapes: R rows of a micro-batch, K operations at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.functional import pil_modes_mapping

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.policies import Operation, Policy
from ds_vit.data.augment.steps import ColorJitter, GaussianBlur, Maybe, MaybeStep, RandomResizedCrop, Size, Step
from ds_vit.data.augment.transforms import FixedTransform, TrainTransform, train_transform
from ds_vit.data.decode import Box, Jpeg
from ds_vit.data.settings import ImageConfig
from ds_vit.fault_tolerance.errors import UserError

FILTERS = ("bilinear", "bicubic", "random")
"""The resize filters that torch has with Pillow's antialiasing."""

_ALIKE = {
    "hflip": "hflip", "vflip": "vflip", "grayscale": "Grey", "AutoContrast": "AutoContrast", "Equalize": "Equalize",
    "Invert": "Invert", "Rotate": "Rotate", "Posterize": "Posterize", "PosterizeIncreasing": "Posterize",
    "PosterizeOriginal": "Posterize", "Solarize": "Solarize", "SolarizeIncreasing": "Solarize",
    "SolarizeAdd": "SolarizeAdd", "Color": "Color", "ColorIncreasing": "Color", "Contrast": "Contrast",
    "ContrastIncreasing": "Contrast", "Brightness": "Brightness", "BrightnessIncreasing": "Brightness",
    "Sharpness": "Sharpness", "SharpnessIncreasing": "Sharpness", "ShearX": "ShearX", "ShearY": "ShearY",
    "TranslateX": "TranslateX", "TranslateY": "TranslateY", "TranslateXRel": "TranslateXRel",
    "TranslateYRel": "TranslateYRel", "Desaturate": "Desaturate", "GaussianBlur": "BoxBlur", "Hue": "Hue",
    "GaussianBlurRand": "BoxBlur", "kernel blur": "KernelBlur",
}  # fmt: skip
NAMES = tuple(dict.fromkeys(_ALIKE.values()))
"""What the device can do; timm's names that differ only in how their argument is drawn are one."""

NUM_ARGUMENTS = 5  # its own, Pillow's number of a resampling filter, and the colour (red, green, blue) outside
_JITTER = ("Brightness", "Contrast", "Color", "Hue")


class Encoded(NamedTuple):
    """A JPEG file, (height, width) of its image, and the crop's box in it."""

    data: bytes
    name: str
    image_size: Size
    box: Box

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the crop."""
        return *self.box[2:], 3


class Cut(NamedTuple):
    """One sample: the crop's pixels uint8 [h, w, 3], Pillow's number of the resize filter, and what to do then."""

    pixels: np.ndarray | Encoded
    resample: int
    operations: list[Operation]

    @property
    def num_bytes(self) -> int:
        """What `packed` needs for it."""
        return len(self.pixels.data) if isinstance(self.pixels, Encoded) else self.pixels.size


class Crops(NamedTuple):
    """The samples of a micro-batch before augmentation.

    Attributes:
        pixels: uint8, of one crop after the other: [h, w, 3] each.
        shapes: int64 [R, 3]: h, w and Pillow's number of the filter.
        files: uint8, one JPEG file after the other, of rows that have no pixels yet.
        encoded: int64 [R, 5]: bytes of a row's file (0 where its crop is among `pixels`), height and width of its
            image, top and left of the crop.
        names: of the files.
        codes: int64 [R, K]: places in `NAMES`, -1 behind a row's last.
        arguments: float64 [R, K, NUM_ARGUMENTS].
        size: (height, width) of the augmented images.
    """

    pixels: torch.Tensor
    shapes: torch.Tensor
    files: torch.Tensor
    encoded: torch.Tensor
    names: tuple[str, ...]
    codes: torch.Tensor
    arguments: torch.Tensor
    size: Size


class CuttingTransform:
    """Draws what a training transform draws (`drawn`), and applies none of it but the crop's box.

    Args:
        transform: of the run.
        augment: its flags, for messages.

    Raises:
        UserError: a flag that only the CPU can follow.
    """

    def __init__(self, transform: TrainTransform | FixedTransform, augment: AugmentConfig) -> None:
        for wrong, flag, way_out in (
            (augment.no_aug, "--no-aug", "drop one of the two"),
            (augment.train_crop_mode in ("rkrc", "rkrr"), f"--train-crop-mode {augment.train_crop_mode}", "use rrc"),
            (augment.train_interpolation not in FILTERS, f"--train-interpolation {augment.train_interpolation}",
             f"use {', '.join(FILTERS)}"),
            (augment.aa.startswith("augmix"), f"--aa {augment.aa}", "use a policy of rand, 3a, original or v0"),
        ):  # fmt: skip
            if wrong:
                raise UserError(f"--augment-on device cannot do {flag}; {way_out}, or augment on the cpu")
        assert isinstance(transform, TrainTransform)
        assert isinstance(transform.steps[0], RandomResizedCrop), transform.steps
        self.drawn = transform
        self._hands_over_files = augment.decode == "fast"

    def part(self, image: Image.Image | Jpeg, box: Box) -> np.ndarray | Encoded:
        """A part of an image as it is handed over."""
        if not isinstance(image, Jpeg):
            return _cut_out(image, box)
        if self._hands_over_files and box[2] and box[3]:
            file = image.for_another_decoder()
            if file is not None:
                return Encoded(*file, (image.height, image.width), box)
        return image.pixels(box)

    def __call__(self, image: Image.Image | Jpeg, key: int) -> Cut:
        """A pure function of the image and the sample's key."""
        (box, interpolation), *drawn = self.drawn.draw(key, (image.height, image.width))
        operations: list[Operation] = []
        for step, parameters in zip(self.drawn.steps[1:], drawn, strict=True):
            if parameters is not None:
                operations += _operations(step, parameters)
        return Cut(self.part(image, box), int(pil_modes_mapping[interpolation]), operations)


def worker_transform(image: ImageConfig, augment: AugmentConfig) -> TrainTransform | FixedTransform | CuttingTransform:
    """What a loader's process does to training images: all of augmentation, or the crop for the device's.

    Raises:
        UserError: flags that cannot work together.
    """
    transform = train_transform(image, augment)
    return CuttingTransform(transform, augment) if augment.augment_on == "device" else transform


def _operations(step: Step, parameters: Any) -> list[Operation]:
    """What `step.apply(image, parameters)` does, by name."""
    if isinstance(step, Policy):
        return parameters
    if isinstance(step, MaybeStep):
        return _operations(step.step, parameters)
    if isinstance(step, Maybe):
        return [Operation(step.name, (), {})]
    if isinstance(step, ColorJitter):
        return [Operation(_JITTER[kind], (factor,), {}) for kind, factor in parameters]
    if isinstance(step, GaussianBlur):
        return [Operation("kernel blur", (parameters,), {})]
    raise NotImplementedError(f"{step!r} has no counterpart on the device")


def _cut_out(image: Image.Image, box: Box) -> np.ndarray:
    top, left, height, width = box
    return np.asarray(image.crop((left, top, left + width, top + height)))


def packed(cuts: Sequence[Cut], size: Size, memory: torch.Tensor) -> Crops:
    """The samples of a micro-batch as tensors.

    Args:
        cuts: [R].
        size: (height, width) to resize them to.
        memory: for the bytes of all of them, uint8, without gaps: the pixels, and the files behind them.
    """
    files = [cut.pixels for cut in cuts if isinstance(cut.pixels, Encoded)]
    pixels = [cut.pixels.reshape(-1) for cut in cuts if not isinstance(cut.pixels, Encoded)]
    parts = [*pixels, *(np.frombuffer(file.data, dtype=np.uint8) for file in files)]
    if parts:
        np.concatenate(parts, out=memory.numpy())
    longest = max((len(cut.operations) for cut in cuts), default=0)
    codes = np.full((len(cuts), longest), -1, dtype=np.int64)
    arguments = np.zeros((len(cuts), longest, NUM_ARGUMENTS))
    encoded = np.zeros((len(cuts), 5), dtype=np.int64)
    for row, cut in enumerate(cuts):
        if isinstance(cut.pixels, Encoded):
            encoded[row] = (cut.num_bytes, *cut.pixels.image_size, *cut.pixels.box[:2])
        for number, operation in enumerate(cut.operations):
            codes[row, number] = NAMES.index(_ALIKE[operation.name])
            keywords = operation.keywords
            own = operation.arguments[:1] or (0.0,)
            arguments[row, number] = (*own, keywords.get("resample", 0), *keywords.get("fillcolor", (0, 0, 0)))
    shapes = np.array([(*cut.pixels.shape[:2], cut.resample) for cut in cuts], dtype=np.int64).reshape(-1, 3)
    of_pixels = sum(part.size for part in pixels)
    return Crops(
        pixels=memory[:of_pixels],
        shapes=torch.from_numpy(shapes),
        files=memory[of_pixels:],
        encoded=torch.from_numpy(encoded),
        names=tuple(file.name for file in files),
        codes=torch.from_numpy(codes),
        arguments=torch.from_numpy(arguments),
        size=size,
    )
