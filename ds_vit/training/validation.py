"""The evaluations of a run: when one is due, of which weights, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ds_vit.engine.base import Engine
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.monitoring.metrics import Reporter
from ds_vit.optim.ema import Ema
from ds_vit.training import token_maps
from ds_vit.training.checkpoint_manager import CheckpointManager
from ds_vit.training.evaluate import Pictures, Watch, evaluate
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.plan import Plan


class Stopped(Exception):
    """Leaves an evaluation in the middle, on all ranks at the same batch."""


class Validation:
    """The evaluations of a run, on the rank that calls; all ranks do the same things in the same order.

    Args:
        plan: what to do.
        engine: runs the model.
        inputs: of the run.
        ema: the average that is judged too, or None.
        checkpoint_manager: knows whether the run was told to stop, and hears which step is the best.
        watchdog: is told of every bit of progress.
        begin: is told (step, what begins); gives how many times `stall_seconds` it may take.
        reporter: of rank 0.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        inputs: InputPipeline,
        ema: Ema | None,
        checkpoint_manager: CheckpointManager,
        watchdog: Watchdog,
        begin: Callable[[int, str], float],
        reporter: Reporter | None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.inputs = inputs
        self.ema = ema
        self.checkpoint_manager = checkpoint_manager
        self.watchdog = watchdog
        self.begin = begin
        self.reporter = reporter
        self.evaluations: list[dict[str, float]] = []
        self.ema_evaluations: list[dict[str, float]] = []
        self.evaluated_step = 0

    def is_due(self, done: int) -> bool:
        """Whether the weights after `done` steps are to be judged, and have not been yet."""
        plan = self.plan
        if plan.data.val_source is None or not done or done == self.evaluated_step:
            return False
        epochs, rest = divmod(done, plan.data.order.steps_per_epoch)
        interval = plan.config.eval_interval
        return (interval > 0 and rest == 0 and epochs % interval == 0) or done >= plan.training.total_steps

    def judge(self, step: int) -> None:
        """Exact metrics over the validation split (a collective).

        Raises:
            Stopped: the ranks were told to stop meanwhile; the step does not count as evaluated.
        """
        before = self.state_dict()
        try:
            self._judge_weights(step, self.evaluations, "eval")
            if self.ema is not None:
                with self.ema.swapped():
                    self._judge_weights(step, self.ema_evaluations, "eval_ema")
        except Stopped:
            self.load_state_dict(before)  # the run that goes on repeats both
            raise
        self.evaluated_step = step
        figure = self.plan.model.task.figures[0]
        values = [evaluation[figure.name] for evaluation in self.evaluations]
        self.checkpoint_manager.evaluated(step, is_best=values[-1] == figure.best(*values))

    def _judge_weights(self, step: int, evaluations: list[dict[str, float]], kind: str) -> None:
        """Judge the weights that the model has now (a collective)."""

        patience = self.begin(step, "evaluation")

        def stop_if_told_to() -> None:
            # A middle stage of a pipeline sees no batch pass.
            self.watchdog.beat(step, "evaluation", patience=patience)
            if self.checkpoint_manager.asked_to_stop():
                raise Stopped

        def show(pictures: Pictures) -> None:
            if self.reporter:
                self.reporter.pictures(step, pictures, kind)

        def note(by_sample: torch.Tensor) -> None:
            if self.reporter and kind == "eval":
                plan = self.plan
                self.reporter.predictions(by_sample, plan.data.validation, plan.model.task.class_names)

        doing = {"doing": self.reporter.line.doing} if self.reporter else {}
        looks = kind == "eval" and token_maps.can_be_seen(self.plan)
        nothing: AbstractContextManager[token_maps.Seen] = nullcontext(token_maps.Seen())
        with token_maps.watched(self.engine.module) if looks else nothing as seen:
            watch = Watch(
                lambda batches: seen.passing(self.watchdog.micro_batches(batches)),
                stop_if_told_to,
                show,
                note,
                **doing,
            )
            figures = evaluate(self.engine, self.inputs, watch)
        evaluations.append(figures)
        if seen.images is not None:
            maps = seen.maps(self.engine.module, self.engine.groups.tp)
            show({name: token_maps.picture(seen.images, of, self.plan.model.image) for name, of in maps.items()})
        if self.reporter:
            row = {"step": step, **figures}
            if self.plan.config.on_bad_image == "skip":
                row["skipped_images"] = len(self.plan.data.validation) - int(figures["images"])
            self.reporter.eval(row, self.plan.model.task.figures, kind)

    def state_dict(self) -> dict[str, Any]:
        """What has been evaluated, as plain data."""
        return {
            "evaluations": list(self.evaluations),
            "ema_evaluations": list(self.ema_evaluations),
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.evaluations = list(state["evaluations"])
        self.ema_evaluations = list(state["ema_evaluations"])
        self.evaluated_step = state["evaluated_step"]
