"""JPEG files decoded where the model trains, through torchcodec: by nvJPEG on a CUDA device, else by libjpeg-turbo.

nvJPEG has another inverse transform and upsampling of colours than libjpeg, so that only `--decode fast` allows it.
What it cannot decode, Pillow decodes, or refuses by name.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ds_vit.data.decode import decode, require_fast
from ds_vit.device import decodes_jpeg
from ds_vit.fault_tolerance.errors import UserError, first_line, is_out_of_memory


class File(NamedTuple):
    """An encoded image: its bytes (uint8, on the CPU), its name for messages, and its height and width."""

    data: torch.Tensor
    name: str
    size: tuple[int, int]


def require_fast_on_device() -> None:
    """Refuse --decode fast with --augment-on device on a machine that lacks its libraries.

    Raises:
        UserError: says which, and how to install it.
    """
    require_fast()
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:  # as it is where it was built for another torch
        raise UserError(
            f"--decode fast with --augment-on device cannot import torchcodec ({first_line(error)}): pip install "
            "'torchcodec>=0.16' (for torch 2.11 and later), or drop one of the two"
        ) from error


TALLY: Counter[str] = Counter()
"""Images of this process that were augmented on the device since its training began: "loader" for those that the loader
decoded, "device" for the others; among these "refused" by the device, and "large" beyond `_AT_ONCE`."""

_AT_ONCE = 256 * 2**20  # bytes of pixels: whole images lie in the device's memory until their crops are taken


def decode_on(device: torch.device, files: Sequence[File]) -> Iterator[list[torch.Tensor]]:
    """The pixels of JPEG files, several files decoded at once.

    Args:
        device: where they are to be. torchcodec decodes on CUDA devices and CPUs; for others the pixels are copied.
        files: of a micro-batch.

    Returns:
        Of the files of each call uint8 [3, H, W] each, on `device`.

    Raises:
        ImageDecodeError: a file that Pillow cannot decode either.
        UserError: torchcodec cannot decode on this device at all.
    """
    where = device if decodes_jpeg(device) else torch.device("cpu")
    sizes = [3 * math.prod(file.size) for file in files]
    keys = [(total // _AT_ONCE, own > _AT_ONCE) for own, total in zip(sizes, itertools.accumulate(sizes), strict=True)]
    for (_, is_large), together in itertools.groupby(zip(files, keys, strict=True), lambda pair: pair[1]):
        group = [file for file, _ in together]
        decoded: Sequence[torch.Tensor | None] | None = _decode([file.data for file in group], where)
        if decoded is None:  # one of them spoils all
            _require_decoder(where)
            decoded = [(_decode([file.data], where) or [None])[0] for file in group]
        images = []
        for pixels, file in zip(decoded, group, strict=True):
            # A file that EXIF rotates has another shape here; Pillow does not rotate it.
            if pixels is None or pixels.shape != (3, *file.size):
                image = decode(file.data.numpy().tobytes(), file.name)
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                TALLY["refused"] += 1
            images.append(pixels.to(device))
        TALLY.update(device=len(images), large=is_large)
        yield images


def _decode(files: list[torch.Tensor], where: torch.device) -> list[torch.Tensor] | None:
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
