"""Further towers with weights of their own, checked before any process group exists: a fixed teacher, a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_vit.config.flag import spelling
from ds_vit.config.parser import load_recipe
from ds_vit.config.schema import RunConfig
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.fault_tolerance.errors import UserError, enumerate_some
from ds_vit.models.layers import tower_of
from ds_vit.models.param_groups import classifier_names
from ds_vit.models.zoo import ModelSpec, TeacherSpec, TimmViT, image_size
from ds_vit.tasks.registry import task_of
from ds_vit.tasks.task import Task
from ds_vit.weights.files import find_weights
from ds_vit.weights.initial_checkpoint import InitialCheckpoint, find_pretrained


def describe_teacher(config: RunConfig) -> TeacherSpec | None:
    """The teacher of `--kd-model-name` and `--kd-checkpoint`; None without them.

    A run of ours describes its model itself. Its dropout and drop-path are left out: a teacher is in evaluation mode.

    Raises:
        UserError: there are no such weights, or nothing says which model they are of.
    """
    if not config.kd_model_name and not config.kd_checkpoint:
        return None
    stored = None
    if config.kd_checkpoint:
        try:
            stored = find_weights(config.kd_checkpoint)
            stored.verify()
        except UserError as error:
            raise UserError(f"--kd-checkpoint {config.kd_checkpoint}: {error}") from error
    values: dict[str, Any] = load_recipe(str(stored.recipe)) if stored and stored.recipe else {}
    name = values.get("model", config.kd_model_name)
    if not name:
        raise UserError(f"--kd-checkpoint {config.kd_checkpoint}: no config.yaml names its model: give --kd-model-name")
    if config.kd_model_name not in ("", name):
        raise UserError(f"--kd-model-name {config.kd_model_name}: --kd-checkpoint trained {name}; drop --kd-model-name")
    task = task_of(values)
    if task.takes_pairs or not (task.has_classes or config.kd_distill_type == "feature"):
        raise UserError(
            f"--kd-checkpoint {config.kd_checkpoint} is a run of --task {task.name}, whose model has no classes; "
            "only --kd-distill-type feature takes an encoder of images"
        )
    given = values.get("model_kwargs") or {}
    kwargs = {key: value for key, value in given.items() if not key.endswith("drop_rate")}
    pixels = {key: values[key] for key in PIXEL_FLAGS if key in ("mean", "std") and values.get(key)}
    return TeacherSpec(ModelSpec.of({**values, "model": name}, img_size=None, model_kwargs=kwargs), pixels)


def open_towers(
    config: RunConfig,
    task_type: type[Task],
    whole: TimmViT,
    classes: Sequence[str],
    initial: InitialCheckpoint | None,
    *,
    resumes: bool,
) -> tuple[dict[str, InitialCheckpoint], list[str]]:
    """The weights of `Task.tower_flags` by tower, and lines for people.

    A fixed tower has weights in any case; one that is trained starts from them, or from random ones.

    Args:
        config: the flags.
        task_type: the class of --task.
        whole: the model with its further towers.
        classes: names of the model's classes; a teacher that names the same in another order is reordered.
        initial: the source of the main tower's weights.
        resumes: the run continues from a checkpoint.

    Raises:
        UserError: the weights do not fit, are of another number of classes, or cannot be found.
    """
    found: dict[str, InitialCheckpoint] = {}
    notes = []
    for tower, flag in task_type.tower_flags.items():
        model, given, is_fixed = tower_of(whole, tower), getattr(config, flag), tower in task_type.fixed_towers
        if not is_fixed and (resumes or config.eval_only):
            continue
        try:
            if file := given or (initial and not is_fixed and initial.path):
                stored = find_weights(file)
                path, source = stored.path, str(stored)
            elif is_fixed:
                named_by = "--kd-model-name" if flag == "kd_checkpoint" else spelling(flag)
                path, source = find_pretrained(model, named_by, spelling(flag))
            else:
                continue
            checkpoint = InitialCheckpoint(path, model, classes=classes, tower=tower, task=task_type, source=source)
        except UserError as error:
            if given:
                raise UserError(f"{spelling(flag)}: {error}") from error
            if is_fixed:
                raise
            notes.append(f"{tower} is newly initialised: {error}")
            continue
        if is_fixed:
            _require_all_values(checkpoint, model, tower, spelling(flag))
        found |= dict.fromkeys(checkpoint.towers, checkpoint)
        size = ", at {} x {} pixels".format(*image_size(model)) if is_fixed else ""
        notes.append(f"{tower} from {source}{size}: {checkpoint.summary}")
    return found, notes


def _require_all_values(checkpoint: InitialCheckpoint, model: TimmViT, tower: str, flag: str) -> None:
    """UserError if a file leaves values of a fixed tower as they were drawn."""
    if not checkpoint.newly_initialised:
        return
    if not classifier_names(model) & {*checkpoint.newly_initialised}:
        missing = enumerate_some(checkpoint.newly_initialised)
        raise UserError(f"the {tower} of {checkpoint.source} lacks {missing}; give a file that has them by {flag}")
    theirs = next((shape[0] for name, shape in checkpoint.ignored.items() if name.endswith("head.weight")), 0)
    raise UserError(
        f"the {tower} of {checkpoint.source} has {theirs} classes and the trained model {model.num_classes}: both need "
        f"the same; fine-tune the {tower} on this data first, and give its run by {flag}"
    )
