"""Masks of segmentation: from files to class numbers, and cropped as their images are.

A mask has one whole number per pixel. `MaskValues` turns the numbers of the data set into classes, 0 to C - 1, and
`IGNORED`. One box and the flips of the sample's key serve the image and its mask: the image is resized bilinearly, the
mask takes the nearest pixel, because a mean of two class numbers is another class.

Shapes: H x W a file's pixels, h x w the model's input, C classes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from operator import truediv
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import RandomResizedCrop, Size, uniform
from ds_vit.data.augment.transforms import TrainTransform
from ds_vit.data.decode import Box, ImageDecodeError, Jpeg, undecodable
from ds_vit.data.field import Field, Rows, Sample, stacked
from ds_vit.data.fields import ImageField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source, shortened
from ds_vit.fault_tolerance.errors import UserError, is_out_of_memory

T = TypeVar("T")
IGNORED = -1
"""The class number of pixels that count in no loss and no metric."""
MOST_CLASSES = 2**15 - 1
"""Masks travel as int16."""
MOST_VALUE = 2**16 - 1
"""The largest value of a mask's pixel that may be a class."""
MASK_EXTENSIONS = (".png", ".tif", ".tiff", ".npy")

_READERS = 16  # threads that read masks
_UNKNOWN = -2  # a value that is neither a class nor ignored
_OUTSIDE = MOST_VALUE + 1  # stands for all values that 16 bits do not hold


def default_palette(num_classes: int) -> np.ndarray:
    """Colours for classes without any, uint8 [C, 3]: those of PASCAL VOC (Everingham et al. 2010).

    The bits of a class number, three at a time, are the bits of red, green and blue, the highest first.
    """
    classes, colours = np.arange(num_classes), np.zeros((num_classes, 3), dtype=np.uint8)
    for place in range(8):
        for channel in range(3):
            colours[:, channel] |= ((classes >> (3 * place + channel) & 1) << (7 - place)).astype(np.uint8)
    return colours


# ---- files -----------------------------------------------------------------------------------------------------------


def decode_mask(data: bytes, name: str) -> np.ndarray:
    """The values of a mask's file, whole numbers [H, W]; of a palette file the numbers of its colours.

    Args:
        data: the file's bytes.
        name: its name, for messages.

    Raises:
        ImageDecodeError: it is damaged.
        UserError: it has several channels, or values that are no whole numbers.
    """
    values: np.ndarray = _read(io.BytesIO(data), name, np.load, np.asarray)
    values = values.view(np.uint8) if values.dtype == bool else values
    if values.ndim != 2 or values.dtype.kind not in "ui":
        rule = "a mask has one whole number per pixel: save class numbers, not colours, as PNG (palette or grey)"
        raise UserError(f"{name} holds {values.dtype} values in the shape {list(values.shape)}; {rule}, TIFF or npy")
    return values


def size_of_mask(file: BinaryIO, name: str) -> Size:
    """The (height, width) of a mask's file, from its header.

    Raises:
        ImageDecodeError: the header is damaged.
    """
    return _read(file, name, _shape_of_array, lambda image: image.size[::-1])


def _shape_of_array(file: BinaryIO) -> Size:
    np.lib.format.read_magic(file)
    height, width = np.lib.format.read_array_header_1_0(file)[0][:2]
    return height, width


def _read(
    file: BinaryIO, name: str, of_array: Callable[[BinaryIO], Any], of_image: Callable[[Image.Image], Any]
) -> Any:
    try:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
            file.seek(0)
            return of_array(file)
        file.seek(0)
        with Image.open(file) as image:
            return of_image(image)
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
        if is_out_of_memory(error):
            raise
        raise undecodable(name, error) from error


class MaskValues:
    """Which values of a data set's masks are which class.

    Args:
        values: of the classes, in the order of their numbers; all differ, from 0 to `MOST_VALUE`.
        ignored: values that belong to no class; negative ones are in no mask.
        rule: what the classes are and what to do about another value, for the message.
    """

    def __init__(self, values: Sequence[int], ignored: Iterable[int], rule: str) -> None:
        self.values, self._rule = np.array(values, dtype=np.int64), rule
        self.table = np.full(_OUTSIDE + 1, _UNKNOWN, dtype=np.int16)
        self.table[[value for value in ignored if value >= 0]] = IGNORED
        self.table[self.values] = np.arange(len(values))

    def classes(self, mask: np.ndarray, name: str) -> np.ndarray:
        """The class of each pixel, int16 [H, W]; `IGNORED` for pixels without one.

        Args:
            mask: values of a file, [H, W].
            name: of the file, for messages.

        Raises:
            UserError: a value is neither a class nor ignored.
        """
        is_small = mask.dtype.kind == "u" and mask.dtype.itemsize <= 2
        places = mask if is_small else np.where((mask < 0) | (mask >= _OUTSIDE), _OUTSIDE, mask)
        classes = self.table[places]
        if (unknown := classes == _UNKNOWN).any():
            values, counts = np.unique(mask[unknown], return_counts=True)
            shown = shortened([f"{value} ({count:,})" for value, count in zip(values, counts, strict=True)])
            number = f"{int(counts.sum()):,} of {mask.size:,} pixels"
            raise UserError(f"{name}: {number} have values that are neither a class nor ignored: {shown}; {self._rule}")
        return classes


def require_same_size(name: str, image: Size, mask: Size) -> None:
    """Raise UserError unless an image and its mask have the same (height, width).

    Args:
        name: of the image.
        image: its size, turned or not as --exif-rotation says.
        mask: the size of its mask.
    """
    if tuple(image) != tuple(mask):
        sizes = f"the image has {image[0]}x{image[1]} pixels (height x width) and its mask {mask[0]}x{mask[1]}"
        turned = "; if EXIF turns the image and not the mask, set --exif-rotation as the masks were drawn"
        way_out = "save the mask at the size of its image, or leave both out"
        raise UserError(f"{name}: {sizes}; {way_out}{turned if tuple(image) == tuple(mask[::-1]) else ''}")


def pixels_of_classes(mask: np.ndarray, num_classes: int) -> np.ndarray:
    """How many pixels of a mask [H, W] each class has, int64 [C]."""
    return np.bincount(mask[mask != IGNORED], minlength=num_classes)


def of_masks(source: Source, entry: str, indices: Iterable[int], function: Callable[[Any], T]) -> Iterator[T]:
    """A function of an entry of some samples, read by threads; damaged masks are left out.

    Raises:
        UserError: a mask is invalid.
        OSError: a file cannot be read.
    """

    def read(index: int) -> list[T]:
        try:
            return [function(source.entry(entry, index))]
        except ImageDecodeError:
            return []

    with ThreadPoolExecutor(_READERS) as threads:
        yield from chain.from_iterable(threads.map(read, indices))


# ---- crops -----------------------------------------------------------------------------------------------------------


class ScaleCrop(RandomResizedCrop):
    """A box of random scale at a random place, resized to the model's size; beyond the image it is padded.

    At scale 1 the box is the largest of the model's shape within the image, at 0.5 it has twice that height and width.

    Args:
        size: (h, w) of the result.
        scale_range: smallest and largest scale, drawn uniformly.
        mean: of the channels, in [0, 1]: the colour around the image.
    """

    def __init__(self, size: Size, scale_range: tuple[float, float], mean: Sequence[float]) -> None:
        self._size, self._range = size, scale_range
        self._colour = tuple(round(255 * value) for value in mean)

    def draw(self, key: int, size: Size) -> tuple[Box, InterpolationMode]:
        """As `RandomResizedCrop.draw`; the box may begin before the image or end beyond it."""
        low, high = self._range
        scale = (low + (high - low) * uniform(key, "scale")) * max(map(truediv, self._size, size))
        height, width = (max(1, round(out / scale)) for out in self._size)
        rooms = size[0] - height, size[1] - width  # negative where the image is the smaller one
        top, left = (
            int(uniform(key, name) * (abs(room) + 1)) * (1 if room > 0 else -1)
            for name, room in zip(("crop top", "crop left"), rooms, strict=True)
        )
        return (top, left, height, width), InterpolationMode.BILINEAR

    def apply(self, image: Image.Image | Jpeg, parameters: tuple[Box, InterpolationMode]) -> Image.Image:
        """The box of an RGB image, bilinear with antialiasing; of a JPEG file only its part is decoded.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        (top, left, height, width), _ = parameters
        above, before = max(top, 0), max(left, 0)
        below, after = min(top + height, image.height), min(left + width, image.width)
        if isinstance(image, Jpeg):
            part = image.crop((above, before, below - above, after - before))
        else:
            part = image.crop((before, above, after, below))
        whole = Image.new("RGB", (width, height), self._colour)
        whole.paste(part, (before - left, above - top))
        return whole.resize(self._size[::-1], Image.Resampling.BILINEAR)


def crop_mask(mask: np.ndarray, box: Box, out: Size) -> np.ndarray:
    """A box of a mask, resized by the nearest pixel: pixel i has the value at floor(top + (i + 1/2) height / h).

    Args:
        mask: [H, W].
        box: (top, left, height, width), which may begin before the mask or end beyond it: `IGNORED` is there.
        out: (h, w).

    Returns:
        [h, w] of the mask's type.
    """
    places = [
        first + (2 * np.arange(number) + 1) * length // (2 * number)
        for first, length, number in zip(box[:2], box[2:], out, strict=True)
    ]
    inside = [(place >= 0) & (place < length) for place, length in zip(places, mask.shape, strict=True)]
    result = np.full(out, IGNORED, dtype=mask.dtype)
    result[np.ix_(*inside)] = mask[np.ix_(*(place[kept] for place, kept in zip(places, inside, strict=True)))]
    return result


# ---- fields of training ----------------------------------------------------------------------------------------------


class SceneImages(ImageField):
    """A training image, scaled, cropped, flipped and coloured: [B, 3, h, w].

    Args:
        name: as for `Field`.
        image: size and normalisation.
        augment: flips and colours; with --no-aug a crop at scale 1 and nothing else.
        scale_range: of --scale-range.
    """

    mixes = False

    def __init__(self, name: str, image: ImageConfig, augment: AugmentConfig, scale_range: tuple[float, float]) -> None:
        self._scale_range = (1.0, 1.0) if augment.no_aug else scale_range
        super().__init__(name, image, augment)

    def _transform(self) -> TrainTransform:
        others = getattr(super()._transform(), "transforms", ())  # none with --no-aug
        return TrainTransform(ScaleCrop(self.image.img_size, self._scale_range, self.image.mean), others)


class MaskField(Field):
    """The mask of a training image, cropped and flipped as the image: int64 [B, h, w], `IGNORED` beyond the file.

    Args:
        name: as for `Field`.
        follows: the field of the image, whose crop is of whole pixels.
    """

    def __init__(self, name: str, follows: ImageField) -> None:
        super().__init__(name, follows.image.img_size, torch.int64, stage="last", entry="mask")
        self._follows = follows

    def read(self, sample: Sample) -> np.ndarray:
        """The classes, int16 [h, w].

        Raises:
            UserError: the mask has another size than the image, or a value that is no class.
        """
        box, size, operations = self._follows.geometry(sample)
        mask = super().read(sample)
        require_same_size(sample.name, size, mask.shape)
        top, left, height, width = map(int, box)
        cropped = crop_mask(mask, (top, left, height, width), (self.shape[0], self.shape[1]))
        for operation in operations:
            if operation.name in ("hflip", "vflip"):  # the others change colours
                cropped = np.flip(cropped, axis=1 if operation.name == "hflip" else 0)
        return np.ascontiguousarray(cropped)

    def blank(self) -> torch.Tensor:
        """No pixel counts."""
        return torch.full(self.shape, IGNORED, dtype=torch.int16)

    def collate(self, values: Sequence[Any], rows: Rows) -> torch.Tensor:
        """As `Field.collate`, int16."""
        return stacked(values, torch.int16)
