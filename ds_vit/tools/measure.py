"""Training steps of several sides, measured in the same run: times in turns, counts, memory.

Machines are noisy: all sides take turns, and the fastest turn of each counts. The
report also has counts of what one step asks of the hardware, which no other program disturbs (counting.py).
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_vit import config as flags
from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed, share_cores
from ds_vit.launching.process import Process, rendezvous
from ds_vit.monitoring.throughput import peak_tflops
from ds_vit.planner.counting import count_flops
from ds_vit.tools.counting import StepCounts, count_step
from ds_vit.tools.peers import own_linear

if TYPE_CHECKING:
    from ds_vit.engine.base import Engine
    from ds_vit.engine.step_guard import StepResult
    from ds_vit.tasks import Batch
    from ds_vit.training.build_engine import EngineConfig

# As many micro-batches of other samples take turns: what drop-path leaves out of a step is then no single draw's luck,
# and the same in turns of as many steps.
_SETS_OF_KEYS = 3


@dataclass(frozen=True)
class Side:
    """What was measured of one way to take a step.

    Attributes:
        images: of a step, over all ranks.
        seconds: a step, of each turn; of the slowest rank.
        images_per_second: of the fastest turn, over all ranks.
        counts: of one step, on rank 0.
        memory_bytes: of rank 0's GPU at the peak of a step, with weights and optimizer; None on a CPU.
        mfu: share of the accelerators' datasheet peak; None where that is not known.
    """

    images: int
    seconds: tuple[float, ...]
    images_per_second: float
    counts: StepCounts
    memory_bytes: int | None
    mfu: float | None


@dataclass(frozen=True)
class Ratio:
    """One side over another.

    Attributes:
        images_per_second: of the fastest turns; more is better.
        low, high: the lowest and highest of the same, turn by turn.
        operations, allocated: of a step; less is better.
    """

    images_per_second: float
    low: float
    high: float
    operations: float
    allocated: float


@dataclass(frozen=True)
class Candidate:
    """A side that is not made yet.

    Attributes:
        config: of the engine whose steps they are; gives the model, and the images of a step.
        make: makes it and gives its step (a collective), for this config and device; what is to be closed behind the
            measurement goes onto the stack.
    """

    config: EngineConfig
    make: Callable[[EngineConfig, torch.device, contextlib.ExitStack], Callable[[], object]]


@contextlib.contextmanager
def ranks_met(process: Process) -> Iterator[torch.device]:
    """For the block the ranks have met; gives this one's device."""
    made_group = init_distributed(rendezvous(process))
    share_cores(process.local_world_size)
    yield device_of(process.local_rank)
    if made_group:
        dist.destroy_process_group()


def measure(candidates: Mapping[str, Candidate], device: torch.device, turns: int, steps: int) -> dict[str, Side]:
    """Time and count the steps of all sides (a collective).

    Args:
        candidates: by name; all of them are held at the same time.
        device: of this rank.
        turns: how often each side is measured; they alternate.
        steps: steps a turn.
    """
    runners: dict[str, Callable[[], object]] = {}
    counts: dict[str, StepCounts] = {}
    memory: dict[str, int | None] = {}
    with contextlib.ExitStack() as stack:
        for name, candidate in candidates.items():
            before = _memory_allocated(device)
            step = runners[name] = candidate.make(candidate.config, device, stack)
            # The first steps make what later ones keep, torch's reducer in its second.
            _seconds_a_step(step, 3, device)
            kept = _memory_allocated(device) - before
            memory[name] = kept + _peak_above(step, device) if device.type == "cuda" else None
        for name, step in runners.items():
            with torch.compiler.set_stance("force_eager"):  # torch cannot look into a graph
                counts[name] = count_step(step)
        times = _in_turns(runners, turns, steps, device)
    sides = {}
    for name, candidate in candidates.items():
        config = candidate.config
        images, peak = config.batch.global_batch, peak_tflops(device, config.precision.name)
        rate, mfu = images / min(times[name]), None
        if peak:
            flops = count_flops(config.model.whole, config.model.frozen).training
            mfu = flops * rate / dist.get_world_size() / 1e12 / peak
        sides[name] = Side(images, tuple(times[name]), rate, counts[name], memory[name], mfu)
    return sides


def resolve_engine(words: Sequence[str], process: Process) -> EngineConfig:
    """The engine of a run with these flags.

    Raises:
        UserError: what training with these flags would raise.
    """
    quiet_deepspeed(False)
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.build import resolve_parts

    config, explicit = flags.parse(["--dataset", "digits", "--num-classes", "1000", "--max-steps", "10", *words])
    return resolve_parts(config, explicit, process, on_cpu=get_accelerator().device_name() == "cpu").engine


def make_ours(config: EngineConfig, device: torch.device, stack: contextlib.ExitStack) -> Callable[[], object]:
    """A step of ours, on random pixels (a collective)."""
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build_engine import build_engine

    engine = build_engine(config, device, build_groups(config.layout))
    stack.callback(engine.close)
    return _our_step(engine, random_batch(config, config.batch.micro_batch, engine.dtype, device))


def ratio(ours: Side, peer: Side) -> Ratio:
    """One side over another, of the same turns."""
    larger = ours.images / peer.images
    by_turn = [larger * theirs / own for own, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    return Ratio(
        ours.images_per_second / peer.images_per_second,
        min(by_turn),  # the ratio of the fastest turns cannot be outside
        max(by_turn),
        ours.counts.operations / peer.counts.operations,
        ours.counts.allocated_bytes / peer.counts.allocated_bytes,
    )


def machine(device: torch.device) -> tuple[str, int]:
    """The device's name, and how many threads torch takes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return name, torch.get_num_threads()


def versions() -> dict[str, str]:
    """Of what decides on a step's time."""
    from importlib.metadata import version

    return {"python": platform.python_version(), **{n: version(n) for n in ("torch", "timm", "deepspeed")}}


def random_batch(config: EngineConfig, rows: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """A batch of classification: pixels as the model takes them, [rows, 3, height, width]."""
    height, width = config.model.image.img_size
    images = torch.randn(rows, 3, height, width, device=device).to(dtype)
    targets = torch.randint(config.model.task.num_classes, (rows,), device=device)
    return {"images": images, "targets": targets, "keys": torch.arange(rows, device=device)}


def _our_step(engine: Engine, batch: Batch) -> Callable[[], None]:
    """A step as the trainer takes it: it asks for the result of the one before."""
    before: list[StepResult] = []
    keys = [torch.arange(len(batch["keys"])) + number * len(batch["keys"]) for number in range(_SETS_OF_KEYS)]
    samples = [{**batch, "keys": own.to(batch["keys"].device), "keys_on_host": own} for own in keys]
    batches = itertools.cycle(samples)

    def step() -> None:
        with own_linear() if engine.stage < 3 else contextlib.nullcontext():
            result = engine.train_step(
                itertools.islice(batches, engine.accumulation), lambda: before and before.pop().applied
            )
        before.append(result)

    return step


def _memory_allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak_above(step: Callable[[], object], device: torch.device) -> int:
    """Bytes that a step allocates at its peak, beyond those that it finds."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def _in_turns(
    sides: Mapping[str, Callable[[], object]], turns: int, steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds a step of each side in each turn, of the slowest rank; every other turn goes the other way round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in sides if turn % 2 else reversed(list(sides)):
            dist.barrier()
            seconds = torch.tensor(_seconds_a_step(sides[name], steps, device), device=device, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name].append(float(seconds))
    return times


def _seconds_a_step(step: Callable[[], object], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def mean_over_ranks(value: float, device: torch.device) -> float:
    """Of all ranks; the value itself where they have not met (a collective)."""
    if not dist.is_initialized():
        return value
    together = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(together)
    return float(together) / dist.get_world_size()
