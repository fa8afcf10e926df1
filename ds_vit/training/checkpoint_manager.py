"""Saves a run at its intervals, restores it, and stops it in order when it receives a signal.

Every rank has a `CheckpointManager` and calls the same methods in the same order. What only one rank may know (a
signal, the clock, a disk that is still busy) is shared by all of them at the boundary between two steps.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ds_vit.checkpoint.folder import (
    Checkpoint,
    Damaged,
    folder_name,
    forget_best_after,
    newest,
    open_checkpoint,
    read_figures,
    remove_leftovers,
    step_of,
)
from ds_vit.checkpoint.gather import RankShare
from ds_vit.checkpoint.load import (
    from_first_rank,
    load_tensors,
    optimizer_scalars,
    tensors_as_json,
    tensors_of_json,
    verify_together,
)
from ds_vit.checkpoint.snapshot import Save, Saver
from ds_vit.config.units import in_words
from ds_vit.engine.base import Engine
from ds_vit.fault_tolerance.errors import NotSaved, UserError
from ds_vit.fault_tolerance.signals import Interrupted, Signals, signal_name
from ds_vit.monitoring.metrics import Reporter, Throughput
from ds_vit.optim.ema import Ema, TeacherAverage
from ds_vit.training.resolve.record import identity_of, origin_of, rates_of, settings_of
from ds_vit.training.resume import first_step, skipped_batches
from ds_vit.training.run import Run
from ds_vit.weights.files import names_as_metadata


class Stateful(Protocol):
    """The state that a checkpoint keeps as plain data."""

    def conclude(self) -> None:
        """Finish what waits for the result of the last step (a collective); may raise RollBack."""

    def state_dict(self) -> dict[str, Any]:
        """The current state (a collective)."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


@dataclass(eq=False)
class CheckpointManager:
    """Saves and restores one run.

    Attributes:
        run: of this rank.
        parent: the folder `checkpoints`, shared by all ranks.
        engine: running, with the groups that saving takes.
        ema: the moving average, or None.
        throughput: is paused while training waits for a save.
        signals: received by this rank.
        reporter: of rank 0; None elsewhere.
        trainer: its state is saved and restored; it sets itself.
        num_failed: checkpoints that could not be written, the weights of the end among them.
        stopped_unsaved: the run was stopped, and the step that it stopped at could not be written.
        stopped: what stopped the run before its end, and where its last step is saved; for people.
        skipped_batches: global batches that rollbacks have left out so far: step `s` trains on batch
            `s + skipped_batches`.
    """

    run: Run
    parent: Path
    engine: Engine
    ema: Ema | None
    throughput: Throughput
    signals: Signals
    reporter: Reporter | None = None
    trainer: Stateful = field(init=False)
    num_failed: int = field(init=False, default=0)
    stopped_unsaved: bool = field(init=False, default=False)
    stopped: str = field(init=False, default="")
    skipped_batches: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        run, engine, ema, shapes = self.run, self.engine, self.ema, self.run.model.saved_shapes
        self.task, self._order, self._interval = run.model.task, run.data.order, run.output.interval
        # Of state.json; written out now, because names and labels of many images take a while.
        self._record = {"schedule": rates_of(run), "run": identity_of(run), "config": settings_of(run)}
        self._record["origin"] = origin_of(run)
        task = self.task
        self._every_steps = self._interval.steps or self._interval.epochs * self._order.steps_per_epoch
        self._saver = Saver(
            self.parent,
            RankShare(engine.zero_map, ema.tensors if ema else None, shapes),
            run.config.keep_checkpoints,
            engine.groups.files,
            apart=task.weight_files(),
            averages=task.average_files(),
            left_out=[name for name in shapes if name.split(".")[0] in task.teachers],
            metadata=names_as_metadata(
                task.class_names, task.tokenizer.name if task.tokenizer else "", task.figures[0], self._record["origin"]
            ),
        )
        self._saved_step: int | None = None  # of the last save that was started, or resumed from
        self._complete_step: int | None = None  # of the last save that was completed, or resumed from
        self._best_step: int | None = None  # whose weights are the best so far
        self._figures: tuple[int, Mapping[str, Any]] | None = None  # step and its evaluations, until written
        self._saved_at = time.monotonic()
        self._due = False
        self._reserved = False  # memory for saves
        self._warned_slow = False
        # The newest complete checkpoint that fell due by its step: where a rollback returns to.
        self._rollback_to: Path | None = None

    # ---- resuming --------------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Restore the checkpoint that the run resumes from, if there is one (a collective).

        Returns:
            The optimizer steps that are done; 0 for a new run.

        Raises:
            UserError: on every rank: no checkpoint is intact, or one does not fit the model.
        """
        if dist.get_rank() == 0 and self.parent.is_dir():
            for name in remove_leftovers(self.parent):
                self._say(f"removed {name}, which a run left that was ended while it saved")
        resume = self.run.output.resume
        if resume is None:
            return 0
        step, state = self._load(self._open_intact(resume.checkpoint.path, falls_back=resume.falls_back))
        self.trainer.load_state_dict(state)
        return step

    def roll_back(self) -> tuple[int, Mapping[str, Any]] | None:
        """Return to the last checkpoint that fell due, of this run or of the one it resumed from (a collective).

        A checkpoint that an interruption saved is skipped, so that the run has the curve of one that was not
        interrupted.

        Returns:
            The optimizer steps that are done, and the trainer's state at that step; None where nothing was saved yet.

        Raises:
            UserError: on every rank: no checkpoint is intact.
        """
        self._finish_save()
        path = self._rollback_to
        return self._load(self._open_intact(path, falls_back=True)) if path else None

    def _load(self, checkpoint: Checkpoint) -> tuple[int, Mapping[str, Any]]:
        """Restore everything except the trainer's state, which is returned with the step."""
        state = checkpoint.state
        step = first_step(state, self._order)
        average = self.ema.tensors if self.ema else None
        load_tensors(checkpoint, self.engine.zero_map, average, state["optimizer"])
        if self.ema is not None:
            self.ema.updates = int(state["ema_updates"] or 0)
        if isinstance(self.ema, TeacherAverage):
            self.ema.write()
        self.task.load_state_dict(tensors_of_json(state.get("task", {})))
        self.engine.restore_progress(state["engine"], step, state["step"])
        self._say(f"resuming from {checkpoint.path} at step {step}")
        own = checkpoint.path.parent.resolve() == self.parent.resolve() and step == state["step"]
        self._saved_step = self._complete_step = step if own else None
        from_first_rank(lambda: forget_best_after(self.parent, step) if own else None)
        due = checkpoint.path.parent / folder_name(state.get("rollback_step", state["step"]))
        self._rollback_to = due if from_first_rank(due.is_dir) else checkpoint.path
        self._best_step = self._figures = None  # of steps that the run abandons
        self._due = False
        self.skipped_batches = skipped_batches(state, self._order)
        return step, {**state["history"], **from_first_rank(lambda: read_figures(checkpoint.path))}

    def _open_intact(self, path: Path, *, falls_back: bool) -> Checkpoint:
        """Open and verify a checkpoint, or the newest intact one before it (a collective)."""
        checkpoint, wrong = from_first_rank(lambda: _open(path))  # another host may not see the newest one yet
        damaged: set[str] = set()
        while wrong := wrong or verify_together(checkpoint):
            if not falls_back:
                raise UserError(f"--resume {path}: {wrong}; give another one, or its run's folder")
            self._say(f"{wrong}; the checkpoint before it is tried")
            damaged.add(path.name)
            parent, skip = path.parent, frozenset(damaged)
            checkpoint = from_first_rank(lambda parent=parent, skip=skip: newest(parent, skip=skip)[0])
            if checkpoint is None:
                raise UserError(f"no checkpoint in {parent} is intact; the last one tried: {wrong}")
            path, wrong = checkpoint.path, ""
        return checkpoint

    # ---- saving ----------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, figures: Mapping[str, Any], *, is_best: bool) -> None:
        """Record an evaluation; a new best step is saved if the run has checkpoints (a collective).

        Args:
            step: that was evaluated.
            figures: of all evaluations so far, as in the trainer's state.
            is_best: whether no evaluation so far was better.
        """
        if self._saved_step == step:
            self._figures = step, figures
            self._write_figures()
        if not is_best or not self._interval:
            return
        self._best_step = step
        if self._saved_step != step:
            self._due = True
            return
        self._finish_save()
        if self._complete_step == step and (error := self._saver.mark_best(step)):
            self.num_failed += 1
            self._say(f"WARNING: the checkpoint of step {step} could not be marked as the best one ({error})")

    def boundary(self, step: int) -> None:
        """Between two steps: stop if any rank has to, and save if it is time (a collective).

        Raises:
            Interrupted: on every rank; the step is saved.
        """
        if step and self._every_steps and step % self._every_steps == 0:
            self._due = True
        seconds = self._interval.seconds
        elapsed = bool(seconds) and time.monotonic() - self._saved_at >= seconds
        is_late = time.time() >= self.run.output.stop_at
        number, late, busy, clock = self.engine.groups.largest(
            (self.signals.received, is_late, self._saver.busy, elapsed and dist.get_rank() == 0)
        )
        self._collect()
        if number or late:
            self._stop(step, number)
        if self._interval and step and not self._reserved:
            self._reserved = True
            self._report_disk_space()
            self._saver.reserve()
        if self._saved_step == step:
            self._due = False
        elif self._due or clock:
            # A best step cannot be replaced by a later one, and a rollback returns to this very step: these wait.
            if busy and self._best_step != step and not self.run.config.rollback:
                self._postpone(step)
            else:
                self._start_save(step)

    def asked_to_stop(self) -> bool:
        """Whether any rank has received a signal or reached the time limit (a collective); call `boundary` next."""
        return any(self.engine.groups.largest((self.signals.received, time.time() >= self.run.output.stop_at)))

    def end_save(self) -> None:
        """Complete the checkpoint that is being written, before this process ends with an error."""
        with contextlib.suppress(RuntimeError):  # another rank is gone: the error that ends this one is shown
            self._finish_save()

    def finish(self, step: int) -> None:
        """Complete the last save, and save the last step of training if the run has checkpoints."""
        self._save_now(step if self._interval else 0, due=False)

    def save_last(self, step: int) -> str:
        """Save the step that the run stops at, unless it is saved (a collective); returns a phrase for people."""
        self._save_now(step, due=self._due)
        self.stopped_unsaved = step > 0 and self._complete_step != step
        if self.stopped_unsaved:
            return "this step could not be saved"
        return f"saved in {self.parent}" if step else "nothing was trained yet"

    def save_weights(self, folder: Path, step: int) -> None:
        """Write the weights of a step, their average and the best checkpoint's into the run's folder (a collective).

        A failure counts in `num_failed`, and a line says why.
        """
        best = [partial(self._saver.save_best, folder)] if self._interval else []
        for save in (partial(self._saver.save_weights, folder, step), *best):
            try:
                save()
            except NotSaved as error:
                self.num_failed += 1
                self._say(f"WARNING: {error}; the checkpoints are intact")

    def _report_disk_space(self) -> None:
        """Print the space that this run's checkpoints need on the disk, and the free space (a line of rank 0)."""
        if self.reporter is None:
            return
        each, at_the_end = self._saver.num_bytes()
        keep = self.run.config.keep_checkpoints
        most = keep + self.run.has_best + 1  # one is being written
        need = (most if keep else 1) * each + at_the_end
        existing = next(path for path in (self.parent, *self.parent.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        number, bound = (f"at most {most} at a time", "") if keep else ("all of them kept", "at least ")
        text = (
            f"checkpoints: {in_words(each)} each in {self.parent}, {number}; with the weights of the end "
            f"{bound}{in_words(need)}, and {in_words(free)} are free"
        )
        if need > free:
            text = f"WARNING: {text}: make room" + (", or lower --keep-checkpoints" if keep > 1 else "")
        self._say(text)

    def _postpone(self, step: int) -> None:
        self._due = True
        if not self._warned_slow:
            self._warned_slow = True
            self._say(
                f"step {step}: the checkpoint of step {self._saved_step} is still being written; the next one waits "
                "for it and training continues (a slow disk, or an epoch or --checkpoint-interval shorter than a save)"
            )

    def _start_save(self, step: int, *, due: bool = True) -> None:
        """Start a save; `due`: an uninterrupted run saves this step too."""
        self.trainer.conclude()
        self.throughput.pause()
        self._due = False
        back = folder_name(step) if due or self._rollback_to is None else self._rollback_to.name
        state = {**self._state(step), "rollback_step": step_of(back)}
        spare = back if self.run.config.rollback else ""
        self._saver.start(Save(step, state, best=self._best_step == step, spare=spare))
        self._saved_step, self._saved_at = step, time.monotonic()
        self.throughput.resume()

    def _save_now(self, step: int, *, due: bool) -> None:
        """Complete the last save, and save a step unless it is saved; 0 for none."""
        self._finish_save()
        if step and self._saved_step != step:
            self._start_save(step, due=due)
            self._finish_save()

    def _stop(self, step: int, number: int) -> None:
        why = signal_name(number) if number else "the time limit"
        saved = self.save_last(step)
        self.stopped = f"by {why}; {saved}"
        self._say(f"interrupted by {why} after step {step}; {saved}; resume with --resume auto")
        raise Interrupted(why)

    def _finish_save(self) -> None:
        """Wait for the save that is being written."""
        self._saver.wait()
        self._collect()

    def _collect(self) -> None:
        """Report the saves that have finished."""
        for save in self._saver.finished():
            row: dict[str, Any] = {
                "step": save.step,
                "pause_seconds": save.pause_seconds,
                "write_seconds": save.write_seconds,
                "bytes": save.num_bytes,
            }
            if save.error:
                self.num_failed += 1
                row["error"] = save.error
                self._say(
                    f"WARNING: the checkpoint of step {save.step} could not be written ({save.error}); training "
                    "continues, and the checkpoints before it are intact"
                )
            else:
                self._complete_step = save.step
                if save.state["rollback_step"] == save.step:
                    self._rollback_to = self.parent / folder_name(save.step)
            if self.reporter is not None:
                self.reporter.checkpoint(row)
        self._write_figures()

    def _write_figures(self) -> None:
        """Add an evaluation's figures to the checkpoint of its step once that is complete."""
        if self._figures is not None and self._figures[0] == self._complete_step:
            self._saver.write_figures(*self._figures)
            self._figures = None

    def _state(self, step: int) -> dict[str, Any]:
        """state.json: everything but tensors, and nothing that depends on the layout."""
        order = self._order
        epoch, rest = divmod(step, order.steps_per_epoch)
        return {
            "step": step,
            "epoch": epoch,
            "images_in_epoch": rest * order.global_batch,
            "images_seen": step * order.global_batch,
            "global_batch": order.global_batch,
            "skipped_batches": self.skipped_batches,
            "optimizer": optimizer_scalars(self.engine.zero_map),
            "engine": self.engine.progress(),
            "ema_updates": self.ema.updates if self.ema else None,
            "history": self.trainer.state_dict(),
            "task": tensors_as_json(self.task.state_dict()),
            **self._record,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                **{name: version(name) for name in ("timm", "deepspeed", "safetensors")},
            },
        }

    def _say(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.say(text)


def _open(path: Path) -> tuple[Checkpoint | None, str]:
    """A checkpoint, or why it cannot be opened."""
    try:
        return open_checkpoint(path), ""
    except Damaged as damage:
        return None, str(damage)
