"""What is trained for: one file a task, chosen by `--task`."""

from __future__ import annotations

from ds_vit.config import RunConfig, spelling
from ds_vit.config.flags import is_asked_for
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.classification import Classification
from ds_vit.tasks.evaluators import Evaluator, FeatureBank
from ds_vit.tasks.masked_autoencoder import MaskedAutoencoding
from ds_vit.tasks.metrics import Batch, Figure, Metrics
from ds_vit.tasks.task import Field, Loss, Task

__all__ = [
    "TASKS",
    "Batch",
    "Evaluator",
    "FeatureBank",
    "Field",
    "Figure",
    "Loss",
    "Metrics",
    "Task",
    "find_task",
    "idle_flags",
]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, MaskedAutoencoding)}
"""From the word of `--task` to the task."""


def idle_flags(task: type[Task]) -> frozenset[str]:
    """The flags that do nothing for a task: those that it refuses, and those of other tasks alone."""
    of_others = frozenset().union(*(other.flags for other in TASKS.values())) - task.flags
    return of_others | frozenset(task.refused_flags)


def find_task(config: RunConfig, explicit: frozenset[str]) -> type[Task]:
    """The task of `--task`.

    Args:
        config: the flags.
        explicit: which of them were given.

    Raises:
        UserError: there is no such task, or a flag was given that it does not listen to.
    """
    if config.task not in TASKS:
        raise UserError(f"there is no --task {config.task}; there is {', '.join(TASKS)}")
    task = TASKS[config.task]
    for other in TASKS.values():
        for flag in sorted(other.flags - task.flags):
            if is_asked_for(flag, config, explicit):
                raise UserError(f"{spelling(flag)} has no effect with --task {task.name}; it is of --task {other.name}")
    for flag, reason in task.refused_flags.items():
        if is_asked_for(flag, config, explicit):
            raise UserError(f"{spelling(flag)} has no effect with --task {task.name}: {reason}; drop it")
    return task
