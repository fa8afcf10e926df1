"""ZeRO-0's gradients summed while the backward pass still runs, by torch's DistributedDataParallel.

DeepSpeed sums them when the pass is over: every gradient into a flat copy, the copy over the ranks, and back. Torch's
reducer copies each gradient into a bucket, sends a bucket as soon as it is full, and leaves the gradients as its views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ds_vit.parallel.groups import Groups

_MIB = 2**20
_BYTES = 4  # of a gradient's element: without ZeRO the weights are in fp32


class Overlap:
    """Hands the sums over to torch after one backward pass that DeepSpeed has summed.

    Torch's reducer waits for all parameters that are trained. Where one had no gradient in that pass it is not part of
    the loss, and DeepSpeed keeps reducing.

    Args:
        engine: DeepSpeed's, whose module becomes a `DistributedDataParallel`.
        config: the DeepSpeed JSON; `zero_optimization.reduce_bucket_size` is the elements of a bucket, by default
            torch's 25 MiB. A bucket has one parameter at least: with 1 each gradient is sent by itself.
        groups: of the run.
    """

    def __init__(self, engine: Any, config: Mapping[str, Any], groups: Groups) -> None:
        self._engine, self._groups = engine, groups
        self._elements = config.get("zero_optimization", {}).get("reduce_bucket_size")
        self._all_used: bool | None = None
        look = engine._get_gradients_for_reduction

        def see_which_are_used() -> Any:
            self._all_used = all(p.grad is not None for p in engine.module.parameters() if p.requires_grad)
            return look()

        engine._get_gradients_for_reduction = see_which_are_used

    def begin(self) -> None:
        """Before a step (a collective, once)."""
        if self._all_used is not None:
            self._hand_over(self._all_used)
            self._all_used = None

    def _hand_over(self, all_used: bool) -> None:
        del self._engine._get_gradients_for_reduction  # DeepSpeed's own again
        vote = torch.tensor(int(all_used), device=self._engine.device)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._groups.dp)
        if not vote.item():
            return
        self._engine.module = DistributedDataParallel(
            self._engine.module,
            process_group=self._groups.dp,
            broadcast_buffers=False,
            init_sync=False,  # weights are drawn by their names, the same on every rank
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if self._elements is None else self._elements * _BYTES / _MIB,
        )
        self._engine.enable_backward_allreduce = False
