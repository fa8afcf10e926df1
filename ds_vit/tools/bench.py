"""`ds-vit bench step`: training steps of several sides, measured in the same run.

ds-vit bench step --against timm timm-compiled --deepspeed_config ds_configs/cpu_zero{0,1,3}_fp32.json
torchrun --nproc_per_node 2 --module ds_vit.cli bench step --against ddp fsdp2 --deepspeed_config …

Machines are noisy: all sides take turns, and the fastest turn of each counts. The counts of what one step asks of the
hardware (counting.py) are disturbed by no other program.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ds_vit.config import parser as flags
from ds_vit.device import allocated_bytes, hardware_name, is_accelerator, peak_bytes, reset_peak_bytes
from ds_vit.engine.start import device_of, quiet_deepspeed
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process, discover
from ds_vit.models.compiled import compiler_settings
from ds_vit.monitoring.metrics import peak_tflops
from ds_vit.planner.counting import count_flops
from ds_vit.tasks.registry import find_task
from ds_vit.tasks.task import Horizon
from ds_vit.tools.counting import StepCounts, count_calls, count_step, device_seconds
from ds_vit.tools.peers import check_comparable, default_peers, peer_step
from ds_vit.training.auto_batch import MemoryAdvice, memory_of_rank
from ds_vit.training.program import process_group

if TYPE_CHECKING:
    from ds_vit.engine.base import Engine
    from ds_vit.engine.step_guard import StepResult
    from ds_vit.tasks.metrics import Batch
    from ds_vit.training.run import Run

# As many micro-batches of other samples take turns: what drop-path leaves out of a step is then no single draw's luck,
# and the same in turns of as many steps.
_SETS_OF_KEYS = 3
_SCHEDULED_STEPS = 1000

Step = Callable[[], object]


@dataclass(frozen=True)
class Side:
    """What was measured of one way to take a step.

    Attributes:
        images: of a step, over all ranks.
        seconds: a step, of each turn; of the slowest rank.
        images_per_second: of the fastest turn, over all ranks.
        host_seconds: the same, until Python had queued the step.
        counts: of one step, on rank 0.
        calls: of Python, in one step on rank 0; None on an accelerator, whose backward pass has its own thread.
        device_seconds: a step's kernels on rank 0, added up; None where the profiler does not know them.
        memory_bytes: of rank 0's GPU at the peak of a step, with weights and optimizer; None on a CPU.
        mfu: share of the accelerators' datasheet peak; None where that is not known.
    """

    images: int
    seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]
    images_per_second: float
    counts: StepCounts
    calls: int | None
    device_seconds: float | None
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
class Bench:
    """What was measured on what.

    Attributes:
        options: flags of the runs.
        global_batch, precision: of the first of ours.
        ours, peers: name → side.
        ratios: one of ours → the name of what it is compared with → ratio.
    """

    model: str
    options: str
    layout: str
    device: str
    threads: int
    versions: dict[str, str]
    global_batch: int
    precision: str
    ours: dict[str, Side]
    peers: dict[str, Side]
    ratios: dict[str, dict[str, Ratio]]


def bench_step(
    words: Sequence[str], deepspeed_configs: Sequence[str], peers: Sequence[str], *, turns: int = 12, steps: int = 3
) -> Bench:
    """Time and count optimizer steps on fixed random pixels: forward, loss, backward, clipping, update (a collective).

    Args:
        words: flags of a training run, of ours; model, image size, drop-path and optimizer are the peers' too.
        deepspeed_configs: JSON files of one precision; each makes one of ours.
        peers: of the task; if empty, the one of the task and the number of ranks, or none if the task has none.
        turns: how often each side is measured; they alternate.
        steps: steps per turn.

    Raises:
        UserError: a peer that cannot train on so many ranks, files of several precisions, or what training with these
            settings would raise.
    """
    process = discover()
    stems = [Path(path).stem for path in deepspeed_configs]
    ours = {
        stem if stems.count(stem) == 1 else path: resolve_engine([*words, "--deepspeed_config", path], process)
        for stem, path in zip(stems, deepspeed_configs, strict=True)
    }
    precisions = sorted({run.engine.precision.name for run in ours.values()})
    if len(precisions) > 1:
        raise UserError(f"--deepspeed_config: files of one precision can be compared, not of {', '.join(precisions)}")
    run = next(iter(ours.values()))
    if peers := peers or default_peers(run.model.task, process.world_size):
        check_comparable(run, peers)
    compared = {name: {peer: peer for peer in peers} for name in ours}
    return measure_sides(words, ours, peers, compared, process, turns, steps)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure_sides(
    words: Sequence[str],
    ours: Mapping[str, Run],
    peers: Sequence[str],
    compared: Mapping[str, Mapping[str, str]],
    process: Process,
    turns: int,
    steps: int,
    make: Callable[[Run, torch.device, contextlib.ExitStack], Step] | None = None,
) -> Bench:
    """Measure all sides, which are held at the same time (a collective).

    Args:
        words: flags of the runs.
        ours: name → the engine that gives its model and the images of a step.
        peers: which get the model and images of the first of ours.
        compared: one of ours → name of a ratio → the other side.
        process: this rank.
        turns: how often each side is measured; they alternate.
        steps: steps per turn.
        make: a step of ours; `make_ours`, on random pixels, by default.
    """
    run, make = next(iter(ours.values())), make or make_ours
    runs = {**ours, **dict.fromkeys(peers, run)}
    with ranks_met(process) as device, contextlib.ExitStack() as stack:
        free = memory_of_rank("", process, on_cpu=not is_accelerator(device))
        stack.enter_context(MemoryAdvice(run, free).errors())
        stack.enter_context(compiler_settings())
        prepared: dict[str, Prepared] = {}
        for name, own in runs.items():
            before = allocated_bytes(device)
            step = make(own, device, stack) if name in ours else make_peer(name, own, device)
            prepared[name] = prepare(step, own, before, device)
        sides = measure(prepared, turns, steps, device)
    return Bench(
        model=run.model.spec.name,
        options=" ".join(words),
        layout=str(run.layout),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions=versions(),
        global_batch=run.batch.global_batch,
        precision=run.engine.precision.name,
        ours={name: sides[name] for name in ours},
        peers={name: sides[name] for name in peers},
        ratios={
            name: {label: _ratio(sides[name], sides[other]) for label, other in others.items()}
            for name, others in compared.items()
        },
    )


class Prepared(NamedTuple):
    """A side before it is timed: its step, the run that it belongs to, and what `Side` has of one step."""

    step: Step
    run: Run
    counts: StepCounts
    calls: int | None
    memory_bytes: int | None


def prepare(step: Step, run: Run, before: int, device: torch.device) -> Prepared:
    """Take a side's first steps, which compile, and count a later one.

    Args:
        step: of the side.
        run: gives its model and the images of a step.
        before: bytes on an accelerator without this side, which the peak leaves out.
        device: of this rank.
    """
    calls = peak = None
    with _running(step):
        seconds_of(step, 3)  # the first steps make what later ones keep, torch's reducer in its second
        if is_accelerator(device):
            reset_peak_bytes(device)
            step()
            peak = peak_bytes(device) - before
        else:
            calls = count_calls(step)
        with torch.compiler.set_stance("force_eager"):  # torch cannot look into a graph
            return Prepared(step, run, count_step(step), calls, peak)


def measure(sides: Mapping[str, Prepared], turns: int, steps: int, device: torch.device) -> dict[str, Side]:
    """Time sides that take turns of so many steps, and profile each (a collective)."""
    times, measured = _in_turns({name: side.step for name, side in sides.items()}, turns, steps, device), {}
    for name, (step, run, counts, calls, memory) in sides.items():
        with _running(step):
            kernels = device_seconds(step, device)
        host, seconds = map(tuple, zip(*times[name], strict=True))
        images, peak = run.batch.global_batch, peak_tflops(device, run.engine.precision.name)
        rate, mfu = images / min(seconds), None
        if peak:
            flops = count_flops(run.model.whole, run.model.frozen).training
            mfu = flops * rate / dist.get_world_size() / 1e12 / peak
        measured[name] = Side(images, seconds, host, rate, counts, calls, kernels, memory, mfu)
    return measured


@contextlib.contextmanager
def ranks_met(process: Process) -> Iterator[torch.device]:
    """For the block the ranks have met; gives this one's device."""
    from deepspeed.accelerator import get_accelerator

    with process_group(process, on_cpu=get_accelerator().device_name() == "cpu"):
        yield device_of(process.local_rank)


def resolve_engine(words: Sequence[str], process: Process) -> Run:
    """A run with these flags; its data only say how many classes there are.

    Raises:
        UserError: what training with these flags would raise.
    """
    quiet_deepspeed(False)
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    words = ["--max-steps", "10", *words]
    task = find_task(flags.parse(["--dataset", "digits", *words]))
    classes = ("--num-classes", "1000") if task.has_classes else ()
    config = flags.parse(["--dataset", task.example_dataset, *classes, *words])
    return resolve(config, World(process, get_accelerator().device_name() == "cpu"))


def make_ours(
    run: Run,
    device: torch.device,
    stack: contextlib.ExitStack,
    feed: Callable[[Engine], Iterator[Batch]] | None = None,
) -> Step:
    """A step of ours, as the trainer takes it: it asks for the result of the one before.

    A collective; the engine is closed with the stack.

    Args:
        run: of this rank.
        device: of this rank.
        stack: see above.
        feed: gives the micro-batches; random pixels by default.
    """
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build_engine import build_engine

    engine = build_engine(run, device, build_groups(run.layout))
    stack.callback(engine.close)
    batches = feed(engine) if feed else _random_batches(run, engine, device)
    task, numbers = run.model.task, itertools.count(1)
    before: list[StepResult] = []
    horizon = Horizon(_SCHEDULED_STEPS, 1, run.training[0].weight_decay)

    def step() -> None:
        number = next(numbers)
        engine.begin_step(number, task.schedules(number, horizon), task.held_names(number, horizon))
        micro_batches = itertools.islice(batches, engine.accumulation)
        before.append(engine.train_step(micro_batches, lambda: before and before.pop().outcome()))

    return step


def _random_batches(run: Run, engine: Engine, device: torch.device) -> Iterator[Batch]:
    """The same random pixels with other keys in turn, without end."""
    rows = run.batch.micro_batch
    batch = _random_batch(run, rows, engine.dtype, device)
    keys = torch.arange(_SETS_OF_KEYS * rows).split(rows)
    return itertools.cycle([{**batch, "keys": own.to(device)} for own in keys])


def _running(step: Step) -> contextlib.AbstractContextManager[None]:
    """A step that reads data has a context in which it reads."""
    return getattr(step, "running", contextlib.nullcontext)()


def make_peer(name: str, run: Run, device: torch.device) -> Step:
    """A peer's step on random pixels (a collective)."""
    pixels = _random_batch(run, run.batch.global_batch // dist.get_world_size(), torch.float32, device)
    return peer_step(name, run, pixels)


def _ratio(ours: Side, peer: Side) -> Ratio:
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


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's."""
    return hardware_name(device) or platform.processor() or "cpu"


def versions() -> dict[str, str]:
    """Of what decides on a step's time."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "timm", "deepspeed")}}


def _random_batch(run: Run, rows: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Values like those of the task's fields, for random samples."""
    fields = run.model.task.training_fields
    examples = {field.name: field.example(rows, dtype, device) for field in fields}
    return {"keys": torch.arange(rows, device=device), **examples}


def _in_turns(sides: Mapping[str, Step], turns: int, steps: int, device: torch.device) -> dict[str, list[list[float]]]:
    """`_host_and_wall` of each side in each turn, of the slowest rank; every other turn goes the other way round."""
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in sides if turn % 2 else reversed(list(sides)):
            with _running(sides[name]):
                dist.barrier()
                seconds = torch.tensor(_host_and_wall(sides[name], steps), device=device, dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name].append(seconds.tolist())
    return times


def seconds_of(call: Step, times: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per call on this rank, until the device has done what it was given.

    Args:
        call: what is timed.
        times: in a row.
        clock: `time.process_time` where other programs should not count.
    """
    return _host_and_wall(call, times, clock)[1]


def _host_and_wall(call: Step, times: int, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Seconds per call until Python has queued it, and until the device has done it; as `seconds_of`."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    start = clock()
    for _ in range(times):
        call()
    queued = clock()
    get_accelerator().synchronize()
    return (queued - start) / times, (clock() - start) / times


# ---- output ----------------------------------------------------------------------------------------------------------


def title(result: Bench) -> str:
    """What was measured, on what."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"{result.model}, {result.precision}, batch {result.global_batch}, {result.layout}; a step, fastest of the "
        f"turns; {result.device}, {result.threads} threads; {versions}"
    )


def table(result: Bench) -> list[tuple[str, ...]]:
    """A header and a line per side: its own figures, and of ours the ratios, each with its range over the turns.

    Columns without a value are left out.
    """
    labels = list(dict.fromkeys(label for ratios in result.ratios.values() for label in ratios))
    sides, rows = {**result.peers, **result.ours}, []
    differ = len({side.images for side in sides.values()}) > 1
    for name, side in sides.items():
        ratios = result.ratios.get(name, {})
        cells = [(label, ratios.get(label)) for label in labels]
        times = {"wall ms": min(side.seconds), "host ms": min(side.host_seconds), "device ms": side.device_seconds or 0}
        rows.append(
            {
                "": name,
                "images per step": str(side.images) if differ else "",
                "images/s": f"{side.images_per_second:.2f}",
                **{
                    f"of {k}": f"{r.images_per_second:.3f} ({r.low:.3f} to {r.high:.3f})" if r else "" for k, r in cells
                },
                **{column: f"{1e3 * own:.1f}" if side.device_seconds else "" for column, own in times.items()},
                "Python calls": str(side.calls) if side.calls else "",
                "operations": str(side.counts.operations),
                "waits": str(side.counts.waits),
                "MB allocated": f"{side.counts.allocated_bytes / 1e6:.0f}",
                "MB at the peak": f"{side.memory_bytes / 1e6:.0f}" if side.memory_bytes else "",
                "MFU": f"{side.mfu:.1%}" if side.mfu else "",
            }
        )
    known = [column for column in rows[0] if any(row[column] for row in rows)]
    return [tuple(known), *(tuple(row[column] for column in known) for row in rows)]
