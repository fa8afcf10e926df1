"""The memory of a rank and the time of a step: predicted from the shapes of a run, and measured while it trains.

On an accelerator memory is what torch's allocator counts. On a CPU torch counts none: there it is the growth of the
process since before the engine was built, which includes much that does not belong to the step, so that no deviation is
reported (tests/planner/test_memory.py follows every storage instead). Time is predicted for the accelerators of
ds_vit/planner/data/accelerators.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_rules import Checkpointing
from ds_vit.config.units import in_words
from ds_vit.data.augment.on_device import bytes_of_photo
from ds_vit.device import hardware_name, is_accelerator, peak_bytes, reset_peak_bytes
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.models.conversions import compute_class_token
from ds_vit.models.layers import Layer
from ds_vit.optim.build import states_per_element
from ds_vit.parallel.layout import Layout
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.counting import LayerWork, most_allocated, work_of_layers
from ds_vit.planner.hardware import Accelerator, Link, accelerator_of_device, link
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
from ds_vit.training.build_engine import EngineConfig

_LARGE_DEVIATION = 0.15


class Cost:
    """The memory and the time of a run; its layers are counted once.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @cached_property
    def layers(self) -> list[Layer]:
        """Those of all stages on the meta device, as a rank has them."""
        model = self.config.model
        return self.of_rank(model.task.layers(model.whole))

    @property
    def _bounds(self) -> tuple[int, ...]:
        """Of the stages; one stage has the layers of all towers."""
        return self.config.model.bounds if self.config.layout.pp > 1 else (0, len(self.layers))

    def of_rank(self, layers: list[Layer]) -> list[Layer]:
        """Whole layers as the first rank of a tensor-parallel group has them, converted in place."""
        config, model = self.config, self.config.model
        layers = layers_of_rank(
            layers,
            tp=config.layout.tp,
            sequence_parallel=config.sequence_parallel,
            class_parallel=model.class_parallel,
            compute=config.precision.compute,
            norms_fp32=config.norms_fp32,
            frozen=model.frozen,
        )
        if model.reads_class_token:
            for layer in layers:
                compute_class_token(layer)
        return layers

    @cached_property
    def rules(self) -> MemoryRules:
        """The settings that memory and time depend on."""
        return self.rules_of(self.config.json, self.config.layout, self.config.checkpointing)

    def rules_of(self, json: Mapping[str, Any], layout: Layout, checkpointing: Checkpointing) -> MemoryRules:
        """The same with other settings of the engine, of the same tensor-parallel degree."""
        config = self.config
        return MemoryRules(
            json,
            layout,
            precision=config.precision,
            optimizer=config.optimizer.cls if config.optimizer else None,
            average=config.averaged or bool(config.model.task.teachers),
            checkpointing=checkpointing,
            rates=self._scaled_share,
            inputs=self._coupled_inputs,
            augmenting=self._augmenting,
            graphs=config.graphs,
            loss=functools.cache(self._loss),
        )

    @property
    def _scaled_share(self) -> float:
        """The share of the trained weights whose factor on the learning rate is not 1 in the first step."""
        optimizer, model = self.config.optimizer, self.config.model
        if optimizer is None:
            return 0.0
        held = model.task.held_names(1, optimizer.horizon)
        sizes = {name: p.numel() for name, p in model.whole.named_parameters() if name not in model.frozen}
        scaled = [size for name, size in sizes.items() if name in held or optimizer.factors.get(name, 1.0) != 1.0]
        return sum(scaled) / max(1, sum(sizes.values()))

    @property
    def _coupled_inputs(self) -> int:
        """Bytes of a sample's inputs, of a task whose steps hold all micro-batches at once; else 0."""
        task = self.config.model.task
        fields = task.fields(training=True) if task.coupled else ()
        return sum(math.prod(field.shape) * (field.dtype or self.config.dtype).itemsize for field in fields)

    @property
    def _augmenting(self) -> int:
        """Bytes of a sample while it is decoded and augmented on the device, if it is."""
        config, task = self.config, self.config.model.task
        if config.optimizer is None or task.augment.augment_on == "cpu":
            return 0
        shapes = [field.shape for field in task.fields(training=True) if field.reads == "images"]
        return sum(math.prod(shape[:-3]) * bytes_of_photo((shape[-2], shape[-1])) for shape in shapes)

    def _loss(self, micro_batch: int) -> int:
        """The most bytes that the loss of a micro-batch takes."""
        task, layers = self.config.model.task, self.layers
        return most_allocated(lambda: task.loss_on_meta(layers, micro_batch))

    @cached_property
    def stages(self) -> list[StageMemory]:
        """The memory of a rank of each pipeline stage, by the micro-batch."""
        return memory_by_stage(self.layer_memory, self._bounds, self.rules)

    @cached_property
    def layer_memory(self) -> list[LayerMemory]:
        """What each layer of a rank has and keeps."""
        config, optimizer = self.config, self.config.optimizer
        return memory_of_layers(
            config.model.whole,
            self.layers,
            compute=config.precision.compute,
            states=states_per_element(optimizer.cls, optimizer.arguments) if optimizer else None,
            fallback=(optimizer.fallback if optimizer else None) or frozenset(),
        )

    def memory(self) -> list[RankMemory]:
        """The memory of a rank of each pipeline stage, with the run's micro-batch."""
        return [stage.of(self.config.batch) for stage in self.stages]

    def fullest(self, batch: BatchSizes) -> RankMemory:
        """The memory on the accelerator of a rank of the stage that takes the most."""
        return max((stage.on_device(batch) for stage in self.stages), key=lambda memory: memory.together)

    def step_time(self, found: Accelerator, inside: Link | None = None) -> StepTime:
        """The time of a step on accelerators.

        Args:
            found: that computes.
            inside: the link inside a host; the accelerator's own where None.
        """
        config, layout = self.config, self.config.layout
        per_node = config.local_world_size or found.gpus_per_node
        return step_time(
            self.works,
            self._bounds,
            Machine(found, layout.world_size, per_node, inside or link(found.inside), link("ib400")),
            config.batch,
            self.rules,
        )

    @cached_property
    def works(self) -> list[LayerWork]:
        """The operations of each layer of a rank."""
        return work_of_layers(self.config.model.whole, self.layers, self.config.dtype)


class Prediction:
    """Predicts memory and step time at a run's start, and measures them.

    Args:
        config: of the engine.
        device: where this rank computes.
        predict_time: False where steps have several image sizes.

    Attributes:
        memory_bytes: predicted of the fullest rank; 0 where that failed.
        step_seconds: predicted; None where the accelerator is not known.
    """

    def __init__(self, config: EngineConfig, device: torch.device, *, predict_time: bool = True) -> None:
        self.config, self.device, self._predicts_time = config, device, predict_time
        self.memory_bytes = 0
        self.step_seconds: float | None = None
        self._most = self._before = 0
        self._measure()  # from here on: a trial of --auto-batch or an earlier run of this program counted
        self._most = 0  # bytes of this rank in the whole run, up to the last measurement
        self._before = psutil.Process().memory_info().rss

    def start_rows(self) -> list[tuple[str, str]]:
        """Predict both from shapes, on rank 0; the row of the start table. A failure is only reported."""
        try:
            cost = Cost(self.config)
            self.memory_bytes = cost.fullest(self.config.batch).together
            found = accelerator_of_device(hardware_name(self.device))
            if found is not None and self._predicts_time:
                self.step_seconds = cost.step_time(found).seconds
        except Exception as error:  # any error of a model's layers on the meta device
            self.memory_bytes, self.step_seconds = 0, None
            return [("predicted", f"warning: failed: {type(error).__name__}: {first_line(error)}")]
        step = f", step {self.step_seconds:.3f} s" if self.step_seconds else ""
        rows = [("predicted", f"memory {in_words(self.memory_bytes)} per rank{step}")]
        if self.config.dtype != torch.float32 and (unaligned := unaligned_matrices(cost.layers)):
            rows.append(("matrix sizes", f"{', '.join(unaligned)}: no multiples of 8, which slows 16-bit products"))
        return rows

    def figures(self, step_seconds: float | None) -> dict[str, Any]:
        """The entries of summary.json, the same on every rank (a collective).

        Args:
            step_seconds: measured; None where no step was.
        """
        self._measure()
        predicted, measured, seconds = self._largest(self.memory_bytes, self._most, self.step_seconds or 0.0)
        return {
            "memory": {"predicted_bytes": int(predicted), "measured_bytes": int(measured) or None},
            "step_seconds": {"predicted": seconds or None, "measured": step_seconds},
        }

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

    def end_rows(self, figures: dict[str, Any]) -> list[tuple[str, str]]:
        """Predicted and measured, with the deviation where it is large."""
        rows, on_cpu = [], not is_accelerator(self.device)
        predicted, measured = (figures["memory"][f"{kind}_bytes"] or 0 for kind in ("predicted", "measured"))
        # On a CPU the whole process is measured: next to a small model, torch and the loader are nearly all of it.
        if predicted and measured and not (on_cpu and max(predicted, measured) <= 2**30):
            said = f"predicted {in_words(predicted)}, measured {in_words(measured)}"
            remark = " (growth of the whole process: torch, the loader and a checkpoint included)"
            rows.append(("memory per rank", said + (remark if on_cpu else _deviation(predicted, measured))))
        times = figures["step_seconds"]
        if times["predicted"] and times["measured"]:
            said = f"predicted {times['predicted']:.3f} s, measured {times['measured']:.3f} s"
            rows.append(("step", said + _deviation(times["predicted"], times["measured"])))
        return rows


def _deviation(predicted: float, measured: float) -> str:
    """A large deviation, for people."""
    share = measured / predicted - 1
    return f": {share:+.0%}" if abs(share) > _LARGE_DEVIATION else ""


def _resident_peak() -> int:
    """The most bytes that this process has had since the last call; 0 where unknown."""
    found = 0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        found = 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        Path("/proc/self/clear_refs").write_text("5")
    return found
