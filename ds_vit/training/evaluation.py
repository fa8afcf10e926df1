"""Exact evaluation: every validation image counts once, for any number of ranks and any remainder.

`Evaluation` is one; `Evaluations` runs those of a training run when they are due, and the one of `--eval-only`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from ds_vit.config.run_folder import RunFolder
from ds_vit.data.sources.combined import across_classes
from ds_vit.data.sources.source import Source
from ds_vit.engine.base import EVAL_CHUNK, Engine
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.models.sequential import Towers
from ds_vit.monitoring import token_maps
from ds_vit.monitoring.metrics import Reporter
from ds_vit.optim.ema import Ema
from ds_vit.tasks.evaluators import FeatureBank
from ds_vit.tasks.metrics import Batch, Metrics
from ds_vit.tasks.zero_shot import ZeroShotAccuracy
from ds_vit.training.inputs import EvaluationInputs, InputPipeline
from ds_vit.training.tables import show_end, summarise

Pictures = Mapping[str, torch.Tensor]
"""Name → uint8 [3, height, width]."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of an engine's weights, by the metrics and the evaluators of its run's task.

    Attributes:
        engine: runs the model.
        inputs: of the run.
        batches: wraps the batches of a pass.
        between: called on every rank after every 32 batches (a collective); what it raises ends the evaluation.
        show: receives the pictures of the task's metrics, on every rank.
        note: receives the task's metrics once they are computed, on every rank.
        doing: shows what is under way and how many batches it has, for a block; gives what counts them.
    """

    engine: Engine
    inputs: InputPipeline
    batches: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches
    between: Callable[[], None] = lambda: None
    show: Callable[[Pictures], None] = lambda pictures: None
    note: Callable[[Metrics], None] = lambda metrics: None
    doing: Callable[[str, int | None], AbstractContextManager[Any]] = lambda what, total: nullcontext(iter)

    def run(self) -> dict[str, float]:
        """Evaluate (a collective).

        Returns:
            The figures of `Metrics.compute`, the same on every rank.

        Raises:
            UserError: no image was valid.
        """
        inputs, task, zeroshot = self.inputs, self.inputs.task, self.inputs.data.zeroshot
        figures: dict[str, float] = {}
        if task.evaluates_outputs:
            metrics = task.metrics(self.engine.device)
            samples, texts = inputs.further_texts
            if texts:
                samples = samples.to(self.engine.device)
                metrics.take_texts(samples, self._encode_texts(texts, torch.arange(len(texts))))
            figures = self._count([metrics], inputs.evaluation())
            self.show(metrics.pictures())
            self.note(metrics)
        if task.evaluators:
            figures |= self._evaluate_features()
        if zeroshot is not None:
            classes = self._encode_texts(zeroshot.prompts, zeroshot.classes)
            images = inputs.evaluation(zeroshot.source, task.feature_fields)
            found = self._count([ZeroShotAccuracy(classes)], images, run=partial(task.encode, "images"))
            figures = found | figures  # the number of images is that of the validation split
        if missing := [figure.name for figure in task.figures if figure.name not in figures]:
            raise UserError(f"--task {task.name}: its metrics compute {', '.join(figures)}, and not {missing[0]!r}")
        return figures

    def _encode_texts(self, texts: Sequence[str], rows: torch.Tensor) -> torch.Tensor:
        """Features of texts, added up in rows: float64 [1 + the largest of `rows`, E] on every rank (a collective).

        Args:
            texts: M of them.
            rows: of each text, int64 [M].
        """
        task, device = self.inputs.task, self.engine.device
        found = torch.zeros(int(rows.max()) + 1, task.encoded_dim, dtype=torch.float64, device=device)
        for features, batch in self._outputs(self.inputs.texts(texts), "texts", run=partial(task.encode, "texts")):
            numbers = batch["number"][batch["valid"]]
            found.index_add_(0, rows.to(device)[numbers], features[batch["valid"]].double())
        self.between()
        return self.engine.sum(found)

    def _evaluate_features(self) -> dict[str, float]:
        """One pass over the training split, to learn from, and one over the validation split, for all evaluators."""
        data, task, groups = self.inputs.data, self.inputs.task, self.engine.groups
        to_learn_from = self.inputs.evaluation(data.train_source, task.feature_fields)
        outputs = self._outputs(to_learn_from, "features of the training split", features=True)
        bank = FeatureBank.collect(outputs, data.train_source.num_classes, groups, self.engine.device)
        learned = [learn(bank, groups) for learn in task.evaluators.values()]
        self.between()
        return self._count(learned, self.inputs.evaluation(fields=task.feature_fields), features=True)

    def _outputs(self, inputs: EvaluationInputs, what: str, **forward: Any) -> Iterator[tuple[torch.Tensor, Batch]]:
        """The engine's outputs in one pass; `between` is called between its chunks.

        However the pass ends, its batches are closed: loader processes and their shared memory are released here.

        Args:
            inputs: of the pass.
            what: it is, for people.
            forward: as for `Engine.forward_batches`.
        """
        with contextlib.closing(inputs.batches), self.doing(what, inputs.num_batches) as counted:
            batches = counted(self.batches(inputs.batches))
            for start in range(0, inputs.num_batches, EVAL_CHUNK):
                if start:
                    self.between()
                number = min(EVAL_CHUNK, inputs.num_batches - start)
                yield from self.engine.forward_batches(batches, number, **forward)

    def _count(self, several: Sequence[Metrics], inputs: EvaluationInputs, **forward: Any) -> dict[str, float]:
        """The figures of several metrics over one pass; `forward` is as for `Engine.forward_batches`."""
        engine = self.engine
        for metrics in several:
            metrics.expect(inputs.num_samples)
        for outputs, batch in self._outputs(inputs, "evaluation", **forward):
            for metrics in several:
                metrics.update(outputs, batch)
        # The ranks that count rows: one of each tensor-parallel group of the last stage.
        skipped = inputs.num_skipped if engine.counts_rows else 0
        figures: dict[str, float] = {}
        for metrics in several:
            sums = engine.sum(torch.cat((metrics.sums, metrics.sums.new_tensor([skipped]))))
            metrics.sums = sums[:-1]
            for name in ("by_sample", "rows", "pixels"):
                if (part := getattr(metrics, name)) is not None:
                    setattr(metrics, name, engine.sum(part))
            figures |= metrics.compute()
            if not figures["images"]:
                raise UserError("the validation split has no image that can be decoded")
            counted = figures["images"] + int(sums[-1])
            assert counted == inputs.num_samples, f"{counted} of {inputs.num_samples} validation images were counted"
        return figures


# ---- evaluation without training -------------------------------------------------------------------------------------


def evaluate_only(evaluations: Evaluations, folder: RunFolder, started: float) -> dict[str, Any]:
    """`--eval-only`: evaluate, and write a run's files (a collective).

    Args:
        evaluations: of a run without training.
        folder: of the output, shared by all ranks; rank 0 writes to it.
        started: `time.perf_counter()` when the program began.

    Returns:
        What summary.json holds, on every rank.
    """
    engine, inputs, reporter = evaluations.engine, evaluations.inputs, evaluations.reporter
    if reporter:
        reporter.start(events=engine.write_events)
    figures = evaluations.evaluate(0, lambda: False)
    inputs.skipped.gather()
    measured = {"steps": 0, "wall_seconds": time.perf_counter() - started, "exit": "completed"}
    measured["skipped_images"] = len(inputs.data.validation) - int(figures["images"])
    summary = summarise(inputs.run, [figures], [], inputs.throughput, measured)
    if reporter:
        reporter.close()
        show_end(inputs.run, folder, summary, reporter)
    engine.close()
    return summary


# ---- the evaluations of a training run -------------------------------------------------------------------------------


class Stopped(Exception):
    """Leaves an evaluation in the middle, on all ranks at the same batch."""


@dataclass(eq=False)
class Evaluations:
    """The evaluations of a run, on this rank; all ranks do the same things in the same order.

    Attributes:
        engine: runs the model.
        inputs: of the run.
        ema: the average, which is evaluated too, or None.
        watchdog: receives every bit of progress.
        reporter: of rank 0.
    """

    engine: Engine
    inputs: InputPipeline
    ema: Ema | None
    watchdog: Watchdog
    reporter: Reporter | None
    evaluations: list[dict[str, float]] = field(init=False, default_factory=list)
    ema_evaluations: list[dict[str, float]] = field(init=False, default_factory=list)
    evaluated_step: int = field(init=False, default=0)

    @cached_property
    def _draws_token_maps(self) -> bool:
        """Whether it is drawn where the model looks: a rank has all tokens of an image, in all layers."""
        run, task = self.inputs.run, self.inputs.task
        is_asked = bool(task.class_names or task.teachers) and len(task.feature_fields[0].shape) == 3  # no clips
        tp = self.engine.groups.tensor_parallel(run.config)
        return is_asked and run.layout.pp == 1 and (tp is None or tp == tp.with_all_tokens)

    @cached_property
    def _shown(self) -> Source:
        """The images that token maps are drawn of."""
        data = self.inputs.data
        source = data.train_source if data.val_source is None else data.val_source
        return across_classes(source, token_maps.MOST)

    def is_due(self, done: int) -> bool:
        """Whether the weights after `done` steps have to be evaluated or drawn, and have not been yet."""
        draws_training = self._draws_token_maps and bool(self.inputs.task.teachers)  # which often has no other split
        if not (self.inputs.data.evaluates or draws_training):
            return False
        if not done:
            return self.inputs.run.config.eval_first
        if done == self.evaluated_step:
            return False
        if done >= self.inputs.run.total_steps:
            return True
        epochs, rest = divmod(done, self.inputs.data.order.steps_per_epoch)
        interval = self.inputs.run.config.eval_interval  # 0 for only the end of the run
        return interval > 0 and rest == 0 and epochs % interval == 0

    def run(self, step: int, should_stop: Callable[[], bool]) -> bool:
        """Exact metrics over the validation split; without one, only pictures of training images (a collective).

        Args:
            step: of the weights.
            should_stop: whether any rank has received a signal (a collective).

        Returns:
            Whether no evaluation so far was better; False where the task's first metric does not rate weights.

        Raises:
            Stopped: the ranks received a signal meanwhile; the step does not count as evaluated.
        """
        if not self.inputs.data.evaluates:
            self.watchdog.begin(step, "evaluation")
            self._draw(step)
            self.evaluated_step = step
            return False
        figures = self.evaluate(step, should_stop)
        if not step:
            return False  # --eval-first: no checkpoint has these weights
        if self.ema is not None:
            with self.ema.swapped():
                self.ema_evaluations.append(self.evaluate(step, should_stop, "eval_ema"))
        self.evaluations.append(figures)  # only here: a run that was stopped during the second repeats both
        self.evaluated_step = step
        figure = self.inputs.task.figures[0]
        values = [evaluation[figure.name] for evaluation in self.evaluations if figure.name in evaluation]
        return figure.summed_up and values[-1] == figure.best(*values)

    def evaluate(self, step: int, should_stop: Callable[[], bool], kind: str = "eval") -> dict[str, float]:
        """Evaluate the weights that the model has now, as `run` does; `kind` is that of the row (a collective)."""
        validation, task = self.inputs.data.validation, self.inputs.task
        patience = self.watchdog.begin(step, "evaluation")

        def stop_on_signal() -> None:
            # A middle stage of a pipeline sees no batch pass.
            self.watchdog.beat(step, "evaluation", patience=patience)
            if should_stop():
                raise Stopped

        def note(metrics: Metrics) -> None:
            if self.reporter is not None and kind == "eval":
                self.reporter.evaluated(partial(task.write_files, metrics, source=validation))

        doing = {"doing": self.reporter.line.doing} if self.reporter else {}
        show = partial(self._show, step, kind)
        batches = self.watchdog.micro_batches
        figures = Evaluation(self.engine, self.inputs, batches, stop_on_signal, show, note, **doing).run()
        if kind == "eval" and self._draws_token_maps:
            self._draw(step)
        if self.reporter:
            skipped = len(validation) - int(figures["images"])
            row = {"step": step, **figures, "skipped_images": skipped}
            self.reporter.eval(row, task.figures, kind)
            self.reporter.warn(task.concerns(figures, step, self.inputs.data.order.steps_per_epoch))
        return figures

    def _draw(self, step: int) -> None:
        """Draw where the model looks in a few images, which every replica runs (a collective)."""
        engine, task = self.engine, self.inputs.task
        inputs = self.inputs.evaluation(self._shown, task.feature_fields[:1], on_every_rank=True)
        assert isinstance(engine.module, Towers), "the stages of a pipeline hold parts of a tower"
        tower = engine.module[task.feature_tower]
        with contextlib.closing(inputs.batches), token_maps.watched(tower) as seen:
            batches = seen.passing(self.watchdog.micro_batches(inputs.batches))
            deque(engine.forward_batches(batches, inputs.num_batches, features=True), maxlen=0)
        if seen.images and engine.groups.dp_rank == 0:
            images, maps = torch.cat(seen.images), seen.maps(tower, engine.groups.tp)
            pictures = {name: token_maps.picture(images, values, task.image) for name, values in maps.items()}
            self._show(step, "eval", pictures)
            if self.reporter and (tokens := seen.patch_tokens(tower)) is not None:
                self.reporter.evaluated(partial(task.write_patches, step=step, images=images, tokens=tokens))

    def _show(self, step: int, kind: str, pictures: Pictures) -> None:
        if self.reporter:
            self.reporter.pictures(step, pictures, kind)

    def state_dict(self) -> dict[str, Any]:
        """The evaluations so far, as plain data."""
        return {
            "evaluations": list(self.evaluations),
            "ema_evaluations": list(self.ema_evaluations),
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.evaluations = list(state["evaluations"])
        self.ema_evaluations = list(state["ema_evaluations"])
        self.evaluated_step = state["evaluated_step"]
