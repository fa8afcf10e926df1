"""Micro-batches: the same pixels and targets for any number of ranks, micro-batches and workers, and from any step."""

from __future__ import annotations

import copy
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
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from micro_batches import Loaded, fields_of, load, loader_of
from picture_folders import encoded, made, write_photos
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.data import _utils as torch_loading
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.field import MicroBatch, finished
from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.loader import Loader
from ds_vit.data.rows import EvalRows, TrainRows
from ds_vit.data.sampler import SampleOrder, Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.slots import Slots
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import WorkerLost

NUM_IMAGES, GLOBAL_BATCH = 41, 12  # 3 steps an epoch, 5 images left over
IMAGE = ImageConfig(img_size=(16, 20))
PLAIN = AugmentConfig(no_aug=True)
EVERYTHING = AugmentConfig(aa="rand-m9-mstd0.5-inc1", vflip=0.3, reprob=0.5, recount=2)
ON_DEVICE = EVERYTHING.model_copy(update={"augment_on": "device"})
MIX = MixConfig(mixup=0.8, cutmix=1.0)
SETTINGS = {"image": IMAGE, "augment": EVERYTHING, "mix": MIX}
LAYOUTS = [Share(0, 1, 12), Share(0, 1, 1, 12), Share(0, 1, 3, 4), Share(0, 2, 3, 2), Share(0, 4, 3), Share(0, 4, 1, 3)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch) -> None:
    """Wait 0.2 s for a worker, in the place of 5 s; also where an iterator that was given up is collected."""
    monkeypatch.setattr(torch_loading, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """41 images in 3 classes, of different sizes."""
    root = tmp_path_factory.mktemp("images")
    write_photos(root, NUM_IMAGES, "png")
    return root


@pytest.fixture(scope="module")
def source(folder) -> Source:
    return open_source("", str(folder), "train")


def _load(source: Source, share: Share, *args: int, **options) -> Loaded:
    return load(source, share, *args, **{**SETTINGS, **options})


def _loader(source: Source, stop_step: int, **options) -> Loader:
    """All of one rank's micro-batches of 12 rows."""
    rows = TrainRows(SampleOrder(len(source), 12, seed=7), LAYOUTS[0], MIX, IMAGE.img_size)
    return loader_of(source, fields_of(source, **SETTINGS), rows, range(stop_step), **options)


def _eval_loader(source: Source, batch: int, rank: int = 0, dp_size: int = 1, **options) -> Loader:
    rows = EvalRows(len(source), Share(rank, dp_size, batch))
    return loader_of(source, fields_of(source, IMAGE), rows, **options)


@pytest.fixture(scope="module")
def reference(source) -> dict[str, torch.Tensor]:
    """Two epochs on one rank in one piece."""
    return _load(source, LAYOUTS[0]).tensors()


# The layout is not a hyper-parameter


@pytest.mark.sampled(4)
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
    found = _load(source, share, **options).tensors()
    steps = slice(options.get("start", 0), options.get("stop", 6))
    other = {name: value for name, value in options.items() if name in ("repeats", "augment")}
    whole = _load(source, LAYOUTS[0], **other).tensors() if other else reference
    for name, expected in whole.items():
        assert torch.equal(found[name], expected[steps]), name
    if "repeats" in options:
        assert [len(set(step.tolist())) for step in found["indices"]] == [4] * 6


def test_a_loader_survives_pickling(source, reference):
    """Would catch a batch that a spawned worker (macOS, Python 3.14) could not be asked for."""
    reader = pickle.loads(pickle.dumps(_loader(source, 6)._loader.dataset))
    made = finished(fields_of(source, **SETTINGS), reader[4], device="cpu")
    assert torch.equal(made["images"], reference["images"][4])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_process_generators_alone(source, workers):
    """Would catch a loader that moves the global generators, which then differ from rank to rank."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    _load(source, LAYOUTS[0], stop=2, num_workers=workers)
    list(_eval_loader(source, 8, num_workers=workers))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


# Pipelines: images on the first stage, targets on the last


def _hooked(source: Source, hook: Callable[[int], object]) -> Source:
    """The source, which calls a function before it reads an image."""
    hooked = copy.copy(source)
    hooked.encoded = lambda index: (hook(index), source.encoded(index))[1]
    return hooked


def _blind(source: Source) -> Source:
    return _hooked(source, lambda index: pytest.fail("an image was decoded"))


@pytest.mark.parametrize("share", [LAYOUTS[0], LAYOUTS[4]], ids=["even", "odd"])
def test_targets_without_images_and_images_without_targets(source, reference, share):
    """Would catch a last stage that decodes images, or stages that disagree on how a pair is mixed."""
    for only, seen in (("targets", _blind(source)), ("images", source), ("", _blind(source))):
        batches = _load(seen, share, reads=[only] if only else [])
        assert {name for batch in batches for name in batch.packed} == ({only} if only else set())
        for name, tensor in batches.tensors().items():
            assert torch.equal(tensor, reference[name]), name


def test_an_even_micro_batch_loads_no_partners(source):
    """Would catch images that are decoded for nothing; an odd one loads one or two more than it owns."""

    def rows(share: Share, **options) -> list[int]:
        return [len(batch.packed["images"].pixels) for batch in _load(source, share, stop=1, **options)]

    assert rows(Share(0, 2, 6)) == [6] * 2
    assert rows(Share(0, 4, 3)) == [4] * 4
    assert rows(Share(0, 4, 3), mix=MixConfig()) == [3] * 4


# Targets


def test_a_batch_without_mixing(source):
    """Would catch smoothing done twice (without mixing it belongs to the loss)."""
    mix = MixConfig(smoothing=0.1)
    batches = _load(source, LAYOUTS[0], stop=1, mix=mix, fields=fields_of(source, IMAGE, PLAIN, mix, num_classes=5))
    targets = batches.tensors()["targets"]
    assert targets.dtype == torch.int64
    assert targets[0].tolist() == [source.target(index) for index in batches[0].rows.indices.tolist()]
    assert batches[0].rows.mix is None


def test_mixing_stops_at_its_epoch(source, reference):
    """Would catch mixing that goes on, or targets that turn hard: timm's stay smoothed one-hot."""
    mix = MixConfig(mixup=0.8, cutmix=1.0, mixup_off_epoch=1, smoothing=0.1)
    batches = _load(source, LAYOUTS[4], mix=mix)
    found = batches.tensors()
    assert torch.equal(found["targets"][:3], reference["targets"][:3])
    assert found["targets"][3:].amax(dim=-1).allclose(torch.tensor(0.9 + 0.1 / 3))
    assert {len(batch.rows.keys) for batch in batches} == {3, 4}  # partners in the first epoch alone
    assert torch.equal(found["images"][3:], _load(source, LAYOUTS[0], mix=MixConfig()).tensors()["images"][3:])
    # After a rollback: one step more of the first epoch.
    shifted = _load(source, LAYOUTS[4], mix=mix, skipped_batches=1).tensors()
    assert torch.equal(shifted["targets"][:4], reference["targets"][:4])


def test_the_size_of_images_follows_the_optimizer_step(source):
    """Would catch a size, scheduled or drawn, that moves when batches were left out."""
    scheduled, drawn = ImageSizes((8, 16, 24), firsts=(0, 1, 3)), ImageSizes((8, 16, 24), seed=3)
    expected = {scheduled: [8, 16, 16, 24, 24], drawn: [drawn.at(step) for step in range(5)]}
    assert len({*expected[drawn]}) > 1
    for sizes, skipped in itertools.product((scheduled, drawn), (0, 2)):
        batches = load(
            source, LAYOUTS[0], skipped, skipped + 5, skipped_batches=skipped, sizes=sizes, image=ImageConfig((24, 24))
        )
        assert [batch.packed["images"].pixels.shape[-1] for batch in batches] == expected[sizes]


def test_multi_label_targets(tmp_path):
    """Would catch multi-hot targets that lose a label, a class of the model, or their mixing."""
    rows = ["file,labels", *(f"{number}.png,a;{'b' if number % 2 else 'c'}" for number in range(6))]
    for number in range(6):
        Image.new("RGB", (9, 9), (40 * number, 0, 0)).save(made(tmp_path / "train" / f"{number}.png"))
    (tmp_path / "train" / "labels.csv").write_text("\n".join(rows))
    source = open_source("", str(tmp_path), "train")

    def found(mix: MixConfig, num_classes: int) -> tuple[MicroBatch, torch.Tensor]:
        fields = fields_of(source, IMAGE, PLAIN, mix, num_classes=num_classes)
        batches = _load(source, Share(0, 1, 6), stop=1, mix=mix, fields=fields)
        return batches[0], batches.tensors()["targets"][0]

    batch, targets = found(MixConfig(), 3)
    expected = torch.from_numpy(np.stack([source.target(index) for index in batch.rows.indices.tolist()]))
    assert torch.equal(targets, expected)
    assert torch.equal(found(MixConfig(), 5)[1], torch.nn.functional.pad(expected, (0, 2)))
    batch, mixed = found(MixConfig(mixup=1.0, smoothing=0.1), 3)
    lam, smooth = batch.rows.mix.lam[:, None], expected * 0.9 + 0.05
    assert torch.allclose(mixed, smooth * lam + smooth[[1, 0, 3, 2, 5, 4]] * (1 - lam))


# What cannot work, and images that cannot be decoded


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_or_missing_image_ends_training_in_one_line(tmp_path, workers):
    """Would catch a worker's traceback in place of the file's name, a truncated image that is trained on, or workers
    that run on as long as the error is kept, whose traceback holds their iterator."""
    others = set(multiprocessing.active_children())
    path, options = made(tmp_path / "train" / "a" / "0.png"), {"num_workers": workers, "mix": MixConfig()}
    path.write_bytes(encoded(0)[:200])
    source = open_source("", str(tmp_path), "train")
    with pytest.raises(ImageDecodeError, match=r"^\S+/a/0\.png: .* \(200 bytes; .*$") as error:
        _load(source, Share(0, 1, 1), **options)
    assert "\n" not in str(error.value)
    path.unlink()  # on one host only, it may be
    with pytest.raises(FileNotFoundError) as missing:
        _load(source, Share(0, 1, 1), **options)
    assert missing.value.filename.endswith("0.png")
    for target in ("nowhere", "0.png", "../../test_file/x"):  # nothing, itself, and below a file
        (tmp_path / "test_file").touch()
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(ImageDecodeError, match=rf"^\S+/a/0\.png: .* \(a broken link to {target}\); "):
            _load(source, Share(0, 1, 1), **options)
    for worker in set(multiprocessing.active_children()) - others:
        worker.join(5)
        assert worker.exitcode == -signal.SIGKILL


# Evaluation


@pytest.mark.parametrize(("dp_size", "batch"), [(1, 8), (4, 3)])
def test_evaluation_sees_every_image_once_with_its_target(source, dp_size, batch):
    """Would catch images lost or doubled in the remainder, or an image with the target of another."""

    def read(batch: int, dp_size: int) -> dict[str, torch.Tensor]:
        parts = [part for rank in range(dp_size) for part in _eval_loader(source, batch, rank, dp_size)]
        made = [{"index": p.rows.indices, **finished(fields_of(source, IMAGE), p, device="cpu")} for p in parts]
        assert {len(tensor) for tensors in made for tensor in tensors.values()} == {batch}
        valid = torch.cat([part.rows.valid for part in parts])
        whole = {name: torch.cat([tensors[name] for tensors in made])[valid] for name in made[0]}
        return {name: tensor[whole["index"].argsort()] for name, tensor in whole.items()}

    found = read(batch, dp_size)
    assert found["index"].tolist() == list(range(NUM_IMAGES))
    assert found["targets"].tolist() == [source.target(i) for i in range(NUM_IMAGES)]
    assert torch.equal(found["images"], read(41, 1)["images"])


def test_an_evaluation_can_be_repeated_with_its_workers(source):
    """Would catch a second evaluation that is empty or differs."""
    loader = _eval_loader(source, 16, num_workers=2)
    first, second = ([batch.packed["images"].pixels for batch in loader] for _ in range(2))
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
    hooked = _hooked(source, lambda index: index or gc.collect())
    loader = _eval_loader(hooked, 8, num_workers=1)
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


def _killing(deadly: int) -> Callable[[int], object]:
    """A hook that kills the process at one image, as the kernel does where memory ends."""
    return lambda index: os.kill(os.getpid(), signal.SIGKILL) if index == deadly else None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_ends_training_in_one_line(source, workers):
    """Would catch a run that waits for ever, or a traceback that does not say which image it was."""
    indices, _ = SampleOrder(len(source), 12, seed=7).rows(2, LAYOUTS[0].rows(0))
    deadly = _hooked(source, _killing(int(indices[5])))
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


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_images_stay_as_they_came(source, reference, workers):
    """Would catch a place in shared memory that is used again before its images are copied out."""
    alone, shared = _loader(source, 24), _loader(source, 24, num_workers=workers)
    kept, given_up = [], iter(shared)
    next(given_up)  # whose workers go on in memory of their own
    for number, batch in enumerate(shared):
        time.sleep(0.2 * (number % 8 == 0))  # workers have done what they were asked for
        kept.append(batch.packed["images"].pixels)
        # No file of shared memory a micro-batch: small tensors come through the pipe, images are copied out.
        assert not any(part.is_shared() for part in (kept[-1], batch.packed["targets"], *batch.rows[:2]))
    assert len(kept) == 24 * LAYOUTS[0].accumulation
    assert all(torch.equal(one.packed["images"].pixels, images) for one, images in zip(alone, kept, strict=True))


def test_pinned_images_are_a_copy(monkeypatch):
    """Would catch a place in shared memory that torch's pinning thread passes on as it is."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # which needs a GPU
    slots = Slots(2, 20)
    slots.begin(1)
    written = slots.empty((4, 5), torch.uint8).fill_(7)
    pinned = pin_memory(pickle.loads(pickle.dumps((slots.sent(written), 3))))
    written.fill_(0)
    assert torch.equal(pinned[0], torch.full((4, 5), 7, dtype=torch.uint8))


class _Sending(Dataset):
    """Micro-batches of some small tensors."""

    reading, slots, most_bytes = None, None, 0

    def __getitem__(self, number: int) -> list[torch.Tensor]:
        return [torch.zeros(10_000, dtype=torch.uint8) for _ in range(8)]


def test_an_early_end_waits_for_no_rest_of_a_batch_that_is_pinned(monkeypatch):
    """Would catch a worker that is killed as it sends, for whose bytes torch's pinning thread waits for ever."""
    send = multiprocessing.connection.Connection._send

    def slowly(self: multiprocessing.connection.Connection, data: bytes) -> None:
        send(self, data[: len(data) // 2])
        time.sleep(0.2)
        send(self, data[len(data) // 2 :])

    monkeypatch.setattr(multiprocessing.connection.Connection, "_send", slowly)
    simulated = {"is_available": True, "current_accelerator": torch.device("cpu"), "current_device_index": 0}
    for name, value in {**simulated, "set_device_index": None}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch_loading.pin_memory, "pin_memory", lambda data, device: data)  # which needs a GPU
    batches = iter(Loader(_Sending(), range(9), num_workers=1, pin_memory=True))
    next(batches)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


_GIVEN_UP = """
import sys
from ds_vit.data.fields import ImageField
from ds_vit.data.loader import Loader
from ds_vit.data.reader import Reader
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import open_source
source, images = open_source("", sys.argv[1], "train"), ImageField("images", ImageConfig((16, 20)))
rows = EvalRows(len(source), Share(0, 1, 2))
sys.held = iter(Loader(Reader(source, [images], rows), range(len(rows)), num_workers=1))
print(next(sys.held).rows.num_rows)
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
