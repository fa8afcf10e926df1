"""The weights that are exported, in timm's own model, with how its images are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_vit import config as flags
from ds_vit.data.settings import PIXEL_FLAGS, resolve_pixels
from ds_vit.fault_tolerance.errors import UserError, read_text
from ds_vit.interop.stored_weights import StoredWeights
from ds_vit.models import InitialCheckpoint, ModelSpec, TimmViT, create_model, image_size

MODEL_FLAGS = ("model", "model_kwargs", "num_classes", "img_size")


@dataclass(frozen=True)
class Exported:
    """A model with its weights, and what another tool has to know about it.

    Attributes:
        model: timm's, on the CPU in fp32, in evaluation mode.
        pixels: timm's data config: mean, std, interpolation, crop_pct, crop_mode.
        labels: the classes' names, or empty.
        found: where the weights come from.
    """

    model: TimmViT
    pixels: Mapping[str, Any]
    labels: tuple[str, ...]
    found: StoredWeights

    @property
    def img_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return image_size(self.model)


def model_spec(values: Mapping[str, Any]) -> ModelSpec:
    """The spec that flags (by their recipe names) ask for; UserError without --model."""
    if not values.get("model"):
        raise UserError("no config.yaml says which model these weights are of: give --model")
    size = values.get("img_size")
    classes = {"num_classes": values["num_classes"]} if values.get("num_classes") else {}
    return ModelSpec(values["model"], img_size=size, model_kwargs=values.get("model_kwargs") or {}, **classes)


def load_source(found: StoredWeights, settings: Mapping[str, Any], labels: str | Path | None = None) -> Exported:
    """Build timm's model and load the weights.

    Args:
        found: where they are.
        settings: flags by their recipe names; they have the last word over the run's config.yaml.
        labels: a file of class names, one a line.

    Raises:
        UserError: the weights are damaged or do not fit the model, there is no model, or another number of labels
            than classes.
    """
    found.verify()
    stored = flags.load_recipe(str(found.recipe)) if found.recipe else {}
    values = {**{name: stored[name] for name in MODEL_FLAGS + PIXEL_FLAGS if name in stored}, **settings}
    spec = model_spec(values)
    checkpoint = InitialCheckpoint(found.path, create_model(spec, for_training=False))
    if checkpoint.newly_initialised:
        raise UserError(
            f"{found.path} has no classifier of {spec.num_classes} classes "
            f"({', '.join(checkpoint.newly_initialised)}): give the --num-classes that it has"
        )
    torch.manual_seed(0)  # timm draws initial values; all of them are overwritten
    model = create_model(spec, for_training=False, device="cpu")
    checkpoint.load(model)
    pixels = resolve_pixels(values, model)
    return Exported(model.eval(), pixels, _read_labels(labels, spec.num_classes), found)


def _read_labels(path: str | Path | None, num_classes: int) -> tuple[str, ...]:
    if path is None:
        return ()
    names = tuple(line.strip() for line in read_text(path, "--labels ").splitlines() if line.strip())
    if len(names) != num_classes:
        raise UserError(f"--labels {path} has {len(names)} names and the model {num_classes} classes")
    return names
