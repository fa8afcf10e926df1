"""What a run writes and shows at its start and at its end, and summary.json."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from ds_vit import config as flags
from ds_vit.checkpoint import marked
from ds_vit.config.deepspeed_json import derived_path
from ds_vit.config.run_folder import BEST, RunFolder, write_json
from ds_vit.fault_tolerance.errors import NotSaved, UserError
from ds_vit.launching.last_word import is_mpirun, say_last, say_nothing_last
from ds_vit.models import Flops, num_parameters
from ds_vit.monitoring.metrics import print_table
from ds_vit.monitoring.report import read_records, write_report
from ds_vit.monitoring.starts import num_starts
from ds_vit.monitoring.throughput import Throughput
from ds_vit.parallel.placement import Placement
from ds_vit.tasks import Figure
from ds_vit.training.plan import Plan, resolved_flags
from ds_vit.training.start_rows import Rows, command_to_go_on, start_rows

Quality = dict[str, float | None]


def summarise(
    plan: Plan,
    evaluations: Sequence[Mapping[str, float]],
    ema_evaluations: Sequence[Mapping[str, float]],
    throughput: Throughput,
    skipped: Mapping[str, Any],
    wall_seconds: float,
    *,
    steps: int,
    exit_word: str,
) -> dict[str, Any]:
    """The contents of summary.json; the average's figure stands in it only where there is an average.

    Args:
        plan: the run.
        evaluations: the figures of all evaluations, in order.
        ema_evaluations: those of the average.
        throughput: of the training steps.
        skipped: images that could not be decoded: skipped_images, and where there are any, skipped_by_file and
            skipped_by_epoch.
        wall_seconds: of all the processes that this run has had.
        steps: that are done.
        exit_word: "completed", "interrupted" (saved, to go on later) or "not all saved" (a checkpoint, the
            weights or rows of metrics.jsonl).
    """
    figures = plan.model.task.figures

    def best_and_last(
        figure: Figure, found: Sequence[Mapping[str, float]], suffix: str = ""
    ) -> dict[str, float | None]:
        # A run may have been given another evaluator when it was resumed.
        values = [evaluation[figure.name] for evaluation in found if figure.name in evaluation]
        names = (f"best_{figure.name}{suffix}", f"last_{figure.name}{suffix}")
        return dict(zip(names, (figure.best(*values), values[-1]) if values else (None, None), strict=True))

    quality: Quality = {}
    for figure in figures:
        quality |= best_and_last(figure, evaluations) if figure.summed_up else {}
    average = best_and_last(figures[0], ema_evaluations, "_ema") if plan.config.model_ema else {}
    seconds = throughput.total_seconds
    return {
        "model": plan.config.model,
        "num_parameters": num_parameters(plan.model.whole),
        **({"class_names": list(plan.model.task.class_names)} if plan.model.task.has_classes else {}),
        "layout": {**asdict(plan.parallel.layout), "zero_stage": plan.deepspeed.zero_stage},
        "precision": plan.deepspeed.precision.name,
        "steps": steps,
        **quality,
        "eval_images": evaluations[-1]["images"] if evaluations else 0,
        "images_per_second": throughput.total_images / seconds if seconds else None,
        "wall_seconds": wall_seconds,
        **average,
        **skipped,
        "exit": exit_word,
    }


def end_rows(plan: Plan, summary: dict[str, Any], folder: Path) -> Rows:
    """The table of the end: model, layout, top-1, images/s, where the files are."""
    rows = [("model", summary["model"]), ("layout", plan.in_words)]
    figure = plan.model.task.figures[0]
    for suffix, label, over in (
        ("", figure.label, f" over {summary['eval_images']:,} images"),
        ("_ema", f"{figure.label}, average", ""),
    ):
        best, last = (summary.get(f"{which}_{figure.name}{suffix}") for which in ("best", "last"))
        if last is not None and best is not None:
            shown = (figure.value({figure.name: value}) for value in (last, best))
            rows.append((label, "{} (best {})".format(*shown) + over))
    if summary["images_per_second"]:
        rows.append(("images/s", f"{summary['images_per_second']:.1f}"))
    if summary["skipped_images"]:
        instead = "do not count" if plan.config.eval_only else "were replaced"
        said = f"{summary['skipped_images']} could not be decoded and {instead}"
        if files := len(summary.get("skipped_by_file", ())):
            said += f" ({files} file{'s' if files > 1 else ''}: {RunFolder(folder).skipped.name})"
        rows.append(("skipped images", said))
    apart = plan.model.task.weight_files()
    names = [f"{name}.safetensors" for name in ("model", BEST, *apart, "ema", *(f"ema-{name}" for name in apart))]
    launches = num_starts(RunFolder(folder))
    weights = "".join(f"{name}, " for name in names if any(folder.glob(f"{name}*")))
    rows += [
        ("wall time", f"{summary['wall_seconds']:.0f} s" + (f" in {launches} launches" if launches > 1 else "")),
        *_saved_rows(RunFolder(folder)),
        ("files", f"{folder}/ ({weights}report.html, metrics.jsonl, summary.json, tensorboard/)"),
    ]
    return rows


def _saved_rows(folder: RunFolder) -> Rows:
    """The newest and the best checkpoint, where there are any."""
    marks = {label: marked(folder.checkpoints, name) for label, name in (("newest", "latest"), ("best", BEST))}
    found = ", ".join(f"{label} {name}" for label, name in marks.items() if name)
    return [("checkpoints", f"{folder.checkpoints}/ ({found})")] if found else []


def warn_under_mpirun(folder: Path, num_ranks: int, signal_name: str) -> None:
    """Let mpirun's output end with how to go on, at a signal: its ranks may not live until they have saved.

    Open MPI 5 kills its ranks 0.2 s after it was told to stop, whatever its own options say.
    """
    if is_mpirun():
        say_last(
            f"mpirun ended its ranks at {signal_name} and did not wait for them to save (bash launch/mpi.sh does); "
            f"go on from the newest checkpoint with: {command_to_go_on(folder, num_ranks)}"
        )


def show_start(
    plan: Plan, folder: RunFolder, flops: Flops, device: torch.device, console: Console | None, more: Rows = ()
) -> tuple[str, ...]:
    """Write config.yaml, deepspeed.json and classes.json (enough to run again), and show the run (a collective).

    Args:
        plan: the run.
        folder: its output folder.
        flops: of an image.
        device: where this rank computes.
        console: of rank 0; None on the others.
        more: rows for the table.

    Returns:
        The host's name of each rank; empty where all are on one.
    """
    if console is not None:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.config.write_text(flags.to_yaml(resolved_flags(plan)))
            write_json(folder.deepspeed, plan.deepspeed.json)
            write_json(derived_path(folder.deepspeed), plan.deepspeed.origins)
            if plan.model.task.has_classes:
                write_json(folder.classes, plan.model.task.class_names)
        except OSError as error:
            raise UserError(f"--output {folder.path} cannot be written to: {error.strerror or error}") from error
        for note in plan.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        print_table(console, "ds_vit", [*start_rows(plan, flops, device, folder.path), *more])
    if not plan.parallel.process.spans_hosts:
        return ()
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if console is not None and len(set(hosts)) > 1:
        print_table(console, "placement", Placement(plan.parallel.layout, tuple(hosts)).rows())
    return tuple(hosts)


def show_end(
    plan: Plan,
    folder: RunFolder,
    summary: dict[str, Any],
    console: Console | None,
    stopped: str = "",
    more: Rows = (),
) -> None:
    """Write summary.json and show it, where there is a console; then report.html, as far as the disk takes it.

    Args:
        plan: the run.
        folder: its output folder.
        summary: the contents.
        console: of rank 0; None on the others.
        stopped: by what the run was interrupted, and where it is saved; the last line then says how to go on.
        more: rows for the table.

    Raises:
        NotSaved: the file could not be written.
    """
    if console is None:
        return
    rows = [*end_rows(plan, summary, folder.path), *more]
    if stopped:
        place = f"at {summary['steps']:,} of {plan.training.total_steps:,}"
        print_table(console, "interrupted", [("interrupted", f"{place} {stopped}"), *rows])
        process = plan.parallel.process
        sentence = f"interrupted {place}; go on with: {command_to_go_on(folder.path, process.world_size)}"
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
        say_last(sentence, stopped=True)
    else:
        print_table(console, "done", rows)
        say_nothing_last()
    try:
        write_json(folder.summary, summary)
    except OSError as error:
        raise NotSaved(f"{folder.summary} could not be written: {error.strerror or error}") from error
    try:
        write_report(read_records([folder.path]), folder.report)
    except Exception as error:  # pictures of a run that is done: nothing that is wrong with them may fail it
        sentence = f"WARNING: {folder.report} is not written ({type(error).__name__}: {error}); ds-vit report makes it"
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
