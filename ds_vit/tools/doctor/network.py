"""Time real messages between all hosts; the doctor starts a few ranks on each: python -m ds_vit.tools.doctor.network.

A time is the best of several, as machines are noisy. Bus bandwidth follows nccl-tests (PERFORMANCE.md): bytes that
cross a rank's link a second.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vit.tools.doctor.facts import WORD
from ds_vit.tools.doctor.remote import Answer, Program, Way

_LARGE = {"cpu": 2**23, "cuda": 2**28}  # bytes
_SMALL_MESSAGES, _SMALL_SECONDS = 1000, 4.0
_MAX_RANKS_ON_CPU = 2  # a host: more measure its cores

MAX_PAIRS = 64
"""Pairs of hosts that are timed; of more than these only the neighbours."""


@dataclass(frozen=True)
class Figures:
    """What the ranks measured; see `measure`. `problem` where they could not, on the hosts `culprits`."""

    hosts: tuple[str, ...]
    measured: Mapping[str, Any] | None = None
    problem: str = ""
    culprits: tuple[str, ...] = ()


def start_ranks(answers: Sequence[Answer], way: Way, address: str, port: int, seconds: float) -> Figures:
    """Start ranks on every host, and wait for their figures.

    Args:
        answers: of the hosts that are reachable.
        way: how programs are started there.
        address, port: where rank 0 will listen.
        seconds: all of it takes no longer.
    """
    hosts = tuple(answer.host.name for answer in answers)
    counts = []
    for answer in answers:
        assert answer.facts is not None
        counts.append(min(answer.host.slots, len(answer.facts.accelerators) or _MAX_RANKS_ON_CPU))
    leaders = [sum(counts[:i]) for i in range(len(counts))]
    if sum(counts) == 1:
        return Figures(hosts)
    shared = {"world-size": sum(counts), "port": port, "address": address, "seconds": seconds / 2}
    shared["leaders"] = ",".join(map(str, leaders))
    deadline = time.monotonic() + seconds
    ranks: list[Program] = []
    try:
        for answer, count, leader in zip(answers, counts, leaders, strict=True):
            for local_rank in range(count):
                words = {**shared, "rank": leader + local_rank, "local-rank": local_rank}
                arguments = [f"--{name}={value}" for name, value in words.items()]
                command = way.command(answer.host.name, "ds_vit.tools.doctor.network", arguments)
                ranks.append(Program(answer.host, command, way.cwd))
        while time.monotonic() < deadline:
            text = ranks[0].receive(time.monotonic() + 0.2)
            if text is not None:
                return Figures(hosts, measured=json.loads(text))
            failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
            if failed:
                time.sleep(1.0)  # for the end of its output
                return Figures(hosts, problem=_error_of(failed[0]), culprits=(failed[0].host.name,))
        problem = f"the ranks did not meet and finish within {seconds:.0f} s"
        return Figures(hosts, problem=problem, culprits=hosts)
    finally:
        for rank in ranks:
            rank.end()


def _error_of(rank: Program) -> str:
    """The last line of a rank's output that looks like an error."""
    lines = list(rank.output) or [f"exit code {rank.process.poll()}"]
    errors = [line for line in lines if "rror" in line and not line.startswith(("[W", "File"))]
    return (errors or lines)[-1][:300]


# ---- on a rank -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Meet, measure, print."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("rank", "world-size", "local-rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--leaders", required=True, help="the first rank of each host, with commas")
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_input, daemon=True).start()
    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", arguments.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://{arguments.address}:{arguments.port}",
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout=datetime.timedelta(seconds=arguments.seconds),
    )
    result = measure(arguments.rank, device, [int(word) for word in arguments.leaders.split(",")])
    if arguments.rank == 0:
        print(WORD + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(rank: int, device: Any, leaders: list[int]) -> dict[str, Any]:
    """Time messages (a collective).

    Returns:
        {"backend", "world_size", "all_reduce": {"bytes", "seconds", "bus_bytes_per_second"},
        "pairs": [{"a", "b", "latency_seconds", "bytes_per_second"}], "tcp": [{"sent", "again"}]}: pairs by index into
        `leaders`; TCP's segments of each leader's host, and how many of them it had to send again.
    """
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    small, large = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (8, _LARGE[device.type]))

    def one_way(message: torch.Tensor, a: int, b: int, times: int) -> float:
        def there_and_back() -> None:
            for is_sender in (rank == a, rank != a):
                if is_sender:
                    dist.send(message, b if rank == a else a)
                else:
                    dist.recv(message, b if rank == a else a)

        return fastest(there_and_back, device, times) / 2

    own_pairs = []
    for a, b in host_pairs(len(leaders)):
        dist.barrier()
        if rank in (leaders[a], leaders[b]):
            latency, seconds = (one_way(m, leaders[a], leaders[b], n) for m, n in ((small, 20), (large, 4)))
            if rank == leaders[a]:
                figures = {"latency_seconds": latency, "bytes_per_second": large.numel() / seconds}
                own_pairs.append({"a": a, "b": b, **figures})
    dist.barrier()
    times = torch.tensor([fastest(lambda m=m: dist.all_reduce(m), device, 5) for m in (small, large)], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    small_seconds, seconds = times.tolist()
    losses = _count_losses(small, small_seconds) if len(leaders) > 1 else None
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (own_pairs, losses))
    bus = bus_factor(world) * large.numel() / seconds
    return {
        "backend": dist.get_backend(),
        "world_size": world,
        "all_reduce": {"bytes": large.numel(), "seconds": seconds, "bus_bytes_per_second": bus},
        "pairs": [pair for pairs, _ in gathered for pair in pairs],
        "tcp": [gathered[leader][1] for leader in leaders if gathered[leader][1] is not None],
    }


def _count_losses(message: Any, seconds: float) -> dict[str, int] | None:
    """Count what is lost of many small messages with pauses between them: a large one loses some to its own rush.

    Args:
        message: a small one.
        seconds: what it takes, the same on every rank; None is returned where that leaves room for too few.
    """
    import torch.distributed as dist

    count = min(_SMALL_MESSAGES, int(_SMALL_SECONDS / seconds))
    if count < _SMALL_MESSAGES // 5:
        return None
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


def bus_factor(world_size: int) -> float:
    """Bytes over a rank's link for each byte of an all-reduce, as in nccl-tests."""
    return 2 * (world_size - 1) / world_size


def fastest(function: Callable[[], Any], device: Any, times: int) -> float:
    """The shortest of several runs after a warm-up, in seconds."""
    import torch

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
