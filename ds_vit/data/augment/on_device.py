"""--augment-on device: a loader's worker draws and crops; resize and all operations are done on the device in batches.

The worker draws the operations that a CPU would apply (steps.py), cuts the crop's box out of the decoded image and
does nothing else. Under --decode fast it passes a JPEG file on as it is, to be decoded on the device.

On the device, images are float32 [n, 3, H, W] of whole numbers from 0 to 255, so that Pillow's rounding after each
operation can be repeated: where it computes in whole numbers or in float32, the pixels are the same to the bit. Pass p
applies the p-th operation of each image. It sorts the images by operation, so that each kind is one slice of them, and
a family of kinds shares its work: tables of 256 values, blends of two images, places in the image, and filters. Hence
the number of launches does not depend on the number of images. torchvision's and kornia's functions take one factor for
all images of a call, or sample by other bicubic weights than Pillow.

Filters (the resize of crops of any size, and blurs) are products with a matrix for each image and axis. Its values are
whole multiples of 2^-22, as Pillow's are, so that float64 holds every sum exactly: the result does not depend on the
order, and so not on the other images of the batch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from torch.nn.functional import conv2d

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import Operation, RandomResizedCrop, Size
from ds_vit.data.augment.transforms import FixedTransform, TrainTransform
from ds_vit.data.decode import Box, File, Jpeg, decode_on
from ds_vit.device import send_all

_KERNEL = 23  # of timm's GaussianBlur
_MOST_REACH = 5  # pixels of a box filter: of a deviation up to 5.4; timm's policies draw 2.0 at most
_UNIT = 2.0**-22  # of a filter's weights, as in Pillow's Resample.c
_AT_ONCE = 2**27  # float64 of pixels and filters that are resized together


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
        augment: its flags.
    """

    cuts = True

    def __init__(self, transform: TrainTransform | FixedTransform, augment: AugmentConfig) -> None:
        assert isinstance(transform, TrainTransform), transform
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


def packed(cuts: Sequence[Cut], size: Size, memory: torch.Tensor, num_views: int = 0) -> Crops:
    """The samples of a micro-batch, their bytes in `memory` (uint8, as large as all of them)."""
    if cuts:
        np.concatenate([cut.data for cut in cuts], out=memory.numpy())
    return Crops(memory, tuple(cut.crop for cut in cuts), size, num_views)


# ---- on the device: resize -------------------------------------------------------------------------------------------


def augmented(crops: Crops, device: torch.device, tally: Counter[str] | None = None) -> torch.Tensor:
    """Crops resized and augmented as their samples drew, float32 [R, 3, H, W] of whole numbers from 0 to 255.

    Where a sample has v views they are [R, v, 3, H, W]. `tally` is that of `decode_on`.
    """
    operations = [[one for one in crop.operations if one.name not in _FLIPS] for crop in crops.crops]
    images = _applied(*_resized(crops, device, tally), operations)
    return images.unflatten(0, (-1, crops.num_views)) if crops.num_views else images


_Place = tuple[int, int, int, int]
"""Row of a crop, and where the image that it is taken of is in memory: its first byte, height and width."""


def _resized(crops: Crops, device: torch.device, tally: Counter[str] | None) -> tuple[torch.Tensor, list[int]]:
    """The images, and the row of each: their order is that in which they were resized."""
    parts, order = [], []
    for memory, is_planar, places in _pixels(crops, device, tally):
        for lot in _lots(places, crops):
            parts.append(_resize(memory, is_planar, lot, crops))
            order += [row for row, *_ in lot]
    empty = [row for row, crop in enumerate(crops.crops) if not min(crop.box[2:])]  # of an image of a pixel or two;
    if empty or not parts:  # Pillow makes it black
        parts.append(torch.zeros((len(empty), 3, *crops.size), device=device))
    return torch.cat(parts) if len(parts) > 1 else parts[0], order + empty


def _pixels(
    crops: Crops, device: torch.device, tally: Counter[str] | None
) -> Iterator[tuple[torch.Tensor, bool, list[_Place]]]:
    """Memory on the device, uint8 [N], whether its images are [3, H, W] or [H, W, 3], and which crops they are of."""
    begins = np.cumsum([0, *(crop.num_bytes for crop in crops.crops)]).tolist()
    # Behind the pixels, so that as many as the widest row has can be read at each place.
    beyond = torch.empty(3 * max((crop.box[3] for crop in crops.crops), default=0), dtype=torch.uint8, device=device)
    if cut := [(row, begins[row], *crop.box[2:]) for row, crop in enumerate(crops.crops) if not crop.file]:
        yield torch.cat([crops.data.to(device, non_blocking=True), beyond]), False, cut
    data = crops.data.split([crop.num_bytes for crop in crops.crops])
    files = [File(part, *crop.file) for part, crop in zip(data, crops.crops, strict=True) if crop.file and len(part)]
    owners = np.cumsum([bool(crop.file and crop.num_bytes) for crop in crops.crops]) - 1
    done = 0
    for images in decode_on(device, files, tally):
        is_planar = all(image.is_contiguous() for image in images)
        flat = [(image if is_planar else image.permute(1, 2, 0)).reshape(-1) for image in images]
        begins = np.cumsum([0, *map(len, flat)]).tolist()
        own = [(row, n - done) for row, n in enumerate(owners) if crops.crops[row].file and 0 <= n - done < len(images)]
        places = [(row, begins[number], *images[number].shape[1:]) for row, number in own]
        yield torch.cat([*flat, beyond]), is_planar, places
        done += len(images)


def _cost(box: Size, size: Size) -> int:
    """Numbers that the resize of a crop takes."""
    return 3 * box[0] * (box[1] + size[1]) + 2 * max(size) * max(box)


def bytes_of_photo(size: Size) -> int:
    """Of the device's memory, for an image of ImageNet's size while it is decoded, resized and augmented among others.

    Args:
        size: of the result, (height, width).
    """
    photo = (375, 500)
    return 2 * 3 * math.prod(photo) + max(8 * _cost(photo, size), 180 * math.prod(size))


def _lots(places: Sequence[_Place], crops: Crops) -> Iterator[list[_Place]]:
    """Crops that are resized together, padded to the largest height and width: of like size, within `_AT_ONCE`."""
    lot: list[_Place] = []
    most: Sequence[int] = (0, 0)
    boxes = [(crops.crops[place[0]].box[2:], place) for place in places]
    for box, place in sorted((pair for pair in boxes if min(pair[0])), key=lambda pair: max(pair[0])):
        most = max(most[0], box[0]), max(most[1], box[1])
        if lot and (len(lot) + 1) * _cost(most, crops.size) > _AT_ONCE:
            yield lot
            lot, most = [], box
        lot.append(place)
    if lot:
        yield lot


def _resize(memory: torch.Tensor, is_planar: bool, places: Sequence[_Place], crops: Crops) -> torch.Tensor:
    """Pillow's two passes: along the rows, rounded, then along the columns."""
    n, own, (high, wide) = len(places), [crops.crops[row] for row, *_ in places], crops.size
    sizes = np.array([[crop.box[3], crop.box[2]] for crop in own])
    width, height = sizes.max(axis=0).tolist()
    flips = np.array([[any(one.name == flip for one in crop.operations) for flip in _FLIPS] for crop in own])
    cubic = np.tile([crop.interpolation == "bicubic" for crop in own], 2)
    _, begins, heights, widths = np.array(places).T
    tops, lefts = np.array([crop.box[:2] if crop.file else (0, 0) for crop in own]).T
    across, between = (1, heights * widths) if is_planar else (3, np.ones(n, dtype=np.int64))
    starts = (begins + across * (tops * widths + lefts))[:, None] + between[:, None] * np.arange(3)
    lines = np.minimum(np.arange(height), sizes[:, 1:] - 1)[:, None]  # the last one again has no weight
    known = np.array(0.5), lines, starts[..., None], across * widths[:, None, None]
    half, lines, first, steps = send_all(memory.device, *known)
    filters = _filters(memory.device, np.stack([sizes.T.ravel(), np.repeat([wide, high], n), cubic, flips.T.ravel()]))
    lines_of = memory.unfold(0, across * width, 1)[:, ::across]  # what is behind the end of a row has no weight
    at = torch.addcmul(first, steps, lines)
    pixels = _turned(lines_of[at], torch.float64).flatten(1, 2)  # [n, height * 3, width]
    pixels = _whole(torch.baddbmm(half, pixels, filters[:n, :wide, :width].mT, alpha=_UNIT))
    pixels = _whole(torch.baddbmm(half, filters[n:, :high, :height], pixels.view(n, height, -1), alpha=_UNIT))
    return _turned(pixels.view(n, high, 3, wide), torch.float32)


# A filter at the distance t is a polynomial of 2 - t and 1 - t where these are positive; the factors of the first,
# second and third power, bilinear and bicubic (Keys's with a = -1/2).
_FILTERS = np.array([[[0, 1], [0, 0]], [[0, 0], [-0.5, 1]], [[0, 0], [0.5, -2]]])


def _filters(device: torch.device, resizes: np.ndarray) -> torch.Tensor:
    """The matrices of m resizes to at most S pixels, float64 [m, S, L + K] in units of 2^-22: Pillow's Resample.c.

    Args:
        device: where they are to be.
        resizes: lengths before, up to L, and after; whether the filter is bicubic, else bilinear; whether the result
            is in reverse order: int64 [4, m].
    """
    sizes, outputs, cubic, flipped = resizes[..., None]
    place = np.abs(flipped * (outputs - 1) - np.arange(outputs.max()))
    scale = sizes / outputs
    stretch = np.maximum(scale, 1.0)
    reach, centre = (1 + cubic) * stretch, (place + 0.5) * scale
    steps = np.arange(int(2 * reach.max()) + 1)  # K of the pixels that one is made of
    begin = np.clip((centre - reach + 0.5).astype(int), 0, np.maximum(sizes - len(steps), 0))
    places = begin + (sizes.max() + len(steps)) * np.arange(begin.size).reshape(begin.shape)
    far, further = (begin - centre + 0.5) / stretch, np.where(steps < sizes, steps / stretch, np.inf)
    known = far[..., None], further[:, None], _FILTERS[:, resizes[2], None, None], np.array([2.0, 1.0])
    start, taps, factors, ends, at, unit = send_all(device, *known, places, np.full((len(steps), 1), _UNIT))
    sides = (ends - (start + taps).abs_()[..., None]).clamp_(min=0.0)  # [m, S, K, 2]
    weights = torch.addcmul(factors[0], torch.addcmul(factors[1], factors[2], sides), sides).mul_(sides).sum(-1)
    weights = weights.div_(weights @ unit).round_()
    filters = weights.new_zeros((*at.shape, sizes.max() + len(unit)))
    filters.view(-1).unfold(0, len(unit), 1)[at] = weights
    return filters


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Pillow's rounding, in place, of values to which a half was added."""
    return values.floor_().clamp_(0.0, 255.0)


def _turned(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, a, b, W] as contiguous [n, b, a, W] of another type."""
    return images.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


# ---- on the device: operations ---------------------------------------------------------------------------------------


def _rotation(angle: float, x: float, y: float) -> Sequence[float]:
    """Around (x, y)."""
    cos, sin = math.cos(angle), math.sin(angle)
    return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y


# The host knows the tables of values, and the six numbers that map a place in an image of a width and height to the
# place that its pixel comes from.
_FLIPS = ("hflip", "vflip")  # follow the crop in every transform, and are done with it
_VALUES = np.arange(256, dtype=np.float32)
_TABLES: dict[str, Callable[[float], np.ndarray]] = {
    "Invert": lambda a: 255 - _VALUES,
    "Posterize": lambda a: _VALUES // 2 ** (8 - min(a, 8)) * 2 ** (8 - min(a, 8)),
    "Solarize": lambda a: np.where(a > _VALUES, _VALUES, 255 - _VALUES),
    "SolarizeAdd": lambda a: np.where(_VALUES < 128, np.minimum(_VALUES + a, 255), _VALUES),
}
_PLACES: dict[str, Callable[[float, float, float], Sequence[float]]] = {
    "Rotate": lambda a, width, height: _rotation(math.radians(-a), width / 2, height / 2),
    "ShearX": lambda a, width, height: (1, a, 0, 0, 1, 0),
    "ShearY": lambda a, width, height: (1, 0, 0, a, 1, 0),
    "TranslateX": lambda a, width, height: (1, 0, a, 0, 1, 0),
    "TranslateY": lambda a, width, height: (1, 0, 0, 0, 1, a),
    "TranslateXRel": lambda a, width, height: (1, 0, a * width, 0, 1, 0),
    "TranslateYRel": lambda a, width, height: (1, 0, 0, 0, 1, a * height),
}


def _applied(images: torch.Tensor, order: list[int], operations: Sequence[Sequence[Operation]]) -> torch.Tensor:
    """The images in the order of their rows, after their operations. Rows are sorted on the CPU; nothing is read back.

    Args:
        images: in another order.
        order: the row of each.
        operations: of each row.
    """
    kinds, orders, passes = list(_FAMILIES), [], []
    for number in range(max(map(len, operations), default=0)):
        drawn = {row: of[number] for row, of in enumerate(operations) if number < len(of)}
        rows = sorted(drawn, key=lambda row: kinds.index(drawn[row].name))
        passes.append([drawn[row] for row in rows])
        rows += [row for row in order if row not in drawn]
        orders.append(np.argsort(order)[rows])
        order = rows
    size = (images.shape[2], images.shape[3])
    runs = [[list(run) for _, run in itertools.groupby(of, lambda one: _FAMILIES[one.name])] for of in passes]
    steps = [[(len(run), _FAMILIES[run[0].name](run, size)) for run in of] for of in runs]
    known = [next(step) for of in steps for _, step in of]
    indices, *tensors = send_all(images.device, np.array([*orders, np.argsort(order)]), *itertools.chain(*known))
    sent, counts = iter(tensors), map(len, known)
    for index, of, sources in zip(indices, steps, _geometries(images, passes), strict=False):
        images, end = images[index], 0
        for length, step in of:
            begin, end = end, end + length
            with contextlib.suppress(StopIteration):
                step.send([images[begin:end], *(list(itertools.islice(sent, next(counts))) or sources)])
        images.clamp_(0.0, 255.0).floor_()  # Pillow cuts fractions off
    return images[indices[-1]]


# A family is a generator of the operations that images drew, of the family's kinds in the order of `_FAMILIES`, and of
# the images' size. It yields what the host knows, which one copy sends for all passes, and gets it from the device
# behind the images, which it changes in place; `_sample` gets what `_geometry` made. A fraction of a result is still to
# be cut off.
_Step = Generator[Sequence[np.ndarray], Sequence[torch.Tensor], None]


def _arguments(operations: Sequence[Operation]) -> np.ndarray:
    return np.array([float(one.arguments[0]) if one.arguments else 0.0 for one in operations])


def _look_up(operations: Sequence[Operation], size: Size) -> _Step:
    """Each value replaced by its table's. A curve over its step is a table; without a step the values stay."""
    arguments = zip(operations, _arguments(operations), strict=True)
    tables = [_TABLES[one.name](value) if one.name in _TABLES else _VALUES for one, value in arguments]
    equalized = np.array([one.name == "Equalize" for one in operations if one.name not in _TABLES], dtype=np.float32)
    known = np.tile(np.array(tables, dtype=np.float32)[:, None], (1, 3, 1))
    curves, auto = np.zeros((len(equalized), 3, 257), dtype=np.float32), int((equalized == 0).sum())
    images, every, curve, values, half = yield known, curves, _VALUES, 0.5 * equalized[:, None, None]
    pixels, first = images.flatten(2).long(), len(operations) - len(equalized)
    if len(equalized):
        low, high = pixels[first:].aminmax(dim=2, keepdim=True)
        torch.sub(values, low[:auto], out=curve[:auto, :, :256])
        if auto < len(equalized):
            counted = pixels[first + auto :]
            curve[auto:, :, 1:].scatter_add_(2, counted, values[1].expand_as(counted))
            curve[auto:].cumsum_(2)
        step = curve.gather(2, high).div_(255.0)
        if auto < len(equalized):
            step[auto:].floor_()
        found = torch.addcdiv(half, curve[..., :256], step)
        torch.where(step > 0.0, found, every[first:], out=every[first:])
    torch.gather(every, 2, pixels, out=images.flatten(2))


# Weights of grey, exact in float32; what rounds it, Pillow's smoothing filter, and what rounds its result.
_GREY = np.array([19595, 38470, 7471], dtype=np.float32) / 2**16
_SMOOTH = np.array([0.5, 0, 0, 1, 1, 1, 1, 5, 1, 1, 1, 1, 6.5], dtype=np.float32)


def _blend(operations: Sequence[Operation], size: Size) -> _Step:
    """Image.blend of another image, which is of the mean grey, black, grey or smooth, and the image."""
    mean, smooth = (sum(one.name == kind for one in operations) for kind in ("Contrast", "Sharpness"))
    grey = len(operations) - smooth
    greys = np.outer([one.name != "Brightness" for one in operations[:grey]], _GREY).astype(np.float32)
    of_blends = _arguments(operations).astype(np.float32)[:, None, None, None]
    images, factors, weights, constants = yield of_blends, greys[..., None, None], _SMOOTH
    half, smoothing, rounding = constants.split([3, 9, 1])
    # Whole numbers below 2^24, over 2^16: exact in any order.
    other = torch.addcmul(half[:, None, None], images[:grey], weights).sum(1, keepdim=True).to(torch.uint8)
    if mean:
        other[:mean] = other[:mean].mean((1, 2, 3), keepdim=True, dtype=torch.float64).add_(0.5)
    if smooth:
        other = torch.cat([other.expand(-1, 3, -1, -1), images[grey:]])
    if smooth and min(size) > 2:
        around = conv2d(images[grey:].flatten(0, 1)[:, None], smoothing.view(1, 1, 3, 3), rounding)
        inner = other[grey:, :, 1:-1, 1:-1]
        torch.div(around.view(inner.shape), 13.0, rounding_mode="floor", out=inner)
    images.sub_(other).mul_(factors).add_(other)


# Of the four pixels around a place, at a distance d from the second, the factors of 1, d, d^2 and d^3, bilinear and
# bicubic: Pillow's Geometry.c, whose cubic has a = -1. They are a little more than 1 in all: Pillow adds differences
# to a pixel, which among equal ones stays; a sum of rounded products may be less, and then its fraction is cut off.
_TAPS = np.array(
    [[[0, 1, 0, 0]] * 2, [[0, -1, 1, 0], [-1, 0, 1, 0]], [[0] * 4, [2, -2, 1, -1]], [[0] * 4, [-1, 1, -1, 1]]]
) * (1 + 2.0**-19)  # fmt: skip


def _geometries(images: torch.Tensor, passes: Sequence[Sequence[Operation]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The arguments of `_sample` for each pass. Those of two passes are made together, which bounds their memory."""
    for number in range(0, len(passes), 2):
        geometric = [[one for one in of if one.name in _PLACES] for of in passes[number : number + 2]]
        yield from _geometry(images, geometric) if any(geometric) else ((), ())


def _geometry(images: torch.Tensor, passes: Sequence[Sequence[Operation]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The arguments of `_sample` for the operations of each pass, which depend on the size of images only."""
    height, width = images.shape[2:]
    operations = list(itertools.chain.from_iterable(passes))
    numbers = np.array([_PLACES[one.name](one.arguments[0], width, height) for one in operations], dtype=np.float64)
    by_x, by_y, by_one = numbers.reshape(-1, 2, 3).transpose(2, 0, 1)[..., None, None]
    cubic = [int(one.keywords.get("resample") == Image.Resampling.BICUBIC) for one in operations]
    colours = np.array([one.keywords.get("fillcolor", (0, 0, 0)) for one in operations], dtype=np.float32)
    size = np.array([width, height])[:, None, None]
    across, down, size, factors, fill, (first, last), near = send_all(
        images.device,
        *(by_x * (np.arange(width) + 0.5), by_y * (np.arange(height)[:, None] + 0.5) + by_one, size),
        *(_TAPS[:, cubic, None, None, None], colours[..., None, None], np.stack([0 * size, size - 1])[..., None]),
        np.arange(-3, 1),
    )
    place = across + down  # [n, 2, H, W]
    outside = torch.div(place, size, rounding_mode="floor").any(dim=1, keepdim=True)
    second = place.add_(1.5).long()  # two pixels on: positive, so that this cuts off as floor does
    distance = place.sub_(second)[..., None]  # [n, 2, H, W, 1]
    weights = torch.addcmul(factors[1], torch.addcmul(factors[2], factors[3], distance), distance)
    weights = torch.addcmul(factors[0], weights, distance, out=place.new_empty(weights.shape, dtype=torch.float32))
    weights = weights[:, 0, ..., None, :] * weights[:, 1, ..., None]  # [n, H, W, 4, 4]
    places = (second[..., None] + near).clamp_(first, last)  # columns and rows [n, 2, H, W, 4]
    places = torch.add(places[:, 0, ..., None, :], places[:, 1, ..., None], alpha=width).view(len(operations), 1, -1)
    parts = [of_all.split([len(of) for of in passes]) for of_all in (places, weights[:, None], outside, fill)]
    return zip(*parts, strict=True)


def _sample(operations: Sequence[Operation], size: Size) -> _Step:
    """Image.transform with AFFINE: each pixel a weighted sum of 16. grid_sample has other bicubic weights."""
    images, places, weights, outside, fill = yield ()
    taps = images.flatten(2).gather(2, places.expand(-1, 3, -1)).view(*images.shape, 4, 4)
    torch.where(outside, fill, taps.mul_(weights).sum((4, 5)), out=images)


def _hue(operations: Sequence[Operation], size: Size) -> _Step:
    """As torchvision's adjust_hue, which computes in fractions where Pillow's hue is one of 256."""
    images, turns = yield (6.0 * _arguments(operations).astype(np.float32)[:, None, None],)
    red, green, blue = images.unbind(1)
    value = images.amax(dim=1)
    chroma = value - images.amin(dim=1)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    below_red = torch.where(value == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor)
    sextant = torch.where(value == red, (green - blue) / divisor, below_red)  # the hue times 6
    places = [(sextant + turns + start).remainder(6.0) for start in (5.0, 3.0, 1.0)]
    parts = [chroma * torch.minimum(place, 4.0 - place).clamp(0.0, 1.0) for place in places]
    torch.mul(value[:, None] - torch.stack(parts, dim=1), 255.999 / 255.0, out=images)


def _kernel_blur(operations: Sequence[Operation], size: Size) -> _Step:
    """torchvision's gaussian_blur."""
    x = np.arange(-(_KERNEL // 2), _KERNEL // 2 + 1)
    kernels = np.exp(-0.5 * (x / _arguments(operations)[:, None]) ** 2)
    return _filter(size, kernels / kernels.sum(axis=1, keepdims=True), "reflect", 0)


def _box_blur(operations: Sequence[Operation], size: Size) -> _Step:
    """Pillow's GaussianBlur: three box filters of a fractional width along the rows, then three along the columns."""
    variance = (_arguments(operations)[:, None] ** 2) / 3.0
    reach = np.floor((np.sqrt(12.0 * variance + 1.0) - 1.0) / 2.0)
    part = (2 * reach + 1) * (reach * (reach + 1) - 3 * variance) / (6 * (variance - (reach + 1) ** 2))
    inner = 1.0 / (2.0 * (reach + part) + 1.0)
    far = np.abs(np.arange(-_MOST_REACH, _MOST_REACH + 1))
    outer = np.where(far == reach + 1, (1.0 - (2.0 * reach + 1.0) * inner) / 2.0, 0.0)
    return _filter(size, np.where(far <= reach, inner, outer), "edge", 3)


def _filter(size: Size, kernels: np.ndarray, mode: Any, rounds: int) -> _Step:
    """Each image filtered by its kernel [n, 2r + 1], along the rows and then along the columns.

    Args:
        size: (H, W).
        kernels: of each.
        mode: NumPy's, of what lies outside.
        rounds: how often along an axis, each time rounded; 0 for once, rounded at the end.
    """
    n, reach, (height, width) = len(kernels), kernels.shape[1] // 2, size
    windows = [sliding_window_view(np.pad(np.arange(s), reach, mode=mode), 2 * reach + 1) for s in (width, height)]
    images, halves, weights, *sides = yield np.array([0.0, 0.5]), np.rint(kernels / _UNIT)[:, None], *windows
    across, down = (
        weights.new_zeros((n, s, s)).scatter_add_(2, near.expand(n, s, -1), weights.expand(n, s, -1))
        for s, near in zip((width, height), sides, strict=True)
    )
    pixels = _turned(images, torch.float64).flatten(1, 2)
    for _ in range(max(rounds, 1)):
        pixels = torch.baddbmm(halves[min(rounds, 1)], pixels, across.mT, alpha=_UNIT)
        pixels = _whole(pixels) if rounds else pixels
    pixels = pixels.view(n, height, -1)
    for _ in range(max(rounds, 1)):
        pixels = _whole(torch.baddbmm(halves[1], down, pixels, alpha=_UNIT))
    images.copy_(pixels.view(n, height, 3, width).transpose(1, 2))


_FAMILIES: dict[str, Callable[[Sequence[Operation], Size], _Step]] = {
    **dict.fromkeys((*_TABLES, "AutoContrast", "Equalize"), _look_up),
    **dict.fromkeys(_PLACES, _sample),
    **dict.fromkeys(("Contrast", "Brightness", "Color", "Sharpness"), _blend),
    **{"Hue": _hue, "GaussianBlur": _box_blur, "KernelBlur": _kernel_blur},
}
"""By the names of `Operation`, except AugMix and those of `_FLIPS`."""
