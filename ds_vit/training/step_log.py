"""What is written down of a step: a row of metrics.jsonl, a point of TensorBoard's curves, the progress line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ds_vit.engine.base import Engine
from ds_vit.engine.step_guard import StepResult
from ds_vit.models import Flops, count_flops, create_model
from ds_vit.monitoring.metrics import Reporter
from ds_vit.monitoring.throughput import Lagging, Throughput, peak_tflops
from ds_vit.training.bad_steps import BadSteps
from ds_vit.training.epoch_mean import EpochMean
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.plan import Plan
from ds_vit.training.truth import Truth

_FEW_ROWS = 12  # of which a curve is hardly one


def few_rows(total_steps: int, interval: int) -> list[tuple[str, str]]:
    """A row for the start's table where the curves of a run will have few points; none elsewhere.

    Args:
        total_steps: of the run.
        interval: optimizer steps between two rows of metrics.jsonl, which the first step and the last have too.
    """
    due = range(interval, total_steps + 1, interval)
    number = len(due) + sum(step not in due for step in {1, total_steps})
    if number >= min(_FEW_ROWS, total_steps):
        return []
    return [("metrics", f"{number} rows, one every {interval} steps; --log-interval 1 writes each step down")]


class StepLog:
    """Writes down steps whose verdict is known; all ranks call it, for the figures are means over them.

    Args:
        plan: what to do.
        engine: runs the model.
        inputs: of the run.
        flops: of the model, on rank 0.
        throughput: images a second, and the time waited for data.
        epoch_loss: the epoch's mean loss up to now.
        bad_steps: counts the steps that were skipped.
        truth: looks at the memory.
        reporter: of rank 0; None elsewhere.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        inputs: InputPipeline,
        flops: Flops,
        throughput: Throughput,
        epoch_loss: EpochMean,
        bad_steps: BadSteps,
        truth: Truth,
        reporter: Reporter | None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.inputs = inputs
        self.flops = flops
        self.sizes = plan.image_sizes
        self.flops_of: dict[int, Flops] = {}  # of an image, by its side
        if reporter and self.sizes:
            specs = {size: dataclasses.replace(plan.model.spec, img_size=size) for size in self.sizes.sizes}
            self.flops_of = {size: count_flops(create_model(spec), plan.model.frozen) for size, spec in specs.items()}
        self.since = 0  # the step of the last row
        self.peak = peak_tflops(engine.device, plan.deepspeed.precision.name)
        self.throughput = throughput
        self.epoch_loss = epoch_loss
        self.bad_steps = bad_steps
        self.truth = truth
        self.reporter = reporter
        self.late_loss = Lagging(engine.device)

    def gradients(self, step: int, row: Mapping[str, Any], scale: float, result: StepResult) -> None:
        """A row of kind "gradients"."""
        if self.reporter and result.applied:
            self.reporter.gradients({"step": step, **row, "loss_scale": scale, "skipped_steps": self.bad_steps.skipped})

    def row(self, step: int, lr: float, scale: float, result: StepResult) -> None:
        """A row of metrics.jsonl; a collective, and the place where the device is waited for."""
        plan = self.plan
        epoch = plan.data.order.epoch_of(max(step - 1, 0))
        losses = torch.stack((result.loss.float(), self.epoch_loss.own(epoch)))
        loss, epoch_loss = self.engine.mean(losses).tolist()
        norm = _norm(result)
        rate, waiting = self.throughput.window(count=step > 1)
        memory = self.truth.memory_bytes()
        counted = {"skipped_images": self.inputs.skipped.gather()} if plan.config.on_bad_image == "skip" else {}
        if self.reporter is None:
            return
        tflops = self._training_flops(step) * rate / plan.parallel.layout.world_size / 1e12
        self.reporter.train(
            {
                "step": step,
                "loss": loss,
                "epoch_loss": epoch_loss if self.epoch_loss.steps else None,
                "lr": lr,
                "grad_norm": norm,
                "loss_scale": scale,
                "images_per_second": rate,
                "tflops_per_accelerator": tflops,
                "mfu": tflops / self.peak if self.peak else None,
                "data_wait_fraction": waiting,
                "memory_bytes": memory,
                "images_seen": step * plan.data.batch.global_batch,
                **counted,
            }
        )

    def _training_flops(self, step: int) -> float:
        """Of an image, the mean over the steps since the last row."""
        first, self.since = min(self.since, step - 1), step
        if self.sizes is None:
            return self.flops.training
        flops = [self.flops_of[self.sizes.at(done)].training for done in range(first, step)]
        return sum(flops) / len(flops)

    def point(self, step: int, lr: float, scale: float, result: StepResult) -> None:
        """A point of TensorBoard's curves between two rows of metrics.jsonl (a collective)."""
        loss, norm = float(self.engine.mean(result.loss)), _norm(result)
        if self.reporter:
            self.reporter.draw({"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "loss_scale": scale})

    def line(self, step: int, result: StepResult) -> None:
        """Move the progress line, where there is one."""
        if self.reporter and self.reporter.line.moves:
            # This rank's own loss: the mean over all ranks would have to wait for them.
            late = self.late_loss.exchange(result.loss)
            self.reporter.line.step(step, loss=late, images=self.plan.data.batch.global_batch)


def _norm(result: StepResult) -> float | None:
    """The gradient norm of a step that was applied."""
    return float(result.grad_norm) if result.applied and result.grad_norm is not None else None
