"""The part of a checkpoint that each rank of a running engine holds, and which rank saves which segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ds_vit.checkpoint.tensors import TensorSpec
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.zero_map import Shard, ZeroMap

OPTIMIZER = "optimizer-"
"""Prefix of the kinds of the optimizer's states."""


class RankShare:
    """What this rank holds of the model, its optimizer state and its average, and which of it this rank saves.

    A collective where the optimizer keeps different states for different parameters (Muon).

    Args:
        zero_map: the map of this rank.
        ema: one tensor for each of the map's shards, or None without an average.
        shapes: timm name → whole shape, of all parameters in the model's order.
    """

    def __init__(
        self, zero_map: ZeroMap, ema: Sequence[torch.Tensor] | None, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self.zero_map = zero_map
        self.ema = ema
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.trained = [*zero_map.shards]
        self.blocks: list[Shard] = [*self.trained, *zero_map.frozen]
        self.saved = tuple(
            segment for shard in self.blocks for segment in shard.segments if self._saves(shard, segment.replicated)
        )
        """The segments that this rank saves."""
        self._saved_blocks = {segment.block for segment in self.saved}
        declared = {shard: zero_map.declared_keys(shard) for shard in self.trained}
        self._declared = {name: keys for shard, keys in declared.items() if keys is not None for name in shard.names}
        """timm name → its optimizer states; empty if all parameters have the same."""
        if self._declared:
            self._declared = {name: keys for own in gather_objects(self._declared) for name, keys in own.items()}

    def _saves(self, shard: Shard, replicated: bool) -> bool:
        """Whether this rank saves its copy of a segment."""
        partitioned = self.zero_map.stage == 3 or (self.zero_map.stage > 0 and shard.group >= 0)
        first_in_dp = partitioned or self.zero_map.dp_rank == 0
        return first_in_dp and (self.zero_map.tp_rank == 0 or not replicated)

    def kinds(self) -> tuple[str, ...]:
        """The kinds that have tensors now, the same on every rank."""
        keys = self.zero_map.state_keys()
        if keys and self._declared:  # a pipeline stage may lack states that only some parameters have
            keys = tuple(sorted({key for declared in self._declared.values() for key in declared}))
        states = tuple(OPTIMIZER + key for key in keys)
        return ("model", *states, *(("ema",) if self.ema is not None else ()))

    def specs(self, kind: str) -> list[TensorSpec]:
        """The whole tensors of a kind: weights of all parameters, optimizer state of the trained ones."""
        names = frozenset(self.shapes)
        if kind.startswith(OPTIMIZER):
            names = frozenset(name for name in self.zero_map.names if self._has_state(name, kind))
        return [TensorSpec(name, shape) for name, shape in self.shapes.items() if name in names]

    def _has_state(self, name: str, kind: str) -> bool:
        """Whether there is a state of this kind for a trained parameter."""
        return not self._declared or kind.removeprefix(OPTIMIZER) in self._declared[name]

    def tensors(self, kind: str) -> list[torch.Tensor | None]:
        """This rank's flat tensors of a kind, a block each, in place; None where this rank saves nothing."""
        out: list[torch.Tensor | None] = []
        for block, shard in enumerate(self.blocks):
            is_trained = block < len(self.trained)
            if block not in self._saved_blocks:
                out.append(None)
            elif kind.startswith(OPTIMIZER):
                has_state = is_trained and self._has_state(shard.names[0], kind)
                out.append(self.zero_map.state(shard, kind.removeprefix(OPTIMIZER)) if has_state else None)
            else:
                # A parameter that is not trained is its own average.
                out.append(self.ema[block] if kind == "ema" and self.ema and is_trained else shard.saved)
        return out
