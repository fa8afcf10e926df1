"""Several crops of an image: pure functions of the sample's key, distributed as DINO's recipe in torchvision."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from micro_batches import in_global_order, load
from picture_folders import made, smooth_photo
from PIL import Image, ImageFilter
from scipy import stats
from torchvision import transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_modes_mapping

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.augment import crops as module
from ds_vit.data.augment.colours import as_pixels
from ds_vit.data.augment.crops import MultiCrop, view_keys
from ds_vit.data.augment.steps import apply
from ds_vit.data.batches import MicroBatch
from ds_vit.data.device import finish_images, finish_local_images
from ds_vit.data.sampler import Share
from ds_vit.data.settings import CropConfig, ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.tasks.task import Field, Task

IMAGE, CROPS = ImageConfig((24, 24)), CropConfig(local_size=16, num_local=3)
NUM_IMAGES, STEPS = 41, 9  # of 12 samples: 108, of three epochs
WHOLE = Share(0, 1, 12)
GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
ON = {on: AugmentConfig(augment_on=on) for on in ("cpu", "device")}
PARTS: dict[str, Callable[[MicroBatch], torch.Tensor]] = {
    "images": lambda batch: finish_images(batch, IMAGE, device="cpu"),
    "local_images": lambda batch: finish_local_images(batch, IMAGE, device="cpu"),
    "targets": lambda batch: batch.targets[: batch.num_rows],
}
# Grey levels of the mean over all views by which the device's pixels may differ: the hue of a jitter by 2 of an image.
PIPELINE_BOUND = 1.0


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    """41 images of different sizes, one of which is cut short."""
    root = tmp_path_factory.mktemp("images")
    for number in range(NUM_IMAGES):
        path = made(root / "train" / f"class{number % 3}" / f"{number}.{('png', 'jpg')[number % 2]}")
        smooth_photo(30 + number % 7, 40 + number % 9, number).save(path)
    path.write_bytes(path.read_bytes()[:200])
    return open_source("", str(root), "train")


def _load(source: Source, share: Share, on: str, *steps: int, **options) -> list[MicroBatch]:
    settings = {"image": IMAGE, "augment": ON[on], "mix": MixConfig(), "crops": CROPS, "on_bad_image": "skip"}
    return load(source, share, *(steps or (0, STEPS)), **{**settings, **options})


@pytest.fixture(scope="module")
def references(source) -> dict[str, dict[str, torch.Tensor]]:
    """All steps on one rank in one piece, by --augment-on."""
    found = {}
    for on in ON:
        batches = _load(source, WHOLE, on)
        assert sum(batch.num_skipped for batch in batches) > 0
        found[on] = {name: in_global_order(batches, WHOLE, finish) for name, finish in PARTS.items()}
    return found


# The layout is not a hyper-parameter


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
    for name, finish in PARTS.items():
        expected = references[on][name][slice(*(steps or (0, STEPS)))]
        assert torch.equal(in_global_order(batches, share, finish), expected), name
    # All views of a batch are copied out of one place; with --augment-on device bytes differ in number.
    assert on == "device" or not any(part.is_shared() for part in (batches[0].images, batches[0].local_images))


@pytest.mark.parametrize("on", ON)
def test_crops_that_are_drawn_by_rank_are_caught(source, monkeypatch, on):
    """Planted: a view is drawn from how many samples its rank has read, which repeats in one layout only."""
    views_of, num_read = MultiCrop.__call__, Counter()

    def drawn_by_rank(self, image, key):
        num_read[id(self)] += 1
        return views_of(self, image, num_read[id(self)])

    def images(share, start=0):
        num_read.clear()
        return in_global_order(_load(source, share, on, start, 2), share, PARTS["images"])

    monkeypatch.setattr(MultiCrop, "__call__", drawn_by_rank)
    alone = images(WHOLE)
    assert torch.equal(images(WHOLE), alone)
    assert not torch.equal(images(Share(0, 2, 6)), alone)
    assert not torch.equal(images(WHOLE, start=1), alone[1:])


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


# CPU and device


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_device_makes_the_views_of_the_cpu(source, references, device):
    """Would catch other rows, views or operations than the CPU's."""
    batches, scale = _load(source, WHOLE, "device"), 255 * torch.tensor(IMAGE.std)[:, None, None]
    for name, finish in (("images", finish_images), ("local_images", finish_local_images)):
        found = torch.stack([finish(batch, IMAGE, device=device).cpu() for batch in batches])
        apart = (found - references["cpu"][name]).abs() * scale
        assert 0.0 < apart.mean() <= PIPELINE_BOUND
        assert apart.mean(dim=(3, 4, 5)).max() <= 8 * PIPELINE_BOUND
    assert torch.equal(references["device"]["targets"], references["cpu"]["targets"])


def test_a_worker_hands_over_what_the_cpu_would_draw():
    """Would catch any other draw: Pillow, given what is handed over, makes the CPU path's pixels to the bit."""
    on_cpu, on_device = (MultiCrop(IMAGE, CROPS, augment) for augment in ON.values())
    for number in range(20):
        photo, key = smooth_photo(60 + number, 90, number), randomness.mix(number)
        for views, cuts in zip(on_cpu(photo, key), on_device(photo, key), strict=True):
            for view, cut in zip(views, cuts, strict=True):
                _, _, height, width = cut.crop.box
                resample = pil_modes_mapping[InterpolationMode(cut.crop.interpolation)]
                image = Image.fromarray(cut.data.reshape(height, width, 3)).resize(tuple(view.shape[1:]), resample)
                assert torch.equal(as_pixels(apply(image, cut.crop.operations)), view)


@pytest.mark.parametrize("num_local", [0, 1])
@pytest.mark.parametrize("on", ON)
def test_no_local_crop_and_a_single_one(source, on, num_local):
    """Would catch a dimension of views that is lost where there is one, and crops that change with their number."""
    found = _load(source, Share(0, 1, 2), on, 0, 3, crops=CropConfig(16, num_local))
    more = _load(source, Share(0, 1, 2), on, 0, 3)
    for batch, other in zip(found, more, strict=True):
        assert torch.equal(PARTS["images"](batch), PARTS["images"](other))
        if num_local:
            assert torch.equal(PARTS["local_images"](batch), PARTS["local_images"](other)[:, :1])
        else:
            assert batch.local_images is None


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


def _plain(view: int) -> transforms.Compose:
    """DINO's recipe of a view (0 and 1 global, 2 local) in torchvision's transforms."""
    size, scale = ((16, 16), (0.05, 0.32)) if view == 2 else ((24, 24), (0.32, 1.0))
    blur = transforms.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))))
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale, interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomApply([blur], p=(1.0, 0.1, 0.5)[view]),
            transforms.RandomSolarize(128, p=(0.0, 0.2, 0.0)[view]),
        ]
    )


def _photo() -> Image.Image:
    """Dark at the left, yellow and red, with noise: each step of the recipe shows in one of the statistics."""
    image = np.zeros((36, 40, 3))
    image[..., 0] = np.linspace(30, 160, 40)
    image[..., 1] = np.linspace(30, 60, 40)
    image[..., 2] = 20
    return Image.fromarray((image + np.random.default_rng(0).uniform(0, 90, (36, 40, 1))).astype(np.uint8))


STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flip": lambda views: views[..., -6:].mean(dim=(1, 2, 3)) - views[..., :6].mean(dim=(1, 2, 3)),
    "grey": lambda views: (views[:, 0] - views[:, 2]).abs().mean(dim=(1, 2)),
    "blur": lambda views: (views[:, 0, 1:] - views[:, 0, :-1]).abs().mean(dim=(1, 2)) / views[:, 0].std(dim=(1, 2)),
    "brightness": lambda views: views.mean(dim=(1, 2, 3)),
    "contrast": lambda views: views.std(dim=(1, 2, 3)),
    "solarize": lambda views: views.amax(dim=(1, 2, 3)),
    "hue": lambda views: (views[:, 1] - views[:, 2]).mean(dim=(1, 2)),
}
TRIES = 500


def _statistics(views: torch.Tensor) -> dict[str, np.ndarray]:
    return {name: of(views.float()).numpy() for name, of in STATISTICS.items()}


@pytest.fixture(scope="module")
def plain_views() -> list[torch.Tensor]:
    """Many views of one image by the plain recipe."""
    photo, found = _photo(), []
    state = random.getstate(), torch.get_rng_state()
    random.seed(1)
    torch.manual_seed(1)
    for view in range(3):
        recipe = _plain(view)
        found.append(torch.stack([as_pixels(recipe(photo)) for _ in range(TRIES)]))
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    return found


def _keyed_views(seed: int = 2) -> list[torch.Tensor]:
    views, photo = MultiCrop(IMAGE, CropConfig(16, 1), ON["cpu"]), _photo()
    made = [views(photo, key) for key in randomness.sample_keys(seed, 0, np.arange(TRIES)).tolist()]
    large, small = (torch.stack(part) for part in zip(*made, strict=True))
    return [large[:, 0], large[:, 1], small[:, 0]]


def test_the_views_are_distributed_as_the_plain_recipe(plain_views):
    """Would catch another probability, range, order or scale of any step, in any view."""
    for view, (ours, theirs) in enumerate(zip(_keyed_views(), plain_views, strict=True)):
        ours, theirs = _statistics(ours), _statistics(theirs)
        for name in STATISTICS:
            assert stats.ks_2samp(ours[name], theirs[name]).pvalue > 1e-4, (view, name)


@pytest.mark.parametrize(
    ("name", "value", "view"),
    [("_BLUR", (0.0, 0.9), 0), ("_BLUR", (0.0, 0.9), 1), ("_SOLARIZE", (0.2, 0.0), 1), ("_BLUR_OF_LOCAL", 0.2, 2)],
)
def test_another_probability_is_seen(plain_views, monkeypatch, name, value, view):
    """Planted: DINOv2's code, which blurs by 1 - p; solarise in the wrong view; a rare blur of small views."""
    monkeypatch.setattr(module, name, value)
    ours, theirs = _statistics(_keyed_views()[view]), _statistics(plain_views[view])
    assert min(stats.ks_2samp(ours[name], theirs[name]).pvalue for name in STATISTICS) < 1e-6


@pytest.mark.parametrize(("view", "scale"), [(0, (0.32, 1.0)), (1, (0.32, 1.0)), (2, (0.05, 0.32))])
def test_boxes_are_torchvisions(view, scale):
    """Would catch a scale of the other kind of view, or of the side in place of the area."""
    transform, size = MultiCrop(IMAGE, CROPS, ON["cpu"]).transforms[view], (400, 500)
    boxes = np.array([transform.draw(key, size)[0][0] for key in view_keys(np.arange(1500), 3)[:, view].tolist()])
    image, ratio = torch.empty((3, *size)), (3 / 4, 4 / 3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        get = transforms.RandomResizedCrop.get_params
        theirs = np.array([get(image, list(scale), list(ratio)) for _ in range(1500)])
    areas = boxes[:, 2] * boxes[:, 3] / (400 * 500)
    assert scale[0] - 0.01 < areas.min()
    assert areas.max() < scale[1] + 0.01
    for of in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3], lambda b: b[:, 0], lambda b: b[:, 1]):
        assert stats.ks_2samp(of(boxes), of(theirs)).pvalue > 1e-4


# A task's batch


@pytest.mark.parametrize("on", ON)
def test_a_task_gets_both_kinds_of_views(source, references, on):
    """Would catch local views in the field of the global ones, and a type that is not the field's."""
    task = SimpleNamespace(image=IMAGE, augment=ON[on], mix=MixConfig(), num_classes=3)
    fields = (
        Field("images", "first", "images", (2, 3, 24, 24)),
        Field("local_images", "first", "images", (3, 3, 16, 16), torch.bfloat16),
        Field("targets", "last", "targets", (), torch.int64),
    )
    (batch,) = _load(source, WHOLE, on, 0, 1)
    made = Task.tensors(task, fields, batch, training=True, device=torch.device("cpu"))
    assert torch.equal(made["images"], references[on]["images"][0])
    assert torch.equal(made["local_images"], references[on]["local_images"][0].bfloat16())
    assert [tuple(made[field.name].shape) for field in fields] == [(12, *field.shape) for field in fields]
    only = Task.tensors(task, fields[2:], batch, training=True, device=torch.device("cpu"))
    assert list(only) == ["targets"]
