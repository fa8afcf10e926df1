"""A task from outside the package: `--task PACKAGE.MODULE:CLASS`, or a class that a program passes to `train`.

The class is imported when the settings are read: on every rank, before any process group exists. Its flags join those
of every run: `config_class` makes the class of such a run's settings.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ds_vit.config.flag import Settings
from ds_vit.config.schema import RunConfig, names_in
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, first_line


class Configurable:
    """The base of all task classes, with what the settings need to know of them."""

    settings: ClassVar[Sequence[type[Settings]]] = ()
    """The flags that the task has in addition to those of every run."""

    @classmethod
    @functools.cache
    def config_class(cls) -> type[RunConfig]:
        """The class of the settings of a run of this task: `RunConfig` with the task's flags.

        Raises:
            UserError: flags that cannot be added.
        """
        word = word_of(cls)
        try:
            own = [kind for kind in cls.settings if not issubclass(RunConfig, kind)]
            made = types.new_class("RunConfig", (*own, RunConfig)) if own else RunConfig
            names, flags = names_in(own), made().flags()
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"--task {word}: its settings are invalid: {why}") from error
        for name in sorted(names):
            if hasattr(RunConfig(), name):
                raise UserError(f"--task {word}: {name} is a flag or a method of every run's settings; rename it")
            if flags[name].key:
                raise UserError(f"--task {word}: the flag {name} cannot have a key of the DeepSpeed JSON; drop it")
        return made


loaded: dict[str, type[Configurable]] = {}
"""The classes from outside that this process has used, by their words for --task."""
_passed: dict[str, type[Configurable]] = {}
"""Those of them that a program passed, which need not be importable."""


def word_of(task: type[Configurable]) -> str:
    """The word of --task for a class from outside."""
    return f"{task.__module__}:{task.__qualname__}"


def pass_class(task: type[Configurable]) -> str:
    """Let `load_class` find a class that need not be importable; gives its word for --task."""
    _passed[word_of(task)] = _checked(task, word_of(task))
    return word_of(task)


def is_outside(task: object) -> bool:
    """Whether a value of --task names a class from outside."""
    return isinstance(task, str) and ":" in task


def load_class(word: str, source: str = "") -> type[Configurable]:
    """The class that a --task names, from the current folder or Python's path.

    Args:
        word: PACKAGE.MODULE:CLASS.
        source: the `task_source` that a run recorded.

    Raises:
        UserError: there is no such module or class, or its import fails.
    """
    if word in _passed:
        return _passed[word]
    name, _, path = word.partition(":")
    if "" in name.split("."):
        raise UserError(f"--task {word}: it has to name a module and its class, as in PACKAGE.MODULE:CLASS")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"--task {word}: {_why_not(name, error, source)}") from error
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if name == "__main__" and found is None:
        program = source.rpartition(" ")[0] or "a program"
        raise UserError(
            f"--task {word}: the class is defined in {program}, and only that program finds it: use the run there by "
            "ds_vit.api, or move the class into a module for the next run"
        )
    return _checked(found, word, module)


def _why_not(name: str, error: BaseException, source: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        dotted = name.removesuffix(".py").replace("/", ".")
        hint = f"write {dotted}:CLASS" if dotted != name else "start from its folder, or name that in PYTHONPATH"
        recorded = source and f" (the run recorded {source.rpartition(' ')[0]})"
        return f"there is no module {error.name} in {os.getcwd()} and on Python's path{recorded}; {hint}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (where.filename, where.lineno)
    return f"importing {name} fails at {file}, line {line}: {type(error).__name__}: {first_line(error)}"


def _checked(found: Any, word: str, module: types.ModuleType | None = None) -> type[Configurable]:
    """The class if it is a complete task, else a `UserError` that names those of its module."""
    if not (isinstance(found, type) and issubclass(found, Configurable)):
        name, members = word.partition(":")[2], vars(module) if module else {}
        classes = [key for key, one in members.items() if getattr(one, "__module__", "") == members["__name__"]]
        tasks = [key for key in classes if isinstance(members[key], type) and issubclass(members[key], Configurable)]
        what = f"{name} is no subclass of ds_vit.tasks.task.Task"
        if found is None:
            what = f"there is no such class in {members.get('__file__', 'that module')}"
        there = f"; its tasks are {', '.join(tasks)}" if tasks else ", which has no task"
        raise UserError(f"--task {word}: {what}{did_you_mean(name, tasks) or there}")
    if missing := getattr(found, "__abstractmethods__", ()):
        raise UserError(f"--task {word}: the class does not define {', '.join(sorted(missing))}")
    loaded[word] = found
    return found


def config_class(values: Mapping[str, Any]) -> type[RunConfig]:
    """The class of the settings of a run with these values: with the flags of a task from outside.

    Raises:
        UserError: as `load_class`, or flags that cannot be added.
    """
    if not is_outside(values.get("task")):
        return RunConfig
    return load_class(values["task"], str(values.get("task_source") or "")).config_class()


def source_of(task: type) -> str:
    """The file that defines a class, and its hash, as config.yaml has them; empty where there is no file.

    The hash does not cover the files that it imports.
    """
    file = getattr(sys.modules.get(task.__module__), "__file__", None)
    return f"{file} sha256:{hashlib.sha256(Path(file).read_bytes()).hexdigest()}" if file else ""


def source_changes(*runs: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for people where the file of a class from outside is not the one that these settings of runs recorded."""
    word = runs[0].get("task", "")
    if not is_outside(word):
        return ()
    file, _, now = source_of(load_class(word)).rpartition(" ")
    recorded = [run.get("task_source") or "" for run in runs]
    others = [before for before in recorded if before and before.rpartition(" ")[2] != now]
    return (f"WARNING: --task {word}: {file} has changed since the run was recorded",) if others else ()
