"""Builds the components of a resolved run, each from its own config; `Training` assembles them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ds_vit.config import RunConfig
from ds_vit.config.run_folder import RunFolder
from ds_vit.config.units import Interval, parse_steps
from ds_vit.data.settings import Data
from ds_vit.data.sources.source import Source
from ds_vit.engine.start import device_of
from ds_vit.fault_tolerance.signals import Deadline, Signals
from ds_vit.fault_tolerance.watchdog import Watchdog
from ds_vit.launching.process import Process
from ds_vit.models.zoo import create_model
from ds_vit.monitoring.gradient_health import GradientHealth
from ds_vit.monitoring.metrics import Listeners, Reporter, Throughput, make_console
from ds_vit.monitoring.progress import Line
from ds_vit.monitoring.report.record import note_start
from ds_vit.monitoring.sheets import TrainingSheet
from ds_vit.optim.ema import Ema
from ds_vit.parallel.groups import Groups
from ds_vit.planner.counting import Flops, count_flops
from ds_vit.tasks.metrics import Batch
from ds_vit.training.auto_batch import MemoryAdvice, memory_of_rank
from ds_vit.training.build_engine import EngineConfig, build_engine
from ds_vit.training.callbacks import (
    AverageWeights,
    BadSteps,
    Callback,
    CheckReplicas,
    Clock,
    GradientStatistics,
    Profile,
    SetImageSize,
)
from ds_vit.training.checkpoint_manager import CheckpointConfig, CheckpointManager
from ds_vit.training.cost import PeakMemory
from ds_vit.training.evaluation import Evaluations, Watch, build_and_evaluate
from ds_vit.training.inputs import InputConfig, InputPipeline, reads_of
from ds_vit.training.resolve import Resolved, resolve_run
from ds_vit.training.step_log import StepLog
from ds_vit.training.tables import settings_of, show_dry_run, show_end, show_start, summarise
from ds_vit.training.trainer import Trainer


class Parts(NamedTuple):
    """The parts of a run that tools use without training it."""

    engine: EngineConfig
    inputs: InputConfig


def resolve_parts(
    config: RunConfig,
    explicit: frozenset[str],
    process: Process,
    *,
    on_cpu: bool,
    sources: tuple[Source, Source | None] | None = None,
    with_weights: bool = True,
) -> Parts:
    """Resolve a run for a tool; arguments and errors are those of `resolve_run`."""
    resolved = resolve_run(config, explicit, process, on_cpu=on_cpu, sources=sources, with_weights=with_weights)
    return Parts(engine_config(resolved), input_config(resolved))


def engine_config(resolved: Resolved) -> EngineConfig:
    """The engine of a resolved run."""
    config, deepspeed = resolved.config, resolved.deepspeed
    return EngineConfig(
        model=resolved.model,
        optimizer=resolved.optimizer,
        layout=resolved.layout,
        stage=resolved.layout.stage(resolved.process.rank),
        local_world_size=resolved.process.local_world_size,
        batch=resolved.data.batch,
        json=deepspeed.json,
        precision=deepspeed.precision,
        checkpointing=deepspeed.checkpointing,
        seed=config.seed,
        sequence_parallel=config.sequence_parallel,
        norms_fp32=config.norm_dtype == "float32",
        tf32=config.tf32,
        compile_mode=config.compile_mode if config.compile else None,
        graphs=resolved.graphs,
        averaged=config.model_ema,
    )


def input_config(resolved: Resolved) -> InputConfig:
    """The inputs of a resolved run."""
    config, data = resolved.config, resolved.data
    return InputConfig(
        task=resolved.model.task,
        data=Data(
            train_source=data.train_source,
            order=data.order,
            share=resolved.share,
            val_source=data.val_source,
            zeroshot=data.zeroshot,
            eval_rows=config.validation_batch_size or data.batch.micro_batch,
            sizes=resolved.image_sizes,
            workers=resolved.workers,
        ),
        total_steps=resolved.optimizer.total_steps if resolved.optimizer else 0,
        on_bad_image=config.on_bad_image,
        max_bad_images=config.max_bad_images,
        layout=resolved.layout,
        rank=resolved.process.rank,
    )


def reads(resolved: Resolved) -> Callable[[int], str]:
    """A function: rank → the part of each sample that it reads, "images", "targets" or "" for none."""
    task, layout, training = resolved.model.task, resolved.layout, resolved.optimizer is not None
    return lambda rank: reads_of(task, layout, rank, training=training)


def memory_advice(resolved: Resolved, *, on_cpu: bool) -> MemoryAdvice:
    """The memory that is free for this rank now, with advice on what lowers its need."""
    config, data = resolved.config, resolved.data
    rows = (config.validation_batch_size or data.batch.micro_batch) if data.val_source is not None else 0
    free = memory_of_rank("", resolved.process, on_cpu=on_cpu)
    return MemoryAdvice(engine_config(resolved), free, rows, config.auto_batch)


def checkpoint_config(resolved: Resolved) -> CheckpointConfig:
    """The checkpoints of a resolved run."""
    config = resolved.config
    return CheckpointConfig(
        interval=Interval.parse(config.checkpoint_interval, "--checkpoint-interval"),
        keep=config.keep_checkpoints,
        has_best=resolved.has_best,
        rollback=bool(config.rollback),
        deadline=Deadline(resolved.stop_at, config.stop_before_seconds or 0.0),
        order=resolved.data.order,
        resume=resolved.resume,
        schedule=resolved.rates,
        identity=resolved.identity,
        flags=resolved.settings,
    )


def _flops_by_size(resolved: Resolved) -> dict[int | None, Flops]:
    """The FLOPs of an image of each size that the run trains on; of the model's size under None."""
    sizes, model = resolved.image_sizes, resolved.model
    flops: dict[int | None, Flops] = {None: count_flops(model.whole, model.frozen)}
    for size in sizes.sizes if sizes else ():
        flops[size] = count_flops(create_model(dataclasses.replace(model.spec, img_size=size)), model.frozen)
    return flops


# ---- a training run --------------------------------------------------------------------------------------------------


class Training:
    """A training run on this rank: prints the start, builds the run and restores its checkpoint.

    The constructor and all methods are collectives.

    Args:
        resolved: the run.
        folder: of the output, shared by all ranks; rank 0 writes to it.
        groups: of the run.
        started: `time.perf_counter()` when the program began.
        watchdog: receives every bit of progress.
        memory: free memory of this rank.
        signals: received by this rank, or None where they are not listened for.
        listeners: as for `Reporter`.
    """

    def __init__(
        self,
        resolved: Resolved,
        folder: RunFolder,
        groups: Groups,
        started: float,
        watchdog: Watchdog,
        memory: MemoryAdvice,
        signals: Signals | None = None,
        listeners: Listeners = MappingProxyType({}),
    ) -> None:
        order, device = resolved.data.order, device_of(resolved.process.local_rank)
        self.resolved, self.folder, self.watchdog, self.signals = resolved, folder, watchdog, signals
        self.config = engine_config(resolved)
        self.clock = Clock(Throughput(), order.global_batch, started)
        self.peak = PeakMemory(self.config, device)
        self.flops: dict[int | None, Flops] = {}
        self.reporter = reporter = None
        if resolved.process.rank == 0:
            self.flops = _flops_by_size(resolved)
            self.reporter = reporter = Reporter(
                folder,
                total_steps=resolved.training.total_steps,
                console=make_console(),
                stamp=lambda step: {"epoch": order.epoch_of(max(step - 1, 0)), "wall_seconds": self.clock.wall_seconds},
                listeners=listeners,
            )
        console, more = None, []
        if reporter:
            console, more = reporter.console, self.peak.start_rows()
            more += memory.warning(self.peak.predicted_bytes)
        hosts = show_start(resolved, folder, device, self.flops.get(None), console, more)
        with self._doing("building the model"):
            self.engine = build_engine(self.config, device, groups)
            self.trainer = self._build_trainer()
        if reporter and self.engine.graphs is not None:
            self.engine.graphs.say = reporter.say
        with self._doing("reading the checkpoint") if resolved.resume else contextlib.nullcontext():
            self.trainer.restore()
        if reporter:
            reporter.start(self.trainer.step, self.engine.write_events)
            reporter.settings(*settings_of(resolved))
            if resolved.resume and self.trainer.step >= self.trainer.total_steps:
                steps = f"all of its {self.trainer.total_steps:,} steps are in the checkpoint"
                reporter.say(
                    f"this run is finished: {steps}; a longer one needs a larger --epochs and --allow-schedule-change"
                )
            precision, zero_stage = resolved.deepspeed.precision.name, resolved.deepspeed.zero_stage
            schedule = resolved.training.schedule
            note_start(folder, self.trainer.step, resolved.layout, zero_stage, device, hosts, schedule, precision)

    def run(self) -> str:
        """Train and save; returns the `exit` of summary.json."""
        try:
            exit_word = self.trainer.run()
        finally:
            self.engine.on_close.close()
            if self.reporter:
                self.reporter.close()
        lacks_files = int(self.reporter is not None and self.reporter.lacks_files)
        if self.engine.sum(torch.tensor(lacks_files, device=self.engine.device)) and exit_word == "completed":
            return "not all saved"
        return exit_word

    def finish(self, exit_word: str) -> dict[str, Any]:
        """Write summary.json and the report, and print the end; returns the contents of summary.json."""
        trainer, throughput = self.trainer, self.clock.throughput
        evaluations, skipped = trainer.evaluations, {"skipped_images": trainer.inputs.skipped.gather()}
        summary = summarise(
            self.config,
            evaluations.evaluations,
            evaluations.ema_evaluations,
            throughput,
            skipped,
            self.clock.wall_seconds,
            steps=trainer.step,
            exit_word=exit_word,
        )
        decoded = trainer.inputs.decoded
        if total := decoded["device"] + decoded["loader"]:
            summary["decoded_on_device"] = (decoded["device"] - decoded["refused"]) / total
        images, batch = throughput.total_images, self.config.batch.global_batch
        summary["memory"] = self.peak.figures()
        summary["step_seconds"] = {"measured": batch * throughput.total_seconds / images if images else None}
        if self.reporter:
            stopped = trainer.checkpoints.stopped
            show_end(self.config, self.resolved.process, self.folder, summary, self.reporter, stopped)
        self.engine.close()
        return summary

    def _doing(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Announce a phase to the watchdog, and print it on rank 0's terminal during the block."""
        self.watchdog.beat(0, what, patience=4)
        return self.reporter.line.doing(what) if self.reporter else contextlib.nullcontext()

    def _build_trainer(self) -> Trainer:
        """Build the loop around the engine: inputs, callbacks, evaluations, checkpoints (a collective)."""
        resolved, engine, folder, reporter = self.resolved, self.engine, self.folder, self.reporter
        config, model, throughput = resolved.config, resolved.model, self.clock.throughput
        ema = Ema(engine.zero_map, config.model_ema_decay, config.model_ema_warmup) if config.model_ema else None
        if config.spike_factor is not None:
            engine.guard.watch_spikes(config.spike_factor)
        samples = folder.samples if config.log_samples else None
        inputs = InputPipeline(input_config(resolved), engine, throughput, samples, folder.skipped)
        if reporter and config.log_images:
            names, number = model.task.class_names, resolved.data.batch.accumulation
            sheet = TrainingSheet(model.image, resolved.data.train_source, names, config.log_images, number)
            inputs.look = partial(sheet.add, save=reporter.training_images)
        sees_images = resolved.layout.pp == 1 and not config.sequence_parallel
        draws = sees_images and (bool(model.task.class_names) or bool(model.task.teachers))
        return Trainer(
            engine,
            inputs,
            resolved.training.schedule,
            resolved.training.horizon,
            Evaluations(engine, inputs, ema, config.eval_interval, draws, self.watchdog, reporter),
            self._callbacks(inputs, ema),
            CheckpointManager(
                checkpoint_config(resolved),
                folder.checkpoints,
                engine,
                model.task,
                model.saved_shapes,
                engine.teachers or ema,
                throughput,
                self.signals or Signals(),
                reporter,
            ),
            self.watchdog,
            folder,
        )

    def _callbacks(self, inputs: InputPipeline, ema: Ema | None) -> list[Callback]:
        """The callbacks of each step, in their order."""
        resolved, engine, reporter = self.resolved, self.engine, self.reporter
        config, sizes, precision = resolved.config, resolved.image_sizes, resolved.deepspeed.precision.name
        throughput = self.clock.throughput
        stops = config.on_nonfinite == "stop"
        bad_steps = BadSteps(engine, reporter, stop=stops, max_rollbacks=config.rollback, fp16="fp16" in precision)
        callbacks: list[Callback] = [bad_steps]
        if ema is not None:
            callbacks.append(AverageWeights(ema))
        if sizes is not None:
            callbacks.append(SetImageSize(engine, sizes, resolved.model.whole.patch_embed.patch_size))
        if config.grad_stats_interval:
            health = GradientHealth(engine.zero_map, engine.clipped_by)
            callbacks.append(GradientStatistics(health, config.grad_stats_interval, bad_steps, reporter))
        callbacks.append(self.clock)
        if config.check_replicas:
            callbacks.append(CheckReplicas(engine, config.check_replicas))
        callbacks.append(
            StepLog(engine, inputs, resolved.log_interval, precision, self.flops, throughput, self.peak, reporter)
        )
        if steps := parse_steps(config.profile_steps, "--profile-steps"):
            of_rank = (self.folder.profile, engine.groups, engine.device)
            callbacks.append(Profile(steps, *of_rank, throughput, self.watchdog, reporter))
        return callbacks


# ---- evaluation only -------------------------------------------------------------------------------------------------


def run_evaluation(
    resolved: Resolved, folder: RunFolder, groups: Groups, started: float, watchdog: Watchdog
) -> dict[str, Any]:
    """`--eval-only`: evaluate, and write a run's files (a collective); the arguments are those of `Training`.

    Returns:
        What summary.json holds, on every rank.
    """
    device, task = device_of(resolved.process.local_rank), resolved.model.task
    reporter, console, flops = None, None, None
    if resolved.process.rank == 0:
        stamp = lambda step: {"epoch": 0, "wall_seconds": time.perf_counter() - started}  # noqa: E731
        reporter = Reporter(folder, total_steps=0, console=make_console(), stamp=stamp)
        console, flops = reporter.console, count_flops(resolved.model.whole)
    show_start(resolved, folder, device, flops, console)

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        watchdog.beat(0, "evaluation", patience=watchdog.first_patience)
        return watchdog.micro_batches(batches)

    pictures: dict[str, torch.Tensor] = {}
    watchdog.beat(0, "building the model", patience=4)
    watch = Watch(watched, lambda: watchdog.beat(0, "evaluation"), pictures.update, doing=Line(console).doing)
    config, inputs = engine_config(resolved), input_config(resolved)
    engine, figures = build_and_evaluate(config, inputs, device, groups, watch, folder.skipped)
    seconds = time.perf_counter() - started
    skipped = {"skipped_images": len(inputs.data.validation) - int(figures["images"])}
    summary = summarise(config, [figures], [], Throughput(), skipped, seconds, steps=0, exit_word="completed")
    if reporter:
        reporter.start(events=engine.write_events)
        reporter.eval({"step": 0, **figures}, task.figures)
        reporter.pictures(0, pictures)
        reporter.close()
        show_end(config, resolved.process, folder, summary, reporter)
    engine.close()
    return summary


def run_dry(resolved: Resolved, device_type: str, folder: Path) -> None:
    """`--dry-run`: show the run and what it would need and write."""
    flops = count_flops(resolved.model.whole, resolved.model.frozen)
    show_dry_run(resolved, engine_config(resolved), flops, torch.device(device_type), folder)
