"""What `ds-vit plan --write` leaves of a layout: DeepSpeed's JSON, a host file, and the command that starts it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from ds_vit.config.run_folder import RunFolder, write_json
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.planner.search import Layouted, Planned, json_at_stage


def write(found: Planned, one: Layouted, folder: Path, arguments: argparse.Namespace) -> None:
    """Write deepspeed.json, hostfile and command.sh of a layout.

    Raises:
        UserError: the folder cannot be written to.
    """
    machine, wishes = found.wishes.machine, found.wishes
    told = {**json_at_stage(wishes.json, one.stage), **one.batch.as_json()}
    per_host = min(machine.gpus, machine.per_node)
    hosts = "".join(f"node{i + 1} slots={per_host}\n" for i in range(max(1, machine.gpus // machine.per_node)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(RunFolder(folder).deepspeed, told)
        (folder / "hostfile").write_text(hosts)
        (folder / "command.sh").write_text(command(one, folder, arguments))
    except OSError as error:
        raise UserError(f"--write {folder}: {error.strerror or error}") from None


def training_words(one: Layouted, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The flags of training that a layout comes to."""
    words = ["--deepspeed_config", str(RunFolder(folder).deepspeed), "--model", arguments.model]
    if arguments.recipe:
        words = ["--recipe", arguments.recipe, *words]
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
        words.append(f"--grad-checkpointing={one.recomputing}")  # an empty word of its own is lost in some shell
    return words


def command(one: Layouted, folder: Path, arguments: argparse.Namespace) -> str:
    """The script that starts it: --dry-run first, on one process that is told how many there will be."""
    words = shlex.join(training_words(one, folder, arguments))
    return (
        "#!/usr/bin/env bash\n"
        f"# {arguments.model} on {arguments.gpus} GPUs, {one}: planned by ds-vit plan. From the clone's folder:\n"
        f"#     bash {folder / 'command.sh'} --data-dir DIR --output RUN\n"
        f"# Write the hosts' names into {folder / 'hostfile'} before.\n"
        "set -euo pipefail\n"
        f'RANK=0 LOCAL_RANK=0 WORLD_SIZE={arguments.gpus} python launch/train.py {words} "$@" --dry-run\n'
        f'bash launch/run_hostfile.sh --hostfile {shlex.quote(str(folder / "hostfile"))} launch/train.py {words} "$@"\n'
    )
