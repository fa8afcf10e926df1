"""Micro-batches: the same pixels and targets for any number of ranks, micro-batches and workers, and from any step."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from micro_batches import in_global_order, load, loader_of
from picture_folders import encoded, made, smooth_photo
from PIL import Image
from torch.utils.data._utils.pin_memory import pin_memory

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.batches import MicroBatch, Slots
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.device import finish_images, finish_targets
from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.loader import Loader, eval_loader
from ds_vit.data.sampler import SampleOrder, Share
from ds_vit.data.settings import ALL_PARTS, ImageConfig, SampleSpec
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import WorkerLost

NUM_IMAGES, GLOBAL_BATCH = 41, 12  # 3 steps an epoch, 5 images left over
IMAGE = ImageConfig(img_size=(16, 20))
PLAIN = AugmentConfig(no_aug=True)
EVERYTHING = AugmentConfig(aa="rand-m9-mstd0.5-inc1", vflip=0.3, reprob=0.5, recount=2)
ON_DEVICE = EVERYTHING.model_copy(update={"augment_on": "device"})
MIX = MixConfig(mixup=0.8, cutmix=1.0)
WITHOUT_IMAGES = ALL_PARTS - {"images"}
SETTINGS = {"image": IMAGE, "augment": EVERYTHING, "mix": MIX}
LAYOUTS = [Share(0, 1, 12), Share(0, 1, 1, 12), Share(0, 1, 3, 4), Share(0, 2, 3, 2), Share(0, 4, 3), Share(0, 4, 1, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """41 images in 3 classes, of different sizes."""
    root = tmp_path_factory.mktemp("images")
    for number in range(NUM_IMAGES):
        path = made(root / "train" / f"class{number % 3}" / f"{number}.png")
        smooth_photo(14 + number % 7, 18 + number % 9, number).save(path)
    return root


@pytest.fixture(scope="module")
def source(folder) -> Source:
    return open_source("", str(folder), "train")


def _load(source: Source, share: Share, *args: int, **options) -> list[MicroBatch]:
    return load(source, share, *args, **{**SETTINGS, **options})


def _loader(source: Source, stop_step: int, **options) -> Loader:
    """All of one rank's micro-batches of 12 rows."""
    order = SampleOrder(len(source), 12, seed=7)
    return loader_of(source, order, LAYOUTS[0], range(stop_step), **SETTINGS, **options)


PARTS: dict[str, Callable[[MicroBatch], torch.Tensor]] = {
    "images": lambda batch: finish_images(batch, IMAGE, EVERYTHING, device="cpu"),
    "targets": lambda batch: finish_targets(batch, 3, MIX, device="cpu"),
    "keys": lambda batch: batch.keys[: batch.num_rows],
    "indices": lambda batch: batch.indices[: batch.num_rows],
}


@pytest.fixture(scope="module")
def reference(source) -> dict[str, torch.Tensor]:
    """Two epochs on one rank in one piece."""
    batches = _load(source, LAYOUTS[0])
    return {name: in_global_order(batches, LAYOUTS[0], finish) for name, finish in PARTS.items()}


# The layout is not a hyper-parameter


@pytest.mark.parametrize(
    ("share", "options"),
    [
        *((share, {}) for share in LAYOUTS[1:]),
        (LAYOUTS[4], {"repeats": 3}),
        (LAYOUTS[3], {"start": 2, "stop": 5, "num_workers": 1}),
        (LAYOUTS[3], {"start": 2, "stop": 5, "num_workers": 2}),
        (LAYOUTS[1], {"augment": ON_DEVICE}),
        (LAYOUTS[4], {"augment": ON_DEVICE, "start": 2}),
        (LAYOUTS[3], {"augment": ON_DEVICE, "start": 1, "num_workers": 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else " ".join(map(str, vars(value).values())),
)
def test_neither_layout_nor_workers_nor_the_first_step_change_a_bit(source, reference, share, options):
    """Would catch a pixel, target or key that depends on ranks, micro-batches, workers or the first step."""
    batches = _load(source, share, **options)
    steps = slice(options.get("start", 0), options.get("stop", 6))
    other = {name: value for name, value in options.items() if name in ("repeats", "augment")}
    whole = _load(source, LAYOUTS[0], **other) if other else []
    for name, finish in PARTS.items():
        expected = in_global_order(whole, LAYOUTS[0], finish) if other else reference[name]
        assert torch.equal(in_global_order(batches, share, finish), expected[steps]), name
    if "repeats" in options:
        assert [len(set(step.tolist())) for step in in_global_order(batches, share, PARTS["indices"])] == [4] * 6


def test_a_loader_survives_pickling(source, reference):
    """Would catch a batch that a spawned worker (macOS, Python 3.14) could not be asked for."""
    batches = pickle.loads(pickle.dumps(_loader(source, 6)._loader.dataset))
    assert torch.equal(PARTS["images"](batches[4]), reference["images"][4])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_process_generators_alone(source, workers):
    """Would catch a loader that moves the global generators, which then differ from rank to rank."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    _load(source, LAYOUTS[0], stop=2, num_workers=workers)
    list(eval_loader(source, SampleSpec(IMAGE), Share(0, 1, 8), num_workers=workers))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


# Pipelines: images on the first stage, targets on the last


class _Hooked(Source):
    """Another source whose every image calls a function first."""

    def __init__(self, source: Source, hook: Callable[[int], object]) -> None:
        self._source, self._hook = source, hook
        self.class_names = source.class_names

    def __len__(self) -> int:
        return len(self._source)

    def image(self, index: int) -> Image.Image:
        self._hook(index)
        return self._source.image(index)

    def target(self, index: int) -> int | np.ndarray:
        return self._source.target(index)

    def describe(self, index: int) -> str:
        return self._source.describe(index)


def _blind(source: Source) -> Source:
    return _Hooked(source, lambda index: pytest.fail("an image was decoded"))


@pytest.mark.parametrize("share", [LAYOUTS[0], LAYOUTS[4]], ids=["even", "odd"])
def test_targets_without_images_and_images_without_targets(source, reference, share):
    """Would catch a last stage that decodes images, or stages that disagree on how a pair is mixed."""
    targets = _load(_blind(source), share, reads=WITHOUT_IMAGES)
    assert all(batch.images is None and batch.erase is None for batch in targets)
    assert torch.equal(in_global_order(targets, share, PARTS["targets"]), reference["targets"])
    images = _load(source, share, reads=ALL_PARTS - {"targets"})
    assert all(batch.targets is None for batch in images)
    assert torch.equal(in_global_order(images, share, PARTS["images"]), reference["images"])
    keys = _load(_blind(source), share, reads=frozenset())
    assert torch.equal(in_global_order(keys, share, PARTS["keys"]), reference["keys"])


def test_an_even_micro_batch_loads_no_partners(source):
    """Would catch images that are decoded for nothing; an odd one loads one or two more than it owns."""
    assert {len(batch.images) for batch in _load(source, Share(0, 2, 6), stop=1)} == {6}
    assert [len(batch.images) for batch in _load(source, Share(0, 4, 3), stop=1)] == [4] * 4
    assert {len(batch.images) for batch in _load(source, Share(0, 4, 3), stop=1, mix=MixConfig())} == {3}


# Targets


def test_a_batch_without_mixing(source):
    """Would catch smoothing done twice (without mixing it belongs to the loss)."""
    (batch,) = _load(source, LAYOUTS[0], stop=1, mix=MixConfig(smoothing=0.1))
    targets = finish_targets(batch, 5, MixConfig(smoothing=0.1), device="cpu")
    assert targets.dtype == torch.int64
    assert targets.tolist() == [source.target(index) for index in batch.indices.tolist()]
    assert batch.mix is None


def test_mixing_stops_at_its_epoch(source, reference):
    """Would catch mixing that goes on, or targets that turn hard: timm's stay smoothed one-hot."""
    mix = MixConfig(mixup=0.8, cutmix=1.0, mixup_off_epoch=1, smoothing=0.1)
    batches = _load(source, LAYOUTS[4], mix=mix)
    targets = in_global_order(batches, LAYOUTS[4], PARTS["targets"])
    assert torch.equal(targets[:3], reference["targets"][:3])
    assert targets[3:].amax(dim=-1).allclose(torch.tensor(0.9 + 0.1 / 3))
    assert {len(batch.images) for batch in batches} == {3, 4}  # partners in the first epoch alone
    images = in_global_order(batches, LAYOUTS[4], PARTS["images"])
    unmixed = in_global_order(_load(source, LAYOUTS[0], mix=MixConfig()), LAYOUTS[0], PARTS["images"])
    assert torch.equal(images[3:], unmixed[3:])
    # After a rollback: one step more of the first epoch.
    shifted = _load(source, LAYOUTS[4], mix=mix, skipped_batches=1)
    assert torch.equal(in_global_order(shifted, LAYOUTS[4], PARTS["targets"])[:4], reference["targets"][:4])


def test_the_size_of_images_follows_the_optimizer_step(source):
    """Would catch a size, scheduled or drawn, that moves when batches were left out."""
    order = SampleOrder(len(source), 12, seed=7)
    scheduled, drawn = ImageSizes((8, 16, 24), firsts=(0, 1, 3)), ImageSizes((8, 16, 24), seed=3)
    expected = {scheduled: [8, 16, 16, 24, 24], drawn: [drawn.at(step) for step in range(5)]}
    assert len({*expected[drawn]}) > 1
    for sizes, skipped in itertools.product((scheduled, drawn), (0, 2)):
        steps, share = range(skipped, skipped + 5), Share(0, 1, 12)
        batches = loader_of(
            source, order, share, steps, skipped_batches=skipped, sizes=sizes, image=ImageConfig((24, 24))
        )
        assert [batch.images.shape[-1] for batch in batches] == expected[sizes]


def test_multi_label_targets(tmp_path):
    """Would catch multi-hot targets that lose a label, a class of the model, or their mixing."""
    rows = ["file,labels", *(f"{number}.png,a;{'b' if number % 2 else 'c'}" for number in range(6))]
    for number in range(6):
        Image.new("RGB", (9, 9), (40 * number, 0, 0)).save(made(tmp_path / "train" / f"{number}.png"))
    (tmp_path / "train" / "labels.csv").write_text("\n".join(rows))
    source = open_source("", str(tmp_path), "train")
    (batch,) = _load(source, Share(0, 1, 6), stop=1, mix=MixConfig())
    expected = torch.from_numpy(np.stack([source.target(index) for index in batch.indices.tolist()]))
    assert torch.equal(finish_targets(batch, 3, device="cpu"), expected)
    assert torch.equal(finish_targets(batch, 5, device="cpu"), torch.nn.functional.pad(expected, (0, 2)))
    mix = MixConfig(mixup=1.0, smoothing=0.1)
    (mixed,) = _load(source, Share(0, 1, 6), stop=1, mix=mix)
    lam = mixed.mix.lam[:, None]
    smooth = expected * 0.9 + 0.05
    assert torch.allclose(
        finish_targets(mixed, 3, mix, device="cpu"), smooth * lam + smooth[[1, 0, 3, 2, 5, 4]] * (1 - lam)
    )


# What cannot work, and images that cannot be decoded


def test_invalid_settings_are_refused(source):
    """Would catch a row without a partner."""
    with pytest.raises(ValueError, match=r"even global batch, not 9 \(3 ranks x 1 micro-batches x 3\)"):
        _load(source, Share(0, 3, 3))
    _load(source, Share(0, 3, 3), stop=1, mix=MixConfig())


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    """The data of `folder`, in noise, with every fourth file cut off."""
    root = tmp_path_factory.mktemp("damaged")
    for split in ("train", "val"):
        for number in range(NUM_IMAGES):
            path = made(root / split / f"class{number % 3}" / f"{number}.png")
            path.write_bytes(encoded(number)[: 200 if number % 4 == 0 else None])
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_or_missing_image_ends_training_in_one_line(damaged, tmp_path, workers):
    """Would catch a worker's traceback in place of the file's name, or a truncated image that is trained on."""
    source = open_source("", str(damaged), "train")
    with pytest.raises(ImageDecodeError, match=r"^\S+/class\d/\d+\.png: .* \(200 bytes; .*$") as error:
        _load(source, LAYOUTS[0], num_workers=workers)
    assert "\n" not in str(error.value)
    Image.new("RGB", (8, 8)).save(made(tmp_path / "train" / "a" / "0.png"))
    source = open_source("", str(tmp_path), "train")
    (tmp_path / "train" / "a" / "0.png").unlink()
    with pytest.raises(FileNotFoundError) as missing:
        _load(source, Share(0, 1, 1), num_workers=workers, mix=MixConfig())
    assert missing.value.filename.endswith("0.png")


def test_skipped_images_are_replaced_alike_in_every_layout_and_counted(damaged):
    """Would catch a replacement that depends on the rank, a stage that keeps the bad image's label, a wrong count."""
    source = open_source("", str(damaged), "train")
    whole = _load(source, LAYOUTS[0], on_bad_image="skip")
    expected = {name: in_global_order(whole, LAYOUTS[0], finish) for name, finish in PARTS.items()}
    bad = {i for i in range(NUM_IMAGES) if int(Path(source.describe(i)).stem) % 4 == 0}
    used = expected["indices"].flatten().tolist()
    for share, options in (
        (LAYOUTS[4], {}),
        (LAYOUTS[3], {"num_workers": 2}),
        (LAYOUTS[4], {"reads": WITHOUT_IMAGES}),
    ):
        batches = _load(source, share, on_bad_image="skip", **options)
        for name, finish in PARTS.items():
            if name != "images" or "reads" not in options:
                assert torch.equal(in_global_order(batches, share, finish), expected[name]), name
        assert sum(batch.num_skipped for batch in batches) == sum(index in bad for index in used) > 0


@pytest.mark.parametrize("reads", [ALL_PARTS, WITHOUT_IMAGES], ids=["images", "no images"])
def test_a_replacement_brings_its_own_target(tmp_path, reads):
    """Would catch the pixels of one class trained under the label of the bad image's class."""
    for number in range(24):
        path = made(tmp_path / "train" / f"class{number % 3}" / f"{number}.png")
        Image.new("RGB", (8, 8), (100 * (number % 3), 0, 0)).save(path)
        if number % 2:
            path.write_bytes(b"no image")
    source = open_source("", str(tmp_path), "train")
    options = {"augment": PLAIN, "mix": MixConfig(), "stop": 2, "on_bad_image": "skip"}
    batches = _load(source, Share(0, 1, 12), **options)
    shown = torch.cat([batch.images[:, 0, 0, 0] // 100 for batch in batches])
    told = torch.cat([batch.targets for batch in _load(source, Share(0, 1, 12), reads=reads, **options)])
    assert torch.equal(shown.long(), told)
    asked = [source.target(index) for batch in batches for index in batch.indices.tolist()]
    assert told.tolist() != asked


def test_a_source_of_bad_images_alone_ends_training(tmp_path):
    """Would catch an endless search for a replacement."""
    for number in range(4):
        made(tmp_path / "train" / "a" / f"{number}.png").write_bytes(b"no image")
    source = open_source("", str(tmp_path), "train")
    with pytest.raises(ImageDecodeError, match="so are 16 replacements"):
        _load(source, Share(0, 1, 4), on_bad_image="skip")


# Evaluation


@pytest.mark.parametrize(("dp_size", "batch"), [(1, 8), (4, 3)])
def test_evaluation_sees_every_image_once_with_its_target(source, dp_size, batch):
    """Would catch images lost or doubled in the remainder, or an image with the target of another."""
    seen: dict[int, tuple[bytes, int]] = {}
    for rank in range(dp_size):
        loader = eval_loader(source, SampleSpec(IMAGE), Share(rank, dp_size, batch))
        for part in loader:
            images, targets = finish_images(part, IMAGE, device="cpu"), finish_targets(part, 3, device="cpu")
            assert len(images) == len(targets) == batch
            for row in torch.nonzero(part.valid[: part.num_rows]).flatten().tolist():
                assert part.indices[row].item() not in seen
                seen[part.indices[row].item()] = (images[row].numpy().tobytes(), targets[row].item())
    assert sorted(seen) == list(range(NUM_IMAGES))
    assert [seen[i][1] for i in range(NUM_IMAGES)] == [source.target(i) for i in range(NUM_IMAGES)]
    (whole,) = eval_loader(source, SampleSpec(IMAGE), Share(0, 1, 41))
    images = finish_images(whole, IMAGE, device="cpu")
    assert [seen[i][0] for i in range(41)] == [image.numpy().tobytes() for image in images]


def test_an_evaluation_can_be_repeated_with_its_workers(source):
    """Would catch a second evaluation that is empty or differs."""
    loader = eval_loader(source, SampleSpec(IMAGE), Share(0, 1, 16), num_workers=2)
    first, second = ([batch.images for batch in loader] for _ in range(2))
    assert len(first) == len(second) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class _Leftover:
    """In a ring, so that only the garbage collector ends it; says in which process."""

    def __init__(self, file: Path) -> None:
        self.ring, self.file = self, file

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.slow
def test_a_worker_ends_nothing_of_its_parent(source, tmp_path):
    """Would catch an iterator of an earlier evaluation that a worker collects, and whose end closes its own queues."""
    hooked = _Hooked(source, lambda index: index or gc.collect())
    loader = eval_loader(hooked, SampleSpec(IMAGE), Share(0, 1, 8), num_workers=1)
    gc.disable()
    gc.freeze()  # What earlier tests left is much, and the worker would copy all of it.
    _Leftover(tmp_path / "ended in")
    try:
        list(loader)
    finally:
        gc.unfreeze()
        gc.enable()
    gc.collect()
    assert (tmp_path / "ended in").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("reads", [ALL_PARTS, WITHOUT_IMAGES], ids=["images", "no images"])
def test_skipped_evaluation_images_do_not_count(damaged, reads):
    """Would catch a bad image counted as a wrong answer, or by one stage only, and labels that decode."""
    source = open_source("", str(damaged), "val")
    batches = list(eval_loader(source, SampleSpec(IMAGE, reads), Share(0, 1, 16), on_bad_image="skip"))
    valid = torch.cat([batch.valid for batch in batches])
    indices = torch.cat([batch.indices for batch in batches])[valid].tolist()
    good = [i for i in range(NUM_IMAGES) if int(Path(source.describe(i)).stem) % 4]
    assert indices == good
    assert sum(batch.num_skipped for batch in batches) == NUM_IMAGES - len(good)
    with pytest.raises(ImageDecodeError):
        list(eval_loader(source, SampleSpec(IMAGE), Share(0, 1, 16)))
    (labels,) = eval_loader(_blind(source), SampleSpec(IMAGE, WITHOUT_IMAGES), Share(0, 1, 41))
    assert labels.targets.tolist() == [source.target(i) for i in range(41)]


def _killing(deadly: int) -> Callable[[int], object]:
    """A hook that kills the process at one image, as the kernel does where memory ends."""
    return lambda index: os.kill(os.getpid(), signal.SIGKILL) if index == deadly else None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_ends_training_in_one_line(source, workers):
    """Would catch a run that waits for ever, or a traceback that does not say which image it was."""
    indices, _ = SampleOrder(len(source), 12, seed=7).rows(2, LAYOUTS[0].rows(0))
    deadly = _Hooked(source, _killing(int(indices[5])))
    name = re.escape(source.describe(int(indices[5])))
    before = time.monotonic()
    with pytest.raises(WorkerLost, match=rf"was killed by SIGKILL; it was reading {name}; .*--workers") as error:
        _load(deadly, LAYOUTS[0], num_workers=workers)
    assert time.monotonic() - before < 10
    assert error.value.exit_code == 72
    assert "\n" not in str(error.value)


def test_a_worker_that_is_killed_with_batches_on_their_way(source):
    """Would catch a traceback of the socket that it no longer serves, and wrong advice where /dev/shm is too small."""
    others = set(multiprocessing.active_children())
    batches = iter(_loader(source, 30, num_workers=1))
    next(batches)
    time.sleep(0.5)  # the next ones lie in its queue
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGBUS)
    with pytest.raises(WorkerLost, match=r"SIGBUS.*through /dev/shm \([\d,]+ MiB, .*--shm-size"):
        list(batches)


@pytest.mark.parametrize("workers", [1, 2])
def test_images_stay_as_they_came(source, reference, workers):
    """Would catch a place in shared memory that is used again before its images are copied out."""
    alone, shared = _loader(source, 24), _loader(source, 24, num_workers=workers)
    kept, given_up = [], iter(shared)
    next(given_up)  # whose workers go on in memory of their own
    for number, batch in enumerate(shared):
        time.sleep(0.2 * (number % 8 == 0))  # workers have done what they were asked for
        kept.append(batch.images)
        # No file of shared memory a micro-batch: small tensors come through the pipe, images are copied out.
        assert not any(part.is_shared() for part in batch[:3])
    assert len(kept) == 24 * LAYOUTS[0].accumulation
    assert all(torch.equal(one.images, images) for one, images in zip(alone, kept, strict=True))


def test_pinned_images_are_a_copy(monkeypatch):
    """Would catch a place in shared memory that torch's pinning thread passes on as it is."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # which needs a GPU
    slots = Slots(2, 20)
    written = slots.zeros(1, (4, 5)).fill_(7)
    pinned = pin_memory(pickle.loads(pickle.dumps((slots.sent(written), 3))))
    written.fill_(0)
    assert torch.equal(pinned[0], torch.full((4, 5), 7, dtype=torch.uint8))


_GIVEN_UP = """
import sys
from ds_vit.data.loader import eval_loader
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig, SampleSpec
from ds_vit.data.sources.datasets import open_source
source, spec = open_source("", sys.argv[1], "train"), SampleSpec(ImageConfig((16, 20)))
loader = eval_loader(source, spec, Share(0, 1, 2), num_workers=1)
sys.held = iter(loader)
print(next(sys.held).num_rows)
"""


@pytest.mark.slow
def test_an_iteration_that_is_given_up_does_not_outlive_its_process(folder):
    """Would catch a process that waits at its end for workers that ignore SIGTERM, or that ends with a traceback."""
    command = [sys.executable, "-c", _GIVEN_UP, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert "Traceback" not in done.stderr, done.stderr


def test_too_little_shared_memory_says_how_much_is_needed(monkeypatch):
    # Catches: torch's "unable to allocate shared memory" as a traceback with code 1.
    def refuse(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    with pytest.raises(WorkerLost, match=r"4 loader processes need 24 MiB of .*No space left.*--shm-size"):
        Slots(4, 2 * 2**20)
