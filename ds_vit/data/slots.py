"""The shared memory through which a loader's workers pass images on, allocated once for an iteration.

New memory for each micro-batch would cost both processes a file that is made, passed on and mapped, and a page fault
for each of its pages in both: on two cores an eighth of all the work on JPEG files at 224. Here the images are copied
out instead, and the place is reused.
"""

from __future__ import annotations

import itertools
import math
import shutil
import weakref
from collections.abc import Sequence

import torch

from ds_vit.fault_tolerance.errors import WorkerLost, first_line

PREFETCHED = 2  # batches requested of a worker beyond the current one
# Torch requests the next batch of a worker when it has received one, before that one is copied out. So a worker may
# hold one that is being copied and PREFETCHED others; the next is requested when the first one's place is free.
_PLACES = PREFETCHED + 1

_numbers = itertools.count()
_slots: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


class Slots:
    """Places for the images of each worker's next few batches.

    Args:
        num_workers: how many there are.
        num_bytes: of the largest batch.
    """

    def __init__(self, num_workers: int, num_bytes: int) -> None:
        """Raises:
        WorkerLost: there is too little shared memory.
        """
        self._number = next(_numbers)
        self._turn = 0
        total = num_workers * _PLACES * num_bytes
        try:  # pages are taken when they are first written to
            storage = torch.UntypedStorage._new_shared(total)
        except RuntimeError as error:
            raise WorkerLost(
                f"{num_workers} loader processes need {total / 2**20:,.0f} MiB of shared memory ({first_line(error)}): "
                f"{shared_memory_advice()}"
            ) from error
        self._memory = torch.empty(0, dtype=torch.uint8).set_(storage).view(num_workers, _PLACES, num_bytes)
        _slots[self._number] = self

    def zeros(self, worker: int, shape: Sequence[int]) -> torch.Tensor:
        """A worker's next place, uint8 of this shape."""
        self._turn = (self._turn + 1) % _PLACES
        return self._memory[worker, self._turn, : math.prod(shape)].view(*shape).zero_()

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the places."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def sent(self, tensor: torch.Tensor) -> InSlot:
        """A tensor of `zeros` in the form in which a worker sends it."""
        return InSlot(self._number, tensor.storage_offset(), tuple(tensor.shape))

    def part(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of a place, valid until it is reused."""
        return self._memory.view(-1)[offset : offset + math.prod(shape)].view(shape)


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

    def __init__(self, slots: int, offset: int, shape: tuple[int, ...]) -> None:
        self._slots, self._offset, self._shape = slots, offset, shape

    def _part(self) -> torch.Tensor:
        return _slots[self._slots].part(self._offset, self._shape)

    def copied(self) -> torch.Tensor:
        """A copy of the tensor."""
        return self._part().clone()

    def pin_memory(self) -> torch.Tensor:
        """A copy in page-locked memory; called by torch's pinning thread."""
        return self._part().pin_memory()
