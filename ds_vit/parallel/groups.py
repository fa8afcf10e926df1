"""The process groups of a run: created once, only here, and passed down.

| group | its ranks | who uses it |
|---|---|---|
| the world | all: torch's default group | means of the loss, counts of evaluation, checkpoints read by all |
| `dp` | of one stage and one tensor slice: copies of the same weights | ZeRO's sums and partitions, `check_replicas` |
| `tp` | that share the layers of a replica's stage | the sharded layers, a replica's inputs, `check_replicas` |
| `stage` | that hold a pipeline stage's parameters between them, dp x tp | the ZeRO map: norms, ratios, matrices |
| `replica` | that hold a whole model between them, pp x tp | the gradient norm without ZeRO |
| `files` | all, over gloo | the thread that writes checkpoints, concurrently with training's collectives |
| `ballots` | all, over gloo | whether to stop or to save, once per step, without waiting for the device |

A group is None if it contains all ranks, or only this one. DeepSpeed's own point-to-point groups of
a pipeline are in `grid`, which only DeepSpeed reads. The watchdog needs no group.

`gather_rows` and `gather_objects` gather over any of them.

Shapes: B samples of this rank, dp ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.config.schema import RunConfig
from ds_vit.parallel.layout import AXES, Layout
from ds_vit.parallel.tensor.collectives import TensorParallel

_FILES_TIMEOUT = datetime.timedelta(hours=2)  # a full disk or a slow file system holds up the writers, not training


@dataclass(frozen=True)
class Groups:
    """This rank's process groups; the table above says which ranks are in each, and when one is None.

    Attributes:
        layout: the degrees.
        rank: this one, of the world.
        dp, tp, stage, replica: of the training's device.
        files, ballots: of the host; None in a run that saves nothing.
        grid: DeepSpeed's PipelineParallelGrid of the same groups; None where the layout is data-parallel only.
    """

    layout: Layout
    rank: int
    dp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    files: dist.ProcessGroup | None = None
    ballots: dist.ProcessGroup | None = None
    grid: Any | None = None

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel coordinate."""
        return self.layout.dp_rank(self.rank)

    @property
    def tp_rank(self) -> int:
        """This rank's tensor-parallel coordinate."""
        return self.layout.tp_rank(self.rank)

    @property
    def pipeline_stage(self) -> int:
        """The pipeline stage that this rank is in."""
        return self.layout.stage(self.rank)

    def tensor_parallel(self, config: RunConfig) -> TensorParallel | None:
        """This rank among those that share its layers, or None without tensor parallelism."""
        if self.tp is None:
            return None
        return replace(TensorParallel.planned(config), rank=self.tp_rank, group=self.tp)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The maximum of each small number over all ranks (a collective that waits for no device)."""
        if self.ballots is None:
            return list(values)
        answer = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self.ballots)
        return answer.tolist()


def build_groups(layout: Layout, *, saves: bool = False) -> Groups:
    """Create the process groups of a layout (a collective of all ranks, after `init_distributed`).

    Args:
        layout: as large as the world.
        saves: with the groups of the host, which checkpoints and their ballots take.
    """
    rank, several = dist.get_rank(), layout.world_size > 1
    assert layout.world_size == dist.get_world_size(), f"{layout} in a world of {dist.get_world_size()}"
    grid = _grid(layout) if layout.pp * layout.tp > 1 else None
    stages = [[r for r in range(layout.world_size) if layout.stage(r) == stage] for stage in range(layout.pp)]
    return Groups(
        layout=layout,
        rank=rank,
        dp=grid and grid.get_data_parallel_group(),
        tp=grid.get_slice_parallel_group() if grid is not None and layout.tp > 1 else None,
        stage=dist.new_subgroups_by_enumeration(stages)[0] if layout.pp > 1 else None,
        replica=grid and grid.get_model_parallel_group(),
        files=dist.new_group(backend="gloo", timeout=_FILES_TIMEOUT) if saves else None,
        ballots=dist.new_group(backend="gloo") if saves and several else None,
        grid=grid,
    )


def _grid(layout: Layout) -> Any:
    """DeepSpeed's groups: over each axis, over a replica, and from stage to stage."""
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

    with contextlib.redirect_stdout(io.StringIO()):  # it prints the topology
        return PipelineParallelGrid(topology=ProcessTopology(axes=list(AXES), dims=list(layout.dims)))


class _GatherRows(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        gathered = rows.new_empty(dist.get_world_size(group) * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = grads[0].contiguous()
        own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(ctx.group), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient, group=ctx.group)
        return own, None


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[B, …] of each rank → [dp · B, …] in rank order (a collective, in the backward pass too).

    The gradient of a rank's rows is the sum of all ranks' gradients for them; it is not divided.
    """
    return _GatherRows.apply(rows, group)


def over_gloo(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether collectives of a group on tensors of a device are gloo's."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo"


def gather_flats(flats: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Gather flat tensors in place, of which each rank has an equal part, in rank order (a collective).

    torch's gathering over gloo takes new memory for the whole tensor, and copies it there and back. Each part's way to
    all ranks at once needs a third of the time.
    """
    size, own, works = dist.get_world_size(group), dist.get_rank(group), []
    for flat in flats:
        parts = flat.chunk(size)
        if over_gloo(flat.device, group):
            works += [dist.broadcast(part, group=group, group_src=r, async_op=True) for r, part in enumerate(parts)]
        else:
            works.append(dist.all_gather_into_tensor(flat, parts[own], group=group, async_op=True))
    for work in works:
        work.wait()


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A picklable object of each rank, in rank order (a collective)."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered
