"""A run's tables at its start, in `--dry-run` and at its end, and the files written then: settings, summary, report."""

from __future__ import annotations

import itertools
import os
import shlex
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ds_vit.checkpoint.folder import marked
from ds_vit.config import parser as flags
from ds_vit.config.deepspeed_json import derived_path
from ds_vit.config.flag import spelling
from ds_vit.config.run_folder import BEST, RunFolder, write_json
from ds_vit.config.schema import KEY_OF_FLAG, LAYOUT_FLAGS
from ds_vit.config.units import in_words
from ds_vit.device import hardware_name
from ds_vit.engine.layer_norms import layers_of
from ds_vit.engine.patches import version_warnings
from ds_vit.fault_tolerance.errors import NotSaved, enumerate_some, written
from ds_vit.launching.process import Process, launch_words
from ds_vit.models.param_groups import no_weight_decay_names
from ds_vit.models.zoo import num_parameters
from ds_vit.monitoring.metrics import Reporter, Throughput, make_console, print_columns, print_table, say
from ds_vit.monitoring.report.page import write_report
from ds_vit.monitoring.report.record import num_starts, read_records
from ds_vit.optim.build import states_per_element
from ds_vit.optim.rate_factors import layer_scales
from ds_vit.optim.settings import Optimizer, Schedule
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.layout import placement_rows
from ds_vit.planner.counting import Flops, count_flops
from ds_vit.planner.hardware import accelerator_of_device
from ds_vit.planner.memory import PARTS, num_states
from ds_vit.tasks.task import Horizon, Task
from ds_vit.training.cost import Cost
from ds_vit.training.resolve.record import flag_values, rates_of, resolved_flags
from ds_vit.training.resume import describe_rates
from ds_vit.training.run import Run

Rows = Sequence[tuple[str, str]]


def start_rows(run: Run, flops: Flops, device: torch.device, folder: Path) -> Rows:
    """The table of the start: model, layout, precision, batch arithmetic, steps.

    Args:
        run: of this rank.
        flops: of an image.
        device: where this rank computes.
        folder: the output folder.
    """
    data, model, engine = run.data, run.model, run.engine
    layout = f"{run.layout}, ZeRO-{engine.zero_stage}"
    if run.layout.pp > 1:
        stages = " | ".join(str(b - a) for a, b in itertools.pairwise(model.bounds))
        layout += f", layers per stage {stages}"
    layout += "".join(f", {name.replace('_', ' ')}" for name in LAYOUT_FLAGS if getattr(run.config, name) is True)
    if model.class_parallel:
        layout += ", classifier split over classes"
    if interval := engine.checkpointing.interval:
        blocks = "each block" if interval == 1 else f"every {interval} blocks"
        layout += f", {blocks} recomputed" + (" from inputs kept in host memory" if engine.checkpointing.cpu else "")
        layout += " except matrix products and attention" if engine.checkpointing.selective else ""
    source = data.train_source
    without = "with captions" if source.has_captions else "without classes"
    labels = f"in {source.num_classes} classes" if source.class_names else without
    images = f"{len(source):,} images {labels}"
    left = len(data.train_source) - data.order.steps_per_epoch * run.batch.global_batch
    if run.optimizer is not None and left > 0 and not (data.order.aug_repeats or data.order.mixture):
        images += f" (each epoch skips {left:,} random ones after its last full batch)"
    if data.val_source is not None:
        images += f", {len(data.val_source):,} for evaluation"
    if data.zeroshot is not None:
        classes, prompts = data.zeroshot.source.num_classes, len(data.zeroshot.prompts)
        images += f", {len(data.zeroshot.source):,} in {classes:,} classes ({prompts:,} prompts) for zero-shot"
    in_training = "" if run.optimizer is None else f", {flops.training / 1e9:.3f} G in training"
    rows = [
        ("model", run.config.model),
        ("parameters", _parameters(run)),
        ("FLOPs per image", f"{flops.forward / 1e9:.3f} G forward" + in_training),
        ("layout", layout),
        ("precision", _precision(run, device)),
        ("data", images),
        ("global batch", f"{run.batch}{_batch_origins(run)}"),
    ]
    if run.optimizer is not None and run.schedule is not None:
        rows.append(("augmentation", _augmentation(run.model.task)))
        rows += _update_rows(run, run.optimizer, run.schedule)
    if run.data.workers.reason:
        rows.append(("--workers auto", "{} per rank ({})".format(*run.data.workers)))
    if run.config.set:
        rows.append(("--set", " ".join(run.config.set)))
    rows.append(("output", str(folder)))
    if run.optimizer is not None:
        rows.append(("if it ends early", resume_command(folder, run.process)))
    return rows


def settings_of(run: Run) -> tuple[dict[str, str | float], str, list[str]]:
    """The arguments of `Reporter.settings`: flags not at their default and the JSON's values; layout; figures."""
    engine, layout = run.engine, run.layout
    aside = {"deepspeed_config", "output", "set"}
    given = {name: value for name, value in flag_values(run).items() if name not in aside}
    given = {name: value for name, value in given.items() if value != run.config.default_of(name)}
    # Names of folders need not be UTF-8, and TensorBoard's files must be.
    words = {name: os.fsencode(str(value)).decode("utf-8", "replace") for name, value in given.items()}
    values = {name: value if isinstance(value, (int, float)) else words[name] for name, value in given.items()}
    values |= {**asdict(layout), "zero_stage": engine.zero_stage, "precision": engine.precision.name}
    values |= {"global_batch": run.batch.global_batch}
    if run.optimizer is not None:
        values |= {"optimizer": run.optimizer.cls.__name__, "lr": run.optimizer.lr}
        values |= {"weight_decay": run.optimizer.weight_decay}
    evaluated = [f"eval/{figure.name}" for figure in run.model.task.figures] if run.data.evaluates else []
    return values, f"{run.text}: {run.batch}", [*evaluated, "train/loss"]


def _batch_origins(run: Run) -> str:
    """The origins of batch numbers that are not in the JSON; the ranks of a replica, if there are several."""
    layout, origins = run.layout, run.engine.origins
    words = {"train_micro_batch_size_per_gpu": "images", "gradient_accumulation_steps": "micro-batches"}
    given = [f"{word}: {origins[key]}" for key, word in words.items() if key in origins]
    if (number := layout.pp * layout.tp) > 1:
        given.insert(0, f"a rank: the {number} of a replica")
    return f" ({', '.join(given)})" if given else ""


def _augmentation(task: Task) -> str:
    """The random changes of a training image, and the mixing."""
    augment = task.config
    if "hflip" in task.refused_flags:
        return task.refused_flags["hflip"]
    own_crop = task.refused_flags.get("scale", "")
    if augment.no_aug:
        words = [own_crop or "none: resized, the centre cropped"]
    else:
        area, crop = augment.scale or (0.08, 1.0), augment.train_crop_mode or "rrc"
        random_size = f"a random crop of {area[0]:.0%} to {area[1]:.0%} of the area"
        words = [own_crop or (random_size if crop == "rrc" else f"crop {crop}")]
        chances = {"flip": augment.hflip, "upside down": augment.vflip, "grey": augment.grayscale_prob}
        chances |= {"blur": augment.gaussian_blur_prob, "erased": augment.reprob}
        words += [augment.aa or (f"colour jitter {augment.color_jitter}" if augment.color_jitter else "")]
        words += [f"{name} {chance:.0%}" for name, chance in chances.items() if chance]
    words += [f"{name} {alpha:g}" for name, alpha in (("mixup", augment.mixup), ("cutmix", augment.cutmix)) if alpha]
    return ", ".join(filter(None, words))


def _parameters(run: Run) -> str:
    """The number of parameters, and of those that are trained."""
    whole, frozen = run.model.whole, run.model.frozen
    if not frozen:
        return f"{num_parameters(whole):,}"
    trained = sum(parameter.numel() for name, parameter in whole.named_parameters() if name not in frozen)
    return f"{num_parameters(whole):,}, {trained:,} of them trained ({len(frozen)} tensors frozen)"


def _update_rows(run: Run, optimizer: Optimizer, schedule: Schedule) -> Rows:
    """The number of steps, and the update of each."""
    name, steps = "the JSON's scheduler", run.engine.json.given("scheduler.params.warmup_num_steps")
    if schedule.rate is not None:
        name, steps = schedule.rate.name, schedule.rate.warmup_steps
    warmup = f", {steps:,} of warm-up" if steps else ", no warm-up" if steps == 0 else ""
    horizon = schedule.horizon
    course = f"{horizon.steps_per_epoch:,} per epoch, schedule over {horizon.total_steps:,}{warmup}"
    of = {flag: run.engine.origins.get(key, "JSON") for flag, key in KEY_OF_FLAG.items()}
    decay = "" if optimizer.decay is None else f" ({of['weight_decay']})"
    update = f"{optimizer.cls.__name__}, lr {optimizer.lr:g} ({of['lr']}; {name})"
    update += f", weight decay {optimizer.weight_decay:g}{decay}"
    clip = optimizer.clip
    return [
        ("steps", f"{schedule.total_steps:,} ({course})"),
        ("checkpoints", _checkpoints(run)),
        ("optimizer", update + (f", clipped at {clip:g}" if clip else ", no clipping") + f" ({of['clip_grad']})"),
        *_rules(run, optimizer, horizon),
    ]


def _checkpoints(run: Run) -> str:
    """When they are saved, which ones stay, and what an end without warning costs."""
    keep, interval = run.config.keep_checkpoints, run.output.interval
    if not interval:
        return "none but of the step that the run is interrupted at: what kills it costs all steps, and no best is kept"
    best = " and the best" if run.has_best else ""
    kept = f"the newest {keep}{best} stay" if keep else "all stay"
    return f"{interval}; {kept}"


def _precision(run: Run, device: torch.device) -> str:
    name = f"{run.engine.precision.name} on {device.type}"
    if run.engine.precision.compute != "float32" and run.config.norm_dtype == "float32":
        return f"{name}, norms in float32"
    return f"{name}, TF32 matrix products" if run.config.tf32 else name


def _rules(run: Run, optimizer: Optimizer, horizon: Horizon) -> Rows:
    """The sizes of images; what single parameters get: weight decay, their layer's learning rate, an average."""
    rows: list[tuple[str, str]] = []
    model = run.model.whole
    if sizes := run.data.sizes:
        rows.append(("image size", f"{sizes.in_words}; FLOPs and memory are those of {sizes.sizes[-1]}"))
    trained = [name for name, _ in model.named_parameters() if name not in run.model.frozen]
    if optimizer.weight_decay:
        free = no_weight_decay_names(model).intersection(trained)
        rows.append(("no weight decay", f"{len(free)} of {len(trained)} tensors: vectors, biases and what timm names"))
    if optimizer.fallback is not None:
        left = len(optimizer.fallback.intersection(trained))
        rows.append((optimizer.cls.__name__, f"of {len(trained) - left} matrices; AdamW for {left} tensors"))
    if run.config.layer_decay not in (None, 1.0):
        scales, layers = layer_scales(model, run.config.layer_decay), layers_of(trained)
        # The parameters of a layer share a factor, except some that timm assigns elsewhere; the last has the layer's.
        by_layer = {layers[name]: optimizer.lr * scales[name] for name in trained}
        rows.append(("lr by layer", ", ".join(f"{layer} {lr:.3g}" for layer, lr in by_layer.items())))
    task = run.model.task
    if factors := {name: factor for name, factor in task.rate_factors(model).items() if factor != 1.0}:
        rows.append(("lr by name", ", ".join(f"{name} x {factor:g}" for name, factor in factors.items())))
    if held := sorted(task.held_names(1, horizon)):
        flags = {spelling(flag): horizon.steps_in(getattr(run.config, flag)) for flag in task.epoch_flags}
        steps = ", ".join(f"{number} steps by {flag}" for flag, number in flags.items() if number)
        rows.append(("lr of 0 at first", steps or enumerate_some(held)))
    if run.config.model_ema:
        growing = " growing from 0" if run.config.model_ema_warmup else ""
        rows.append(("average", f"of the weights, decay {run.config.model_ema_decay:g}{growing}"))
    return rows


def resume_command(folder: Path, process: Process) -> str:
    """The command that resumes an interrupted run; the run's own recipe holds everything else.

    Args:
        folder: of the run.
        process: this rank.
    """
    program, count = sys.argv[0], process.world_size
    if Path(program).name in ("ds-vit", "__main__.py", "cli.py"):  # the files: by -m, as each rank of `ds-vit launch`
        one_host = f"ds-vit launch -n {count} train"
        several = "the same launcher and ds-vit train" if process.spans_hosts else one_host
        program = "ds-vit train" if count == 1 else several
    else:
        launcher = "python" if count == 1 else launch_words(process) or "the same launcher and"
        program = f"{launcher} {shlex.quote(program)}"
    words = ("--recipe", str(RunFolder(folder).config), "--output", str(folder), "--resume", "auto")
    return f"{program} {shlex.join(words)}"


def show_start(
    run: Run,
    folder: RunFolder,
    device: torch.device,
    flops: Flops | None,
    console: Console | None,
    more: Rows = (),
) -> list[str]:
    """Write the settings files and show the run (a collective).

    Args:
        run: of this rank.
        folder: of its output.
        device: of this rank.
        flops: of an image, on rank 0.
        console: of rank 0; None on the others.
        more: further rows of the table.

    Returns:
        The host's name of each rank; empty where all are on one.

    Raises:
        UserError: the folder cannot be written to.
    """
    if console is not None and flops is not None:
        with written(f"--output {folder.path} cannot be written to"):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.config.write_text(flags.to_yaml(resolved_flags(run)), encoding="utf-8")
            write_json(folder.deepspeed, run.engine.json.dump())
            write_json(derived_path(folder.deepspeed), run.engine.origins)
            run.model.task.write_classes(folder)
        say(console, *run.notes, *version_warnings())
        print_table(console, "ds_vit", [*start_rows(run, flops, device, folder.path), *more])
    if not run.process.spans_hosts:
        return []
    hosts: list[str] = gather_objects(socket.gethostname())
    if console is not None and len(set(hosts)) > 1:
        print_table(console, "placement", placement_rows(run.layout, hosts))
    return hosts


# ---- --dry-run -------------------------------------------------------------------------------------------------------

_BAR = 40  # characters of the highest rate
_POINTS = 9  # of the schedule, in addition to the end of warm-up


def show_dry_run(run: Run, device: torch.device, folder: Path) -> None:
    """`--dry-run`: show the start table with the schedule and the size of files, and the memory of a rank.

    Args:
        run: of this rank.
        device: where it would compute.
        folder: where it would write.
    """
    console = make_console()
    say(console, *run.notes)
    rows = [*start_rows(run, count_flops(run.model.whole, run.model.frozen), device, folder)]
    if run.optimizer is not None and run.schedule is not None:
        rows += [_file_sizes(run, run.optimizer), *_schedule_rows(run, run.schedule)]
        if (found := accelerator_of_device(hardware_name(device))) and run.data.sizes is None:
            rows.append(("step, predicted", f"{Cost(run).step_time(found).seconds:.3f} s"))
    print_table(console, "dry run: nothing is started", rows)
    print_columns(console, "memory", _memory_lines(Cost(run)))
    say(console, "  not counted: the loader, what collectives take, and 2 to 3 GB of a GPU's own")


def _schedule_rows(run: Run, schedule: Schedule) -> Rows:
    """The learning rate at a few steps, as numbers and as bars."""
    if (rate := schedule.rate) is None:
        return [("learning rate", describe_rates(rates_of(run)))]
    last = schedule.total_steps - 1
    steps = sorted({*(last * i // (_POINTS - 1) for i in range(_POINTS)), min(rate.warmup_steps, last)})
    highest = max(rate.lr(step) for step in steps) or 1.0
    bars = {step: "█" * round(_BAR * rate.lr(step) / highest) for step in steps}
    return [(f"learning rate, step {step + 1:,}", f"{rate.lr(step):.3e}  {bars[step]}") for step in steps]


def _memory_lines(cost: Cost) -> list[list[str]]:
    """The bytes of a rank of each stage, with a header."""
    stages = cost.memory()
    several = len(stages) > 1
    header = ["memory per rank", *(f"stage {i}" for i in range(len(stages)))] if several else ["memory", "per rank"]
    lines = [header, ["parameters", *(f"{stage.parameters:,}" for stage in stages)]]
    for field, name in PARTS.items():
        if any(sizes := [getattr(stage, field) for stage in stages]):
            lines.append([f"{name} (in host memory)" if field in cost.rules.in_host else name, *map(in_words, sizes)])
    most = (stage.on_device(cost.run.batch).together for stage in cost.stages)
    return [*lines, ["at most", *map(in_words, most)]]


def _file_sizes(run: Run, optimizer: Optimizer) -> tuple[str, str]:
    """The row with the size of weights and checkpoints."""
    config, model = run.config, run.model
    sizes = {name: p.numel() for name, p in model.whole.named_parameters() if name not in model.frozen}
    each = states_per_element(optimizer.cls, optimizer.arguments)
    states = 4 * num_states(each, optimizer.fallback or frozenset(), sizes)
    weights = 4 * num_parameters(model.whole) * (2 if config.model_ema else 1)
    room = f", {config.keep_checkpoints + 2} at most" if config.keep_checkpoints else ""
    return "files", f"weights {in_words(weights)}, checkpoints {in_words(weights + states)} each{room}"


# ---- the end ---------------------------------------------------------------------------------------------------------


def summarise(
    run: Run,
    evaluations: Sequence[Mapping[str, float]],
    ema_evaluations: Sequence[Mapping[str, float]],
    throughput: Throughput,
    measured: Mapping[str, Any],
) -> dict[str, Any]:
    """The contents of summary.json; the average's figure is in it only where there is an average.

    Args:
        run: of this rank.
        evaluations: the figures of all evaluations, in order.
        ema_evaluations: those of the average.
        throughput: of the training steps.
        measured: further entries. "steps" are done; "wall_seconds" are those of all the processes that this run has
            had; "skipped_images" are damaged, or their captions are; "exit" is "completed", "interrupted" (saved, to be
            resumed) or "not all saved" (a checkpoint, the weights or rows of metrics.jsonl).
    """
    model, task = run.model, run.model.task
    figures = [(figure, evaluations, "") for figure in task.figures if figure.summed_up]
    if run.config.model_ema:
        figures.append((task.figures[0], ema_evaluations, "_ema"))
    quality: dict[str, float | None] = {}
    for figure, found, suffix in figures:
        # A run may have been given another evaluator when it was resumed.
        values = [evaluation[figure.name] for evaluation in found if figure.name in evaluation]
        best, last = (figure.best(*values), values[-1]) if values else (None, None)
        quality |= {f"best_{figure.name}{suffix}": best, f"last_{figure.name}{suffix}": last}
    seconds = throughput.total_seconds
    return {
        "model": model.spec.name,
        "num_parameters": num_parameters(model.whole),
        **({"class_names": list(task.class_names)} if task.has_classes else {}),
        "layout": {**asdict(run.layout), "zero_stage": run.engine.zero_stage},
        "precision": run.engine.precision.name,
        **quality,
        "eval_images": evaluations[-1]["images"] if evaluations else 0,
        "images_per_second": throughput.total_images / seconds if seconds else None,
        **measured,
    }


def end_rows(
    run: Run,
    summary: dict[str, Any],
    folder: Path,
    loss: float | None = None,
    unwritten: Collection[str] = (),
) -> Rows:
    """The table of the end: top-1 or else the training loss, images/s, the files except `unwritten`."""
    rows: list[tuple[str, str]] = []
    files, task = RunFolder(folder), run.model.task
    figure = task.figures[0]
    for suffix, label, over in (
        ("", figure.label, f" over {summary['eval_images']:,} images"),
        ("_ema", f"{figure.label}, average", ""),
    ):
        best, last = (summary.get(f"{which}_{figure.name}{suffix}") for which in ("best", "last"))
        if last is not None and best is not None:
            shown = (figure.value({figure.name: value}) for value in (last, best))
            rows.append((label, "{} (best {})".format(*shown) + over))
    if not rows and loss is not None:
        rows.append(("training loss", f"{loss:.5f}"))
    if summary["images_per_second"]:
        rows.append(("images/s", f"{summary['images_per_second']:.1f}"))
    if (share := summary.get("decoded_on_device")) is not None:
        rows.append(("decoded on the device", f"{share:.1%} of the images since this start"))
    if summary["skipped_images"]:
        instead = "do not count" if run.optimizer is None else "were replaced"
        said = f"{summary['skipped_images']} are damaged and {instead} ({files.skipped.name} names them)"
        rows.append(("skipped images", said))
    apart = task.weight_files()
    averages = task.average_files() or ["ema", *(f"ema-{name}" for name in apart)]
    names = [f"{name}.safetensors" for name in ("model", BEST, *apart, *averages)]
    names += [path.name for path in (files.report, files.metrics, files.summary, files.tensorboard)]
    launches = num_starts(files)
    marks = {label: marked(files.checkpoints, name) for label, name in (("newest", "latest"), ("best", BEST))}
    saved = ", ".join(f"{label} {name}" for label, name in marks.items() if name)
    written = ", ".join(name for name in names if name not in unwritten and any(folder.glob(f"{name}*")))
    rows += [
        ("wall time", f"{summary['wall_seconds']:.0f} s" + (f" in {launches} launches" if launches > 1 else "")),
        *([("checkpoints", f"{files.checkpoints}/ ({saved})")] if saved else []),
        ("files", f"{folder}/ ({written})"),
    ]
    return rows


def show_end(
    run: Run,
    folder: RunFolder,
    summary: dict[str, Any],
    reporter: Reporter,
    stopped: str = "",
) -> None:
    """Write summary.json and report.html, as far as the disk takes them, and show the end, on rank 0.

    Args:
        run: of this rank.
        folder: its output folder.
        summary: the contents.
        reporter: of rank 0.
        stopped: by what the run was interrupted, and where it is saved; the last line then says how to resume.

    Raises:
        NotSaved: the file could not be written.
    """
    console = reporter.console
    unwritten = {path.name: "" for path in reporter.unwritten}
    try:
        write_json(folder.summary, summary)
    except OSError as error:
        unwritten[folder.summary.name] = f"{folder.summary} could not be written: {error.strerror or error}"
    try:
        write_report(read_records([folder.path]), folder.report)
    except Exception as error:  # pictures of a run that is done: nothing that is wrong with them may fail it
        unwritten[folder.report.name] = ""
        what = f"{type(error).__name__}: {error}"
        reporter.say(f"WARNING: {folder.report} is not written ({what}); ds-vit report makes it")
    rows = end_rows(run, summary, folder.path, reporter.train_loss, unwritten)
    if stopped and run.schedule is not None:
        place = f"at {summary['steps']:,} of {run.schedule.total_steps:,}"
        print_table(console, "interrupted", [("interrupted", f"{place} {stopped}"), *rows])
        reporter.say(f"interrupted {place}; resume with: {resume_command(folder.path, run.process)}")
    else:
        print_table(console, "done", rows)
    if problem := unwritten.get(folder.summary.name):
        raise NotSaved(problem)
