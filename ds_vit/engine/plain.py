"""The plain engine: all towers on each rank, or their tensor shards; ZeRO 0 to 3, one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ds_vit.engine.base import Engine, Forward, RankContext
from ds_vit.engine.graph import Given, Pass, StepGraphs
from ds_vit.engine.step_guard import StepResult
from ds_vit.models.sequential import Towers, giving_features
from ds_vit.optim.ema import TeacherAverage
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import Task


@dataclass(kw_only=True, eq=False)
class PlainContext(RankContext):
    """The context for towers that are whole on each rank or tensor-parallel.

    Attributes:
        towers: of this rank; may only be called within a forward call of DeepSpeed's engine.
    """

    towers: Towers

    def forward(
        self, tower: str, inputs: Sequence[torch.Tensor | None], batch: Batch, *, grad: bool = True
    ) -> torch.Tensor:
        """As `StepContext.forward`."""
        first, *others = inputs
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            return self.towers[tower](first, batch["keys"], *others)


class PlainEngine(Engine):
    """DeepSpeed's engine around the towers of a task: ZeRO 0 to 3, one pipeline stage; arguments as for `Engine`."""

    context: PlainContext

    def __init__(self, *arguments: Any, replays: bool = False, **shared: Any) -> None:
        """As `Engine`; with `replays` the passes of a micro-batch are captured and replayed."""
        self._total: torch.Tensor | None = None
        self._num_losses = 0
        super().__init__(*arguments, **shared)
        if replays:
            assert self.flat is not None, "the optimizer is offloaded"
            self.graphs = StepGraphs(self.engine, self.flat, self.context, lambda: self._settle())
            self.on_close.callback(self.graphs.clear)
        self.engine.train()

    def _make_context(self, model: Towers, *, trains: bool, **shared: Any) -> PlainContext:
        context = PlainContext(towers=model, **shared)
        if self._task.teachers and trains:
            pairs = []
            for teacher, student in self._task.teachers.items():
                students = dict(model[student].named_parameters())  # it may have more (a mask token)
                pairs += [(parameter, students[name]) for name, parameter in model[teacher].named_parameters()]
            context.teachers = TeacherAverage(self.zero_map, pairs)
        return context

    def train_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object] = lambda: None) -> StepResult:
        """As `Engine.train_step`; `meanwhile` is called after the first forward pass, with graphs after the first
        micro-batch's backward pass."""
        if not self.module.training:  # walking all modules costs the host as much as their forward pass
            self.engine.train()
        self.guard.begin()
        if self.graphs is not None:
            assert self.flat is not None
            self.flat.fresh = True  # also where `meanwhile` left the step before: its gradient does not count
            if not self.graphs.reason:
                batches = map(self._task.fixed_batch, batches)
        self._total, self._num_losses = None, 0
        if self._task.coupled and self.accumulation > 1:
            return self._coupled_step(batches, meanwhile)
        for number in range(self.accumulation):
            if number == 0 and self.graphs is None:
                loss = self._differentiate(next(batches), meanwhile=meanwhile)
            else:
                loss = self._run("step", self._differentiate, next(batches))
                if number == 0:
                    meanwhile()
            self._add(loss)
            self.engine.step()
        assert self._total is not None
        return self._result(self._total / self.accumulation)

    def _run(self, name: str, function: Pass, *given: Given) -> Any:
        """A pass of a micro-batch, replayed where it can be."""
        if self.graphs is None or (self.context.measures and type(self._task).gauges is not Task.gauges):
            return function(*given)
        return self.graphs.run(name, function, *given)

    def _differentiate(
        self, batch: Batch, piece: Given | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> torch.Tensor:
        """The loss of a micro-batch, whose gradient is then written."""
        loss = self.engine(partial(self._task.step, self.context, batch, piece))
        meanwhile()
        self.engine.backward(loss)
        return loss.detach()

    def _collect(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return self.engine(partial(self._task.collect, self.context, batch))

    def _coupled_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object]) -> StepResult:
        """Two passes over the micro-batches: the first collects what the loss couples, the second differentiates."""
        micro_batches = [next(batches) for _ in range(self.accumulation)]
        with torch.no_grad():
            collected: list[Mapping[str, torch.Tensor]] = []
            for batch in micro_batches:
                found, once = self._run("collect", self._collect, batch), self._task.collected_once if collected else ()
                collected.append({name: tensor for name, tensor in found.items() if name not in once})
        meanwhile()
        coupled = self.engine(partial(self._task.couple, self.context, collected))
        del collected
        if coupled.loss is not None:
            self._total, self._num_losses = coupled.loss.detach(), 1
        for batch, piece in zip(micro_batches, coupled.pieces, strict=True):
            loss = self._run("step", self._differentiate, batch, piece)
            if coupled.loss is None:
                self._add(loss)
            self.engine.step()
        assert self._total is not None, "there are no micro-batches"
        return self._result(self._total / self._num_losses)

    def _add(self, loss: torch.Tensor) -> None:
        """Count the loss of a micro-batch, before the optimizer steps."""
        self._total = loss.detach() if self._total is None else self._total + loss.detach()
        self._num_losses += 1

    def _result(self, loss: torch.Tensor) -> StepResult:
        result = super()._result(loss)
        if self._task.updates_after_step and result.outcome().applied:
            self._task.after_update(self.context)
        return result

    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        return self._total, self._num_losses

    @torch.no_grad()
    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False, run: Forward | None = None
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """As `Engine.forward_batches`."""
        self.engine.eval()
        for _ in range(num_batches):
            batch = next(batches)
            forward = partial(run or self._task.outputs, self.context, batch)
            if features:
                forward = partial(self.context.forward, self._task.feature_tower, self._inputs(batch)[:1], batch)
            with giving_features(self.module, features):
                outputs = self.engine(forward)
                outputs = self._whole(outputs, features)
            if self.counts_rows:
                yield outputs, batch
