"""`ds-vit bench step`: training steps as ours are, beside those of timm and torch, measured in the same run.

    ds-vit bench step --against timm timm-compiled --deepspeed_config ds_configs/cpu_zero{0,1,3}_fp32.json
    torchrun --nproc_per_node 2 --module ds_vit.cli bench step --against ddp fsdp2 --deepspeed_config …

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_vit import config as flags
from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed, share_cores
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process, discover, rendezvous
from ds_vit.models import count_flops
from ds_vit.monitoring.figures import new_figure
from ds_vit.monitoring.metrics import peak_tflops
from ds_vit.tools.counting import StepCounts, count_step
from ds_vit.tools.peers import check_peer, own_linear, peer_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ds_vit.engine.base import Engine, StepResult
    from ds_vit.parallel.groups import Groups
    from ds_vit.tasks import Batch
    from ds_vit.training.plan import Plan


@dataclass(frozen=True)
class Side:
    """What was measured of one way to take a step.

    Attributes:
        seconds: a step, of each turn; of the slowest rank.
        images_per_second: of the fastest turn, over all ranks.
        counts: of one step, on rank 0.
        memory_bytes: of rank 0's GPU at the peak of a step, with weights and optimizer; None on a CPU.
        mfu: share of the accelerators' datasheet peak; None where that is not known.
    """

    seconds: tuple[float, ...]
    images_per_second: float
    counts: StepCounts
    memory_bytes: int | None
    mfu: float | None


@dataclass(frozen=True)
class Ratio:
    """One of ours over a peer.

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
class StepBench:
    """Training steps of several sides: name → side, ours by their files' names; and one of ours → a peer → ratio."""

    model: str
    options: str
    global_batch: int
    layout: str
    precision: str
    device: str
    threads: int
    versions: dict[str, str]
    ours: dict[str, Side]
    peers: dict[str, Side]
    ratios: dict[str, dict[str, Ratio]]

    def to_json(self) -> str:
        """One line for a file of figures."""
        return json.dumps(asdict(self))


@dataclass
class _Runner:
    """A side before it is measured."""

    step: Callable[[], object]
    memory: int  # that making it and its first steps took


def bench_step(
    words: Sequence[str], deepspeed_configs: Sequence[str], peers: Sequence[str], *, turns: int = 12, steps: int = 3
) -> StepBench:
    """Time and count optimizer steps on fixed random pixels: forward, loss, backward, clipping, update (a collective).

    Args:
        words: flags of a training run, of ours; model, image size, drop-path and optimizer are the peers' too.
        deepspeed_configs: JSON files of one precision; each makes one of ours.
        peers: of `PEERS`.
        turns: how often each side is measured; they alternate.
        steps: steps a turn.

    Raises:
        UserError: a peer that cannot train on so many ranks, files of several precisions, or what training with these
            settings would raise.
    """
    process = discover()
    for peer in peers:
        check_peer(peer, process.world_size)
    quiet_deepspeed(False)
    plans = {_name(path, deepspeed_configs): _plan(words, path, process) for path in deepspeed_configs}
    plan = next(iter(plans.values()))
    precisions = sorted({plan.deepspeed.precision.name for plan in plans.values()})
    if len(precisions) > 1:
        raise UserError(f"--deepspeed_config: files of one precision can be compared, not of {', '.join(precisions)}")
    made_group = init_distributed(rendezvous(process))
    device = device_of(process.local_rank)
    share_cores(process.local_world_size)
    batch = plan.data.batch
    engines: list[Engine] = []

    def ours(plan: Plan) -> Callable[[], object]:
        from ds_vit.parallel.groups import build_groups

        engine = _engine(plan, device, build_groups(plan.parallel.layout))
        engines.append(engine)
        return _our_step(engine, _batch(plan, batch.micro_batch, engine.dtype, device))

    def a_peer(name: str) -> Callable[[], object]:
        pixels = _batch(plan, batch.global_batch // process.world_size, torch.float32, device)
        return peer_step(name, plan, pixels["images"], pixels["targets"])

    runners = {name: _made(lambda: ours(plan), device) for name, plan in plans.items()}  # noqa: B023
    runners |= {name: _made(lambda: a_peer(name), device) for name in peers}  # noqa: B023
    flops = count_flops(plan.model.whole, plan.model.frozen).training
    peak = peak_tflops(device, plan.deepspeed.precision.name)
    counts = {name: _counted(runner, device) for name, runner in runners.items()}
    times = _in_turns({name: runner.step for name, runner in runners.items()}, turns, steps, device)

    def side(name: str) -> Side:
        rate = batch.global_batch / min(times[name])
        mfu = flops * rate / process.world_size / 1e12 / peak if peak else None
        return Side(tuple(times[name]), rate, counts[name][0], counts[name][1], mfu)

    our_sides, their_sides = {name: side(name) for name in plans}, {name: side(name) for name in peers}
    for engine in engines:
        engine.close()
    if made_group:
        dist.destroy_process_group()
    return StepBench(
        model=plan.config.model,
        options=" ".join(words),
        global_batch=batch.global_batch,
        layout=str(plan.parallel.layout),
        precision=plan.deepspeed.precision.name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        threads=torch.get_num_threads(),
        versions=_versions(),
        ours=our_sides,
        peers=their_sides,
        ratios={name: {peer: ratio(our_sides[name], their_sides[peer]) for peer in peers} for name in plans},
    )


def ratio(ours: Side, peer: Side) -> Ratio:
    """One of ours over a peer, of the same turns."""
    by_turn = [theirs / own for own, theirs in zip(ours.seconds, peer.seconds, strict=True)]
    low, _, high = statistics.quantiles(by_turn, n=4, method="inclusive") if len(by_turn) > 1 else by_turn * 3
    return Ratio(
        ours.images_per_second / peer.images_per_second,
        low,
        high,
        ours.counts.operations / peer.counts.operations,
        ours.counts.allocated_bytes / peer.counts.allocated_bytes,
    )


def _name(path: str, among: Sequence[str]) -> str:
    """A file's name, or its whole path where another one has the same name."""
    stem = Path(path).stem
    return stem if [Path(other).stem for other in among].count(stem) == 1 else path


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), **{n: version(n) for n in ("torch", "timm", "deepspeed")}}


def _plan(words: Sequence[str], deepspeed_config: str, process: Process) -> Plan:
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.plan import prepare

    data = ["--dataset", "digits", "--num-classes", "1000", "--max-steps", "10"]
    config, explicit = flags.parse([*data, *words, "--deepspeed_config", deepspeed_config])
    return prepare(config, explicit, process, on_cpu=get_accelerator().device_name() == "cpu")


def _engine(plan: Plan, device: torch.device, groups: Groups) -> Engine:
    from ds_vit.training.build import build_engine

    return build_engine(plan, device, groups)


def _batch(plan: Plan, rows: int, dtype: torch.dtype, device: torch.device) -> Batch:
    height, width = plan.model.image.img_size
    images = torch.randn(rows, 3, height, width, device=device).to(dtype)
    targets = torch.randint(plan.config.num_classes, (rows,), device=device)
    return {"images": images, "targets": targets, "keys": torch.arange(rows, device=device)}


def _our_step(engine: Engine, batch: Batch) -> Callable[[], None]:
    """A step as the trainer takes it: it asks for the verdict on the one before."""
    before: list[StepResult] = []

    def step() -> None:
        with own_linear() if engine.stage < 3 else contextlib.nullcontext():
            result = engine.train_step(
                itertools.repeat(batch, engine.accumulation), lambda: before and before.pop().applied
            )
        before.append(result)

    return step


def _made(make: Callable[[], Callable[[], object]], device: torch.device) -> _Runner:
    """A side that has taken two steps: the first ones make what later ones keep."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    step = make()
    _seconds_a_step(step, 2, device)
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
        for name in sides if turn % 2 else reversed(sides):
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


def title(result: StepBench) -> str:
    """What was measured, on what."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return (
        f"{result.model}, {result.precision}, batch {result.global_batch}, {result.layout}; a step, fastest of the "
        f"turns; {result.device}, {result.threads} threads; {versions}"
    )


def table(result: StepBench) -> list[tuple[str, ...]]:
    """A header and a line a side: its own figures, and of ours the ratio to each peer with its quartiles.

    Columns that nothing is known of are left out.
    """
    against = [f"of {peer}" for peer in result.peers]
    lines = [("", "images/s", *against, "operations", "waits", "MB allocated", "MB at the peak", "MFU")]
    for name, side in {**result.peers, **result.ours}.items():
        ratios = [
            f"{r.images_per_second:.3f} ({r.low:.2f} to {r.high:.2f})" for r in result.ratios.get(name, {}).values()
        ]
        lines.append(
            (
                name,
                f"{side.images_per_second:.2f}",
                *(ratios or [""] * len(against)),
                str(side.counts.operations),
                str(side.counts.waits),
                f"{side.counts.allocated_bytes / 1e6:.0f}",
                f"{side.memory_bytes / 1e6:.0f}" if side.memory_bytes else "",
                f"{side.mfu:.1%}" if side.mfu else "",
            )
        )
    known = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return list(zip(*known, strict=True))


def draw(result: StepBench) -> Figure:
    """The rates of all sides as bars, ours in another colour.

    Raises:
        UserError: matplotlib is not installed.
    """
    sides = {**result.peers, **result.ours}
    figure = new_figure(7, 1.2 + 0.35 * len(sides))
    axes = figure.subplots()
    colours = ["#b0b0b0"] * len(result.peers) + ["#4a7fb5"] * len(result.ours)
    bars = axes.barh(list(sides), [side.images_per_second for side in sides.values()], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("images/s, fastest turn")
    axes.set_title(title(result).partition(";")[0], fontsize=10)
    return figure
