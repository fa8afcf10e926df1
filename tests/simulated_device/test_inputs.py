"""Inputs on the simulated device: augmentation as on the CPU in every layout, and decoding on a stream of its own."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from micro_batches import load
from picture_folders import smooth_photo, write_photos
from PIL import Image

import simulated_device
from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data import decode as decoding
from ds_vit.data.augment import on_device as augmentation
from ds_vit.data.augment.mixing import PairMix
from ds_vit.data.augment.steps import Operation
from ds_vit.data.augment.transforms import TrainTransform, train_transform
from ds_vit.data.field import Derived, Field, MicroBatch, Rows
from ds_vit.data.fields import ImageField, Pictures
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.training.inputs import InputPipeline
from simulated_device import NAME, on_device

IMAGE = ImageConfig(img_size=(16, 20))
MIX = MixConfig(mixup=0.8, cutmix=1.0)
AUGMENT = {"aa": "rand-m9-mstd0.5-inc1", "vflip": 0.3, "reprob": 0.5, "recount": 2}


# ---- Augmentation ----


def augment_everywhere(library: Path, folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """On a rank: images and targets of four steps, as [steps, global batch, ...]: by where they are augmented."""
    simulated_device.start(library)
    source, share = open_source("", str(folder), "train"), Share(0, 1, 12)

    def augmented(on: str, device: str, workers: int = 0) -> tuple:
        augment = AugmentConfig(**AUGMENT, augment_on=on)
        options = {"image": IMAGE, "augment": augment, "mix": MIX, "pin_memory": device == NAME}
        made = load(source, share, 0, 4, num_workers=workers, **options).tensors(device)
        return made["images"], made["targets"]

    return {
        "cpu": augmented("cpu", "cpu"),
        "device's way on the cpu": augmented("device", "cpu"),
        "device": augmented("device", NAME),
        "a worker": augmented("device", NAME, 1),
    }


def test_augmentation_is_the_cpus(ranks, device_library, tmp_path):
    """Catches: other draws, pixels beyond the bound of docs/data.md, a copy whose source is filled anew too early."""
    write_photos(tmp_path, 24, "png")
    [found] = ranks.run(1, augment_everywhere, device_library, tmp_path)
    (images, targets), (there, _) = found.pop("cpu"), found["device"]
    apart = (images - there).abs() * 255 * torch.tensor(IMAGE.std)[:, None, None]
    assert 0.0 < apart.mean() < 1.0, "grey levels of the mean over all images"
    assert apart.mean(dim=(2, 3, 4)).max() < 8.0, "of an image: another draw would be further off"
    for name, (same, labels) in found.items():
        assert torch.equal(same, there), name
        assert torch.equal(labels, targets), name


@on_device
def test_no_operation_waits_for_the_device():
    """Catches: arguments that are read back, and sizes that depend on pixels."""
    photo = np.array(smooth_photo())
    for name in (*augmentation._FLIPS, *augmentation._FAMILIES):
        operations = [Operation(name, (0.3,))]
        crop = augmentation.Crop(photo.size, (0, 0, *photo.shape[:2]), "bilinear", operations)
        data = torch.from_numpy(photo.reshape(-1)).pin_memory()
        crops = augmentation.Crops(data, (crop,), photo.shape[:2])
        with simulated_device.no_host_synchronisations():
            there = augmentation.augmented(crops, torch.device(NAME))
        assert torch.equal(there.cpu(), augmentation.augmented(crops, torch.device("cpu"))), name


def crops_of(keys: list[int]) -> augmentation.Crops:
    """Crops with RandAugment and colour jitter, which no flags of timm combine."""
    augment = AugmentConfig(aa=AUGMENT["aa"], augment_on="device")
    transform = train_transform(IMAGE, augment)
    jitter = train_transform(IMAGE, AugmentConfig(color_jitter=0.4)).transforms[-1]
    cutting = augmentation.CuttingTransform(TrainTransform(transform.crop, [*transform.transforms, jitter]), augment)
    photos = [smooth_photo(18 + number % 9, 24 + number % 7, number) for number in range(16)]
    cuts = [cutting(photos[key % 16], randomness.mix(key)) for key in keys]
    memory = torch.empty(sum(cut.data.size for cut in cuts), dtype=torch.uint8).pin_memory()
    return augmentation.packed(cuts, IMAGE.img_size, memory)


@on_device
def test_launches_do_not_depend_on_the_number_of_images():
    """Catches: a launch for each image, and families of kinds that no longer share their work."""
    images, found = ImageField("images", IMAGE, AugmentConfig(reprob=0.5)), []
    for times in (1, 1, 4):  # the first time makes what is kept
        rows = 64 * times
        boxes = torch.tensor([[[2, 3, 9, 12]], [[0, 0, 0, 0]]], dtype=torch.int32).repeat(rows // 2, 1, 1)
        mix = PairMix(torch.arange(rows) ^ 1, torch.full((rows,), 0.7), torch.zeros(rows, 4, dtype=torch.int32))
        keys, valid = torch.arange(rows) % 64, torch.ones(rows, dtype=torch.bool)
        crops = crops_of(keys.tolist())
        passes = {(n, one.name) for crop in crops.crops for n, one in enumerate(crop.operations)}
        of_batch = Rows(keys, keys, rows, valid, True, mix)
        simulated_device.reset()
        images.to_device(Pictures(crops, boxes), of_batch, torch.device(NAME))
        found.append((len(passes), simulated_device.launches()))
    assert found[1] == found[2]
    kinds, launches = found[1]
    assert kinds > 40
    assert launches <= 75 + 2 * kinds


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


class Decoded(Field):
    """A file's pixels, decoded on the device."""

    def to_device(self, packed: decoding.File, rows: Rows, device: torch.device) -> torch.Tensor:
        [[pixels]] = decoding.decode_on(device, [packed])
        return pixels + 0


def finished(
    files: list[decoding.File], stream: torch.Stream, function: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Files decoded as `InputPipeline` finishes a micro-batch, and a field derived from the first one."""
    decoded = [Decoded(file.name, file.size, dtype=torch.uint8) for file in files]
    fields = [*decoded, Derived("derived", decoded[0], function, dtype=torch.uint8)]
    keys = torch.zeros(1, dtype=torch.int64).pin_memory()
    batch = MicroBatch(Rows(keys, keys, 1, keys == 0, True), {file.name: file for file in files})
    pipeline = mock.Mock(_stream=stream)
    pipeline.engine.device, pipeline.run.layout.tp = torch.device(NAME), 1
    made = InputPipeline._finish(pipeline, fields, batch)
    return [made[field.name] for field in fields]


@on_device
def test_inputs_are_finished_on_a_stream_of_their_own():
    files, expected = jpeg_files()
    busy = torch.ones(3, device=NAME) + 1  # what training has queued
    with stub_decoder() as streams, simulated_device.no_host_synchronisations():

        def inverted(pixels: torch.Tensor) -> torch.Tensor:
            if pixels.device.type == NAME:
                streams.append(torch.accelerator.current_stream().stream_id)
            return 255 - pixels

        found = [pixels + 0 for pixels in finished(files, torch.Stream(NAME), inverted)]
    assert torch.accelerator.current_stream().stream_id not in streams
    assert busy.sum() == 6
    for pixels, right in zip(found, [*expected, 255 - expected[0]], strict=True):
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
        found = finished(files, torch.Stream(NAME))
    with pytest.raises(RuntimeError, match=r"race: .* reads a block"):
        found[0] + 0


@on_device
def test_blocks_that_training_still_reads_race():
    files, _ = jpeg_files()
    stream = torch.Stream(NAME)
    with stub_decoder(), mock.patch.object(torch.Tensor, "record_stream", return_value=None):
        found = finished(files, stream)
        read = [pixels + 0 for pixels in found]
        found.clear()
        with pytest.raises((RuntimeError, AssertionError), match="still needs it; call record_stream"):
            finished(files, stream)
    assert len(read) == len(files) + 1
