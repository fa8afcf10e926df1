"""The layout of a run: pp x dp x tp degrees, the coordinates of each rank, and the hosts that ranks are on.

tp exchanges activations in every sub-layer and belongs inside a host; pp sends activations to neighbours once a
micro-batch; dp reduces gradients once per step. The order of ranks (`AXES`) puts them on hosts in that order. Nothing
here needs a process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process

AXES = ("data", "pipe", "model")
"""The axes of a rank's coordinates by DeepSpeed's names, outermost first: a replica's ranks are neighbours."""


@dataclass(frozen=True)
class Layout:
    """Degrees of pipeline, data and tensor parallelism, each at least 1; `pp * dp * tp` is the world size.

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
        if world_size % (pp * tp):
            nearest = (world_size // (pp * tp) or 1) * pp * tp
            smaller = ((p, t) for p in range(1, pp + 1) for t in range(1, tp + 1) if tp % t == 0)
            fitting = sorted((p * t, t, p) for p, t in smaller if world_size % (p * t) == 0)
            ways = [f"--pp {p} --tp {t}" for _, t, p in fitting[:-4:-1]]
            raise UserError(
                f"{world_size} ranks cannot be split into --pp {pp} x --tp {tp} = {pp * tp} ranks per replica; "
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


_MAX_ROWS = 16


def placement_rows(layout: Layout, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """(host, its ranks and what they are) of each host, and which axes cross the network; for a table.

    Args:
        layout: the degrees.
        hosts: the host's name of each rank, in the order of ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rows = [(host, _describe(layout, ranks)) for host, ranks in itertools.islice(by_host.items(), _MAX_ROWS)]
    if len(by_host) > _MAX_ROWS:
        rows.append(("…", f"and {len(by_host) - _MAX_ROWS} hosts more"))
    grid = np.array(hosts).reshape(layout.dims)
    axes = {name: axis for axis, name in ((2, "tp"), (1, "pp"), (0, "dp")) if layout.dims[axis] > 1}
    across = [name for name, axis in axes.items() if (grid != grid.take([0], axis)).any()]
    inside = [name for name in axes if name not in across]
    return [*rows, ("inside a host", ", ".join(inside) or "nothing"), ("across hosts", ", ".join(across) or "nothing")]


def _describe(layout: Layout, ranks: Sequence[int]) -> str:
    parts = [f"ranks {_ranges(ranks)}", f"replica {_ranges({layout.dp_rank(r) for r in ranks})}"]
    if layout.pp > 1:
        parts.append(f"stage {_ranges({layout.stage(r) for r in ranks})}")
    if layout.tp > 1:
        parts.append(f"tp {_ranges({layout.tp_rank(r) for r in ranks})}")
    return ", ".join(parts)


def check_tp_inside_hosts(layout: Layout, process: Process, allowed: bool) -> None:
    """Reject tensor parallelism over the network, as far as this rank's launcher reports where ranks are.

    Launchers number ranks host by host. Where a host's share is no multiple of tp, some group lies on two hosts.

    Args:
        layout: the degrees.
        process: this rank.
        allowed: --tp-across-hosts was given.

    Raises:
        UserError: a group crosses hosts, which was not allowed; or it was allowed, and none does.
    """
    local = process.local_world_size
    if local is None:
        return
    crosses = layout.tp > 1 and process.spans_hosts and local % layout.tp != 0
    if crosses and not allowed:
        fitting = [str(t) for t in range(1, local + 1) if local % t == 0 and layout.world_size % (t * layout.pp) == 0]
        raise UserError(
            f"--tp {layout.tp} with {local} ranks per host: a tensor-parallel group would lie on two hosts, and every "
            f"sub-layer would wait for the network; --tp {' or '.join(fitting)} stays inside a host, or say "
            "--tp-across-hosts"
        )
    if allowed and not crosses:
        raise UserError(
            f"--tp-across-hosts has no effect with --tp {layout.tp} and {local} ranks per host: every tensor-parallel "
            "group lies inside a host; drop it"
        )


def _ranges(numbers: Sequence[int] | set[int]) -> str:
    """{0, 1, 2, 5} → "0-2, 5"."""
    ordered = sorted(numbers)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
