"""The program of one rank of the doctor's collectives: python -m ds_vit.tools.doctor.measure.

Every rank times the same messages; rank 0 prints the figures as one line of JSON. A time is the best of several, as
machines are noisy; bus bandwidth follows nccl-tests (PERFORMANCE.md): bytes that cross a rank's link a second.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.tools.doctor.probe import WORD

SIZES = {"cpu": (1024, 2**20, 2**23), "cuda": (1024, 2**20, 2**26, 2**28)}
"""Bytes of a message (of the whole result, for gather and scatter)."""

_SMALL_MESSAGES, _SMALL_SECONDS = 1000, 4.0

MAX_PAIRS = 64
"""Pairs of hosts that are timed; of more than these the neighbours alone."""


def main() -> int:
    """Meet, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("rank", "world-size", "local-rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--leaders", required=True, help="the first rank of each host, with commas")
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_input, daemon=True).start()
    rank = arguments.rank
    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", arguments.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{arguments.address}:{arguments.port}",
        rank=rank,
        world_size=arguments.world_size,
        timeout=datetime.timedelta(seconds=arguments.seconds),
    )
    leaders = [int(word) for word in arguments.leaders.split(",")]
    result = measure(rank, device, leaders)
    if rank == 0:
        print(WORD + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(rank: int, device: torch.device, leaders: list[int]) -> dict[str, Any]:
    """Time everything (a collective).

    Returns:
        On rank 0: {"backend", "world_size", "pairs": [{"a", "b", "latency_seconds", "bytes_per_second"}],
        "collectives": [{"name", "bytes", "seconds", "bus_bytes_per_second"}], "tcp": [{"sent", "again"}]}; pairs by
        index into `leaders`; TCP's segments of each leader's host, and how many of them it had to send again.
    """
    sizes = SIZES[device.type]
    pairs = []
    for a, b in host_pairs(len(leaders)):
        found = _pair(rank, leaders[a], leaders[b], device, sizes[2])
        if found is not None:
            pairs.append({"a": a, "b": b, "latency_seconds": found[0], "bytes_per_second": found[1]})
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pairs)
    collectives = list(_collectives(device, sizes)) if dist.get_world_size() > 1 else []
    lost: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lost, _losses(device, collectives[0]["seconds"]) if len(leaders) > 1 else None)
    return {
        "tcp": [lost[leader] for leader in leaders if lost[leader] is not None],
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "pairs": [pair for own in gathered for pair in own],
        "collectives": collectives,
    }


def _losses(device: torch.device, seconds: float) -> dict[str, int] | None:
    """Count what is lost of many small messages with pauses between them: a large one loses some to its own rush.

    Args:
        device: where the messages lie.
        seconds: what one of them takes, the same on every rank; None is the answer where that leaves room for too few.
    """
    count = min(_SMALL_MESSAGES, int(_SMALL_SECONDS / seconds))
    if count < _SMALL_MESSAGES // 5:
        return None
    message = torch.zeros(256, device=device)
    dist.barrier()
    before = tcp_segments()
    for _ in range(count):
        dist.all_reduce(message)
        time.sleep(0.001)
    after = tcp_segments()
    return {name: after[name] - before[name] for name in after}


def tcp_segments(path: Path = Path("/proc/net/snmp")) -> dict[str, int]:
    """{"sent", "again"}: segments of TCP that this host has sent, and sent again as they were lost; 0 where unknown."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        names, values = (line.split()[1:] for line in path.read_text().splitlines() if line.startswith("Tcp:"))
        table = dict(zip(names, map(int, values), strict=True))
        return {"sent": table["OutSegs"], "again": table["RetransSegs"]}
    return {"sent": 0, "again": 0}


def host_pairs(num_hosts: int) -> list[tuple[int, int]]:
    """Which hosts are timed against each other: all pairs, or in a larger cluster each and the next."""
    pairs = list(itertools.combinations(range(num_hosts), 2))
    if len(pairs) <= MAX_PAIRS:
        return pairs
    return [(i, (i + 1) % num_hosts) for i in range(num_hosts)]


def bus_factor(name: str, world_size: int) -> float:
    """Bytes over a rank's link for each byte of the message, as in nccl-tests."""
    return (2 if name == "all_reduce" else 1) * (world_size - 1) / world_size


def _pair(rank: int, a: int, b: int, device: torch.device, size: int) -> tuple[float, float] | None:
    """(one way of a small message in seconds, bytes a second of a large one), on rank `a` alone."""
    dist.barrier()
    if rank not in (a, b):
        return None
    small, large = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (8, size))
    other = b if rank == a else a

    def there_and_back(message: torch.Tensor) -> None:
        if rank == a:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    latency = fastest(lambda: there_and_back(small), device, 20) / 2
    seconds = fastest(lambda: there_and_back(large), device, 4) / 2
    return (latency, size / seconds) if rank == a else None


def _collectives(device: torch.device, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    world = dist.get_world_size()
    for name, size in itertools.product(("all_reduce", "all_gather", "reduce_scatter"), sizes):
        count = max(1, size // 4 // world)
        whole = torch.zeros(count * world, device=device)
        part = torch.zeros(count, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
        }
        dist.barrier()
        seconds = torch.tensor(fastest(calls[name], device, 5), device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        bus = 4 * count * world * bus_factor(name, world) / float(seconds)
        yield {"name": name, "bytes": 4 * count * world, "seconds": float(seconds), "bus_bytes_per_second": bus}


def fastest(function: Callable[[], Any], device: torch.device, times: int) -> float:
    """The shortest of several runs after a warm-up, in seconds."""
    best = float("inf")
    for turn in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:
            best = min(best, time.perf_counter() - start)
    return best


def _end_with_input() -> None:
    """The doctor holds the stdin of the ranks it starts: when that closes, the figures are no longer wanted."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
