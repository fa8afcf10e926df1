"""Resolves the flags of the model, its task, its weights and its pipeline stages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ds_vit.config.batch import BatchSizes
from ds_vit.config.schema import RunConfig
from ds_vit.config.units import all_sizes
from ds_vit.data.field import origins
from ds_vit.data.settings import Data, ImageConfig, resolve_pixels
from ds_vit.data.sources.source import Source
from ds_vit.data.text import describe_cut_captions
from ds_vit.engine.settings import EngineSettings
from ds_vit.fault_tolerance.errors import UserError, enumerate_some
from ds_vit.models.layers import MAIN_TOWER, BlockLayer, tower_names, tower_of
from ds_vit.models.param_groups import frozen_names
from ds_vit.models.sequential import check_sizes
from ds_vit.models.zoo import ModelSpec, TimmViT, image_size
from ds_vit.parallel.tensor.class_parallel import pays
from ds_vit.parallel.tensor.shard import check_degree
from ds_vit.planner.memory import layers_of_rank
from ds_vit.planner.pipeline import fastest_stages, stage_bounds
from ds_vit.tasks.registry import part_of, refused_flags
from ds_vit.tasks.task import Task
from ds_vit.training.resolve.teacher import describe_teacher, open_towers
from ds_vit.training.run import Model
from ds_vit.weights.files import find_weights
from ds_vit.weights.initial_checkpoint import InitialCheckpoint, find_pretrained


def resolve_model(
    config: RunConfig, task_type: type[Task], data: Data, *, resumes: bool, with_weights: bool = True
) -> Model:
    """Describe the model, and check that its data, weights and tensor-parallel degree fit.

    Args:
        config: the flags.
        task_type: the class of --task.
        data: the splits.
        resumes: the weights come from a checkpoint of this run.
        with_weights: open the files of weights; False for a plan.

    Raises:
        UserError: an unknown model, or classes, weights, degrees or images that do not fit it.
    """
    for source in (data.train_source, data.val_source):
        _check_entries(task_type.name, source, ("target",) if task_type.has_classes else ())
    disabled_probes = _disabled_probes(config, task_type, data)
    num_classes = _num_classes(config, task_type, data)
    of_sizes, sizes = all_sizes(config.img_size_schedule, config.train_img_sizes)
    spec = ModelSpec.of(
        vars(config),
        num_classes=num_classes,
        img_size=sizes[-1] if sizes else config.img_size,
        drop_path_rate=config.drop_path if "drop_path" in config.model_fields_set else None,
        model_kwargs={**config.model_kwargs, **({"drop_rate": config.drop} if config.drop else {})},
        teacher=describe_teacher(config),
    )
    whole = task_type.create_model(spec, config, for_training=not config.eval_only)
    classes = data.train_source.class_names if task_type.has_classes else ()
    initial, towers, notes = None, {}, []
    if with_weights:
        if not resumes:
            initial, notes = _initial_weights(config, task_type, whole, classes)
        others, of_towers = open_towers(config, task_type, whole, classes, initial, resumes=resumes)
        towers = {**(dict.fromkeys(initial.towers, initial) if initial else {}), **others}
        notes += of_towers
    probes = not disabled_probes and (config.eval_knn or config.eval_linear_probe)
    notes += _describe_classes(data.train_source, num_classes, are_used=bool(task_type.has_classes or probes))
    notes += [*disabled_probes, *_describe_dropped_pixels(whole)]
    if config.tp > 1:
        for name in tower_names(whole):
            check_degree(tower_of(whole, name), config.tp)
    locked = task_type.locked_names(whole, config)
    if not resumes:
        notes += _describe_random_locked(locked, initial, tower_names(whole)[1:])
    frozen = frozen_names(whole, config.freeze, config.linear_probe, frozenset().union(*locked.values()))
    image = ImageConfig(image_size(whole), **resolve_pixels(vars(config), whole))
    if sizes:
        check_sizes(whole, config.model, sizes, of_sizes)
    probed, validation = not disabled_probes, data.val_source
    task = task_type(config, image, data.train_source, whole, probes=probed, validation=validation)
    if reason := task.supports(whole):
        raise UserError(reason)
    _check_fields(config, task, data, sizes)
    _check_tokenizer(initial, task)
    notes += task.notes
    if task.tokenizer is not None:
        notes += describe_cut_captions(data.train_source, task.tokenizer)
    return Model(
        spec=spec,
        whole=whole,
        task=task,
        towers=towers,
        frozen=frozen,
        class_parallel=_class_parallel(config, task_type, num_classes),
        notes=tuple(notes),
    )


def arrange_layers(model: Model, config: RunConfig, engine: EngineSettings, batch: BatchSizes) -> Model:
    """The model in pipeline stages, of the fastest step under `--pp-partition auto`.

    Raises:
        UserError: nothing to recompute, more stages than layers, or a stage with nothing to train whatever the bounds.
    """
    task, frozen, recomputed = model.task, model.frozen, engine.checkpointing
    if recomputed.interval and not any(isinstance(layer, BlockLayer) for layer in task.layers(model.whole)):
        name = f"activation_checkpoint_interval {recomputed.interval}"
        raise UserError(f"{name}: --task {task.name} has no blocks to recompute; drop it")
    bounds = stage_bounds(config.pp_partition, config.pp, model.whole, frozen)
    if config.pp_partition != "auto" or config.pp == 1:
        return dataclasses.replace(model, bounds=bounds)
    layers, compute = task.layers(model.whole), engine.precision.compute
    bounds, note = fastest_stages(
        layers_of_rank(layers, config, class_parallel=model.class_parallel, compute=compute, frozen=frozen),
        bounds,
        batch.accumulation,
        frozen=frozen,
        recomputed=recomputed.interval > 0 and not recomputed.selective,
    )
    return dataclasses.replace(model, bounds=bounds, notes=(*model.notes, note))


def _initial_weights(
    config: RunConfig, task_type: type[Task], whole: TimmViT, classes: Sequence[str]
) -> tuple[InitialCheckpoint | None, list[str]]:
    """The source of the weights, and lines for people about it; None for random weights."""
    if not task_type.tower_files.keys() & {*tower_names(whole)}:
        whole = tower_of(whole, MAIN_TOWER)
    if not config.pretrained and not config.initial_checkpoint:
        if not {".", ":"}.intersection(config.model):
            return None, []
        return None, [f"--model {config.model} names weights, and training starts from random ones: add --pretrained"]
    if config.pretrained:
        path, source = find_pretrained(whole)
    else:
        stored = find_weights(config.initial_checkpoint)
        path, source = stored.path, str(stored)
    resampled = config.resample_patch_embed
    initial = InitialCheckpoint(
        path, whole, resample_patch_embed=resampled, classes=classes, task=task_type, source=source
    )
    notes = [f"weights from {source}: {initial.summary}"]
    others = [name for name in initial.left_out if name.split(".")[0] not in task_type.tower_flags]
    for what, number in Counter(map(part_of, others)).items():
        notes.append(f"{source} has a {what} of {number} tensor{'s' * (number > 1)}, which is not loaded")
    if resampled and "patch_embed.proj.weight" not in initial.adapted:
        notes.append("--resample-patch-embed: the weights have the model's patch size already, so nothing is resampled")
    return initial, notes


def _describe_classes(source: Source, num_classes: int, *, are_used: bool) -> list[str]:
    """Lines about outputs to which no image belongs, and about images that are all of one class."""
    notes = []
    if 0 < source.num_classes < num_classes:
        data_has = f"the data has {source.num_classes} classes"
        notes.append(f"--num-classes {num_classes}: {data_has}, and no image belongs to the other outputs")
    if len(names := source.class_names) == 1 and are_used and not source.multi_label:
        notes.append(f"all training images are of one class, {names[0]!r}: every prediction is correct")
    return notes


def _describe_random_locked(
    locked: Mapping[str, frozenset[str]], initial: InitialCheckpoint | None, further_towers: Sequence[str]
) -> list[str]:
    """Lines about parameters that a flag freezes at their random initial values."""
    notes, other_towers = [], tuple(f"{tower}." for tower in further_towers)  # which --pretrained does not fill
    for flag, names in locked.items():
        random = sorted(names if initial is None else names.intersection(initial.newly_initialised))
        if flag and random:
            notes.append(
                f"{flag} freezes {len(random)} parameters at random values ({enumerate_some(random)}): start from "
                f"trained weights with {'' if random[0].startswith(other_towers) else '--pretrained or '}"
                "--initial-checkpoint"
            )
    return notes


def _describe_dropped_pixels(whole: TimmViT) -> list[str]:
    """A line if timm drops the pixels at the edge of an image that fill no patch."""
    (height, width), (rows, columns) = image_size(whole), whole.patch_embed.grid_size
    patch = getattr(whole.patch_embed, "patch_size", (height // rows, width // columns))
    if rows * patch[0] >= height and columns * patch[1] >= width:
        return []
    nearest = f"{rows * patch[0]} or {(rows + 1) * patch[0]}"
    dropped = f"{height - rows * patch[0]} at the bottom and {width - columns * patch[1]} on the right"
    return [
        f"images of {height} x {width} pixels: timm's PatchEmbed drops those that fill no patch of {patch[0]} x "
        f"{patch[1]}, {dropped}: use --img-size {nearest}"
    ]


_ENTRIES = {"target": "a class", "captions": "a caption"}


def _check_entries(task_name: str, source: Source | None, entries: Iterable[str]) -> None:
    """Raise UserError if a source lacks an entry that fields read."""
    if source is None or not (missing := [name for name in entries if name and not source.has(name)]):
        return
    needed = _ENTRIES.get(missing[0], f"the entry {missing[0]!r}")
    raise UserError(f"--task {task_name} needs {needed} for each image; the data of {source.describe(0)} has none")


def _check_fields(config: RunConfig, task: Task, data: Data, sizes: Sequence[int]) -> None:
    """Raise UserError if the task's fields do not fit one another, the data or the flags of augmentation."""
    for fields in (task.training_fields, task.evaluation_fields):
        distinct = {*fields, *(field.of for field in fields if field.of)}
        names = Counter(["keys", "valid", *(field.name for field in distinct)])
        if taken := sorted(name for name, number in names.items() if number > 1):
            names_of_all = "names are unique, and keys and valid are of each batch"
            raise UserError(f"--task {task.name} has a second field {taken[0]!r}: {names_of_all}")
    training = origins(task.training_fields)
    _check_entries(task.name, data.train_source, (field.entry for field in training))
    _check_entries(task.name, data.val_source, (field.entry for field in origins(task.evaluation_fields)))
    if config.active and (unmixed := [field.name for field in training if not (field.mixes and field.entry)]):
        raise UserError(f"--mixup and --cutmix cannot mix {', '.join(unmixed)} of --task {task.name}; drop the flags")
    for side in sizes:  # an invalid augmentation fails here, not in a loader process
        for field in training:
            field.resized(side)


def _disabled_probes(config: RunConfig, task_type: type[Task], data: Data) -> list[str]:
    """A line if the images lack the classes that --eval-knn and --eval-linear-probe need; else none."""
    train, val = data.train_source, data.val_source
    requested = (config.eval_knn or config.eval_linear_probe) and not config.eval_only
    if not requested or task_type.has_classes or task_type.has_text:
        return []
    if val is not None and train.class_names and train.class_names == val.class_names:
        return []
    reason = "there are no images for evaluation" if val is None else "the images have no common classes"
    return [f"features are not evaluated by --eval-knn or --eval-linear-probe: {reason}"]


def _check_tokenizer(initial: InitialCheckpoint | None, task: Task) -> None:
    """Raise UserError if the weights were trained with another tokenizer."""
    if initial is None or task.tokenizer is None or initial.tokenizer in ("", task.tokenizer.name):
        return
    raise UserError(
        f"{task.config.initial_checkpoint} was trained with --tokenizer {initial.tokenizer}, but this run has "
        f"{task.tokenizer.name}; use the same one"
    )


def _num_classes(config: RunConfig, task_type: type[Task], data: Data) -> int:
    """The number of classes of the head: --num-classes, else the data's; 0 for a task without classes."""
    if not task_type.has_classes:
        return 0
    found = data.train_source.num_classes
    if config.num_classes is not None and config.num_classes < found:
        raise UserError(f"--num-classes {config.num_classes} is smaller than the {found} classes of the data; drop it")
    return config.num_classes or found


def _class_parallel(config: RunConfig, task_type: type[Task], num_classes: int) -> bool:
    """Whether the classifier is sharded over classes: --class-parallel, with "auto" resolved."""
    if config.tp == 1 or config.class_parallel == "off" or "class_parallel" in refused_flags(task_type):
        return False
    return config.class_parallel == "on" or pays(num_classes, config.tp)
