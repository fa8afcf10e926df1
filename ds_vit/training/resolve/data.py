"""The images of a run, and its batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ds_vit.config.batch import DEFAULT_MICRO_BATCH, BatchSizes, batch_sizes
from ds_vit.config.deepspeed_json import BATCH_KEYS
from ds_vit.config.schema import PROGRAM_DATASET, RunConfig
from ds_vit.config.units import parse_set
from ds_vit.data.decode import describe_depth, require_fast
from ds_vit.data.sampler import SampleOrder
from ds_vit.data.settings import Data, Workers
from ds_vit.data.sources import listing
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.combined import hold_out, mixed, part_of
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.shards import FIRST_DOT
from ds_vit.data.sources.source import Source, headers_of_some
from ds_vit.engine.settings import EngineSettings
from ds_vit.fault_tolerance.errors import UserError, enumerate_some
from ds_vit.parallel.layout import Layout
from ds_vit.tasks.registry import task_named
from ds_vit.tasks.zero_shot import open_zero_shot
from ds_vit.training.resolve.deepspeed import is_of_a_run
from ds_vit.training.resume import Resume, check_micro_batch
from ds_vit.training.run import World
from ds_vit.weights.files import find_weights

_SHOWN_PROMPTS = 3


def resolve_batch(
    config: RunConfig, engine: EngineSettings, layout: Layout, resume: Resume | None
) -> tuple[BatchSizes, list[str]]:
    """The batch arithmetic, which is the checkpoint's in a run that resumes, and lines for people.

    Raises:
        UserError: an impossible batch.
    """
    if config.auto_batch:
        _check_nothing_fixed(config, engine)
    json, path, notes = engine.json, engine.path, [*(resume.notes if resume else ())]
    fixed = json.train_batch_size
    kept, whose = fixed if is_of_a_run(config) else None, path
    if resume is not None and not config.allow_batch_change:
        kept, whose = resume.global_batch, "the checkpoint"
        if fixed not in (None, kept):
            raise UserError(
                f"--resume: the checkpoint's global batch is {kept}, and that of {path} {fixed}; write "
                f'"train_batch_size": {kept} or "auto", or say --allow-batch-change to resume with another batch'
            )
    batch = batch_sizes(json, path, config, dp=layout.dp, kept=kept)
    micro, accumulation = config.batch_size or json.train_micro_batch_size_per_gpu, json.gradient_accumulation_steps
    if fixed is None:
        micro = micro or DEFAULT_MICRO_BATCH
        accumulation = accumulation or config.grad_accum_steps or 1
    is_asked = micro in (None, batch.micro_batch) and accumulation in (None, batch.accumulation)
    if kept is not None and not is_asked:
        notes.append(f"the global batch of {whose} is kept: {batch}")
    if resume is not None:
        check_micro_batch(batch, resume, config.batch_size)
        if batch.global_batch != resume.global_batch:
            notes.append(f"the global batch changes from {resume.global_batch} to {batch}; the curve changes with it")
    if config.active and batch.global_batch % 2:
        raise UserError(f"--mixup and --cutmix mix pairs, and the global batch of {batch} is odd; change the batch")
    return batch, notes


def resolve_data(
    config: RunConfig, world: World, batch: BatchSizes, sources: tuple[Source, Source | None] | None
) -> Data:
    """Open the splits, where a program does not pass them.

    Raises:
        UserError: missing data or splits.
    """
    train, val, held_out = (*sources, []) if sources else _open_sources(config)
    if config.decode == "fast" and not config.eval_only:
        require_fast(on_device=config.augment_on == "device")
        if train.encoded(0) is None:
            raise UserError("--decode fast is for files, and these images have none; drop it")
    notes = [*held_out]
    for split, source in ((config.train_split, train), (config.val_split, val)):
        if source is not None and source.left_out and not (source is val and held_out):
            files = listing.described_counts(Counter(source.left_out))
            dotted = any(suffix.count(".") > 1 and listing.is_image(suffix[1:]) for suffix in source.left_out)
            rule = f" ({FIRST_DOT})" if dotted else ""
            notes.append(f"{split}: files of kinds that are not read are left out: {files}{rule}")
    # Evaluation takes nothing in this order, and its batch may be larger than the training split.
    in_order = min(batch.global_batch, len(train)) if config.eval_only else batch.global_batch
    order = SampleOrder(len(train), in_order, config.seed, config.aug_repeats, train.mixture)
    zero_shot = None
    if config.zeroshot:
        folder = config.data_dir if isinstance(config.data_dir, str) else ""
        zero_shot = open_zero_shot(config.zeroshot, config.zeroshot_templates, folder or None)
        first = ", ".join(f'"{prompt}"' for prompt in zero_shot.prompts[:_SHOWN_PROMPTS])
        of_classes = f"{len(zero_shot.prompts):,} prompts for {zero_shot.source.num_classes:,} classes"
        notes.append(f"--zeroshot: the first of {of_classes} are {first}")
    if world.process.rank == 0:
        notes += _describe_images(config, train)
    return Data(
        train_source=train,
        order=order,
        val_source=val,
        zeroshot=zero_shot,
        # "auto" is resolved by inputs.with_workers.
        workers=Workers(0 if config.workers == "auto" else int(config.workers)),
        notes=tuple(notes),
    )


def _check_nothing_fixed(config: RunConfig, engine: EngineSettings) -> None:
    """Reject a JSON that fixes what --auto-batch chooses; in a JSON that a run wrote, the two numbers follow."""
    for key in BATCH_KEYS:
        is_followed = key == "train_batch_size" or (is_of_a_run(config) and key not in parse_set(config.set))
        if getattr(engine.json, key) is not None and not is_followed:
            raise UserError(
                f"{engine.path} fixes {key} to {getattr(engine.json, key)}, which --auto-batch is to find; write "
                f'"auto" there or say --set {key}=auto, or drop --auto-batch'
            )


def _needs_labels(config: RunConfig) -> bool:
    """Whether the task reads classes or captions; else any images do."""
    task = task_named(config.task, config.task_source)
    return task.has_classes or task.has_text


def _open_sources(config: RunConfig) -> tuple[Source, Source | None, list[str]]:
    """The training split, the evaluation split with the same classes (None for --val-split ''), and lines for people.

    Evaluation only needs no training split (--train-split ''): the evaluation split is used for both, and must then
    have a folder of every class, because nothing else defines the numbers of the classes.
    """
    if config.dataset == PROGRAM_DATASET:
        raise UserError("a Python program gave this run its images: resume it there, or give --dataset or --data-dir")
    if config.eval_only and not config.val_split and not config.zeroshot:
        raise UserError("there is nothing to evaluate without a --val-split")
    if config.eval_only and config.val_fraction is not None and not config.train_split:
        raise UserError(f"--val-fraction {config.val_fraction:g} holds out a part of the --train-split, which is ''")
    if config.eval_only and not config.train_split:
        return _open_for_evaluation(config)
    if not config.train_split:
        raise UserError("--train-split '' has no meaning but in evaluation; name the training split")
    try:
        parts = _open_each(config, config.train_split)
    except listing.NoSuchSplit as error:
        if not config.eval_only or config.val_fraction is not None:
            raise
        if config.eval_knn or config.eval_linear_probe:
            why = "k-NN and the linear probe compare features with those of the training images"
            raise UserError(f"{error}; {why}: name their --train-split") from None
        if part_of(config.train_split)[0] not in listing.TRAIN_NAMES:  # by default it need not be there
            raise UserError(f"{error}; --train-split '' evaluates without it") from None
        return _open_for_evaluation(config)
    # Without labels, data whose folders differ have none in common.
    differ = any(part.class_names != parts[0].class_names for part in parts)
    names = () if differ and not _needs_labels(config) else parts[0].class_names
    if config.val_fraction is not None:
        rests, held_out = zip(*(hold_out(part, config.val_fraction) for part in parts), strict=True)
        train, val = mixed(parts, (), names), mixed(held_out, (), names)
        return mixed(rests, config.data_weights, names), val, [_held_out(config, train, val)]
    train = mixed(parts, config.data_weights, names)
    if not config.val_split:
        return train, None, []
    try:
        return train, _open_val_split(config, names), []
    except listing.NoSuchSplit as error:
        if config.eval_only:
            raise
        if not _needs_labels(config) and config.val_split == config.default_of("val_split"):
            return train, None, [f"there is no {config.val_split} split: nothing is evaluated"]
        raise UserError(
            f"{error}; hold out a tenth of the {len(train):,} training images by --val-fraction 0.1, or train without "
            "evaluation by --val-split ''"
        ) from None


def _open_for_evaluation(config: RunConfig) -> tuple[Source, Source, list[str]]:
    """The evaluation split in place of both; it may lack some of the classes that the weights name."""
    names = find_weights(config.initial_checkpoint).class_names if config.initial_checkpoint else ()
    try:
        source = _open_val_split(config, names)
        if names:
            return source, source, []
    except UserError:  # another tool's names, or other classes, which the caller compares
        source = _open_val_split(config, ())
    if config.num_classes not in (None, source.num_classes):
        why = "nothing says which is which"
        if names:
            others = [name for name in source.class_names if name not in names]
            why = f"{enumerate_some(others)} is none of the weights' ({enumerate_some(names)})"
        raise UserError(
            f"--val-split {config.val_split} has {source.num_classes} classes, the model {config.num_classes}, and "
            f"without a training split {why}; name the --train-split that has them all"
        )
    return source, source, []


def _open_val_split(config: RunConfig, names: Sequence[str]) -> Source:
    """The evaluation split of all --data-dir together.

    Args:
        config: names the data.
        names: the classes of training. In evaluation the split may lack some of them, and a task without labels takes
            a split of any others.
    """
    parts = _open_each(config, config.val_split, names, of_evaluation=True)
    known = _needs_labels(config) or all(part.class_names and {*part.class_names} <= {*names} for part in parts)
    return mixed(parts, (), (names or None) if known else ())


def _open_each(
    config: RunConfig, split: str, classes: Sequence[str] = (), *, of_evaluation: bool = False
) -> list[Source]:
    """One split of each --data-dir; in evaluation those need not all have one.

    Args:
        config: names the data.
        split: its name.
        classes: of the training split, when this is the evaluation split.
        of_evaluation: whether it is.
    """
    folders = [config.data_dir] if isinstance(config.data_dir, str) else config.data_dir
    keys = CaptionKeys(config.csv_img_key, config.csv_caption_key, config.csv_separator.replace("\\t", "\t"))
    labelled, task = _needs_labels(config), task_named(config.task, config.task_source)
    found: list[Source] = []
    for number, folder in enumerate(folders, 1):
        try:
            source = task.open_source(config, folder or "", split)
            if source is None:
                source = open_source(
                    config.dataset,
                    folder or None,
                    split,
                    classes=classes or None if len(folders) == 1 and labelled else None,
                    download=config.dataset_download,
                    allow_empty=config.allow_empty_classes,
                    labels=keys if task.has_text else labelled,
                    partly=config.eval_only,
                )
            found.append(source)
        except listing.NoSuchSplit:
            if not of_evaluation or (number == len(folders) and not found):
                raise
    return found


def _describe_images(config: RunConfig, source: Source) -> list[str]:
    """Lines for people about the training images, a few of which are read."""
    found = [] if config.eval_only else headers_of_some(source)
    way_out = "" if config.exif_rotation == "on" else ", which is ignored; --exif-rotation on turns them upright"
    counts = Counter(f"are of mode {mode} ({describe_depth(mode)})" for mode, _ in found if describe_depth(mode))
    counts[f"have an EXIF orientation other than 1{way_out}"] = sum(turn > 1 for _, turn in found)
    of = f"of {len(found)} files of {config.train_split} drawn by key"
    return [f"{count} {of} {what}" for what, count in counts.items() if count]


def _held_out(config: RunConfig, train: Source, val: Source) -> str:
    """A line about what --val-fraction took."""
    line = (
        f"--val-fraction {config.val_fraction:g}: {len(val):,} of the {len(train):,} images of {config.train_split} "
        "are held out for evaluation, the same ones in every run"
    )
    if train.multi_label or not train.class_names:
        return line
    num_classes = len({val.target(number) for number in range(len(val))})
    without = train.num_classes - num_classes
    kept = f" ({without:,} have one image only and keep it)" if without else ""
    return f"{line}, from {num_classes:,} classes{kept}"
