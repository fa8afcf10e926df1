"""ZeRO's gathering on a CPU: the bits of torch's own, without the memory that it takes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from curves import train_main
from project import ROOT
from runs import ONE_BLOCK

from ds_vit.parallel.groups import gather_flats


def values(rank, dtype, count):
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 100).to(dtype)


def exchange_both_ways(dtype):
    """On a rank: ours beside torch's, in the world and in a group whose ranks have other numbers in it."""
    rank = dist.get_rank()
    for ranks in ([0, 1, 2], [2, 1]):
        group = dist.new_group(ranks, sort_ranks=False) if len(ranks) < 3 else None
        if rank not in ranks:
            continue
        size, place = dist.get_world_size(group), dist.get_rank(group)
        theirs = [torch.empty(count * size, dtype=dtype) for count in (7, 2)]
        ours = [torch.full_like(flat, 3) for flat in theirs]
        for count, flat, other in zip((7, 2), ours, theirs, strict=True):
            part = flat.chunk(size)[place].copy_(values(rank, dtype, count))
            dist.all_gather_into_tensor(other, part, group=group)
        gather_flats(ours, group)
        assert all(map(torch.equal, ours, theirs))
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_torchs(ranks, dtype):
    # Catches: a rank's number in the world taken for that in its group.
    assert ranks.run(3, exchange_both_ways, dtype) == [True] * 3


def train_without_torchs(argv):
    """On a rank: train where torch's own collectives cannot be called."""
    refused = mock.Mock(side_effect=AssertionError("torch's own collective"))
    with mock.patch.multiple(dist, all_gather_into_tensor=refused, reduce_scatter_tensor=refused):
        return train_main(argv)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_exchanges_in_place(ranks, tmp_path, stage):
    """A collective of DeepSpeed's that goes another way, or a share that is asked for elsewhere."""
    argv = [*ONE_BLOCK, "--batch-size", "4", "--max-steps", "2", "--val-split", "", "--checkpoint-interval", "0"]
    argv += ["--deepspeed_config", ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json", "--output", tmp_path / "run"]
    assert ranks.run(2, train_without_torchs, [str(word) for word in argv]) == [0, 0]
