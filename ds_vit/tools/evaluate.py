"""Evaluate weights: the exact accuracy of a run, a checkpoint or a file, on any number of ranks and any layout.

ds-vit eval runs/first
ds-vit eval runs/first --checkpoint best --weights ema
ds-vit eval runs/clip --zeroshot /data/imagenet --zeroshot-templates openai
deepspeed launch/eval.py runs/first --data-dir photos --pp 2
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_vit.config import parser as flags
from ds_vit.config.deepspeed_json import MONITORS
from ds_vit.config.flag import Scope
from ds_vit.config.outside import config_class, source_changes
from ds_vit.config.run_folder import RunFolder, write_json
from ds_vit.config.schema import LAYOUT_FLAGS, RunConfig
from ds_vit.data.sources.listing import TRAIN_NAMES, splits_in
from ds_vit.data.sources.source import Source
from ds_vit.engine.start import quiet_deepspeed
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError, enumerate_some
from ds_vit.launching.process import Process, discover
from ds_vit.monitoring.progress import Line, doing
from ds_vit.tasks.task import Task
from ds_vit.training.program import guarded, process_group
from ds_vit.weights.files import StoredWeights, add_weights_arguments, find_weights, recipe_of

if TYPE_CHECKING:
    from ds_vit.training.run import Run

_FLAGS = (
    *LAYOUT_FLAGS,
    *("dataset_download", "validation_batch_size", "verbose", "zeroshot", "zeroshot_templates", "eval_knn"),
)


def main(argv: Sequence[str] | None = None, program: str = "eval.py") -> int:
    """Run `launch/eval.py` or `ds-vit eval` with these arguments; exit codes as those of `launch/train.py`."""

    def body(process: Process) -> int:
        recipes = (recipe_of(Path(word)) for word in (sys.argv[1:] if argv is None else argv) if Path(word).exists())
        config = flags.config_of_words(argv, next((str(recipe) for recipe in recipes if recipe), None))
        words = flags.read_words(build_parser(program, config), argv, eval_only=True)
        evaluate_weights(words.pop("source", ""), process=process, **words)
        return exit_codes.OK

    return guarded(program, body, "nothing was written")


def build_parser(program: str, config: type[RunConfig] = RunConfig) -> flags.Parser:
    """The command line of `launch/eval.py` and `ds-vit eval`."""
    parser = flags.build_parser(
        program,
        "Exact figures of weights (top-1 and top-5 of a classifier), whatever the layout.",
        (*config.names_with(Scope.RECORDED), *_FLAGS),
        show_defaults=False,
        examples=str(__doc__),
        config=config,
    )
    add_weights_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="where to write the figures [eval.json next to the weights]")
    parser.add_argument(
        *("--linear-probe", "--eval-linear-probe"),
        dest="eval_linear_probe",
        action="store_true",
        help="the features too: top-1 of a linear classifier of them",
    )
    return parser


def evaluate_weights(
    source: str | Path,
    weights: str = "",
    checkpoint: str = "",
    *,
    output: str | Path | None = None,
    process: Process | None = None,
    again: bool = False,
    sources: tuple[Source, Source] | None = None,
    **settings: Any,
) -> tuple[dict[str, Any], Path]:
    """Evaluate weights on the validation split; every rank calls it.

    Args:
        source: a run's output folder, a checkpoint folder, or a file or folder that `--initial-checkpoint` accepts.
        weights, checkpoint: which of a run's; see `find_weights`.
        output: the file to write; default `eval.json` in the run's folder or next to the weights.
        process: this rank, where it is known already.
        again: as for `process_group`.
        sources: the images, twice, where the flags do not name them.
        settings: flags by their recipe names; they have the last word over the run's config.yaml.

    Returns:
        What the file holds, on every rank: source, weights ("raw", "ema" or "teacher"), file, model, num_parameters,
        layout {pp, dp, tp}, precision, data_dir or dataset, val_split, the task's figures (top1, top5 and loss of a
        classifier), images, skipped_images, seconds; and that file.

    Raises:
        UserError: invalid input; before the process group exists.
    """
    process = process or discover()
    found = find_weights(source, weights, checkpoint)
    stored = flags.load_recipe(str(found.recipe), settings) if found.recipe else {}
    kept = config_class({**stored, **settings}).names_with(Scope.RECORDED)  # not the layout: the ranks are other ones
    stored = {name: value for name, value in stored.items() if name in kept}
    settings |= {"initial_checkpoint": str(found.path), "eval_only": True, **_split_of(settings, stored)}
    values = flags.over_recipe(stored, settings)
    if values.get("val_split") == "" and sources is None and not {"val_split", "zeroshot"} & settings.keys():
        raise UserError(
            f"{found.recipe} has val_split: '', its run was not evaluated; name a split, --val-split NAME "
            "(--val-split train for the images of training)"
        )
    if not values.get("deepspeed_config"):
        raise UserError(f"{source} has no config.yaml next to it: give --deepspeed_config, the model and the data")
    config = flags.from_values(values)
    file = Path(output) if output else RunFolder(found.folder).evaluation
    if process.rank == 0:
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise UserError(f"{file.parent} is not a folder that can be written to; name a file with --output")
        found.verify()
        print("\n".join((f"weights: {found}", *source_changes(dict(config)))), flush=True)
    with doing("importing DeepSpeed", shown=process.rank == 0):
        quiet_deepspeed(config.verbose)
        from deepspeed.accelerator import get_accelerator

        from ds_vit.engine.start import device_of
        from ds_vit.models.layers import MAIN_TOWER
        from ds_vit.monitoring.metrics import Throughput, make_console, save_picture
        from ds_vit.parallel.groups import build_groups
        from ds_vit.training.auto_batch import MemoryAdvice, memory_of_rank
        from ds_vit.training.build_engine import build_engine
        from ds_vit.training.evaluation import Evaluation
        from ds_vit.training.inputs import InputPipeline, with_workers
        from ds_vit.training.resolve import resolve
        from ds_vit.training.run import World

        on_cpu = get_accelerator().device_name() == "cpu"
    with doing("listing the images, building the model", shown=process.rank == 0):
        run = resolve(config, World(process, on_cpu), sources)
    task, initial = run.model.task, run.model.towers.get(MAIN_TOWER)
    if initial is not None and (missing := _missing(run.model.whole, task, initial.newly_initialised)):
        _evaluate_features_only(task, found, missing)
    _check_classes(found, task.class_names)
    run = dataclasses.replace(run, engine=dataclasses.replace(run.engine, json=run.engine.json.replace({}, MONITORS)))
    started = time.perf_counter()
    pictures: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_group(process, on_cpu=on_cpu, again=again))
        free = memory_of_rank("", process, on_cpu=on_cpu)
        stack.enter_context(MemoryAdvice(run, free).errors())
        run = with_workers(run)
        line = Line(make_console() if process.rank == 0 else None)
        groups = build_groups(run.layout)
        with line.doing("building the model", None):
            engine = build_engine(run, device_of(process.local_rank), groups)
        inputs = InputPipeline(run, engine, Throughput())
        figures = Evaluation(engine, inputs, show=pictures.update, doing=line.doing).run()
        result = {"source": str(source), **_about(run, found), **figures}
        result["skipped_images"] = len(run.data.validation) - figures["images"]
        result["seconds"] = time.perf_counter() - started
        if dist.get_rank() == 0:
            replaced = _other_data_in(file, result)
            write_json(file, result)
            for name, pixels in pictures.items():
                save_picture(pixels, RunFolder(file.parent).picture(name))
            _show(run, found, f"{file}{replaced}", result)
        engine.close()
    return result, file


def _split_of(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, str]:
    """The split to evaluate of a --data-dir where none is named: val/, else test/.

    Only if it has no training split, or if the run held out a part of other images (--val-fraction).
    """
    folder = settings.get("data_dir")
    if not isinstance(folder, str) or {"val_split", "val_fraction", "dataset"} & settings.keys():
        return {}
    there = splits_in(folder) if os.path.isdir(folder) else []
    splits = [name for name in there if name not in TRAIN_NAMES]
    held_out = stored.get("val_fraction") is not None and folder != stored.get("data_dir")
    return {"val_split": splits[0]} if splits and (held_out or splits == there) else {}


def _check_classes(found: StoredWeights, of_data: tuple[str, ...]) -> None:
    """Refuse data whose classes are not those that a run was trained on: every count would be wrong.

    Another tool's weights may name the same classes in other words, and are taken as they are.
    """
    names = found.class_names
    if found.recipe is None or not names or not of_data or names == of_data:
        return
    number = next(n for n, pair in enumerate(itertools.zip_longest(names, of_data)) if pair[0] != pair[1])
    ours, theirs = (repr(group[number]) if number < len(group) else "none" for group in (names, of_data))
    raise UserError(
        f"{found.path} was trained on {len(names)} classes and the data has {len(of_data)}; number {number} is {ours} "
        f"there and {theirs} here; give data whose classes are those of the run, in this order"
    )


def _about(run: Run, found: StoredWeights) -> dict[str, Any]:
    """What the figures are of."""
    from ds_vit.models.zoo import num_parameters

    config = run.config
    return {
        "weights": found.kind,
        "file": str(found.path),
        "model": config.model,
        "num_parameters": num_parameters(run.model.whole),
        "layout": dataclasses.asdict(run.layout),
        "precision": run.engine.precision.name,
        "data": config.dataset or config.data_dir,
        "val_split": config.val_split,
        **({"val_fraction": config.val_fraction} if config.val_fraction is not None else {}),
        **({"zeroshot": config.zeroshot, "zeroshot_templates": config.zeroshot_templates} if config.zeroshot else {}),
    }


def _missing(whole: Any, task: Task, names: Sequence[str]) -> list[str]:
    """Those of the names that evaluation would need."""
    from ds_vit.models.layers import MAIN_TOWER, tower_of

    if task.feature_tower == MAIN_TOWER:
        return [*names]
    needed = dict(tower_of(whole, task.feature_tower).named_parameters())
    return [name for name in names if name in needed]


def _evaluate_features_only(task: Task, found: StoredWeights, missing: Sequence[str]) -> None:
    """Evaluate only the features of weights that lack a part of the model.

    Raises:
        UserError: neither --knn nor --linear-probe asks for that.
    """
    if task.config.zeroshot or not task.evaluators:
        what = f"classifier of {task.num_classes} classes" if task.has_classes else "whole model"
        names = enumerate_some(missing)
        way_out = "a checkpoint of the run has all of it (--checkpoint latest), and " * bool(task.weight_files())
        raise UserError(
            f"{found.path} has no {what} ({names}): there is nothing to evaluate; {way_out}--knn or --linear-probe "
            "judges the features"
        )
    task.evaluate_features_only()


def _other_data_in(file: Path, result: Mapping[str, Any]) -> str:
    """What to say of a file whose figures are replaced, where they are of other data than the result's."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such file, or another program's
        before, now = ([of[key] for key in ("data", "val_split")] for of in (json.loads(file.read_text()), result))
        return "" if before == now else f", in place of those of {' '.join(map(str, before))}: --output keeps both"
    return ""


def _show(run: Run, found: StoredWeights, written: str, result: Mapping[str, Any]) -> None:
    """The table that a person reads."""
    from ds_vit.monitoring.metrics import make_console, print_table

    skipped = f", {result['skipped_images']} skipped" if result["skipped_images"] else ""
    rows = [
        ("model", f"{run.model.spec.name}, {run.layout}, {run.engine.precision.name}"),
        ("weights", f"{found.path} ({found.kind})"),
        *((figure.label, figure.value(result, more_digits=1)) for figure in run.model.task.figures),
        ("images", f"{result['images']:,}{skipped}"),
        ("written to", written),
    ]
    print_table(make_console(), "evaluation", rows)
