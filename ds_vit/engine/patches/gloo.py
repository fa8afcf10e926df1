"""ZeRO's collectives on a CPU, in place.

torch's `all_gather_into_tensor` and `reduce_scatter_tensor` over gloo take new memory for the whole tensor and copy it
there and back. What ZeRO gathers and scatters has its place already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Collective = Callable[..., Any]


class _Works:
    """Several collectives that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def use_in_place_collectives(backend: Any) -> None:
    """Have DeepSpeed's collectives move CPU tensors in place: a third of the time, the same bits.

    Args:
        backend: DeepSpeed's, `deepspeed.comm.comm.cdb`. Done twice it is as done once.
    """
    backend.all_gather_function = _gathering(backend.get_all_gather_function())
    backend.reduce_scatter_function = _scattering(backend.get_reduce_scatter_function())


def _gathering(own: Collective) -> Collective:
    def all_gather_into_tensor(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        if not _over_gloo(output_tensor, group):
            return own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)
        parts = output_tensor.view(-1).chunk(dist.get_world_size(group))
        mine = parts[dist.get_rank(group)]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor.view(-1))
        # Each part's way to all ranks begins at once: over gloo no slower than one collective, also of small tensors.
        works = _Works([dist.broadcast(part, group=group, group_src=r, async_op=True) for r, part in enumerate(parts)])
        return works if async_op else works.wait()

    return all_gather_into_tensor


def _scattering(own: Collective) -> Collective:
    def reduce_scatter_tensor(
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        # ZeRO-3 asks for its share at the share's place, and reads nothing else of the tensor afterwards.
        place = dist.get_rank(group) * output_tensor.nbytes
        if not _over_gloo(input_tensor, group) or output_tensor.data_ptr() != input_tensor.data_ptr() + place:
            return own(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return dist.all_reduce(input_tensor, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and dist.get_backend(group) == "gloo"
