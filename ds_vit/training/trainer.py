"""A started run on this rank: for each step → metrics, evaluation; in the end the weights and the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ds_vit.config.run_folder import RunFolder
from ds_vit.engine.base import Inputs, StepResult, device_of
from ds_vit.engine.step_guard import Rejection
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.fault_tolerance.signals import Interrupted, Signals
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.models import forward_flops
from ds_vit.monitoring.gradients import GradientHealth
from ds_vit.monitoring.metrics import Reporter, Throughput, peak_tflops
from ds_vit.optim.ema import Ema
from ds_vit.parallel.groups import Groups
from ds_vit.training.build import build_engine
from ds_vit.training.checkpoint_manager import CheckpointManager
from ds_vit.training.evaluate import Accuracy, evaluate
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.plan import Plan
from ds_vit.training.replica_check import check_replicas
from ds_vit.training.summary import show_end, show_start, summarise


class _Stop(Exception):
    """Leaves an evaluation in the middle, on all ranks at the same batch."""


class _RollBack(Exception):
    """Leaves training at a step that was turned down, on all ranks together."""

    def __init__(self, step: int, rejection: Rejection, diverged: Diverged) -> None:
        super().__init__(str(rejection))
        self.step = step
        self.rejection = rejection
        self.diverged = diverged


class Trainer:
    """One run, on the rank that calls; all ranks do the same things in the same order.

    Args:
        plan: what to do.
        folder: of the output, shared by all ranks; rank 0 writes to it.
        groups: of the run.
        started: `time.perf_counter()` when the program began.
        watchdog: is told of every bit of progress.
        signals: that this rank has had, or None where they are not listened for.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        groups: Groups,
        started: float,
        watchdog: Watchdog,
        signals: Signals | None = None,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.groups = groups
        self.started = started
        self.watchdog = watchdog
        self.signals = signals
        self.device = device_of(plan.process.local_rank)
        self.flops = forward_flops(plan.model)
        self.peak = peak_tflops(self.device, plan.precision.name)
        self.throughput = Throughput()
        self.accuracies: list[Accuracy] = []
        self.ema_accuracies: list[Accuracy] = []
        self.skipped_steps = self.skips_in_a_row = self.rollbacks = 0
        self.evaluated_step = 0
        self.before = {"wall_seconds": 0.0, "skipped_images": 0}  # this run, up to the checkpoint it goes on from
        self.step = 0  # optimizer steps that are done
        self.checkpoint_manager: CheckpointManager | None = None  # of a run that trains
        self.reporter: Reporter | None = None

    def run(self) -> dict[str, Any]:
        """Build, train, evaluate, save.

        Returns:
            What summary.json holds, on every rank.
        """
        plan = self.plan
        console = show_start(plan, self.folder, self.flops, self.device)
        self.watchdog.beat(0, "building the model", patience=4)
        self.engine = build_engine(plan, self.device, self.groups)
        self.ema: Ema | None = None
        if plan.config.model_ema:
            self.ema = Ema(self.engine.zero_map, plan.config.model_ema_decay, plan.config.model_ema_warmup)
        if plan.config.spike_factor is not None:
            self.engine.guard.watch_spikes(plan.config.spike_factor)
        self.health = GradientHealth(self.engine.zero_map, self.engine.clipped_by)
        samples = self.folder.samples if plan.config.log_samples else None
        self.inputs = InputPipeline(plan, self.engine, self.throughput, samples)
        done = self._restore()
        if console is not None:
            events = self.engine.write_events
            total = plan.total_steps
            self.reporter = Reporter(self.folder, total_steps=total, first_step=done, events=events, console=console)
            if self.checkpoint_manager is not None:
                self.checkpoint_manager.reporter = self.reporter
        exit_word = "completed"
        try:
            self._train(done)
            self._save()
            exit_word = "not all saved" if self.checkpoint_manager.num_failed else exit_word
        except Interrupted:
            exit_word = "not all saved" if self.checkpoint_manager.stopped_unsaved else "interrupted"
        finally:
            if self.reporter:
                self.reporter.close()
        history = self._history()
        summary = summarise(
            plan,
            self.accuracies,
            self.ema_accuracies,
            self.throughput,
            history["skipped_images"],
            history["wall_seconds"],
            steps=self.step,
            exit_word=exit_word,
        )
        show_end(plan, self.folder, summary, console)
        self.engine.close()
        return summary

    def _restore(self) -> int:
        """Take up what was saved, if this run goes on; gives the steps that are done (a collective)."""
        shared = (self.engine, self.ema, self.throughput, self.signals, self._history)
        self.checkpoint_manager = CheckpointManager(self.plan, self.folder, *shared)
        if self.plan.resume is not None:
            self.watchdog.beat(0, "reading the checkpoint", patience=4)
        self.step, history = self.checkpoint_manager.restore()
        if history:
            self._restore_history(history)
        return self.step

    def _save(self) -> None:
        """The end of the run as a checkpoint, where it has any, and its weights (a collective)."""
        assert self.checkpoint_manager is not None
        self.watchdog.beat(self.step, "saving", patience=4)
        self.checkpoint_manager.finish(self.step)
        self.watchdog.beat(self.step, "saving the weights", patience=4)
        self.checkpoint_manager.save_weights(self.folder.path)

    def _train(self, first_step: int) -> None:
        """Steps until the end; after each rollback from the step that it led to."""
        self._boundary(first_step)
        if first_step and self.evaluated_step != first_step:
            self._evaluate_if_due(first_step)  # the run was interrupted within this evaluation
        while True:
            try:
                return self._train_from(first_step)
            except _RollBack as bad:
                first_step = self._roll_back(bad)

    def _roll_back(self, bad: _RollBack) -> int:
        """Take up the last checkpoint, and leave out the samples of the steps since then (a collective).

        Returns:
            The steps that are done now.

        Raises:
            Diverged: nothing was saved yet.
        """
        assert self.checkpoint_manager is not None
        self.watchdog.beat(bad.step, "reading the checkpoint", patience=4)
        used = bad.step + self.checkpoint_manager.skipped_batches
        back = self.checkpoint_manager.roll_back()
        if back is None:
            raise Diverged(f"{bad.diverged}; there is no checkpoint yet to go back to")
        self.step, history = back
        self.rollbacks += 1
        skipped = used - self.step - self.checkpoint_manager.skipped_batches
        self.checkpoint_manager.skipped_batches = used - self.step
        self.accuracies = self.accuracies[: len(history["accuracies"])]
        self.ema_accuracies = self.ema_accuracies[: len(history["ema_accuracies"])]
        self.evaluated_step = history["evaluated_step"]
        self.engine.guard.remember(history["spikes"])
        self.skips_in_a_row = 0
        if self.reporter:
            row = {"step": bad.step, "reason": bad.rejection.reason, "layer": bad.rejection.layer[0]}
            row |= {"to_step": self.step, "skipped_batches": skipped, "number": self.rollbacks}
            self.reporter.rollback(row)
        return self.step

    def _train_from(self, first_step: int) -> None:
        skipped = self.checkpoint_manager.skipped_batches if self.checkpoint_manager is not None else 0
        # Closed, so that a loader's workers end now; DeepSpeed's pipeline goes on holding its iterator.
        with contextlib.closing(self.watchdog.micro_batches(self.inputs.training(first_step, skipped))) as inputs:
            self._take_steps(first_step, inputs)

    def _take_steps(self, first_step: int, inputs: Iterator[Inputs]) -> None:
        plan, config = self.plan, self.plan.config
        self.throughput.restart()
        for step in range(first_step, plan.total_steps):
            if plan.schedule is not None:
                self.engine.set_lr(plan.schedule.lr(step))
            lr, scale = self.engine.lr(), self.engine.loss_scale()
            looks = config.grad_stats_interval > 0 and step % config.grad_stats_interval == 0
            if looks:
                self.health.arm()
            self.watchdog.beat(step + 1, "forward, backward and update")
            result = self.engine.train_step(inputs)
            self._account(step + 1, scale, result)
            if self.ema is not None and result.applied:
                self.ema.update()
            if looks:
                self._log_gradients(step + 1, scale, result)
            self.throughput.step(plan.batch.global_batch)
            done = step + 1
            if config.check_replicas and done % config.check_replicas == 0:
                check_replicas(self.engine, done)
            if done == 1 or done % config.log_interval == 0 or done == plan.total_steps:
                self._log(done, lr, scale, result)
            elif self.reporter:
                self.reporter.advance(done)
            self.step = done
            self._evaluate_if_due(done)
            self._boundary(done)

    def _boundary(self, done: int) -> None:
        """Between two steps: save if it is time.

        Raises:
            Interrupted: some rank was told to stop; all of them are here, and the step is saved.
        """
        if self.checkpoint_manager is not None:
            self.watchdog.beat(done, "saving", patience=4)
            self.checkpoint_manager.boundary(done)

    def _evaluate_if_due(self, done: int) -> None:
        plan = self.plan
        if plan.val_source is None or not done:
            return
        epochs, rest = divmod(done, plan.order.steps_per_epoch)
        interval = plan.config.eval_interval
        if (interval > 0 and rest == 0 and epochs % interval == 0) or done >= plan.total_steps:
            self._evaluate(done)

    # Steps in a row without an update after which going on is pointless; a loss scale of 2^16 is found in fewer.
    _MAX_SKIPS = 50

    def _account(self, step: int, scale: float, result: StepResult) -> None:
        """Count a step that was not applied, say why, and stop where that is asked for (the same on every rank).

        Raises:
            Diverged: the run shall not go on.
        """
        if result.applied:
            self.skips_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skips_in_a_row += 1
        plan, rejection = self.plan, result.rejection
        loss = float(self.engine.mean(result.loss))
        overflow = "fp16" in plan.precision.name and (rejection is None or rejection.reason == "nonfinite")
        reason = "overflow" if overflow else rejection.reason
        if self.reporter:
            norm, layer, there = (None, None, None)
            if rejection is not None:
                norm, (layer, there) = rejection.grad_norm, rejection.layer
            row = {"step": step, "reason": reason, "loss": loss, "grad_norm": norm, "layer": layer}
            row |= {"layer_norm": there, "loss_scale": scale, "skipped_steps": self.skipped_steps}
            self.reporter.skip(row, str(rejection) if rejection and not overflow else None)
        saved = "what was saved before is intact; lower the learning rate, warm up for longer or clip harder"
        if not overflow and plan.config.on_nonfinite == "stop":
            diverged = Diverged(
                f"step {step}: {rejection}; the update was not applied; {saved}, or go on past such steps "
                "with --on-nonfinite skip"
            )
        elif self.skips_in_a_row >= self._MAX_SKIPS:
            diverged = Diverged(f"step {step}: {self.skips_in_a_row} steps in a row were skipped ({reason}); {saved}")
        else:
            return
        if rejection is not None and self.rollbacks < plan.config.rollback:
            raise _RollBack(step, rejection, diverged)
        raise diverged

    def _log_gradients(self, step: int, scale: float, result: StepResult) -> None:
        """A row of kind "gradients" (a collective)."""
        row = self.health.finish()
        if self.reporter and result.applied:
            self.reporter.gradients({"step": step, **row, "loss_scale": scale, "skipped_steps": self.skipped_steps})

    def _log(self, step: int, lr: float, scale: float, result: StepResult) -> None:
        """A row of metrics.jsonl; a collective, and the place where the device is waited for."""
        plan = self.plan
        loss = float(self.engine.mean(result.loss))
        norm = float(result.grad_norm) if result.applied and result.grad_norm is not None else None
        rate, waiting = self.throughput.window(count=step > 1)
        if self.reporter is None:
            return
        tflops = 3 * self.flops * rate / plan.layout.world_size / 1e12
        self.reporter.train(
            {
                "step": step,
                "epoch": (step - 1) // plan.order.steps_per_epoch,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "loss_scale": scale,
                "images_per_second": rate,
                "tflops_per_accelerator": tflops,
                "mfu": tflops / self.peak if self.peak else None,
                "data_wait_fraction": waiting,
                "images_seen": step * plan.batch.global_batch,
            }
        )

    def _evaluate(self, step: int) -> None:
        """Exact accuracy on the validation split (a collective).

        Raises:
            Interrupted: the ranks were told to stop meanwhile; the step is saved, and not counted as evaluated.
        """
        self.throughput.pause()
        try:
            self._evaluate_weights(step, self.accuracies, "eval")
            if self.ema is not None:
                with self.ema.swapped():
                    self._evaluate_weights(step, self.ema_accuracies, "eval_ema")
        except _Stop:
            self._boundary(step)
        self.throughput.resume()
        self.evaluated_step = step
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.evaluated(step, self.accuracies[-1].top1, max(a.top1 for a in self.accuracies))

    def _evaluate_weights(self, step: int, accuracies: list[Accuracy], kind: str) -> None:
        """Exact accuracy of the weights that the model has now (a collective)."""

        def stop_if_told_to() -> None:
            if self.checkpoint_manager is not None and self.checkpoint_manager.asked_to_stop():
                raise _Stop

        self.watchdog.beat(step, "evaluation")
        batches, num_batches = self.inputs.evaluation()
        batches = self.watchdog.micro_batches(batches)
        bce = self.plan.config.bce_loss
        accuracy = evaluate(self.engine, batches, num_batches, bce=bce, between=stop_if_told_to)
        accuracies.append(accuracy)
        if self.reporter:
            self.reporter.eval({"step": step, **dataclasses.asdict(accuracy)}, kind)

    def _history(self) -> dict[str, Any]:
        """What a run that goes on wants to know of the time before (a collective)."""
        skipped = int(self.engine.sum(torch.tensor(self.inputs.skipped_images, device=self.device)))
        return {
            "accuracies": [dataclasses.asdict(a) for a in self.accuracies],
            "ema_accuracies": [dataclasses.asdict(a) for a in self.ema_accuracies],
            "evaluated_step": self.evaluated_step,
            "skipped_steps": self.skipped_steps,
            "rollbacks": self.rollbacks,
            "spikes": self.engine.guard.recent(),
            "skipped_images": self.before["skipped_images"] + skipped,
            "wall_seconds": self.before["wall_seconds"] + time.perf_counter() - self.started,
            "trained_images": self.throughput.total_images,
            "trained_seconds": self.throughput.total_seconds,
        }

    def _restore_history(self, history: Mapping[str, Any]) -> None:
        self.accuracies = [Accuracy(**a) for a in history["accuracies"]]
        self.ema_accuracies = [Accuracy(**a) for a in history["ema_accuracies"]]
        self.evaluated_step = history["evaluated_step"]
        self.skipped_steps = history["skipped_steps"]
        self.rollbacks = history["rollbacks"]
        self.engine.guard.remember(history["spikes"])
        self.before = {name: history[name] for name in self.before}
        self.throughput.total_images = history["trained_images"]
        self.throughput.total_seconds = history["trained_seconds"]
