"""Do the ranks that should hold the same weights hold the same weights? Bitwise, every so many steps.

A replica that drifts (a faulty link, a missed reduction, a driver's nondeterminism) changes the curve long before it
shows in the loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_vit.engine.base import Engine
from ds_vit.fault_tolerance.errors import ReplicasDiffer
from ds_vit.models import timm_names

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar that depends on every bit of the tensor and on where it stands (wrapping arithmetic)."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()]).to(torch.int64)
    place = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64) * -0x61C8864680B583EB
    return ((words + 0x1234567) * (place | 1)).sum()


def check_replicas(engine: Engine, step: int) -> None:
    """Compare what data-parallel ranks have in common, and what tensor-parallel ranks have (a collective).

    Under ZeRO-3 every weight exists once, and plan/parallel.py refuses to look for copies.

    Args:
        engine: the running engine.
        step: named in the message.

    Raises:
        ReplicasDiffer: on every rank; names the first parameters that differ on this rank's groups, or says that
            another rank found some.
    """
    names = timm_names(engine.module)
    parameters = list(engine.module.named_parameters())
    sums = torch.stack([checksum(p) for _, p in parameters]).to(engine.device)
    comparisons = [("data", engine.groups.dp, torch.ones(len(sums), dtype=torch.bool))]
    if engine.groups.tp is not None:
        common = torch.tensor([not getattr(p, "tensor_model_parallel", False) for _, p in parameters])
        comparisons.append(("tensor", engine.groups.tp, common))
    found: list[str] = []
    for kind, group, counts in comparisons:
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        differs = ((low != high).cpu() & counts).nonzero().flatten().tolist()
        found += [f"{names[parameters[i][0]]} ({kind}-parallel ranks)" for i in differs]
    total = int(engine.sum(torch.tensor(len(found), device=engine.device)))
    if total:
        what = f"{len(found)} parameters differ: {', '.join(found[:5])}" if found else "another rank found a difference"
        raise ReplicasDiffer(
            f"--check-replicas: at step {step} ranks that should hold the same weights do not; {what}; "
            "the run cannot be trusted from here on: go back to what was saved before"
        )
