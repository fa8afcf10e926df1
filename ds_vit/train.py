"""Train: parse → resolve → groups → model and engine → steps → end.

ds-vit train --deepspeed_config ds_configs/cpu_zero1_fp32.json --recipe launch/recipes/digits.yaml -b 64
deepspeed launch/train.py --deepspeed_config ds_configs/zero1_bf16.json --data-dir photos --model vit_base_patch16_224
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ds_vit import config as flags
from ds_vit.config.units import parse_seconds
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.signals import Signals
from ds_vit.launching.process import Process, job_end
from ds_vit.launching.this_host import refuse_unusable_gpus
from ds_vit.monitoring.progress import doing
from ds_vit.training.program import guarded, process_group, without_collection

if TYPE_CHECKING:
    from ds_vit.config.run_folder import RunFolder
    from ds_vit.data.sources.source import Source
    from ds_vit.fault_tolerance.watchdog import Watchdog
    from ds_vit.training.resolve import Resolved


def main(argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Run `launch/train.py`, or `ds-vit train` on one rank, with these arguments.

    Returns:
        One of `fault_tolerance.exit_codes`; where it is not 0, one line on stderr says what is wrong and what to do.
    """

    def body(process: Process) -> int:
        config, explicit = flags.parse(argv, program, str(__doc__))
        with Signals().installed(is_local_main=process.local_rank == 0) as signals:
            summary, _ = run(config, explicit, process, signals)
        return exit_codes.OF_WORD[summary["exit"]]

    return guarded(program, body, "what came after the last checkpoint is not saved")


def notes_on_machine(resolved: Resolved, num_gpus: int, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Lines for people where a run uses less of the machine than its command suggests.

    Args:
        resolved: the run.
        num_gpus: that torch can use, 0 on a CPU.
        environ: where DS_ACCELERATOR may say that the CPU is intended.
    """
    deepspeed = resolved.deepspeed
    if num_gpus > 1 and resolved.process.launcher == "none":
        return (
            f"one of {num_gpus} GPUs is used; `ds-vit launch train …` with the same flags trains on all {num_gpus}",
        )
    if num_gpus == 0 and deepspeed.asks_for_gpu and "DS_ACCELERATOR" not in environ:
        return (
            f"warning: no usable GPU: this run trains on the CPU, in {deepspeed.precision.name}, although "
            f"{deepspeed.path} is made for GPUs; if that is intended, set DS_ACCELERATOR=cpu",
        )
    return ()


def run(
    config: flags.RunConfig,
    explicit: frozenset[str],
    process: Process,
    signals: Signals | None = None,
    *,
    again: bool = False,
    sources: tuple[Source, Source | None] | None = None,
    listeners: Mapping[str, Callable[[Mapping[str, Any]], None]] = MappingProxyType({}),
) -> tuple[dict[str, Any], RunFolder]:
    """Carry out one run: prepare, start the ranks, train, evaluate, save.

    Args:
        config: the flags and the recipe.
        explicit: which of them were given.
        process: this rank.
        signals: received by this process; None for a caller who handles them.
        again: as for `process_group`.
        sources: the images of training and evaluation, where the flags do not name them.
        listeners: kind of a row of metrics.jsonl → what is called with each such row, on rank 0.

    Returns:
        What summary.json holds, on every rank (of --dry-run only how it ended); the run's folder.

    Raises:
        UserError: invalid input; before the process group exists wherever that can be known.
    """
    started, is_main = time.perf_counter(), process.rank == 0
    with doing("importing torch and DeepSpeed", shown=is_main), without_collection():
        device_type, num_gpus = _import_deepspeed(config)
        import torch.distributed as dist

        from ds_vit.config.run_folder import RunFolder
        from ds_vit.fault_tolerance.watchdog import Watchdog
        from ds_vit.parallel.groups import build_groups
        from ds_vit.training.build import Training, memory_advice, run_dry, run_evaluation
        from ds_vit.training.output import check_folder, check_shared, default_folder, move_unsaved_run
        from ds_vit.training.resume import can_resume_in

    # ---- resolve ----------------------------------------------------------------------------------------------------
    on_cpu, resumes = device_type == "cpu", can_resume_in(config.output, config.resume)
    with doing("listing the images, building the model", shown=is_main):
        resolved = _resolve(config, explicit, process, sources, on_cpu=on_cpu, num_gpus=num_gpus)
    if config.output and is_main:
        check_folder(config.output, resumes=resumes)
    if config.dry_run:
        path = Path(config.output or default_folder(config.model))
        if is_main:
            run_dry(resolved, device_type, path)
        return {"exit": "dry run"}, RunFolder(path)

    # ---- groups -----------------------------------------------------------------------------------------------------
    with contextlib.ExitStack() as stack:
        name = [stack.enter_context(_claim_folder(config, signals, resumes=resumes)) if is_main else config.output]
        stack.enter_context(process_group(process, on_cpu=on_cpu, again=again))
        if signals is not None:
            signals.ranks_have_met = not config.eval_only
            signals.moment = "while no training is under way"
        dist.broadcast_object_list(name, src=0)  # the default name has the time, and the clocks of two hosts differ
        folder = RunFolder(Path(name[0]))
        check_shared(folder.path, process)
        watchdog = stack.enter_context(
            Watchdog(
                resolved.stall_seconds,
                resolved.first_patience,
                rank=process.rank,
                world_size=process.world_size,
                local_rank=process.local_rank,
            )
        )
        resolved = _agree(resolved, watchdog, on_cpu=on_cpu)
        groups = build_groups(resolved.layout, saves=not config.eval_only)
        if is_main and (note := move_unsaved_run(folder.path)):
            print(note, flush=True)
        memory = memory_advice(resolved, on_cpu=on_cpu)
        stack.enter_context(memory.errors())
        if config.eval_only:
            return run_evaluation(resolved, folder, groups, started, watchdog), folder

        # ---- model, engine, and everything around the steps ---------------------------------------------------------
        training = Training(resolved, folder, groups, started, watchdog, memory, signals, listeners)

        # ---- steps --------------------------------------------------------------------------------------------------
        exit_word = training.run()

        # ---- end ----------------------------------------------------------------------------------------------------
        return training.finish(exit_word), folder


def _import_deepspeed(config: flags.RunConfig) -> tuple[str, int]:
    """Import torch and DeepSpeed; gives the type of the accelerator, and how many GPUs there are."""
    from ds_vit.engine.start import quiet_deepspeed

    quiet_deepspeed(config.verbose)  # it prints while it is imported
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_vit.device import cuda_of_torch

    device_type = get_accelerator().device_name()
    names_cpu = isinstance(config.deepspeed_config, str) and Path(config.deepspeed_config).name.startswith("cpu")
    if device_type == "cpu" and not names_cpu:
        refuse_unusable_gpus(torch.__version__, cuda_of_torch(), os.environ)
    return device_type, 0 if device_type == "cpu" else get_accelerator().device_count()


def _resolve(
    config: flags.RunConfig,
    explicit: frozenset[str],
    process: Process,
    sources: tuple[Source, Source | None] | None,
    *,
    on_cpu: bool,
    num_gpus: int,
) -> Resolved:
    """Resolve the run, as far as that is possible before the ranks meet."""
    from ds_vit.training.auto_batch import choose_batch
    from ds_vit.training.build import engine_config, reads
    from ds_vit.training.inputs import count_workers
    from ds_vit.training.resolve import resolve_run

    stop_at = time.time() + parse_seconds(config.time_limit, "--time-limit") if config.time_limit else job_end()
    resolved = resolve_run(config, explicit, process, on_cpu=on_cpu, stop_at=stop_at, sources=sources)
    if config.auto_batch and (config.dry_run or (on_cpu and config.memory)):
        resolved = resolved.with_batch(*choose_batch(engine_config(resolved), config.memory, process, on_cpu=on_cpu))
    if config.workers == "auto":
        resolved = dataclasses.replace(resolved, workers=count_workers(reads(resolved), process))
    return dataclasses.replace(resolved, machine_notes=notes_on_machine(resolved, num_gpus))


def _agree(resolved: Resolved, watchdog: Watchdog, *, on_cpu: bool) -> Resolved:
    """Choose what depends on the free memory and the cores of every rank (a collective)."""
    from ds_vit.training.auto_batch import agree_on_batch
    from ds_vit.training.build import engine_config, reads
    from ds_vit.training.inputs import count_workers

    config, process = resolved.config, resolved.process
    if config.auto_batch and not (on_cpu and config.memory):
        watchdog.beat(0, "looking for the micro-batch", patience=4)
        resolved = resolved.with_batch(*agree_on_batch(engine_config(resolved), config.memory, process, on_cpu=on_cpu))
    if config.workers == "auto":
        resolved = dataclasses.replace(resolved, workers=count_workers(reads(resolved), process))
    return resolved


@contextlib.contextmanager
def _claim_folder(config: flags.RunConfig, signals: Signals | None, *, resumes: bool) -> Iterator[str]:
    """Lock the output folder for the block, on rank 0."""
    from ds_vit.training.output import FolderLock, check_folder, make_default_folder

    path = config.output or make_default_folder(config.model)
    with FolderLock(path, made=not config.output) as lock:
        if signals is not None:
            signals.before_end = lock.release
        check_folder(path, resumes=resumes)  # again: another run may have been here meanwhile
        yield path
