"""`--workers auto`: loader processes a rank, from the cores that it may use and the ranks that it shares them with.

A core is left for each training process. Of the rest, each rank that only reads targets (a pipeline's last stage) gets
one, and the ranks that read images get equal parts, whole ones. Which rank may use which cores is known when the ranks
have met: a launcher or Slurm may have bound each to its own, or all of a host may share them.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ds_vit.training.plan import Plan

MOST = 16
"""Of a rank: at some 500 images a second a core, more than any model takes that is worth sharing over GPUs."""


class Loading(NamedTuple):
    """What a rank loads, and where.

    Attributes:
        host: its name.
        cores: that the process may use.
        quota: how many of them its container is given the time of.
        reads: "images", "targets" or "" for nothing.
    """

    host: str
    cores: frozenset[int]
    reads: str
    quota: int = 2**31


def dealt(ranks: Sequence[Loading], rank: int) -> tuple[int, str]:
    """Loader processes of a rank, and how the number came about, for people.

    Args:
        ranks: all of the run, or those of this rank's host.
        rank: its place among them.
    """
    own = ranks[rank]
    near = [other for other in ranks if other.host == own.host and other.cores & own.cores]
    num_cores = min(len(frozenset().union(*(other.cores for other in near))), own.quota)
    num_loaders = sum(other.reads == "images" for other in near)
    num_targets = sum(other.reads == "targets" for other in near)
    number = 1
    if own.reads == "images":
        number = max(1, min(MOST, (num_cores - len(near) - num_targets) // num_loaders))
    trained = f"{len(near)} training process{'es' if len(near) > 1 else ''}"
    return number, f"{num_cores} cores for {trained}, {num_loaders} of which load images"


def cpu_quota(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores' time the container is given; affinity knows nothing of it."""
    words = limit_file.read_text().split() if limit_file.is_file() else []
    if len(words) != 2 or not words[0].isdigit():  # "max 100000"
        return 2**31
    return max(1, int(words[0]) // int(words[1]))


def reads_of(plan: Plan, rank: int) -> str:
    """What a rank reads of the samples, by the fields of its pipeline stage; one rank of a tensor-parallel group."""
    layout = plan.parallel.layout
    here = {"first": layout.stage(rank) == 0, "last": layout.stage(rank) == layout.pp - 1}
    if layout.tp_rank(rank):
        return ""
    task = plan.model.task
    fields = task.fields(training=plan.optimizer is not None)
    reads = {field.reads for field in fields if here[field.stage]}
    return "images" if "images" in reads else "targets" if reads else ""


def deal_alone(plan: Plan) -> Plan:
    """The plan with a number for `--workers auto`, as if all ranks of this host had the same cores."""
    if plan.config.workers != "auto":
        return plan
    process = plan.parallel.process
    first = process.rank - process.local_rank
    here = range(first, min(first + (process.local_world_size or 1), process.world_size))
    cores = frozenset(os.sched_getaffinity(0))
    ranks = [Loading("", cores, reads_of(plan, rank), cpu_quota()) for rank in here]
    return _with(plan, ranks, min(process.local_rank, len(ranks) - 1))


def deal_together(plan: Plan) -> Plan:
    """The same by the cores that each rank has (a collective)."""
    if plan.config.workers != "auto":
        return plan
    rank = plan.parallel.process.rank
    ranks: list[Loading] = [Loading("", frozenset(), "")] * plan.parallel.layout.world_size
    own = Loading(socket.gethostname(), frozenset(os.sched_getaffinity(0)), reads_of(plan, rank), cpu_quota())
    dist.all_gather_object(ranks, own)
    return _with(plan, ranks, rank)


def _with(plan: Plan, ranks: Sequence[Loading], rank: int) -> Plan:
    number, why = dealt(ranks, rank)
    return dataclasses.replace(plan, workers=number, workers_from=why)
