"""`--dry-run`: what a run would be, need and write, from its plan alone. Nothing is started and nothing is written."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from ds_vit.config.run_folder import RunFolder
from ds_vit.config.sizes import in_words
from ds_vit.models import count_flops, num_parameters
from ds_vit.monitoring.metrics import make_console, print_columns, print_table
from ds_vit.training.memory import estimate, in_host_memory, num_states, on_device
from ds_vit.training.plan import Plan
from ds_vit.training.start_rows import Rows, start_rows

_BAR = 40  # characters of the highest rate
_POINTS = 9  # of the schedule, besides the end of warm-up


def show_dry_run(plan: Plan, device_type: str, folder: Path) -> None:
    """Show the start table, the schedule, the memory of a rank and the files.

    Args:
        plan: the run.
        device_type: torch's name of the accelerator.
        folder: where the run would write.
    """
    console = make_console()
    for note in plan.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    flops = count_flops(plan.model.whole, plan.model.frozen)
    rows = start_rows(plan, flops, torch.device(device_type), folder)
    print_table(console, "dry run: nothing is started", rows)
    if plan.optimizer is not None:
        print_table(console, "learning rate", schedule_rows(plan))
    _show_memory(plan, console)
    print_table(console, "would be written", file_rows(plan, folder))


def schedule_rows(plan: Plan) -> Rows:
    """The learning rate at a few steps, as numbers and as bars."""
    optimizer = plan.training
    if (schedule := optimizer.schedule) is None:
        params = ", ".join(f"{name} {value}" for name, value in plan.rates.get("params", {}).items())
        return [("the JSON's", f"{plan.rates['type']} ({params})")]
    last = optimizer.total_steps - 1
    steps = sorted({*(last * i // (_POINTS - 1) for i in range(_POINTS)), min(schedule.warmup_steps, last)})
    highest = max(schedule.lr(step) for step in steps) or 1.0
    bars = {step: "█" * round(_BAR * schedule.lr(step) / highest) for step in steps}
    return [(f"step {step + 1:,}", f"{schedule.lr(step):.3e}  {bars[step]}") for step in steps]


def _show_memory(plan: Plan, console: Console) -> None:
    """What a rank of each stage needs, and what that leaves out."""
    stages = estimate(plan)
    in_host = in_host_memory(plan)
    named = {
        **{field: field for field in ("weights", "gradients", "masters")},
        "optimizer": "optimizer state",
        "average": "average",
        "buckets": "ZeRO's buckets",
        "gathered": "weights put together",
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


def file_rows(plan: Plan, folder: Path) -> Rows:
    """What would be written where, and how large the large ones are."""
    at, optimizer = RunFolder(folder), plan.optimizer
    rows = [("folder", str(folder))]
    if optimizer is None:
        return [*rows, ("settings", f"{at.config.name}, {at.deepspeed.name}"), ("figures", at.metrics.name)]
    weights = 4 * num_parameters(plan.model.whole)
    sizes = {name: p.numel() for name, p in plan.model.whole.named_parameters() if name not in plan.model.frozen}
    states = 4 * num_states(optimizer, sizes)
    average = weights if plan.config.model_ema else 0
    rows += [
        ("settings", f"{at.config.name}, {at.deepspeed.name}, deepspeed.derived.json"),
        ("figures", f"{at.metrics.name}, {at.summary.name}, {at.tensorboard.name}/"),
        ("weights", f"{in_words(weights + average)} at the end"),
    ]
    interval = plan.config.checkpoint_interval
    often = {"0": "when it is interrupted", "epoch": "at each epoch's end"}.get(
        interval, f"every {interval}{' steps' * interval.isdigit()}"
    )
    keep = plan.config.keep_checkpoints
    kept = f"; room for {keep + 2} at most" if keep else "; all are kept"
    rows.append((f"{at.checkpoints.name}/", f"{in_words(weights + states + average)} each, {often}{kept}"))
    return rows
