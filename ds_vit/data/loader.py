"""The loaders that deliver micro-batches (batches.py), read in worker processes.

A training loader lives for the whole run: its sampler is the range of micro-steps t = step * accumulation + index,
across epochs. What a micro-batch holds is a pure function of t and the rank's share, so that neither the number of
workers nor the step a run starts from can change it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import shutil
import signal
import weakref
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.config.image_sizes import ImageSizes
from ds_vit.data.augment.handover import worker_transform
from ds_vit.data.augment.transforms import eval_transform
from ds_vit.data.batches import Batches, EvalBatches, Failure, MicroBatch, Reader, TrainBatches
from ds_vit.data.sampler import SampleOrder, Share, num_evaluation_batches
from ds_vit.data.settings import ImageConfig
from ds_vit.data.slots import PREFETCHED, InSlot
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, WorkerLost
from ds_vit.fault_tolerance.signals import ignore_in_worker


class Loader:
    """Delivers micro-batches in order.

    Args:
        batches: what is read.
        numbers: which of them, in this order.
        num_workers: processes that read; 0 reads in this one.
        pin_memory: page-locked memory for fast copies to a GPU.
        cores: that the processes are to run on, where there are enough for all; empty for any.

    Iterating raises the UserError or OSError that a worker met, as it was: one line that names the file; and WorkerLost
    where a worker was killed, which names the file that it was at.
    """

    def __init__(
        self,
        batches: Batches,
        numbers: range,
        num_workers: int,
        pin_memory: bool,
        cores: frozenset[int] = frozenset(),
    ) -> None:
        self._batches = batches
        self._reader = batches.reader
        if num_workers:
            self._reader.reading = torch.full((num_workers,), -1, dtype=torch.int64).share_memory_()
        self._loader = DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            num_workers=num_workers,
            prefetch_factor=PREFETCHED if num_workers else None,
            collate_fn=_inlined if num_workers else _as_it_is,
            worker_init_fn=partial(_begin, cores if num_workers <= len(cores) else None) if num_workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each iteration draws a seed from the process's generator
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Generator[MicroBatch, None, None]:
        others = set(multiprocessing.active_children())
        # An iterator that was given up may still wait for the garbage collector. Collected in a worker, it would close
        # files whose numbers are those of the worker's own queues. What is frozen here, no worker collects.
        gc.freeze()
        own_handler = signal.getsignal(signal.SIGCHLD)
        # Of this iteration alone: the workers of another, given up, may still write.
        slots = self._batches.slots(self._loader.num_workers) if self._loader.num_workers else None
        self._reader.slots = slots
        items = iter(self._loader)
        self._reader.slots = None
        gc.unfreeze()
        workers = sorted(set(multiprocessing.active_children()) - others, key=lambda worker: worker.pid or 0)
        _end_with_this_process(workers)
        if workers:
            with contextlib.suppress(ValueError):  # this is not the main thread
                signal.signal(signal.SIGCHLD, own_handler)  # torch's would raise an error wherever the run is
        while True:
            self._check(workers)
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception:  # torch waits for a worker that is no more, or finds its end of a socket closed
                multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
                self._check(workers)
                raise
            if isinstance(item, Failure):
                raise item.error
            yield _restored(item)

    def _check(self, workers: Sequence[BaseProcess]) -> None:
        """Raise WorkerLost if a worker has ended, which none does before the last batch is out."""
        for number, worker in enumerate(workers):
            if (code := worker.exitcode) is None:
                continue
            at = -1 if self._reader.reading is None else int(self._reader.reading[number])
            last = f"; it had begun to read {self._reader.source.describe(at)}" if at >= 0 else ""
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
            why = _FULL.format(_size_of("/dev/shm")) if code == -signal.SIGBUS else _NO_MEMORY
            raise WorkerLost(
                f"loader process {number} (pid {worker.pid}) {how}{last}; {why}; start again with --resume auto"
            )


_NO_MEMORY = "where the machine had no memory left (dmesg says), use fewer --workers"
# Who writes to shared memory that there is no room for gets SIGBUS.
_FULL = (
    "images are handed over through /dev/shm ({}): where it was full, make it larger (docker run --shm-size 8g, or "
    "--ipc=host; in Kubernetes an emptyDir of medium Memory there), or use fewer --workers or a smaller micro-batch"
)


def _begin(cores: frozenset[int] | None, worker: int) -> None:
    """What a worker process does first."""
    ignore_in_worker(worker)
    if cores:
        os.sched_setaffinity(0, cores)


def _size_of(folder: str) -> str:
    try:
        size = shutil.disk_usage(folder)
    except OSError as error:
        return error.strerror or str(error)
    return f"{size.total / 2**20:,.0f} MiB, {size.free / 2**20:,.0f} MiB of which are free now"


_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_workers_of = 0  # the process that they are to end with


def _end_with_this_process(workers: Iterable[BaseProcess]) -> None:
    """Have worker processes killed when this process ends.

    An iteration that is given up in the middle, and still held (by DeepSpeed's pipeline), leaves workers
    behind. Python would send them SIGTERM, which they ignore, and wait for them for ever.
    """
    global _workers_of
    _workers.update(workers)
    if _workers and _workers_of != os.getpid():
        _workers_of = os.getpid()
        # Before Python's own SIGTERM, which comes after all that has a priority.
        multiprocessing.util.Finalize(None, _kill_workers, exitpriority=10)


def _kill_workers() -> None:
    with contextlib.suppress(ValueError):  # this is not the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each
    for worker in list(_workers):
        worker.kill()
        worker.join()


def _as_it_is(item: Any) -> Any:
    return item


_MOST_INLINED = 2**16  # bytes


def _inlined(item: Any) -> Any:
    """A micro-batch with its small tensors as arrays, which go through the worker's pipe with the rest.

    A tensor goes by a file of shared memory that is opened, passed on and mapped for it alone: 1 ms of both processes;
    unless it lies in the slots, which are both processes'.
    """
    if isinstance(item, torch.Tensor):
        worker = get_worker_info()
        slots = worker.dataset.reader.slots if worker is not None else None
        if slots is not None and slots.hold(item):
            return slots.sent(item)
        return item.numpy() if item.nbytes <= _MOST_INLINED else item
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_inlined(part) for part in item))
    return item


def _restored(item: Any) -> Any:
    """What `_inlined` was given."""
    if isinstance(item, InSlot):
        return item.copied()
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_restored(part) for part in item))
    return item


def train_loader(
    source: Source,
    *,
    order: SampleOrder,
    share: Share,
    image: ImageConfig,
    augment: AugmentConfig,
    mix: MixConfig,
    start_step: int = 0,
    stop_step: int,
    sizes: ImageSizes | None = None,
    load_images: bool = True,
    load_targets: bool = True,
    on_bad_image: str = "error",
    num_workers: int = 0,
    pin_memory: bool = False,
    cores: frozenset[int] = frozenset(),
) -> Loader:
    """The micro-batches of a rank for the optimizer steps [start_step, stop_step), counted from 0 over all epochs.

    Args:
        source: the training split.
        order: which samples a step uses.
        share: which of a step's rows this rank holds.
        image: the size and normalisation they get.
        augment: what is drawn for each image.
        mix: what is drawn for each batch.
        sizes: the side of a step's images, where it is not always that of `image`.
        load_images: whether this rank needs them: a pipeline's first stage does. Without them nothing is decoded,
            unless bad images are skipped: then a target depends on what can be decoded.
        load_targets: likewise; a pipeline's last stage needs them.
        on_bad_image: "error", or "skip" for a keyed replacement.
        num_workers: processes that read; 0 reads in this one.
        pin_memory: page-locked memory for fast copies to a GPU.
        cores: that the processes are to run on, where there are enough for all; empty for any.

    Raises:
        UserError: settings that cannot work together, with the numbers. Iterating raises ImageDecodeError.
    """
    assert order.num_samples == len(source), f"an order of {order.num_samples} samples for {len(source)}"
    assert share.global_batch == order.global_batch, f"{share} does not cut a global batch of {order.global_batch}"
    if mix.active and order.global_batch % 2:
        raise UserError(
            f"--mixup and --cutmix mix pairs, which a global batch of {order.global_batch} rows "
            f"({share.dp_size} ranks x {share.accumulation} micro-batches x {share.micro_batch}) does not divide into; "
            "make one of the three even, or turn mixing off"
        )
    reader = Reader(
        source, worker_transform(image, augment), image, load_images, load_targets, on_bad_image, augment.decode
    )
    numbers = range(start_step * share.accumulation, stop_step * share.accumulation)
    transforms = {
        size: worker_transform(replace(image, img_size=(size, size)), augment)
        for size in (sizes.sizes if sizes else ())
    }
    batches = TrainBatches(reader, order, share, augment, mix, sizes, transforms)
    return Loader(batches, numbers, num_workers, pin_memory, cores)


def eval_loader(
    source: Source,
    *,
    image: ImageConfig,
    batch: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    load_images: bool = True,
    load_targets: bool = True,
    on_bad_image: str = "error",
    num_workers: int = 0,
    pin_memory: bool = False,
    cores: frozenset[int] = frozenset(),
) -> Loader:
    """A rank's share of an evaluation, to be iterated as often as wanted; each image is valid on one rank, once.

    Every rank gets the same number of batches of `batch` rows. Under `on_bad_image="skip"` a row that cannot be
    decoded is not valid, and counted. The other arguments are those of `train_loader`.
    """
    reader = Reader(source, eval_transform(image), image, load_images, load_targets, on_bad_image)
    numbers = range(num_evaluation_batches(len(source), batch, dp_size))
    return Loader(EvalBatches(reader, batch, dp_rank, dp_size), numbers, num_workers, pin_memory, cores)
