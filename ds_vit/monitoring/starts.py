"""starts.jsonl: which launches worked on a run, and on what; the report's marks, launches and table of versions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from ds_vit.config.run_folder import RunFolder, to_json
from ds_vit.launching.host_identity import versions
from ds_vit.parallel.layout import Layout


def note_start(
    folder: RunFolder, step: int, layout: Layout, zero_stage: int, device: torch.device, hosts: Sequence[str]
) -> None:
    """Add the row of this process; a disk that refuses costs the row alone.

    Args:
        folder: of the run.
        step: optimizer steps that were done before.
        layout: of the ranks.
        zero_stage: of DeepSpeed's ZeRO.
        device: of this rank.
        hosts: the host's name of each rank; empty where all are on one.
    """
    row = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": {**asdict(layout), "zero_stage": zero_stage},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "hosts": list(hosts),
        "versions": versions(),
    }
    with contextlib.suppress(OSError), folder.starts.open("a") as file:
        file.write(to_json(row) + "\n")


def num_starts(folder: RunFolder) -> int:
    """How many launches have worked on a run, this one among them; 1 where no file tells."""
    with contextlib.suppress(OSError):
        return max(1, folder.starts.read_text().count("\n"))
    return 1
