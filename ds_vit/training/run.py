"""A resolved run: one frozen object, whose parts the components take.

    words, recipe, JSON ──parse──▶ RunConfig ──resolve(config, world)──▶ Run ──▶ build_engine(run, …), …

A part has resolved values only: what a flag says as it is, is read from `Run.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_vit.config.batch import BatchSizes
from ds_vit.config.schema import RunConfig
from ds_vit.config.units import Interval
from ds_vit.data.sampler import Share
from ds_vit.data.settings import Data
from ds_vit.engine.settings import EngineSettings
from ds_vit.launching.process import Process
from ds_vit.models.zoo import ModelSpec, names_and_shapes
from ds_vit.optim.settings import Optimizer, Schedule
from ds_vit.parallel.layout import Layout
from ds_vit.tasks.task import Task
from ds_vit.training.resume import Resume
from ds_vit.weights.initial_checkpoint import InitialCheckpoint


@dataclass(frozen=True)
class World:
    """The machine that a run is resolved for.

    Attributes:
        process: this rank.
        on_cpu: there is no accelerator.
        stop_at: `time.time()` at which the scheduler or --time-limit ends the run.
        num_gpus: that torch can use on this host; None where that does not matter.
        cpu_is_meant: DS_ACCELERATOR says that the run is to be on a CPU.
    """

    process: Process
    on_cpu: bool
    stop_at: float | None = None
    num_gpus: int | None = None
    cpu_is_meant: bool = False


@dataclass(frozen=True)
class Model:
    """The description of the model, before its weights exist.

    Attributes:
        spec: name and arguments of the model, for timm.
        whole: the unsharded model on the meta device, for names and shapes.
        task: the training task.
        towers: tower → source of its weights; absent where they are random, or come from a checkpoint of the run.
        frozen: timm names of parameters that are not trained.
        bounds: pipeline stage i has the layers bounds[i] to bounds[i + 1] - 1.
        class_parallel: whether the classifier is sharded over classes.
        notes: lines for people.
    """

    spec: ModelSpec
    whole: nn.Module = field(repr=False)
    task: Task
    towers: Mapping[str, InitialCheckpoint]
    frozen: frozenset[str] = field(repr=False)
    class_parallel: bool
    bounds: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def reads_class_token(self) -> bool:
        """Whether the last block may compute only the class token (`compute_class_token`).

        It may not if the last pipeline stage holds only the head: the stages exchange tokens of the same shape in
        training and in evaluation.
        """
        *_, start, stop = self.bounds
        return stop - start > 1

    @property
    def saved_shapes(self) -> dict[str, torch.Size]:
        """timm name → unsharded shape of each parameter that checkpoints store, in the model's order."""
        shapes = names_and_shapes(self.whole)
        return {name: shape for name, shape in shapes.items() if not self.task.is_fixed(name)}


@dataclass(frozen=True)
class Output:
    """When the run logs, saves and stops, and what it resumes from.

    Attributes:
        interval: between checkpoints; false for none.
        stop_at: `time.time()` at which the run saves and stops; infinite for never.
        resume: the checkpoint to resume from; None for a new run.
        log_interval: steps between rows of metrics.jsonl.
        notes: lines for people, among them the changes from the checkpoint's run.
    """

    interval: Interval
    stop_at: float
    resume: Resume | None
    log_interval: int
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Run:
    """A run, resolved.

    Attributes:
        config: the flags, as they were given.
        process: this rank.
        layout: degrees of parallelism.
        batch: the batch arithmetic.
        data: the samples.
        model: the model and its task.
        optimizer: the update rule of each parameter; None in evaluation only.
        schedule: the learning rate and the number of steps; None in evaluation only.
        engine: how the model is computed.
        output: when the run logs, saves and stops, and what it resumes from.
    """

    config: RunConfig
    process: Process
    layout: Layout
    batch: BatchSizes
    data: Data
    model: Model
    optimizer: Optimizer | None
    schedule: Schedule | None
    engine: EngineSettings
    output: Output

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything worth a line for people."""
        parts = (self.engine, self.data, self.model, self.optimizer, self.schedule, self.output)
        return (*(note for part in parts if part is not None for note in part.notes), *self._bubble)

    @property
    def _bubble(self) -> tuple[str, ...]:
        pp, number = self.layout.pp, self.batch.accumulation
        if pp == 1 or self.schedule is None:
            return ()
        bubble = (pp - 1) / (number + pp - 1)
        line = f"pipeline: {number} micro-batches through {pp} stages, bubble {bubble:.0%} of a step"
        return (line + (" (more accumulation makes it smaller)" if number < pp else ""),)

    @property
    def training(self) -> tuple[Optimizer, Schedule]:
        """The optimizer and the schedule of a run that trains."""
        assert self.optimizer is not None, "there is none in evaluation only"
        assert self.schedule is not None, "there is none in evaluation only"
        return self.optimizer, self.schedule

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run; 0 in evaluation only."""
        return self.schedule.total_steps if self.schedule else 0

    @property
    def share(self) -> Share:
        """This rank's rows of a global batch of training."""
        rank, batch = self.process.rank, self.batch
        return Share(self.layout.dp_rank(rank), self.layout.dp, batch.micro_batch, batch.accumulation)

    @property
    def eval_share(self) -> Share:
        """This rank's rows of the evaluation batches that the ranks count at a time."""
        rows = self.config.validation_batch_size or self.batch.micro_batch
        return Share(self.layout.dp_rank(self.process.rank), self.layout.dp, rows)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.layout.stage(self.process.rank)

    @property
    def has_best(self) -> bool:
        """Whether evaluations choose the best weights."""
        return self.data.val_source is not None and self.model.task.figures[0].summed_up

    @property
    def text(self) -> str:
        """Degrees, ZeRO stage and precision, for a line or a table."""
        return f"{self.layout}, ZeRO-{self.engine.zero_stage}, {self.engine.precision.name}"
