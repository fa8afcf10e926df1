"""Which checkpoint a run goes on from, and whether it is the same run: found out before any process group exists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vit.checkpoint import Checkpoint, Damaged, newest, open_checkpoint, step_of
from ds_vit.config import FIELDS, RunConfig, default_of, spelling
from ds_vit.config.batch import BatchSizes, nearest_batch, nearest_dp, ways_to_share
from ds_vit.config.run_folder import RunFolder
from ds_vit.data import SampleOrder
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import identity_remedies
from ds_vit.optim.schedules import Schedule

# What must be the same in the run that goes on, and what to do about it.
_IDENTITY = {
    "task": "give the same --task",
    "model": "give the same --model",
    "num_classes": "give the same --num-classes",
    "img_size": "give the same --img-size",
    "img_size_schedule": "give the same --img-size-schedule, --epochs and --max-steps, say --allow-schedule-change",
    "train_img_sizes": "give the same --train-img-sizes",
    "shapes": "give the same --model-kwargs",
    "seed": "give the same --seed",
    "images": "give the same training data",
    "class_names": "give the same training data, with the same names of class folders",
    "decode": "give the same --decode",
    "mixture": "give the same folders in --data-dir, with the same --data-weights",
    "samples": "give the same images under the same names in the same classes; the folder itself may be another",
    "optimizer": "name the same optimizer in the JSON",
    **identity_remedies(),
    "trained": "give the same --freeze or --linear-probe",
}
_SINCE_LATER = ("class_names", "samples")  # older checkpoints lack them
_BEFORE = {
    "task": "classification",
    "img_size_schedule": "",
    "train_img_sizes": [],
    "decode": "exact",
    "mixture": [],
}  # what was the case before it had a name in checkpoints
# Flags that say how or how long, not what: these may change without a word.
_FREE_NAMES = """
    deepspeed_config set pp tp pp_partition sequence_parallel class_parallel workers output resume check_replicas
    grad_checkpointing drop_path_compute checkpoint_interval keep_checkpoints log_interval stop_before_seconds
    time_limit log_samples log_images profile_steps data_dir dataset_download allow_empty_classes verbose
    allow_batch_change allow_schedule_change auto_batch memory max_steps pretrained initial_checkpoint
    resample_patch_embed validation_batch_size compile compile_mode
"""
_FREE = frozenset(_FREE_NAMES.split())


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from.

    Attributes:
        checkpoint: opened; its contents are yet to be verified.
        falls_back: whether an earlier one in the same folder may take its place if it is damaged.
        notes: what was found on the way, for people.
    """

    checkpoint: Checkpoint
    falls_back: bool
    notes: tuple[str, ...] = ()

    @property
    def global_batch(self) -> int:
        """Images of an optimizer step."""
        return int(self.checkpoint.state["global_batch"])


def find(config: RunConfig) -> Resume | None:
    """The checkpoint that --resume asks for; None where a run is to begin.

    Raises:
        UserError: there is none where a path was given, or all that there are are damaged.
    """
    if config.resume == "none":
        return None
    if config.resume == "auto":
        path = Path(config.output)
    else:
        path = Path(config.resume)
        if not path.is_dir():
            raise UserError(f"--resume {path}: there is no such folder; give a checkpoint's folder or a run's --output")
        if step_of(path.name) is not None or (path / "manifest.json").exists():
            try:
                return Resume(open_checkpoint(path), falls_back=False)
            except Damaged as error:
                raise UserError(f"--resume {path}: {error}; give another one, or its run's folder") from None
    parent = RunFolder(path).checkpoints
    if config.resume != "auto" and not parent.is_dir():
        parent = path
    checkpoint, notes = newest(parent)
    if checkpoint is not None:
        return Resume(checkpoint, falls_back=True, notes=tuple(notes))
    if notes:
        raise UserError(f"--resume {config.resume}: no checkpoint in {parent} is intact: {'; '.join(notes)}")
    if config.resume != "auto":
        raise UserError(f"--resume {config.resume}: there is no checkpoint in {parent}")
    return None


def goes_on_in(output: str, resume: str) -> bool:
    """Whether a run with this --resume may go on in a folder that holds a run: its own."""
    if resume in ("none", "auto"):
        return resume == "auto"
    return Path(output).resolve() in (Path(resume).resolve(), *Path(resume).resolve().parents)


def _default_of(name: str) -> Any:
    """What a run had of a flag that is younger than its checkpoint, as JSON has it."""
    return json.loads(json.dumps(default_of(name))) if name in FIELDS else None


def _may_change(config: Mapping[str, Any]) -> bool:
    """Whether what counts in shares of the run's steps may be another: it was asked for, or the steps are others."""
    return bool(config.get("allow_schedule_change") or config.get("allow_batch_change"))


def keep_global_batch(batch: BatchSizes, resume: Resume, *, fixed: bool, allow: bool) -> tuple[BatchSizes, list[str]]:
    """The batch arithmetic that gives the checkpoint's global batch on this number of ranks.

    Args:
        batch: what JSON and flags ask for.
        resume: the checkpoint.
        fixed: the JSON names train_batch_size itself.
        allow: --allow-batch-change: take what is asked for.

    Returns:
        It, and what to tell people.

    Raises:
        UserError: with the numbers, where it cannot be kept.
    """
    wanted = resume.global_batch
    if batch.global_batch == wanted:
        return batch, []
    if allow:
        return batch, [f"the global batch changes from {wanted} to {batch}; the curve changes with it"]
    kept = None if fixed else nearest_batch(wanted, batch.dp, batch.micro_batch)
    if kept is None:
        why = f"the checkpoint's global batch is {wanted}, and this run's would be {batch}"
        if not fixed:
            why += f"; {wanted} cannot be shared by {batch.dp} data-parallel ranks"
        raise UserError(
            f"--resume: {why}; "
            + (
                f'write "train_batch_size": {wanted} or "auto"'
                if fixed
                else f"start {nearest_dp(wanted, batch.dp)} data-parallel ranks"
            )
            + ", or say --allow-batch-change to go on with another batch"
        )
    return kept, [f"the checkpoint's global batch is kept: {kept}"]


def check_micro_batch(batch: BatchSizes, resume: Resume, asked: int | None) -> None:
    """Refuse another --batch-size than the run had before, where the global batch has no room for it.

    The same one as before follows the number of ranks instead: one command must do on however many there are.

    Args:
        batch: with the checkpoint's global batch.
        resume: the checkpoint.
        asked: --batch-size.

    Raises:
        UserError: with the micro-batches that can be had.
    """
    before = resume.checkpoint.state.get("config", {}).get("batch_size")
    if asked in (None, before, batch.micro_batch) or batch.global_batch != resume.global_batch:
        return
    ways = reversed(ways_to_share(batch.global_batch, batch.dp))
    legal = ", ".join(str(way.micro_batch) for way in ways)
    raise UserError(
        f"--resume: --batch-size {asked} does not go with the checkpoint's global batch of {batch.global_batch} on "
        f"{batch.dp} data-parallel ranks; give one of {legal}, or --allow-batch-change to go on with another batch"
    )


def check_same_run(resume: Resume, identity: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with another model, other data, another seed or optimizer; name what else has changed.

    Args:
        resume: the checkpoint.
        identity: of this run.
        config: this run's flags, resolved.

    Returns:
        Lines for people about settings that differ and may.

    Raises:
        UserError: names the first difference, both values, and what to do.
    """
    saved = resume.checkpoint.state
    notes = []
    of_task = {name: f"give the same {spelling(name)}" for name in identity if name in FIELDS and name not in _IDENTITY}
    for key, remedy in {"task": _IDENTITY["task"], **of_task, **_IDENTITY}.items():
        old, new = saved["run"].get(key, _BEFORE.get(key)), identity.get(key)
        if key in _SINCE_LATER and key not in saved["run"] and new is not None:
            notes.append(f"the checkpoint is from before {key.replace('_', ' ')} were saved: they are not compared")
        elif old != new and key == "img_size_schedule" and old and new and _may_change(config):
            notes.append(f"the size of the images changes from {old} to {new}; the curve with it")
        elif old != new:
            raise UserError(
                f"--resume {resume.checkpoint.path}: {key.replace('_', ' ')}: {_shown(key, old, new, identity)}; "
                f"{remedy}, or start a new run"
            )
    config = json.loads(json.dumps(config))  # as the checkpoint's went through JSON, which has no tuples
    before = {name: saved["config"].get(name, _default_of(name)) for name in {*saved["config"], *config}}
    changed = [
        f"{name} {before[name]} → {config.get(name)}"
        for name in sorted(before.keys() - _FREE)
        if before[name] != config.get(name)
    ]
    if changed:
        notes.append(f"settings that differ from the checkpoint's run: {'; '.join(changed)}")
    has_average = "ema" in resume.checkpoint.kinds
    if config.get("model_ema") and not has_average:
        notes.append("the checkpoint has no moving average: it starts from the checkpoint's weights")
    if has_average and not config.get("model_ema"):
        notes.append("the checkpoint's moving average is not carried on: --model-ema is off")
    return notes


def check_same_schedule(resume: Resume, rates: Mapping[str, Any], global_batch: int, *, allow: bool) -> list[str]:
    """Refuse to go on with other learning rates; a length of the run that sets none of them may change without a word.

    Args:
        resume: the checkpoint.
        rates: what sets this run's (`Plan.rates`).
        global_batch: of this run. With another one than the checkpoint's, which was asked for, a schedule that counts
            epochs cannot be the same: it is told.
        allow: --allow-schedule-change: go on with this run's.

    Returns:
        Lines for people.

    Raises:
        UserError: both schedules, and what to do.
    """
    old, new = resume.checkpoint.state.get("schedule"), json.loads(json.dumps(rates))
    if old is None and _is_of_json(new):
        return [f"the checkpoint does not say how the JSON's scheduler was set: it goes on as {_rates_in_words(new)}"]
    if old is None or _rates_that_act(old) != _rates_that_act(new):
        was = "the JSON's" if old is None else _rates_in_words(old)
        if allow or resume.global_batch != global_batch:
            return [f"the learning rate's schedule changes from {was} to {_rates_in_words(new)}; the curve with it"]
        raise UserError(
            f"--resume {resume.checkpoint.path}: the learning rate's schedule: {was} there and {_rates_in_words(new)} "
            f"here; {_remedy(old, new)}, or say --allow-schedule-change to go on with the new one"
        )
    return []


def _is_of_json(rates: Mapping[str, Any]) -> bool:
    return "type" in rates


def _rates_that_act(rates: Mapping[str, Any]) -> Mapping[str, Any]:
    return rates if _is_of_json(rates) else Schedule(**rates).acts


def _rates_in_words(rates: Mapping[str, Any]) -> str:
    if not _is_of_json(rates):
        return str(Schedule(**rates))
    params = {**rates.get("params", {}), **({"lr": rates["lr"]} if "lr" in rates else {})}
    return f"the JSON's {rates['type']} ({', '.join(f'{name} {value}' for name, value in params.items())})"


# What to give as before, where a field of two schedules differs.
_FLAGS_OF = {
    "name": "--sched",
    "base_lr": "--lr",
    "total_steps": "--epochs and --max-steps (without --epochs, --max-steps is the schedule's length)",
    "min_lr": "--min-lr",
    "warmup_steps": "the warm-up",
    "warmup_lr": "--warmup-lr",
    "decay_fraction": "--wsd-decay-fraction",
}


def _remedy(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> str:
    if old is None or _is_of_json(old) or _is_of_json(new):
        return "give the JSON's scheduler, --epochs, --max-steps and the warm-up as before"
    a, b = _rates_that_act(old), _rates_that_act(new)
    names = [flag for field, flag in _FLAGS_OF.items() if a.get(field) != b.get(field)]
    return f"give {', '.join(names[:-1]) + ' and ' if names[:-1] else ''}{names[-1]} as before"


def _shown(key: str, old: Any, new: Any, identity: Mapping[str, Any]) -> str:
    """What differs, in words."""
    if key == "samples":  # hashes, which say nothing to people
        return (
            f"there are {identity['images']:,} as there were, but the name or the label of at least one is another "
            "(a checkpoint holds a hash of them, so that it does not know which)"
        )
    if key == "class_names":
        old, new = ({f"class {number}": name for number, name in enumerate(names)} for names in (old, new))
    return _difference(old, new) if isinstance(new, dict) else f"{old} there and {new} here"


def _difference(old: Any, new: dict[str, Any]) -> str:
    """The first tensor that differs, in words."""
    old = old or {}
    name = next(n for n in [*new, *old] if old.get(n) != new.get(n))
    return f"{name} is {old.get(name, 'absent')} there and {new.get(name, 'absent')} here"


def first_step(state: Mapping[str, Any], order: SampleOrder) -> int:
    """The optimizer steps that count as done, in this run's global batches.

    With another global batch the epoch goes on at the first batch whose samples have all not been seen.
    """
    if int(state["global_batch"]) == order.global_batch:
        return int(state["step"])
    batches = -(-int(state["images_in_epoch"]) // order.global_batch)
    return int(state["epoch"]) * order.steps_per_epoch + min(batches, order.steps_per_epoch)


def skipped_batches(state: Mapping[str, Any], order: SampleOrder) -> int:
    """Global batches of this run that rollbacks have left out so far."""
    images = int(state["skipped_batches"]) * int(state["global_batch"])
    return -(-images // order.global_batch)
