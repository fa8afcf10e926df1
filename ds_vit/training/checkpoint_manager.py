"""What makes a run survive: when to save, going on from what was saved, and stopping in order when told to.

Every rank has a `CheckpointManager` and calls the same methods in the same order; what one rank alone may know (a
signal, the clock, a disk that is still busy) is put to all of them at the boundary between two steps.
"""

from __future__ import annotations

import platform
import shutil
import signal
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_vit.checkpoint import Checkpoint, forget_best_after, newest, open_checkpoint, remove_leftovers
from ds_vit.checkpoint.holding import Holding
from ds_vit.checkpoint.load import load_tensors, optimizer_scalars, together, verify_together
from ds_vit.checkpoint.snapshot import Save, Saver
from ds_vit.config.durations import Interval
from ds_vit.config.run_folder import RunFolder
from ds_vit.engine.base import Engine
from ds_vit.fault_tolerance.errors import NotSaved, UserError
from ds_vit.fault_tolerance.signals import Ballot, Deadline, Interrupted, Signals
from ds_vit.models import names_and_shapes
from ds_vit.models.weight_files import names_as_metadata
from ds_vit.monitoring.metrics import Reporter, in_bytes
from ds_vit.monitoring.throughput import Throughput
from ds_vit.optim.ema import Ema
from ds_vit.training.plan import Plan, resolved_flags
from ds_vit.training.resume import first_step, skipped_batches


class Stateful(Protocol):
    """What a checkpoint keeps as plain data."""

    def state_dict(self) -> dict[str, Any]:
        """As it is now (a collective)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As it was then."""


class CheckpointManager:
    """Saves and restores one run.

    Args:
        plan: the run.
        folder: of its output, shared by all ranks.
        engine: running, with the groups that saving takes.
        ema: the moving average, or None.
        throughput: is paused while training stands still for a save.
        signals: that this rank has had; None where they are not listened for.
        trainer: is asked for its state at every save, and given it back.
        reporter: of rank 0; None elsewhere.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        engine: Engine,
        ema: Ema | None,
        throughput: Throughput,
        signals: Signals | None,
        trainer: Stateful,
        reporter: Reporter | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.parent = folder.checkpoints
        self.engine = engine
        self.ema = ema
        self.throughput = throughput
        self.reporter = reporter
        self.num_failed = 0
        """Checkpoints that could not be written, the weights of the end among them."""
        self.stopped_unsaved = False
        """The run was told to stop, and the step that it stopped at could not be written."""
        self.stopped = ""
        """What stopped the run before its end, and where what it trained lies; for people."""
        self.skipped_batches = 0
        """Global batches that rollbacks have left out so far: step `s` trains on batch `s + skipped_batches`."""
        self._signals = signals or Signals()
        self._trainer = trainer
        self._interval = Interval.parse(config.checkpoint_interval, "--checkpoint-interval")
        self._every_steps = self._interval.steps
        if self._interval.epochs:
            self._every_steps = self._interval.epochs * plan.data.order.steps_per_epoch
        self._deadline = Deadline(plan.stop_at, config.stop_before_seconds or 0.0)
        self._ballot = Ballot(engine.groups.ballots)
        holding = Holding(engine.zero_map, ema.tensors if ema else None, names_and_shapes(plan.model.whole))
        self._saver = Saver(
            self.parent,
            holding,
            config.keep_checkpoints,
            engine.groups.files,
            apart=plan.model.task.weight_files(),
            metadata=names_as_metadata(plan.model.task.class_names),
        )
        self._saved_step: int | None = None  # of the last save that was begun, or resumed from
        self._failed_step: int | None = None  # of the last save that came to nothing
        self._saved_at = time.monotonic()
        self._due = False
        self._reserved = False  # memory for saves
        self._identity = plan.identity  # asked for once: it reads the names of all samples
        self._best_step: int | None = None  # step whose weights are the best so far
        self._said_slow = False
        self._has_saved = False

    # ---- going on --------------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Go on from the plan's checkpoint, if it has one (a collective).

        Returns:
            The optimizer steps that are done; 0 for a new run.

        Raises:
            UserError: on every rank: no checkpoint is intact, or one does not fit the model.
        """
        if dist.get_rank() == 0 and self.parent.is_dir():
            for name in remove_leftovers(self.parent):
                self._say(f"removed {name}, which a run left that was ended while it saved")
        if self.plan.resume is None:
            return 0
        step, state = self._take(self._intact(self.plan.resume.checkpoint, self.plan.resume.falls_back))
        self._trainer.load_state_dict(state)
        return step

    def roll_back(self) -> tuple[int, Mapping[str, Any]] | None:
        """Back to the newest checkpoint of this run, or the one that it went on from (a collective).

        Returns:
            The optimizer steps that are done, and the trainer's state at that step; None where nothing was saved yet.

        Raises:
            UserError: on every rank: no checkpoint is intact.
        """
        self._saver.wait()
        self._collect()
        # Before its own first save, what lies in the folder may be of a course that was given up.
        checkpoint = together(lambda: newest(self.parent)[0]) if self._has_saved else None
        if checkpoint is not None:
            return self._take(self._intact(checkpoint, falls_back=True))
        if self.plan.resume is None:
            return None
        return self._take(self._intact(self.plan.resume.checkpoint, self.plan.resume.falls_back))

    def _take(self, checkpoint: Checkpoint) -> tuple[int, Mapping[str, Any]]:
        """Fill everything from a checkpoint that is intact."""
        state = checkpoint.state
        step = first_step(state, self.plan.data.order)
        average = self.ema.tensors if self.ema else None
        load_tensors(checkpoint, self.engine.zero_map, average, state["optimizer"])
        if self.ema is not None:
            self.ema.updates = int(state["ema_updates"] or 0)
        self.engine.restore_progress(state["engine"], step)
        self._say(f"going on from {checkpoint.path} at step {step}")
        own = checkpoint.path.parent.resolve() == self.parent.resolve() and step == state["step"]
        self._saved_step = step if own else None
        together(lambda: forget_best_after(self.parent, step) if own else None)
        self._best_step = self._failed_step = None  # of a course that was given up
        self._due = False
        self.skipped_batches = skipped_batches(state, self.plan.data.order)
        history = dict(state["history"])
        for name in ("evaluations", "ema_evaluations"):  # "accuracies" in checkpoints from before there were tasks
            history.setdefault(name, history.get(name.replace("evaluations", "accuracies")))
        return step, history

    def _intact(self, checkpoint: Checkpoint, falls_back: bool) -> Checkpoint:
        """The checkpoint, or the newest one before it that has the contents it should have."""
        damaged: set[str] = set()
        path = Path(together(lambda: str(checkpoint.path)))
        if path != checkpoint.path:  # a network file system that has not shown this host the newest one yet
            checkpoint = open_checkpoint(path)
        while wrong := verify_together(checkpoint):
            damaged.add(checkpoint.path.name)
            if not falls_back:
                raise UserError(f"--resume {checkpoint.path}: {wrong}; give another one, or its run's folder")
            self._say(f"{wrong}; the checkpoint before it is tried")
            parent, skip = checkpoint.path.parent, frozenset(damaged)
            found = together(lambda parent=parent, skip=skip: newest(parent, skip=skip)[0])
            if found is None:
                raise UserError(f"--resume: no checkpoint in {parent} is intact; the newest: {wrong}")
            checkpoint = found
        return checkpoint

    # ---- saving ----------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, *, is_best: bool) -> None:
        """The weights were judged; a new best one is saved where checkpoints are saved at all (a collective).

        Args:
            step: that was evaluated.
            is_best: whether no evaluation so far was better.
        """
        if not is_best or not self._interval:
            return
        self._best_step = step
        if self._saved_step != step:
            self._due = True
        else:  # the run was interrupted between the save and the figures
            self._saver.wait()
            self._collect()
            if self._failed_step != step and (error := self._saver.mark_best(step)):
                self.num_failed += 1
                self._say(f"WARNING: the checkpoint of step {step} could not be marked as the best one ({error})")

    def boundary(self, step: int) -> None:
        """Between two steps: ask all ranks whether to stop, and save if it is time (a collective).

        Raises:
            Interrupted: on every rank; what was trained is saved.
        """
        if step and self._every_steps and step % self._every_steps == 0:
            self._due = True
        seconds = self._interval.seconds
        elapsed = bool(seconds) and time.monotonic() - self._saved_at >= seconds
        number, late, busy, clock = self._ballot.largest(
            (self._signals.received, self._deadline.passed, self._saver.busy, elapsed and dist.get_rank() == 0)
        )
        self._collect()
        if number or late:
            self._stop(step, number)
        if self._interval and step and not self._reserved:
            self._reserved = True
            self._tell_need()
            self._saver.reserve()
        if self._saved_step == step:
            self._due = False  # a run that goes on finds the step that it goes on from saved
        if not (self._due or clock) or self._saved_step == step:
            return
        if busy and self._best_step != step:  # these weights can be had at a later step too; the best ones cannot
            self._due = True
            if not self._said_slow:
                self._said_slow = True
                self._say(
                    f"step {step}: the checkpoint of step {self._saved_step} is still being written; the next one "
                    "waits for it and training goes on (a slow disk, or an epoch or --checkpoint-interval shorter than "
                    "a save takes)"
                )
            return
        self._begin(step)

    def asked_to_stop(self) -> bool:
        """Whether any rank has been told to stop (a collective); what follows is to be `boundary`."""
        return any(self._ballot.largest((self._signals.received, self._deadline.passed)))

    def finish(self, step: int) -> None:
        """The end of training: wait for the last save, and save the end where the run has checkpoints."""
        self._saver.wait()
        self._collect()
        if self._interval and step and self._saved_step != step:
            self._begin(step)
            self._saver.wait()
            self._collect()

    def save_weights(self, folder: Path) -> None:
        """`model.safetensors`, what the task has apart from it, and both of the average where there is one, written by
        all ranks; `best.safetensors` where there is a best checkpoint.

        Weights that could not be written count among `num_failed`, and a line says why.
        """
        for save in (self._saver.save_weights, *([self._saver.save_best] if self._interval else [])):
            try:
                save(folder)
            except NotSaved as error:
                self.num_failed += 1
                self._say(f"WARNING: {error}; the checkpoints are as they were")

    def _tell_need(self) -> None:
        """What the checkpoints of this run will take on the disk, and what is free there (a line of rank 0)."""
        if self.reporter is None:
            return
        each, at_the_end = self._saver.num_bytes()
        keep = self.plan.config.keep_checkpoints
        need = (keep + 2 if keep else 1) * each + at_the_end
        existing = next(path for path in (self.parent, *self.parent.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        number = f"at most {keep + 2} at a time (the newest {keep}, the best, the one being written)"
        text = (
            f"checkpoints: {in_bytes(each)} each in {self.parent}, {number if keep else 'all of them kept'}; with the "
            f"weights of the end {'' if keep else 'at least '}{in_bytes(need)}, and {in_bytes(free)} are free"
        )
        if need > free:
            text = f"WARNING: {text}: make room" + (", or lower --keep-checkpoints" if keep > 1 else "")
        self._say(text)

    def _begin(self, step: int) -> None:
        self.throughput.pause()
        self._due = False
        save = Save(step, self._state(step), best=self._best_step == step)
        self._saver.start(save)
        self._saved_step, self._saved_at = step, time.monotonic()
        self.throughput.resume()

    def _stop(self, step: int, number: int) -> None:
        why = ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name) if number else "the time limit"
        self._saver.wait()
        self._collect()
        if step and self._saved_step != step:
            self._begin(step)
            self._saver.wait()
            self._collect()
        saved = f"saved in {self.parent}" if step else "nothing was trained yet"
        self.stopped_unsaved = step > 0 and self._failed_step == step
        if self.stopped_unsaved:
            saved = "this step could not be saved"
        self.stopped = f"by {why}; {saved}"
        self._say(f"interrupted by {why} after step {step}; {saved}; --resume auto goes on")
        raise Interrupted(why)

    def _collect(self) -> None:
        """Take note of saves that have come to their end."""
        for save in self._saver.finished():
            row: dict[str, Any] = {
                "step": save.step,
                "pause_seconds": save.pause_seconds,
                "write_seconds": save.write_seconds,
                "bytes": save.num_bytes,
            }
            self._has_saved = self._has_saved or not save.error
            if save.error:
                self.num_failed += 1
                self._failed_step = save.step
                row["error"] = save.error
                self._say(
                    f"WARNING: the checkpoint of step {save.step} could not be written ({save.error}); training goes "
                    "on, and the checkpoints before it are as they were"
                )
            if self.reporter is not None:
                self.reporter.checkpoint(row)

    def _state(self, step: int) -> dict[str, Any]:
        """state.json: everything but tensors, and nothing that depends on the layout."""
        plan = self.plan
        history = self._trainer.state_dict()  # first: it moves the average where the last step has not yet
        epoch, rest = divmod(step, plan.data.order.steps_per_epoch)
        return {
            "step": step,
            "epoch": epoch,
            "images_in_epoch": rest * plan.data.batch.global_batch,
            "images_seen": step * plan.data.batch.global_batch,
            "global_batch": plan.data.batch.global_batch,
            "skipped_batches": self.skipped_batches,
            "schedule": plan.rates,
            "optimizer": optimizer_scalars(self.engine.zero_map),
            "engine": self.engine.progress(),
            "ema_updates": self.ema.updates if self.ema else None,
            "history": history,
            "run": self._identity,
            "config": resolved_flags(plan),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                **{name: version(name) for name in ("timm", "deepspeed", "safetensors")},
            },
        }

    def _say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.say(text)
        elif dist.get_rank() == 0:
            print(text, flush=True)
