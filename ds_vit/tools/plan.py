"""`ds-vit plan`: which layouts of a model fit on GPUs, how fast each is, and the files that start one.

ds-vit plan --model vit_22b_patch14_224 --gpus 256 --gpu h200
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Mapping
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_vit.config.deepspeed_json import BATCH_KEYS, load_json
from ds_vit.config.deepspeed_rules import precision
from ds_vit.config.outside import config_class
from ds_vit.config.parser import from_values, load_recipe, or_shipped
from ds_vit.config.run_folder import RunFolder, write_json
from ds_vit.config.schema import BatchSettings
from ds_vit.config.units import in_words, parse_kwargs
from ds_vit.data.sources.datasets import open_source
from ds_vit.engine.start import quiet_deepspeed
from ds_vit.fault_tolerance.errors import UserError, written
from ds_vit.launching.launchers import RANK_PY
from ds_vit.launching.process import Process
from ds_vit.monitoring.metrics import make_console, print_columns, say
from ds_vit.planner.cost import Machine
from ds_vit.planner.hardware import accelerator, link
from ds_vit.planner.memory import PARTS
from ds_vit.tasks.registry import task_of
from ds_vit.tasks.task import Task
from ds_vit.tools.layout_search import Candidate, PlanRequest, Search, json_at_stage

if TYPE_CHECKING:
    from ds_vit.training.run import Run

_IMAGENET = 1_281_167
_EPOCHS = 300
_BF16 = {
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05}},
}
_OF_RUN = ("model", "img_size", "model_ema")
# Flags of a recipe that depend on the machine, and on which neither memory nor time does here.
_OF_MACHINE = ("compile", "compile_mode", "cuda_graph", "tf32")
# Flags of this command that a recipe may have.
_OF_RECIPE = (*_OF_RUN, "epochs", "deepspeed_config", "model_kwargs", "num_classes")


def plan(arguments: argparse.Namespace) -> int:
    """Carry the command out."""
    if arguments.gpus is None:
        raise UserError("--gpus is missing: how many there would be, for example --gpus 8")
    recipe = with_recipe(arguments)
    request = request_of(arguments)
    found = Search(request, run_of(arguments, recipe, request), one_vit=not arguments.of_task)
    if not found.fitting:
        raise UserError(_nothing_fits(found))
    if arguments.json:
        print(json.dumps(as_json(found, arguments)))
    else:
        _show(found, arguments)
    if arguments.write:
        write(found, found.fitting[0], Path(arguments.write), arguments)
    return 0


def with_recipe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fill in, in place, what --recipe has and the command line does not; gives the recipe, empty without one."""
    recipe = load_recipe(arguments.recipe) if arguments.recipe else {}
    if not arguments.recipe:
        arguments.images = arguments.images or _IMAGENET
    has_teacher = any(recipe.get(name) for name in ("kd_model_name", "kd_checkpoint"))
    arguments.of_task = has_teacher or not _trains_one_vit(task_of(recipe))
    for key in _OF_RECIPE:
        if key in recipe and not getattr(arguments, key):
            setattr(arguments, key, recipe[key])
    arguments.deepspeed_config = arguments.deepspeed_config and or_shipped(arguments.deepspeed_config)
    if not arguments.model:
        raise UserError("--model is missing, and no --recipe names one; for example --model vit_large_patch16_224")
    return recipe


def _trains_one_vit(task: type[Task]) -> bool:
    """Whether a task's model is the chain of one ViT of timm's."""
    return all(getattr_static(task, name) is vars(Task)[name] for name in ("create_model", "towers", "layers", "chain"))


def request_of(arguments: argparse.Namespace) -> PlanRequest:
    """The plan that the command line asks for.

    Raises:
        UserError: an unknown GPU or link, an invalid number, or types that the ZeRO stage does not have.
    """
    gpu = accelerator(arguments.gpu)
    per_node = arguments.gpus_per_node or gpu.gpus_per_node
    if arguments.gpus > per_node and arguments.gpus % per_node:
        nearest = max(1, round(arguments.gpus / per_node)) * per_node
        raise UserError(
            f"--gpus {arguments.gpus} are no whole number of hosts of {per_node}; the nearest is {nearest}, or say "
            "--gpus-per-node"
        )
    machine = Machine(gpu, arguments.gpus, per_node, link(gpu.inside, "inside"), link(arguments.link))
    stage, source = arguments.zero, arguments.deepspeed_config or "the JSON of a plan"
    quiet_deepspeed(False)  # it prints while it is imported
    from ds_vit.config.deepspeed_keys import DeepSpeedJson

    json = DeepSpeedJson.of(load_json(source) if arguments.deepspeed_config else _BF16, source).replace({}, BATCH_KEYS)
    if stage is None and arguments.deepspeed_config:
        stage = json.zero_stage
    precision(json_at_stage(json, 1 if stage is None else stage), source, on_cpu=False)  # its error names the file
    return PlanRequest(machine, arguments.global_batch, json, stage, pp=arguments.pp, tp=arguments.tp)


def run_of(arguments: argparse.Namespace, recipe: Mapping[str, Any], request: PlanRequest) -> Run:
    """The run to plan, on one rank; of its data only the classes count."""
    from ds_vit.training.resolve import resolve  # which imports DeepSpeed
    from ds_vit.training.run import World

    json = json_at_stage(request.json, 1 if request.fixed_stage is None else request.fixed_stage)
    flags = config_class(recipe).flags()
    left_out = {name for name in recipe if flags[name].section in ("run", "data")}
    left_out |= {*BatchSettings.model_fields, *_OF_MACHINE}
    values: dict[str, Any] = {"lr": 1e-3}  # of which neither memory nor time depends
    values |= {name: value for name, value in recipe.items() if name not in left_out}
    values |= {name: value for name in _OF_RUN if (value := getattr(arguments, name))}
    values |= {"deepspeed_config": json.dump(), "batch_size": 2, "max_steps": 10, "grad_checkpointing": ""}
    values |= {"model_kwargs": parse_kwargs(arguments.model_kwargs)}
    task = task_of(values)
    values |= {"dataset": task.example_dataset}
    values |= {"num_classes": arguments.num_classes or 1000} if task.has_classes else {}
    config, world = from_values(values), World(Process("none", 0, 1, 0, 1), on_cpu=False)
    data = task.open_source(config, "", "train") or open_source(task.example_dataset, None, "train")
    data.class_names = data.class_names[: config.num_classes]  # fewer than the example has
    return resolve(config, world, (data, None), with_weights=False)


# Output


def _row(found: Search, one: Candidate, arguments: argparse.Namespace) -> dict[str, Any]:
    """A layout for --json."""
    gpu = found.request.machine.accelerator
    days = arguments.images and (arguments.epochs or _EPOCHS) * arguments.images / one.images_per_second / 86400
    gpu_hours = 24 * (days or 0.0) * arguments.gpus
    fullest = max(one.memory, key=lambda memory: memory.together)
    return {
        "layout": dataclasses.asdict(one.layout),
        "zero_stage": one.stage,
        "recomputing": one.recomputing,
        "micro_batch": one.batch.micro_batch,
        "accumulation": one.batch.accumulation,
        "bounds": list(one.bounds),
        "memory": {**dataclasses.asdict(fullest), "together": fullest.together, "room": int(one.room)},
        "seconds": {**dataclasses.asdict(one.time), "step": one.time.seconds},
        "bubble": one.time.bubble / one.time.seconds,
        "images_per_second": one.images_per_second,
        # Loader processes of a rank, for JPEG files of ImageNet's size.
        "workers": math.ceil(one.images_per_second / one.layout.dp / gpu.images_per_worker),
        "mfu": found.mfu(one),
        "days": days,
        "megawatt_hours": days and gpu_hours * gpu.watts / 1e6,
        "cost": days and arguments.price and gpu_hours * arguments.price,
    }


def as_json(found: Search, arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole plan."""
    return {
        "model": arguments.model,
        "num_parameters": found.parameters,
        "training_flops_an_image": found.flops,
        "global_batch": arguments.global_batch,
        "layouts": [_row(found, one, arguments) for one in found.fitting],
        "too_large": [
            {**_row(found, one, arguments), "short_of_bytes": int(one.needs - one.room)} for one in found.too_large
        ],
    }


def _show(found: Search, arguments: argparse.Namespace) -> None:
    """Print the layouts and what to know about the best."""
    console, machine, best = make_console(), found.request.machine, found.fitting[0]
    costs = {"days": ("days", ",.1f"), "megawatt_hours": ("MWh", ",.1f"), "cost": ("cost", ",.0f")}
    costs = {key: shown for key, shown in costs.items() if _row(found, best, arguments)[key] is not None}
    lines = [["layout", "micro-batch", "memory per rank", "step", "bubble", "MFU", "images/s"]]
    lines[0] += [name for name, _ in costs.values()]
    for one in found.fitting[: arguments.top]:
        row = _row(found, one, arguments)
        line = [str(one), f"{one.batch.micro_batch} x {one.batch.accumulation}", in_words(one.needs)]
        line += [f"{one.time.seconds:.3f} s", f"{row['bubble']:.0%}", f"{row['mfu']:.0%}"]
        line += [f"{one.images_per_second:,.0f}", *(format(row[key], form) for key, (_, form) in costs.items())]
        lines.append(line)
    title = (
        f"{arguments.model}, {found.parameters / 1e9:,.2f} B parameters, on {machine.gpus} x "
        f"{machine.accelerator.name}: {len(found.fitting)} layouts fit, {len(found.too_large)} do not"
    )
    print_columns(console, title, lines)
    days = "the recipe's data set: --images N says how many it has"
    if arguments.images:
        days = f"{arguments.epochs or _EPOCHS:g} epochs of {arguments.images:,} images (--epochs, --images)"
    notes = [
        "predicted from published rates: real steps take 1 to 3 times as long (docs/planning.md).",
        f"a step is {arguments.global_batch:,} images (--global-batch); days and MWh are those of {days}. "
        "--top N shows more layouts, --write DIR writes the files of the best.",
    ]
    if arguments.of_task:
        notes.append("memory is that of the task's run; the time leaves out its loss and what its ranks gather for it.")
    if found.too_large:
        one = found.too_large[0]
        short = in_words(one.needs - one.room)
        notes.append(f"closest of those that do not fit: {one} needs {in_words(one.needs)}, {short} too much.")
    row = _row(found, best, arguments)
    sizes = {part: size for part, size in row["memory"].items() if size and part not in ("gradients", "activations")}
    parts = ", ".join(f"{text} {in_words(sizes[part])}" for part, text in PARTS.items() if part in sizes)
    notes.append(
        f"memory of the best: {parts} (the larger of the last two counts); {in_words(best.room)} are available."
    )
    notes.append(
        f"data of the best: each of {best.layout.dp} replicas needs {best.images_per_second / best.layout.dp:,.0f} "
        f"images/s; for JPEG files of ImageNet's size that is --workers {row['workers']}."
    )
    if unaligned := ", ".join(found.unaligned(best)):
        notes.append(f"matrix sizes of the best, no multiples of 8, which slows 16-bit products: {unaligned}.")
    say(console, *(f"  {note}" for note in notes))


def _nothing_fits(found: Search) -> str:
    """The error where no layout fits."""
    machine = found.request.machine
    if not found.too_large:
        return f"no layout of {machine.gpus} GPUs is possible with these flags; drop --pp, --tp or --zero"
    one = found.too_large[0]
    more = machine.gpus * 2 ** math.ceil(math.log2(one.needs / one.room))
    return (
        f"no layout fits on {machine.gpus} x {machine.accelerator.name}: {one} comes nearest and needs "
        f"{in_words(one.needs)} of the {in_words(one.room)} that a rank has; try --gpus {more}, or free --pp, --tp, "
        "--zero"
    )


# --write


def write(found: Search, one: Candidate, folder: Path, arguments: argparse.Namespace) -> None:
    """Write deepspeed.json, hostfile and command.sh of a layout.

    Raises:
        UserError: the folder cannot be written to.
    """
    machine, request = found.request.machine, found.request
    per_host = min(machine.gpus, machine.per_node)
    hosts = "".join(f"node{i + 1} slots={per_host}\n" for i in range(max(1, machine.gpus // machine.per_node)))
    with written(f"--write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            RunFolder(folder).deepspeed, json_at_stage(request.json, one.stage).replace(one.batch.as_json()).dump()
        )
        (folder / "hostfile").write_text(hosts)
        (folder / "command.sh").write_text(_script(one, folder, arguments))


def training_words(one: Candidate, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The flags of training for a layout."""
    words = ["--recipe", _absolute(arguments.recipe)] if arguments.recipe else []
    words += ["--deepspeed_config", str(RunFolder(folder).deepspeed.absolute()), "--model", arguments.model]
    kwargs = arguments.model_kwargs
    if kwargs and not isinstance(kwargs, Mapping):
        words += ["--model-kwargs", *kwargs]
    for flag in ("img_size", "num_classes"):
        if getattr(arguments, flag):
            words += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
    for flag, degree in (("--pp", one.layout.pp), ("--tp", one.layout.tp)):
        words += [flag, str(degree)] if degree > 1 or arguments.recipe else []  # a recipe has its own
    if one.layout.pp > 1:
        words += ["--pp-partition", ",".join(map(str, one.bounds))]
    if arguments.model_ema:
        words.append("--model-ema")
    if one.recomputing or arguments.recipe:
        words.append(f"--grad-checkpointing={one.recomputing}")  # some shells drop a separate empty word
    return words


def _script(one: Candidate, folder: Path, arguments: argparse.Namespace) -> str:
    """The script that starts training: a --dry-run first, on one process that is given the number of ranks."""
    folder = folder.absolute()
    words, hostfile = shlex.join(training_words(one, folder, arguments)), shlex.quote(str(folder / "hostfile"))
    train, run = (shlex.quote(str(RANK_PY.with_name(name))) for name in ("train.py", "run_hostfile.sh"))
    python = shlex.quote(sys.executable)
    return (
        "#!/usr/bin/env bash\n"
        f"# {arguments.model} on {arguments.gpus} GPUs, {one}: planned by ds-vit plan. From any folder:\n"
        f"#     bash {folder / 'command.sh'} --data-dir DIR --output RUN\n"
        f"# Write the hosts' names into {folder / 'hostfile'} before.\n"
        "set -euo pipefail\n"
        f'RANK=0 LOCAL_RANK=0 WORLD_SIZE={arguments.gpus} {python} {train} {words} "$@" --dry-run\n'
        f'bash {run} --hostfile {hostfile} {train} {words} "$@"\n'
    )


def _absolute(recipe: str) -> str:
    """A recipe's file from any folder; one that is shipped and not here keeps its name."""
    return str(Path(recipe).absolute()) if Path(recipe).is_file() else recipe
