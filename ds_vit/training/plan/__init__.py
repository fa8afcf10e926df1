"""From flags, recipe and JSON to a plan of the run: everything is opened, checked and resolved, nothing is started.

Whatever is wrong with a run is found here, before any process group exists and before anything is written. The parts of
a plan have a file each and are resolved in this order:

    deepspeed.py   the JSON, read
    parallel.py    degrees, and this rank's place in them
    data.py        the splits, the batch arithmetic, the order of the samples
    model.py       the model, the task, where it is cut
    optimizer.py   the optimizer, its rate, how many steps
    deepspeed.py   the JSON, written out with what the others came to
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ds_vit import config as flags
from ds_vit.config import RunConfig
from ds_vit.config.batch import BatchSizes
from ds_vit.config.image_sizes import ImageSizes, RandomSizes, all_sizes, size_schedule
from ds_vit.data import Share, Source
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.models import names_and_shapes, require_supported_name
from ds_vit.optim.build import rules_of
from ds_vit.tasks import find_task, idle_flags
from ds_vit.training.plan.compilation import check_compilation
from ds_vit.training.plan.data import DataPlan, check_readable, resolve_data
from ds_vit.training.plan.data import with_batch as data_with_batch
from ds_vit.training.plan.deepspeed import DeepSpeedPlan, read, write_out
from ds_vit.training.plan.deepspeed import with_batch as json_with_batch
from ds_vit.training.plan.fastest_cut import cut_by_playing
from ds_vit.training.plan.learning_rate import DEFAULT_EPOCHS
from ds_vit.training.plan.model import ModelPlan, resolve_model
from ds_vit.training.plan.optimizer import OptimizerPlan, resolve_optimizer
from ds_vit.training.plan.parallel import ParallelPlan, resolve_parallel
from ds_vit.training.resume import Resume, check_same_run, check_same_schedule
from ds_vit.training.resume import find as find_resume

DEFAULT_STALL_SECONDS = 300.0  # below the ten minutes after which NCCL gives up, with less to say
COMPILE_SECONDS = 3600.0  # of the slowest mode, with as many ranks as cores


@dataclass(frozen=True)
class Plan:
    """A run, resolved: what `train.py` carries out.

    Attributes:
        config: the flags, `num_classes` resolved.
        parallel: degrees, and this rank's place in them.
        data: the splits, the batch arithmetic, the order of the samples.
        model: the model and its task.
        optimizer: the optimizer, its rate and its steps; None in evaluation alone.
        deepspeed: what DeepSpeed gets.
        resume: the checkpoint to go on from, or None.
        stop_at: `time.time()` at which a scheduler or --time-limit ends the run.
        changes: from the checkpoint's run, as lines for people.
        workers: loader processes of this rank.
        workers_from: how `--workers auto` came to that number, for people; empty where it was given.
    """

    config: RunConfig
    parallel: ParallelPlan
    data: DataPlan
    model: ModelPlan
    optimizer: OptimizerPlan | None
    deepspeed: DeepSpeedPlan
    resume: Resume | None = None
    stop_at: float | None = None
    changes: tuple[str, ...] = ()
    workers: int = 0
    workers_from: str = field(default="", compare=False)

    @property
    def training(self) -> OptimizerPlan:
        """`optimizer` of a run that trains."""
        assert self.optimizer is not None, "evaluation alone has no optimizer"
        return self.optimizer

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found out, as lines for people."""
        of_optimizer = self.optimizer.notes if self.optimizer else ()
        begins: tuple[str, ...] = ()
        if self.config.resume == "auto" and self.resume is None:
            begins = (f"--resume auto: there is no checkpoint in {self.config.output} yet; the run begins at step 0",)
        of_parts = (*self.data.notes, *self._bubble, *self.model.notes, *of_optimizer)
        return (*self.deepspeed.notes, *begins, *of_parts, *self.changes)

    @property
    def _bubble(self) -> tuple[str, ...]:
        pp, number = self.parallel.layout.pp, self.data.batch.accumulation
        if pp == 1 or self.optimizer is None:
            return ()
        line = (
            f"pipeline: {number} micro-batches through {pp} stages, bubble {(pp - 1) / (number + pp - 1):.0%} of a step"
        )
        return (line + (" (more accumulation makes it smaller)" if number < pp else ""),)

    def with_batch(self, batch: BatchSizes, origin: str, note: str) -> Plan:
        """The same run in micro-batches of another size; the arguments are those of `data.with_batch`."""
        data = data_with_batch(self.data, batch, origin, note)
        return dataclasses.replace(self, data=data, deepspeed=json_with_batch(self.deepspeed, data))

    @property
    def in_words(self) -> str:
        """Degrees, ZeRO stage and precision, for a line or a table."""
        return f"{self.parallel.layout}, ZeRO-{self.deepspeed.zero_stage}, {self.deepspeed.precision.name}"

    @property
    def identity(self) -> dict[str, Any]:
        """What makes this the run that it is: a checkpoint of another one cannot be gone on from."""
        sizes = self.image_sizes
        return {
            "task": self.config.task,
            **self.model.task.identity(),
            "model": self.config.model,
            "num_classes": self.config.num_classes,
            "img_size": list(self.model.image.img_size),
            "img_size_schedule": sizes.in_words if sizes and self.config.img_size_schedule else "",
            "train_img_sizes": sorted(self.config.train_img_sizes),
            "shapes": {name: list(shape) for name, shape in names_and_shapes(self.model.whole).items()},
            "seed": self.config.seed,
            "images": len(self.data.train_source),
            "class_names": list(self.data.train_source.class_names),
            "decode": self.config.decode,
            "mixture": [list(part) for part in self.data.train_source.mixture],
            "samples": self.data.train_source.fingerprint,
            "optimizer": self.training.cls.__name__,
            **rules_of(self.training.cls).identity(self.training.fallback),
            "trained": [name for name in names_and_shapes(self.model.whole) if name not in self.model.frozen],
        }

    @property
    def rates(self) -> dict[str, Any]:
        """What sets the learning rate, as a checkpoint has it: the flags' schedule, or the JSON's scheduler."""
        if self.training.schedule is not None:
            return dataclasses.asdict(self.training.schedule)
        block = dict(self.deepspeed.json["scheduler"])
        if block.get("type") == "WarmupCosineLR":  # the one whose rates are shares of the optimizer's
            block["lr"] = self.training.lr
        return block

    @property
    def image_sizes(self) -> ImageSizes | None:
        """Which size of images each step trains on; None where all have the model's own."""
        text, drawn = self.config.img_size_schedule, self.config.train_img_sizes
        if drawn:
            return RandomSizes(tuple(all_sizes("", drawn)), self.config.seed)
        return size_schedule(text, self.training.horizon) if text else None

    @property
    def stall_seconds(self) -> float:
        """How long a rank may make no progress; 0 for no limit, the default of one rank alone."""
        if self.config.stall_seconds is not None:
            return self.config.stall_seconds
        return DEFAULT_STALL_SECONDS if self.parallel.layout.world_size > 1 else 0.0

    @property
    def patience_of_first(self) -> float:
        """How many times `stall_seconds` the first step and the first evaluation may take, which compile."""
        if not self.config.compile or not self.stall_seconds:
            return 1.0
        return max(4.0, COMPILE_SECONDS / self.stall_seconds)

    @property
    def share(self) -> Share:
        """This rank's share of a global batch."""
        layout, batch = self.parallel.layout, self.data.batch
        return Share(
            dp_rank=layout.dp_rank(self.parallel.process.rank),
            dp_size=layout.dp,
            micro_batch=batch.micro_batch,
            accumulation=batch.accumulation,
        )


def prepare(
    config: RunConfig,
    explicit: frozenset[str],
    process: Process,
    *,
    on_cpu: bool,
    stop_at: float | None = None,
    sources: tuple[Source, Source | None] | None = None,
) -> Plan:
    """Resolve a run.

    Args:
        config: the flags and the recipe.
        explicit: which of them were given.
        process: this rank.
        on_cpu: there is no accelerator.
        stop_at: `time.time()` at which the scheduler or --time-limit ends the run.
        sources: the images of training and evaluation, where the flags do not name them.

    Raises:
        UserError: one message for people, with the numbers and the way out.
    """
    task_type = find_task(config, explicit)
    require_supported_name(config.model)  # before the batch, which a misspelt name has no part in
    if config.stop_before_seconds is not None and stop_at is None:
        raise UserError(
            "--stop-before-seconds has no effect: no Slurm job says when it ends (SLURM_JOB_END_TIME); "
            "give --time-limit"
        )
    told = read(config, on_cpu=on_cpu)
    parallel = resolve_parallel(config, process, told)
    compilation = check_compilation(config, on_cpu=on_cpu)
    told = dataclasses.replace(told, notes=(*told.notes, *compilation))
    resume = find_resume(config)
    data = resolve_data(config, told, parallel.layout, resume, sources)
    if process.rank == 0 and config.on_bad_image == "skip" and resume is None:
        data = dataclasses.replace(data, notes=(*data.notes, *check_readable(config, data)))
    model = resolve_model(config, explicit, task_type, data, goes_on=resume is not None)
    model = cut_by_playing(model, told, parallel.layout, data.batch)
    optimizer = None if config.eval_only else resolve_optimizer(config, explicit, told, data, model)
    if config.img_size_schedule and optimizer is not None:
        size_schedule(config.img_size_schedule, optimizer.horizon)  # says now what it would say on the ranks
    told = write_out(told, data, optimizer, model.whole, parallel.layout)
    workers = 0 if config.workers == "auto" else int(config.workers)  # "auto" is dealt by training/workers.py
    plan = Plan(model.task.config, parallel, data, model, optimizer, told, resume, stop_at, workers=workers)
    if resume is None:
        return plan
    changes = check_same_run(resume, plan.identity, resolved_flags(plan))
    changes += check_same_schedule(resume, plan.rates, data.batch.global_batch, allow=config.allow_schedule_change)
    return dataclasses.replace(plan, changes=tuple(changes))


# Flags of how this process was started, which another start will answer for itself.
_OF_THIS_START = (
    "resume",
    "allow_batch_change",
    "allow_schedule_change",
    "stop_before_seconds",
    "time_limit",
    "dry_run",
)


def resolved_flags(plan: Plan) -> dict[str, Any]:
    """The flags with everything that was found out written in: a recipe that runs the same again.

    The batch and the optimizer's numbers stand in deepspeed.json beside it.
    """
    config, optimizer = plan.config, plan.optimizer
    values = {name: getattr(config, name) for name in flags.FIELDS}
    values["deepspeed_config"] = "deepspeed.json"
    of_the_json = ("set", "batch_size", "grad_accum_steps", "weight_decay", "clip_grad")
    for name in ("output", *of_the_json, *_OF_THIS_START, *idle_flags(type(plan.model.task))):
        values[name] = None
    values |= {
        "lr": optimizer and optimizer.lr,
        "lr_scale_by_batch": "none",  # done
        "lr_base_size": flags.default_of("lr_base_size"),
        "grad_checkpointing": False,
        **{name: getattr(plan.model.image, name) for name in PIXEL_FLAGS},
    }
    if plan.deepspeed.checkpointing.interval and config.grad_checkpointing:
        values["grad_checkpointing"] = config.grad_checkpointing
    if optimizer is not None and optimizer.schedule is not None:
        values |= {"warmup_steps": optimizer.schedule.warmup_steps, "warmup_epochs": None}
        if config.epochs is None and config.max_steps is None:
            values["epochs"] = DEFAULT_EPOCHS
    # What was found out for a flag that does nothing here (the crop of a split that is not evaluated) would be refused.
    idle = {name for name in flags.idle_names(config) if values[name] != flags.default_of(name)}
    return {name: value for name, value in values.items() if value is not None and name not in idle}
