"""Training steps of several sides, measured in the same run: times in turns, counts, memory.

Machines are noisy: all sides take turns, and the fastest turn of each counts. Beside the times stand counts of what one
step asks of the hardware, which no other program disturbs (counting.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_vit import config as flags
from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed, share_cores
from ds_vit.launching.process import Process, rendezvous
from ds_vit.models import count_flops
from ds_vit.monitoring.throughput import peak_tflops
from ds_vit.tools.counting import StepCounts, count_step
from ds_vit.tools.peers import own_linear

if TYPE_CHECKING:
    from ds_vit.engine.base import Engine
    from ds_vit.engine.step_guard import StepResult
    from ds_vit.tasks import Batch
    from ds_vit.training.plan import Plan

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
        low, high: the quartiles of the same, turn by turn.
        operations, allocated: of a step; less is better.
    """

    images_per_second: float
    low: float
    high: float
    operations: float
    allocated: float


@dataclass(frozen=True)
class Report:
    """What was measured on what; a subclass has the figures."""

    model: str
    options: str
    layout: str
    device: str
    threads: int
    versions: dict[str, str]

    def to_json(self) -> str:
        """One line for a file of figures."""
        return json.dumps(asdict(self))

    @property
    def where(self) -> str:
        """How it was measured, and on what."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"a step, fastest of the turns; {self.device}, {self.threads} threads; {versions}"


@dataclass
class _Runner:
    """A side before it is measured."""

    step: Callable[[], object]
    memory: int  # that making it and its first steps took


@dataclass(frozen=True)
class Candidate:
    """A side that is not made yet.

    Attributes:
        plan: of the run whose steps they are; gives the model, and the images of a step.
        make: makes it and gives its step (a collective), for this plan and device; what is to be closed behind the
            measurement goes onto the stack.
    """

    plan: Plan
    make: Callable[[Plan, torch.device, contextlib.ExitStack], Callable[[], object]]


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
    with contextlib.ExitStack() as stack:
        runners = {name: _made(candidate, device, stack) for name, candidate in candidates.items()}
        counts = {name: _counted(runner, device) for name, runner in runners.items()}
        times = _in_turns({name: runner.step for name, runner in runners.items()}, turns, steps, device)
    sides = {}
    for name, candidate in candidates.items():
        plan = candidate.plan
        images, peak = plan.data.batch.global_batch, peak_tflops(device, plan.deepspeed.precision.name)
        rate, mfu = images / min(times[name]), None
        if peak:
            flops = count_flops(plan.model.whole, plan.model.frozen).training
            mfu = flops * rate / dist.get_world_size() / 1e12 / peak
        sides[name] = Side(images, tuple(times[name]), rate, *counts[name], mfu)
    return sides


def plan_of(words: Sequence[str], process: Process) -> Plan:
    """The plan of a run with these flags, for its model and engine.

    Raises:
        UserError: what training with these flags would raise.
    """
    quiet_deepspeed(False)
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.plan import prepare

    config, explicit = flags.parse(["--dataset", "digits", "--num-classes", "1000", "--max-steps", "10", *words])
    return prepare(config, explicit, process, on_cpu=get_accelerator().device_name() == "cpu")


def make_ours(plan: Plan, device: torch.device, stack: contextlib.ExitStack) -> Callable[[], object]:
    """A step of ours, on random pixels (a collective)."""
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build import build_engine

    engine = build_engine(plan, device, build_groups(plan.parallel.layout))
    stack.callback(engine.close)
    return _our_step(engine, random_batch(plan, plan.data.batch.micro_batch, engine.dtype, device))


def ratio(ours: Side, peer: Side) -> Ratio:
    """One side over another, of the same turns."""
    larger = ours.images / peer.images
    by_turn = [larger * theirs / own for own, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    low, _, high = statistics.quantiles(by_turn, n=4, method="inclusive") if len(by_turn) > 1 else by_turn * 3
    return Ratio(
        ours.images_per_second / peer.images_per_second,
        low,
        high,
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


def random_batch(plan: Plan, rows: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """A batch of classification: pixels as the model takes them, [rows, 3, height, width]."""
    height, width = plan.model.image.img_size
    images = torch.randn(rows, 3, height, width, device=device).to(dtype)
    targets = torch.randint(plan.config.num_classes, (rows,), device=device)
    return {"images": images, "targets": targets, "keys": torch.arange(rows, device=device)}


def _under_keys(batch: Batch, number: int) -> Batch:
    """The same images as other samples."""
    keys = torch.arange(len(batch["keys"])) + number * len(batch["keys"])
    return {**batch, "keys": keys.to(batch["keys"].device), "keys_on_host": keys}


def _our_step(engine: Engine, batch: Batch) -> Callable[[], None]:
    """A step as the trainer takes it: it asks for the verdict on the one before."""
    before: list[StepResult] = []
    batches = itertools.cycle([_under_keys(batch, number) for number in range(_SETS_OF_KEYS)])

    def step() -> None:
        with own_linear() if engine.stage < 3 else contextlib.nullcontext():
            result = engine.train_step(
                itertools.islice(batches, engine.accumulation), lambda: before and before.pop().applied
            )
        before.append(result)

    return step


def _made(candidate: Candidate, device: torch.device, stack: contextlib.ExitStack) -> _Runner:
    """A side that has taken three steps: the first ones make what later ones keep, torch's reducer in its second."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    step = candidate.make(candidate.plan, device, stack)
    _seconds_a_step(step, 3, device)
    return _Runner(step, torch.cuda.memory_allocated(device) - before if on_gpu else 0)


def _counted(runner: _Runner, device: torch.device) -> tuple[StepCounts, int | None]:
    """The counts of a step, run eagerly where it is compiled, and the memory of its peak."""
    if device.type != "cuda":
        return _count_eagerly(runner.step), None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.step()
    peak = torch.cuda.max_memory_allocated(device) - before + runner.memory
    return _count_eagerly(runner.step), peak


def _count_eagerly(step: Callable[[], object]) -> StepCounts:
    with torch.compiler.set_stance("force_eager"):  # torch cannot look into a graph
        return count_step(step)


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
