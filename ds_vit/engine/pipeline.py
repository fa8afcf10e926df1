"""The pipeline engine: a ViT cut into stages, DeepSpeed's 1F1B schedule (Narayanan et al. 2019), ZeRO 0 or 1.

The layers are those of the plain model. What crosses a stage boundary is their tuple: the tokens and, beside them, the
int64 sample keys, so that no stage draws anything that another layout would draw otherwise.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_vit.engine.base import EVAL_CHUNK, Engine, EvalInputs, Inputs, Loss, StepResult
from ds_vit.engine.workarounds import one_grid
from ds_vit.models import BlockLayer, BlockRun
from ds_vit.parallel.groups import Groups


class StagedViT(PipelineModule):
    """The layers of one stage, run in order; blocks are recomputed in the backward pass where asked for.

    Args:
        layers: all layers of the model; those of this stage are filled, the others may stay on the meta device.
        bounds: first layer of each stage, and the number of layers: stage i has `layers[bounds[i]:bounds[i + 1]]`.
        groups: of the run.
        loss: `loss(logits, targets) → fp32 scalar`.
        checkpoint_interval: recompute every so many blocks (0: none).
        checkpoint_function: `checkpoint_function(function, *tensors)`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        bounds: Sequence[int],
        groups: Groups,
        loss: Loss,
        *,
        checkpoint_interval: int,
        checkpoint_function: Callable,
    ) -> None:
        self._bounds = list(bounds)
        self._interval = checkpoint_interval
        self._checkpoint = checkpoint_function
        with contextlib.redirect_stdout(io.StringIO()), one_grid(groups.grid):  # it prints seeds, which are not ours
            super().__init__(list(layers), topology=groups.grid.topology(), loss_fn=loss)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def forward(self, inputs: Any) -> Any:
        """(images, keys) or (tokens, keys, …) → (tokens, keys, …), or logits [B, C] on the last stage."""
        recompute = self._interval and torch.is_grad_enabled()
        layers = list(self.forward_funcs)
        while layers:
            blocks = list(itertools.takewhile(lambda layer: isinstance(layer, BlockLayer), layers))[: self._interval]
            if recompute and blocks:
                tokens = self._checkpoint(BlockRun(blocks), *inputs)
                inputs = (tokens, *inputs[1:])
                del layers[: len(blocks)]
            else:
                inputs = layers.pop(0)(inputs)
        if not isinstance(inputs, tuple):
            return inputs
        # Point-to-point transfers take contiguous tensors alone; a model without class token has others.
        outputs = tuple(tensor.contiguous() for tensor in inputs)
        if outputs[0].requires_grad:
            # DeepSpeed receives the gradient of every micro-batch in one buffer. With one image in a micro-batch, the
            # gradient of the position table is a view of it, which autograd keeps and the next micro-batch overwrites.
            outputs[0].register_hook(torch.clone)
        return outputs


class PipeEngine(Engine):
    """DeepSpeed's pipeline engine behind the common face."""

    def __init__(
        self, model: StagedViT, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any], **shared: Any
    ) -> None:
        config = dict(config)
        # Recomputation is the module's; partitioned transfers would not let learned rotary frequencies through.
        config["pipeline"] = {"activation_checkpoint_interval": 0, "pipe_partitioned": False, "grad_partitioned": False}
        config.pop("activation_checkpointing", None)
        super().__init__(model, optimizer, config, **shared)

    def train_step(self, inputs: Iterator[Inputs]) -> StepResult:
        """As `Engine.train_step`; stages between the first and the last take nothing from `inputs`."""
        self.guard.begin()
        loss = self.engine.train_batch(((images, keys), targets) for images, keys, targets in inputs)
        return self._result(loss.float())

    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        total = self.engine.total_loss if self.engine.is_last_stage() else None
        return total, 0 if total is None else self.accumulation

    def forward_batches(
        self, batches: Iterator[EvalInputs], num_batches: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """As `Engine.forward_batches`."""
        engine = self.engine
        at_end = engine.is_first_stage() or engine.is_last_stage()
        counts = engine.is_last_stage() and self.groups.tp_rank == 0
        monitoring, engine.monitor.enabled = engine.monitor.enabled, False  # it would log a loss that is not there
        for start in range(0, num_batches, EVAL_CHUNK):
            size = min(EVAL_CHUNK, num_batches - start)
            chunk = [next(batches) for _ in range(size)] if at_end else []
            feed = iter([((images, keys), targets) for images, keys, targets, _ in chunk])
            engine.total_loss = None  # eval_batch would go on adding to training's
            engine.reset_activation_shape()
            outputs = engine.eval_batch(
                feed, compute_loss=False, reduce_output=None, bcast_loss=False, num_micro_batches=size
            )
            for logits, (_, _, targets, valid) in zip(outputs if engine.is_last_stage() else [], chunk, strict=False):
                whole = self._whole_logits(logits).float()
                if counts:
                    yield whole, targets, valid
        engine.reset_activation_shape()
        engine.monitor.enabled = monitoring
