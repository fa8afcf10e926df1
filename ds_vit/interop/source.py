"""The weights that are exported, in timm's own model, with how its images are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset

from ds_vit import config as flags
from ds_vit.data import ImageConfig
from ds_vit.data.settings import PIXEL_FLAGS, resolve_pixels
from ds_vit.fault_tolerance.errors import UserError, read_text
from ds_vit.interop.stored_weights import StoredWeights
from ds_vit.models import InitialCheckpoint, ModelSpec, TimmViT, create_model, image_size
from ds_vit.tasks import TASKS
from ds_vit.tasks.classification import Classification

MODEL_FLAGS = ("model", "model_kwargs", "num_classes", "img_size")
_RUN_FLAGS = (*MODEL_FLAGS, *PIXEL_FLAGS, "task", "bce_loss")


@dataclass(frozen=True)
class Exported:
    """A model with its weights, and what another tool has to know about it.

    Attributes:
        model: timm's, on the CPU in fp32, in evaluation mode.
        pixels: timm's data config: mean, std, interpolation, crop_pct, crop_mode.
        labels: the classes' names, one for each logit; empty where nothing says them.
        found: where the weights come from.
        bce: trained with binary cross-entropy: a logit is of its class alone.
    """

    model: TimmViT
    pixels: Mapping[str, Any]
    labels: tuple[str, ...]
    found: StoredWeights
    bce: bool = False

    @property
    def image(self) -> ImageConfig:
        """How evaluation makes the model's input of an image."""
        mean, std = (tuple(self.pixels[name]) for name in ("mean", "std"))
        return ImageConfig(**{**self.pixels, "img_size": self.img_size, "mean": mean, "std": std})

    @property
    def img_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return image_size(self.model)


def model_spec(values: Mapping[str, Any]) -> ModelSpec:
    """The spec that flags (by their recipe names) ask for; UserError without --model."""
    if not values.get("model"):
        raise UserError("no config.yaml says which model these weights are of: give --model")
    size = values.get("img_size")
    classes = {} if values.get("num_classes") is None else {"num_classes": values["num_classes"]}
    return ModelSpec(values["model"], img_size=size, model_kwargs=values.get("model_kwargs") or {}, **classes)


def load_source(
    found: StoredWeights, settings: Mapping[str, Any], labels: str | Path | None = None, *, classifier: bool = True
) -> Exported:
    """Build timm's model and load the weights.

    Args:
        found: where they are.
        settings: flags by their recipe names; they have the last word over the run's config.yaml.
        labels: a file of class names, one a line; None for those that lie with the weights.
        classifier: refuse weights without one, or with one of another number of classes; else it may have drawn values.

    Raises:
        UserError: the weights are damaged or do not fit the model, there is no model, or another number of labels
            than classes.
    """
    found.verify()
    stored = flags.load_recipe(str(found.recipe)) if found.recipe else {}
    values = {**{name: stored[name] for name in _RUN_FLAGS if name in stored}, **settings}
    task = TASKS[values.get("task", Classification.name)]
    if not task.has_classes:
        values["num_classes"] = 0  # the encoder alone, which has no classifier
    spec = model_spec(values)
    create = partial(create_model, spec, for_training=False, classifier=spec.num_classes > 0)
    checkpoint = InitialCheckpoint(found.path, create())
    if checkpoint.newly_initialised and classifier:
        raise UserError(
            f"{found.path} has no classifier of {spec.num_classes} classes "
            f"({', '.join(checkpoint.newly_initialised)}): give the --num-classes that it has"
        )
    torch.manual_seed(0)  # timm draws initial values; all of them are overwritten
    model = create(device="cpu")
    checkpoint.load(model)
    pixels = resolve_pixels(values, model)
    names = _labels(labels, found, model) if classifier else ()
    return Exported(model.eval(), pixels, names, found, bce=bool(values.get("bce_loss")))


def _names_of_timm(model: TimmViT) -> tuple[str, ...]:
    """ImageNet's names for weights that a name with a tag (`vit_tiny_patch16_224.augreg_in21k_ft_in1k`) stands for."""
    subset = infer_imagenet_subset(model.pretrained_cfg) if model.pretrained_cfg.get("tag") else None
    if subset is None or model.num_classes != model.pretrained_cfg["num_classes"]:
        return ()
    return tuple(ImageNetInfo(subset).label_descriptions())


def _labels(path: str | Path | None, found: StoredWeights, model: TimmViT) -> tuple[str, ...]:
    """The names from a file, else those that lie with the weights; what has none there is called LABEL_<number>."""
    num_classes = model.num_classes
    if path is None:
        names = found.class_names
        if len(names) > num_classes:
            raise UserError(
                f"{found.path} comes with the names of {len(names)} classes and the model has {num_classes}; correct "
                "--num-classes, or name them with --labels FILE"
            )
        if not names and found.recipe is None:
            names = _names_of_timm(model)
        return names and (*names, *(f"LABEL_{number}" for number in range(len(names), num_classes)))
    names = tuple(line.strip() for line in read_text(path, "--labels ").splitlines() if line.strip())
    if len(names) != num_classes:
        raise UserError(f"--labels {path} has {len(names)} names and the model {num_classes} classes")
    return names
