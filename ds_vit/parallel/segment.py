"""A part of a parameter: its place in the whole parameter and on the rank that holds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_vit.parallel.tensor.slices import TensorSlice


@dataclass(frozen=True)
class Segment:
    """`length` elements from `start` of a parameter's flattened tensor slice, in one of a rank's flat tensors.

    The ZeRO map is made of these, and ranks tell each other in them what they hold: to write checkpoints, to put
    matrices together.

    Attributes:
        name: timm's.
        tp_slice: how that rank's tensor slice lies in the whole parameter.
        start: first element, within the flattened tensor slice.
        length: elements; at least 1.
        block: index of the flat tensor that it lies in, among all those of its rank.
        offset: first element, within the flat tensor.
    """

    name: str
    tp_slice: TensorSlice
    start: int
    length: int
    block: int
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This segment's view [length] of its flat tensor, or of one that is laid out like it."""
        return flat.narrow(0, self.offset, self.length)

    @property
    def replicated(self) -> bool:
        """Every tensor-parallel rank holds the same values."""
        return self.tp_slice.dim is None

    @property
    def place(self) -> tuple[str, int, int, int]:
        """What it is of the whole; the same for copies on several ranks."""
        return self.name, self.tp_slice.slice_rank, self.start, self.length
