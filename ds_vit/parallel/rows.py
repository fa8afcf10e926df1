"""Rows of a batch gathered over data-parallel ranks, with the gradient that torch's `all_gather` lacks; and objects.

Shapes: B samples of this rank, dp ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _GatherRows(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        gathered = rows.new_empty(dist.get_world_size(group) * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = grads[0].contiguous()
        own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient, group=ctx.group)
        return own, None


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[B, …] of each rank → [dp · B, …] in rank order (a collective, in the backward pass too).

    The gradient of a rank's rows is the sum of all ranks' gradients for them; it is not divided.
    """
    return _GatherRows.apply(rows, group)


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A picklable object of each rank, in rank order (a collective)."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered
