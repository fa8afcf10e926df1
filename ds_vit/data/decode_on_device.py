"""JPEG files decoded where the model trains, through torchcodec: by nvJPEG on a CUDA device, else by libjpeg-turbo.

nvJPEG has another inverse transform and upsampling of colours than libjpeg, so that only `--decode fast` allows it.
What it cannot decode, Pillow decodes, or refuses by name.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ds_vit.data.decode import decode, require_fast
from ds_vit.fault_tolerance.errors import UserError, first_line


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
            "--decode fast with --augment-on device needs torchcodec 0.16 or later, which cannot be imported "
            f"({first_line(error)}): pip install 'torchcodec>=0.16' (for torch 2.11 and later), or drop "
            "one of the two"
        ) from error


def decode_on(device: torch.device, files: Sequence[File]) -> list[torch.Tensor]:
    """The pixels of JPEG files.

    Args:
        device: where they are to be. torchcodec decodes on CUDA devices and CPUs; for others the pixels are copied.
        files: of a micro-batch.

    Returns:
        uint8 [3, H, W] each, on `device`.

    Raises:
        ImageDecodeError: a file that Pillow cannot decode either.
        UserError: torchcodec cannot decode on this device at all.
    """
    where = device if device.type == "cuda" else torch.device("cpu")
    found = _decoded([file.data for file in files], where) if files else []
    if found is None:  # one of them spoils all
        _require_able(where)
        found = [(_decoded([file.data], where) or [None])[0] for file in files]
    return [_sound(pixels, file).to(device) for pixels, file in zip(found, files, strict=True)]


def _decoded(files: list[torch.Tensor], where: torch.device) -> list[torch.Tensor] | None:
    from torchcodec.decoders import decode_jpeg

    try:
        return decode_jpeg(files, mode="RGB", device=where)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def _sound(pixels: torch.Tensor | None, file: File) -> torch.Tensor:
    """The pixels, or Pillow's where there are none, or some of another shape (turned by EXIF, which Pillow leaves)."""
    if pixels is not None and pixels.shape == (3, *file.size):
        return pixels
    return torch.from_numpy(np.array(decode(file.data.numpy().tobytes(), file.name))).permute(2, 0, 1)


@cache
def _require_able(where: torch.device) -> None:
    """Raise UserError where not even a sound file can be decoded: each image would then be left to Pillow."""
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
