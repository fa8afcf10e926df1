"""Finds the checkpoint that a run resumes from, and checks that it is the same run, before any process group exists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.folder import Checkpoint, Damaged, newest, open_checkpoint, step_of
from ds_vit.config.batch import BatchSizes, ways_to_share
from ds_vit.config.flag import Scope, spelling
from ds_vit.config.outside import config_class
from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import RunConfig
from ds_vit.data.sampler import SampleOrder
from ds_vit.fault_tolerance.errors import UserError, enumerate_some
from ds_vit.optim.schedules import LearningRate
from ds_vit.tasks.registry import task_of

# Where both runs have one, it may change with --allow-schedule-change or --allow-batch-change.
_SCHEDULES = ("img_size_schedule", "train_img_sizes", "task_schedules")


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from.

    Attributes:
        checkpoint: opened; its contents are yet to be verified.
        falls_back: whether an earlier one in the same folder may replace it if it is damaged.
        notes: problems found in the folder, for people.
    """

    checkpoint: Checkpoint
    falls_back: bool
    notes: tuple[str, ...] = ()

    @property
    def global_batch(self) -> int:
        """Images of an optimizer step."""
        return int(self.checkpoint.state["global_batch"])


def find(config: RunConfig) -> Resume | None:
    """The checkpoint that --resume asks for; None for a new run.

    Raises:
        UserError: there is none where a path was given, or all are damaged.
    """
    if config.resume == "none":
        return None
    path = Path(config.output if config.resume == "auto" else config.resume)
    parent = RunFolder(path).checkpoints
    if config.resume != "auto":
        if not path.is_dir():
            run = next((folder for folder in path.parents if RunFolder(folder).checkpoints.is_dir()), None)
            whose = "a run's --output" if run is None else f"its run's, {run}"
            raise UserError(f"--resume {path}: there is no such folder; give a checkpoint's folder or {whose}")
        if step_of(path.name) is not None or (path / "manifest.json").exists():
            try:
                return Resume(open_checkpoint(path), falls_back=False)
            except Damaged as error:
                raise UserError(f"--resume {path}: {error}; give another one, or its run's folder") from None
        parent = parent if parent.is_dir() else path
    checkpoint, notes = newest(parent)
    if checkpoint is not None:
        return Resume(checkpoint, falls_back=True, notes=tuple(notes))
    if notes:
        raise UserError(f"--resume {config.resume}: no checkpoint in {parent} is intact: {'; '.join(notes)}")
    if config.resume != "auto":
        raise UserError(f"--resume {config.resume}: there is no checkpoint in {parent}")
    return None


def can_resume_in(output: str, resume: str) -> bool:
    """Whether a run with this --resume continues the run that an output folder holds."""
    if resume in ("none", "auto"):
        return resume == "auto"
    return Path(output).resolve() in (Path(resume).resolve(), *Path(resume).resolve().parents)


def check_micro_batch(batch: BatchSizes, resume: Resume, asked: int | None) -> None:
    """Reject a new --batch-size that does not divide the global batch.

    The --batch-size of the earlier run is adapted instead: one command must work on any number of ranks.

    Args:
        batch: with the checkpoint's global batch.
        resume: the checkpoint.
        asked: --batch-size.

    Raises:
        UserError: with the possible micro-batches.
    """
    before = resume.checkpoint.state.get("config", {}).get("batch_size")
    if asked in (None, before, batch.micro_batch) or batch.global_batch != resume.global_batch:
        return
    legal = ", ".join(str(way.micro_batch) for way in reversed(ways_to_share(batch.global_batch, batch.dp)))
    raise UserError(
        f"--resume: --batch-size {asked} does not go with the checkpoint's global batch of {batch.global_batch} on "
        f"{batch.dp} data-parallel ranks; give one of {legal}, or --allow-batch-change to resume with another batch"
    )


def check_same_run(resume: Resume, identity: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Reject another model, other data, another seed or optimizer, and other settings that the curve depends on; name
    the other flags that have changed.

    Args:
        resume: the checkpoint.
        identity: of this run.
        config: this run's `record.settings_of`, and --allow-schedule-change: resume with all of them.

    Returns:
        Lines for people about settings that differ and may.

    Raises:
        UserError: names the differences, both values, and what to do.
    """
    kind, saved, notes = config_class(config), resume.checkpoint.state, []
    known, fixed, free = kind.flags(), kind.fixed_on_resume(), {*kind.names_with(Scope.FREE)}
    allow = bool(config.get("allow_schedule_change"))
    for key in {**identity, **saved["run"]}:  # those of the task first
        old, new = saved["run"].get(key, _default_of(kind, key, None)), identity.get(key)
        if old == new:
            continue
        difference = f"{key.replace('_', ' ')}: {_difference(key, old, new)}"
        is_schedule = key in _SCHEDULES and old and new
        may_change = is_schedule or key == "samples"
        if (may_change and allow) or (is_schedule and config.get("allow_batch_change")):
            notes.append(f"{difference}; the curve changes with it")
            continue
        same = f"give the same{f' {spelling(key)}' if key in known else ''}"
        allowed = ", say --allow-schedule-change" if may_change else ""
        raise UserError(f"--resume {resume.checkpoint.path}: {difference}; {same}{allowed}, or start a new run")
    config, old = json.loads(json.dumps(config)), saved["config"]  # through JSON, which has no tuples
    names = {*config, *(known.keys() & old)}
    before = {name: old.get(name, _default_of(kind, name, config.get(name))) for name in names}
    changed = [name for name in sorted(names - free) if before[name] != config.get(name)]
    # Without augmentation, training resizes by the filter of evaluation.
    held = (fixed | {"interpolation"} if config.get("no_aug") else fixed) - identity.keys()
    if (broken := [name for name in changed if name in held or name not in known]) and not allow:
        spelled = {name: spelling(name) if name in known else name for name in broken}
        differences = (
            f"{spelled[name]} is {_shown(before[name])} there and {_shown(config.get(name))} here" for name in broken
        )
        raise UserError(
            f"--resume {resume.checkpoint.path}: {'; '.join(differences)}; give the same, say --allow-schedule-change "
            "to resume with the new ones, or start a new run"
        )
    if changed:
        shown = "; ".join(f"{name} {_shown(before[name])} → {_shown(config.get(name))}" for name in changed)
        notes.append(f"settings that differ from the checkpoint's run: {shown}")
    has_average = "ema" in resume.checkpoint.kinds
    if config.get("model_ema") and not has_average:
        notes.append("the checkpoint has no moving average: it starts from the checkpoint's weights")
    if has_average and not config.get("model_ema") and not task_of(config).teachers:
        notes.append("the checkpoint's moving average is dropped: --model-ema is off")
    return notes


def _default_of(kind: type[RunConfig], name: str, otherwise: Any) -> Any:
    """The value, as JSON has it, of a setting in a run that is older than it: a flag's default, else `otherwise`."""
    return json.loads(json.dumps(kind.default_of(name))) if name in kind.flags() else otherwise


def _difference(key: str, old: Any, new: Any) -> str:
    """The difference between two values that must be equal, for people."""
    if key == "samples":  # hashes, which say nothing to people
        return "the number of images is the same, and the name, label or a caption of at least one is another"
    if key == "teacher" and old and new:
        return "its weights are others (of a run that has trained since, name the checkpoint that this run named)"
    if key == "trained":
        old = old or []
        sides = {"there": [n for n in old if n not in new], "here": [n for n in new if n not in old]}
        found = " and ".join(f"{enumerate_some(names)} only {where}" for where, names in sides.items() if names)
        return f"{found} (--freeze, --linear-probe and flags of the task decide it)"
    if key == "class_names":
        old, new = ({f"class {number}": name for number, name in enumerate(names)} for names in (old, new))
    if not isinstance(new, dict):
        return f"{_shown(old)} there and {_shown(new)} here"
    old = old or {}
    name = next(n for n in [*new, *old] if old.get(n) != new.get(n))
    return f"{name} is {old.get(name, 'absent')} there and {new.get(name, 'absent')} here"


def _shown(value: Any) -> Any:
    """A value in a message: an empty one is none."""
    return "none" if value in ("", [], {}, None) else value


def check_same_schedule(resume: Resume, rates: Mapping[str, Any], global_batch: int, *, allow: bool) -> list[str]:
    """Reject other learning rates; the run's length may change where it sets none of them.

    Args:
        resume: the checkpoint.
        rates: set this run's learning rate (`record.rates_of`).
        global_batch: of this run. Another one than the checkpoint's changes a schedule that counts epochs: a note says
            so.
        allow: --allow-schedule-change: resume with this run's.

    Returns:
        Lines for people.

    Raises:
        UserError: both schedules, and what to do.
    """
    old, new = resume.checkpoint.state["schedule"], json.loads(json.dumps(rates))
    if _rates_that_act(old) == _rates_that_act(new):
        return []
    was, becomes = describe_rates(old), describe_rates(new)
    if allow or resume.global_batch != global_batch:
        return [f"the learning rate's schedule changes from {was} to {becomes}; the curve changes with it"]
    raise UserError(
        f"--resume {resume.checkpoint.path}: the learning rate's schedule: {was} there and {becomes} here; give "
        "--sched, --lr, --min-lr, the warm-up and the length (--epochs, or --max-steps without it), or the JSON's "
        "scheduler, as before, or say --allow-schedule-change to resume with the new one"
    )


def _rates_that_act(rates: Mapping[str, Any]) -> Mapping[str, Any]:
    return rates if "type" in rates else LearningRate(**rates).acts  # a scheduler of the JSON has a type


def describe_rates(rates: Mapping[str, Any]) -> str:
    """The source of the learning rate (`record.rates_of`), for people."""
    if "type" not in rates:
        return str(LearningRate(**rates))
    params = {**rates.get("params", {}), **({"lr": rates["lr"]} if "lr" in rates else {})}
    return f"the JSON's {rates['type']} ({', '.join(f'{name} {value}' for name, value in params.items())})"


def first_step(state: Mapping[str, Any], order: SampleOrder) -> int:
    """The optimizer steps that count as done, in this run's global batches.

    With another global batch the epoch resumes at the first batch of which no sample has been seen.
    """
    if int(state["global_batch"]) == order.global_batch:
        return int(state["step"])
    batches = -(-int(state["images_in_epoch"]) // order.global_batch)
    return int(state["epoch"]) * order.steps_per_epoch + min(batches, order.steps_per_epoch)


def skipped_batches(state: Mapping[str, Any], order: SampleOrder) -> int:
    """Global batches of this run that rollbacks have left out so far."""
    images = int(state["skipped_batches"]) * int(state["global_batch"])
    return -(-images // order.global_batch)
