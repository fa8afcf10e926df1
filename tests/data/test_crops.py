"""Several crops of an image: pure functions of the sample's key, made by the steps of DINO's recipe."""

from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
import torch
from micro_batches import Loaded, load
from picture_folders import smooth_photo, write_photos
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.crops import MultiCrop, view_keys
from ds_vit.data.fields import LabelField
from ds_vit.data.sampler import Share
from ds_vit.data.settings import CropConfig, ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.tasks.dino.fields import crop_fields

IMAGE, CROPS = ImageConfig((24, 24)), CropConfig(local_size=16, num_local=3)
NUM_IMAGES, STEPS = 41, 9  # of 12 samples: 108, of three epochs
WHOLE = Share(0, 1, 12)
ON = {on: AugmentConfig(augment_on=on) for on in ("cpu", "device")}
# Grey levels of the mean over all views by which the device's pixels may differ: the hue of a jitter by 2 of an image.
PIPELINE_BOUND = 1.0


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    """41 images of different sizes, one of which is cut short."""
    root = tmp_path_factory.mktemp("images")
    path = write_photos(root, NUM_IMAGES, "png", "jpg", height=30, width=40)
    path.write_bytes(path.read_bytes()[:200])
    return open_source("", str(root), "train")


def _load(source: Source, share: Share, on: str, *steps: int, crops: CropConfig = CROPS, **options) -> Loaded:
    fields = [*crop_fields(IMAGE, crops, ON[on]), LabelField("targets", 3)]
    return load(source, share, *(steps or (0, STEPS)), image=IMAGE, fields=fields, on_bad_image="skip", **options)


@pytest.fixture(scope="module")
def references(source) -> dict[str, dict[str, torch.Tensor]]:
    """All steps on one rank in one piece, by --augment-on."""
    whole = {on: _load(source, WHOLE, on) for on in ON}
    assert all(batches.num_skipped for batches in whole.values())
    return {on: batches.tensors() for on, batches in whole.items()}


# The layout is not a hyper-parameter


@pytest.mark.sampled(5)
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize(
    ("share", "workers", "steps"),
    [
        (Share(0, 2, 6), 0, ()),
        (Share(0, 3, 1, 4), 0, ()),
        (Share(0, 1, 4, 3), 0, (5, STEPS)),
        (WHOLE, 1, (5, STEPS)),
        (Share(0, 2, 3, 2), 3, ()),
    ],
    ids=["dp 2", "dp 3, accumulation 4", "accumulation 3, resumed", "1 worker, resumed", "dp 2, 3 workers"],
)
def test_neither_layout_nor_workers_nor_resume_change_a_bit(source, references, on, share, workers, steps):
    """Would catch a view that depends on ranks, micro-batches, workers or the first step; a place in shared memory
    that is too small or is used again too early; and a replaced image that is another on another rank."""
    batches = _load(source, share, on, *steps, num_workers=workers)
    for name, found in batches.tensors().items():
        assert torch.equal(found, references[on][name][slice(*(steps or (0, STEPS)))]), name
    # All views of a batch are copied out of one place; with --augment-on device bytes differ in number.
    images = [batches[0].packed[name].pixels for name in ("images", "local_images")]
    assert on == "device" or not any(part.is_shared() for part in images)


def test_all_views_are_different(references):
    """Would catch a comparison of nothing: one view that is taken for all, or one draw for all samples or epochs."""
    for found in references.values():
        assert found["images"].shape == (STEPS, 12, 2, 3, 24, 24)
        assert found["local_images"].shape == (STEPS, 12, 3, 3, 16, 16)
        for name, num_views in (("images", 2), ("local_images", 3)):
            views = found[name].flatten(0, 2)
            assert len({view.numpy().tobytes() for view in views}) == STEPS * 12 * num_views


def test_the_keys_of_views_are_mixed_from_the_samples():
    """Would catch another order of mixing, by which the masks of the views would be those of other views."""
    keys = [5, -(2**63), 2**63 - 1]
    expected = [[randomness.mix(key, randomness.name_key("crop"), view) for view in range(3)] for key in keys]
    assert view_keys(np.array(keys), 3).tolist() == expected


# One crop, and one file


@pytest.mark.parametrize("num_local", [0, 1])
@pytest.mark.parametrize("on", ON)
def test_no_local_crop_and_a_single_one(source, on, num_local):
    """Would catch a dimension of views that is lost where there is one, and crops that change with their number."""
    found = _load(source, Share(0, 1, 2), on, 0, 3, crops=CropConfig(16, num_local)).tensors()
    more = _load(source, Share(0, 1, 2), on, 0, 3).tensors()
    assert torch.equal(found["images"], more["images"])
    assert ("local_images" in found) == bool(num_local)
    if num_local:
        assert torch.equal(found["local_images"], more["local_images"][:, :, :1])


def _as_jpeg(photo: Image.Image) -> bytes:
    file = io.BytesIO()
    photo.save(file, "jpeg", quality=90)
    return file.getvalue()


@pytest.mark.parametrize("how", ["exact", "fast"])
def test_a_file_is_decoded_once_for_all_views(how):
    """Would catch a decoder that runs for each view, and crops of a scaled image beside their boxes."""
    pytest.importorskip("simplejpeg")
    from ds_vit.data import decode

    views = MultiCrop(IMAGE, CROPS, AugmentConfig(decode=how))
    apart = []
    for number, (height, width) in enumerate([(150, 200), (150, 200), (640, 480), (1000, 900)]):
        data, key = _as_jpeg(smooth_photo(height, width, number)), randomness.mix(number)
        with mock.patch.object(decode, "_decode", wraps=decode._decode) as calls:
            found = views(decode.open_image(data, "x", how), key)
        assert calls.call_count == 1
        for ours, pillows in zip(found, views(decode.decode(data, "x"), key), strict=True):
            apart.append((ours.float() - pillows.float()).abs().mean().item())
    assert max(apart) == 0.0 if how == "exact" else 0.0 < np.mean(apart) < 2.0


def test_a_file_is_sent_once_for_the_views_of_a_kind():
    """Would catch bytes that are sent for each view, and views that are taken from another sample's file."""
    pytest.importorskip("torchcodec")
    from ds_vit.data.augment.on_device import augmented, packed
    from ds_vit.data.decode import open_image

    on_cpu = MultiCrop(IMAGE, CROPS, AugmentConfig(decode="exact"))
    on_device = MultiCrop(IMAGE, CROPS, AugmentConfig(decode="fast", augment_on="device"))
    files = [_as_jpeg(smooth_photo(90, 120, number)) for number in range(3)]
    for part, size in ((0, (24, 24)), (1, (16, 16))):
        cuts = [on_device(open_image(data, "x", "fast"), number)[part] for number, data in enumerate(files)]
        expected = [on_cpu(open_image(data, "x"), number)[part] for number, data in enumerate(files)]
        assert [sum(cut.data.size for cut in one) for one in cuts] == list(map(len, files))
        flat = [cut for one in cuts for cut in one]
        memory = torch.empty(sum(map(len, files)), dtype=torch.uint8)
        found = augmented(packed(flat, size, memory, len(cuts[0])), torch.device("cpu"))
        assert (found - torch.stack(expected).float()).abs().mean() < PIPELINE_BOUND


# The recipe


@pytest.mark.parametrize(
    ("view", "size", "scale", "blurred", "solarized"),
    [
        (0, (24, 24), (0.32, 1.0), 1.0, 0.0),
        (1, (24, 24), (0.32, 1.0), 0.1, 0.2),
        (2, (16, 16), (0.05, 0.32), 0.5, 0.0),
        (4, (16, 16), (0.05, 0.32), 0.5, 0.0),
    ],
)
def test_the_steps_are_those_of_dinos_recipe(view, size, scale, blurred, solarized):
    """Would catch another probability, range, order or scale of any step; test_transforms.py compares their pixels."""
    transform = MultiCrop(IMAGE, CROPS, ON["cpu"]).transforms[view]
    crop, expected = transform.crop._transform, transforms.RandomResizedCrop(size, scale)
    assert (crop.size, crop.scale, crop.ratio) == (expected.size, expected.scale, expected.ratio)
    assert crop.interpolation == InterpolationMode.BICUBIC
    *others, blur, solarize = transform.transforms
    assert list(map(repr, others)) == [
        repr(transforms.RandomHorizontalFlip()),
        repr(transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)),
        repr(transforms.RandomGrayscale(p=0.2)),
    ]
    assert (blur.p, blur.transforms[0].radius) == (blurred, (0.1, 2.0))
    assert repr(solarize) == repr(transforms.RandomSolarize(128, p=solarized))
