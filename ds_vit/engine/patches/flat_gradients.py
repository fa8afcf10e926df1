"""ZeRO-1's gradients in one piece of memory for each parameter group, laid out like its weights.

DeepSpeed lets all gradients wait for the end of the backward pass, copies each into a bucket, sums the bucket over the
ranks, whole on each of them, and copies a rank's share once more. Here a gradient goes to the place where the optimizer
steps on it as soon as it is there, and a full bucket is reduced while the backward pass continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class _Bucket:
    """Gradients of one group that are summed together.

    Attributes:
        group: of parameters.
        start: first element in the group's flat memory.
        stop: element behind the last one.
        first: place in the model of its first parameter, whose gradient comes last.
        parameters: how many are in it.
        missing: those of them that have not come in this step.
    """

    group: int
    start: int
    stop: int
    first: int
    parameters: int = 0
    missing: int = 0


def write_gradients_in_place(optimizer: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Have ZeRO-1 put its gradients straight into flat memory.

    For steps of one micro-batch on ranks that share nothing but the batch. Accumulated gradients, and those that wait
    for a pipeline's end, would need memory in addition; tensor-parallel sums would cross the wires at the same time.

    Args:
        optimizer: of any wrapper of DeepSpeed's.
        parameters: of the model, in the order in which it runs: their gradients come the other way round.

    Returns:
        Whether it does: not at another stage, and not where gradients are summed in another type than they come in, are
        scaled otherwise than by the mean, or the JSON asks for another way (`overlap_comm`, no
        `contiguous_gradients`, no `use_multi_rank_bucket_allreduce`).
    """
    if not _is_plain(optimizer):
        return False
    flat = FlatGradients(optimizer, parameters)

    def process_gradients(parameter: torch.Tensor, group: int) -> None:
        if not optimizer.ready_for_gradients:
            optimizer.micro_step_id += 1
            optimizer.ready_for_gradients = True
        flat.take(parameter)

    optimizer.process_gradients = process_gradients
    optimizer.reduce_gradients = lambda pipeline_parallel=False: flat.finish()
    return True


def _is_plain(optimizer: Any) -> bool:
    return (
        hasattr(optimizer, "single_partition_of_fp32_groups")
        and not (optimizer.partition_gradients or optimizer.cpu_offload or optimizer.overlap_comm)
        and optimizer.contiguous_gradients
        and not optimizer.use_grad_accum_attribute
        and set(optimizer.ipg_buckets) == {optimizer.dtype}
        and optimizer.gradient_average
        and optimizer.postscale_gradients
        and optimizer.gradient_predivide_factor == 1.0
        and not optimizer.round_robin_gradients  # parameters lie in the order of their group
        # DeepSpeed's default. Its other way, a sum to one rank each, makes more and smaller sums with each rank.
        and (optimizer.use_multi_rank_bucket_allreduce or not optimizer.reduce_scatter)
    )


class FlatGradients:
    """The gradients of a step, from the first one that comes to the one that the optimizer takes.

    Args:
        optimizer: ZeRO-1's.
        parameters: of the model, in the order in which it runs.
    """

    def __init__(self, optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._ranks = dist.get_world_size(optimizer.dp_process_group)
        self._rank = dist.get_rank(optimizer.dp_process_group)
        order = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._places: dict[int, tuple[int, int]] = {}  # id(parameter) → its group, its start in the flat memory
        self._bucket_of: dict[int, _Bucket] = {}
        self._gaps: list[list[slice]] = []
        buckets: list[_Bucket] = []
        for group, (own, weights) in enumerate(zip(optimizer.bit16_groups, optimizer.bit16_groups_flat, strict=True)):
            starts = [(p.data_ptr() - weights.data_ptr()) // weights.element_size() for p in own]
            self._places |= {id(p): (group, start) for p, start in zip(own, starts, strict=True)}
            self._gaps.append(list(_gaps(own, starts, weights.numel())))
            buckets += self._cut(group, own, starts, order) if self._ranks > 1 else []
        self._buckets = sorted(buckets, key=lambda bucket: -bucket.first)
        self._begin()

    def _begin(self) -> None:
        self._flat: list[torch.Tensor] = []
        self._taken: set[int] = set()
        self._next = 0
        self._under_way: list[dist.Work] = []
        for bucket in self._buckets:
            bucket.missing = bucket.parameters

    def _cut(
        self, group: int, parameters: list[torch.Tensor], starts: list[int], order: dict[int, int]
    ) -> list[_Bucket]:
        """A group's buckets, of at most `reduce_bucket_size` elements unless a single parameter has more."""
        found: list[_Bucket] = []
        for parameter, start in zip(reversed(parameters), reversed(starts), strict=True):
            stop, place = start + parameter.numel(), order[id(parameter)]
            if not found or found[-1].stop - start > self._optimizer.reduce_bucket_size:
                found.append(_Bucket(group, start, stop, place))
            bucket = self._bucket_of[id(parameter)] = found[-1]
            bucket.start, bucket.first = start, min(bucket.first, place)
            bucket.parameters += 1
        return found

    @torch.no_grad()
    def take(self, parameter: torch.Tensor) -> None:
        """Put a parameter's gradient into its place; zeros where it has none."""
        if not self._flat:
            weights = self._optimizer.bit16_groups_flat
            self._flat = [torch.empty_like(flat, dtype=self._optimizer.dtype) for flat in weights]
            for flat, gaps in zip(self._flat, self._gaps, strict=True):
                for gap in gaps:
                    flat[gap].zero_()
        group, start = self._places[id(parameter)]
        place = self._flat[group].narrow(0, start, parameter.numel()).view_as(parameter)
        if parameter.grad is None:
            place.zero_()
        elif self._ranks == 1:
            place.copy_(parameter.grad)
        else:
            torch.div(parameter.grad, self._ranks, out=place)
        parameter.grad = None
        self._taken.add(id(parameter))
        if self._buckets:
            self._bucket_of[id(parameter)].missing -= 1
            self._send()

    def _send(self) -> None:
        """Sum what is complete, in an order that is the same on every rank (collectives, not waited for)."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            self._next += 1
            piece = self._flat[bucket.group][bucket.start : bucket.stop]
            self._under_way.append(dist.all_reduce(piece, group=self._optimizer.dp_process_group, async_op=True))

    def finish(self) -> None:
        """Take what is left, wait for the sums, and hand this rank's share over to ZeRO."""
        from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

        optimizer = self._optimizer
        for group in optimizer.bit16_groups:
            for parameter in group:
                if id(parameter) not in self._taken:
                    self.take(parameter)
        for work in self._under_way:
            work.wait()
        for group, flat in enumerate(self._flat):
            size = int(optimizer.partition_size[group])
            share = flat.narrow(0, self._rank * size, size)
            optimizer.averaged_gradients[group] = GradPartitionBufferGroup(list(self._pieces(group, share)), share)
            optimizer.all_grad_tensors[group] = None
        self._begin()
        optimizer._release_ipg_buffers()
        optimizer._epilogue_ran_this_backward = True

    def _pieces(self, group: int, share: torch.Tensor) -> Iterator[torch.Tensor]:
        """The gradients in this rank's share, those of `params_in_partition`, and behind them what is padding."""
        first, size, done = self._rank * share.numel(), share.numel(), 0
        for parameter in self._optimizer.params_in_partition[group]:
            start = self._places[id(parameter)][1] - first
            low, done = max(start, 0), min(start + parameter.numel(), size)
            yield share[low:done]
        if done < size:
            padding = share[done:]
            padding._zero_padding = True
            yield padding


def _gaps(parameters: list[torch.Tensor], starts: list[int], total: int) -> Iterator[slice]:
    """What belongs to no parameter, which stays zero."""
    done = 0
    for parameter, start in zip(parameters, starts, strict=True):
        if start > done:
            yield slice(done, start)
        done = start + parameter.numel()
    if done < total:
        yield slice(done, total)
