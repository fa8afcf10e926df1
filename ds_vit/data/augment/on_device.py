"""--augment-on device: a loader's worker draws and crops; resize and all operations are done on the device in batches.

The worker draws the operations that a CPU would apply (steps.py), cuts the crop's box out of the decoded image and
does nothing else. Under --decode fast it passes a JPEG file on as it is, to be decoded on the device.

On the device, images are float32 [n, 3, H, W] of whole numbers from 0 to 255, so that Pillow's rounding after each
operation can be repeated: where it computes in whole numbers or in float32, the pixels are the same to the bit. `a` are
the arguments of an operation, float64 [n, 5]: its argument, whether Pillow's filter is bicubic, and the colour (red,
green, blue) outside of the image. torchvision's functions take one factor for all images of a call, and sample by other
bicubic weights than Pillow; hence our own where images differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad
from torchvision.transforms.v2 import functional as F

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import Operation, RandomResizedCrop, Size
from ds_vit.data.augment.transforms import FixedTransform, TrainTransform, train_transform
from ds_vit.data.decode import Box, Jpeg
from ds_vit.data.decode_on_device import File, decode_on
from ds_vit.data.settings import ImageConfig
from ds_vit.device import send
from ds_vit.fault_tolerance.errors import UserError

FILTERS = ("bilinear", "bicubic", "random")
"""The resize filters that torch has with Pillow's antialiasing."""

_GREY = (19595.0, 38470.0, 7471.0)  # over 2^16: Pillow's conversion to "L"
_KERNEL = 23  # of timm's GaussianBlur
_MOST_REACH = 5  # pixels of a box filter: of a deviation up to 5.4; timm's policies draw 2.0 at most


# ---- in the loader's workers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crop:
    """How an augmented image is made of its bytes.

    Attributes:
        num_bytes: of the crop's pixels [height, width, 3], or of the JPEG file; 0 if the file is that of the crop
            before.
        box: (top, left, height, width) in the image.
        interpolation: "bilinear" or "bicubic", of the resize.
        operations: what follows.
        file: name and (height, width) of the JPEG file, if the bytes are one.
    """

    num_bytes: int
    box: Box
    interpolation: str
    operations: Sequence[Operation]
    file: tuple[str, Size] | None = None


class Cut(NamedTuple):
    """One sample: its bytes, uint8 [num_bytes], and what to do with them."""

    data: np.ndarray
    crop: Crop


class Crops(NamedTuple):
    """The samples of a micro-batch before augmentation: the bytes of one after the other, uint8, and what to do.

    `num_views` is how many crops a sample has, one sample after the other; 0 if it is one image.
    """

    data: torch.Tensor
    crops: Sequence[Crop]
    size: Size
    num_views: int = 0


class CuttingTransform:
    """Draws what a training transform draws (`drawn`), and applies only the crop's box.

    Args:
        transform: of the run.
        augment: its flags, for messages.

    Raises:
        UserError: a flag that only the CPU supports.
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
                raise UserError(f"--augment-on device does not support {flag}; {way_out}, or augment on the cpu")
        assert isinstance(transform, TrainTransform)
        assert isinstance(transform.crop, RandomResizedCrop), transform.crop
        self.drawn = transform
        self._passes_files = augment.decode == "fast"

    def bytes_of(self, image: Image.Image | Jpeg, box: Box) -> tuple[np.ndarray, tuple[str, Size] | None]:
        """The crop's pixels, or the whole JPEG file with its name and size."""
        if isinstance(image, Jpeg):
            file = image.for_another_decoder() if self._passes_files and box[2] and box[3] else None
            if file is not None:
                return np.frombuffer(file[0], dtype=np.uint8), (file[1], (image.height, image.width))
            return np.asarray(image.crop(box)).reshape(-1), None
        top, left, height, width = box
        return np.asarray(image.crop((left, top, left + width, top + height))).reshape(-1), None

    def __call__(self, image: Image.Image | Jpeg, key: int) -> Cut:
        """A pure function of the image and the sample's key."""
        (box, interpolation), operations = self.drawn.draw(key, (image.height, image.width))
        data, file = self.bytes_of(image, box)
        return Cut(data, Crop(data.size, box, interpolation.value, operations, file))


def worker_transform(image: ImageConfig, augment: AugmentConfig) -> TrainTransform | FixedTransform | CuttingTransform:
    """What a loader's process does to training images: all of augmentation, or the crop for the device's.

    Raises:
        UserError: incompatible flags.
    """
    transform = train_transform(image, augment)
    return CuttingTransform(transform, augment) if augment.augment_on == "device" else transform


def packed(cuts: Sequence[Cut], size: Size, memory: torch.Tensor, num_views: int = 0) -> Crops:
    """The samples of a micro-batch, their bytes in `memory` (uint8, as large as all of them)."""
    if cuts:
        np.concatenate([cut.data for cut in cuts], out=memory.numpy())
    return Crops(memory, tuple(cut.crop for cut in cuts), size, num_views)


# ---- on the device ---------------------------------------------------------------------------------------------------


def augmented(crops: Crops, device: torch.device) -> torch.Tensor:
    """Crops resized and augmented as their samples drew, float32 [R, 3, H, W] of whole numbers from 0 to 255.

    Where a sample has v views they are [R, v, 3, H, W].
    """
    images = _augmented(crops, device)
    return images.unflatten(0, (-1, crops.num_views)) if crops.num_views else images


def _augmented(crops: Crops, device: torch.device) -> torch.Tensor:
    images = _resized(crops, device)
    # Rows are grouped by their operation on the CPU: the host never waits for the device.
    groups: list[tuple[str, list[int]]] = []
    arguments: list[tuple[float, ...]] = []
    for number in range(max((len(crop.operations) for crop in crops.crops), default=0)):
        rows_of: dict[str, list[int]] = {}
        for row, crop in enumerate(crops.crops):
            if number < len(crop.operations):
                rows_of.setdefault(crop.operations[number].name, []).append(row)
        groups += rows_of.items()
        arguments += [_arguments(crops.crops[row].operations[number]) for rows in rows_of.values() for row in rows]
    if not groups:
        return images
    counts = [len(rows) for _, rows in groups]
    all_rows = send(torch.tensor([row for _, rows in groups for row in rows]), device).split(counts)
    all_arguments = send(torch.tensor(arguments, dtype=torch.float64), device).split(counts)
    for (name, _), rows, a in zip(groups, all_rows, all_arguments, strict=True):
        images[rows] = OPERATIONS[name](images[rows], a)
    return images


def _arguments(operation: Operation) -> tuple[float, ...]:
    own, *_ = operation.arguments or (0.0,)
    bicubic = operation.keywords.get("resample") == Image.Resampling.BICUBIC
    return float(own), float(bicubic), *operation.keywords.get("fillcolor", (0, 0, 0))


def _resized(crops: Crops, device: torch.device) -> torch.Tensor:
    """Pillow's two passes: along the rows, rounded, then along the columns."""
    images = torch.empty((len(crops.crops), 3, *crops.size), device=device)
    for image, pixels, crop in zip(images, _parts(crops, device), crops.crops, strict=True):
        if not pixels.numel():  # of an image of a pixel or two; Pillow makes it black
            image.zero_()
            continue
        part = pixels.float()[None]
        if part.shape[3] != crops.size[1]:
            part = _whole(interpolate(part, (part.shape[2], crops.size[1]), mode=crop.interpolation, antialias=True))
        if part.shape[2] != crops.size[0]:
            part = interpolate(part, tuple(crops.size), mode=crop.interpolation, antialias=True)
        image.copy_(part[0])
    return _whole(images)


def _parts(crops: Crops, device: torch.device) -> Iterator[torch.Tensor]:
    """The crops' pixels, uint8 [3, h, w] each, decoded where they are not yet."""
    counts = [crop.num_bytes for crop in crops.crops]
    on_cpu = crops.data.split(counts)
    of_files = [(data, crop.file) for data, crop in zip(on_cpu, crops.crops, strict=True) if crop.file]
    decoded = decode_on(device, [File(data, *file) for data, file in of_files if data.numel()])
    on_device = on_cpu if len(of_files) == len(counts) else crops.data.to(device, non_blocking=True).split(counts)
    whole = torch.empty(0)
    for data, crop in zip(on_device, crops.crops, strict=True):
        top, left, height, width = crop.box
        if crop.file:
            whole = next(decoded) if crop.num_bytes else whole
            yield whole[:, top : top + height, left : left + width]
        else:
            yield data.view(height, width, 3).permute(2, 0, 1)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Rounded as Pillow rounds, in place."""
    return values.add_(0.5).floor_().clamp_(0.0, 255.0)


def _column(values: torch.Tensor) -> torch.Tensor:
    return values.float()[:, None, None, None]


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Pillow's grey, [n, 1, H, W]: whole numbers below 2^24, exact in any order."""
    red, green, blue = images.split(1, dim=1)
    grey = (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
    return grey.add_(32768.0).mul_(1.0 / 65536.0).floor_()


def _blend(images: torch.Tensor, other: torch.Tensor | float, factor: torch.Tensor) -> torch.Tensor:
    """Image.blend(other, image, factor), which cuts fractions off."""
    return (images - other).mul_(_column(factor)).add_(other).clamp_(0.0, 255.0).floor_()


def _contrast(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    mean = _grey(images).mean(dim=(1, 2, 3), dtype=torch.float64)
    return _blend(images, _column((mean + 0.5).floor()), a[:, 0])


def _hue(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """As torchvision's adjust_hue, which computes in fractions where Pillow's hue is one of 256."""
    red, green, blue = images.unbind(1)
    value = images.amax(dim=1)
    chroma = value - images.amin(dim=1)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    below_red = torch.where(value == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor)
    sextant = torch.where(value == red, (green - blue) / divisor, below_red)  # the hue times 6
    turned = sextant + 6.0 * a[:, 0].float()[:, None, None]
    places = [(turned + start).remainder(6.0) for start in (5.0, 3.0, 1.0)]
    parts = [chroma * torch.minimum(place, 4.0 - place).clamp(0.0, 1.0) for place in places]
    return (value[:, None] - torch.stack(parts, dim=1)).mul_(255.999 / 255.0).floor_()


def _sharpness(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    smooth = images.clone()
    if min(images.shape[2:]) > 2:
        rows = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
        total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
        smooth[:, :, 1:-1, 1:-1] = total.add_(images[:, :, 1:-1, 1:-1], alpha=4.0).div_(13.0).add_(0.5).floor_()
    return _blend(images, smooth, a[:, 0])


def _posterize(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    step = torch.exp2(8.0 - _column(a[:, 0]).clamp(max=8.0))
    return (images / step).floor_().mul_(step)


def _solarize(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.where(images < _column(a[:, 0]), images, 255.0 - images)


def _solarize_add(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.where(images < 128.0, (images + _column(a[:, 0])).clamp_(max=255.0), images)


def _affine(images: torch.Tensor, a: torch.Tensor, matrix: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Image.transform with AFFINE: the six numbers, [n] or one for all, map a place in the result to one in the image.

    grid_sample cannot do it: its bicubic weights are not Pillow's.
    """
    height, width = images.shape[2:]
    m = [part[:, None, None] if isinstance(part, torch.Tensor) else part for part in matrix]
    y = torch.arange(height, device=images.device, dtype=torch.float64)[:, None] + 0.5
    x = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
    from_x, from_y = m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    cubic = a[:, 1, None, None] > 0
    left, top = (from_x - 0.5).floor(), (from_y - 0.5).floor()
    columns, rows = _weights(from_x - 0.5 - left, cubic), _weights(from_y - 0.5 - top, cubic)
    flat = images.flatten(2)
    total = torch.zeros_like(images)
    for row in range(4):
        line = torch.zeros_like(images)
        at_row = (top + (row - 1)).clamp_(0, height - 1) * width
        for column in range(4):
            at = at_row + (left + (column - 1)).clamp_(0, width - 1)
            taps = flat.gather(2, at.long().flatten(1)[:, None].expand(-1, 3, -1)).view_as(images)
            line += taps * columns[column][:, None]
        total += line * rows[row][:, None]
    fill = a[:, 2:5].float()[:, :, None, None]
    return torch.where(inside[:, None], total.clamp_(0.0, 255.0).floor_(), fill)  # Pillow cuts the fraction off here


def _weights(d: torch.Tensor, cubic: torch.Tensor) -> list[torch.Tensor]:
    """Of the four pixels around a place `d` behind the second: Pillow's Geometry.c, whose cubic has a = -1."""
    zero = torch.zeros_like(d)
    of_cubic = (d * (-1 + d * (2 - d)), 1 + d * d * (d - 2), d * (1 + d * (1 - d)), d * d * (d - 1))
    of_linear = (zero, 1 - d, d, zero)
    return [torch.where(cubic, c, w).float() for c, w in zip(of_cubic, of_linear, strict=True)]


def _rotate(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    angle = -a[:, 0] * (math.pi / 180.0)
    cos, sin = angle.cos(), angle.sin()
    x, y = images.shape[3] / 2.0, images.shape[2] / 2.0
    return _affine(images, a, [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y])


def _along(images: torch.Tensor, kernels: torch.Tensor, dim: int, mode: str) -> torch.Tensor:
    """Each image filtered by its kernel [n, 2r + 1] along the rows (dim 3) or columns (dim 2).

    A convolution's TF32 would not be the same on every device.
    """
    reach, length = kernels.shape[1] // 2, images.shape[dim]
    padded = pad(images, (reach, reach, 0, 0) if dim == 3 else (0, 0, reach, reach), mode=mode)
    total = torch.zeros_like(images)
    for place in range(kernels.shape[1]):
        total += padded.narrow(dim, place, length) * _column(kernels[:, place])
    return total


def _kernel_blur(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """torchvision's gaussian_blur."""
    x = torch.arange(_KERNEL, device=images.device, dtype=torch.float64) - _KERNEL // 2
    kernels = torch.exp(-0.5 * (x / a[:, :1]) ** 2)
    kernels /= kernels.sum(dim=1, keepdim=True)
    return _along(_along(images, kernels, 3, "reflect"), kernels, 2, "reflect").round_().clamp_(0.0, 255.0)


def _box_blur(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Pillow's GaussianBlur: three box filters of a fractional width along the rows, then three along the columns."""
    variance = (a[:, :1] ** 2) / 3.0
    reach = ((torch.sqrt(12.0 * variance + 1.0) - 1.0) / 2.0).floor()
    part = (2 * reach + 1) * (reach * (reach + 1) - 3 * variance) / (6 * (variance - (reach + 1) ** 2))
    inner = 1.0 / (2.0 * (reach + part) + 1.0)
    outer = (1.0 - (2.0 * reach + 1.0) * inner) / 2.0
    far = torch.arange(-_MOST_REACH, _MOST_REACH + 1, device=images.device, dtype=torch.float64).abs()
    kernels = torch.where(far <= reach, inner, torch.where(far == reach + 1, outer, torch.zeros_like(inner)))
    for dim in (3, 2):
        for _ in range(3):
            images = _whole(_along(images, kernels, dim, "replicate"))
    return images


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "hflip": lambda images, a: images.flip(3),
    "vflip": lambda images, a: images.flip(2),
    "AutoContrast": lambda images, a: F.autocontrast(images.to(torch.uint8)).float(),
    "Equalize": lambda images, a: F.equalize(images.to(torch.uint8)).float(),
    "Invert": lambda images, a: 255.0 - images,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Brightness": lambda images, a: _blend(images, 0.0, a[:, 0]),
    "Contrast": _contrast,
    "Color": lambda images, a: _blend(images, _grey(images), a[:, 0]),
    "Hue": _hue,
    "Sharpness": _sharpness,
    "Rotate": _rotate,
    "ShearX": lambda images, a: _affine(images, a, [1, a[:, 0], 0, 0, 1, 0]),
    "ShearY": lambda images, a: _affine(images, a, [1, 0, 0, a[:, 0], 1, 0]),
    "TranslateX": lambda images, a: _affine(images, a, [1, 0, a[:, 0], 0, 1, 0]),
    "TranslateY": lambda images, a: _affine(images, a, [1, 0, 0, 0, 1, a[:, 0]]),
    "TranslateXRel": lambda images, a: _affine(images, a, [1, 0, a[:, 0] * images.shape[3], 0, 1, 0]),
    "TranslateYRel": lambda images, a: _affine(images, a, [1, 0, 0, 0, 1, a[:, 0] * images.shape[2]]),
    "GaussianBlur": _box_blur,
    "KernelBlur": _kernel_blur,
}
"""By the names of `Operation`, except AugMix."""
