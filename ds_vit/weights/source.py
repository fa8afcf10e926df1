"""The weights that are exported, in timm's own model, with how its images are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset

from ds_vit.config import parser as flags
from ds_vit.config.flag import Scope, spelling
from ds_vit.config.outside import config_class, source_changes
from ds_vit.config.parser import print_once
from ds_vit.config.run_folder import BEST
from ds_vit.config.schema import RunConfig
from ds_vit.data.settings import ImageConfig, resolve_pixels
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, enumerate_some, first_line, read_text, stripped_lines
from ds_vit.models.keyed_init import materialise
from ds_vit.models.linear import Linear
from ds_vit.models.zoo import ModelSpec, TimmViT, create_model, image_size
from ds_vit.tasks.exports import Exported
from ds_vit.tasks.registry import idle_flags, task_of
from ds_vit.tasks.task import Task
from ds_vit.weights.files import StoredWeights
from ds_vit.weights.initial_checkpoint import InitialCheckpoint

MODEL_FLAGS = ("model", "model_kwargs", "num_classes", "img_size")
_OF_PROGRAMS = ("weights", "checkpoint", "labels", "output", "top_k", "batch_size", "workers", "device")


def model_spec(values: Mapping[str, Any]) -> ModelSpec:
    """The spec that flags (by their recipe names) ask for; UserError without --model."""
    if not values.get("model"):
        raise UserError("no config.yaml says which model these weights are of: give --model")
    classes = {} if values.get("num_classes") is None else {"num_classes": values["num_classes"]}
    return ModelSpec.of(values, **classes)


def settings_of(weights: StoredWeights, settings: Mapping[str, Any]) -> tuple[dict[str, Any], type[Task]]:
    """The flags that describe the model of weights and its images, by their recipe names, and its task.

    Args:
        weights: where they are; compared with their manifest.
        settings: flags that override the run's config.yaml.

    Raises:
        UserError: the weights are damaged, or an unknown setting.
    """
    stored = flags.load_recipe(str(weights.recipe), settings) if weights.recipe else {}
    kind = config_class({**stored, **settings})
    of_run = kind.names_with(Scope.WEIGHTS)
    for name in settings:
        if name not in kind.flags():
            near = did_you_mean(name, (*of_run, *_OF_PROGRAMS))
            raise UserError(f'there is no setting "{name}"{near}')
    typed, problems = flags.read_values(settings, kind=kind)
    if problems:
        raise UserError(*problems)
    weights.verify()
    values = {**{name: stored[name] for name in of_run if name in stored}, **typed}
    for line in source_changes(values):
        print_once(line)
    return values, task_of(values)


def load_source(
    weights: StoredWeights,
    settings: Mapping[str, Any],
    labels: str | Path | None = None,
    *,
    classifier: bool = True,
    with_text: bool = False,
) -> Exported:
    """Build timm's model and load the weights.

    Args:
        weights: where they are.
        settings: flags by their recipe names; they override the run's config.yaml.
        labels: a file of class names, one per line; None for those stored with the weights.
        classifier: refuse weights without one, or with one of another number of classes; else it may have drawn values.
            Of a task whose classifier is in a separate file, the whole model; else its backbone. Of a task with classes
            that is defined outside the package and overrides `create_model`, always the whole model.
        with_text: of a task with text, the whole model; else the image tower without its projection.

    Raises:
        UserError: the weights are damaged or do not fit the model, there is no model, another number of labels than
            classes, or an unknown setting.
    """
    values, task = settings_of(weights, settings)
    if task.takes_pairs:
        raise UserError(
            f"--task {values['task']}: its model takes an image and a caption together; ds-vit eval rates it"
        )
    idle = idle_flags(task) if classifier else {}
    for name in idle.keys() & settings.keys():
        raise UserError(f"{spelling(name)} has no effect with --task {task.name}{idle[name]}")
    separate = task.has_classes and bool(task.tower_files)
    if (task.has_text and with_text) or (separate and classifier) or _has_own_classifier(task):
        return load_whole(weights, values, task, labels)
    if not task.has_classes or separate:
        values["num_classes"] = 0  # only the encoder, which has no classifier
    spec = model_spec(values)
    model = create_model(spec, for_training=False, classifier=spec.num_classes > 0)
    checkpoint = InitialCheckpoint(weights.path, model)
    if checkpoint.newly_initialised and classifier:
        raise UserError(
            f"{weights.path} has no classifier of {spec.num_classes} classes "
            f"({', '.join(checkpoint.newly_initialised)}): give the --num-classes that it has"
        )
    names = _labels(labels, weights, model) if classifier else ()
    image, bce = _filled(model, checkpoint, values), bool(values.get("bce_loss"))
    return Exported(model, image, names, weights.path, spec, bce=bce, head=_head_of(checkpoint, task))


def _head_of(checkpoint: InitialCheckpoint, task: type[Task]) -> dict[str, torch.Tensor]:
    """The parameters of a task with a teacher that timm's model lacks; none where the files do not have them."""
    begins = tuple(begin for part in task.separate_files.values() for begin in part) if task.teachers else ()
    return {name: tensor for name, tensor in checkpoint.left_out.items() if name.startswith(begins)}


def load_whole(
    weights: StoredWeights, values: Mapping[str, Any], task: type[Task], labels: str | Path | None = None
) -> Exported:
    """Build the whole model of a task and load the weights; the flags and the task are those of `settings_of`.

    Args:
        weights, values, task: as named.
        labels: as of `load_source`, of a task with classes.

    Raises:
        UserError: the weights do not fit the model, or lack a part of it; the model takes no image.
    """
    spec = model_spec(values)
    model = task.create_model(spec, config_class(values)(**values), for_training=False)
    if _has_own_classifier(task):
        _require_images(model, values["task"])
    checkpoint = InitialCheckpoint(weights.path, model, task=task)
    if checkpoint.newly_initialised:
        files = " and ".join(f"{name}.safetensors" for name in task.tower_files)
        of_best = " and ".join(f"{BEST}-{name}.safetensors" for name in task.tower_files)
        raise UserError(
            f"{weights.path} lacks {enumerate_some(checkpoint.newly_initialised)}: a run writes that into {files} in "
            f"the same folder (of {BEST}.safetensors into {of_best}); a checkpoint has all of it"
        )
    image = _filled(model, checkpoint, values)
    tokenizer = str(values.get("tokenizer") or RunConfig.default_of("tokenizer")) if task.has_text else ""
    names = _labels(labels, weights, model) if task.has_classes else ()
    tag = task.pipeline_tag
    bce = bool(values.get("bce_loss"))
    exported = Exported(model, image, names, weights.path, spec, bce=bce, tokenizer=tokenizer, pipeline_tag=tag)
    folder = weights.recipe.parent if weights.recipe else weights.folder
    return replace(exported, predictor=task.predictor(exported, values, folder))


def _has_own_classifier(task: type[Task]) -> bool:
    """Whether a class from outside the package builds a model with a classifier itself."""
    return task.has_classes and not task.create_model.__module__.startswith("ds_vit.")


def _require_images(model: TimmViT, task: str) -> None:
    """Refuse a model on the meta device whose input is no image."""
    try:
        model(torch.empty(1, 3, *image_size(model), device="meta"))
    except RuntimeError as error:
        how = f"its model takes something else than images ({first_line(error)}); ds-vit eval rates it"
        raise UserError(f"--task {task}: {how}") from error


def _filled(model: TimmViT, checkpoint: InitialCheckpoint, values: Mapping[str, Any]) -> ImageConfig:
    """Load the weights into a model on the meta device, in place, and resolve how its images are prepared."""
    materialise(model, torch.device("cpu"))
    checkpoint.load(model.eval())
    for module in model.modules():
        if isinstance(module, Linear):
            module.fold()
    return ImageConfig(image_size(model), **resolve_pixels(values, model))


def _names_of_timm(model: TimmViT) -> tuple[str, ...]:
    """ImageNet's class names, for the weights of a tagged name (`vit_tiny_patch16_224.augreg_in21k_ft_in1k`)."""
    subset = infer_imagenet_subset(model.pretrained_cfg) if model.pretrained_cfg.get("tag") else None
    if subset is None or model.num_classes != model.pretrained_cfg["num_classes"]:
        return ()
    return tuple(ImageNetInfo(subset).label_descriptions())


def _labels(path: str | Path | None, weights: StoredWeights, model: TimmViT) -> tuple[str, ...]:
    """The class names from a file, else those stored with the weights; LABEL_<number> for classes without one."""
    num_classes = model.num_classes
    if path is None:
        names = weights.class_names or (() if weights.recipe else _names_of_timm(model))
        if len(names) > num_classes:
            raise UserError(
                f"{weights.path} comes with the names of {len(names)} classes and the model has {num_classes}; correct "
                "--num-classes, or name them with --labels FILE"
            )
        return names and (*names, *(f"LABEL_{number}" for number in range(len(names), num_classes)))
    names = stripped_lines(read_text(path, "--labels "))
    if len(names) != num_classes:
        raise UserError(f"--labels {path} has {len(names)} names and the model {num_classes} classes")
    return names
