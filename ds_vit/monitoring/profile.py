"""Training steps under torch's profiler (`--profile-steps`): traces and a summary.

One rank of each pipeline stage is recorded, because the others of its stage do the same. The summary counts kernels on
a GPU, and torch's operations and gloo's collectives on a CPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from ds_vit.device import profiled_activities, synchronize
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.rows import gather_objects

WAITING = "waiting for data"
_COLLECTIVE = re.compile(r"(gloo|nccl|xccl|hccl):|nccl\w*kernel", re.IGNORECASE)
_TOP = 15

Span = tuple[float, float]


@dataclass(frozen=True)
class StageProfile:
    """The profiled steps of one rank.

    Attributes:
        stage: of the pipeline.
        rank: that was recorded.
        seconds: of all profiled steps.
        computing: share in which the device computed.
        communicating: share in which a collective or a transfer was in progress.
        hidden: share of the communication that overlapped with computation.
        waiting: share in which the host waited for a batch.
        operations: name → (own seconds, calls), the longest first.
    """

    stage: int
    rank: int
    seconds: float
    computing: float
    communicating: float
    hidden: float
    waiting: float
    operations: dict[str, tuple[float, int]]


class StepProfiler:
    """Records steps; every rank calls every method.

    Args:
        steps: to record, counted from 1.
        folder: for the traces and `summary.md`.
        groups: of the run.
        device: of this rank.
    """

    def __init__(self, steps: range, folder: Path, groups: Groups, device: torch.device) -> None:
        self._steps, self._folder, self._groups, self._device = steps, folder, groups, device
        self._records = groups.dp_rank == 0 and groups.tp_rank == 0
        self._profile: profile | None = None
        self._activities = profiled_activities(device)
        self._started = self._seconds = 0.0

    def before(self, step: int) -> None:
        """Called before a step."""
        if step not in self._steps or not self._records:
            return
        if step == self._steps.start:
            if self._profile is not None:
                self._profile.stop()  # after a rollback
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it prints between the lines of the run
            self._profile, self._seconds = profile(activities=self._activities), 0.0
            synchronize(self._device)
            self._profile.start()
        elif self._profile is not None:
            self._profile.toggle_collection_dynamic(True, self._activities)
        self._started = time.perf_counter()

    def after(self, step: int) -> bool:
        """Called after a step; work between two steps, such as an evaluation, is not recorded.

        Returns:
            Whether it was the last one, after which all ranks must call `finish`.
        """
        if step not in self._steps:
            return False
        if self._profile is not None:
            synchronize(self._device)
            self._seconds += time.perf_counter() - self._started
            if step != self._steps[-1]:
                self._profile.toggle_collection_dynamic(False, self._activities)
        return step == self._steps[-1]

    def finish(self, say: Callable[[str], object] | None = None) -> None:
        """Write the traces and the summary (a collective).

        Args:
            say: on rank 0, prints where they are, or why they are missing.
        """
        own: StageProfile | str | None = None
        try:
            own = self._write_trace(self._profile) if self._profile is not None else None
        except Exception as error:  # training continues without it, and the other ranks wait here
            own = f"{self._folder}: {first_line(error)}"
        found: list[StageProfile | str | None] = gather_objects(own)
        stages = [stage for stage in found if isinstance(stage, StageProfile)]
        failures = [failure for failure in found if isinstance(failure, str)]
        if say is None or not (stages or failures):  # resumed between these steps
            return
        summary = self._folder / "summary.md"
        try:
            summary.write_text(page(stages, self._steps))
        except OSError as error:
            failures.append(f"{summary}: {error.strerror}")
        said = f"steps {self._steps[0]} to {self._steps[-1]} profiled: {summary}"
        say(f"WARNING: the profile could not be written: {failures[0]}" if failures else said)

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; waiting for each is named in the trace."""
        iterator = iter(batches)
        while True:
            with record_function(WAITING) if self._profile is not None else contextlib.nullcontext():
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def _write_trace(self, recorded: Any) -> StageProfile:
        self._profile = None
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        groups = self._groups
        recorded.export_chrome_trace(str(self._folder / f"stage{groups.pipeline_stage}-rank{groups.rank}.json"))
        return sum_up(recorded.events(), groups.pipeline_stage, groups.rank, self._seconds)


def sum_up(events: Sequence[Any], stage: int, rank: int, seconds: float) -> StageProfile:
    """The shares of one rank's time.

    Args:
        events: torch's `FunctionEvent`s; only the GPU's count if there are any.
        stage, rank: of the recorded rank.
        seconds: recorded.
    """
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels = [event for event in on_gpu if not getattr(event, "is_user_annotation", False)]
    busy = kernels or [event for event in events if event.name.startswith("aten::") or _COLLECTIVE.match(event.name)]
    collectives = [event for event in busy if _COLLECTIVE.search(event.name)]
    computing = union(_span(event) for event in busy if not _COLLECTIVE.search(event.name))
    communicating = union(map(_span, collectives))
    waiting = union(_span(event) for event in events if event.name == WAITING)
    both = max(0.0, length(computing) + length(communicating) - length(union([*computing, *communicating])))
    operations: dict[str, tuple[float, int]] = {}
    for event in busy:
        # gloo works in another thread, so its events have no self time.
        whole = kernels or _COLLECTIVE.match(event.name)
        own = event.time_range.elapsed_us() if whole else event.self_cpu_time_total
        total, calls = operations.get(event.name, (0.0, 0))
        operations[event.name] = total + own / 1e6, calls + 1
    longest = sorted(operations.items(), key=lambda item: item[1][0], reverse=True)
    return StageProfile(
        stage=stage,
        rank=rank,
        seconds=seconds,
        computing=length(computing) / 1e6 / seconds,
        communicating=length(communicating) / 1e6 / seconds,
        hidden=both / length(communicating) if communicating else 0.0,
        waiting=length(waiting) / 1e6 / seconds,
        operations=dict(longest),
    )


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans, in order."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def length(spans: Iterable[Span]) -> float:
    """The total length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def page(stages: Sequence[StageProfile], steps: range) -> str:
    """`summary.md`: the time of each stage, and the longest operations."""
    lines = [
        f"# Steps {steps[0]} to {steps[-1]}",
        "",
        "Shares of the time. The rest is waiting for data, for other ranks or for the host.",
        "",
        "| stage | rank | ms per step | computing | communicating | of it overlapped | waiting for data |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in stages:
        shares = (stage.computing, stage.communicating, stage.hidden, stage.waiting)
        figures = " | ".join(f"{share:.1%}" for share in shares)
        lines.append(f"| {stage.stage} | {stage.rank} | {1e3 * stage.seconds / len(steps):.1f} | {figures} |")
    if len(stages) > 1:
        idle = ", ".join(f"{1 - stage.computing:.1%}" for stage in stages)
        lines += ["", f"Not computing (pipeline bubble and all other waiting), by stage: {idle}."]
    for stage in stages:
        lines += ["", f"## Longest operations of stage {stage.stage}", ""]
        lines += ["| | ms per step | calls per step |", "|---|---|---|"]
        for name, (seconds, calls) in list(stage.operations.items())[:_TOP]:
            lines.append(f"| `{name[:80]}` | {1e3 * seconds / len(steps):.2f} | {calls / len(steps):g} |")
    lines += ["", "Open the traces in this folder with https://ui.perfetto.dev or chrome://tracing.", ""]
    return "\n".join(lines)
