"""The operations of augmentation on batches of images, on any device: what Pillow and timm do, up to rounding.

Images are float32 [n, 3, H, W] of whole numbers from 0 to 255, so that Pillow's rounding after each operation can be
repeated: where it computes in whole numbers or in float32, the pixels are the same to the bit. `a` are the arguments
of an operation, float64 [n, 5] on the images' device (handover.NUM_ARGUMENTS). torchvision's functions take one factor
for all images of a call, and sample by other bicubic weights than Pillow; hence our own where images differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import interpolate, pad
from torchvision.transforms.v2 import functional as F

from ds_vit.data.augment.handover import NAMES, Crops
from ds_vit.data.decode_on_device import File, decode_on

_GREY = (19595.0, 38470.0, 7471.0)  # over 2^16: Pillow's conversion to "L"
_BILINEAR, _BICUBIC = 2, 3  # Pillow's numbers; nearest is 0
_KERNEL = 23  # of timm's GaussianBlur
_MOST_REACH = 5  # pixels of a box filter: of a deviation up to 5.4; timm's policies draw 2.0 at most


def augmented(crops: Crops, device: torch.device) -> torch.Tensor:
    """Crops resized and augmented as their samples drew, float32 [R, 3, H, W] of whole numbers from 0 to 255."""
    images = _resized(crops, device)
    # Which rows an operation takes is decided on the CPU: the host never waits for the device.
    rounds = [
        (name, torch.nonzero(crops.codes[:, number] == name).flatten(), number)
        for number in range(crops.codes.shape[1])
        for name in crops.codes[:, number].unique().tolist()
        if name >= 0
    ]
    if not rounds:
        return images
    rows = torch.cat([rows for _, rows, _ in rounds]).to(device, non_blocking=True)
    arguments = torch.cat([crops.arguments[rows, number] for _, rows, number in rounds]).to(device, non_blocking=True)
    place = 0
    for name, of_round, _ in rounds:
        here = slice(place, place + len(of_round))
        images[rows[here]] = OPERATIONS[NAMES[name]](images[rows[here]], arguments[here])
        place = here.stop
    return images


def _resized(crops: Crops, device: torch.device) -> torch.Tensor:
    """Pillow's two passes: along the rows, rounded, then along the columns."""
    images = torch.empty((len(crops.shapes), 3, *crops.size), device=device)
    rows = zip(images, _parts(crops, device), crops.shapes.tolist(), strict=True)
    for image, pixels, (height, width, resample) in rows:
        if not height or not width:  # of an image of a pixel or two; Pillow makes it black
            image.zero_()
            continue
        part = pixels.float()[None]
        mode = {_BILINEAR: "bilinear", _BICUBIC: "bicubic"}[resample]
        if width != crops.size[1]:
            part = _whole(interpolate(part, (height, crops.size[1]), mode=mode, antialias=True))
        if height != crops.size[0]:
            part = interpolate(part, crops.size, mode=mode, antialias=True)
        image.copy_(part[0])
    return _whole(images)


def _parts(crops: Crops, device: torch.device) -> Iterator[torch.Tensor]:
    """The crops' pixels, uint8 [3, h, w] each, decoded where they are not yet."""
    encoded = crops.encoded.tolist()
    of_files = [row for row in encoded if row[0]]
    datas = crops.files.split([row[0] for row in of_files])
    files = [File(data, name, (row[1], row[2])) for data, name, row in zip(datas, crops.names, of_files, strict=True)]
    decoded = decode_on(device, files)
    pixels, place = crops.pixels.to(device, non_blocking=True), 0
    for (height, width, _), (of_file, _, _, top, left) in zip(crops.shapes.tolist(), encoded, strict=True):
        if of_file:
            yield next(decoded)[:, top : top + height, left : left + width]
            continue
        end = place + 3 * height * width
        yield pixels[place:end].view(height, width, 3).permute(2, 0, 1)
        place = end


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Rounded as Pillow rounds, in place."""
    return values.add_(0.5).floor_().clamp_(0.0, 255.0)


def _column(values: torch.Tensor) -> torch.Tensor:
    return values.float()[:, None, None, None]


# ---- colours ---------------------------------------------------------------------------------------------------------


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Pillow's grey, [n, 1, H, W]: whole numbers below 2^24, exact in any order."""
    red, green, blue = images.split(1, dim=1)
    grey = (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
    return grey.add_(32768.0).mul_(1.0 / 65536.0).floor_()


def _blend(images: torch.Tensor, other: torch.Tensor | float, factor: torch.Tensor) -> torch.Tensor:
    """Image.blend(other, image, factor), which cuts fractions off."""
    return (images - other).mul_(_column(factor)).add_(other).clamp_(0.0, 255.0).floor_()


def _brightness(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return _blend(images, 0.0, a[:, 0])


def _contrast(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    mean = _grey(images).mean(dim=(1, 2, 3), dtype=torch.float64)
    return _blend(images, _column((mean + 0.5).floor()), a[:, 0])


def _color(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return _blend(images, _grey(images), a[:, 0])


def _desaturate(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return _blend(images, _grey(images), (1.0 - a[:, 0]).clamp(0.0, 1.0))


def _hue(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """torchvision's, which computes in fractions where Pillow's hue is one of 256."""
    factors = a[:, 0].tolist()
    pixels = images.to(torch.uint8)
    return torch.stack([F.adjust_hue(image, factor) for image, factor in zip(pixels, factors, strict=True)]).float()


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


# ---- places ----------------------------------------------------------------------------------------------------------


def _affine(images: torch.Tensor, a: torch.Tensor, matrix: list[torch.Tensor]) -> torch.Tensor:
    """Image.transform with AFFINE: [n] each of a, b, c, d, e, f, from a place in the result to one in the image."""
    height, width = images.shape[2:]
    m = [part[:, None, None] for part in matrix]
    y = torch.arange(height, device=images.device, dtype=torch.float64)[:, None] + 0.5
    x = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
    from_x, from_y = m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    cubic = (a[:, 1] == _BICUBIC)[:, None, None]
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
    of_cubic = (
        d * (-1 + d * (2 - d)),
        1 + d * d * (d - 2),
        d * (1 + d * (1 - d)),
        d * d * (d - 1),
    )
    of_linear = (zero, 1 - d, d, zero)
    return [torch.where(cubic, c, w).float() for c, w in zip(of_cubic, of_linear, strict=True)]


def _moved(place: int, scale: Callable[[torch.Tensor], float] | None = None) -> Callable:
    """The operation whose argument is one entry of the matrix."""

    def operation(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        one, zero = torch.ones_like(a[:, 0]), torch.zeros_like(a[:, 0])
        matrix = [one, zero, zero, zero, one, zero]
        matrix[place] = a[:, 0] * (scale(images) if scale else 1.0)
        return _affine(images, a, matrix)

    return operation


def _rotate(images: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    angle = -a[:, 0] * (math.pi / 180.0)
    cos, sin = angle.cos(), angle.sin()
    x, y = images.shape[3] / 2.0, images.shape[2] / 2.0
    return _affine(images, a, [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y])


# ---- blur ------------------------------------------------------------------------------------------------------------


def _along(images: torch.Tensor, kernels: torch.Tensor, dim: int, mode: str) -> torch.Tensor:
    """Each image filtered by its kernel [n, 2r + 1] along the rows (dim 3) or columns (dim 2); a convolution's TF32
    would not be the same everywhere."""
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
    "Grey": lambda images, a: _grey(images).expand_as(images),
    "AutoContrast": lambda images, a: F.autocontrast(images.to(torch.uint8)).float(),
    "Equalize": lambda images, a: F.equalize(images.to(torch.uint8)).float(),
    "Invert": lambda images, a: 255.0 - images,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Brightness": _brightness,
    "Contrast": _contrast,
    "Color": _color,
    "Desaturate": _desaturate,
    "Hue": _hue,
    "Sharpness": _sharpness,
    "Rotate": _rotate,
    "ShearX": _moved(1),
    "ShearY": _moved(3),
    "TranslateX": _moved(2),
    "TranslateY": _moved(5),
    "TranslateXRel": _moved(2, lambda images: images.shape[3]),
    "TranslateYRel": _moved(5, lambda images: images.shape[2]),
    "BoxBlur": _box_blur,
    "KernelBlur": _kernel_blur,
}
"""By `handover.NAMES`."""
