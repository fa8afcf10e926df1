"""Writes each step down: a row of metrics.jsonl, a point of TensorBoard's curves, the progress line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.base import Engine
from ds_vit.engine.step_guard import StepResult
from ds_vit.monitoring.metrics import Lagging, Reporter, peak_tflops
from ds_vit.planner.counting import Flops
from ds_vit.training.callbacks import Callback, RollBack, Step
from ds_vit.training.cost import PeakMemory
from ds_vit.training.inputs import InputPipeline


@dataclass(eq=False)
class StepLog(Callback):
    """Writes steps down: rows, points and the progress line; all ranks call it, because figures are means over them.

    Attributes:
        engine: runs the model.
        inputs: of the run.
        flops: of an image by its size, on rank 0; of the model's size under None.
        peak: measures the memory.
        reporter: of rank 0; None elsewhere.
    """

    engine: Engine
    inputs: InputPipeline
    flops: Mapping[int | None, Flops]
    peak: PeakMemory
    reporter: Reporter | None

    def __post_init__(self) -> None:
        run = self.inputs.run
        self.interval, self._last = run.output.log_interval, run.total_steps
        # TensorBoard gets 200 points of a short run too.
        self.point_interval = max(1, min(self.interval, self._last // 200))
        # The mean of this rank's losses over the applied steps of an epoch; its mean over the ranks is the epoch's.
        self._epoch = self._steps_of_epoch = 0
        self._epoch_loss = torch.zeros((), device=self.engine.device)
        self._since = 0  # the step of the last row
        self._peak = peak_tflops(self.engine.device, run.engine.precision.name)
        self._late_loss = Lagging()

    def before_training(self, step: int) -> None:
        """As `Callback.before_training`."""
        self._since = step

    def before_step(self, step: int) -> None:
        """As `Callback.before_step`."""
        self.engine.context.measures = self._is_row(step)

    def needs_result(self, step: int) -> bool:
        """As `Callback.needs_result`."""
        return self._is_row(step) or step % self.point_interval == 0

    def _is_row(self, step: int) -> bool:
        return step == 1 or step % self.interval == 0 or step == self._last

    def after_step(self, step: Step) -> None:
        """As `Callback.after_step`."""
        if self._is_row(step.number):
            self.row(step)
        elif self.needs_result(step.number):
            self.point(step)
        self.line(step)

    def after_result(self, step: Step) -> None:
        """As `Callback.after_result`."""
        if step.result.outcome().applied:
            self._begin_epoch(step.number)
            self._steps_of_epoch += 1
            self._epoch_loss.lerp_(step.result.loss.detach().float(), 1 / self._steps_of_epoch)

    def _begin_epoch(self, step: int) -> None:
        """Start another mean at the first step of an epoch."""
        epoch = self.inputs.data.order.epoch_of(max(step - 1, 0))
        if epoch != self._epoch:
            self._epoch, self._steps_of_epoch = epoch, 0
            self._epoch_loss.zero_()

    def row(self, step: Step) -> None:
        """A row of metrics.jsonl; a collective that waits for the device."""
        number = step.number
        self._begin_epoch(number)
        losses = torch.stack((step.result.loss.float(), self._epoch_loss))
        loss, epoch_loss = self.engine.mean(losses).tolist()
        norm = _norm(step.result)
        rate, waiting = self.inputs.throughput.window(count=number > 1)
        memory = self.peak.measured_bytes()
        gauges = self.inputs.task.gauges(self.engine.context)
        of_task = {**self._parameters(), **{name: float(value) for name, value in gauges.items()}}
        skipped = {"skipped_images": self.inputs.skipped.gather()}
        if self.reporter is None:
            return
        tflops = self._training_flops(number) * rate / dist.get_world_size() / 1e12
        self.reporter.train(
            {
                "step": number,
                "loss": loss,
                "epoch_loss": epoch_loss if self._steps_of_epoch else None,
                "lr": step.lr,
                "grad_norm": norm,
                "loss_scale": step.loss_scale,
                "images_per_second": rate,
                "tflops_per_accelerator": tflops,
                "mfu": tflops / self._peak if self._peak else None,
                "data_wait_fraction": waiting,
                "memory_bytes": memory,
                "images_seen": number * self.inputs.data.order.global_batch,
                **skipped,
            },
            of_task,
        )
        self.reporter.warn(self.inputs.task.concerns(of_task, number, self.inputs.data.order.steps_per_epoch))

    def _parameters(self) -> dict[str, float]:
        """The values of the parameters that the task shows (a collective)."""
        shown, layout = self.inputs.task.shown_parameters, self.engine.groups.layout
        if not shown:
            return {}
        own = self.engine.zero_map.values([*shown])  # zeros on the other stages of a pipeline
        values = (self.engine.sum(own.double()) / (layout.dp * layout.tp)).tolist()
        return {key: write(value) for (key, write), value in zip(shown.values(), values, strict=True)}

    def _training_flops(self, step: int) -> float:
        """Of an image, the mean over the steps since the last row."""
        first, self._since = min(self._since, step - 1), step
        sizes = self.inputs.data.sizes
        if sizes is None:
            return self.flops[None].training
        each = [self.flops[sizes.at(done)].training for done in range(first, step)]
        return sum(each) / len(each)

    def point(self, step: Step) -> None:
        """A point of TensorBoard's curves between two rows of metrics.jsonl (a collective)."""
        loss, norm = float(self.engine.mean(step.result.loss)), _norm(step.result)
        if self.reporter:
            row = {"step": step.number, "loss": loss, "lr": step.lr, "grad_norm": norm, "loss_scale": step.loss_scale}
            self.reporter.draw(row)

    def line(self, step: Step) -> None:
        """Move the progress line, where there is one."""
        if self.reporter and self.reporter.line.moves:
            # This rank's loss: the mean over all ranks would have to wait for them.
            late = self._late_loss.exchange(step.result.loss)
            self.reporter.line.step(step.number, loss=late, images=self.inputs.data.order.global_batch)

    def after_rollback(self, bad: RollBack, step: int, skipped_batches: int, state: Mapping[str, Any]) -> None:
        """As `Callback.after_rollback`."""
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """As `Callback.state_dict`."""
        mean = float(self.engine.mean(self._epoch_loss))
        return {"epoch_loss": {"epoch": self._epoch, "steps": self._steps_of_epoch, "mean": mean}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Callback.load_state_dict`."""
        saved = state.get("epoch_loss") or {"epoch": 0, "steps": 0, "mean": 0.0}  # not in older checkpoints
        self._epoch, self._steps_of_epoch = saved["epoch"], saved["steps"]
        self._epoch_loss.fill_(saved["mean"])


def _norm(result: StepResult) -> float | None:
    """The gradient norm of a step that was applied."""
    return float(result.grad_norm) if result.outcome().applied and result.grad_norm is not None else None
