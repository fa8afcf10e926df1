"""Who puts which matrix together: planned without processes, for each way in which ranks hold the parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_vit.optim.matrices import WholeMatrices
from ds_vit.parallel.segment import Segment
from ds_vit.parallel.tensor import TensorSlice
from ds_vit.parallel.zero_map import Shard

SHAPES = {"qkv": (12, 4), "proj": (4, 4), "fc1": (8, 4), "kernel": (4, 3, 2, 2)}
CUT = {"qkv": (0, (4, 4, 4)), "fc1": (0, (8,)), "proj": (1, (4,))}  # dimension and sections; the kernel is replicated


def cost(shape):
    return torch.Size(shape).numel()


def whole(name):
    """Every element another number, and every matrix other ones."""
    first = 1000 * (1 + [*SHAPES].index(name))
    return torch.arange(first, first + cost(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])


def slice_of(name, tp_rank, tp):
    dim, sections = CUT.get(name, (None, ()))
    return TensorSlice(SHAPES[name], dim if tp > 1 else None, sections, tp_rank, tp)


def rank_of(dp_rank, dp, tp_rank, tp, zero):
    """A rank's map and flat tensor: all it has (no ZeRO), a partition of the concatenation (1), shares (3)."""
    segments, values, offset, total = [], [], 0, 0
    lengths = {name: cost(slice_of(name, tp_rank, tp).local_shape) for name in SHAPES}
    partition = -(-sum(lengths.values()) // dp)
    for name, length in lengths.items():
        cut = slice_of(name, tp_rank, tp)
        if zero == 0:
            start, stop = 0, length
        elif zero == 1:
            start = min(max(partition * dp_rank - total, 0), length)
            stop = min(max(partition * (dp_rank + 1) - total, 0), length)
        else:
            share = -(-length // dp)
            start, stop = min(share * dp_rank, length), min(share * (dp_rank + 1), length)
        total += length
        if stop > start:
            segments.append(Segment(name, cut, start, stop - start, 0, offset))
            values.append(cut.take(whole(name)).reshape(-1)[start:stop])
            offset += stop - start
    flat = torch.cat([*values, torch.full((3,), -1.0)])  # padding
    parameter = torch.nn.Parameter(flat)
    shard = Shard(flat, parameter, tuple(SHAPES), tuple(segments), 0)
    zero_map = SimpleNamespace(
        group=None,
        group_size=dp * tp,
        device=torch.device("cpu"),
        shard_of=lambda _: shard,
        counts=lambda s: (zero > 0 or dp_rank == 0) and (tp_rank == 0 or not s.replicated),
    )
    return zero_map, shard


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (5, 1)])
def test_every_matrix_is_worked_on_once_and_goes_back(monkeypatch, dp, tp, zero):
    # Catches: an element that is missing, given twice or out of place; a matrix with two owners or none; a part that
    # does not come back; padding that is written to; a rank that waits for what nobody sends.
    world = [rank_of(d, dp, t, tp, zero) for d in range(dp) for t in range(tp)]
    everybodys = [[(s, zero_map.counts(s)) for s in shard.segments] for zero_map, shard in world]
    monkeypatch.setattr(WholeMatrices, "_everybodys", lambda self: everybodys)
    plans = []
    for rank, (zero_map, shard) in enumerate(world):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None, rank=rank: rank)
        plans.append(WholeMatrices(zero_map, [shard.parameter], cost))
    owned = [name for plan in plans for name in plan.owned]
    assert sorted(owned) == sorted(SHAPES)
    loads = [sum(cost(SHAPES[name]) for name in plan.owned) for plan in plans]
    assert max(loads) <= min(loads) + max(map(cost, SHAPES.values()))

    def run(step):
        """All ranks at once: what each gives is handed over where the all-to-all stands."""
        given = {}
        for rank, plan in enumerate(plans):
            monkeypatch.setattr(plan, "_exchange", lambda g, e, rank=rank: given.__setitem__(rank, g) or stop())
            with pytest.raises(_Stop):
                step(plan, rank)
        results = []
        for rank, plan in enumerate(plans):
            received = [given[source][rank] for source in range(len(plans))]

            def check(g, expected, received=received):
                lengths = [[value.numel() for value in values] for values in received]
                assert lengths == [[segment.length for segment in segments] for segments in expected]
                return received

            monkeypatch.setattr(plan, "_exchange", check)
            results.append(step(plan, rank))
        return results

    gathered = run(lambda plan, rank: plan._gather([world[rank][1].tensor]))
    for plan, found in zip(plans, gathered, strict=True):
        assert sorted(found) == sorted(plan.owned)
        for name, matrix in found.items():
            assert torch.equal(matrix, whole(name))
    targets = [torch.full_like(shard.tensor, -1.0) for _, shard in world]
    run(lambda plan, rank: plan._scatter({name: whole(name) for name in plan.owned}, [targets[rank]]))
    for target, (_, shard) in zip(targets, world, strict=True):
        assert torch.equal(target, shard.tensor)


class _Stop(Exception):
    """A rank stands at a collective."""


def stop():
    raise _Stop
