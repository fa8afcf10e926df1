"""Train: flags and JSON → plan → process group → trainer (engine, steps, metrics, weights).

deepspeed launch/train.py --deepspeed_config ds_configs/zero1_bf16.json --model vit_base_patch16_224 --data-dir DIR
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ds_vit import config as flags
from ds_vit.config.durations import parse_seconds
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.signals import Signals
from ds_vit.launching.process import Process, job_end
from ds_vit.monitoring.progress import doing
from ds_vit.training.program import guarded, process_group

if TYPE_CHECKING:
    from ds_vit.config.run_folder import RunFolder
    from ds_vit.data import Source

EXAMPLES = """
ds-vit train --deepspeed_config ds_configs/cpu_zero1_fp32.json --recipe launch/recipes/digits.yaml -b 64
deepspeed launch/train.py --deepspeed_config ds_configs/zero1_bf16.json --data-dir photos --model vit_base_patch16_224
"""


def main(argv: Sequence[str] | None = None, program: str = "train.py") -> int:
    """Run `launch/train.py`, or `ds-vit train` on one rank, with these arguments.

    Returns:
        One of `fault_tolerance.exit_codes`; where it is not 0, one line on stderr says what is wrong and what to do.
    """

    def body(process: Process) -> int:
        config, explicit = flags.parse(argv, program, EXAMPLES)
        with Signals().installed(is_local_main=process.local_rank == 0) as signals:
            summary, _ = run(config, explicit, process, signals)
        return exit_codes.OF_WORD[summary["exit"]]

    return guarded(program, body, "what came after the last checkpoint is not saved")


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
        signals: that this process is told to stop by; None for a caller who handles them himself.
        again: as for `process_group`.
        sources: the images of training and evaluation, where the flags do not name them.
        listeners: kind of a row of metrics.jsonl → what is called with each such row, on rank 0.

    Returns:
        What summary.json holds, on every rank (of --dry-run how it ended alone); the run's folder.

    Raises:
        UserError: input that cannot be; before the process group exists wherever that can be known.
    """
    started = time.perf_counter()
    is_main = process.rank == 0
    with doing("importing torch and DeepSpeed", shown=is_main):
        from ds_vit.engine.start import quiet_deepspeed

        # The modules below import DeepSpeed, which talks while it is imported.
        quiet_deepspeed(config.verbose)
        import torch.distributed as dist
        from deepspeed.accelerator import get_accelerator

        from ds_vit.config.run_folder import RunFolder
        from ds_vit.fault_tolerance.watchdog import Watchdog
        from ds_vit.parallel.groups import build_groups
        from ds_vit.training.auto_batch import settle_alone, settle_together
        from ds_vit.training.dry_run import show_dry_run
        from ds_vit.training.evaluation_run import run_evaluation
        from ds_vit.training.output import DEFAULT_PARENT, check_folder, check_shared, default_folder
        from ds_vit.training.plan import prepare
        from ds_vit.training.resume import goes_on_in
        from ds_vit.training.trainer import Trainer
        from ds_vit.training.workers import deal_alone, deal_together

        on_cpu = get_accelerator().device_name() == "cpu"
    stop_at = time.time() + parse_seconds(config.time_limit, "--time-limit") if config.time_limit else job_end()
    with doing("listing the images, building the model", shown=is_main):
        plan = prepare(config, explicit, process, on_cpu=on_cpu, stop_at=stop_at, sources=sources)
        plan = deal_alone(settle_alone(plan, on_cpu=on_cpu))
    if config.output and is_main:
        check_folder(config.output, goes_on=goes_on_in(config.output, config.resume))
    if config.dry_run:
        would_be = Path(config.output or default_folder(config.model))
        if is_main:
            show_dry_run(plan, get_accelerator().device_name(), would_be)
        return {"exit": "dry run"}, RunFolder(would_be)
    check_shared(config.output or DEFAULT_PARENT, process)

    with process_group(process, on_cpu=on_cpu, again=again):
        if signals is not None:
            signals.ranks_have_met = not config.eval_only
            signals.moment = "while no training is under way"
        # One name on every rank: the clocks of two hosts differ.
        folder = [config.output or default_folder(config.model)]
        dist.broadcast_object_list(folder, src=0)
        watchdog = Watchdog(
            plan.stall_seconds,
            rank=process.rank,
            world_size=process.world_size,
            local_rank=process.local_rank,
            folder=Path(folder[0]),
        )
        with watchdog:
            if config.auto_batch:
                watchdog.beat(0, "looking for the micro-batch", patience=4)
                plan = settle_together(plan, on_cpu=on_cpu)
            plan = deal_together(plan)
            groups = build_groups(plan.parallel.layout, saves=not config.eval_only)
            run_folder = RunFolder(Path(folder[0]))
            if config.eval_only:
                summary = run_evaluation(plan, run_folder, groups, started, watchdog)
            else:
                summary = Trainer(plan, run_folder, groups, started, watchdog, signals, listeners).run()
    return summary, run_folder
