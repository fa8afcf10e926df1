"""Train: parse → resolve → groups → model and engine → inputs → loop → end.

ds-vit train --deepspeed_config ds_configs/cpu_zero1_fp32.json --recipe launch/recipes/digits.yaml -b 64
deepspeed launch/train.py --deepspeed_config ds_configs/zero1_bf16.json --data-dir photos --model vit_base_patch16_224
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ds_vit.config import parser as flags
from ds_vit.config.schema import RunConfig
from ds_vit.config.units import parse_seconds, parse_steps
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.signals import Signals
from ds_vit.launching.process import Process, job_end
from ds_vit.launching.this_host import refuse_unusable_gpus
from ds_vit.monitoring.progress import doing
from ds_vit.training.program import guarded, process_group, without_collection

if TYPE_CHECKING:
    from ds_vit.config.run_folder import RunFolder
    from ds_vit.data.sources.source import Source


def main(argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Run `launch/train.py`, or `ds-vit train` on one rank, with these arguments.

    Returns:
        One of `fault_tolerance.exit_codes`; where it is not 0, one line on stderr says what is wrong and what to do.
    """

    def body(process: Process) -> int:
        config = flags.parse(argv, program, str(__doc__))
        with Signals().installed(is_local_main=process.local_rank == 0) as signals:
            summary, _ = train(config, process, signals)
        return exit_codes.OF_WORD[summary["exit"]]

    return guarded(program, body, "what came after the last checkpoint is not saved")


def train(
    config: RunConfig,
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
    started, is_main, signals = time.perf_counter(), process.rank == 0, signals or Signals()
    with doing("importing torch and DeepSpeed", shown=is_main), without_collection():
        device_type, num_gpus = _import_deepspeed(config)
        import torch
        import torch.distributed as dist

        from ds_vit.config.run_folder import RunFolder
        from ds_vit.engine.start import device_of
        from ds_vit.fault_tolerance.watchdog import Watchdog
        from ds_vit.monitoring.metrics import Reporter, Throughput, make_console
        from ds_vit.monitoring.report.record import note_start
        from ds_vit.monitoring.sheets import TrainingSheet
        from ds_vit.optim.ema import Ema
        from ds_vit.parallel.groups import build_groups
        from ds_vit.training import callbacks, output
        from ds_vit.training.auto_batch import MemoryAdvice, agree_on_batch, choose_batch, memory_of_rank
        from ds_vit.training.build_engine import build_engine
        from ds_vit.training.checkpoint_manager import CheckpointManager
        from ds_vit.training.cost import PeakMemory, flops_by_size
        from ds_vit.training.evaluation import Evaluations, evaluate_only
        from ds_vit.training.inputs import InputPipeline, with_workers
        from ds_vit.training.resolve import resolve
        from ds_vit.training.resume import can_resume_in
        from ds_vit.training.run import World
        from ds_vit.training.step_log import StepLog
        from ds_vit.training.tables import settings_of, show_dry_run, show_end, show_start, summarise
        from ds_vit.training.trainer import Trainer

    # ---- resolve -----------------------------------------------------------------------------------------------------
    on_cpu, resumes = device_type == "cpu", can_resume_in(config.output, config.resume)
    stop_at = time.time() + parse_seconds(config.time_limit, "--time-limit") if config.time_limit else job_end()
    world = World(process, on_cpu, stop_at, num_gpus, "DS_ACCELERATOR" in os.environ)
    with doing("listing the images, building the model", shown=is_main):
        run = resolve(config, world, sources)
        chooses = config.auto_batch and (config.dry_run or (on_cpu and config.memory))  # else when the ranks have met
        run = choose_batch(run, on_cpu=on_cpu) if chooses else run
    if config.output and is_main:
        output.check_folder(config.output, resumes=resumes)
    if config.dry_run:
        path = Path(config.output or output.default_folder(config.model))
        if is_main:
            show_dry_run(with_workers(run), torch.device(device_type), path)
        return {"exit": "dry run"}, RunFolder(path)

    with contextlib.ExitStack() as stack:
        # ---- groups --------------------------------------------------------------------------------------------------
        name = [config.output]
        if is_main:
            name = [config.output or output.make_default_folder(config.model)]
            lock = stack.enter_context(output.FolderLock(name[0], made=not config.output))
            signals.before_end = lock.release
            output.check_folder(name[0], resumes=resumes)  # again: another run may have been here meanwhile
        stack.enter_context(process_group(process, on_cpu=on_cpu, again=again))
        signals.ranks_have_met = not config.eval_only
        signals.moment = "while no training is under way"
        dist.broadcast_object_list(name, src=0)  # the default name has the time, and the clocks of two hosts differ
        folder = RunFolder(Path(name[0]))
        output.check_shared(folder.path, process)
        watchdog = stack.enter_context(
            Watchdog(
                config.stall_seconds,
                compiles=config.compile,
                rank=process.rank,
                world_size=process.world_size,
                local_rank=process.local_rank,
            )
        )
        if config.auto_batch and not chooses:
            watchdog.beat(0, "looking for the micro-batch", patience=4)
            run = agree_on_batch(run, on_cpu=on_cpu)
        run = with_workers(run)
        groups = build_groups(run.layout, saves=not config.eval_only)
        if is_main and (note := output.move_unsaved_run(folder.path)):
            print(note, flush=True)
        memory = MemoryAdvice(run, memory_of_rank("", process, on_cpu=on_cpu))
        stack.enter_context(memory.errors())

        # ---- the start's table ---------------------------------------------------------------------------------------
        device, order = device_of(process.local_rank), run.data.order
        clock, peak = callbacks.Clock(Throughput(), order.global_batch, started), PeakMemory(run, device)
        throughput, reporter, console, flops, rows = clock.throughput, None, None, {}, []
        if is_main:
            stamp = lambda step: {"epoch": order.epoch_of(max(step - 1, 0)), "wall_seconds": clock.wall_seconds}  # noqa: E731
            console = make_console()
            reporter = Reporter(folder, total_steps=run.total_steps, console=console, stamp=stamp, listeners=listeners)
            flops = flops_by_size(run)
            if run.schedule is not None:
                rows = [*peak.start_rows(), *memory.warning(peak.predicted_bytes)]
        hosts = show_start(run, folder, device, flops.get(None), console, rows)

        def phase(what: str) -> contextlib.AbstractContextManager[object]:
            watchdog.beat(0, what, patience=4)
            return reporter.line.doing(what) if reporter else contextlib.nullcontext()

        # ---- model and engine ----------------------------------------------------------------------------------------
        with phase("building the model"):
            engine = build_engine(run, device, groups)
        inputs = InputPipeline(run, engine, throughput, folder)
        if run.schedule is None:
            return evaluate_only(Evaluations(engine, inputs, None, watchdog, reporter), folder, started), folder

        # ---- what training adds --------------------------------------------------------------------------------------
        ema = Ema(engine.zero_map, config.model_ema_decay, config.model_ema_warmup) if config.model_ema else None
        if config.spike_factor is not None:
            engine.guard.factor = config.spike_factor
        if reporter and engine.graphs is not None:
            engine.graphs.say = reporter.say
        if reporter and config.log_images:
            names, number = run.model.task.class_names, run.batch.accumulation
            sheet = TrainingSheet(run.model.task.image, run.data.train_source, names, config.log_images, number)
            inputs.look = partial(sheet.add, save=reporter.training_images)
        evaluations = Evaluations(engine, inputs, ema, watchdog, reporter)

        # ---- the loop ------------------------------------------------------------------------------------------------
        bad_steps = callbacks.BadSteps(run, engine, reporter)
        step_callbacks: list[callbacks.Callback] = [bad_steps]  # in this order
        if ema is not None:
            step_callbacks.append(callbacks.AverageWeights(ema))
        if run.data.sizes is not None:
            step_callbacks.append(callbacks.SetImageSize(run, engine))
        if config.grad_stats_interval:
            step_callbacks.append(callbacks.GradientStatistics(run, engine, bad_steps, reporter))
        step_callbacks.append(clock)
        if config.check_replicas:
            step_callbacks.append(callbacks.CheckReplicas(run, engine))
        step_callbacks.append(StepLog(engine, inputs, flops, peak, reporter))
        if profiled := parse_steps(config.profile_steps, "--profile-steps"):
            step_callbacks.append(callbacks.Profile(profiled, folder.profile, engine, throughput, watchdog, reporter))
        average = engine.context.teachers or ema
        checkpoints = CheckpointManager(run, folder.checkpoints, engine, average, throughput, signals, reporter)
        trainer = Trainer(run.schedule, engine, inputs, evaluations, step_callbacks, checkpoints, watchdog, folder)
        with phase("reading the checkpoint") if run.output.resume else contextlib.nullcontext():
            trainer.restore()
        if reporter:
            reporter.start(trainer.step, engine.write_events)
            reporter.settings(*settings_of(run))
            if run.output.resume and trainer.step >= run.total_steps:
                steps = f"all of its {run.total_steps:,} steps are in the checkpoint"
                reporter.say(
                    f"this run is finished: {steps}; a longer one needs a larger --epochs and --allow-schedule-change"
                )
            zero_stage, precision = run.engine.zero_stage, run.engine.precision.name
            note_start(folder, trainer.step, run.layout, zero_stage, device, hosts, run.schedule.rate, precision)
        try:
            exit_word = trainer.run()
        finally:
            engine.on_close.close()
            if reporter:
                reporter.close()
        lacks_files = torch.tensor(int(reporter is not None and reporter.lacks_files), device=device)
        if engine.sum(lacks_files) and exit_word == "completed":
            exit_word = "not all saved"

        # ---- end -----------------------------------------------------------------------------------------------------
        measured = {"steps": trainer.step, "wall_seconds": clock.wall_seconds, "exit": exit_word}
        measured |= {"skipped_images": inputs.skipped.gather(), "memory": peak.figures()}
        images, seconds = throughput.total_images, throughput.total_seconds
        measured["step_seconds"] = {"measured": order.global_batch * seconds / images if images else None}
        if decoded := inputs.decoded["device"] + inputs.decoded["loader"]:
            measured["decoded_on_device"] = (inputs.decoded["device"] - inputs.decoded["refused"]) / decoded
        summary = summarise(run, evaluations.evaluations, evaluations.ema_evaluations, throughput, measured)
        if reporter:
            show_end(run, folder, summary, reporter, checkpoints.stopped)
        engine.close()
        return summary, folder


def _import_deepspeed(config: RunConfig) -> tuple[str, int]:
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
