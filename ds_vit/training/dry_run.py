"""`--dry-run`: shows a run, its memory and its files. Nothing is started and nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ds_vit.config.units import in_words
from ds_vit.models import num_parameters
from ds_vit.monitoring.metrics import make_console, print_columns, print_table
from ds_vit.planner.memory import in_host_memory, on_device
from ds_vit.run_folder import RunFolder
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.memory import estimate, num_states
from ds_vit.training.resolve.optimizer import OptimizerConfig
from ds_vit.training.start_rows import Rows

_BAR = 40  # characters of the highest rate
_POINTS = 9  # of the schedule, in addition to the end of warm-up


def show_dry_run(
    config: EngineConfig,
    notes: Sequence[str],
    rows: Rows,
    rates: Mapping[str, Any],
    folder: Path,
    checkpoint_interval: str,
    keep_checkpoints: int,
) -> None:
    """Show the start table, the schedule, the memory of a rank and the files.

    Args:
        config: of the engine.
        notes: lines for people.
        rows: of the start table.
        rates: what sets the learning rate, as `Resolved.rates`; empty in evaluation only.
        folder: where the run would write.
        checkpoint_interval: as the flag.
        keep_checkpoints: as the flag.
    """
    console = make_console()
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    print_table(console, "dry run: nothing is started", rows)
    if config.optimizer is not None:
        print_table(console, "learning rate", schedule_rows(config.optimizer, rates))
    _show_memory(config, console)
    print_table(console, "would be written", file_rows(config, folder, checkpoint_interval, keep_checkpoints))


def schedule_rows(optimizer: OptimizerConfig, rates: Mapping[str, Any]) -> Rows:
    """The learning rate at a few steps, as numbers and as bars."""
    if (schedule := optimizer.schedule) is None:
        params = ", ".join(f"{name} {value}" for name, value in rates.get("params", {}).items())
        return [("the JSON's", f"{rates['type']} ({params})")]
    last = optimizer.total_steps - 1
    steps = sorted({*(last * i // (_POINTS - 1) for i in range(_POINTS)), min(schedule.warmup_steps, last)})
    highest = max(schedule.lr(step) for step in steps) or 1.0
    bars = {step: "█" * round(_BAR * schedule.lr(step) / highest) for step in steps}
    return [(f"step {step + 1:,}", f"{schedule.lr(step):.3e}  {bars[step]}") for step in steps]


def _show_memory(config: EngineConfig, console: Console) -> None:
    """What a rank of each stage needs, and what that leaves out."""
    stages = estimate(config)
    in_host = in_host_memory(config.json)
    named = {
        **{field: field for field in ("weights", "gradients", "masters")},
        "optimizer": "optimizer state",
        "average": "average",
        "buckets": "ZeRO's buckets",
        "gathered": "gathered weights",
        "activations": "activations",
        "going_back": "going back, with gradients by then",
        "updating": "updating, with gradients",
    }
    header = ["memory a rank", *(f"stage {i}" for i in range(len(stages)))] if len(stages) > 1 else ["memory", "a rank"]
    lines = [header, ["parameters", *(f"{stage.parameters:,}" for stage in stages)]]
    for field, name in named.items():
        sizes = [getattr(stage, field) for stage in stages]
        if any(sizes):
            lines.append([f"{name} (in host memory)" if field in in_host else name, *map(in_words, sizes)])
    lines.append(["at most", *(in_words(on_device(stage, in_host).together) for stage in stages)])
    print_columns(console, "memory", lines)
    without = "the loader, what collectives take, and 2 to 3 GB of a GPU's own"
    console.print(f"  not counted: {without}", markup=False, highlight=False, soft_wrap=True)


def file_rows(config: EngineConfig, folder: Path, interval: str, keep: int) -> Rows:
    """What would be written where, and how large the large ones are."""
    at, optimizer = RunFolder(folder), config.optimizer
    rows = [("folder", str(folder))]
    if optimizer is None:
        return [*rows, ("settings", f"{at.config.name}, {at.deepspeed.name}"), ("figures", at.metrics.name)]
    weights = 4 * num_parameters(config.model.whole)
    sizes = {name: p.numel() for name, p in config.model.whole.named_parameters() if name not in config.model.frozen}
    states = 4 * num_states(optimizer, sizes)
    average = weights if config.averaged else 0
    rows += [
        ("settings", f"{at.config.name}, {at.deepspeed.name}, deepspeed.derived.json"),
        ("figures", f"{at.metrics.name}, {at.summary.name}, {at.tensorboard.name}/"),
        ("weights", f"{in_words(weights + average)} at the end"),
    ]
    often = {"0": "when it is interrupted", "epoch": "at each epoch's end"}.get(
        interval, f"every {interval}{' steps' * interval.isdigit()}"
    )
    kept = f"; room for {keep + 2} at most" if keep else "; all are kept"
    rows.append((f"{at.checkpoints.name}/", f"{in_words(weights + states + average)} each, {often}{kept}"))
    return rows
