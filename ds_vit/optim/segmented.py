"""Arithmetic by parameter on flat tensors: norms over all ranks, and a factor for each parameter.

Nothing here loops over parameters in Python: norms are one multi-tensor call, factors are one call on the CPU and one
factor for each element on a GPU, for some elements at a time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from ds_vit.device import send
from ds_vit.parallel.zero_map import Shard, ZeroMap

ELEMENTS_AT_ONCE = 2**22
"""Elements whose factors are expanded at a time: 12 bytes per element, 8 of them the index of torch's expansion."""


class SegmentedTensors:
    """The flat tensors of one optimizer step, by their segments.

    S is the number of segments on this rank, P the number of parameters that are spread over these tensors.

    Args:
        zero_map: the map of this rank.
        parameters: what the optimizer updates together: tensors out of its param_groups.

    Attributes:
        ratios: the optimizer's trust ratios of the last step [P]; None where it adapts no parameter.
    """

    def __init__(self, zero_map: ZeroMap, parameters: Sequence[torch.Tensor]) -> None:
        self.zero_map = zero_map
        self.shards: list[Shard] = [zero_map.shard_of(parameter) for parameter in parameters]
        self.device = parameters[0].device
        self._one_call = self.device.type == "cpu"  # a GPU would launch a kernel for each segment
        self.ratios: torch.Tensor | None = None
        self.names = [name for shard in self.shards for name in shard.names]
        index = {name: number for number, name in enumerate(self.names)}
        segments = [segment for shard in self.shards for segment in shard.segments]
        self._index = torch.tensor([index[s.name] for s in segments], dtype=torch.long, device=self.device)
        counts = [float(zero_map.counts(s)) for s in segments]
        self._counts = torch.tensor(counts, dtype=torch.float32, device=self.device)
        self._splits = [_split_sizes(shard) for shard in self.shards]
        # Kept: sent in each step, they would make the host wait for the device.
        self._parts = [
            [
                (start, first, sum(sizes), send(torch.tensor(sizes), self.device))
                for start, first, sizes in _parts(split)
            ]
            for split in self._splits
        ]

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The S segments of tensors that are laid out like the shards'."""
        views: list[torch.Tensor] = []
        for tensor, sizes in zip(tensors, self._splits, strict=True):
            views += tensor.view(-1).split(sizes)[1::2]
        return views

    def norms(self, *lists: Sequence[torch.Tensor]) -> torch.Tensor:
        """Euclidean norms of whole parameters, fp32 [len(lists), P] (one collective over the ranks that share them).

        Args:
            lists: tensors that are laid out like the shards'; their padding is not read.
        """
        squares = torch.zeros(len(lists), len(self.names), device=self.device)
        if len(self._index):
            for row, tensors in enumerate(lists):
                norms = torch._foreach_norm(self.views(tensors), 2, dtype=torch.float32)
                squares[row, self._index] = torch.stack(norms).square() * self._counts
        return self.zero_map.all_reduce(squares).sqrt()

    def values(self, by_name: Mapping[str, float]) -> torch.Tensor:
        """One number for each parameter, fp32 [P]."""
        return send(torch.tensor([by_name[name] for name in self.names], dtype=torch.float32), self.device)

    def mul_(self, tensors: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Multiply every segment by its parameter's factor, in place; padding stays or is multiplied by one.

        Args:
            tensors: laid out like the shards'.
            factors: [P].
        """
        self._each("mul_", factors, 1.0, tensors)

    def addcmul_(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
        """Add to every segment of `tensors` that of `others` times its parameter's factor, in place.

        Args:
            tensors: laid out like the shards'.
            others: likewise.
            factors: [P].
        """
        self._each("addcmul_", factors, 0.0, tensors, others)

    def _each(self, operation: str, factors: torch.Tensor, padding: float, *lists: Sequence[torch.Tensor]) -> None:
        """`tensor.operation(…, factor)` for every segment in the first of the lists, with those in the others."""
        own, done = factors[self._index].to(self.shards[0].tensor.dtype), 0
        if self._one_call:
            if len(self._index):
                getattr(torch, f"_foreach_{operation}")(*map(self.views, lists), list(own.unbind()))
            return
        for shard, parts, *tensors in zip(self.shards, self._parts, *lists, strict=True):
            of_split = own.new_full((2 * len(shard.segments) + 1,), padding)
            of_split[1::2] = own[done : done + len(shard.segments)]
            done += len(shard.segments)
            for start, first, length, sizes in parts:
                factor = torch.repeat_interleave(of_split[first : first + len(sizes)], sizes, output_size=length)
                tensor, *others = (tensor.view(-1).narrow(0, start, length) for tensor in tensors)
                getattr(tensor, operation)(*others, factor)


def _split_sizes(shard: Shard) -> list[int]:
    """Lengths of gap, segment, gap, segment, …, gap."""
    sizes, end = [], 0
    for segment in shard.segments:
        assert segment.offset >= end, "segments in another order than the flat tensor's"
        sizes += [segment.offset - end, segment.length]
        end = segment.offset + segment.length
    return [*sizes, shard.tensor.numel() - end]


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """A flat tensor in parts of `ELEMENTS_AT_ONCE`: (first element, number of the first size, the part's own sizes)."""
    ends = list(itertools.accumulate(sizes))
    for start in range(0, ends[-1], ELEMENTS_AT_ONCE):
        end = min(start + ELEMENTS_AT_ONCE, ends[-1])
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, end)
        yield start, first, [b - a for a, b in itertools.pairwise([start, *ends[first:last], end])]
