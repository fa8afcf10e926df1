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
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ds_vit.data.augment.crops import MultiCrop
from ds_vit.data.augment.on_device import CuttingTransform
from ds_vit.data.augment.transforms import eval_transform, train_transform
from ds_vit.data.batches import (
    PREFETCHED,
    Batches,
    EvalBatches,
    InSlot,
    MicroBatch,
    Reader,
    TrainBatches,
    Transform,
    shared_memory_advice,
)
from ds_vit.data.sampler import Share, num_evaluation_batches
from ds_vit.data.settings import Data, SampleSpec
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

    Iterating raises a worker's UserError or OSError, one line that names the file; and WorkerLost if a worker was
    killed, which names the file that it was reading.
    """

    def __init__(
        self,
        batches: Batches,
        numbers: range,
        num_workers: int,
        pin_memory: bool,
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
            collate_fn=partial(_each_tensor, _sendable),
            worker_init_fn=ignore_in_worker,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each iteration draws a seed from the process's generator
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Generator[MicroBatch, None, None]:
        others = set(multiprocessing.active_children())
        # An abandoned iterator may still wait for the garbage collector. Collected in a worker, it would close files
        # whose numbers are those of the worker's queues. No worker collects what is frozen here.
        if self._loader.num_workers:
            gc.freeze()
        own_handler = signal.getsignal(signal.SIGCHLD)
        # Of this iteration only: the workers of an abandoned one may still write.
        slots = self._batches.slots(self._loader.num_workers) if self._loader.num_workers else None
        self._reader.slots = slots
        items = iter(self._loader)
        self._reader.slots = None
        if self._loader.num_workers:
            gc.unfreeze()
        workers = sorted(set(multiprocessing.active_children()) - others, key=lambda worker: worker.pid or 0)
        _end_with_this_process(workers)
        if workers:
            with contextlib.suppress(ValueError):  # this is not the main thread
                signal.signal(signal.SIGCHLD, own_handler)  # torch's would raise an error anywhere in the run
        while True:
            self._check(workers)
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception:  # torch waits for a worker that has ended, or finds its end of a socket closed
                multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
                self._check(workers)
                raise
            if isinstance(item, Exception):
                raise item
            yield _each_tensor(_received, item)

    def _check(self, workers: Sequence[BaseProcess]) -> None:
        """Raise WorkerLost if a worker has ended, which none does before the last batch is out."""
        for number, worker in enumerate(workers):
            if (code := worker.exitcode) is None:
                continue
            index = -1 if self._reader.reading is None else int(self._reader.reading[number])
            image = f"; it was reading {self._reader.source.describe(index)}" if index >= 0 else ""
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
            advice = "if the machine had no memory left (see dmesg), use fewer --workers"
            if code == -signal.SIGBUS:  # a write to shared memory that has no room left
                advice = shared_memory_advice()
            process = f"loader process {number} (pid {worker.pid})"
            raise WorkerLost(f"{process} {end}{image}; {advice}; start again with --resume auto")


_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_workers_of = 0  # the process that they are to end with


def _end_with_this_process(workers: Iterable[BaseProcess]) -> None:
    """Have worker processes killed when this process ends.

    An abandoned iteration that is still referenced (by DeepSpeed's pipeline) leaves workers behind. Python would send
    them SIGTERM, which they ignore, and wait for them for ever.
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


def _each_tensor(function: Callable[[Any], Any], item: Any) -> Any:
    """An item with a function applied to its parts, also those in NamedTuples."""
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_each_tensor(function, part) for part in item))
    return function(item)


_MOST_IN_PIPE = 2**16  # bytes


def _sendable(part: Any) -> Any:
    """A tensor in the form in which a worker sends it; as it is without workers.

    A small one is sent as an array through the worker's pipe, one in the slots by its place there. Any other takes a
    file of shared memory that is opened, passed on and mapped: 1 ms of both processes.
    """
    worker = get_worker_info()
    if worker is None or not isinstance(part, torch.Tensor):
        return part
    slots = worker.dataset.reader.slots
    if slots is not None and slots.hold(part):
        return slots.sent(part)
    return part.numpy() if part.nbytes <= _MOST_IN_PIPE else part


def _received(part: Any) -> Any:
    """What `_sendable` was given."""
    if isinstance(part, InSlot):
        return part.copied()
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def training_transform(spec: SampleSpec) -> Transform:
    """What a loader's process does to a training image: all of augmentation, or the crops for the device's.

    Raises:
        UserError: incompatible flags.
    """
    if spec.crops is not None:
        return MultiCrop(spec.image, spec.crops, spec.augment)
    transform = train_transform(spec.image, spec.augment)
    return CuttingTransform(transform, spec.augment) if spec.augment.augment_on == "device" else transform


def train_loader(
    data: Data,
    spec: SampleSpec,
    steps: range,
    *,
    skipped_batches: int = 0,
    on_bad_image: str = "error",
    pin_memory: bool = False,
) -> Loader:
    """The micro-batches of a rank for a range of steps, counted from 0 over all epochs.

    Args:
        data: the training split, the order of its samples, this rank's share of them, and its loader processes.
        spec: what is read of each sample.
        steps: in the order of samples.
        skipped_batches: how far that order is ahead of the optimizer steps, which sizes and the end of mixing follow.
        on_bad_image: as for `Reader`.
        pin_memory: page-locked memory for fast copies to a GPU.

    Raises:
        UserError: settings that cannot work together, with the numbers. Iterating raises ImageDecodeError.
    """
    source, order, share, sizes = data.train_source, data.order, data.share, data.sizes
    assert order.num_samples == len(source), f"an order of {order.num_samples} samples for {len(source)}"
    assert share.global_batch == order.global_batch, f"{share} does not cut a global batch of {order.global_batch}"
    mixes = spec.mix.active
    if mixes and order.global_batch % 2:
        factors = f"{share.dp_size} ranks x {share.accumulation} micro-batches x {share.micro_batch}"
        raise UserError(f"--mixup and --cutmix need an even global batch, not {order.global_batch} ({factors})")
    crops_only = not (mixes or spec.augment.reprob or sizes)
    assert spec.crops is None or crops_only, "crops are not mixed, erased or of other sizes"
    reader = Reader(source, spec, training_transform(spec), spec.augment.decode, on_bad_image)
    transforms = {
        size: training_transform(replace(spec, image=replace(spec.image, img_size=(size, size))))
        for size in (sizes.sizes if sizes else ())
    }
    numbers = range(steps.start * share.accumulation, steps.stop * share.accumulation)
    return Loader(TrainBatches(reader, data, transforms, skipped_batches), numbers, data.workers.number, pin_memory)


def eval_loader(
    source: Source,
    spec: SampleSpec,
    share: Share,
    *,
    on_bad_image: str = "error",
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """A rank's share of an evaluation, to be iterated as often as wanted; each image is valid on one rank, once.

    Every rank gets the same number of batches of `share.micro_batch` rows. Under `on_bad_image="skip"` a row that
    cannot be decoded is not valid, and counted. The other arguments are those of `train_loader`.
    """
    reader = Reader(source, spec, eval_transform(spec.image), "exact", on_bad_image)
    numbers = range(num_evaluation_batches(len(source), share))
    return Loader(EvalBatches(reader, share), numbers, num_workers, pin_memory)
