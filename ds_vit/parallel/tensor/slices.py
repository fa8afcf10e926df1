"""Parts of a parameter: the slice of a tensor-parallel rank, and the segment of a slice in a rank's flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSlice:
    """One rank's slice of a tensor, or the whole of one that every rank holds.

    A tensor is sharded along one dimension. Several matrices may be packed there (q, k and v; gate and value): each is
    a section, split into `size` equal contiguous shares, of which this rank has number `rank`. A fused qkv weight
    [3 * heads * head_dim, D] is thereby split by heads. If a section does not divide evenly (only the class axis may),
    all shares have the size of the largest, padded with zeros.

    Attributes:
        full_shape: of the whole tensor.
        dim: the sharded dimension; None for a tensor that every rank holds whole.
        sections: lengths along `dim` of what is packed there.
        rank: of this slice, within the tensor-parallel group.
        size: ranks of the group.
    """

    full_shape: tuple[int, ...]
    dim: int | None
    sections: tuple[int, ...]
    rank: int
    size: int

    def __post_init__(self) -> None:
        assert self.dim is None or sum(self.sections) == self.full_shape[self.dim], self

    def shares(self) -> list[int]:
        """Length of this slice's share of each section, padding included."""
        return [-(-length // self.size) for length in self.sections]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.dim is None:
            return self.full_shape
        return (*self.full_shape[: self.dim], sum(self.shares()), *self.full_shape[self.dim + 1 :])

    @property
    def slice_rank(self) -> int:
        """Its index among the slices; 0 if every rank holds the whole."""
        return 0 if self.dim is None else self.rank

    @property
    def num_slices(self) -> int:
        """The number of slices that make the whole."""
        return 1 if self.dim is None else self.size

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole tensor, in separate memory.

        Raises:
            ValueError: the tensor has another shape.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"a tensor of shape {tuple(full.shape)} is no whole of shape {self.full_shape}")
        if self.dim is None:
            return full.clone()
        pieces = []
        for section, share in zip(full.split(self.sections, self.dim), self.shares(), strict=True):
            start = min(self.rank * share, section.shape[self.dim])
            length = min(share, section.shape[self.dim] - start)
            pieces.append(section.narrow(self.dim, start, length))
            if length < share:
                pieces.append(full.new_zeros((*full.shape[: self.dim], share - length, *full.shape[self.dim + 1 :])))
        return torch.cat(pieces, self.dim)


def assemble(slices: Sequence[torch.Tensor], description: TensorSlice) -> torch.Tensor:
    """The whole tensor.

    Args:
        slices: every rank's slice, in rank order.
        description: of any one of them.

    Returns:
        a tensor of shape `description.full_shape`; if every rank holds the whole, the first rank's tensor itself.
    """
    dim = description.dim
    if dim is None:
        return slices[0]
    by_section = zip(*(piece.split(description.shares(), dim) for piece in slices), strict=True)
    whole = [
        torch.cat(shares, dim).narrow(dim, 0, length)
        for length, shares in zip(description.sections, by_section, strict=True)
    ]
    return torch.cat(whole, dim)


def assemble_flat(slices: Sequence[torch.Tensor], description: TensorSlice) -> torch.Tensor:
    """The whole tensor out of its flattened slices, `description.num_slices` of them in rank order."""
    return assemble([flat.view(description.local_shape) for flat in slices], description)


@dataclass(frozen=True)
class Segment:
    """`length` elements from `start` of a parameter's flattened tensor slice, in one of a rank's flat tensors.

    The ZeRO map consists of these. Ranks exchange them to write checkpoints and to gather matrices.

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
        """Its place in the whole parameter; the same for copies on several ranks."""
        return self.name, self.tp_slice.slice_rank, self.start, self.length
