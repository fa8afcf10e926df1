"""Arithmetic by parameter on flat tensors: what a step of LAMB and the moving average cost, and its two ways."""

import oracle
import pytest
import torch
from zero_layouts import start, words


def measure(argv):
    """On a rank: what the moving average and a LAMB step cost, counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from ds_vit.optim.ema import Ema

    engine = start(argv)
    zero_map = engine.zero_map
    base = zero_map.base
    calls = []
    all_reduce = torch.distributed.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    for group, shards in enumerate([[s for s in zero_map.shards if s.group == g] for g in (0, 1)]):
        base.param_groups[group]["params"] = [shard.parameter for shard in shards]
    for shard in zero_map.shards:
        shard.parameter.grad = torch.ones_like(shard.tensor).view_as(shard.parameter)
    torch.distributed.all_reduce = counting
    base.step()
    torch.distributed.all_reduce = all_reduce
    adapted = sum(len(s.names) for s in zero_map.shards if base.param_groups[s.group]["weight_decay"])
    ratios = base.trust_ratios()

    ema = Ema(zero_map, 0.9)
    held = sum(t.untyped_storage().nbytes() for t in ema.tensors)
    elements = sum(segment.length for shard in zero_map.shards for segment in shard.segments)
    padding = sum(shard.tensor.numel() for shard in zero_map.shards) - elements

    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.clone.default:
                self.made = max(self.made, out.numel())
            return out

    Ema._CHUNK = 1000
    with Largest() as largest, ema.swapped():
        pass
    groups = len(base.param_groups)
    engine.close()
    return calls, adapted, len(ratios), held, elements, padding, largest.made, groups


@pytest.mark.parametrize("stage", [1, 3])
def test_cost(ranks, cifar32, stage, tmp_path):
    """One collective of 2·P numbers a step, 4 bytes an element of the average, no copy of a shard to evaluate it."""
    argv = words(cifar32, stage, {"optimizer": oracle.BLOCKS["lamb"]}, tmp_path / "config.json")
    for calls, adapted, ratios, held, elements, padding, largest, groups in ranks.run(2, measure, argv):
        assert calls == [2 * adapted * 4]
        assert ratios == adapted
        assert held == 4 * (elements + padding)
        assert padding < 64 + 2 * adapted * (stage == 3) * 2
        assert 0 < largest <= 1000
        assert groups <= 2


def by_both_ways(argv):
    """On a rank: the arithmetic by segments in one call, and with a factor for each of 2**22 or of 1000 elements."""
    from ds_vit.optim import segmented
    from ds_vit.optim.segmented import SegmentedTensors

    engine = start(argv)
    results = []
    for one_call, segmented.ELEMENTS_AT_ONCE in ((True, 2**22), (False, 2**22), (False, 1000)):
        tensors = SegmentedTensors(engine.zero_map, [s.parameter for s in engine.zero_map.shards])
        tensors._one_call = one_call
        factors = torch.rand(len(tensors.names), generator=torch.Generator().manual_seed(1))
        flats = [torch.arange(s.tensor.numel(), dtype=torch.float32) for s in engine.zero_map.shards]
        others = [flat.flip(0) for flat in flats]
        tensors.mul_(flats, factors)
        tensors.addcmul_(flats, others, factors)
        views = tensors.views(flats)
        results.append(torch.cat(views) if views else torch.zeros(0))
    engine.close()
    return all(torch.equal(results[0], other) for other in results[1:]), results[0].numel()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_both_ways_of_arithmetic_agree(ranks, cifar32, stage, tmp_path):
    """The GPU's way, on the CPU: a factor that lands on a neighbour."""
    for same, elements in ranks.run(2, by_both_ways, words(cifar32, stage, {}, tmp_path / "config.json")):
        assert same
        assert elements > 1000
