"""The table of the tasks: from the word of `--task` to the class, and which flags are of which task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_vit.config import RunConfig, default_of, spelling
from ds_vit.config.schema import FLAGS, is_requested
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.bridgetower.task import BridgeTowerTask
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.clip.task import Clip, SigLip
from ds_vit.tasks.clip.zero_shot import ZERO_SHOT
from ds_vit.tasks.dino.task import SelfDistillation
from ds_vit.tasks.distillation.task import Distillation
from ds_vit.tasks.evaluators import KNN, LINEAR
from ds_vit.tasks.mae.task import MaskedAutoencoding
from ds_vit.tasks.metrics import Figure
from ds_vit.tasks.task import Task

_ALL = (Classification, MaskedAutoencoding, Clip, SigLip, BridgeTowerTask, SelfDistillation)
TASKS: dict[str, type[Task]] = {task.name: task for task in _ALL}
"""From the word of `--task` to the task."""


def all_tasks() -> tuple[type[Task], ...]:
    """The tasks of `--task`, and those that a flag makes of them."""
    return (*TASKS.values(), Distillation)


def task_of(values: Mapping[str, Any]) -> type[Task]:
    """The task of a recorded run, from its flags; runs from before there were tasks have the default one."""
    return TASKS[values.get("task", default_of("task"))]


def known_figures(*others: type[Task]) -> dict[str, Figure]:
    """The metrics of all built-in tasks and evaluators, and of other tasks, by name."""
    of_tasks = (figure for task in (*TASKS.values(), *others) for figure in task.figures)
    return {figure.name: figure for figure in (*of_tasks, KNN, LINEAR, *ZERO_SHOT)}


def part_of(name: str) -> str:
    """Of which part of a task's model a parameter is, in words (`Task.parts`); "" for one of timm's ViT."""
    parts = (part for task in all_tasks() for part in task.parts.items())
    return next((words for begin, words in parts if name.startswith(begin)), "")


def idle_flags(task: type[Task]) -> dict[str, str]:
    """The flags that have no effect for a task, those of other tasks only and those that it rejects → the reason."""
    tasks_of = {name: meta.task.split() for name, meta in FLAGS.items()}
    idle = {
        flag: f"; it is of --task {' and '.join(tasks)}"
        for flag, tasks in tasks_of.items()
        if tasks and flag not in task.flags
    }
    return idle | {flag: f": {reason}; drop it" for flag, reason in task.refused_flags.items()}


def find_task(config: RunConfig) -> type[Task]:
    """The task of `--task`.

    Args:
        config: the flags.

    Raises:
        UserError: there is no such task, or a flag was given that it does not use.
    """
    if config.task not in TASKS:
        raise UserError(f"there is no --task {config.task}; there is {', '.join(TASKS)}")
    task = TASKS[config.task]
    if task is Classification and (config.kd_model_name or config.kd_checkpoint):
        task = Distillation
    for flag, reason in idle_flags(task).items():
        if is_requested(flag, config):
            raise UserError(f"{spelling(flag)} has no effect with --task {task.name}{reason}")
    return task
