"""Resolve flags, recipe and JSON into a run: everything is opened and checked, nothing is started.

Every error in a run's settings is found here, before any process group exists and before anything is written. The
parts are resolved in this order:

    deepspeed.py    the JSON, read
    engine.py       degrees of parallelism, compilation
    data.py         the splits, the batch arithmetic, the order of the samples
    model.py        the model, the task, the pipeline stages
    optimizer.py    the optimizer, its rate, the number of steps
    deepspeed.py    the JSON, written out with the resolved numbers

Only training/build.py, training/tables.py and train.py receive the result. Every component takes a small config of
its own, which training/build.py makes from it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from ds_vit import config as flags
from ds_vit.config import RunConfig
from ds_vit.config.batch import BatchSizes
from ds_vit.config.flag import Scope
from ds_vit.config.schema import KEY_OF_FLAG, names_with
from ds_vit.config.units import all_sizes
from ds_vit.data.image_sizes import ImageSizes, size_schedule
from ds_vit.data.sampler import Share
from ds_vit.data.settings import PIXEL_FLAGS, Workers
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.models.layers import BlockLayer
from ds_vit.optim.build import rules_of
from ds_vit.parallel.layout import Layout
from ds_vit.tasks import find_task, idle_flags
from ds_vit.training.resolve.data import DataConfig, describe_images, resolve_data
from ds_vit.training.resolve.data import with_batch as data_with_batch
from ds_vit.training.resolve.deepspeed import DeepSpeedSettings, read, sum_micro_batches, write_out
from ds_vit.training.resolve.deepspeed import with_batch as json_with_batch
from ds_vit.training.resolve.engine import check_compilation, replays_steps, resolve_layout
from ds_vit.training.resolve.model import ModelConfig, find_fastest_stages, resolve_model
from ds_vit.training.resolve.optimizer import DEFAULT_EPOCHS, OptimizerConfig, resolve_optimizer
from ds_vit.training.resume import Resume, check_same_run, check_same_schedule
from ds_vit.training.resume import find as find_resume

DEFAULT_STALL_SECONDS = 300.0  # below the ten minutes after which NCCL gives up, with less to say
LOGGED_ROWS = 50  # of a short run: enough for a curve
MOST_LOG_INTERVAL = 50  # timm's
COMPILE_SECONDS = 3600.0  # of the slowest mode, with as many ranks as cores


@dataclass(frozen=True)
class Resolved:
    """A run, resolved.

    Attributes:
        config: the flags, `num_classes` and `log_interval` resolved.
        process: this rank.
        layout: degrees of parallelism.
        data: the splits, the batch arithmetic, the order of the samples.
        model: the model and its task.
        optimizer: the optimizer, its rate and its steps; None in evaluation only.
        deepspeed: the DeepSpeed JSON.
        resume: the checkpoint to resume from, or None.
        stop_at: `time.time()` at which a scheduler or --time-limit ends the run.
        changes: from the checkpoint's run, as lines for people.
        graphs: whether a micro-batch's passes are captured and replayed.
        workers: loader processes of this rank.
        machine_notes: how the run uses this machine, as lines for people.
    """

    config: RunConfig
    process: Process
    layout: Layout
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig | None
    deepspeed: DeepSpeedSettings
    resume: Resume | None = None
    stop_at: float | None = None
    changes: tuple[str, ...] = ()
    graphs: bool = False
    workers: Workers = field(default=Workers(0))
    machine_notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def training(self) -> OptimizerConfig:
        """`optimizer` of a run that trains."""
        assert self.optimizer is not None, "there is no optimizer in evaluation only"
        return self.optimizer

    @property
    def log_interval(self) -> int:
        """Steps between rows of metrics.jsonl, of a run that trains."""
        assert self.config.log_interval is not None, "resolve_run() resolves it"
        return self.config.log_interval

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything worth a line for people."""
        start: tuple[str, ...] = ()
        if self.config.resume == "auto" and self.resume is None:
            start = (f"--resume auto: there is no checkpoint in {self.config.output} yet; the run begins at step 0",)
        of_optimizer = self.optimizer.notes if self.optimizer else ()
        of_parts = (*self.data.notes, *self._bubble, *self.model.notes, *of_optimizer)
        return (*self.machine_notes, *self.deepspeed.notes, *start, *of_parts, *self.changes)

    @property
    def _bubble(self) -> tuple[str, ...]:
        pp, number = self.layout.pp, self.data.batch.accumulation
        if pp == 1 or self.optimizer is None:
            return ()
        line = (
            f"pipeline: {number} micro-batches through {pp} stages, bubble {(pp - 1) / (number + pp - 1):.0%} of a step"
        )
        return (line + (" (more accumulation makes it smaller)" if number < pp else ""),)

    def with_batch(self, batch: BatchSizes, note: str) -> Resolved:
        """The same run with the micro-batches that --auto-batch chose, and a line that says so."""
        data = data_with_batch(self.data, batch, note)
        return dataclasses.replace(self, data=data, deepspeed=json_with_batch(self.deepspeed, batch, data.origins))

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that must be equal in a run that resumes from a checkpoint of this one."""
        sizes, source = self.image_sizes, self.data.train_source
        shapes = self.model.saved_shapes
        return {
            "task": self.config.task,
            **{tower: checkpoint.fingerprint for tower, checkpoint in self.model.fixed.items()},
            **self.model.task.identity(),
            "model": self.config.model,
            "num_classes": self.config.num_classes,
            "img_size": list(self.model.image.img_size),
            "img_size_schedule": sizes.in_words if sizes and self.config.img_size_schedule else "",
            "train_img_sizes": sorted(self.config.train_img_sizes),
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "seed": self.config.seed,
            "images": len(source),
            "class_names": list(source.class_names),
            "decode": self.config.decode,
            "mixture": [list(part) for part in source.mixture],
            "samples": source.fingerprint,
            "optimizer": self.training.cls.__name__,
            **rules_of(self.training.cls).identity(self.training.fallback),
            "trained": [name for name in shapes if name not in self.model.frozen],
            **({"task_schedules": self._task_schedules} if self._task_schedules else {}),
        }

    @property
    def has_best(self) -> bool:
        """Whether evaluations choose the best weights."""
        return self.data.val_source is not None and self.model.task.figures[0].summed_up

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a checkpoint stores: flags, and the numbers of the JSON that the curve depends on."""
        return {**resolved_flags(self), "batch_size": self.config.batch_size, **self.training.numbers}

    @property
    def _task_schedules(self) -> str:
        """The names of the task's scheduled values, and over how many steps they are scheduled; "" without any."""
        horizon = self.training.horizon
        names = sorted(self.model.task.schedules(1, horizon))
        return f"{', '.join(names)} over {horizon.total_steps} steps" if names else ""

    @property
    def rates(self) -> dict[str, Any]:
        """The source of the learning rate, as a checkpoint stores it: the flags' schedule, or the JSON's scheduler."""
        if self.training.schedule is not None:
            return dataclasses.asdict(self.training.schedule)
        block = dict(self.deepspeed.json.given("scheduler"))
        if block.get("type") == "WarmupCosineLR":  # the one whose rates are shares of the optimizer's
            block["lr"] = self.training.lr
        return block

    @property
    def image_sizes(self) -> ImageSizes | None:
        """Which size of images each step trains on; None where all have the model's size."""
        text, drawn = self.config.img_size_schedule, self.config.train_img_sizes
        if drawn:
            return ImageSizes(tuple(all_sizes("", drawn)), seed=self.config.seed)
        return size_schedule(text, self.training.horizon.total_steps) if text else None

    @property
    def stall_seconds(self) -> float:
        """Seconds that a rank may make no progress; 0 for no limit, the default of one rank."""
        if self.config.stall_seconds is not None:
            return self.config.stall_seconds
        return DEFAULT_STALL_SECONDS if self.layout.world_size > 1 else 0.0

    @property
    def first_patience(self) -> float:
        """The factor on `stall_seconds` for the first step and the first evaluation, which compile."""
        if not self.config.compile or not self.stall_seconds:
            return 1.0
        return max(4.0, COMPILE_SECONDS / self.stall_seconds)

    @property
    def share(self) -> Share:
        """This rank's share of a global batch."""
        layout, batch = self.layout, self.data.batch
        return Share(layout.dp_rank(self.process.rank), layout.dp, batch.micro_batch, batch.accumulation)


def resolve_run(
    config: RunConfig,
    explicit: frozenset[str],
    process: Process,
    *,
    on_cpu: bool,
    stop_at: float | None = None,
    sources: tuple[Source, Source | None] | None = None,
    with_weights: bool = True,
) -> Resolved:
    """Resolve a run.

    Args:
        config: the flags and the recipe.
        explicit: which of them were given.
        process: this rank.
        on_cpu: there is no accelerator.
        stop_at: `time.time()` at which the scheduler or --time-limit ends the run.
        sources: the images of training and evaluation, where the flags do not name them.
        with_weights: as for `resolve_model`.

    Raises:
        UserError: one message for people, with the numbers and the way out.
    """
    task_type = find_task(config, explicit)
    task_type.check_model_name(config.model)  # before the batch, which a misspelt name has nothing to do with
    if config.stop_before_seconds is not None and stop_at is None:
        raise UserError(
            "--stop-before-seconds has no effect: no Slurm job says when it ends (SLURM_JOB_END_TIME); "
            "give --time-limit"
        )
    deepspeed = read(config, on_cpu=on_cpu)
    layout = resolve_layout(config, process, deepspeed)
    deepspeed = dataclasses.replace(deepspeed, notes=(*deepspeed.notes, *check_compilation(config, on_cpu=on_cpu)))
    resume = find_resume(config)
    data = resolve_data(config, deepspeed, layout, resume, sources)
    deepspeed = sum_micro_batches(deepspeed, data.batch)
    if process.rank == 0:
        data = describe_images(config, data)
    model = resolve_model(config, explicit, task_type, data, resumes=resume is not None, with_weights=with_weights)
    _check_recomputation(deepspeed, model)
    model = find_fastest_stages(model, deepspeed, layout, data.batch)
    config = model.task.config
    numbers: dict[str, Any] = {}
    optimizer = None if config.eval_only else resolve_optimizer(config, explicit, deepspeed, data, model)
    if optimizer is not None:
        numbers = {"clip": optimizer.clip, "optimizer": optimizer.json_params, "scheduler": optimizer.scheduler}
        if config.img_size_schedule:
            # Raises here what it would raise on the ranks.
            size_schedule(config.img_size_schedule, optimizer.horizon.total_steps)
        if config.log_interval is None:
            interval = min(MOST_LOG_INTERVAL, math.ceil(optimizer.total_steps / LOGGED_ROWS))
            config = config.model_copy(update={"log_interval": interval})
    origins = {**data.origins, **(optimizer.origins if optimizer else {})}
    deepspeed = write_out(deepspeed, data.batch, layout, model.whole.embed_dim, origins, **numbers)
    # "auto" is resolved by inputs.count_workers.
    workers = Workers(0 if config.workers == "auto" else int(config.workers))
    graphs = optimizer is not None and replays_steps(config, deepspeed, layout, model.task, on_cpu=on_cpu)
    resolved = Resolved(
        config, process, layout, data, model, optimizer, deepspeed, resume, stop_at, graphs=graphs, workers=workers
    )
    if resume is None:
        return resolved
    of_start = {name: getattr(config, name) for name in names_with(Scope.START)}
    changes = check_same_run(resume, resolved.identity, {**of_start, **resolved.settings})
    changes += check_same_schedule(resume, resolved.rates, data.batch.global_batch, allow=config.allow_schedule_change)
    return dataclasses.replace(resolved, changes=tuple(changes))


def _check_recomputation(deepspeed: DeepSpeedSettings, model: ModelConfig) -> None:
    """Reject recomputation of a model without blocks, where it would have no effect."""
    interval, task = deepspeed.checkpointing.interval, model.task
    if interval and not any(isinstance(layer, BlockLayer) for layer in task.layers(model.whole)):
        raise UserError(
            f"activation_checkpoint_interval {interval} in the JSON has no effect with --task {task.name}, whose model "
            "has no blocks to recompute; drop it"
        )


def resolved_flags(resolved: Resolved) -> dict[str, Any]:
    """The flags with everything that was resolved written in: a recipe that runs the same again.

    The batch and the optimizer's numbers are in deepspeed.json next to it.
    """
    config, optimizer = resolved.config, resolved.optimizer
    values = {name: getattr(config, name) for name in flags.FLAGS}
    values["deepspeed_config"] = "deepspeed.json"
    for name in {"output", "set", *KEY_OF_FLAG, *names_with(Scope.START), *idle_flags(type(resolved.model.task))}:
        values[name] = None
    values |= {
        "lr": optimizer and optimizer.lr,
        "lr_scale_by_batch": "none",  # done
        "lr_base_size": flags.default_of("lr_base_size"),
        "grad_checkpointing": False,
        **{name: getattr(resolved.model.image, name) for name in PIXEL_FLAGS},
    }
    if resolved.deepspeed.checkpointing.interval and config.grad_checkpointing:
        values["grad_checkpointing"] = config.grad_checkpointing
    if optimizer is not None and optimizer.schedule is not None:
        values |= {"warmup_steps": optimizer.schedule.warmup_steps, "warmup_epochs": None}
        if config.epochs is None and config.max_steps is None:
            values["epochs"] = DEFAULT_EPOCHS
    # A resolved value of a flag that does nothing here (the crop of a split that is not evaluated) would be rejected.
    idle = {name for name in flags.idle_flags(config) if values[name] != flags.default_of(name)}
    return {name: value for name, value in values.items() if value is not None and name not in idle}
