"""The pipeline engine: a ViT cut into stages, DeepSpeed's 1F1B schedule (Narayanan et al. 2019), ZeRO 0 or 1.

The layers are those of the plain model. What crosses a stage boundary is their tuple: the tokens and, beside them, the
int64 sample keys, so that no stage draws anything that another layout would draw otherwise.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_vit.engine.base import Engine
from ds_vit.engine.step_guard import StepResult
from ds_vit.engine.workarounds import one_grid
from ds_vit.models import BlockLayer, DecoderBlockLayer, giving_features, run_layers
from ds_vit.parallel.groups import Groups
from ds_vit.tasks import Batch, Loss


class StagedViT(PipelineModule):
    """The layers of one stage, run in order; blocks are recomputed in the backward pass where asked for.

    Args:
        layers: all layers of the model; those of this stage are filled, the others may stay on the meta device.
        bounds: first layer of each stage, and the number of layers: stage i has `layers[bounds[i]:bounds[i + 1]]`.
        groups: of the run.
        loss: the mean over a micro-batch.
        target_names: the fields of a batch that the loss takes; the keys come with them.
        checkpoint_interval: recompute every so many blocks (0: none).
        checkpoint_function: `checkpoint_function(function, *tensors)`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        bounds: Sequence[int],
        groups: Groups,
        loss: Loss,
        target_names: Sequence[str],
        *,
        checkpoint_interval: int,
        checkpoint_function: Callable,
    ) -> None:
        self._bounds = list(bounds)
        encoder = [isinstance(layer, BlockLayer) and not isinstance(layer, DecoderBlockLayer) for layer in layers]
        self._last_encoder_block = max(index for index, is_block in enumerate(encoder) if is_block)
        self._interval = checkpoint_interval
        self._checkpoint = checkpoint_function
        self.target_names = (*target_names, "keys")

        def of_tuple(outputs: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
            return loss(outputs, dict(zip(self.target_names, targets, strict=True)))

        assert groups.grid is not None, "a pipeline has a grid"
        with contextlib.redirect_stdout(io.StringIO()), one_grid(groups.grid):  # it prints seeds, which are not ours
            super().__init__(list(layers), topology=groups.grid.topology(), loss_fn=of_tuple)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def forward(self, inputs: Any) -> Any:
        """(images, keys) or (tokens, keys, …) → (tokens, keys, …), or logits [B, C] on the last stage."""
        outputs = run_layers(self.forward_funcs, inputs, self._interval, self._checkpoint)
        return self._to_next_stage(outputs) if isinstance(outputs, tuple) else outputs

    def _to_next_stage(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What crosses, so that each float tensor has a gradient on its way back, which the transfers insist on."""
        if self.parts[self.stage_id + 1] > self._last_encoder_block:
            outputs = outputs[:2]  # nothing behind has a use for learned rotary frequencies
        # Point-to-point transfers take contiguous tensors alone; a model without class token has others.
        outputs = tuple(tensor.contiguous() for tensor in outputs)
        if not torch.is_grad_enabled():
            return outputs
        # The next stage sends a gradient even to what is frozen (frequencies, or all of an embedding but them): it ends
        # in a leaf, where autograd would refuse a tensor without a graph.
        outputs = tuple(
            tensor.detach().requires_grad_() if tensor.is_floating_point() and not tensor.requires_grad else tensor
            for tensor in outputs
        )
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

    def take_images_of(self, size: int, patch_size: tuple[int, int]) -> None:
        """As `Engine.take_images_of`; the stages tell each other their shapes anew."""
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
        loss = self.engine.train_batch(self._pair(batch) for batch in batches)
        return self._result(loss.float())

    def _pair(self, batch: Batch) -> tuple[tuple, tuple]:
        """(what the first stage takes, what the loss takes); DeepSpeed looks at a stage's own part alone."""
        return self._inputs(batch), tuple(batch.get(name) for name in self.module.target_names)

    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        total = self.engine.total_loss if self.engine.is_last_stage() else None
        return total, 0 if total is None else self.accumulation

    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """As `Engine.forward_batches`."""
        engine = self.engine
        at_end = engine.is_first_stage() or engine.is_last_stage()
        monitoring, engine.monitor.enabled = engine.monitor.enabled, False  # it would log a loss that is not there
        chunk = [next(batches) for _ in range(num_batches)] if at_end else []
        engine.total_loss = None  # eval_batch would go on adding to training's
        engine.reset_activation_shape()
        with giving_features(self.module, features):
            outputs = engine.eval_batch(
                # The loss is not asked for: the last stage's part may be any tensor.
                iter([(self._inputs(batch), batch["keys"]) for batch in chunk]),
                compute_loss=False,
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=num_batches,
            )
        # DeepSpeed would hold all of these until the next chunk has run, or through the steps of training.
        engine.fwd_outputs, engine.loss, engine.total_loss = [], None, None
        for buffer in engine.pipe_buffers.values():
            buffer[:] = [None] * len(buffer)
        if engine.is_last_stage():
            outputs.reverse()
            chunk.reverse()
            while outputs:
                whole, batch = self._whole(outputs.pop(), features), chunk.pop()
                if self.counts_rows:
                    yield whole, batch
        engine.reset_activation_shape()
        engine.monitor.enabled = monitoring
