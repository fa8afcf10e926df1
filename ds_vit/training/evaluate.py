"""Exact evaluation: every validation image is counted once, for any number of ranks and any remainder."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_vit.engine.base import EVAL_CHUNK, Engine
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks import Task
from ds_vit.training.inputs import EvaluationInputs


def evaluate(
    engine: Engine, task: Task, inputs: EvaluationInputs, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Judge the weights that the engine has by a task's metrics (a collective).

    Args:
        engine: runs the model.
        task: has the metrics.
        inputs: one pass over the split.
        between: called on every rank after every 32 batches (a collective); what it raises ends the evaluation.

    Returns:
        The figures of `Metrics.compute`, the same on every rank.

    Raises:
        UserError: no image was valid.
    """
    metrics = task.metrics(engine.device)
    for start in range(0, inputs.num_batches, EVAL_CHUNK):
        if start:
            between()
        num_batches = min(EVAL_CHUNK, inputs.num_batches - start)
        for outputs, batch in engine.forward_batches(inputs.batches, num_batches):
            metrics.update(outputs, batch)
    # Whichever ranks count rows: one of each tensor-parallel group of the last stage.
    skipped = inputs.num_skipped if engine.counts_rows else 0
    sums = engine.sum(torch.cat((metrics.sums, metrics.sums.new_tensor([skipped]))))
    metrics.sums = sums[:-1]
    figures = metrics.compute()
    if not figures["images"]:
        raise UserError("the validation split has no image that can be decoded")
    counted = figures["images"] + int(sums[-1])
    assert counted == inputs.num_samples, f"{counted} of {inputs.num_samples} validation images were counted"
    return figures
