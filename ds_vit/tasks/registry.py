"""The tasks: from the word of `--task` to the class, and which flags are of which task."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ds_vit.config.flag import spelling
from ds_vit.config.outside import is_outside, load_class, loaded
from ds_vit.config.schema import TASKS, RunConfig, names_in, tasks_of
from ds_vit.fault_tolerance.errors import UserError, did_you_mean
from ds_vit.tasks.evaluators import KNN, LINEAR
from ds_vit.tasks.metrics import Figure
from ds_vit.tasks.task import Task
from ds_vit.tasks.zero_shot import ZERO_SHOT

_OF_CLASSES = (
    *("num_classes", "smoothing", "bce_loss", "bce_sum", "bce_target_thresh", "linear_probe", "class_parallel"),
)


def _imported(path: str) -> type[Task]:
    """The class of MODULE:CLASS in this package."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def task_named(word: str, source: str = "") -> type[Task]:
    """The class of a `--task`.

    Args:
        word: a key of `TASKS`, or PACKAGE.MODULE:CLASS.
        source: as for `load_class`.

    Raises:
        UserError: there is no such task.
    """
    if is_outside(word):
        task: Any = load_class(word, source)
        assert issubclass(task, Task), "Task is the only subclass of Configurable"
        return task
    if word not in TASKS:
        own = "; PACKAGE.MODULE:CLASS names a class of your own"
        raise UserError(f"there is no --task {word}; there is {', '.join(TASKS)}{did_you_mean(word, TASKS) or own}")
    return _imported(TASKS[word][0])


def all_tasks() -> tuple[type[Task], ...]:
    """The tasks of `--task`, those that a teacher makes of them, and those from outside that this process has used."""
    named = [*map(task_named, TASKS)]
    with_teacher = [_imported(task.with_teacher) for task in named if task.with_teacher]
    return (*named, *with_teacher, *(task for task in loaded.values() if issubclass(task, Task)))


def task_of(values: Mapping[str, Any]) -> type[Task]:
    """The task of a recorded run, from its flags; runs from before there were tasks have the default one."""
    return task_named(values.get("task", RunConfig.default_of("task")), str(values.get("task_source") or ""))


def known_figures(*others: type[Task]) -> dict[str, Figure]:
    """The metrics of all built-in tasks and evaluators, and of other tasks, by name."""
    of_tasks = (figure for task in (*all_tasks(), *others) for figure in task.figures)
    return {figure.name: figure for figure in (*of_tasks, KNN, LINEAR, *ZERO_SHOT)}


def part_of(name: str) -> str:
    """Of which part of a task's model a parameter is, in words (`Task.parts`); "" for one of timm's ViT."""
    parts = (part for task in all_tasks() for part in task.parts.items())
    return next((words for begin, words in parts if name.startswith(begin)), "")


def refused_flags(task: type[Task]) -> dict[str, str]:
    """The flags that a task rejects → the reason: its own, and without classes those of a classifier."""
    return {**dict.fromkeys(() if task.has_classes else _OF_CLASSES, "its model has no classes"), **task.refused_flags}


def idle_flags(task: type[Task]) -> dict[str, str]:
    """The flags that have no effect for a task, those of other tasks only and those that it rejects → the reason."""
    others = RunConfig.flags().keys() - names_in(task.settings)
    idle = {flag: f"; it is of --task {' and '.join(tasks_of(flag))}" for flag in others if tasks_of(flag)}
    return idle | {flag: f": {reason}; drop it" for flag, reason in refused_flags(task).items()}


def find_task(config: RunConfig) -> type[Task]:
    """The task of `--task`.

    Args:
        config: the flags.

    Raises:
        UserError: there is no such task, or a flag was given that it does not use.
    """
    task = task_named(config.task, config.task_source)
    if task.with_teacher and (config.kd_model_name or config.kd_checkpoint):
        taught = _imported(task.with_teacher)
        if not issubclass(task, taught):
            if "with_teacher" not in vars(task):
                path = task.with_teacher.replace(":", ".")
                raise UserError(f"--task {task.name} takes no teacher: derive it from {path}")
            task = taught
    for flag, reason in idle_flags(task).items():
        if config.is_requested(flag):
            raise UserError(f"{spelling(flag)} has no effect with --task {task.name}{reason}")
    return task
