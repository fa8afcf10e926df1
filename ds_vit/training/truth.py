"""What a run was predicted to need, and what it did: memory of the fullest rank, seconds of a step.

Memory is measured by torch's own count on an accelerator. On a CPU torch keeps none; there it is by how much the
process has grown since before the engine was built, which holds much that is not the step's, so that no deviation is
made of it (tests/planner/test_memory.py follows every storage instead). Time is predicted where the accelerator is one
that the planner knows (ds_vit/planner/data/accelerators).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.config.sizes import in_words
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.hardware import Accelerator, Link, accelerator_of_device, link
from ds_vit.planner.layers import cut_regions
from ds_vit.planner.memory import RankMemory, on_device
from ds_vit.planner.work import work_of_layers
from ds_vit.training.memory import estimate, in_host_memory, layers_of_rank, rules_of_run
from ds_vit.training.plan import Plan

_LARGE_DEVIATION = 0.15
_NAMES = {
    "going_back": "activations and what the backward pass makes",
    "updating": "gradients and their copies at the update",
    "optimizer": "the optimizer's state",
    "gathered": "weights put together",
    "buckets": "ZeRO's buckets",
    "weights": "weights",
    "masters": "masters",
    "average": "the average",
}


class Truth:
    """Predicts at a run's start, measures at its end.

    Args:
        plan: the run.
        device: where this rank computes.

    Attributes:
        memory: predicted of the fullest stage.
        step_seconds: predicted; None where the accelerator is not known.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.memory: RankMemory | None = None
        self.step_seconds: float | None = None
        self._failed = ""
        self._most = 0  # bytes of this rank before the last look
        self._before = _resident_peak(reset=True) if device.type == "cpu" else 0
        if device.type == "cuda":  # --auto-batch has filled it, or an earlier run of this program
            torch.cuda.reset_peak_memory_stats(device)

    def predict(self) -> None:
        """Work both out from shapes; a moment on the meta device, for rank 0. What goes wrong is said, no more."""
        try:
            self._predict()
        except Exception as error:  # a figure on a screen, whatever a model's layers raise on meta
            self.memory = self.step_seconds = None
            self._failed = f"warning: could not be worked out: {type(error).__name__}: {first_line(error)}"

    def _predict(self) -> None:
        stages = (on_device(one, in_host_memory(self.plan)) for one in estimate(self.plan))
        self.memory = max(stages, key=lambda memory: memory.together)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        found = accelerator_of_device(name)
        if found is not None and self.plan.image_sizes is None:  # the mean over several sizes is no step's
            self.step_seconds = PlannedTime(self.plan).on(found).seconds

    def start_rows(self) -> list[tuple[str, str]]:
        """The row of the start table."""
        if self.memory is None:
            return [("predicted", self._failed)]
        said = f"memory {in_words(self.memory.together)} a rank"
        return [("predicted", said + (f", step {self.step_seconds:.3f} s" if self.step_seconds else ""))]

    def figures(self, step_seconds: float | None) -> dict[str, Any]:
        """What summary.json has of both, the same on every rank (a collective).

        Args:
            step_seconds: measured; None where no step was.
        """
        self._look()
        own = (self.memory.together if self.memory else 0, self._most, self.step_seconds or 0.0)
        most = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        predicted, measured, seconds = most.tolist()
        return {
            "memory": {"predicted_bytes": int(predicted), "measured_bytes": int(measured) or None},
            "step_seconds": {"predicted": seconds or None, "measured": step_seconds},
        }

    def memory_bytes(self) -> int:
        """What the fullest rank held at most since the last call, the same on every rank (a collective)."""
        most = torch.tensor(self._look(), dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _look(self) -> int:
        """What this rank held at most since it was last looked at; `_most` is of the whole run."""
        if self.device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            measured = max(0, _resident_peak(reset_after=True) - self._before)
        self._most = max(self._most, measured)
        return measured

    def end_rows(self, figures: dict[str, Any]) -> list[tuple[str, str]]:
        """Predicted beside measured, and what deviates most where it is much."""
        rows, memory = [], figures["memory"]
        if memory["measured_bytes"] and memory["predicted_bytes"]:
            measured, predicted = memory["measured_bytes"], memory["predicted_bytes"]
            said = f"predicted {in_words(predicted)}, measured {in_words(measured)}"
            if self.device.type != "cuda":
                said += ", by which the whole process grew: torch's own, the loader and a checkpoint are in it"
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
    """What a step of a run takes on accelerators; the model is looked at once.

    Args:
        plan: the run.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self._layers = plan, layers_of_rank(plan)
        dtype = getattr(torch, plan.deepspeed.precision.compute)
        self._works = work_of_layers(plan.model.whole, self._layers, dtype)

    def on(self, found: Accelerator, inside: Link | None = None) -> StepTime:
        """The time of a step.

        Args:
            found: that computes.
            inside: the link inside a host; the accelerator's own where None.
        """
        layout, told = self.plan.parallel.layout, self.plan.deepspeed
        per_node = self.plan.parallel.process.local_world_size or found.gpus_per_node
        machine = Machine(found, layout.world_size, per_node, inside or link(found.inside), link("ib400"))
        return step_time(
            self._works,
            cut_regions(self._layers),
            [sum(p.numel() for p in layer.parameters()) for layer in self._layers],
            [hasattr(layer, "block") for layer in self._layers],
            self.plan.model.bounds,
            machine,
            layout=layout,
            batch=self.plan.data.batch,
            rules=rules_of_run(self.plan),
            json=told.json,
        )


def _resident_peak(*, reset: bool = False, reset_after: bool = False) -> int:
    """Bytes that this process has had at most, since the last reset; 0 where the system does not say."""
    found = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        found = 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        if reset_after:
            Path("/proc/self/clear_refs").write_text("5")
    return found
