"""Whole matrices out of flat tensors: what works on a matrix needs all of it, and ZeRO and tensor slices cut it.

Each matrix is gathered on one of the ranks that share it, processed there, and its parts go back to all who hold
them. The matrices are dealt out by the cost of the work, so that no rank works on what another works on too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ds_vit.parallel.segment import Segment
from ds_vit.parallel.tensor.slices import assemble_flat
from ds_vit.parallel.zero_map import ZeroMap


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
        self._own = [segment for shard in shards for segment in shard.segments]
        # The map's flat tensors that these parameters are, in their order.
        self._number = {segment.block: number for number, shard in enumerate(shards) for segment in shard.segments}
        told = self._everybodys()
        held = [[segment for segment, _ in segments] for segments in told]
        self._rank = 0 if len(held) == 1 else dist.get_rank(zero_map.group)
        self._slices = {segment.name: segment.tp_slice for segments in held for segment in segments}
        owners = _owners(held, {name: cost(cut.full_shape) for name, cut in self._slices.items()})
        self.owned = tuple(name for name, owner in owners.items() if owner == self._rank)
        """timm names of the matrices that this rank works on."""
        places = [{segment.place for segment in segments} for segments in held]
        counted = [{segment.place for segment, counts in segments if counts} for segments in told]

        def travels(segment: Segment, rank: int, owner: int) -> bool:
            """Whether a rank's segment goes into the owner's matrix: its own, or what counts where it has no copy."""
            return rank == owner or (segment.place in counted[rank] and segment.place not in places[owner])

        # By rank; what travels between two ranks does so in the order of the holder's segments.
        self._to_give: list[list[Segment]] = [[] for _ in held]
        self._to_take_back: list[list[Segment]] = [[] for _ in held]
        for segment in self._own:
            owner = owners[segment.name]
            self._to_take_back[owner].append(segment)
            if travels(segment, self._rank, owner):
                self._to_give[owner].append(segment)
        mine = frozenset(self.owned)
        self._to_give_back = [[segment for segment in segments if segment.name in mine] for segments in held]
        self._to_take = [
            [segment for segment in segments if travels(segment, rank, self._rank)]
            for rank, segments in enumerate(self._to_give_back)
        ]

    def _everybodys(self) -> list[list[tuple[Segment, bool]]]:
        """By rank of the group: its segments, and whether each is among those that make every matrix once."""
        own = [(segment, self._zero_map.counts(segment)) for segment in self._own]
        if self._zero_map.group_size == 1:
            return [own]
        held: list[list[tuple[Segment, bool]]] = [[] for _ in range(self._zero_map.group_size)]
        dist.all_gather_object(held, own, group=self._zero_map.group)
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
        given = [[s.of(flats[self._number[s.block]]) for s in segments] for segments in self._to_give]
        slices: dict[str, list[torch.Tensor]] = {}
        for name in self.owned:
            cut = self._slices[name]
            size = math.prod(cut.local_shape)
            slices[name] = [torch.empty(size, device=self._zero_map.device) for _ in range(cut.num_slices)]
        for segments, values in zip(self._to_take, self._exchange(given, self._to_take), strict=True):
            for segment, value in zip(segments, values, strict=True):
                name, number, start, length = segment.place
                slices[name][number].narrow(0, start, length).copy_(value)
        return {name: assemble_flat(slices.pop(name), self._slices[name]) for name in self.owned}

    def _scatter(self, whole: dict[str, torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
        """Every segment of the matrices to those who hold it."""
        slices: dict[tuple[str, int], torch.Tensor] = {}
        given = []
        for segments in self._to_give_back:
            given.append([])
            for segment in segments:
                name, number, start, length = segment.place
                if (name, number) not in slices:
                    cut = segment.tp_slice
                    slices[name, number] = (whole[name] if cut.dim is None else cut.take(whole[name])).reshape(-1)
                given[-1].append(slices[name, number].narrow(0, start, length))
        for segments, values in zip(self._to_take_back, self._exchange(given, self._to_take_back), strict=True):
            for segment, value in zip(segments, values, strict=True):
                segment.of(flats[self._number[segment.block]]).copy_(value)

    def _exchange(
        self, given: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Segment]]
    ) -> list[Sequence[torch.Tensor]]:
        """One all-to-all.

        Args:
            given: by rank, what it gets.
            expected: by rank, which segments come from it.

        Returns:
            By rank, the values of these segments.
        """
        if len(given) == 1:
            return [given[0]]
        device = self._zero_map.device
        sent = [value.to(device, torch.float32) for values in given for value in values]
        lengths = [[segment.length for segment in segments] for segments in expected]
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


def _owners(held: Sequence[Sequence[Segment]], costs: dict[str, float]) -> dict[str, int]:
    """The rank that works on each matrix: the largest first, to the rank with least to do, or that holds most of it."""
    holds = [defaultdict(int) for _ in held]
    for rank, segments in enumerate(held):
        for segment in segments:
            holds[rank][segment.name] += segment.length
    load = [0.0] * len(held)
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(len(held)), key=lambda rank: (load[rank], -holds[rank][name], rank))
        load[owners[name]] += costs[name]
    return owners
