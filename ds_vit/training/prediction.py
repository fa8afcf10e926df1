"""Predicted memory and step time of a run, next to the measured ones: memory of the fullest rank, seconds of a step.

On an accelerator memory is what torch's allocator counts. On a CPU torch counts none: there it is the growth of the
process since before the engine was built, which includes much that does not belong to the step, so that no deviation is
reported (tests/planner/test_memory.py follows every storage instead). Time is predicted for the accelerators of
ds_vit/planner/data/accelerators.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.config.units import in_words
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.counting import work_of_layers
from ds_vit.planner.hardware import Accelerator, Link, accelerator_of_device, link
from ds_vit.planner.memory import RankMemory, in_host_memory, on_device
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.memory import estimate, layers_of_rank, rules_of_run

_LARGE_DEVIATION = 0.15
_NAMES = {
    "going_back": "activations and temporary memory of the backward pass",
    "updating": "gradients and their copies at the update",
    "optimizer": "the optimizer's state",
    "gathered": "gathered weights",
    "buckets": "ZeRO's buckets",
    "weights": "weights",
    "masters": "masters",
    "average": "the average",
}


class Prediction:
    """Predicts memory and step time at a run's start, and measures them.

    Args:
        config: of the engine.
        device: where this rank computes.
        predict_time: False where steps have several image sizes.

    Attributes:
        memory: predicted of the fullest stage.
        step_seconds: predicted; None where the accelerator is not known.
    """

    def __init__(self, config: EngineConfig, device: torch.device, *, predict_time: bool = True) -> None:
        self.config, self.device, self._predicts_time = config, device, predict_time
        self.memory: RankMemory | None = None
        self.step_seconds: float | None = None
        self._failed = ""
        self._most = 0  # bytes of this rank in the whole run, up to the last measurement
        self._before = _resident_peak(reset=True) if device.type == "cpu" else 0
        if device.type == "cuda":  # a trial of --auto-batch or an earlier run of this program counted
            torch.cuda.reset_peak_memory_stats(device)

    def predict(self) -> None:
        """Predict both from shapes, on rank 0; a failure is only reported."""
        try:
            self._predict()
        except Exception as error:  # any error of a model's layers on the meta device
            self.memory = self.step_seconds = None
            self._failed = f"warning: failed: {type(error).__name__}: {first_line(error)}"

    def _predict(self) -> None:
        stages = (on_device(one, in_host_memory(self.config.json)) for one in estimate(self.config))
        self.memory = max(stages, key=lambda memory: memory.together)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        found = accelerator_of_device(name)
        if found is not None and self._predicts_time:
            self.step_seconds = PlannedTime(self.config).on(found).seconds

    def start_rows(self) -> list[tuple[str, str]]:
        """The row of the start table."""
        if self.memory is None:
            return [("predicted", self._failed)]
        said = f"memory {in_words(self.memory.together)} a rank"
        return [("predicted", said + (f", step {self.step_seconds:.3f} s" if self.step_seconds else ""))]

    def figures(self, step_seconds: float | None) -> dict[str, Any]:
        """The entries of summary.json, the same on every rank (a collective).

        Args:
            step_seconds: measured; None where no step was.
        """
        self._measure()
        own = (self.memory.together if self.memory else 0, self._most, self.step_seconds or 0.0)
        most = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        predicted, measured, seconds = most.tolist()
        return {
            "memory": {"predicted_bytes": int(predicted), "measured_bytes": int(measured) or None},
            "step_seconds": {"predicted": seconds or None, "measured": step_seconds},
        }

    def memory_bytes(self) -> int:
        """The most bytes that the fullest rank held since the last call, the same on every rank (a collective)."""
        most = torch.tensor(self._measure(), dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _measure(self) -> int:
        """The most bytes that this rank held since the last measurement."""
        if self.device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            measured = max(0, _resident_peak(reset_after=True) - self._before)
        self._most = max(self._most, measured)
        return measured

    def end_rows(self, figures: dict[str, Any]) -> list[tuple[str, str]]:
        """Predicted and measured; for a large deviation also the largest predicted part."""
        rows, memory = [], figures["memory"]
        # On a CPU the whole process is measured: next to a small model, torch and the loader are nearly all of it.
        is_shown = (
            self.device.type == "cuda" or max(memory["measured_bytes"] or 0, memory["predicted_bytes"] or 0) > 2**30
        )
        if is_shown and memory["measured_bytes"] and memory["predicted_bytes"]:
            measured, predicted = memory["measured_bytes"], memory["predicted_bytes"]
            said = f"predicted {in_words(predicted)}, measured {in_words(measured)}"
            if self.device.type != "cuda":
                said += " (growth of the whole process: torch, the loader and a checkpoint included)"
            else:
                if abs(measured / predicted - 1) > _LARGE_DEVIATION:
                    largest = max(_NAMES, key=lambda name: getattr(self.memory, name))
                    part = in_words(getattr(self.memory, largest))
                    said += (
                        f": {measured / predicted - 1:+.0%}; the largest part predicted is {_NAMES[largest]}, {part}"
                    )
            rows.append(("memory a rank", said))
        times = figures["step_seconds"]
        if times["predicted"] and times["measured"]:
            said = f"predicted {times['predicted']:.3f} s, measured {times['measured']:.3f} s"
            deviation = times["measured"] / times["predicted"] - 1
            rows.append(("step", said + (f": {deviation:+.0%}" if abs(deviation) > _LARGE_DEVIATION else "")))
        return rows


class PlannedTime:
    """The time of a run's step on accelerators; the model is counted once.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._works = work_of_layers(config.model.whole, layers_of_rank(config), config.dtype)

    def on(self, found: Accelerator, inside: Link | None = None) -> StepTime:
        """The time of a step.

        Args:
            found: that computes.
            inside: the link inside a host; the accelerator's own where None.
        """
        layout = self.config.layout
        per_node = self.config.local_world_size or found.gpus_per_node
        machine = Machine(found, layout.world_size, per_node, inside or link(found.inside), link("ib400"))
        return step_time(
            self._works,
            self.config.model.bounds,
            machine,
            layout=layout,
            batch=self.config.batch,
            rules=rules_of_run(self.config),
            json=self.config.json,
        )


def _resident_peak(*, reset: bool = False, reset_after: bool = False) -> int:
    """The most bytes that this process has had since the last reset; 0 where unknown."""
    found = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        found = 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        if reset_after:
            Path("/proc/self/clear_refs").write_text("5")
    return found
