"""Callbacks around the training steps: bad steps, the EMA, image sizes, gradient statistics, time, profiles, replicas.

train.py makes the list and trainer.py calls them. The log of steps is a callback too (step_log.py). To add one, write a
class here and a line in train.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

from ds_vit.device import is_accelerator, profiled_activities, synchronize
from ds_vit.engine.base import Engine
from ds_vit.engine.step_guard import SkippedStep, StepResult
from ds_vit.fault_tolerance.errors import ReplicasDiffer, first_line
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.models.sequential import timm_names
from ds_vit.monitoring.gradient_health import GradientHealth
from ds_vit.monitoring.metrics import Reporter, Throughput
from ds_vit.optim.ema import Ema
from ds_vit.parallel.groups import gather_objects
from ds_vit.training.run import Run

_TABLE_ROWS = 30  # operations in the table of a profile


@dataclass(frozen=True)
class Step:
    """An optimizer step that was taken.

    Attributes:
        number: counted from 1.
        lr: base learning rate.
        loss_scale: of this step; 1 without fp16.
        result: loss, gradient norm, and whether the step was applied.
    """

    number: int
    lr: float
    loss_scale: float
    result: StepResult


class RollBack(Exception):
    """A rejected step asks the trainer to return to the last checkpoint; raised on all ranks together.

    Attributes:
        step: the rejected step, counted from 1.
        skipped: why it was rejected.
        diverged: the exception to raise if there is no checkpoint to return to.
    """

    def __init__(self, step: int, skipped: SkippedStep, diverged: Diverged) -> None:
        super().__init__(str(skipped))
        self.step = step
        self.skipped = skipped
        self.diverged = diverged


class Callback:
    """Hooks around the steps of a run. Every rank calls them in the same order, so that a hook may be a collective.

    Whether a step was applied may become known only while the next step runs. `after_result` is called then, and at the
    latest before anything logs or saves the effects of the step.
    """

    def before_training(self, step: int) -> None:
        """Training starts or continues after `step`: in a new run, after a resume and after a rollback."""

    def before_step(self, step: int) -> None:
        """A step is about to be taken."""

    def needs_result(self, step: int) -> bool:
        """Whether `after_step` reads whether this step was applied, which waits for the device."""
        return False

    def after_step(self, step: Step) -> None:
        """A step was taken."""

    def after_result(self, step: Step) -> None:
        """`step.result.outcome()` is known: whether the step was applied."""

    def before_evaluation(self, step: int) -> None:
        """The weights are about to be evaluated."""

    def after_evaluation(self, step: int) -> None:
        """The weights were evaluated."""

    def after_rollback(self, bad: RollBack, step: int, skipped_batches: int, state: Mapping[str, Any]) -> None:
        """The run continues from an earlier checkpoint.

        Args:
            bad: names the rejected step.
            step: number of optimizer steps that the checkpoint has.
            skipped_batches: number of global batches that this rollback leaves out.
            state: of the run in the checkpoint, from `state_dict`.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as plain data that is the same on every rank (a collective)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from that of all callbacks."""


MAX_SKIPS = 50
"""Skipped steps in a row that end the run; fp16 needs fewer to lower its loss scale of 2^16."""


@dataclass(eq=False)
class BadSteps(Callback):
    """Counts steps that were not applied, and ends the run or returns to a checkpoint if that is configured.

    Attributes:
        run: of this rank.
        engine: the engine whose guard rejects steps.
        reporter: on rank 0; None elsewhere.
        skipped: number of steps that were not applied.
        rollbacks: number of rollbacks.
        in_a_row: number of steps that were not applied since the last applied one.
    """

    run: Run
    engine: Engine
    reporter: Reporter | None
    skipped: int = field(init=False, default=0)
    rollbacks: int = field(init=False, default=0)
    in_a_row: int = field(init=False, default=0)

    def after_result(self, step: Step) -> None:
        """Count and report a step that was not applied.

        Raises:
            RollBack: the run has to return to its last checkpoint.
            Diverged: the run has to end.
        """
        if step.result.outcome().applied:
            self.in_a_row = 0
            return
        loss = float(self.engine.mean(step.result.loss))
        self.skipped += 1
        self.in_a_row += 1
        skipped, number = step.result.outcome().skipped, step.number
        scales_loss = "fp16" in self.run.engine.precision.name  # a gradient that is not finite is then an overflow
        overflow = scales_loss and (skipped is None or skipped.reason == "nonfinite")
        reason = "overflow" if overflow or skipped is None else skipped.reason
        if self.reporter:
            norm, (layer, layer_norm) = (skipped.grad_norm, skipped.layer) if skipped else (None, (None, None))
            row = {"step": number, "reason": reason, "loss": loss, "grad_norm": norm, "layer": layer}
            row |= {"layer_norm": layer_norm, "loss_scale": step.loss_scale, "skipped_steps": self.skipped}
            self.reporter.skip(row, str(skipped) if skipped and not overflow else None)
        advice = "earlier checkpoints are intact; lower the learning rate, warm up for longer or clip harder"
        if not overflow and self.run.config.on_nonfinite == "stop":
            diverged = Diverged(f"step {number}: {skipped}; not applied; {advice}, or continue by --on-nonfinite skip")
        elif self.in_a_row >= MAX_SKIPS:
            diverged = Diverged(f"step {number}: {self.in_a_row} steps in a row were skipped ({reason}); {advice}")
        else:
            return
        if skipped is not None and self.rollbacks < self.run.config.rollback:
            raise RollBack(number, skipped, diverged)
        raise diverged

    def after_rollback(self, bad: RollBack, step: int, skipped_batches: int, state: Mapping[str, Any]) -> None:
        """Count the rollback, and restore the guard's recent losses and norms from the checkpoint."""
        self.engine.guard.remember(state["spikes"])
        self.rollbacks += 1
        self.in_a_row = 0
        if self.reporter:
            row = {"step": bad.step, "reason": bad.skipped.reason, "layer": bad.skipped.layer[0]}
            row |= {"to_step": step, "skipped_batches": skipped_batches, "number": self.rollbacks}
            self.reporter.rollback(row)

    def state_dict(self) -> dict[str, Any]:
        """As `Callback.state_dict`."""
        return {
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "spikes": self.engine.guard.recent(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Callback.load_state_dict`."""
        self.skipped, self.rollbacks = state["skipped_steps"], state["rollbacks"]
        self.in_a_row = state.get("skipped_in_a_row", 0)  # not in older checkpoints
        self.engine.guard.remember(state["spikes"])


@dataclass(eq=False)
class AverageWeights(Callback):
    """Updates the moving average of the weights after each applied step (--model-ema)."""

    ema: Ema

    def after_result(self, step: Step) -> None:
        """As `Callback.after_result`."""
        if step.result.outcome().applied:
            self.ema.update()


@dataclass(eq=False)
class SetImageSize(Callback):
    """Sets the image size of the model: that of the step in training, the largest one in evaluation."""

    run: Run
    engine: Engine

    def __post_init__(self) -> None:
        assert self.run.data.sizes is not None, "all images have the model's size"
        self._sizes = self.run.data.sizes
        self._size = self._sizes.sizes[-1]

    def before_step(self, step: int) -> None:
        """As `Callback.before_step`."""
        self._set(self._sizes.at(step - 1))

    def before_evaluation(self, step: int) -> None:
        """As `Callback.before_evaluation`."""
        self._set(self._sizes.sizes[-1])

    def _set(self, size: int) -> None:
        if size != self._size:
            self.engine.take_images_of(size, self.run.model.whole.patch_embed.patch_size)
            self._size = size


@dataclass(eq=False)
class GradientStatistics(Callback):
    """Writes a row of kind "gradients" every --grad-stats-interval steps."""

    run: Run
    engine: Engine
    bad_steps: BadSteps
    reporter: Reporter | None

    def __post_init__(self) -> None:
        self._health = GradientHealth(self.engine.zero_map, self.engine.clipped_by)

    def before_step(self, step: int) -> None:
        """As `Callback.before_step`."""
        if self.needs_result(step):
            self._health.arm()

    def needs_result(self, step: int) -> bool:
        """As `Callback.needs_result`."""
        return (step - 1) % self.run.config.grad_stats_interval == 0

    def after_step(self, step: Step) -> None:
        """As `Callback.after_step`."""
        if not self.needs_result(step.number):
            return
        row = self._health.finish()
        if self.reporter and step.result.outcome().applied:
            counters = {"loss_scale": step.loss_scale, "skipped_steps": self.bad_steps.skipped}
            self.reporter.gradients({"step": step.number, **row, **counters})


@dataclass(eq=False)
class Clock(Callback):
    """Measures the wall time of a run over all its processes, and the time of its training steps.

    Attributes:
        throughput: counts images and seconds of training.
        images: number of images of an optimizer step.
        started: `time.perf_counter()` when this process began.
        previous_seconds: wall time of the run up to the checkpoint that this process resumed from.
    """

    throughput: Throughput
    images: int
    started: float
    previous_seconds: float = 0.0

    @property
    def wall_seconds(self) -> float:
        """The wall time of this run until now, over all its processes."""
        return self.previous_seconds + time.perf_counter() - self.started

    def before_training(self, step: int) -> None:
        """As `Callback.before_training`."""
        self.throughput.restart()

    def after_step(self, step: Step) -> None:
        """As `Callback.after_step`."""
        self.throughput.step(self.images)

    def before_evaluation(self, step: int) -> None:
        """As `Callback.before_evaluation`."""
        self.throughput.pause()

    def after_evaluation(self, step: int) -> None:
        """As `Callback.after_evaluation`."""
        self.throughput.resume()

    def state_dict(self) -> dict[str, Any]:
        """As `Callback.state_dict`."""
        images, seconds = self.throughput.total_images, self.throughput.total_seconds
        return {"wall_seconds": self.wall_seconds, "trained_images": images, "trained_seconds": seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Callback.load_state_dict`."""
        self.previous_seconds = state["wall_seconds"]
        self.throughput.total_images = state["trained_images"]
        self.throughput.total_seconds = state["trained_seconds"]


@dataclass(eq=False)
class Profile(Callback):
    """Records steps with torch's profiler (`--profile-steps`) as traces and tables of operations.

    One rank of each pipeline stage records, because the other ranks of the stage do the same work. Work between two
    steps, such as an evaluation, is not recorded.

    Attributes:
        steps: to record, counted from 1.
        folder: for the traces and tables.
        engine: of this rank.
        throughput: paused while the profile is written.
        watchdog: notified before the profile is written, which takes long.
        reporter: on rank 0, names the folder or the error; None elsewhere.
    """

    steps: range
    folder: Path
    engine: Engine
    throughput: Throughput
    watchdog: Watchdog
    reporter: Reporter | None

    def __post_init__(self) -> None:
        self._records = self.engine.groups.dp_rank == 0 and self.engine.groups.tp_rank == 0
        self._profile: profile | None = None
        self._activities = profiled_activities(self.engine.device)

    def before_step(self, step: int) -> None:
        """As `Callback.before_step`."""
        if step not in self.steps or not self._records:
            return
        if step == self.steps.start:
            if self._profile is not None:
                self._profile.stop()  # after a rollback
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it prints between the lines of the run
            self._profile = profile(activities=self._activities)
            synchronize(self.engine.device)
            self._profile.start()
        elif self._profile is not None:
            self._profile.toggle_collection_dynamic(True, self._activities)

    def after_step(self, step: Step) -> None:
        """As `Callback.after_step`; the last step writes the profile (a collective)."""
        if step.number not in self.steps:
            return
        is_last = step.number == self.steps[-1]
        if self._profile is not None:
            synchronize(self.engine.device)
            if not is_last:
                self._profile.toggle_collection_dynamic(False, self._activities)
        if is_last:
            self.throughput.pause()
            self.watchdog.beat(step.number, "writing the profile", patience=4)
            self._finish()
            self.throughput.resume()

    def _finish(self) -> None:
        try:
            own = self._write(self._profile) if self._profile is not None else None
        except Exception as error:  # training continues without it, and the other ranks wait here
            own = f"WARNING: the profile could not be written: {self.folder}: {first_line(error)}"
        lines = sorted(line for line in gather_objects(own) if line)  # warnings first
        if self.reporter and lines:  # no lines if the run resumed within these steps
            self.reporter.say(lines[0])

    def _write(self, recorded: profile) -> str:
        self._profile = None  # also if the following fails
        recorded.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"stage{self.engine.groups.pipeline_stage}-rank{self.engine.groups.rank}.json"
        recorded.export_chrome_trace(str(path))
        longest = "self_device_time_total" if is_accelerator(self.engine.device) else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=longest, row_limit=_TABLE_ROWS, max_name_column_width=80)
        path.with_suffix(".txt").write_text(table)
        return f"steps {self.steps[0]} to {self.steps[-1]} profiled: {self.folder}"


# ---- replicas --------------------------------------------------------------------------------------------------------

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class CheckReplicas(Callback):
    """Compares the weights of ranks that should hold the same ones, bitwise, every --check-replicas steps.

    A replica that drifts (a faulty link, a missed reduction, a driver's nondeterminism) changes the curve long before
    it shows in the loss.
    """

    run: Run
    engine: Engine

    def after_step(self, step: Step) -> None:
        """As `Callback.after_step`; see `check_replicas`."""
        if step.number % self.run.config.check_replicas == 0:
            check_replicas(self.engine, step.number)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar that depends on every bit of a tensor and on its position (integer overflow wraps)."""
    words = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()]).to(torch.int64)
    # Each position has an odd factor, from multiples of 2^64 / golden ratio (Knuth's multiplicative hash).
    factors = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64) * -0x61C8864680B583EB
    return ((words + 0x1234567) * (factors | 1)).sum()


def check_replicas(engine: Engine, step: int) -> None:
    """Compare the weights that data-parallel ranks share, and those that tensor-parallel ranks share (a collective).

    Under ZeRO-3 no weight has a replica; resolve/engine.py rejects the check.

    Args:
        engine: of the run.
        step: the step that was taken, for the message.

    Raises:
        ReplicasDiffer: on every rank; names the first parameters that differ in this rank's groups, or says that
            another rank found a difference.
    """
    names = timm_names(engine.module)
    parameters = list(engine.module.named_parameters())
    sums = torch.stack([checksum(p) for _, p in parameters]).to(engine.device)
    comparisons = [("data", engine.groups.dp, torch.ones(len(sums), dtype=torch.bool))]
    if engine.groups.tp is not None:
        replicated = torch.tensor([not getattr(p, "tensor_model_parallel", False) for _, p in parameters])
        comparisons.append(("tensor", engine.groups.tp, replicated))
    found: list[str] = []
    for kind, group, is_replicated in comparisons:
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        differs = ((low != high).cpu() & is_replicated).nonzero().flatten().tolist()
        found += [f"{names[parameters[i][0]]} ({kind}-parallel ranks)" for i in differs]
    total = int(engine.sum(torch.tensor(len(found), device=engine.device)))
    if total:
        what = f"{len(found)} parameters differ: {', '.join(found[:5])}" if found else "another rank found a difference"
        raise ReplicasDiffer(
            f"--check-replicas: replicas differ at step {step}; {what}; do not trust the run from this step on, and "
            "resume from an earlier checkpoint"
        )
