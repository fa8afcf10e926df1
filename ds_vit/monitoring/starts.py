"""starts.jsonl: one row per launch of a run, for the report's marks, launches and versions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from ds_vit.launching.host_identity import versions
from ds_vit.optim.schedules import Schedule
from ds_vit.parallel.layout import Layout
from ds_vit.run_folder import RunFolder, to_json


def note_start(
    folder: RunFolder,
    step: int,
    layout: Layout,
    zero_stage: int,
    device: torch.device,
    hosts: Sequence[str],
    schedule: Schedule | None = None,
    precision: str = "",
) -> None:
    """Append the row of this launch; a write error loses only the row.

    Args:
        folder: of the run.
        step: optimizer steps completed before.
        layout: of the ranks.
        zero_stage: of DeepSpeed's ZeRO.
        device: of this rank.
        hosts: host name of each rank; empty if there is one host.
        schedule: of the learning rate; None if the JSON has a scheduler.
        precision: its name.
    """
    row = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": {**asdict(layout), "zero_stage": zero_stage},
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "hosts": list(hosts),
        "schedule": schedule and asdict(schedule),
        "versions": versions(),
    }
    with contextlib.suppress(OSError), folder.starts.open("a") as file:
        file.write(to_json(row) + "\n")


def num_starts(folder: RunFolder) -> int:
    """The number of launches of a run, including this one; 1 without a file."""
    with contextlib.suppress(OSError):
        return max(1, folder.starts.read_text().count("\n"))
    return 1
