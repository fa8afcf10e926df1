"""Training steps under torch's profiler (`--profile-steps`): traces and torch's tables of operations.

One rank of each pipeline stage is recorded, because the others of its stage do the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from ds_vit.device import is_accelerator, profiled_activities, synchronize
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.parallel.groups import Groups, gather_objects

WAITING = "waiting for data"
_TOP = 30


class StepProfiler:
    """Records steps; every rank calls every method.

    Args:
        steps: to record, counted from 1.
        folder: for the traces and tables.
        groups: of the run.
        device: of this rank.
    """

    def __init__(self, steps: range, folder: Path, groups: Groups, device: torch.device) -> None:
        self._steps, self._folder, self._groups, self._device = steps, folder, groups, device
        self._records = groups.dp_rank == 0 and groups.tp_rank == 0
        self._profile: profile | None = None
        self._activities = profiled_activities(device)

    def before(self, step: int) -> None:
        """Called before a step."""
        if step not in self._steps or not self._records:
            return
        if step == self._steps.start:
            if self._profile is not None:
                self._profile.stop()  # after a rollback
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it prints between the lines of the run
            self._profile = profile(activities=self._activities)
            synchronize(self._device)
            self._profile.start()
        elif self._profile is not None:
            self._profile.toggle_collection_dynamic(True, self._activities)

    def after(self, step: int) -> bool:
        """Called after a step; work between two steps, such as an evaluation, is not recorded.

        Returns:
            Whether it was the last one, after which all ranks must call `finish`.
        """
        if step not in self._steps:
            return False
        if self._profile is not None:
            synchronize(self._device)
            if step != self._steps[-1]:
                self._profile.toggle_collection_dynamic(False, self._activities)
        return step == self._steps[-1]

    def finish(self, say: Callable[[str], object] | None = None) -> None:
        """Write the traces and tables (a collective).

        Args:
            say: on rank 0, prints where they are, or why they are missing.
        """
        own: str | None = None
        try:
            own = self._write(self._profile) if self._profile is not None else None
        except Exception as error:  # training continues without it, and the other ranks wait here
            own = f"WARNING: the profile could not be written: {self._folder}: {first_line(error)}"
        found = sorted(line for line in gather_objects(own) if line)
        if say is not None and found:  # none: resumed between these steps
            say(found[0])

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; waiting for each is named in the trace."""
        iterator = iter(batches)
        while True:
            with record_function(WAITING) if self._profile is not None else contextlib.nullcontext():
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def _write(self, recorded: profile) -> str:
        self._profile = None
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"stage{self._groups.pipeline_stage}-rank{self._groups.rank}.json"
        recorded.export_chrome_trace(str(path))
        averages = recorded.key_averages()
        longest = "self_device_time_total" if is_accelerator(self._device) else "self_cpu_time_total"
        path.with_suffix(".txt").write_text(averages.table(sort_by=longest, row_limit=_TOP, max_name_column_width=80))
        return f"steps {self._steps[0]} to {self._steps[-1]} profiled: {self._folder}"
