"""The layout of a run: pp x dp x tp degrees, and the coordinates of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from ds_vit.fault_tolerance.errors import UserError

AXES = ("data", "pipe", "model")
"""The axes of a rank's coordinates by DeepSpeed's names, outermost first: a replica's ranks are neighbours."""


@dataclass(frozen=True)
class Layout:
    """Degrees of pipeline, data and tensor parallelism; `pp * dp * tp` is the world size.

    A rank's coordinates follow `AXES`: tp innermost (inside a host), then pp (neighbours), dp outermost.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @classmethod
    def of_world(cls, world_size: int, pp: int = 1, tp: int = 1) -> Layout:
        """Give every rank that pp and tp leave over to data parallelism.

        Raises:
            UserError: pp * tp does not divide the world size.
        """
        if min(pp, tp) < 1:
            raise UserError(f"--pp {pp} --tp {tp}: both must be at least 1")
        if world_size % (pp * tp):
            nearest = (world_size // (pp * tp) or 1) * pp * tp
            smaller = ((p, t) for p in range(1, pp + 1) for t in range(1, tp + 1) if tp % t == 0)
            fitting = sorted((p * t, t, p) for p, t in smaller if world_size % (p * t) == 0)
            ways = [f"--pp {p} --tp {t}" for _, t, p in fitting[:-4:-1]]
            raise UserError(
                f"{world_size} ranks cannot be cut into --pp {pp} x --tp {tp} = {pp * tp} ranks per replica; "
                f"start {nearest} ranks, or give {' or '.join(ways)}"
            )
        return cls(pp, world_size // (pp * tp), tp)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def dims(self) -> tuple[int, int, int]:
        """The degrees in the order of `AXES`."""
        return self.dp, self.pp, self.tp

    def dp_rank(self, rank: int) -> int:
        """The data-parallel coordinate of a global rank, 0 to dp - 1."""
        return rank // (self.pp * self.tp)

    def tp_rank(self, rank: int) -> int:
        """The tensor-parallel coordinate of a global rank, 0 to tp - 1."""
        return rank % self.tp

    def stage(self, rank: int) -> int:
        """The pipeline stage of a global rank, 0 to pp - 1."""
        return rank // self.tp % self.pp

    def __str__(self) -> str:
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}"
