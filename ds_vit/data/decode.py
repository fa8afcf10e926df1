"""From the bytes of an image file to uint8 pixels, before augmentation.

`exact` is Pillow's result bit for bit, as timm decodes, except that 16-bit grey is scaled to 8 bits. EXIF orientation
is applied only on request. Where simplejpeg is installed and found to be bit-equal on this machine, it decodes JPEG
files. `fast` lets a large JPEG file be decoded at a half, a quarter or an eighth of its size where the crop is that
much larger than the model's input (the scaling of libjpeg's DCT), by libjpeg's faster transform and upsampling. The
resize may then differ by a grey level as well (augment/steps.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin

from ds_vit.device import decodes_jpeg
from ds_vit.fault_tolerance.errors import UserError, first_line, is_out_of_memory

Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""

_SCALES = (8, 4, 2)
_FAR_INTO_A_HEADER = 2**18  # bytes: EXIF is in one of the first parts, none of which is longer than 2**16
ORIENTATION = ExifTags.Base.Orientation
"""EXIF's tag."""
_scratch = threading.local()
_MOST_KEPT = 2**26  # bytes, of 16 million pixels


class ImageDecodeError(UserError):
    """An image file whose content cannot be decoded; the message names the file.

    Attributes:
        reason: what is wrong with it, without its name.
    """

    reason: str = ""


def undecodable(name: str, error: Exception, num_bytes: int | None = None) -> ImageDecodeError:
    """The error for people about the image `name`, from what the decoder said."""
    size = "" if num_bytes is None else f"{num_bytes} bytes; "
    what = "not an image that Pillow knows" if isinstance(error, Image.UnidentifiedImageError) else str(error)
    found = ImageDecodeError(
        f"{name}: the image cannot be decoded ({size}{what}); repair or replace the file, or pass --on-bad-image skip"
    )
    found.reason = f"{size}{what}"
    return found


def in_8_bits(pixels: np.ndarray) -> np.ndarray:
    """Whole numbers as uint8: those of 16 bits are scaled, v * 255 / 65535, rounded.

    Raises:
        OSError: floating-point numbers, whose range nothing says, and numbers beyond 16 bits.
    """
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535:
        found = f"its {pixels.dtype} pixels, from {pixels.min()} to {pixels.max()},"
        raise OSError(f"{found} are no whole numbers of 8 or 16 bits; convert them to one of these")
    return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)


def describe_depth(mode: str) -> str:
    """What happens to images of one of Pillow's modes with more than 8 bits per channel; "" for the others."""
    scaled = "16 bits, scaled to 8" if mode.startswith("I") else ""
    return "floating point, which cannot be decoded" if mode == "F" else scaled


def to_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB, as timm converts it, except that 16-bit grey is scaled: Pillow clips it (pytorch/vision #2218).

    Pillow leaves the numbers of TIFF files as they are: those of 12 bits reach 4095, and 0 may be white.

    Raises:
        OSError: as of `in_8_bits`.
    """
    if describe_depth(image.mode):
        tags, pixels = getattr(image, "tag_v2", {}), np.asarray(image)
        is_12_bits = tags.get(TiffImagePlugin.BITSPERSAMPLE) == (12,)
        grey = np.rint(pixels * (255 / 4095)).astype(np.uint8) if is_12_bits else in_8_bits(pixels)
        scaled = Image.fromarray(255 - grey if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0 else grey)
        scaled.info, image = image.info, scaled
    return image.convert("RGB")


def orientation(image: Image.Image) -> int:
    """How EXIF (or XMP) asks viewers to turn an image: 2 to 8; 1 for not at all, 0 for what Pillow cannot read.

    Pillow itself turns TIFF files when it decodes them.
    """
    if image.format == "TIFF":
        return 1
    with contextlib.suppress(Exception):  # a damaged EXIF part
        # PNG's own method decodes the whole file.
        found = Image.Image.getexif(image).get(ORIENTATION, 1)
        return found if found in range(1, 9) else 0
    return 0


def upright(image: Image.Image) -> Image.Image:
    """An image turned as its EXIF asks viewers to."""
    if (turn := orientation(image)) < 2:
        return image
    image = image.copy()
    image.info = {}  # exif_transpose writes all of EXIF anew, and fails at a damaged tag
    image.getexif()[ORIENTATION] = turn
    return ImageOps.exif_transpose(image)


@contextlib.contextmanager
def readable(name: str, num_bytes: int | None = None) -> Iterator[None]:
    """For the block, what a decoder says of a damaged file is an `ImageDecodeError` that names it."""
    try:
        yield
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
        if is_out_of_memory(error):
            raise
        raise undecodable(name, error, num_bytes) from error


def decode(data: bytes, name: str) -> Image.Image:
    """Decode an encoded image whole by Pillow, to RGB.

    Args:
        data: the file's bytes.
        name: the file's name, for the message.

    Raises:
        ImageDecodeError: the bytes are no image, a truncated or damaged one, or one of pixels of an unknown range.
    """
    with readable(name, len(data)), Image.open(io.BytesIO(data)) as image:
        return to_rgb(image)


@dataclass
class Jpeg:
    """A JPEG file whose size is known and which is decoded when a part of its pixels is needed.

    Attributes:
        data: the file's bytes.
        name: the file's name, for messages.
        height, width: in pixels.
        fast: whether it is to be decoded by `scaled`.
        whole: whether all of it is to be decoded, to find damage below the rows that are needed.
        pixels: of the whole file as `decoded` keeps them for `scaled`, uint8 [H, W, 3], and their scale; or None.
    """

    data: bytes
    name: str
    height: int
    width: int
    fast: bool
    whole: bool
    pixels: tuple[np.ndarray, int] | None = None

    def image(self) -> Image.Image:
        """The whole image, RGB, bit for bit Pillow's."""
        return self.crop((0, 0, self.height, self.width))

    def crop(self, box: Box) -> Image.Image:
        """A part of the image, RGB, bit for bit Pillow's.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        top, left, height, width = box
        data, rows = self._rows_above(top + height)
        try:
            pixels = _decode(data, (rows, self.width), strict=rows == self.height)
        except ValueError:  # Pillow decides whether there is an error, and which
            return decode(self.data, self.name).crop((left, top, left + width, top + height))
        row_bytes = 4 * self.width
        part = pixels.reshape(-1)[top * row_bytes + 4 * left :]
        return Image.frombytes("RGB", (width, height), part, "raw", "RGBX", row_bytes, 1)  # copies only the box

    def decoded(self, parts: Sequence[tuple[Box, tuple[int, int]]]) -> Image.Image | Jpeg:
        """The whole image decoded once, for several crops: a Pillow image, or where `fast` a file for `scaled`.

        Args:
            parts: the box of each crop, and the (height, width) that it is to be resized to.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        if not self.fast:
            return self.image()
        scale = min((_scale(box, at_least) for box, at_least in parts), default=1)
        whole = (0, 0, self.height, self.width)
        pixels, scale = self.scaled(whole, (self.height // scale, self.width // scale))
        return replace(self, pixels=(pixels.copy(), scale))

    def scaled(self, box: Box, at_least: tuple[int, int]) -> tuple[np.ndarray, int]:
        """A part of the image by the fast transforms, in no less than a given size where the part itself is not less.

        Args:
            box: what part.
            at_least: (height, width) that the part is to be resized to.

        Returns:
            uint8 [H, W, 3] of the part and the pixels that its edges cut, in memory that the next call overwrites; and
            by what it was scaled down: 1, 2, 4 or 8.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        if self.pixels is not None:
            return _part(*self.pixels, box), self.pixels[1]
        scale = _scale(box, at_least)
        data, rows = self._rows_above(box[0] + box[2])
        size = (-(-rows // scale), -(-self.width // scale))
        options: dict[str, object] = {"colorspace": "RGB", "fastdct": True, "fastupsample": True}
        if scale > 1:
            options.update(min_height=size[0], min_width=size[1])
        try:
            pixels = _decode(data, size, strict=rows == self.height, **options)
        except ValueError:
            pixels, scale = np.asarray(decode(self.data, self.name)), 1
        return _part(pixels, scale, box), scale

    def for_another_decoder(self) -> tuple[bytes, str] | None:
        """The file and its name, if a decoder on a device makes of it what Pillow makes, within `fast`; else None.

        The loaders' processes decode progressive files, which are slow, and files that EXIF rotates, which torchcodec
        would rotate and Pillow does not. Where damage must show now, all of it is decoded to an eighth of its size.
        """
        if _height_of_baseline(self.data) is None or _orientation_of(self.data) != 1:
            return None
        if self.whole:
            size = (-(-self.height // 8), -(-self.width // 8))
            try:
                _decode(self.data, size, strict=True, fastdct=True, min_height=size[0], min_width=size[1])
            except ValueError:
                return None
        return self.data, self.name

    def _rows_above(self, bottom: int) -> tuple[bytes, int]:
        """A file whose decoder stops somewhere below the row `bottom`; its height."""
        return (self.data, self.height) if self.whole else _without_rows_below(self.data, bottom, self.height)


def _scale(box: Box, at_least: tuple[int, int]) -> int:
    """By how much a box may be scaled down to be no smaller than a size: 1, 2, 4 or 8."""
    return next((s for s in _SCALES if box[2] >= s * at_least[0] and box[3] >= s * at_least[1]), 1)


def _part(pixels: np.ndarray, scale: int, box: Box) -> np.ndarray:
    """A box of an image that is scaled down, with the pixels that its edges cut."""
    top, left, height, width = box
    return pixels[top // scale : -(-(top + height) // scale), left // scale : -(-(left + width) // scale)]


def _orientation_of(data: bytes) -> int:
    """`orientation` of a JPEG file."""
    header = data[:_FAR_INTO_A_HEADER]
    if b"Exif\0\0" not in header and b"tiff:Orientation" not in header:
        return 1
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return orientation(image)
    return 0


def open_image(
    data: bytes | Image.Image, name: str, how: str = "exact", *, whole: bool = False, exif_rotation: bool = False
) -> Image.Image | Jpeg:
    """An image decoded by Pillow, or a JPEG file that is yet to be decoded.

    Args:
        data: the file's bytes, or pixels that are decoded already.
        name: the file's name, for messages.
        how: "exact" or "fast".
        whole: decode all of a file, also what lies below the rows that are asked for and may be damaged.
        exif_rotation: whether EXIF's orientation is applied; Pillow decodes the files that it turns.

    Raises:
        ImageDecodeError: as of `decode`.
    """
    if isinstance(data, Image.Image):
        return upright(data) if exif_rotation else data
    # Pillow decides about a file that does not end as a JPEG file does.
    is_jpeg = data[:3] == b"\xff\xd8\xff" and data[-2:] == b"\xff\xd9" and (how == "fast" or has_exact_jpeg())
    if exif_rotation and (not is_jpeg or _orientation_of(data) > 1):
        return upright(decode(data, name))
    if is_jpeg:
        import simplejpeg

        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            return decode(data, name)
        # Pillow guards against decompression bombs, and converts CMYK.
        if colours in ("YCbCr", "Gray") and height * width <= (Image.MAX_IMAGE_PIXELS or 0):
            return Jpeg(data, name, height, width, how == "fast", whole)
    return decode(data, name)


def require_fast(*, on_device: bool) -> None:
    """Refuse --decode fast on a machine that lacks its libraries; those of --augment-on device are two.

    Raises:
        UserError: says which, and how to install it.
    """
    if importlib.util.find_spec("simplejpeg") is None:
        raise UserError("--decode fast needs simplejpeg, which is not installed: pip install simplejpeg")
    if not on_device:
        return
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:  # as it is where it was built for another torch
        raise UserError(
            f"--decode fast with --augment-on device cannot import torchcodec ({first_line(error)}): pip install "
            "'torchcodec>=0.16' (for torch 2.11 and later), or drop one of the two"
        ) from error


@cache
def has_exact_jpeg() -> bool:
    """Whether simplejpeg is installed and decodes as this machine's Pillow does, to the last bit.

    Both hold libjpeg-turbo today, but a Pillow from another hand need not: noise in each sampling is compared.
    """
    if importlib.util.find_spec("simplejpeg") is None:
        return False
    noise = Image.fromarray(np.random.Generator(np.random.Philox(0)).integers(0, 256, (49, 83, 3), dtype=np.uint8))
    for sampling in (0, 1, 2):
        for progressive in (False, True):
            file = io.BytesIO()
            noise.save(file, "jpeg", quality=90, subsampling=sampling, progressive=progressive)
            data = file.getvalue()
            if not np.array_equal(_decode(data, (49, 83))[..., :3], decode(data, "noise")):
                return False
    return True


def _decode(data: bytes, size: tuple[int, int], **options: object) -> np.ndarray:
    """simplejpeg's pixels, uint8 [H, W, 4], or [H, W, 3] for RGB, in memory that the next call writes into.

    Args:
        size: (height, width) that are expected.
    """
    import simplejpeg

    # Four channels are Pillow's own layout in memory; new memory for each image would cost a tenth of the decoding.
    num_bytes = 4 * size[0] * size[1]
    memory = getattr(_scratch, "memory", b"")
    if len(memory) < num_bytes:
        # At an address divisible by 32, libjpeg-turbo writes around the cache: half as long again for small images.
        memory = memoryview(bytearray(num_bytes + 1))[1:]
        if num_bytes <= _MOST_KEPT:
            _scratch.memory = memory
    return simplejpeg.decode_jpeg(data, **{"colorspace": "RGBX", **options}, buffer=memory)


def _without_rows_below(data: bytes, bottom: int, height: int) -> tuple[bytes, int]:
    """A baseline JPEG file whose header says that it ends below the row `bottom`, where its decoder stops; its height.

    Decoding no more than the crop needs gains 8 to 13 %. Two rows are added since a row's upsampled colours depend on
    the next row of the halved colours.
    """
    rows = bottom + 2
    place = _height_of_baseline(data) if rows < height else None
    if place is None:
        return data, height
    return b"".join((data[:place], rows.to_bytes(2, "big"), data[place + 2 :])), rows


def _height_of_baseline(data: bytes) -> int | None:
    """Where a sequential JPEG file's header holds its height; None in a progressive file."""
    place = 2
    while place + 9 < len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in (0xC0, 0xC1):
            return place + 5
        if marker == 0xDA or (0xC2 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            return None
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None


# ---- on the device ---------------------------------------------------------------------------------------------------

# JPEG files decoded where the model trains, through torchcodec: by nvJPEG on a CUDA device, else by libjpeg-turbo.
# nvJPEG has another inverse transform and upsampling of colours than libjpeg, so that only `--decode fast` allows it.
# What it cannot decode, Pillow decodes, or refuses by name.


class File(NamedTuple):
    """An encoded image: its bytes (uint8, on the CPU), its name for messages, and its height and width."""

    data: torch.Tensor
    name: str
    size: tuple[int, int]


_AT_ONCE = 256 * 2**20  # bytes of pixels: whole images lie in the device's memory until their crops are taken


def decode_on(
    device: torch.device, files: Sequence[File], tally: Counter[str] | None = None
) -> Iterator[list[torch.Tensor]]:
    """The pixels of JPEG files, several files decoded at once.

    Args:
        device: where they are to be. torchcodec decodes on CUDA devices and CPUs; for others the pixels are copied.
        files: of a micro-batch.
        tally: counts images that were decoded here ("device"), and among these the ones that torchcodec refused
            ("refused") or that are too large to be decoded with others ("large").

    Returns:
        Of the files of each call uint8 [3, H, W] each, on `device`.

    Raises:
        ImageDecodeError: a file that Pillow cannot decode either.
        UserError: torchcodec cannot decode on this device at all.
    """
    tally = Counter() if tally is None else tally
    where = device if decodes_jpeg(device) else torch.device("cpu")
    sizes = [3 * math.prod(file.size) for file in files]
    keys = [(total // _AT_ONCE, own > _AT_ONCE) for own, total in zip(sizes, itertools.accumulate(sizes), strict=True)]
    for (_, is_large), together in itertools.groupby(zip(files, keys, strict=True), lambda pair: pair[1]):
        group = [file for file, _ in together]
        decoded: Sequence[torch.Tensor | None] | None = _decoded([file.data for file in group], where)
        if decoded is None:  # one of them spoils all
            _require_decoder(where)
            decoded = [(_decoded([file.data], where) or [None])[0] for file in group]
        images = []
        for pixels, file in zip(decoded, group, strict=True):
            # A file that EXIF rotates has another shape here; Pillow does not rotate it.
            if pixels is None or pixels.shape != (3, *file.size):
                image = decode(file.data.numpy().tobytes(), file.name)
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                tally["refused"] += 1
            images.append(pixels.to(device))
        tally.update(device=len(images), large=is_large)
        yield images


def _decoded(files: list[torch.Tensor], where: torch.device) -> list[torch.Tensor] | None:
    """torchcodec's pixels; None if it refuses a file."""
    from torchcodec.decoders import decode_jpeg

    try:
        return decode_jpeg(files, mode="RGB", device=where)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None


@cache
def _require_decoder(where: torch.device) -> None:
    """Raise UserError if not even a sound file can be decoded: each image would then be left to Pillow."""
    from torchcodec.decoders import decode_jpeg

    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "jpeg")
    try:
        decode_jpeg(file.getvalue(), device=where)
    except RuntimeError as error:
        raise UserError(
            f"--decode fast with --augment-on device: torchcodec cannot decode JPEG files on {where} "
            f"({first_line(error)}); drop --decode fast"
        ) from error
