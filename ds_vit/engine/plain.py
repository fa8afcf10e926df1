"""The plain engine: a whole ViT on each rank, or its tensor slice; ZeRO 0 to 3, one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ds_vit.config.deepspeed_rules import sums_going_back
from ds_vit.engine.base import Engine
from ds_vit.engine.overlap import Overlap
from ds_vit.engine.step_guard import StepResult
from ds_vit.models import giving_features
from ds_vit.tasks import Batch, Loss


class PlainEngine(Engine):
    """DeepSpeed's engine around a sequential ViT: ZeRO 0 to 3, one pipeline stage.

    Args:
        model: `forward(images, keys) → logits [B, C]`.
        optimizer: over the model's trained parameters.
        loss: the mean over a micro-batch.
        config: the DeepSpeed JSON with every "auto" resolved.
        shared: `groups`, `input_names` and `whole_outputs`, as for `Engine`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss: Loss,
        config: Mapping[str, Any],
        **shared: Any,
    ) -> None:
        self._loss = loss
        self._total: torch.Tensor | None = None
        super().__init__(model, optimizer, config, **shared)
        layout = self.groups.layout
        overlaps = optimizer is not None and sums_going_back(config, pp=layout.pp, dp=layout.dp, tp=layout.tp)
        self._overlap = Overlap(self.engine, config, self.groups) if overlaps else None

    @property
    def module(self) -> nn.Module:
        """As `Engine.module`."""
        module = super().module
        return module.module if isinstance(module, DistributedDataParallel) else module

    def _initialize_arguments(self) -> dict[str, Any]:
        return {} if self.groups.grid is None else {"mpu": self.groups.grid}

    def train_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object] = lambda: None) -> StepResult:
        """As `Engine.train_step`; `meanwhile` has its moment when the first forward pass is under way."""
        self.engine.train()
        self.guard.begin()
        self._total = None
        if self._overlap is not None:
            self._overlap.begin()
        for number in range(self.accumulation):
            batch = next(batches)
            self.module.keys_on_host = batch.get("keys_on_host")
            loss = self._loss(self.engine(*self._inputs(batch)), batch)
            self.module.keys_on_host = None
            if number == 0:
                meanwhile()
            self.engine.backward(loss)
            self._total = loss.detach() if self._total is None else self._total + loss.detach()
            self.engine.step()
        assert self._total is not None
        return self._result(self._total / self.accumulation)

    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        return self._total, self.accumulation

    @torch.no_grad()
    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """As `Engine.forward_batches`."""
        self.engine.eval()
        for _ in range(num_batches):
            batch = next(batches)
            with giving_features(self.module, features):
                outputs = self._whole(self.engine(*self._inputs(batch)), features)
            if self.counts_rows:
                yield outputs, batch
