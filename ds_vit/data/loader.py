"""The loader that delivers micro-batches (reader.py), read in worker processes.

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
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, get_worker_info

from ds_vit.data.field import MicroBatch
from ds_vit.data.reader import Reader
from ds_vit.data.slots import PREFETCHED, InSlot, Slots, shared_memory_advice
from ds_vit.fault_tolerance.errors import WorkerLost
from ds_vit.fault_tolerance.signals import ignore_in_worker


class Loader:
    """Delivers micro-batches in order.

    Args:
        reader: of the micro-batches.
        numbers: which of them, in this order.
        num_workers: processes that read; 0 reads in this one.
        pin_memory: page-locked memory for fast copies to a GPU.

    Iterating raises a worker's UserError or OSError, one line that names the file; and WorkerLost if a worker was
    killed, which names the file that it was reading.
    """

    def __init__(
        self,
        reader: Reader,
        numbers: range,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self._reader = reader
        if num_workers:
            self._reader.reading = torch.full((num_workers,), -1, dtype=torch.int64).share_memory_()
        self._loader = DataLoader(
            reader,
            batch_size=None,
            sampler=numbers,
            num_workers=num_workers,
            prefetch_factor=PREFETCHED if num_workers else None,
            collate_fn=partial(tree_map, _sendable),
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
        num_workers, most_bytes = self._loader.num_workers, self._reader.most_bytes
        slots = Slots(num_workers, most_bytes) if num_workers and most_bytes else None
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
        try:
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
                yield tree_map(_received, item)
        finally:
            # An error or its reader ended the iteration early. In a reference cycle, torch's iterator waits 10 s for
            # each worker and leaves it running: the garbage collector closes the workers' queues first.
            _end_pinning(items)
            for worker in workers:
                worker.kill()

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


def _end_pinning(items: Any) -> None:
    """End the thread of torch's iterator that copies into page-locked memory.

    It would wait for ever for the rest of what a worker was sending when it was killed, and torch for it.
    """
    thread = getattr(items, "_pin_memory_thread", None)
    if thread is not None and thread.is_alive():
        items._pin_memory_thread_done_event.set()
        items._worker_result_queue.put((None, None))  # wakes it
        items._worker_result_queue.cancel_join_thread()
        thread.join(5)  # a worker that was killed from outside has stopped it for good


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


_MOST_IN_PIPE = 2**16  # bytes


def _sendable(part: Any) -> Any:
    """A tensor in the form in which a worker sends it; as it is without workers.

    A small one is sent as an array through the worker's pipe, one in the slots by its place there. Any other takes a
    file of shared memory that is opened, passed on and mapped: 1 ms of both processes.
    """
    worker = get_worker_info()
    if worker is None or not isinstance(part, torch.Tensor):
        return part
    slots = worker.dataset.slots
    if slots is not None and slots.hold(part):
        return slots.sent(part)
    return part.numpy() if part.nbytes <= _MOST_IN_PIPE else part


def _received(part: Any) -> Any:
    """What `_sendable` was given."""
    if isinstance(part, InSlot):
        return part.copied()
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part
