"""The memory of a rank and the time of a step, predicted from the shapes of a run; memory measured while it trains.

On an accelerator memory is what torch's allocator counts. On a CPU torch counts none: there it is the growth of the
process since before the engine was built, which includes much that does not belong to the step
(tests/planner/test_memory.py follows every storage instead). Time is predicted for the accelerators of
ds_vit/planner/data/accelerators.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import Checkpointing
from ds_vit.config.units import in_words
from ds_vit.data.field import origins
from ds_vit.device import is_accelerator, peak_bytes, reset_peak_bytes
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.models.conversions import compute_class_token
from ds_vit.models.layers import Layer
from ds_vit.models.zoo import create_model
from ds_vit.optim.build import states_per_element
from ds_vit.parallel.layout import Layout
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.counting import Flops, LayerWork, count_flops, most_allocated, work_of_layers
from ds_vit.planner.hardware import Accelerator, Link, link
from ds_vit.planner.memory import (
    LayerMemory,
    MemoryRules,
    RankMemory,
    StageMemory,
    layers_of_rank,
    memory_by_stage,
    memory_of_layers,
    unaligned_matrices,
)
from ds_vit.training.run import Run

UNPREDICTABLE = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, MemoryError)
"""Errors of layers on the meta device, which does not support all of them and takes host memory. Any other error is a
mistake of this package and ends the run."""


class Cost:
    """The memory and the time of a run; its layers are counted once.

    Args:
        run: of which.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def layers(self) -> list[Layer]:
        """Those of all stages on the meta device, as a rank has them."""
        model = self.run.model
        return self.of_rank(model.task.layers(model.whole))

    @property
    def _bounds(self) -> tuple[int, ...]:
        """Of the stages; one stage has the layers of all towers."""
        return self.run.model.bounds if self.run.layout.pp > 1 else (0, len(self.layers))

    def of_rank(self, layers: list[Layer]) -> list[Layer]:
        """Whole layers as the first rank of a tensor-parallel group has them, converted in place."""
        run, model = self.run, self.run.model
        layers = layers_of_rank(
            layers,
            run.config,
            class_parallel=model.class_parallel,
            compute=run.engine.precision.compute,
            frozen=model.frozen,
        )
        if model.reads_class_token:
            for layer in layers:
                compute_class_token(layer)
        return layers

    @cached_property
    def rules(self) -> MemoryRules:
        """The settings that memory and time depend on."""
        return self.rules_of(self.run.engine.json, self.run.layout, self.run.engine.checkpointing)

    def rules_of(self, json: DeepSpeedJson, layout: Layout, checkpointing: Checkpointing) -> MemoryRules:
        """The same with other settings of the engine, of the same tensor-parallel degree."""
        run, task = self.run, self.run.model.task
        held = task.training_fields if task.coupled else ()
        augmented = origins(task.training_fields) if run.optimizer else ()
        return MemoryRules(
            json,
            layout,
            precision=run.engine.precision,
            optimizer=run.optimizer.cls if run.optimizer else None,
            average=run.config.model_ema or bool(task.teachers),
            checkpointing=checkpointing,
            rates=self._scaled_share,
            inputs=sum(math.prod(field.shape) * (field.dtype or run.engine.dtype).itemsize for field in held),
            augmenting=sum(field.device_bytes() for field in augmented),
            graphs=run.engine.graphs,
            loss=functools.cache(self._loss),
        )

    @cached_property
    def _scaled_share(self) -> float:
        """The share of the trained weights whose factor on the learning rate is not 1 in the first step."""
        optimizer, schedule, model = self.run.optimizer, self.run.schedule, self.run.model
        if optimizer is None or schedule is None:
            return 0.0
        held = model.task.held_names(1, schedule.horizon)
        sizes = {name: p.numel() for name, p in model.whole.named_parameters() if name not in model.frozen}
        scaled = [size for name, size in sizes.items() if name in held or optimizer.factors.get(name, 1.0) != 1.0]
        return sum(scaled) / max(1, sum(sizes.values()))

    def _loss(self, micro_batch: int) -> int:
        """The most bytes that the loss of a micro-batch takes."""
        task, layers = self.run.model.task, self.layers
        return most_allocated(lambda: task.loss_on_meta(layers, micro_batch))

    @cached_property
    def stages(self) -> list[StageMemory]:
        """The memory of a rank of each pipeline stage, by the micro-batch."""
        return memory_by_stage(self.layer_memory, self._bounds, self.rules)

    @cached_property
    def layer_memory(self) -> list[LayerMemory]:
        """The parameters and kept activations of each layer of a rank."""
        optimizer = self.run.optimizer
        return memory_of_layers(
            self.layers,
            states=states_per_element(optimizer.cls, optimizer.arguments) if optimizer else None,
            fallback=(optimizer.fallback if optimizer else None) or frozenset(),
        )

    def memory(self) -> list[RankMemory]:
        """The memory of a rank of each pipeline stage, with the run's micro-batch."""
        return [stage.of(self.run.batch) for stage in self.stages]

    def fullest(self, batch: BatchSizes) -> RankMemory:
        """The memory on the accelerator of a rank of the stage that takes the most."""
        return max((stage.on_device(batch) for stage in self.stages), key=lambda memory: memory.together)

    def step_time(self, found: Accelerator, inside: Link | None = None) -> StepTime:
        """The time of a step on accelerators.

        Args:
            found: that computes.
            inside: the link inside a host; the accelerator's own where None.
        """
        run, layout = self.run, self.run.layout
        per_node = run.process.local_world_size or found.gpus_per_node
        return step_time(
            self.works,
            self._bounds,
            Machine(found, layout.world_size, per_node, inside or link(found.inside), link("ib400")),
            run.batch,
            self.rules,
        )

    @cached_property
    def works(self) -> list[LayerWork]:
        """The operations of each layer of a rank."""
        return work_of_layers(self.layers)


def flops_by_size(run: Run) -> dict[int | None, Flops]:
    """The FLOPs of an image of each size that the run trains on; of the model's size under None."""
    model, sizes = run.model, run.data.sizes
    flops: dict[int | None, Flops] = {None: count_flops(model.whole, model.frozen)}
    for size in sizes.sizes if sizes else ():
        flops[size] = count_flops(create_model(replace(model.spec, img_size=size)), model.frozen)
    return flops


class PeakMemory:
    """Predicts the memory of the fullest rank at a run's start, and measures it.

    Args:
        run: of which.
        device: of this rank.

    Attributes:
        predicted_bytes: 0 where the prediction failed.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        self.predicted_bytes = self._most = self._before = 0
        self._measure()  # from here on: a trial of --auto-batch or an earlier run of this program counted
        self._most = 0  # bytes of this rank in the whole run, up to the last measurement
        self._before = psutil.Process().memory_info().rss

    def start_rows(self) -> list[tuple[str, str]]:
        """Predict from shapes, on rank 0; the rows of the start table. A failure is only reported."""
        try:
            cost = Cost(self.run)
            self.predicted_bytes = cost.fullest(self.run.batch).together
        except UNPREDICTABLE as error:
            return [("predicted", f"warning: failed: {type(error).__name__}: {first_line(error)}")]
        rows = [("predicted", f"memory {in_words(self.predicted_bytes)} per rank")]
        if self.run.engine.dtype != torch.float32 and (unaligned := unaligned_matrices(cost.layers)):
            rows.append(("matrix sizes", f"{', '.join(unaligned)}: no multiples of 8, which slows 16-bit products"))
        return rows

    def figures(self) -> dict[str, int | None]:
        """The entry of summary.json, the same on every rank (a collective)."""
        self._measure()
        predicted, measured = self._largest(self.predicted_bytes, self._most)
        return {"predicted_bytes": int(predicted), "measured_bytes": int(measured) or None}

    def measured_bytes(self) -> int:
        """The most bytes that the fullest rank held since the last call, the same on every rank (a collective)."""
        return int(self._largest(self._measure())[0])

    def _largest(self, *own: float) -> list[float]:
        """The largest of each number over the ranks (a collective)."""
        most = torch.tensor(own, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.tolist()

    def _measure(self) -> int:
        """The most bytes that this rank held since the last measurement."""
        if is_accelerator(self.device):
            measured = peak_bytes(self.device)
            reset_peak_bytes(self.device)
        else:
            measured = max(0, _resident_peak() - self._before)
        self._most = max(self._most, measured)
        return measured


def _resident_peak() -> int:
    """The most bytes that this process has had since the last call; 0 where unknown."""
    found = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        found = 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        Path("/proc/self/clear_refs").write_text("5")
    return found
