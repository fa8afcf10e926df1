"""The shared memory through which a loader's workers pass tensors on, allocated once for an iteration.

New memory for each micro-batch would cost both processes a file that is made, passed on and mapped, and a page fault
for each of its pages in both: on two cores an eighth of all the work on JPEG files at 224. Here the tensors are copied
out instead, and the place is reused.
"""

from __future__ import annotations

import itertools
import math
import shutil
import weakref
from collections.abc import Sequence

import torch
from torch.utils.data import get_worker_info

from ds_vit.fault_tolerance.errors import WorkerLost, first_line

PREFETCHED = 2  # batches requested of a worker beyond the current one
# Torch requests the next batch of a worker when it has received one, before that one is copied out. So a worker may
# hold one that is being copied and PREFETCHED others; the next is requested when the first one's place is free.
_PLACES = PREFETCHED + 1
_ALIGNMENT = 64  # bytes

_numbers = itertools.count()
_slots: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


def aligned(num_bytes: int) -> int:
    """So many bytes, rounded up to where the next tensor of a place begins."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Slots:
    """Places for the tensors of each worker's next few batches.

    Args:
        num_workers: how many there are.
        num_bytes: of the largest batch.
    """

    def __init__(self, num_workers: int, num_bytes: int) -> None:
        """Raises:
        WorkerLost: there is too little shared memory.
        """
        self._number = next(_numbers)
        self._worker = self._turn = self._used = 0
        total = num_workers * _PLACES * aligned(num_bytes)
        try:  # pages are taken when they are first written to
            storage = torch.UntypedStorage._new_shared(total)
        except RuntimeError as error:
            raise WorkerLost(
                f"{num_workers} loader processes need {total / 2**20:,.0f} MiB of shared memory ({first_line(error)}): "
                f"{shared_memory_advice()}"
            ) from error
        self._memory = torch.empty(0, dtype=torch.uint8).set_(storage).view(num_workers, _PLACES, -1)
        _slots[self._number] = self

    def begin(self, worker: int) -> None:
        """Begin a worker's next place; `empty` takes its memory there from now on."""
        global _of_process
        self._worker, self._turn, self._used = worker, (self._turn + 1) % _PLACES, 0
        _of_process = self

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """The next part of the current place; None if it is full."""
        first, (_, places, size) = self._used, self._memory.shape
        if (last := aligned(first + math.prod(shape) * dtype.itemsize)) > size:
            return None
        self._used = last
        return self.part((self._worker * places + self._turn) * size + first, shape, dtype)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the places, in one piece."""
        same = tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()
        return same and tensor.is_contiguous()

    def sent(self, tensor: torch.Tensor) -> InSlot:
        """A tensor that they hold in the form in which a worker sends it."""
        return InSlot(self._number, tensor.storage_offset() * tensor.dtype.itemsize, tensor.shape, tensor.dtype)

    def part(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A view of a place, valid until it is reused."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._memory.view(-1)[offset : offset + num_bytes].view(dtype).view(*shape)


_of_process: Slots | None = None  # those of this worker process


def empty(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """An uninitialised tensor for what a worker sends: in its slots, or else in separate shared memory.

    So passing it on copies nothing. Outside of workers it is a plain one.
    """
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    if _of_process is not None and (part := _of_process.empty(shape, dtype)) is not None:
        return part
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # as torch's default_collate does
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def shared_memory_advice() -> str:
    """How large /dev/shm is, and what to do if it is full."""
    try:
        usage = shutil.disk_usage("/dev/shm")
        size = f"{usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB of which are free now"
    except OSError as error:
        size = error.strerror or str(error)
    return (
        f"images are passed on through /dev/shm ({size}): if it was full, make it larger (docker run --shm-size 8g, or "
        "--ipc=host; in Kubernetes an emptyDir of medium Memory), or use fewer --workers or a smaller micro-batch"
    )


class InSlot:
    """Where a tensor lies in the slots of an iteration: sent through a worker's pipe in place of it."""

    def __init__(self, slots: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._slots, self._where = slots, (offset, shape, dtype)

    def _part(self) -> torch.Tensor:
        return _slots[self._slots].part(*self._where)

    def copied(self) -> torch.Tensor:
        """A copy of the tensor."""
        return self._part().clone()

    def pin_memory(self) -> torch.Tensor:
        """A copy in page-locked memory; called by torch's pinning thread."""
        return self._part().pin_memory()
