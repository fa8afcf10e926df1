"""Exact evaluation: every validation image is counted once, for any number of ranks and any remainder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ds_vit.engine.base import EVAL_CHUNK, Engine
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks import Batch, FeatureBank, Metrics
from ds_vit.training.inputs import EvaluationInputs, InputPipeline

Pictures = Mapping[str, torch.Tensor]
"""Name → uint8 [3, height, width]."""


@dataclass(frozen=True)
class Watch:
    """What a run wants to hear of an evaluation.

    Attributes:
        batches: wraps the batches of a pass, to see them go by.
        between: called on every rank after every 32 batches (a collective); what it raises ends the evaluation.
        show: is given the pictures of the task's metrics, on every rank.
        note: is given `Metrics.by_sample` of the task's metrics, summed over the ranks, on every rank.
        doing: shows what is under way and how many batches it has, for a block; gives what counts them.
    """

    batches: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches
    between: Callable[[], None] = lambda: None
    show: Callable[[Pictures], None] = lambda pictures: None
    note: Callable[[torch.Tensor], None] = lambda by_sample: None
    doing: Callable[[str, int | None], AbstractContextManager[Any]] = lambda what, total: nullcontext(iter)


def evaluate(engine: Engine, inputs: InputPipeline, watch: Watch = Watch()) -> dict[str, float]:
    """Judge the weights that the engine has by the metrics and the evaluators of its run's task (a collective).

    Args:
        engine: runs the model.
        inputs: of the run.
        watch: hears of it.

    Returns:
        The figures of `Metrics.compute`, the same on every rank.

    Raises:
        UserError: no image was valid.
    """
    task, figures = inputs.plan.model.task, {}
    if task.judges_outputs:
        metrics = task.metrics(engine.device)
        figures = _judge(engine, [metrics], inputs.evaluation(), watch)
        watch.show(metrics.pictures())
        if metrics.by_sample is not None:
            watch.note(metrics.by_sample)
    if task.evaluators:
        figures |= _judge_features(engine, inputs, watch)
    return figures


def _judge_features(engine: Engine, inputs: InputPipeline, watch: Watch) -> dict[str, float]:
    """One pass over the training split, to learn from, and one over the validation split, for all evaluators."""
    plan, fields = inputs.plan, inputs.plan.model.task.feature_fields()
    to_learn_from = inputs.evaluation(plan.data.train_source, fields)
    outputs = _outputs(engine, to_learn_from, watch, "features of the training split", features=True)
    bank = FeatureBank.collect(outputs, plan.data.train_source.num_classes, engine.groups, engine.device)
    learned = [evaluator.learn(bank, engine.groups) for evaluator in plan.model.task.evaluators]
    watch.between()
    return _judge(engine, learned, inputs.evaluation(fields=fields), watch, features=True)


def _outputs(
    engine: Engine, inputs: EvaluationInputs, watch: Watch, what: str, *, features: bool
) -> Iterator[tuple[torch.Tensor, Batch]]:
    """What the engine yields of one pass; `watch.between` is called between its chunks."""
    with watch.doing(what, inputs.num_batches) as counted:
        batches = counted(watch.batches(inputs.batches))
        for start in range(0, inputs.num_batches, EVAL_CHUNK):
            if start:
                watch.between()
            yield from engine.forward_batches(batches, min(EVAL_CHUNK, inputs.num_batches - start), features=features)


def _judge(
    engine: Engine, judges: Sequence[Metrics], inputs: EvaluationInputs, watch: Watch, *, features: bool = False
) -> dict[str, float]:
    """The figures of several metrics over one pass."""
    for metrics in judges:
        metrics.expect(inputs.num_samples)
    for outputs, batch in _outputs(engine, inputs, watch, "evaluation", features=features):
        for metrics in judges:
            metrics.update(outputs, batch)
    # Whichever ranks count rows: one of each tensor-parallel group of the last stage.
    skipped = inputs.num_skipped if engine.counts_rows else 0
    figures: dict[str, float] = {}
    for metrics in judges:
        sums = engine.sum(torch.cat((metrics.sums, metrics.sums.new_tensor([skipped]))))
        metrics.sums = sums[:-1]
        if metrics.by_sample is not None:
            metrics.by_sample = engine.sum(metrics.by_sample)
        if metrics.pixels is not None:
            metrics.pixels = engine.sum(metrics.pixels)
        figures |= metrics.compute()
        if not figures["images"]:
            raise UserError("the validation split has no image that can be decoded")
        counted = figures["images"] + int(sums[-1])
        assert counted == inputs.num_samples, f"{counted} of {inputs.num_samples} validation images were counted"
    return figures
