"""The shared memory through which a loader's workers hand over images, taken once for an iteration.

New memory for each micro-batch would cost both processes a file that is made, passed on and mapped, and each of its
pages an interrupt in both: on two cores an eighth of all the work on JPEG files at 224. Here the images are copied out
instead, and the place is used again.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import torch

PREFETCHED = 2  # batches that a worker is asked for beyond the one that is being looked at
# Torch asks a worker for the next batch when it has received one, before that one is copied out. So a worker may hold
# one that is being copied and PREFETCHED others; the next is asked for when the first one's place is free.
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
        self._number = next(_numbers)
        self._turn = 0
        # Pages are taken where they are first written to.
        storage = torch.UntypedStorage._new_shared(num_workers * _PLACES * num_bytes)
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
        """A tensor of `zeros` as it goes to the other process."""
        return InSlot(self._number, tensor.storage_offset(), tuple(tensor.shape))

    def part(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """What lies there, until its place is used again."""
        return self._memory.view(-1)[offset : offset + math.prod(shape)].view(shape)


class InSlot:
    """Where a tensor lies in the slots of an iteration: what goes through a worker's pipe in its stead."""

    def __init__(self, slots: int, offset: int, shape: tuple[int, ...]) -> None:
        self._slots, self._offset, self._shape = slots, offset, shape

    def _part(self) -> torch.Tensor:
        return _slots[self._slots].part(self._offset, self._shape)

    def copied(self) -> torch.Tensor:
        """The tensor in memory of its own."""
        return self._part().clone()

    def pin_memory(self) -> torch.Tensor:
        """The tensor in page-locked memory of its own: torch's thread for that calls it when it has come."""
        return self._part().pin_memory()
