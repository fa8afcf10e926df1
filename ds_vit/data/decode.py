"""From the bytes of an image file to uint8 pixels, apart from what is drawn for the sample and done with it.

`exact` is Pillow's result bit for bit, as timm decodes: converted to RGB, EXIF orientation not applied. Where
simplejpeg is installed and found to be bit-equal on this machine, JPEG files go through it. `fast` lets a large JPEG
file be decoded at a half, a quarter or an eighth of its size where the crop is that much larger than the model's input
(the scaling of libjpeg's DCT), by libjpeg's faster transform and upsampling. What follows may then differ by a grey
level or two as well: the resize and the colour jitter (augment/).
"""

from __future__ import annotations

import importlib.util
import io
import threading
from functools import cache

import numpy as np
from PIL import Image

from ds_vit.fault_tolerance.errors import UserError

DECODERS = ("exact", "fast")
Box = tuple[int, int, int, int]
"""(top, left, height, width) in pixels."""

_SCALES = (8, 4, 2)
_FAR_INTO_A_HEADER = 2**18  # bytes: EXIF stands in one of the first parts, none of which is longer than 2**16
_ORIENTATION = 0x0112  # EXIF's tag
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
        f"{name}: the image cannot be decoded ({size}{what}); repair or remove the file, or pass --on-bad-image skip"
    )
    found.reason = f"{size}{what}"
    return found


def decode(data: bytes, name: str) -> Image.Image:
    """Decode an encoded image whole by Pillow, to RGB.

    Args:
        data: the file's bytes.
        name: the file's name, for the message.

    Raises:
        ImageDecodeError: the bytes are no image, or a truncated or damaged one.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, struct.error, ... on damaged files
        raise undecodable(name, error, num_bytes=len(data)) from error


class Jpeg:
    """A JPEG file whose size is known and whose pixels are decoded when a part of them is asked for.

    Attributes:
        height, width: in pixels.
        fast: whether it is to be decoded by `scaled`.
    """

    def __init__(self, data: bytes, name: str, size: tuple[int, int], fast: bool, whole: bool) -> None:
        self.height, self.width = size
        self.fast = fast
        self._whole = whole
        self._data = data
        self._name = name

    def image(self) -> Image.Image:
        """The whole image, RGB, bit for bit Pillow's."""
        return self.crop((0, 0, self.height, self.width))

    def crop(self, box: Box) -> Image.Image:
        """A part of the image, RGB, bit for bit Pillow's.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        top, left, height, width = box
        pixels = self._decoded_down_to(top + height)
        if pixels is None:
            return self._by_pillow(box)
        row_bytes = 4 * self.width
        part = pixels.reshape(-1)[top * row_bytes + 4 * left :]
        return Image.frombytes("RGB", (width, height), part, "raw", "RGBX", row_bytes, 1)  # copies the box alone

    def pixels(self, box: Box) -> np.ndarray:
        """`crop` as uint8 [height, width, 3], in memory of its own.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        top, left, height, width = box
        pixels = self._decoded_down_to(top + height, colorspace="RGB")
        if pixels is None:
            return np.array(self._by_pillow(box))
        return pixels[top : top + height, left : left + width].copy()

    def _decoded_down_to(self, bottom: int, **options: object) -> np.ndarray | None:
        """The rows above `bottom` at least; None where Pillow decides whether there is an error, and says which."""
        data, rows = self._rows_above(bottom)
        try:
            return _decode(data, (rows, self.width), strict=rows == self.height, **options)
        except ValueError:
            return None

    def _by_pillow(self, box: Box) -> Image.Image:
        top, left, height, width = box
        return decode(self._data, self._name).crop((left, top, left + width, top + height))

    def scaled(self, box: Box, at_least: tuple[int, int]) -> tuple[np.ndarray, int]:
        """A part of the image by the fast transforms, in no less than a given size where the part itself is not less.

        Args:
            box: what part.
            at_least: (height, width) that the part is to be resized to.

        Returns:
            uint8 [H, W, 3], a view of memory that the next call writes into, of the part and what its edges cut of a
            pixel; and by what it was scaled down: 1, 2, 4 or 8.

        Raises:
            ImageDecodeError: the file is damaged.
        """
        top, left, height, width = box
        scale = next((s for s in _SCALES if height >= s * at_least[0] and width >= s * at_least[1]), 1)
        data, rows = self._rows_above(top + height)
        size = (-(-rows // scale), -(-self.width // scale))
        options: dict[str, object] = {"colorspace": "RGB", "fastdct": True, "fastupsample": True}
        if scale > 1:
            options.update(min_height=size[0], min_width=size[1])
        try:
            pixels = _decode(data, size, strict=rows == self.height, **options)
        except ValueError:
            pixels, scale = np.asarray(decode(self._data, self._name)), 1
        return pixels[top // scale : -(-(top + height) // scale), left // scale : -(-(left + width) // scale)], scale

    def for_another_decoder(self) -> tuple[bytes, str] | None:
        """The file and its name, where a decoder on a device makes of it what Pillow makes, within `fast`; else None.

        Progressive files are left to the loaders' processes, which are many; so are those that say in EXIF how they are
        to be turned, which torchcodec would follow and Pillow does not. Where damage must show now, all of the file is
        looked at: decoded to an eighth of its size.
        """
        if _height_of_baseline(self._data) is None or self._is_turned():
            return None
        if self._whole:
            size = (-(-self.height // 8), -(-self.width // 8))
            try:
                _decode(self._data, size, strict=True, fastdct=True, min_height=size[0], min_width=size[1])
            except ValueError:
                return None
        return self._data, self._name

    def _is_turned(self) -> bool:
        if self._data.find(b"Exif\0\0", 0, _FAR_INTO_A_HEADER) < 0:
            return False
        try:
            return Image.open(io.BytesIO(self._data)).getexif().get(_ORIENTATION, 1) != 1
        except Exception:  # an EXIF part that Pillow cannot read
            return True

    def _rows_above(self, bottom: int) -> tuple[bytes, int]:
        """A file that ends, and its decoder stops, somewhere below the row `bottom`; its height."""
        return (self._data, self.height) if self._whole else _without_rows_below(self._data, bottom, self.height)


def open_image(data: bytes, name: str, how: str = "exact", *, whole: bool = False) -> Image.Image | Jpeg:
    """What an image file's bytes hold: decoded by Pillow, or a JPEG file that is to be decoded.

    Args:
        data: the file's bytes.
        name: the file's name, for messages.
        how: one of `DECODERS`.
        whole: look at all of a file, also at what lies below the rows that are asked for and may be damaged.

    Raises:
        ImageDecodeError: the bytes are no image, or a truncated or damaged one.
    """
    # A file that does not end as a JPEG file does is cut short or has something behind it: Pillow knows which.
    if data[:3] == b"\xff\xd8\xff" and data[-2:] == b"\xff\xd9" and (how == "fast" or has_exact_jpeg()):
        import simplejpeg

        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            return decode(data, name)
        # Pillow's guard against decompression bombs, and its own way with CMYK, go first.
        if colours in ("YCbCr", "Gray") and height * width <= (Image.MAX_IMAGE_PIXELS or 0):
            return Jpeg(data, name, (height, width), how == "fast", whole)
    return decode(data, name)


def require_fast() -> None:
    """Refuse --decode fast on a machine that lacks its library.

    Raises:
        UserError: says which, and how to install it.
    """
    if importlib.util.find_spec("simplejpeg") is None:
        raise UserError("--decode fast needs simplejpeg, which is not installed: pip install simplejpeg")


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
        memory = bytearray(num_bytes)
        if num_bytes <= _MOST_KEPT:
            _scratch.memory = memory
    return simplejpeg.decode_jpeg(data, **{"colorspace": "RGBX", **options}, buffer=memory)


def _without_rows_below(data: bytes, bottom: int, height: int) -> tuple[bytes, int]:
    """A baseline JPEG file that says it is no higher than what is needed for the rows above `bottom`; that height.

    Its decoder stops there. Two more rows than needed keep the upsampling of colours as it is: a row's takes a row of
    the halved colours beside its own.
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
