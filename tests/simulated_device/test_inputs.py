"""Inputs on the simulated device: augmentation as on the CPU in every layout, and decoding on a stream of its own."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from micro_batches import in_global_order, load
from picture_folders import made, smooth_photo
from PIL import Image

import simulated_device
from ds_vit.data import AugmentConfig, ImageConfig, MixConfig, Share, finish_images, finish_targets, open_source
from ds_vit.data import decode_on_device as decoding
from ds_vit.data.augment import on_device as augmentation
from ds_vit.data.augment.steps import Operation
from simulated_device import NAME, on_device

IMAGE = ImageConfig(img_size=(16, 20))
MIX = MixConfig(mixup=0.8, cutmix=1.0)
AUGMENT = {"aa": "rand-m9-mstd0.5-inc1", "vflip": 0.3, "reprob": 0.5, "recount": 2}


def photo_folder(root: Path, kind: str) -> Path:
    """24 photos in three classes."""
    for number in range(24):
        path = made(root / "train" / f"class{number % 3}" / f"{number}.{kind}")
        smooth_photo(18 + number % 9, 24 + number % 7, number).save(path)
    return root


# ---- Augmentation ----


def augment_everywhere(library: Path, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """On a rank: images and targets of four steps, as [steps, global batch, ...]: by where they are augmented."""
    simulated_device.start(library)
    source, share = open_source("", str(folder), "train"), Share(0, 1, 12)

    def augmented(on: str, device: str, share: Share = share, start: int = 0, **options) -> tuple:
        augment = AugmentConfig(**AUGMENT, augment_on=on)
        options |= {"image": IMAGE, "augment": augment, "mix": MIX, "pin_memory": device == NAME}
        batches = load(source, share, start, 4, **options)

        def images(batch):
            return finish_images(batch, IMAGE, augment, device=device).cpu()

        def targets(batch):
            return finish_targets(batch, 3, MIX, device=device).cpu()

        return tuple(in_global_order(batches, share, finish) for finish in (images, targets))

    return {
        "cpu": augmented("cpu", "cpu"),
        "device's way on the cpu": augmented("device", "cpu"),
        "device": augmented("device", NAME),
        "two ranks": augmented("device", NAME, Share(0, 2, 6)),
        "accumulated": augmented("device", NAME, Share(0, 1, 6, 2)),
        "a worker": augmented("device", NAME, num_workers=1),
        "resumed": augmented("device", NAME, start=2),
    }


def test_augmentation_is_the_cpus_in_every_layout(ranks, device_library, tmp_path):
    """Catches: other draws, pixels beyond the bound of docs/data.md, a copy whose source is filled anew too early."""
    [found] = ranks.run(1, augment_everywhere, device_library, photo_folder(tmp_path, "png"))
    (images, targets), (there, _) = found.pop("cpu"), found["device"]
    apart = (images - there).abs() * 255 * torch.tensor(IMAGE.std)[:, None, None]
    assert 0.0 < apart.mean() < 1.0, "grey levels of the mean over all images"
    assert apart.mean(dim=(2, 3, 4)).max() < 8.0, "of an image: another draw would be further off"
    for name, (same, labels) in found.items():
        steps = slice(2, None) if name == "resumed" else slice(None)
        assert torch.equal(same, there[steps]), name
        assert torch.equal(labels, targets[steps]), name


@on_device
def test_no_operation_waits_for_the_device():
    """Catches: arguments that are read back, and sizes that depend on pixels."""
    photo = np.array(smooth_photo())
    for name in augmentation.OPERATIONS:
        operations = [Operation(name, (0.3,))]
        crop = augmentation.Crop(photo.size, (0, 0, *photo.shape[:2]), "bilinear", operations)
        data = torch.from_numpy(photo.reshape(-1)).pin_memory()
        crops = augmentation.Crops(data, (crop,), photo.shape[:2])
        with simulated_device.no_host_synchronisations():
            there = augmentation.augmented(crops, torch.device(NAME))
        assert torch.equal(there.cpu(), augmentation.augmented(crops, torch.device("cpu"))), name


# ---- Decoding ----


@contextlib.contextmanager
def stub_decoder() -> Iterator[list[int]]:
    """A decoder that works on the current stream, as nvJPEG does; the streams that it was called on."""
    streams: list[int] = []

    def decode_jpeg(files, mode="RGB", device="cpu"):
        images = [np.array(Image.open(io.BytesIO(file.numpy().tobytes())).convert(mode)) for file in files]
        pixels = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]
        if torch.device(device).type != NAME:
            return pixels
        streams.append(torch.accelerator.current_stream().stream_id)
        try:
            return [image.pin_memory().to(device, non_blocking=True) for image in pixels]
        except RuntimeError as error:  # which would be taken for a file that the decoder refuses
            raise AssertionError(str(error)) from error

    stub = types.SimpleNamespace(decode_jpeg=decode_jpeg)
    modules = {"torchcodec": types.SimpleNamespace(decoders=stub), "torchcodec.decoders": stub}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(decoding, "decodes_jpeg", lambda device: device.type == NAME),
    ):
        yield streams


def jpeg_files() -> tuple[list[decoding.File], list[torch.Tensor]]:
    """Encoded photos, and their pixels."""
    files, expected = [], []
    for number in range(3):
        file = io.BytesIO()
        smooth_photo(60 + number, 70, number).save(file, "jpeg")
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        files.append(decoding.File(data, f"{number}", (60 + number, 70)))
        expected.append(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1))
    return files, expected


@on_device
def test_files_are_decoded_on_a_stream_of_their_own():
    files, expected = jpeg_files()
    with stub_decoder() as streams, simulated_device.no_host_synchronisations():
        found = [pixels + 0 for pixels in decoding.decode_on(torch.device(NAME), files)]
    assert torch.accelerator.current_stream().stream_id not in streams
    for pixels, right in zip(found, expected, strict=True):
        assert torch.equal(pixels.cpu(), right)


@on_device
def test_pixels_that_training_does_not_wait_for_race():
    files, _ = jpeg_files()
    impatient = types.SimpleNamespace(wait_stream=lambda stream: None, stream_id=0)
    with (
        stub_decoder(),
        mock.patch.object(torch.Tensor, "record_stream", return_value=None),
        mock.patch.object(torch.accelerator, "current_stream", return_value=impatient),
    ):
        found = list(decoding.decode_on(torch.device(NAME), files))
    with pytest.raises(RuntimeError, match=r"race: .* reads a block"):
        found[0] + 0
