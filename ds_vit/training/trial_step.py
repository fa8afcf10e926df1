"""A training step's memory, allocated temporarily: how `--auto-batch` tries a micro-batch on a device.

Each rank tries by itself: a rank that runs out of memory inside a collective would leave the others waiting in it. So
this is no step of DeepSpeed's. The layers of this rank's stage run for real, in the run's types, forward for as many
micro-batches as its place in the pipeline has under way, and backward; of blocks that are alike one is built and stands
for all. Weights, gradients, masters, the optimizer's state and ZeRO's bucket are held as one piece of the size that
the estimate says (memory.py counts them exactly), and a twentieth of the device stays free for collectives, the
allocator's gaps and other temporary memory of a step.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_vit.config.batch import BatchSizes
from ds_vit.models import (
    BlockLayer,
    Layer,
    compute_class_token,
    freeze,
    initialise,
    run_layers,
)
from ds_vit.parallel.tensor import TensorParallel, cut_layer
from ds_vit.planner.counting import cost_key, kept_by_layers
from ds_vit.planner.memory import cast_layer, in_host_memory, on_device
from ds_vit.tasks import ChainTask
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.memory import by_stage, layers_of_rank

_STAYS_FREE = 0.05  # of the device


class TrialStep:
    """This rank's part of a training step, without the other ranks; `with` gives the memory back.

    Args:
        config: of the engine.
        device: where it will train.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        stage, task = config.stage, config.model.task
        found = by_stage(config)[stage]
        self.stage = found.of_several or found  # of which there is the more to hold
        start, stop = config.model.bounds[stage : stage + 2]
        self.dtype = config.dtype
        on_meta = layers_of_rank(config)
        self.inputs = kept_by_layers(config.model.whole, on_meta, self.dtype)[start].inputs
        self.tp = TensorParallel(0, config.layout.tp, None, config.sequence_parallel)
        self.layers = self._build(on_meta[start:stop], start)
        assert isinstance(task, ChainTask), "resolve_model rejects --auto-batch for other tasks"
        self.loss = task.loss(self.tp if config.model.class_parallel else None)
        built = nn.ModuleList(dict.fromkeys(self.layers))
        here = 0 if config.zero_stage == 3 else sum(p.numel() * p.element_size() for p in built.parameters())
        states = on_device(self.stage.states, in_host_memory(config.json)).states + self._bytes_of_zero()
        self.margin = round(_STAYS_FREE * get_accelerator().total_memory(device.index))
        self.held_bytes = max(0, states - here)

    def _bytes_of_zero(self) -> int:
        """What ZeRO holds in addition to the states while activations are at their peak."""
        states, rules = self.stage.states, self.stage.rules
        # At stage 2 the partition that a second micro-batch is reduced into, next to the sum so far.
        return states.buckets + states.gathered + (states.gradients if rules.stage == 2 else 0)

    def _build(self, on_meta: list[Layer], start: int) -> list[Layer]:
        """The stage's layers on the device; those of blocks that are alike are one and the same."""
        model = self.config.model
        fresh = model.task.layers(model.whole)[start : start + len(on_meta)]
        first: dict[str, Layer] = {}
        layers = []
        for number, (layer, shape) in enumerate(zip(fresh, on_meta, strict=True)):
            name = str(cost_key(shape.block)) if isinstance(shape, BlockLayer) else str(number)
            layers.append(first.setdefault(name, layer))

        def on_layer(layer: Layer) -> None:
            freeze(layer, model.frozen)
            if self.tp.size > 1:
                cut_layer(layer, self.tp, class_parallel=model.class_parallel)
            cast_layer(layer, self.config.precision.compute, norms_fp32=self.config.norms_fp32)
            if model.reads_class_token:
                compute_class_token(layer)
            layer.train()

        initialise(model.whole, [*first.values()], seed=self.config.seed, device=self.device, on_layer=on_layer)
        return layers

    def __enter__(self) -> TrialStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self.layers
        _give_back()

    def __call__(self, batch: BatchSizes) -> int:
        """Take the memory of a micro-batch.

        Returns:
            The bytes that this rank had at most, without what stays free.

        Raises:
            torch.OutOfMemoryError: the device has too few.
        """
        _give_back()  # what an earlier try left behind
        accelerator = get_accelerator()
        accelerator.reset_peak_memory_stats()
        held = torch.empty(self.held_bytes + self.margin, dtype=torch.uint8, device=self.device)
        under_way = [self._forward(batch.micro_batch) for _ in range(min(self.stage.ahead, batch.accumulation))]
        while under_way:
            outputs = under_way.pop(0)
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        accelerator.synchronize()
        taken = accelerator.max_memory_allocated() - self.margin
        del held
        for layer in self.layers:
            layer.zero_grad()
        return max(0, taken)

    def _forward(self, rows: int) -> list[torch.Tensor]:
        """What a micro-batch's backward pass begins with: the loss, or what the next stage sends gradients of."""
        precision = self.config.precision.name
        inputs = tuple(self._like(tensor, rows if place < 2 else None) for place, tensor in enumerate(self.inputs))
        autocast = precision.removeprefix("autocast-")
        type_of_autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast)
        enabled = autocast != precision
        with torch.autocast(self.device.type, dtype=type_of_autocast, enabled=enabled):
            outputs = run_layers(self.layers, inputs, self.config.checkpointing.interval, self.config.recompute)
            if not isinstance(outputs, tuple):
                outputs = (self.loss(outputs, self._targets(rows, inputs[1])),)
        return [tensor for tensor in outputs if tensor.requires_grad]

    def _like(self, tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
        """Zeros of a micro-batch in place of a tensor on the meta device; None: as many rows as it has."""
        shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        made = torch.zeros(shape, dtype=tensor.dtype, device=self.device)
        return made.requires_grad_(self.config.stage > 0 and made.is_floating_point())

    def _targets(self, rows: int, keys: torch.Tensor) -> dict[str, Any]:
        """The inputs of the loss other than the outputs."""
        fields = [field for field in self.config.model.task.fields(training=True) if field.stage == "last"]
        made = {
            field.name: torch.zeros(rows, *field.shape, dtype=field.dtype or self.dtype, device=self.device)
            for field in fields
        }
        return {**made, "keys": keys}


def _give_back() -> None:
    """Let go of what nothing refers to."""
    gc.collect()
    get_accelerator().empty_cache()
