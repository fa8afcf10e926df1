"""`ds-vit plan`: which layouts of a model fit on GPUs that one may not have, how fast each is, and the files of one.

ds-vit plan --model vit_22b_patch14_224 --gpus 256 --gpu h200
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ds_vit.config import load_recipe
from ds_vit.config.deepspeed_json import load_json
from ds_vit.config.shipped import or_shipped
from ds_vit.config.sizes import in_words
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import ModelSpec
from ds_vit.monitoring.metrics import make_console, print_columns
from ds_vit.planner.cost import Machine
from ds_vit.planner.goodput import Reliability, simulate
from ds_vit.planner.hardware import Accelerator, accelerator, link
from ds_vit.planner.search import Layouted, Planned, Search, Wishes, why_slower
from ds_vit.tasks.classification import Classification
from ds_vit.tools.plan_files import write

_IMAGENET = 1_281_167
_BF16 = {
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05}},
}
_RELIABILITY = (
    ("host_hours", "HOURS", "mean time between failures of a host"),
    ("checkpoint_seconds", "SECONDS", "that a checkpoint keeps training from going on"),
    ("restart_seconds", "SECONDS", "from a failure to the next step"),
    ("repair_hours", "HOURS", "until a host that failed is back"),
    ("spread", "SHARE", "standard deviation of a host's step time"),
)
# Keys of a recipe that say something of memory or time.
_OF_RECIPE = ("model", "img_size", "epochs", "model_ema", "deepspeed_config", "model_kwargs", "num_classes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ds-vit plan`."""
    parser.add_argument("--model", help="timm name, or one of the sizes up to vit_120b_patch14_224")
    parser.add_argument("--gpus", type=int, help="how many, on all hosts")
    parser.add_argument("--gpu", default="h200", metavar="NAME|FILE", help="what they are [%(default)s]")
    parser.add_argument("--gpus-per-node", type=int, help="of them in a host [the usual host's]")
    parser.add_argument("--link", default="ib400", metavar="NAME|FILE", help="between hosts, a GPU [%(default)s]")
    parser.add_argument("--global-batch", type=int, default=4096, help="images of a step [%(default)s]")
    parser.add_argument("--img-size", type=int, help="pixels [the model's]")
    parser.add_argument("--num-classes", type=int, help="[1000]")
    parser.add_argument("--model-kwargs", nargs="+", metavar="K=V", default=[], help="timm's, as in training")
    parser.add_argument("--deepspeed_config", "--deepspeed-config", metavar="FILE", help="types, optimizer, ZeRO stage")
    parser.add_argument("--recipe", metavar="FILE", help="model, image size, epochs, average from a recipe of training")
    parser.add_argument("--model-ema", action="store_true", default=None, help="the weights have an average")
    parser.add_argument("--images", type=int, default=_IMAGENET, help="of the data set [%(default)s, ImageNet-1k]")
    parser.add_argument("--epochs", type=float, help="passes over it, for days and costs [300]")
    parser.add_argument("--price", type=float, help="of a GPU for an hour, for costs")
    parser.add_argument("--pp", type=int, help="only this pipeline degree")
    parser.add_argument("--tp", type=int, help="only this tensor-parallel degree")
    parser.add_argument("--zero", type=int, choices=range(4), help="only this ZeRO stage")
    parser.add_argument("--top", type=int, default=8, help="layouts to show [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--write", metavar="DIR", help="write the best layout's JSON, host file and command there")
    parser.add_argument("--output", metavar="FILE", help="draw its memory and its pipeline into a png, svg or pdf")
    parser.add_argument(
        "--calibrate", metavar="FILE", help="measure this machine's accelerator instead, and write a file for --gpu"
    )
    reliability = parser.add_argument_group("goodput, instead of layouts")
    reliability.add_argument("--goodput", action="store_true", help="what failures cost on 8 GPUs up to --gpus")
    for flag, unit, text in _RELIABILITY:
        default = getattr(Reliability, flag)
        name = f"--{flag.replace('_', '-')}"
        reliability.add_argument(name, type=float, default=default, metavar=unit, help=f"{text} [%(default).4g]")
    reliability.add_argument("--wait-for-repair", action="store_true", help="the others wait for a host that failed")


def plan(arguments: argparse.Namespace) -> int:
    """Carry the command out."""
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.gpus is None:
        raise UserError("--gpus is missing: how many there would be, for example --gpus 8")
    if arguments.goodput:
        return _goodput(arguments)
    with_recipe(arguments)
    wishes = wishes_of(arguments)
    found = Search(wishes).run()
    if not found.fitting:
        raise UserError(_nothing_fits(found))
    if arguments.json:
        print(json.dumps(as_json(found, arguments)))
    else:
        _show(found, arguments)
    if arguments.write:
        write(found, found.fitting[0], Path(arguments.write), arguments)
    if arguments.output:
        from ds_vit.monitoring.figures import save_figure
        from ds_vit.tools.plan_picture import draw

        save_figure(draw(found, found.fitting[0]), Path(arguments.output))
    return 0


def _gpus_of_host(arguments: argparse.Namespace, gpu: Accelerator) -> int:
    """How many GPUs a host has."""
    if arguments.gpus_per_node is not None and arguments.gpus_per_node < 1:
        raise UserError(f"--gpus-per-node {arguments.gpus_per_node}: a host has at least 1")
    return arguments.gpus_per_node or gpu.gpus_per_node


def _goodput(arguments: argparse.Namespace) -> int:
    """The table of goodput by the number of GPUs."""
    per_host = _gpus_of_host(arguments, accelerator(arguments.gpu))
    figures = {flag: getattr(arguments, flag) for flag, *_ in _RELIABILITY}
    if min(figures["host_hours"], figures["checkpoint_seconds"]) <= 0 or min(figures.values()) < 0:
        raise UserError("--host-hours and --checkpoint-seconds must be above 0, and none of the others below")
    how = Reliability(**figures, elastic=not arguments.wait_for_repair)
    hosts, counts = 1, []
    while hosts * per_host <= max(arguments.gpus, per_host):
        counts.append(hosts)
        hosts *= 2
    found = [simulate(hosts, how) for hosts in counts]
    if arguments.json:
        print(json.dumps([{"gpus": one.hosts * per_host, **dataclasses.asdict(one)} for one in found]))
    else:
        lines = [["GPUs", "hosts", "a failure every", "checkpoint every", "by Daly's formula", "goodput"]]
        for one in found:
            minutes = (f"{seconds / 60:,.1f} min" for seconds in (one.interval_seconds, one.young_daly_seconds))
            row = [f"{one.hosts * per_host:,}", f"{one.hosts:,}", f"{one.failure_hours:,.1f} h", *minutes]
            lines.append([*row, f"{one.share:.1%}"])
        print_columns(make_console(), f"goodput, simulated: a host fails every {how.host_hours:,.0f} h", lines)
    if arguments.output:
        from ds_vit.monitoring.figures import save_figure
        from ds_vit.tools.plan_picture import draw_goodput

        save_figure(draw_goodput(found, per_host), Path(arguments.output))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure, write, and say what came of it; of several ranks all measure, and rank 0 says it."""
    from ds_vit.launching.process import discover
    from ds_vit.tools.calibrate import calibrate
    from ds_vit.tools.measure import ranks_met

    path, process = Path(arguments.calibrate), discover()
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--calibrate {path}: a file for --gpu ends in .yaml; for example {path.stem}.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"--calibrate {path}: {error.strerror or error}") from None
    if process.spans_hosts:
        raise UserError(
            f"--calibrate with {process.world_size} ranks, {process.local_world_size} of them here: measure one host's "
            "ranks (LOCAL_WORLD_SIZE says how many a host has); the link between hosts is --link"
        )
    with ranks_met(process) as device:
        found = calibrate(path, device)
    if process.rank:
        return 0
    if arguments.json:
        print(json.dumps(found))
        return 0
    lines = [["figure", "measured"]]
    for name, value in found.items():
        if isinstance(value, Mapping):
            lines.append([name, ", ".join(f"{key} {share:.2f}" for key, share in value.items())])
        else:
            lines.append([name, f"{value:.4g}" if isinstance(value, float) else str(value)])
    print_columns(make_console(), f"written to {arguments.calibrate}, for --gpu {arguments.calibrate}", lines)
    return 0


def with_recipe(arguments: argparse.Namespace) -> None:
    """Fill in what the command line leaves open from --recipe, in place."""
    if arguments.recipe:
        recipe = load_recipe(arguments.recipe)
        if (task := recipe.get("task", Classification.name)) != Classification.name:
            raise UserError(
                f"--recipe {arguments.recipe}: its task is {task}, and plans are made for {Classification.name} alone; "
                "give a recipe of that, or --model and --deepspeed_config"
            )
        for key in _OF_RECIPE:
            if key in recipe and not getattr(arguments, key):
                setattr(arguments, key, recipe[key])
    arguments.deepspeed_config = arguments.deepspeed_config and or_shipped(arguments.deepspeed_config)
    if not arguments.model:
        raise UserError("--model is missing, and no --recipe names one; for example --model vit_large_patch16_224")


def wishes_of(arguments: argparse.Namespace) -> Wishes:
    """What the command line asks for.

    Raises:
        UserError: a GPU, a link or a number that cannot be.
    """
    if arguments.gpus < 1 or arguments.global_batch < 1:
        raise UserError(f"--gpus {arguments.gpus} --global-batch {arguments.global_batch}: both must be at least 1")
    gpu = accelerator(arguments.gpu)
    per_node = _gpus_of_host(arguments, gpu)
    if arguments.gpus > per_node and arguments.gpus % per_node:
        nearest = max(1, round(arguments.gpus / per_node)) * per_node
        raise UserError(
            f"--gpus {arguments.gpus} are no whole number of hosts of {per_node}; the nearest is {nearest}, or say "
            "--gpus-per-node"
        )
    machine = Machine(gpu, arguments.gpus, per_node, link(gpu.inside, "inside"), link(arguments.link))
    told: dict[str, Any] = dict(_BF16)
    stage = arguments.zero
    if arguments.deepspeed_config:
        told = load_json(arguments.deepspeed_config)
        told = {key: value for key, value in told.items() if "batch_size" not in key and "accumulation" not in key}
        of_file = (told.get("zero_optimization") or {}).get("stage", 0)
        stage = of_file if stage is None else stage
    sixteen = {block for block in ("bf16", "fp16") if (told.get(block) or {}).get("enabled") in (True, "auto")}
    compute = "float16" if sixteen == {"fp16"} else "bfloat16" if sixteen else "float32"
    kwargs = arguments.model_kwargs
    spec = ModelSpec(
        arguments.model,
        num_classes=arguments.num_classes or 1000,
        img_size=arguments.img_size,
        model_kwargs=kwargs if isinstance(kwargs, Mapping) else dict(map(_argument, kwargs)),
    )
    return Wishes(
        spec,
        machine,
        arguments.global_batch,
        told,
        compute=compute,
        autocast=bool((told.get("torch_autocast") or {}).get("enabled")),
        model_ema=bool(arguments.model_ema),
        fixed_stage=stage,
        pp=arguments.pp,
        tp=arguments.tp,
    )


def _argument(word: str) -> tuple[str, Any]:
    key, sign, value = word.partition("=")
    if not sign:
        raise UserError(f"--model-kwargs {word}: write K=V, for example depth=12")
    return key, yaml.safe_load(value)


def _epochs(arguments: argparse.Namespace) -> float:
    """What days and costs are for."""
    return arguments.epochs or 300


def _row(found: Planned, one: Layouted, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is said of a layout."""
    days = _epochs(arguments) * arguments.images / one.images_per_second / 86400
    gpu_hours = 24 * days * arguments.gpus
    watts = found.wishes.machine.accelerator.watts
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
        "workers": _workers(found, one),
        "mfu": found.mfu(one),
        "days": days,
        "megawatt_hours": gpu_hours * watts / 1e6,
        "cost": arguments.price and gpu_hours * arguments.price,
    }


def _workers(found: Planned, one: Layouted) -> int:
    """How many of a loader's processes a rank needs, for JPEG files of ImageNet's size."""
    return math.ceil(one.images_per_second / one.layout.dp / found.wishes.machine.accelerator.images_per_worker)


def as_json(found: Planned, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, for programs."""
    best = found.fitting[0]
    return {
        "model": arguments.model,
        "num_parameters": found.parameters,
        "training_flops_an_image": found.flops,
        "global_batch": arguments.global_batch,
        "layouts": [_row(found, one, arguments) for one in found.fitting],
        "why": [why_slower(best, one) for one in found.fitting[1 : arguments.top]],
        "too_large": [
            {**_row(found, one, arguments), "short_of_bytes": int(one.needs - one.room)} for one in found.too_large
        ],
    }


def _show(found: Planned, arguments: argparse.Namespace) -> None:
    console, machine = make_console(), found.wishes.machine
    lines = [["layout", "micro-batch", "memory a rank", "step", "bubble", "MFU", "images/s", "days", "MWh"]]
    if arguments.price:
        lines[0].append("cost")
    for one in found.fitting[: arguments.top]:
        row = _row(found, one, arguments)
        lines.append(
            [
                str(one),
                f"{one.batch.micro_batch} x {one.batch.accumulation}",
                in_words(one.needs),
                f"{one.time.seconds:.3f} s",
                f"{row['bubble']:.0%}",
                f"{row['mfu']:.0%}",
                f"{one.images_per_second:,.0f}",
                f"{row['days']:,.1f}",
                f"{row['megawatt_hours']:,.1f}",
                *([f"{row['cost']:,.0f}"] if arguments.price else []),
            ]
        )
    title = (
        f"{arguments.model}, {found.parameters / 1e9:,.2f} B parameters, on {machine.gpus} x "
        f"{machine.accelerator.name}: {len(found.fitting)} layouts fit, {len(found.too_large)} do not"
    )
    print_columns(console, title, lines)
    best = found.fitting[0]

    def say(line: str) -> None:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    say(
        f"a step is {arguments.global_batch:,} images (--global-batch); days and MWh are those of "
        f"{_epochs(arguments):g} epochs of {arguments.images:,} images (--epochs, --images). --top N shows more "
        "layouts, --write DIR writes the files of the best."
    )
    if len(found.fitting) > 1:
        say(f"next best: {why_slower(best, found.fitting[1])}")
    if found.too_large:
        one = found.too_large[0]
        say(f"too large by the least: {one} needs {in_words(one.needs)}, {in_words(one.needs - one.room)} too much.")
    fullest = max(best.memory, key=lambda memory: memory.together)
    parts = {name: getattr(fullest, name) for name in _KINDS}
    said = ", ".join(f"{_KINDS[name]} {in_words(size)}" for name, size in parts.items() if size)
    say(f"memory of the best: {said}; {in_words(best.room)} a rank can be had.")
    say(
        f"data of the best: each of {best.layout.dp} replicas takes {best.images_per_second / best.layout.dp:,.0f} "
        f"images/s; of JPEG files of ImageNet's size that is --workers {_workers(found, best)}."
    )


_KINDS = {
    "weights": "weights",
    "masters": "masters",
    "optimizer": "optimizer state",
    "average": "average",
    "buckets": "ZeRO's buckets",
    "gathered": "weights put together",
    "going_back": "going back (activations, gradients)",
    "updating": "or updating",
}


def _nothing_fits(found: Planned) -> str:
    """What is missing, and what would help."""
    machine = found.wishes.machine
    if not found.too_large:
        return f"no layout of {machine.gpus} GPUs is legal with these wishes; drop --pp, --tp or --zero"
    one = found.too_large[0]
    more = machine.gpus * 2 ** math.ceil(math.log2(one.needs / one.room))
    return (
        f"no layout fits on {machine.gpus} x {machine.accelerator.name}: {one} comes nearest and needs "
        f"{in_words(one.needs)} of the {in_words(one.room)} that a rank has; try --gpus {more}, or free --pp, --tp, "
        "--zero"
    )
