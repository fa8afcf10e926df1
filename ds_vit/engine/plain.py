"""The plain engine: all towers on each rank, or their tensor shards; ZeRO 0 to 3, one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_vit.config.deepspeed_rules import sums_going_back
from ds_vit.engine.base import Engine, RankContext
from ds_vit.engine.patches.overlap import Overlap
from ds_vit.engine.step_guard import StepResult
from ds_vit.models import Towers, giving_features
from ds_vit.optim.ema import TeacherAverage
from ds_vit.parallel.tensor import TensorParallel
from ds_vit.tasks import MAIN_TOWER, Batch, Task


class PlainContext(RankContext):
    """As `StepContext`, for towers that are whole on each rank or tensor-parallel.

    Args:
        towers: of this rank; may be called within a forward call of DeepSpeed's engine only.
        shared: as for `RankContext`.
    """

    def __init__(self, towers: Towers, **shared: Any) -> None:
        super().__init__(**shared)
        self._towers = towers
        self.teachers: TeacherAverage | None = None

    def forward(
        self, tower: str, inputs: Sequence[torch.Tensor | None], batch: Batch, *, grad: bool = True
    ) -> torch.Tensor:
        """As `StepContext.forward`."""
        model = self._towers[tower]
        model.keys_on_host = batch.get("keys_on_host")
        try:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return model(*inputs, batch["keys"])
        finally:
            model.keys_on_host = None

    def update_teachers(self, momentum: float) -> None:
        """As `StepContext.update_teachers`."""
        assert self.teachers is not None, "the task has no teachers"
        self.teachers.update_by(momentum)


class PlainEngine(Engine):
    """DeepSpeed's engine around the towers of a task: ZeRO 0 to 3, one pipeline stage.

    Args:
        model: the towers.
        optimizer: over the model's trained parameters.
        task: defines the training step.
        config: the DeepSpeed JSON with every "auto" resolved.
        class_parallel: the ranks over which the outputs are sharded by class, or None.
        shared: `groups`, `input_names` and `whole_outputs`, as for `Engine`.
    """

    def __init__(
        self,
        model: Towers,
        optimizer: torch.optim.Optimizer | None,
        task: Task,
        config: Mapping[str, Any],
        *,
        class_parallel: TensorParallel | None = None,
        **shared: Any,
    ) -> None:
        self._task = task
        self._total: torch.Tensor | None = None
        self._num_losses = 0
        super().__init__(model, optimizer, config, **shared)
        self._context = PlainContext(model, **self._context_arguments(class_parallel))
        if task.teachers and optimizer is not None:
            pairs = [
                pair
                for teacher, student in task.teachers.items()
                for pair in zip(model[teacher].parameters(), model[student].parameters(), strict=True)
            ]
            self._context.teachers = TeacherAverage(self.zero_map, pairs)
        task.setup(self._context)
        layout = self.groups.layout
        overlaps = optimizer is not None and sums_going_back(config, pp=layout.pp, dp=layout.dp, tp=layout.tp)
        self._overlap = Overlap(self.engine, config, self.groups) if overlaps else None

    @property
    def module(self) -> nn.Module:
        """As `Engine.module`."""
        module = super().module
        return module.module if isinstance(module, DistributedDataParallel) else module

    def _initialize_arguments(self) -> dict[str, Any]:
        return {} if self.groups.grid is None else {"mpu": self.groups.grid}

    @property
    def teachers(self) -> TeacherAverage | None:
        """As `Engine.teachers`."""
        return self._context.teachers

    def begin_step(self, step: int, schedules: Mapping[str, float]) -> None:
        """As `Engine.begin_step`."""
        super().begin_step(step, schedules)
        self._context.step, self._context.schedules = step, schedules

    def train_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object] = lambda: None) -> StepResult:
        """As `Engine.train_step`; `meanwhile` is called when the first forward pass has been queued."""
        self.engine.train()
        self.guard.begin()
        self._total, self._num_losses = None, 0
        if self._overlap is not None:
            self._overlap.begin()
        if self._task.coupled and self.accumulation > 1:
            return self._coupled_step(batches, meanwhile)
        for number in range(self.accumulation):
            loss = self.engine(partial(self._task.step, self._context, next(batches)))
            if number == 0:
                meanwhile()
            self.engine.backward(loss)
            self._total = loss.detach() if self._total is None else self._total + loss.detach()
            self._num_losses += 1
            self.engine.step()
        assert self._total is not None
        return self._result(self._total / self.accumulation)

    def _coupled_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object]) -> StepResult:
        """Two passes over the micro-batches: the first collects what the loss couples, the second differentiates."""
        micro_batches = [next(batches) for _ in range(self.accumulation)]
        with torch.no_grad():
            collected = [self.engine(partial(self._task.collect, self._context, batch)) for batch in micro_batches]
        meanwhile()
        coupled = self.engine(partial(self._task.couple, self._context, collected))
        self._total, self._num_losses = coupled.loss.detach(), 1
        for batch, piece in zip(micro_batches, coupled.pieces, strict=True):
            self.engine.backward(self.engine(partial(self._task.step, self._context, batch, piece)))
            self.engine.step()
        return self._result(self._total)

    def _result(self, loss: torch.Tensor) -> StepResult:
        result = super()._result(loss)
        if self._task.updates_after_step and result.applied:
            self._task.after_update(self._context)
        return result

    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        return self._total, self._num_losses

    @torch.no_grad()
    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """As `Engine.forward_batches`."""
        self.engine.eval()
        for _ in range(num_batches):
            batch = next(batches)
            with giving_features(self.module, features):
                inputs = self._inputs(batch)[:1]  # the main tower's
                outputs = self.engine(partial(self._context.forward, MAIN_TOWER, inputs, batch))
                outputs = self._whole(outputs, features)
            if self.counts_rows:
                yield outputs, batch
