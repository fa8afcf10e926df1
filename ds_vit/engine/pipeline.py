"""The pipeline engine: a ViT split into stages, DeepSpeed's 1F1B schedule (Narayanan et al. 2019), ZeRO 0 or 1.

The layers are those of the plain model. A tuple crosses each stage boundary: the tokens and the int64 sample keys, from
which every stage draws what the other layouts draw.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.engine.base import Engine, Forward, RankContext
from ds_vit.engine.patches import keep_training_mode, shared_grid
from ds_vit.engine.step_guard import StepResult
from ds_vit.models.layers import MAIN_TOWER, BlockLayer, HeadLayer
from ds_vit.models.sequential import giving_features, run_layers
from ds_vit.parallel.groups import Groups
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import Task


@dataclass(kw_only=True, eq=False)
class StageContext(RankContext):
    """The context on the last stage: the pipeline has run the towers, and `forward` returns their outputs.

    Attributes:
        outputs: of the towers for the micro-batch under way, by name.
    """

    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def forward(
        self, tower: str, inputs: Sequence[torch.Tensor | None], batch: Batch, *, grad: bool = True
    ) -> torch.Tensor:
        """As `StepContext.forward`."""
        return self.outputs[tower] if grad else self.outputs[tower].detach()


class StagedViT(PipelineModule):
    """The layers of one stage, run in order; its blocks may be recomputed in the backward pass.

    Args:
        layers: all layers of the model; those of this stage are filled, the others may stay on the meta device.
        bounds: first layer of each stage, and the number of layers: stage i has `layers[bounds[i]:bounds[i + 1]]`.
        groups: of the run.
        task: defines the step, which the last stage takes.
        tower_names: of the task, in the order of the last layer's outputs.
        recompute_interval: recompute every so many blocks (0: none).
        checkpoint_function: `checkpoint_function(function, *tensors)`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        bounds: Sequence[int],
        groups: Groups,
        task: Task,
        tower_names: Sequence[str],
        *,
        recompute_interval: int,
        checkpoint_function: Callable,
    ) -> None:
        self.parts = list(bounds)
        self._reads_frequencies = [isinstance(layer, BlockLayer) and layer.reads_frequencies for layer in layers]
        first = layers[bounds[groups.pipeline_stage]]
        if isinstance(first, HeadLayer):
            first.drops_frequencies = False  # the stage before does
        self._interval = recompute_interval
        self._checkpoint = checkpoint_function
        self.target_names = [*(field.name for field in task.training_fields if field.stage == "last"), "keys"]
        self.tower_names = tuple(tower_names)
        self._task = task
        self.context: StageContext | None = None  # from the engine
        self.pieces: Iterator[Mapping[str, torch.Tensor]] = iter(())  # of a coupled task's second pass, in order
        self.coupled_loss: torch.Tensor | None = None

        assert groups.grid is not None, "a pipeline has a grid"
        with contextlib.redirect_stdout(io.StringIO()), shared_grid(groups.grid):  # it prints seeds, which are not ours
            super().__init__(list(layers), topology=groups.grid.topology(), loss_fn=self._loss)

    def outputs_by_tower(self, outputs: torch.Tensor | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of the last layer by the tower that they are of."""
        each = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return dict(zip(self.tower_names, each, strict=True))

    def _loss(self, outputs: torch.Tensor | Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        """The last stage's part of the task's step."""
        assert self.context is not None
        self.context.outputs = self.outputs_by_tower(outputs)
        batch = dict(zip(self.target_names, targets, strict=True))
        share = self._task.step(self.context, batch, next(self.pieces) if self._task.coupled else None)
        if self.coupled_loss is None:
            return share
        # The gradient is the share's. The value is the loss of the global batch, which DeepSpeed averages and reports.
        return share - share.detach() + self.coupled_loss

    def _partition_layers(self, method: str = "uniform") -> None:
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def forward(self, inputs: Any) -> Any:
        """(images, keys) or (tokens, keys, …) → (tokens, keys, …), or logits [B, C] on the last stage."""
        outputs = run_layers(self.forward_funcs, inputs, self._interval, self._checkpoint)
        return self._to_next_stage(outputs) if isinstance(outputs, tuple) else outputs

    def _to_next_stage(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors that cross, each float one with a gradient on its way back, which the transfers require."""
        stop = self.parts[self.stage_id + 1]
        if self._reads_frequencies[stop - 1] and not self._reads_frequencies[stop]:
            outputs = outputs[:-1]  # no later layer reads the learned rotary frequencies
        # Point-to-point transfers take contiguous tensors only; a model without class token has others.
        outputs = tuple(tensor.contiguous() for tensor in outputs)
        if not torch.is_grad_enabled():
            return outputs
        # The next stage sends a gradient to frozen tensors too (frequencies, or all embedding parameters except the
        # frequencies): it ends in a leaf, where autograd would refuse a tensor without a graph.
        outputs = tuple(
            tensor.detach().requires_grad_() if tensor.is_floating_point() and not tensor.requires_grad else tensor
            for tensor in outputs
        )
        # DeepSpeed receives the gradient of every micro-batch in one buffer. With one image in a micro-batch, the
        # gradient of the position table is a view of it, which autograd keeps and the next micro-batch overwrites.
        # Ids of the next tower come first where a stage begins with it.
        next(tensor for tensor in outputs if tensor.requires_grad).register_hook(torch.clone)
        return outputs


class PipeEngine(Engine):
    """DeepSpeed's pipeline engine, implements `Engine`; arguments as there."""

    context: StageContext

    def __init__(
        self,
        model: StagedViT,
        optimizer: torch.optim.Optimizer | None,
        task: Task,
        json: DeepSpeedJson,
        **shared: Any,
    ) -> None:
        self._staged = model
        # The module recomputes; partitioned transfers do not carry learned rotary frequencies.
        pipeline = {"activation_checkpoint_interval": 0, "pipe_partitioned": False, "grad_partitioned": False}
        json = json.replace({"pipeline": pipeline}, ["activation_checkpointing"])
        super().__init__(model, optimizer, task, json, **shared)

    def _make_context(self, model: StagedViT, *, trains: bool, **shared: Any) -> StageContext:
        model.context = StageContext(**shared)
        return model.context

    def take_images_of(self, size: int, patch_size: tuple[int, int]) -> None:
        """As `Engine.take_images_of`; the stages exchange their shapes anew."""
        super().take_images_of(size, patch_size)
        self.engine.reset_activation_shape()

    @property
    def counts_rows(self) -> bool:
        """As `Engine.counts_rows`."""
        return self.engine.is_last_stage() and super().counts_rows

    def train_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object] = lambda: None) -> StepResult:
        """As `Engine.train_step`; stages between the first and the last take nothing from `batches`."""
        meanwhile()
        self.guard.begin()
        if self._task.coupled:
            batches = iter(self._couple(batches))
        names = self.module.target_names  # DeepSpeed reads of a pair only the part of its stage
        pairs = ((self._stage_inputs(batch), tuple(batch.get(name) for name in names)) for batch in batches)
        loss = self.engine.train_batch(pairs)
        return self._result(loss.float())

    def _couple(self, batches: Iterator[Batch]) -> list[Batch]:
        """The first of two passes over the micro-batches: without gradients, up to the loss of the global batch.

        A task that collects no outputs needs no forward pass here.
        """
        engine, staged, context = self.engine, self._staged, self.context
        at_end = engine.is_first_stage() or engine.is_last_stage()
        chunk = list(islice(batches, self.accumulation)) if at_end else []
        outputs: list[Any] = []
        if self._task.collects_outputs:
            with keep_training_mode(self.module):
                outputs = self._run_forward(chunk, self.accumulation)
        if engine.is_last_stage():
            collected = []
            for number, batch in enumerate(chunk):
                context.outputs = staged.outputs_by_tower(outputs[number]) if outputs else {}
                with torch.no_grad():
                    collected.append(self._task.collect(context, batch))
            coupled = self._task.couple(context, collected)
            staged.coupled_loss = None if coupled.loss is None else coupled.loss.detach()
            staged.pieces = iter(coupled.pieces)
        return chunk

    def _stage_inputs(self, batch: Batch) -> tuple[torch.Tensor | None, ...]:
        """(input of the first tower, keys, inputs of the others …)."""
        first, *others = self._inputs(batch)
        return (first, batch["keys"], *others)

    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        total = self.engine.total_loss if self.engine.is_last_stage() else None
        return total, 0 if total is None else self.accumulation

    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False, run: Forward | None = None
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """As `Engine.forward_batches`."""
        engine = self.engine
        at_end = engine.is_first_stage() or engine.is_last_stage()
        chunk = [next(batches) for _ in range(num_batches)] if at_end else []
        with giving_features(self.module, features):
            outputs = self._run_forward(chunk, num_batches)
        if engine.is_last_stage():
            context = self.context
            for batch in chunk:
                context.outputs = self._staged.outputs_by_tower(outputs.pop(0))  # freed once it has been counted
                rated = context.outputs[MAIN_TOWER] if features else (run or self._task.outputs)(context, batch)
                whole = self._whole(rated, features)
                if self.counts_rows:
                    yield whole, batch

    def _run_forward(self, chunk: Sequence[Batch], num_batches: int) -> list[Any]:
        """Outputs of the last layer for each batch, on the last stage, by DeepSpeed's inference schedule."""
        engine = self.engine
        monitoring, engine.monitor.enabled = engine.monitor.enabled, False  # there is no loss to log
        engine.total_loss = None  # eval_batch would keep adding to training's
        engine.reset_activation_shape()
        outputs = engine.eval_batch(
            # The loss is not asked for: the last stage's part may be any tensor.
            iter([(self._stage_inputs(batch), batch["keys"]) for batch in chunk]),
            compute_loss=False,
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=num_batches,
        )
        # DeepSpeed would hold all of these until the next chunk has run, or through the steps of training.
        engine.fwd_outputs, engine.loss, engine.total_loss = [], None, None
        for buffer in engine.pipe_buffers.values():
            buffer[:] = [None] * len(buffer)
        engine.reset_activation_shape()
        engine.monitor.enabled = monitoring
        return outputs
