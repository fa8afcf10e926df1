"""The training loop: steps until the end, with rollbacks, evaluations and saves between them.

`run` → `train` → `train_step`. Everything around a step is a callback (callbacks.py), evaluations are in evaluation.py,
saves in checkpoint_manager.py; train.py assembles them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ds_vit.config.run_folder import RunFolder
from ds_vit.engine.base import Engine
from ds_vit.fault_tolerance.errors import EndedTogether, UserError, is_out_of_memory
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.fault_tolerance.signals import Interrupted
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.optim.settings import Schedule
from ds_vit.tasks.metrics import Batch
from ds_vit.training.callbacks import Callback, RollBack, Step
from ds_vit.training.checkpoint_manager import CheckpointManager
from ds_vit.training.evaluation import Evaluations, Stopped
from ds_vit.training.inputs import InputPipeline


@dataclass(eq=False)
class Trainer:
    """The loop of one run, on this rank; all ranks do the same things in the same order.

    Attributes:
        schedule: of the run.
        engine: runs the model.
        inputs: of the run.
        evaluations: of the run.
        callbacks: are called around each step, in this order.
        checkpoints: saves and restores this trainer.
        watchdog: receives every bit of progress.
        folder: of the run; its weights are written there.
        step: optimizer steps that are done.
    """

    schedule: Schedule
    engine: Engine
    inputs: InputPipeline
    evaluations: Evaluations
    callbacks: Sequence[Callback]
    checkpoints: CheckpointManager
    watchdog: Watchdog
    folder: RunFolder
    step: int = field(init=False, default=0)
    _open: Step | None = field(init=False, default=None)  # the last step, until it is known whether it was applied

    def __post_init__(self) -> None:
        self.checkpoints.trainer = self

    def run(self) -> str:
        """Train and save (a collective).

        Returns:
            The word that summary.json ends with.
        """
        try:
            self.train()
            self.save()
        except Interrupted:
            return "not all saved" if self.checkpoints.stopped_unsaved else "interrupted"
        except Exception as error:
            if isinstance(error, (Diverged, UserError)) or is_out_of_memory(error):
                # Every rank's writer runs, even if only one rank raised: the checkpoint that is being written counts.
                self.watchdog.beat(self.step, "saving", patience=4)
                self.checkpoints.end_save()
            raise
        return "not all saved" if self.checkpoints.num_failed else "completed"

    def restore(self) -> None:
        """Restore the checkpoint that the run resumes from, if there is one (a collective)."""
        self.step = self.checkpoints.restore()

    def train(self) -> None:
        """Take steps until the end; after each rollback from the step that it led to."""
        self._save_if_due()
        while True:
            self._evaluate_if_due()  # also where the run was interrupted within this evaluation
            try:
                return self._take_steps()
            except RollBack as bad:
                bad_step = bad.with_traceback(None)  # which would hold the activations of the step after it
            self._roll_back(bad_step)

    def save(self) -> None:
        """Save the end of the run as a checkpoint, where it has any, and its weights (a collective)."""
        self.watchdog.beat(self.step, "saving", patience=4)
        self.checkpoints.finish(self.step)
        self.watchdog.beat(self.step, "saving the weights", patience=4)
        self.checkpoints.save_weights(self.folder.path, self.step)

    def _take_steps(self) -> None:
        first, skipped = self.step, self.inputs.skipped
        read = self.inputs.training(first, self.checkpoints.skipped_batches)
        # Closed, so that a loader's workers end now; DeepSpeed's pipeline keeps its iterator.
        with contextlib.closing(self.watchdog.micro_batches(read)) as batches:
            for callback in self.callbacks:
                callback.before_training(first)
            for step in range(first + 1, self.schedule.total_steps + 1):
                self.train_step(step, batches)
                self.step = step
                # The gather of names waits for the device; a step without a damaged image only agrees on one number.
                if not skipped.max_bad_images and any(self.engine.groups.largest([skipped.has_new])):
                    skipped.gather()
                if too_many := skipped.too_many():
                    self._end_saved(too_many)
                self._save_if_due()  # before the evaluation: an error there costs no training
                self._evaluate_if_due()

    def train_step(self, step: int, batches: Iterator[Batch]) -> None:
        """One optimizer step, counted from 1 (a collective).

        Raises:
            RollBack, Diverged: as `BadSteps.after_result`.
        """
        task, rate, horizon = self.inputs.task, self.schedule.rate, self.schedule.horizon
        if rate is not None:
            self.engine.set_lr(rate.lr(step - 1))
        self.engine.begin_step(step, task.schedules(step, horizon), task.held_names(step, horizon))
        lr = self.engine.lr()
        for callback in self.callbacks:
            callback.before_step(step)
        self.watchdog.begin(step, "forward, backward and update")
        result = self.engine.train_step(batches, self.conclude)
        self._open = done = Step(step, lr, self.engine.loss_scale, result)
        if any(callback.needs_result(step) for callback in self.callbacks):
            self.conclude()
        for callback in self.callbacks:
            callback.after_step(done)

    def conclude(self) -> None:
        """Act on the result of the last step: counts and averages (a collective).

        It comes before anything that shows or saves them, else while the next step's first forward pass is under way:
        where the device decides, nothing waits for it.

        Raises:
            RollBack, Diverged: as `BadSteps.after_result`.
        """
        done, self._open = self._open, None
        if done is not None:
            for callback in self.callbacks:
                callback.after_result(done)

    def _save_if_due(self) -> None:
        """Between two steps: save if it is time.

        Raises:
            Interrupted: some rank received a signal; all of them are here, and the step is saved.
        """
        self.watchdog.beat(self.step, "saving", patience=4)
        self.checkpoints.boundary(self.step)

    def _evaluate_if_due(self) -> None:
        """Evaluate the weights if it is time (a collective).

        Raises:
            Interrupted: the ranks received a signal meanwhile; the step is saved.
        """
        if not self.evaluations.is_due(self.step):
            return
        self.conclude()
        for callback in self.callbacks:
            callback.before_evaluation(self.step)
        try:
            is_best = self.evaluations.run(self.step, self.checkpoints.asked_to_stop)
            self.checkpoints.evaluated(self.step, self.evaluations.state_dict(), is_best=is_best)
        except Stopped:
            pass
        except Exception:
            self.checkpoints.end_save()  # an epoch that is being saved is not lost
            raise
        for callback in self.callbacks:
            callback.after_evaluation(self.step)
        self._save_if_due()  # where the weights are the best so far and not saved, or the ranks received a signal

    def _roll_back(self, bad: RollBack) -> None:
        """Restore the last checkpoint, and leave out the samples of the steps since then (a collective).

        Time, images and skipped steps keep counting; what was measured after that step is forgotten.

        Raises:
            Diverged: nothing was saved yet.
        """
        checkpoints = self.checkpoints
        self.watchdog.beat(bad.step, "reading the checkpoint", patience=4)
        used = bad.step + checkpoints.skipped_batches
        found = checkpoints.roll_back()
        if found is None:
            raise Diverged(f"{bad.diverged}; there is no checkpoint yet to go back to")
        self.step, state = found
        left_out = used - self.step - checkpoints.skipped_batches
        checkpoints.skipped_batches = used - self.step
        self.evaluations.load_state_dict(state)
        for callback in self.callbacks:
            callback.after_rollback(bad, self.step, left_out, state)

    def _end_saved(self, why: str) -> NoReturn:
        """Save the steps that are done and end (a collective).

        Raises:
            EndedTogether: always.
        """
        self.watchdog.beat(self.step, "saving", patience=4)
        saved = self.checkpoints.save_last(self.step)
        again = "then start the same command again" + (" with --resume auto" if self.step else "")
        raise EndedTogether(f"{why}; {again} (step {self.step} of {self.schedule.total_steps}: {saved})")

    def state_dict(self) -> dict[str, Any]:
        """The run's state except the engine's, as plain data (a collective); `conclude` comes before."""
        state = {**self.evaluations.state_dict(), **self.inputs.skipped.state_dict()}
        for callback in self.callbacks:
            state |= callback.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the run's state."""
        self.evaluations.load_state_dict(state)
        self.inputs.skipped.load_state_dict(state)
        for callback in self.callbacks:
            callback.load_state_dict(state)
