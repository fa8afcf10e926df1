"""The moving average of the weights, kept in fp32 on this rank's shards: 4 bytes for each element that it holds.

The arithmetic of timm's `ModelEmaV3`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ds_vit.parallel.zero_map import ZeroMap


class Ema:
    """An average of the trained weights, sharded as ZeRO shards them.

    Args:
        zero_map: the map of this rank.
        decay: of the average.
        warmup: let the decay grow from 0 as 1 - (1 + step)^(-2/3), up to `decay`.

    Attributes:
        tensors: one fp32 tensor for each of the map's shards, laid out like it.
        updates: how often the average has been moved.
    """

    # Elements that are exchanged at a time in `swapped`.
    _CHUNK = 2**22

    def __init__(self, zero_map: ZeroMap, decay: float, warmup: bool = False) -> None:
        self.zero_map = zero_map
        self.decay = decay
        self.warmup = warmup
        self.updates = 0
        self.tensors = [shard.tensor.detach().to(torch.float32, copy=True) for shard in zero_map.shards]

    def decay_at(self, update: int) -> float:
        """The decay of an update, counted from 1; the first one copies the weights, as timm's does."""
        if update <= 1:
            return 0.0
        return min(self.decay, 1.0 - float(update) ** (-2 / 3)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        self.updates += 1
        self._move(1.0 - self.decay_at(self.updates))

    def _move(self, weight: float) -> None:
        """Move the average by this share of its distance to the weights."""
        pairs = [(average, shard.tensor) for average, shard in zip(self.tensors, self.zero_map.shards, strict=True)]
        alike = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if alike:
            torch._foreach_lerp_(*map(list, zip(*alike, strict=True)), weight)
        for average, weights in pairs:
            if average.dtype != weights.dtype:  # one copy in fp32 at a time: activations may be there as well
                average.lerp_(weights.float(), weight)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the block the model has the average's weights; after it, its own, to the bit (a collective).

        The two are exchanged in place, so no rank holds a further copy, unless the flat weights are not fp32.
        """
        kept = self._exchange([None] * len(self.tensors))
        try:
            yield
        finally:
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, kept: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Put the average into the model, or the weights back, of which `kept` is what that returned."""
        copies: list[torch.Tensor | None] = []
        for shard, average, back in zip(self.zero_map.shards, self.tensors, kept, strict=True):
            weights = shard.tensor
            if weights.dtype != average.dtype:  # 16-bit weights cannot hold the average for its way back
                copies.append(weights.clone())
                weights.copy_(average if back is None else back)
                continue
            copies.append(None)
            for piece, averaged in zip(weights.split(self._CHUNK), average.split(self._CHUNK), strict=True):
                old = piece.clone()
                piece.copy_(averaged)
                averaged.copy_(old)
        self.zero_map.refresh()
        return copies


class TeacherAverage(Ema):
    """Frozen teachers whose weights are the moving averages of their students' (Tarvainen and Valpola 2017).

    The averages are kept in fp32 on the students' shards; the teachers hold them in the model's type.

    Args:
        zero_map: the map of this rank.
        pairs: (teacher's, student's) parameters of this rank, of the same shapes.

    Attributes:
        write: copies the average into the teachers (a collective).
    """

    def __init__(self, zero_map: ZeroMap, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(zero_map, decay=0.0)
        self.write = zero_map.teacher_writer(pairs, self.tensors)
        self.write()

    @torch.no_grad()
    def update_by(self, momentum: float) -> None:
        """Keep this share of the average, take the rest from the weights, and write the teachers (a collective)."""
        self.updates += 1
        self._move(1.0 - momentum)
        self.write()
