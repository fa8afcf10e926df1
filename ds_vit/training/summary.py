"""A run's end: summary.json, its table and the report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.folder import marked
from ds_vit.config.run_folder import BEST, RunFolder, write_json
from ds_vit.fault_tolerance.errors import NotSaved
from ds_vit.launching.process import Process
from ds_vit.models.zoo import num_parameters
from ds_vit.monitoring.metrics import Reporter, print_table
from ds_vit.monitoring.report import read_records, write_report
from ds_vit.monitoring.report.record import num_starts
from ds_vit.monitoring.throughput import Throughput
from ds_vit.tasks.metrics import Figure
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.start import Rows, resume_command

Quality = dict[str, float | None]


def summarise(
    config: EngineConfig,
    evaluations: Sequence[Mapping[str, float]],
    ema_evaluations: Sequence[Mapping[str, float]],
    throughput: Throughput,
    skipped: Mapping[str, Any],
    wall_seconds: float,
    *,
    steps: int,
    exit_word: str,
) -> dict[str, Any]:
    """The contents of summary.json; the average's figure is in it only where there is an average.

    Args:
        config: of the engine.
        evaluations: the figures of all evaluations, in order.
        ema_evaluations: those of the average.
        throughput: of the training steps.
        skipped: images that are damaged, or whose captions are: skipped_images, and where there are any,
            skipped_by_file and skipped_by_epoch.
        wall_seconds: of all the processes that this run has had.
        steps: that are done.
        exit_word: "completed", "interrupted" (saved, to be resumed) or "not all saved" (a checkpoint, the
            weights or rows of metrics.jsonl).
    """
    model, task = config.model, config.model.task

    def best_and_last(figure: Figure, found: Sequence[Mapping[str, float]], suffix: str = "") -> Quality:
        # A run may have been given another evaluator when it was resumed.
        values = [evaluation[figure.name] for evaluation in found if figure.name in evaluation]
        best, last = (figure.best(*values), values[-1]) if values else (None, None)
        return {f"best_{figure.name}{suffix}": best, f"last_{figure.name}{suffix}": last}

    quality: Quality = {}
    for figure in task.figures:
        quality |= best_and_last(figure, evaluations) if figure.summed_up else {}
    average = best_and_last(task.figures[0], ema_evaluations, "_ema") if config.averaged else {}
    seconds = throughput.total_seconds
    return {
        "model": model.spec.name,
        "num_parameters": num_parameters(model.whole),
        **({"class_names": list(task.class_names)} if task.has_classes else {}),
        "layout": {**asdict(config.layout), "zero_stage": config.zero_stage},
        "precision": config.precision.name,
        "steps": steps,
        **quality,
        "eval_images": evaluations[-1]["images"] if evaluations else 0,
        "images_per_second": throughput.total_images / seconds if seconds else None,
        "wall_seconds": wall_seconds,
        **average,
        **skipped,
        "exit": exit_word,
    }


def end_rows(
    config: EngineConfig,
    summary: dict[str, Any],
    folder: Path,
    loss: float | None = None,
    unwritten: Collection[str] = (),
) -> Rows:
    """The table of the end: top-1 or else the training loss, images/s, the files except `unwritten`."""
    rows: list[tuple[str, str]] = []
    run, task = RunFolder(folder), config.model.task
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
        instead = "do not count" if config.optimizer is None else "were replaced"
        said = f"{summary['skipped_images']} are damaged and {instead}"
        if files := len(summary.get("skipped_by_file", ())):
            said += f" ({files} file{'s' if files > 1 else ''}: {run.skipped.name})"
        rows.append(("skipped images", said))
    apart = task.weight_files()
    averages = task.average_files() or ["ema", *(f"ema-{name}" for name in apart)]
    names = [f"{name}.safetensors" for name in ("model", BEST, *apart, *averages)]
    names += [path.name for path in (run.report, run.metrics, run.summary, run.tensorboard)]
    launches = num_starts(run)
    marks = {label: marked(run.checkpoints, name) for label, name in (("newest", "latest"), ("best", BEST))}
    saved = ", ".join(f"{label} {name}" for label, name in marks.items() if name)
    written = ", ".join(name for name in names if name not in unwritten and any(folder.glob(f"{name}*")))
    rows += [
        ("wall time", f"{summary['wall_seconds']:.0f} s" + (f" in {launches} launches" if launches > 1 else "")),
        *([("checkpoints", f"{run.checkpoints}/ ({saved})")] if saved else []),
        ("files", f"{folder}/ ({written})"),
    ]
    return rows


def show_end(
    config: EngineConfig,
    process: Process,
    folder: RunFolder,
    summary: dict[str, Any],
    reporter: Reporter,
    stopped: str = "",
) -> None:
    """Write summary.json and report.html, as far as the disk takes them, and show the end, on rank 0.

    Args:
        config: of the engine.
        process: this rank.
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
    rows = end_rows(config, summary, folder.path, reporter.train_loss, unwritten)
    if stopped and config.optimizer is not None:
        place = f"at {summary['steps']:,} of {config.optimizer.total_steps:,}"
        print_table(console, "interrupted", [("interrupted", f"{place} {stopped}"), *rows])
        reporter.say(f"interrupted {place}; resume with: {resume_command(folder.path, process)}")
    else:
        print_table(console, "done", rows)
    if problem := unwritten.get(folder.summary.name):
        raise NotSaved(problem)
