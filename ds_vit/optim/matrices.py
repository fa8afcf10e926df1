"""Whole matrices out of flat tensors: what works on a matrix needs all of it, and ZeRO and tensor slices cut it.

Each matrix is put together on one of the ranks that share it, worked on there, and its parts go back to all who hold
them. The matrices are dealt out by the cost of the work, so that no rank works on what another works on too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_vit.parallel.tensor import assemble_flat
from ds_vit.parallel.zero_map import Segment, ZeroMap


@dataclass(frozen=True)
class _Part:
    """A segment of a rank's flat tensors.

    Attributes:
        segment: where it lies, in its matrix and in its flat tensor.
        block: which of the rank's flat tensors.
        gives: whether it is among those that make each matrix once.
    """

    segment: Segment
    block: int
    gives: bool

    @property
    def place(self) -> tuple[str, int, int, int]:
        """What it is of the whole; the same for copies on several ranks."""
        segment = self.segment
        return segment.name, segment.tp_slice.slice_rank, segment.start, segment.length


class WholeMatrices:
    """The plan of who sends which part to whom, for flat tensors that are updated together (a collective).

    Args:
        zero_map: the map of this rank.
        parameters: tensors out of the optimizer's param_groups.
        cost: of the work on a tensor of this shape, in any unit.
    """

    def __init__(
        self,
        zero_map: ZeroMap,
        parameters: Sequence[torch.Tensor],
        cost: Callable[[tuple[int, ...]], float],
    ) -> None:
        self._zero_map = zero_map
        shards = [zero_map.shard_of(parameter) for parameter in parameters]
        self._parts = [
            _Part(segment, block, zero_map.counts(segment))
            for block, shard in enumerate(shards)
            for segment in shard.segments
        ]
        held = self._everybodys()
        self._rank = 0 if len(held) == 1 else dist.get_rank(zero_map.group)
        self._slices = {part.segment.name: part.segment.tp_slice for parts in held for part in parts}
        owners = _owners(held, {name: cost(cut.full_shape) for name, cut in self._slices.items()})
        self.owned = tuple(name for name, owner in owners.items() if owner == self._rank)
        """timm names of the matrices that this rank works on."""
        # By rank; what travels between two ranks does so in the order of the holder's parts.
        places = [{part.place for part in parts} for parts in held]
        self._to_give: list[list[_Part]] = [[] for _ in held]
        self._to_take_back: list[list[_Part]] = [[] for _ in held]
        for part in self._parts:
            owner = owners[part.segment.name]
            self._to_take_back[owner].append(part)
            if _travels(part, self._rank, owner, places):
                self._to_give[owner].append(part)
        mine = frozenset(self.owned)
        self._to_give_back = [[part for part in parts if part.segment.name in mine] for parts in held]
        self._to_take = [
            [part for part in parts if _travels(part, rank, self._rank, places)]
            for rank, parts in enumerate(self._to_give_back)
        ]

    def _everybodys(self) -> list[list[_Part]]:
        """The parts of every rank of the group, by rank."""
        if self._zero_map.group_size == 1:
            return [self._parts]
        held: list[list[_Part]] = [[] for _ in range(self._zero_map.group_size)]
        dist.all_gather_object(held, self._parts, group=self._zero_map.group)
        return held

    @torch.no_grad()
    def apply_(self, tensors: Sequence[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every matrix by `work` of it, in place (two collectives of the ranks that share the matrices).

        Args:
            tensors: laid out like the shards'; their padding is not touched.
            work: called with the whole tensor, fp32, on the map's device; gives one of that shape.
        """
        flats = [tensor.view(-1) for tensor in tensors]
        whole = self._gather(flats)
        for name in self.owned:
            whole[name] = work(whole.pop(name))
        self._scatter(whole, flats)

    def _gather(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The matrices that this rank owns."""
        given = [[part.segment.of(flats[part.block]) for part in parts] for parts in self._to_give]
        slices: dict[str, list[torch.Tensor]] = {}
        for name in self.owned:
            cut = self._slices[name]
            size = math.prod(cut.local_shape)
            slices[name] = [torch.empty(size, device=self._zero_map.device) for _ in range(cut.num_slices)]
        for parts, values in zip(self._to_take, self._exchange(given, self._to_take), strict=True):
            for part, value in zip(parts, values, strict=True):
                name, number, start, length = part.place
                slices[name][number].narrow(0, start, length).copy_(value)
        return {name: assemble_flat(slices.pop(name), self._slices[name]) for name in self.owned}

    def _scatter(self, whole: dict[str, torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
        """Every part of the matrices to those who hold it."""
        slices: dict[tuple[str, int], torch.Tensor] = {}
        given = []
        for parts in self._to_give_back:
            given.append([])
            for part in parts:
                name, number, start, length = part.place
                if (name, number) not in slices:
                    cut = part.segment.tp_slice
                    slices[name, number] = (whole[name] if cut.dim is None else cut.take(whole[name])).reshape(-1)
                given[-1].append(slices[name, number].narrow(0, start, length))
        for parts, values in zip(self._to_take_back, self._exchange(given, self._to_take_back), strict=True):
            for part, value in zip(parts, values, strict=True):
                part.segment.of(flats[part.block]).copy_(value)

    def _exchange(
        self, given: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[_Part]]
    ) -> list[Sequence[torch.Tensor]]:
        """One all-to-all.

        Args:
            given: by rank, what it gets.
            expected: by rank, which parts come from it.

        Returns:
            By rank, the values of these parts.
        """
        if len(given) == 1:
            return [given[0]]
        device = self._zero_map.device
        sent = [value.to(device, torch.float32) for values in given for value in values]
        lengths = [[part.segment.length for part in parts] for parts in expected]
        received = torch.empty(sum(map(sum, lengths)), device=device)
        dist.all_to_all_single(
            received,
            torch.cat(sent) if sent else torch.empty(0, device=device),
            [sum(numbers) for numbers in lengths],
            [sum(value.numel() for value in values) for values in given],
            group=self._zero_map.group,
        )
        by_rank = received.split([sum(numbers) for numbers in lengths])
        return [values.split(numbers) for values, numbers in zip(by_rank, lengths, strict=True)]


def _owners(held: Sequence[Sequence[_Part]], costs: dict[str, float]) -> dict[str, int]:
    """The rank that works on each matrix: the largest first, to the rank with least to do, or that holds most of it."""
    holds = [defaultdict(int) for _ in held]
    for rank, parts in enumerate(held):
        for part in parts:
            holds[rank][part.segment.name] += part.segment.length
    load = [0.0] * len(held)
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(len(held)), key=lambda rank: (load[rank], -holds[rank][name], rank))
        load[owners[name]] += costs[name]
    return owners


def _travels(part: _Part, rank: int, owner: int, places: Sequence[Set[tuple[str, int, int, int]]]) -> bool:
    """Whether a rank's part goes into the owner's matrix: the owner's own, or what counts where the owner has no copy.

    Args:
        part: of `rank`.
        rank: who holds it.
        owner: of its matrix.
        places: by rank, what it holds.
    """
    return rank == owner or (part.gives and part.place not in places[owner])
