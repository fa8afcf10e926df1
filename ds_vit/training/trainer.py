"""A started run on this rank: for each step → metrics, evaluation; in the end the weights and the summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ds_vit.config.durations import parse_steps
from ds_vit.config.run_folder import RunFolder
from ds_vit.engine.start import device_of
from ds_vit.engine.step_guard import StepResult
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.fault_tolerance.signals import Interrupted, Signals
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.models import Flops, count_flops
from ds_vit.monitoring.gradients import GradientHealth
from ds_vit.monitoring.metrics import Listeners, Reporter, make_console
from ds_vit.monitoring.profile import StepProfiler
from ds_vit.monitoring.progress import Counted
from ds_vit.monitoring.sheets import TrainingSheet
from ds_vit.monitoring.starts import note_start
from ds_vit.monitoring.throughput import Throughput
from ds_vit.optim.ema import Ema
from ds_vit.parallel.groups import Groups
from ds_vit.tasks import Batch
from ds_vit.training.bad_steps import BadSteps, RollBack
from ds_vit.training.build import build_engine
from ds_vit.training.checkpoint_manager import CheckpointManager
from ds_vit.training.epoch_mean import EpochMean
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.plan import Plan
from ds_vit.training.replica_check import check_replicas
from ds_vit.training.start_rows import settings_of
from ds_vit.training.step_log import StepLog
from ds_vit.training.summary import show_end, show_start, summarise, warn_under_mpirun
from ds_vit.training.truth import Truth
from ds_vit.training.validation import Stopped, Validation


class Trainer:
    """One run, on the rank that calls; all ranks do the same things in the same order.

    Args:
        plan: what to do.
        folder: of the output, shared by all ranks; rank 0 writes to it.
        groups: of the run.
        started: `time.perf_counter()` when the program began.
        watchdog: is told of every bit of progress.
        signals: that this rank has had, or None where they are not listened for.
        listeners: as for `Reporter`.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        groups: Groups,
        started: float,
        watchdog: Watchdog,
        signals: Signals | None = None,
        listeners: Listeners = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.groups = groups
        self.started = started
        self.watchdog = watchdog
        self.signals = signals
        self.device = device_of(plan.parallel.process.local_rank)
        is_first = plan.parallel.process.rank == 0
        self.flops = count_flops(plan.model.whole, plan.model.frozen) if is_first else Flops(0, 0)  # rank 0 tells them
        self.throughput = Throughput()
        self.bad_steps = BadSteps(plan.config, fp16="fp16" in plan.deepspeed.precision.name)
        self.phases: set[str] = set()  # what this process has begun once
        self.before = {"wall_seconds": 0.0}  # this run, up to the checkpoint it goes on from
        self.step = 0  # optimizer steps that are done
        self.sizes = plan.image_sizes
        self.size = self.sizes and self.sizes.sizes[-1]  # of the images that the model takes now
        self.profiler = StepProfiler(
            parse_steps(plan.config.profile_steps, "--profile-steps"), folder.profile, groups, self.device
        )
        # The last step (its number, its loss scale, what it left), until the verdict on it is asked for.
        self._open: tuple[int, float, StepResult] | None = None
        self.epoch_loss = EpochMean(self.device)
        self.ema: Ema | None = None
        self.reporter: Reporter | None = None  # of rank 0
        # TensorBoard gets 200 points of a short run too.
        self.draw_interval = max(1, min(plan.config.log_interval, plan.training.total_steps // 200))
        if is_first:
            self.reporter = Reporter(
                folder,
                total_steps=plan.training.total_steps,
                console=make_console(),
                stamp=self._stamp,
                listeners=listeners,
            )

    def run(self) -> dict[str, Any]:
        """Build, train, evaluate, save.

        Returns:
            What summary.json holds, on every rank.
        """
        plan = self.plan
        console = self.reporter.console if self.reporter else None
        self.truth = truth = Truth(plan, self.device)
        if console is not None:
            truth.predict()
        more = truth.start_rows() if console else ()
        hosts = show_start(plan, self.folder, self.flops, self.device, console, more)
        with self._doing("building the model"):
            self._build()
        if plan.resume is not None:
            self.watchdog.beat(0, "reading the checkpoint", patience=4)
            with self._doing("reading the checkpoint"):
                self.step = self.checkpoint_manager.restore()
        else:
            self.step = self.checkpoint_manager.restore()
        if self.reporter:
            self.reporter.start(self.step, self.engine.write_events)
            self.reporter.settings(*settings_of(plan))
            note_start(self.folder, self.step, plan.parallel.layout, plan.deepspeed.zero_stage, self.device, hosts)
            if self.signals is not None:
                self.signals.on_first = partial(warn_under_mpirun, self.folder.path, plan.parallel.process.world_size)
        try:
            exit_word = self._carry_out()
        finally:
            if self.reporter:
                self.reporter.close()
        lost = self.reporter.num_lost if self.reporter else 0
        if self.engine.sum(torch.tensor(lost, device=self.device)) and exit_word == "completed":
            exit_word = "not all saved"
        summary = self._sum_up(exit_word)
        images, seconds = self.throughput.total_images, self.throughput.total_seconds
        step_seconds = plan.data.batch.global_batch * seconds / images if images else None
        summary |= truth.figures(step_seconds)
        more = truth.end_rows(summary) if console else ()
        show_end(plan, self.folder, summary, console, self.checkpoint_manager.stopped, more)
        self.engine.close()
        return summary

    def _build(self) -> None:
        """The engine and everything around it (a collective)."""
        plan, config = self.plan, self.plan.config
        self.watchdog.beat(0, "building the model", patience=4)
        self.engine = build_engine(plan, self.device, self.groups)
        if config.model_ema:
            self.ema = Ema(self.engine.zero_map, config.model_ema_decay, config.model_ema_warmup)
        if config.spike_factor is not None:
            self.engine.guard.watch_spikes(config.spike_factor)
        self.health = GradientHealth(self.engine.zero_map, self.engine.clipped_by)
        samples = self.folder.samples if config.log_samples else None
        self.inputs = InputPipeline(plan, self.engine, self.throughput, samples, self.folder.skipped)
        if self.reporter and config.log_images:
            image, names, number = plan.model.image, plan.model.task.class_names, plan.data.batch.accumulation
            sheet = TrainingSheet(image, plan.data.train_source, names, config.log_images, number)
            self.inputs.look = partial(sheet.add, save=self.reporter.training_images)
        self.checkpoint_manager = CheckpointManager(
            plan, self.folder, self.engine, self.ema, self.throughput, self.signals, self, self.reporter
        )
        self.step_log = StepLog(
            plan,
            self.engine,
            self.inputs,
            self.flops,
            self.throughput,
            self.epoch_loss,
            self.bad_steps,
            self.truth,
            self.reporter,
        )
        self.validation = Validation(
            plan,
            self.engine,
            self.inputs,
            self.ema,
            self.checkpoint_manager,
            self.watchdog,
            self._begin,
            self.reporter,
        )

    def _carry_out(self) -> str:
        """Train and save (a collective); gives the word that summary.json ends with."""
        manager = self.checkpoint_manager
        try:
            self._train(self.step)
            self._save()
        except Interrupted:
            return "not all saved" if manager.stopped_unsaved else "interrupted"
        return "not all saved" if manager.num_failed else "completed"

    def _sum_up(self, exit_word: str) -> dict[str, Any]:
        """The contents of summary.json (a collective)."""
        return summarise(
            self.plan,
            self.validation.evaluations,
            self.validation.ema_evaluations,
            self.throughput,
            self.inputs.skipped.state_dict(),
            self._wall_seconds(),
            steps=self.step,
            exit_word=exit_word,
        )

    def _save(self) -> None:
        """The end of the run as a checkpoint, where it has any, and its weights (a collective)."""
        self.watchdog.beat(self.step, "saving", patience=4)
        self.checkpoint_manager.finish(self.step)
        self.watchdog.beat(self.step, "saving the weights", patience=4)
        self.checkpoint_manager.save_weights(self.folder.path)

    def _train(self, first_step: int) -> None:
        """Steps until the end; after each rollback from the step that it led to."""
        self._boundary(first_step)
        while True:
            self._evaluate_if_due(first_step)  # where the run was interrupted within this evaluation
            try:
                return self._train_from(first_step)
            except RollBack as bad:
                bad_step = bad.with_traceback(None)  # which would hold the activations of the step after it
            first_step = self._roll_back(bad_step)

    def _roll_back(self, bad: RollBack) -> int:
        """Take up the last checkpoint, and leave out the samples of the steps since then (a collective).

        Returns:
            The steps that are done now.

        Raises:
            Diverged: nothing was saved yet.
        """
        manager = self.checkpoint_manager
        self.watchdog.beat(bad.step, "reading the checkpoint", patience=4)
        used = bad.step + manager.skipped_batches
        back = manager.roll_back()
        if back is None:
            raise Diverged(f"{bad.diverged}; there is no checkpoint yet to go back to")
        self.step, state = back
        skipped = used - self.step - manager.skipped_batches
        manager.skipped_batches = used - self.step
        # Time, images and skipped steps go on counting; what was measured after that step is forgotten.
        self.validation.load_state_dict(state)
        self.engine.guard.remember(state["spikes"])
        self.epoch_loss.load_state_dict(state.get("epoch_loss"))
        self.bad_steps.rolled_back(bad, self.step, skipped, self.reporter)
        return self.step

    def _train_from(self, first_step: int) -> None:
        self.step_log.since = first_step
        skipped = self.checkpoint_manager.skipped_batches
        # Closed, so that a loader's workers end now; DeepSpeed's pipeline goes on holding its iterator.
        with contextlib.closing(self.watchdog.micro_batches(self.inputs.training(first_step, skipped))) as batches:
            self._take_steps(first_step, self.profiler.batches(batches))

    def _take_steps(self, first_step: int, batches: Iterator[Batch]) -> None:
        self.throughput.restart()
        for step in range(first_step, self.plan.training.total_steps):
            self.profiler.before(step + 1)
            self._take_step(step + 1, batches)
            if self.profiler.after(step + 1):
                self._write_profile(step + 1)
            self.step = step + 1
            self._evaluate_if_due(self.step)
            self._boundary(self.step)

    def _take_step(self, step: int, batches: Iterator[Batch]) -> None:
        """One optimizer step, counted from 1, and what is written down of it (a collective).

        Raises:
            RollBack, Diverged: as `BadSteps.skip`.
        """
        plan, config = self.plan, self.plan.config
        if plan.training.schedule is not None:
            self.engine.set_lr(plan.training.schedule.lr(step - 1))
        lr, scale = self.engine.lr(), self.engine.loss_scale()
        looks = config.grad_stats_interval > 0 and (step - 1) % config.grad_stats_interval == 0
        if looks:
            self.health.arm()
        self._take_images_of(self.sizes.at(step - 1) if self.sizes else None)
        self._begin(step, "forward, backward and update")
        result = self.engine.train_step(batches, self._conclude)
        self._open = step, scale, result
        if looks:
            self._conclude()
            self.step_log.gradients(step, self.health.finish(), scale, result)
        self.throughput.step(plan.data.batch.global_batch)
        if config.check_replicas and step % config.check_replicas == 0:
            check_replicas(self.engine, step)
        if step == 1 or step % config.log_interval == 0 or step == plan.training.total_steps:
            self._log(step, lr, scale, result)
        elif step % self.draw_interval == 0:
            self._draw(step, lr, scale, result)
        self.step_log.line(step, result)

    def _take_images_of(self, size: int | None) -> None:
        """Let the model take images of this size, if it does not already."""
        if size is not None and size != self.size:
            self.engine.take_images_of(size, self.plan.model.whole.patch_embed.patch_size)
            self.size = size

    def _conclude(self) -> None:
        """What waits for the verdict on the last step: counts and averages (a collective).

        It comes before anything that shows or saves them, else when the next step's first forward pass is under way:
        where the device decides, nothing waits for it.

        Raises:
            RollBack, Diverged: as `BadSteps.skip`.
        """
        if self._open is None:
            return
        (step, scale, result), self._open = self._open, None
        if not result.applied:
            self.bad_steps.skip(step, scale, result, float(self.engine.mean(result.loss)), self.reporter)
            return
        self.epoch_loss.add(result.loss, self.plan.data.order.epoch_of(max(step - 1, 0)))
        self.bad_steps.applied()
        if self.ema is not None:
            self.ema.update()

    def _log(self, step: int, lr: float, scale: float, result: StepResult) -> None:
        self._conclude()
        self.step_log.row(step, lr, scale, result)

    def _draw(self, step: int, lr: float, scale: float, result: StepResult) -> None:
        self._conclude()
        self.step_log.point(step, lr, scale, result)

    def _write_profile(self, step: int) -> None:
        """What was recorded of the steps up to this one (a collective)."""
        self.throughput.pause()
        self.watchdog.beat(step, "writing the profile", patience=4)
        self.profiler.finish(self.reporter.say if self.reporter else None)
        self.throughput.resume()

    def _begin(self, step: int, phase: str) -> float:
        """Tell the watchdog what comes now; what this process does for the first time may have to be compiled.

        Returns:
            How many times `stall_seconds` it may take.
        """
        patience = 1.0 if phase in self.phases else self.plan.patience_of_first
        self.phases.add(phase)
        self.watchdog.beat(step, phase, patience=patience)
        return patience

    def _boundary(self, done: int) -> None:
        """Between two steps: save if it is time.

        Raises:
            Interrupted: some rank was told to stop; all of them are here, and the step is saved.
        """
        self.watchdog.beat(done, "saving", patience=4)
        self.checkpoint_manager.boundary(done)

    def _evaluate_if_due(self, done: int) -> None:
        """Judge the weights if it is time (a collective).

        Raises:
            Interrupted: the ranks were told to stop meanwhile; the step is saved.
        """
        if not self.validation.is_due(done):
            return
        self._conclude()
        self._take_images_of(self.sizes.sizes[-1] if self.sizes else None)
        self.throughput.pause()
        try:
            self.validation.judge(done)
        except Stopped:
            self._boundary(done)
        self.throughput.resume()

    def _doing(self, what: str, total: int | None = None) -> contextlib.AbstractContextManager[Counted]:
        """A line on rank 0's terminal for the block."""
        return self.reporter.line.doing(what, total) if self.reporter else contextlib.nullcontext(iter)

    def _wall_seconds(self) -> float:
        """Of all processes that this run has had, up to now."""
        return self.before["wall_seconds"] + time.perf_counter() - self.started

    def _stamp(self, step: int) -> dict[str, float]:
        """What each row of metrics.jsonl has."""
        return {"epoch": self.plan.data.order.epoch_of(max(step - 1, 0)), "wall_seconds": self._wall_seconds()}

    # ---- what a run that goes on wants to find again ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the trainer knows beside the engine, as plain data (a collective).

        Raises:
            RollBack, Diverged: as `BadSteps.skip`; the last step was turned down.
        """
        self._conclude()
        return {
            **self.validation.state_dict(),
            **self.bad_steps.state_dict(),
            "spikes": self.engine.guard.recent(),
            **self.inputs.skipped.state_dict(),
            "wall_seconds": self._wall_seconds(),
            "epoch_loss": self.epoch_loss.state_dict(self.engine),
            "trained_images": self.throughput.total_images,
            "trained_seconds": self.throughput.total_seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.validation.load_state_dict(state)
        self.bad_steps.load_state_dict(state)
        self.engine.guard.remember(state["spikes"])
        self.epoch_loss.load_state_dict(state.get("epoch_loss"))
        self.before = {name: state[name] for name in self.before}
        self.inputs.skipped.load_state_dict(state)
        self.throughput.total_images = state["trained_images"]
        self.throughput.total_seconds = state["trained_seconds"]
