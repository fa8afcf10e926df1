"""`--auto-batch`: the largest micro-batch that fits on every rank; accumulation keeps the global batch.

A micro-batch is legal where micro-batch x accumulation x data-parallel ranks is the global batch. In a pipeline
accumulation is also the number m of micro-batches that go through its p stages, and (p - 1) / (m + p - 1) of a step is
bubble. A larger micro-batch makes that worse, so that only those are tried that leave at least as many of them as there
are stages; where the batch is too small for it, one image at a time.

How the setting travels: `config/rules.py` rejects -b and --grad-accum-steps with it, `resolve/data.py` a fixed micro-
batch in the JSON. The run is then resolved with the micro-batch that it would have without the flag, and changed here:
before the ranks meet where all of them get the same result (--memory on a CPU), or for --dry-run; else when they have
met, because free memory differs from rank to rank. They take what fits on the fullest one. `config.yaml` keeps the
flag, so that a run that resumes elsewhere searches again, with the same global batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_vit.config.batch import BatchSizes, ways_to_share
from ds_vit.config.units import in_words, parse_bytes
from ds_vit.engine.start import device_of
from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.launching.process import Process
from ds_vit.planner.memory import in_host_memory, on_device
from ds_vit.tasks import ChainTask
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.memory import by_stage
from ds_vit.training.trial_step import TrialStep

# An estimate lacks some temporary memory. On a CPU, ViT-S in fp32 grew by 15 to 21 % more than its estimate; there is
# no error to catch: the system kills a process that uses too much.
_ALLOWANCE = 1.25
_ESTIMATED = "estimated, with a quarter more for what is not counted"

Try = Callable[[BatchSizes], int]
"""Allocates a training step's memory temporarily; returns the bytes of the rank, or raises where there are too few."""


@dataclass(frozen=True)
class Memory:
    """The bytes that a rank may use, and where the number comes from."""

    bytes: int
    whose: str


@dataclass(frozen=True)
class Found:
    """The micro-batch that fits on a rank.

    Attributes:
        micro_batch: the largest; 0 where not one image fits.
        needs: bytes of a rank with it, or with one image.
        larger: the next legal one, or None.
        larger_needs: bytes of a rank with that.
        memory: of the rank.
        how: "measured" or estimated, for people.
    """

    micro_batch: int
    needs: int
    larger: int | None
    larger_needs: int
    memory: Memory
    how: str


class Choice(NamedTuple):
    """The batch arithmetic with the micro-batch that fits, and a line that says why."""

    batch: BatchSizes
    note: str


def choose_batch(config: EngineConfig, memory: str, process: Process, *, on_cpu: bool) -> Choice:
    """Choose by estimates, before the ranks meet: for --dry-run, and where every rank gets the same result.

    Args:
        config: of the engine, with any legal batch.
        memory: --memory; "" for what is free.
        process: this rank.
        on_cpu: there is no accelerator.

    Raises:
        UserError: not one image fits.
    """
    return _choice(config, by_estimate(config, memory_of_rank(memory, process, on_cpu=on_cpu)), memory)


def agree_on_batch(config: EngineConfig, memory: str, process: Process, *, on_cpu: bool) -> Choice:
    """Choose the micro-batch that fits on every rank (a collective); the arguments are those of `choose_batch`.

    Raises:
        UserError: not one image fits on some rank, or the trial of a rank failed; on all ranks alike.
    """
    found: Found | str
    try:
        room = memory_of_rank(memory, process, on_cpu=on_cpu)
        if on_cpu:
            found = by_estimate(config, room)
        else:
            with TrialStep(config, device_of(process.local_rank)) as trial:
                found = by_trying(config, room, trial)
    except Exception as error:  # the other ranks wait for an answer
        traceback.print_exc()
        found = f"rank {dist.get_rank()}: {first_line(error)}"
    answers: list[Found | str] = [found] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    if failures := [answer for answer in answers if isinstance(answer, str)]:
        raise UserError(f"--auto-batch could not try a micro-batch: {failures[0]}; give one by -b")
    of_ranks = [answer for answer in answers if isinstance(answer, Found)]
    return _choice(config, min(of_ranks, key=lambda found: (found.micro_batch, -found.needs)), memory)


def legal(config: EngineConfig) -> tuple[BatchSizes, ...]:
    """The batch arithmetics to choose from, by rising micro-batch; see the head of this file."""
    batch, pp = config.batch, config.layout.pp
    if not isinstance(config.model.task, ChainTask):
        return (batch,)  # the loss may couple the samples of a batch
    ways = ways_to_share(batch.global_batch, batch.dp)
    return tuple(way for way in ways if way.accumulation >= pp or way.micro_batch == 1)


def by_estimate(config: EngineConfig, memory: Memory) -> Found:
    """The largest micro-batch whose estimate, with a quarter more, is within `memory` in every pipeline stage."""
    stages, in_host = by_stage(config), in_host_memory(config.json)

    def needs(batch: BatchSizes) -> int:
        return round(_ALLOWANCE * max(on_device(stage.of(batch), in_host).together for stage in stages))

    batches = legal(config)
    fitting = [batch for batch in batches if needs(batch) <= memory.bytes]
    larger = batches[len(fitting)] if len(fitting) < len(batches) else None
    return Found(
        micro_batch=fitting[-1].micro_batch if fitting else 0,
        needs=needs(fitting[-1] if fitting else batches[0]),
        larger=larger.micro_batch if larger else None,
        larger_needs=needs(larger) if larger else 0,
        memory=memory,
        how=_ESTIMATED,
    )


def by_trying(config: EngineConfig, memory: Memory, try_one: Try) -> Found:
    """The largest micro-batch with which `try_one` runs and stays within `memory`; smaller ones are tried first.

    Args:
        config: of the engine.
        memory: what this rank may take.
        try_one: raises torch.OutOfMemoryError where the device has too little.
    """
    batches, in_host = legal(config), in_host_memory(config.json)
    stage = by_stage(config)[config.stage]

    def estimated(batch: BatchSizes) -> int:
        return on_device(stage.of(batch), in_host).together

    fits, needs, larger = 0, 0, None
    for batch in batches:
        taken = _taken(try_one, batch)
        if taken is None or taken > memory.bytes:
            larger = batch.micro_batch
            before = estimated(BatchSizes(batch.global_batch, fits, batch.accumulation, batch.dp)) if fits else 0
            # The device has not said how much more it would have taken: what was measured, and the estimate's step.
            larger_needs = taken or needs + estimated(batch) - before
            return Found(fits, needs or larger_needs, larger, larger_needs, memory, "measured" if fits else _ESTIMATED)
        fits, needs = batch.micro_batch, taken
    return Found(fits, needs, None, 0, memory, "measured")


def _taken(try_one: Try, batch: BatchSizes) -> int | None:
    """The bytes of a try; None where there were too few."""
    try:
        return try_one(batch)
    except RuntimeError as error:
        # cuBLAS and cuDNN have their own words for it, and not torch's class.
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error) or "out of memory" in str(error):
            return None
        raise


def memory_of_rank(memory: str, process: Process, *, on_cpu: bool) -> Memory:
    """What this rank may take: --memory, else what is free: of its device, or its share of this machine's."""
    if memory:
        return Memory(parse_bytes(memory, "--memory"), f"--memory {memory}")
    if not on_cpu:
        # DeepSpeed's own question goes to NVML by the number in CUDA_VISIBLE_DEVICES, which may be a name.
        cuda = get_accelerator().device_name() == "cuda"
        free = torch.cuda.mem_get_info(process.local_rank)[0] if cuda else get_accelerator().available_memory()
        return Memory(free, "free on the device")
    ranks = process.local_world_size or process.world_size
    among = f", among {ranks} ranks" if ranks > 1 else ""
    return Memory(_free_memory() // ranks, f"free on this machine{among}")


def _free_memory(limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes that this machine has free, or the container if it is allowed less."""
    free = psutil.virtual_memory().available
    limit = limit_file.read_text().strip() if limit_file.is_file() else "max"
    return min(free, int(limit)) if limit.isdigit() else free


def _choice(config: EngineConfig, found: Found, memory: str) -> Choice:
    """The batch that fits, with a line that says why.

    Raises:
        UserError: not one image fits.
    """
    there = f"{in_words(found.memory.bytes)} a rank ({found.memory.whose})"
    batches = {batch.micro_batch: batch for batch in legal(config)}
    if not found.micro_batch:
        smallest = min(batches)
        states = max(on_device(stage.states, in_host_memory(config.json)).states for stage in by_stage(config))
        raise UserError(
            f"--auto-batch: not even a micro-batch of {smallest} fits: it needs {in_words(found.needs)} ({found.how}), "
            f"{in_words(states)} of it for weights, gradients and the optimizer, and there are {there}; use a higher "
            "ZeRO stage, --grad-checkpointing, offload, more --pp or --tp, or a smaller --model"
            + (", or give more by --memory" if memory else "")
        )
    batch = batches[found.micro_batch]
    if found.larger is not None:
        then = f"a micro-batch of {found.larger} would need {in_words(found.larger_needs)}"
    elif batch.accumulation == 1:
        then = "it is a rank's whole share of the batch"
    else:
        then = f"a larger one would leave fewer micro-batches than the {config.layout.pp} pipeline stages"
    note = f"--auto-batch: {batch}; {in_words(found.needs)} ({found.how}) of {there}; {then}"
    return Choice(batch, note)
