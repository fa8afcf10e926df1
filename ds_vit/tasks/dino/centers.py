"""The centres of DINO: running means of the teacher's logits over the global batch, which a step uses before they move.

Shapes: R rows of a micro-batch, E bottleneck width, K prototypes (k of this rank where they are sharded).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ds_vit.parallel.tensor.collectives import TensorParallel, stack_over_group
from ds_vit.tasks.dino.loss import Prototypes, Sum, next_center
from ds_vit.tasks.task import StepContext


class Centers:
    """A centre for each part of the rows, the same on every rank.

    Args:
        parts: their names; none with Sinkhorn-Knopp.
        count: K.
        device: of the centres.
        tp: the group over which prototypes are sharded.

    Attributes:
        values: of this step, by part: float32 [K]. CUDA graphs read them where they are.
    """

    def __init__(self, parts: Collection[str], count: int, device: torch.device, tp: TensorParallel | None) -> None:
        self.values, self._next = ({part: torch.zeros(count, device=device) for part in parts} for _ in range(2))
        self._tp = tp
        self.forget()

    def forget(self) -> None:
        """Drop what the micro-batches of a step have left."""
        self._rows: list[Mapping[str, torch.Tensor]] = []
        self._step = 0

    def own(self, part: str) -> torch.Tensor:
        """The centre of this rank's prototypes [k]."""
        whole = self.values[part]
        return whole if self._tp is None else whole.chunk(self._tp.size)[self._tp.rank]

    def note(
        self,
        context: StepContext,
        taught: Mapping[str, torch.Tensor],
        prototypes: Prototypes,
        sum_over_ranks: Sum,
        counted: Mapping[str, torch.Tensor],
        micro_batches: int = 1,
    ) -> None:
        """Find the next centres once the rows of a step are complete (then a collective); `move` makes them count.

        Args:
            context: of this rank.
            taught: the teacher's rows of some micro-batches, by part [R, E].
            prototypes: the teacher's.
            sum_over_ranks: as `Sum`.
            counted: of parts that are filled up, which rows count; where `taught` has all of the step.
            micro_batches: how many those are.
        """
        if not self.values:
            return
        if self._step != context.step:  # the step before may have been left in its middle
            self._rows, self._step, self._missing = [], context.step, context.accumulation
        self._rows.append(taught)
        self._missing -= micro_batches
        if self._missing:
            return
        for part in self.values:
            rows = torch.cat([noted[part] for noted in self._rows])
            own = next_center(self.own(part), rows, prototypes, sum_over_ranks, counted.get(part))
            self._next[part].copy_(own if self._tp is None else stack_over_group(own, self._tp).flatten())
        self.forget()

    def move(self) -> None:
        """Take the next centres, after the step's update."""
        for part, center in self.values.items():
            center.copy_(self._next[part])
        self.forget()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a copy of `values`."""
        for part, center in self.values.items():
            center.copy_(state[part])
        self.forget()
