"""What is trained, for what, and how it is cut into stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ds_vit.config import RunConfig
from ds_vit.config.image_sizes import all_sizes
from ds_vit.data import ImageConfig
from ds_vit.data.augment.handover import worker_transform
from ds_vit.data.settings import resolve_pixels
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import (
    InitialCheckpoint,
    ModelSpec,
    TimmViT,
    check_kept,
    check_sizes,
    find_pretrained,
    frozen_names,
    image_size,
)
from ds_vit.parallel.stages import stage_bounds
from ds_vit.parallel.tensor import check_cut, pays
from ds_vit.tasks import Task
from ds_vit.training.plan.data import DataPlan


@dataclass(frozen=True)
class ModelPlan:
    """The model, described and not yet made.

    Attributes:
        spec: which model, for timm.
        whole: all of it, on the meta device: names and shapes.
        task: what it is trained for.
        image: its input.
        initial_checkpoint: what its weights are filled from; None for drawn ones, and in a run that goes on.
        frozen: timm names of what is not trained.
        bounds: pipeline stage i has the layers from bounds[i] up to, and without, bounds[i + 1].
        class_parallel: the classifier is cut over classes.
        notes: lines for people.
    """

    spec: ModelSpec
    whole: nn.Module = field(repr=False)
    task: Task
    image: ImageConfig
    initial_checkpoint: InitialCheckpoint | None
    frozen: frozenset[str] = field(repr=False)
    bounds: tuple[int, ...]
    class_parallel: bool
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def reads_class_token(self) -> bool:
        """Whether the last block may compute for the head what it reads alone (models/last_block.py).

        Not before a pipeline stage that is the head alone: the length of what crosses is that of evaluation.
        """
        *_, last, end = self.bounds
        return end - last > 1


def resolve_model(
    config: RunConfig, explicit: frozenset[str], task_type: type[Task], data: DataPlan, *, goes_on: bool
) -> ModelPlan:
    """Describe the model, see that its weights fit and that it can be cut.

    Args:
        config: the flags.
        explicit: which of them were given.
        task_type: of --task.
        data: the splits and the batch.
        goes_on: the weights come from a checkpoint of this run.

    Raises:
        UserError: no such model, or classes, weights, a cut or a batch that do not fit it.
    """
    num_classes = _num_classes(config, task_type, data)
    sizes = all_sizes(config.img_size_schedule, config.train_img_sizes)
    if sizes:
        config = dataclasses.replace(config, img_size=sizes[-1])
    spec = ModelSpec(
        name=config.model,
        num_classes=num_classes,
        img_size=config.img_size,
        drop_path=config.drop_path if "drop_path" in explicit else None,
        model_kwargs={**config.model_kwargs, **({"drop_rate": config.drop} if config.drop else {})},
    )
    whole = task_type.create_model(spec, config, for_training=not config.eval_only)
    initial, notes = (None, []) if goes_on else _initial_weights(config, whole)
    notes += _few_patches(whole)
    if config.tp > 1:
        check_cut(whole, config.tp)
    if config.drop_path_compute == "kept":
        check_kept(whole)
    frozen = frozen_names(whole, config.freeze, config.linear_probe)
    image = ImageConfig(image_size(whole), **resolve_pixels(vars(config), whole))
    if sizes:
        check_sizes(whole, config.model, sizes)
    # Says now what it would say in a loader's worker.
    for pixels in [dataclasses.replace(image, img_size=(size, size)) for size in sizes] or [image]:
        worker_transform(pixels, config.augment)
    task = task_type(dataclasses.replace(config, num_classes=num_classes), image, data.train_source, whole)
    task.loss(None)  # says now what it would say on the ranks
    if not task.loss_is_mean_of_samples and data.batch.accumulation * data.batch.dp > 1:
        raise UserError(
            f"--task {task.name} compares the samples of a batch with each other, and {data.batch} would cut it into "
            "batches of their own; use one data-parallel rank without accumulation"
        )
    return ModelPlan(
        spec=spec,
        whole=whole,
        task=task,
        image=image,
        initial_checkpoint=initial,
        frozen=frozen,
        bounds=stage_bounds(config, whole, frozen),
        class_parallel=_class_parallel(config, num_classes),
        notes=tuple(notes),
    )


def _initial_weights(config: RunConfig, whole: TimmViT) -> tuple[InitialCheckpoint | None, list[str]]:
    """What the weights are filled from, and the lines that say what of it; None for drawn ones."""
    if not config.pretrained and not config.initial_checkpoint:
        if "." not in config.model:
            return None, []
        return None, [
            f"--model {config.model} names weights, and training starts from nothing: add --pretrained to use them"
        ]
    path: str | Path = config.initial_checkpoint
    source = config.initial_checkpoint
    if config.pretrained:
        found = find_pretrained(whole)
        path, source = found.path, f"{found.name} ({found.source})"
    initial = InitialCheckpoint(path, whole, resample_patch_embed=config.resample_patch_embed)
    notes = [f"weights from {source}: {initial.in_words}"]
    if initial.left_out:
        notes.append(f"{source} has a decoder of {len(initial.left_out)} tensors, which is left out")
    if config.resample_patch_embed and "patch_embed.proj.weight" not in initial.adapted:
        notes.append("--resample-patch-embed: the weights have the model's patch size, and nothing is resampled")
    return initial, notes


def _few_patches(whole: TimmViT) -> list[str]:
    """A line about images that are cut into fewer than four patches."""
    (height, width), (rows, columns) = image_size(whole), whole.patch_embed.grid_size
    number = rows * columns
    if number >= 4:
        return []
    return [
        f"images of {height} x {width} pixels make {number} {'patch' if number == 1 else 'patches'} of "
        f"{height // rows} x {width // columns}: attention has next to nothing to look at; a larger --img-size or "
        "smaller patches (--model-kwargs patch_size=4) make more"
    ]


def _num_classes(config: RunConfig, task_type: type[Task], data: DataPlan) -> int:
    """The classes of the head: --num-classes, else the data's; 0 for a task that has none."""
    if not task_type.has_classes:
        return 0
    found = data.train_source.num_classes
    if config.num_classes is not None and config.num_classes < found:
        raise UserError(
            f"--num-classes {config.num_classes} is smaller than the {found} classes of the data; "
            f"use {found} or more, or leave the flag out"
        )
    return config.num_classes or found


def _class_parallel(config: RunConfig, num_classes: int) -> bool:
    """--class-parallel, "auto" resolved."""
    if config.tp == 1 or config.class_parallel == "off":
        return False
    return config.class_parallel == "on" or pays(num_classes, config.tp)
