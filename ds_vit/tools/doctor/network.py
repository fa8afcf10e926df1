"""Time real messages between all hosts; the doctor starts a few ranks on each: python -m ds_vit.tools.doctor.network.

A time is the best of several, as machines are noisy. Bus bandwidth follows nccl-tests (PERFORMANCE.md): bytes that
cross a rank's link per second.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from ds_vit.tools.doctor.facts import WORD

_LARGE_ON_CPU, _LARGE = 2**23, 2**28  # bytes

MAX_PAIRS = 64
"""Pairs of hosts that are timed; of more than these only the neighbours."""


def main() -> int:
    """Meet, measure, print."""
    import torch
    import torch.distributed as dist

    words = json.loads(sys.argv[1])
    device, kind = torch.device("cpu"), torch.accelerator.current_accelerator(check_available=True)
    if kind and os.environ.get("DS_ACCELERATOR") != "cpu":
        device = torch.device(kind.type, words["local_rank"])
        torch.accelerator.set_device_index(device.index)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=words["seconds"])
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=words["address"],
        rank=words["rank"],
        world_size=words["world"],
        timeout=limit,
    )
    result = measure(words["rank"], device, words["leaders"])
    if words["rank"] == 0:
        print(WORD + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(rank: int, device: Any, leaders: list[int]) -> dict[str, Any]:
    """Time messages (a collective).

    Returns:
        {"backend", "world_size", "all_reduce": {"bytes", "seconds", "bus_bytes_per_second"},
        "pairs": [{"a", "b", "latency_seconds", "bytes_per_second"}]}: pairs by index into `leaders`.
    """
    import torch
    import torch.distributed as dist

    from ds_vit.device import is_accelerator

    world = dist.get_world_size()
    size = _LARGE if is_accelerator(device) else _LARGE_ON_CPU
    small, large = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (8, size))

    def one_way(message: torch.Tensor, a: int, b: int, times: int) -> float:
        peer = b if rank == a else a

        def there_and_back() -> None:
            for pass_on in (dist.send, dist.recv) if rank == a else (dist.recv, dist.send):
                pass_on(message, peer)

        return fastest(there_and_back, device, times) / 2

    own_pairs = []
    for a, b in host_pairs(len(leaders)):
        dist.barrier()
        if rank in (leaders[a], leaders[b]):
            latency, seconds = (one_way(m, leaders[a], leaders[b], n) for m, n in ((small, 20), (large, 4)))
            figures = {"latency_seconds": latency, "bytes_per_second": large.numel() / seconds}
            own_pairs += [{"a": a, "b": b, **figures}] if rank == leaders[a] else []
    dist.barrier()
    slowest = torch.tensor(fastest(lambda: dist.all_reduce(large), device, 5), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds, bus = slowest.item(), bus_factor(world) * large.numel() / slowest.item()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, own_pairs)
    return {
        "backend": dist.get_backend(),
        "world_size": world,
        "all_reduce": {"bytes": large.numel(), "seconds": seconds, "bus_bytes_per_second": bus},
        "pairs": [pair for pairs in gathered for pair in pairs],
    }


def host_pairs(num_hosts: int) -> list[tuple[int, int]]:
    """The pairs of hosts that are timed: all of them, or in a larger cluster each host and the next."""
    pairs = list(itertools.combinations(range(num_hosts), 2))
    if len(pairs) <= MAX_PAIRS:
        return pairs
    return [(i, (i + 1) % num_hosts) for i in range(num_hosts)]


def bus_factor(world_size: int) -> float:
    """Bytes over a rank's link for each byte of an all-reduce, as in nccl-tests."""
    return 2 * (world_size - 1) / world_size


def fastest(function: Callable[[], Any], device: Any, times: int) -> float:
    """The shortest of several runs after a warm-up, in seconds."""
    from ds_vit.device import synchronize

    def seconds() -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start

    seconds()
    return min(seconds() for _ in range(times))


if __name__ == "__main__":
    sys.exit(main())
