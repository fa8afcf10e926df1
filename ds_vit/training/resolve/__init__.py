"""Resolve flags, recipe and JSON into a run: everything is opened and checked, nothing is started.

Every error in a run's settings is found here, before any process group exists and before anything is written. The
parts are resolved in this order:

    deepspeed.py    the JSON, read
    engine.py       degrees of parallelism, compilation
    data.py         the batch arithmetic, the splits, the order of the samples
    model.py        the model, the task, the pipeline stages
    optimizer.py    the optimizer, its rate, the number of steps
    deepspeed.py    the JSON, written out with the resolved numbers

record.py has the records that a run keeps of itself.
"""

from __future__ import annotations

import dataclasses
import math

from ds_vit.config.flag import Scope
from ds_vit.config.outside import source_changes
from ds_vit.config.schema import RunConfig
from ds_vit.config.units import Interval
from ds_vit.data.image_sizes import ImageSizes, size_schedule
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.settings import Schedule
from ds_vit.tasks.registry import find_task
from ds_vit.training.resolve.data import resolve_batch, resolve_data
from ds_vit.training.resolve.deepspeed import read, sum_micro_batches, write_out
from ds_vit.training.resolve.engine import check_compilation, describe_machine, replays_steps, resolve_layout
from ds_vit.training.resolve.model import arrange_layers, resolve_model
from ds_vit.training.resolve.optimizer import resolve_update
from ds_vit.training.resolve.record import identity_of, rates_of, settings_of
from ds_vit.training.resume import Resume, check_same_run, check_same_schedule
from ds_vit.training.resume import find as find_resume
from ds_vit.training.run import Output, Run, World

LOGGED_ROWS = 50  # of a short run: enough for a curve
MOST_LOG_INTERVAL = 50  # timm's


def resolve(
    config: RunConfig,
    world: World,
    sources: tuple[Source, Source | None] | None = None,
    *,
    with_weights: bool = True,
) -> Run:
    """Resolve a run; nothing is started or written, and the flags stay as they are.

    Args:
        config: the flags and the recipe.
        world: this rank and its machine.
        sources: the images of training and evaluation, where the flags do not name them.
        with_weights: as for `resolve_model`.

    Raises:
        UserError: one message for people, with the numbers and the way out.
    """
    task_type = find_task(config)
    task_type.check_model_name(config.model)  # before the batch, which a misspelt name has nothing to do with
    if config.stop_before_seconds is not None and world.stop_at is None:
        raise UserError("--stop-before-seconds has no effect: no SLURM_JOB_END_TIME says when; give --time-limit")
    engine, file = read(config, on_cpu=world.on_cpu)
    layout = resolve_layout(config, world.process, engine)
    machine = describe_machine(world, engine)
    compiled = check_compilation(config, on_cpu=world.on_cpu)
    resume = find_resume(config)
    batch, kept = resolve_batch(config, engine, layout, resume)
    notes = (*machine, *engine.notes, *compiled, *kept)
    engine = sum_micro_batches(dataclasses.replace(engine, notes=notes), batch)
    data = resolve_data(config, world, batch, sources)
    model = resolve_model(config, task_type, data, resumes=resume is not None, with_weights=with_weights)
    model = arrange_layers(model, config, engine, batch)
    optimizer, schedule = None, None
    if not config.eval_only:
        optimizer, schedule = resolve_update(config, engine, data.order, model)
        data = dataclasses.replace(data, sizes=_image_sizes(config, schedule))
    output = _resolve_output(config, world, resume, schedule)
    run = Run(config, world.process, layout, batch, data, model, optimizer, schedule, engine, output)
    engine = write_out(run, file)
    graphs = optimizer is not None and replays_steps(config, engine, layout, model.task, on_cpu=world.on_cpu)
    run = dataclasses.replace(run, engine=dataclasses.replace(engine, graphs=graphs))
    return run if resume is None else _check_resume(run, resume)


def _resolve_output(config: RunConfig, world: World, resume: Resume | None, schedule: Schedule | None) -> Output:
    """When the run logs, saves and stops."""
    notes = source_changes(dict(config), *([] if resume is None else [resume.checkpoint.state["config"]]))
    if config.resume == "auto" and resume is None:
        notes += (f"--resume auto: there is no checkpoint in {config.output} yet; the run begins at step 0",)
    rows = math.ceil(schedule.total_steps / LOGGED_ROWS) if schedule else 1
    return Output(
        interval=Interval.parse(config.checkpoint_interval, "--checkpoint-interval"),
        stop_at=math.inf if world.stop_at is None else world.stop_at - (config.stop_before_seconds or 0.0),
        resume=resume,
        log_interval=config.log_interval or min(MOST_LOG_INTERVAL, rows),
        notes=notes,
    )


def _check_resume(run: Run, resume: Resume) -> Run:
    """The run with a line for each change from the checkpoint's; UserError where it is another run."""
    of_start = {name: getattr(run.config, name) for name in run.config.names_with(Scope.START)}
    changes = check_same_run(resume, identity_of(run), {**of_start, **settings_of(run)})
    allow = run.config.allow_schedule_change
    changes += check_same_schedule(resume, rates_of(run), run.batch.global_batch, allow=allow)
    return dataclasses.replace(run, output=dataclasses.replace(run.output, notes=(*run.output.notes, *changes)))


def _image_sizes(config: RunConfig, schedule: Schedule) -> ImageSizes | None:
    """Which size of images each step trains on; None where all have the model's size."""
    if config.train_img_sizes:
        return ImageSizes(tuple(sorted(config.train_img_sizes)), seed=config.seed)
    text = config.img_size_schedule
    return size_schedule(text, schedule.horizon.total_steps) if text else None
