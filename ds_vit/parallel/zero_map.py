"""The map of ZeRO's flat memory: which part of which timm parameter lies where on this rank.

DeepSpeed trains flat fp32 tensors, not parameters. Code that needs parameters (LAMB's norms, layer-wise decay, the
moving average, gradient statistics, checkpoints) reads this map. No other file reads where ZeRO's
optimizers keep what they train (engine/base.py reads their norms, loss scales and numbers of groups);
tests/parallel/test_zero_map.py has a canary for each attribute it relies on.

| wrapper | flat tensors | a parameter of this rank's tensor slice |
|---|---|---|
| none (ZeRO-0) | one a bucket of a parameter group | whole, on every data-parallel rank |
| ZeRO-1, ZeRO-2 | one partition a parameter group | the part that falls into the partition |
| ZeRO-3 | one a sub-group | the same share of every parameter, the last one padded |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.parallel.groups import Groups, gather_flats, gather_objects
from ds_vit.parallel.tensor.slices import Segment, TensorSlice


@dataclass(frozen=True, eq=False)
class Shard:
    """A flat tensor of this rank, and the segments in it; what no segment covers is padding.

    Attributes:
        tensor: 1-D; the very tensor that the optimizer updates.
        parameter: what the optimizer has in its param_groups for it.
        names: timm names of all parameters that are spread over this tensor and its like on the other ranks.
        segments: those parts of them that lie here.
        group: index of the optimizer's param_group.
        exact: of a frozen 16-bit parameter its fp32 values, in host memory, on the ranks that save it; else None.
    """

    tensor: torch.Tensor
    parameter: torch.Tensor
    names: tuple[str, ...]
    segments: tuple[Segment, ...]
    group: int
    exact: torch.Tensor | None = None

    @property
    def saved(self) -> torch.Tensor:
        """The flat tensor that a checkpoint saves."""
        return self.tensor if self.exact is None else self.exact

    def views(self, like: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The segments' views of the shard's tensor, or of another one that is laid out like it (a gradient)."""
        flat = (self.tensor if like is None else like).view(-1)
        return [segment.of(flat) for segment in self.segments]


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """A parameter group of ZeRO-1 or ZeRO-2 in flat memory, or a part of one of ZeRO-0.

    Attributes:
        parameters: of the model; views of `weights`.
        starts: the first element of each in `weights`.
        weights: flat, in the model's type, whole on every data-parallel rank.
        master: what the optimizer updates: this rank's partition of the weights; at ZeRO-0 `weights` itself.
        group: index of the optimizer's param_group.
    """

    parameters: Sequence[nn.Parameter]
    starts: Sequence[int]
    weights: torch.Tensor
    master: torch.Tensor
    group: int


def flat_groups(optimizer: Any) -> list[FlatGroup]:
    """The parameter groups of DeepSpeed's wrapper at ZeRO-1 and ZeRO-2."""
    groups = zip(
        optimizer.bit16_groups, optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups, strict=True
    )
    return [
        FlatGroup(
            parameters,
            [(p.data_ptr() - weights.data_ptr()) // weights.element_size() for p in parameters],
            weights.detach(),
            master,
            number,
        )
        for number, (parameters, weights, master) in enumerate(groups)
    ]


@dataclass
class ZeroMap:
    """All flat tensors of this rank.

    Attributes:
        shards: of the trained parameters, in the optimizer's order.
        frozen: of the parameters that are not trained, in the model's type; one parameter each. Those of a fixed
            teacher are not among them.
        stage: ZeRO's.
        groups: of the run; sums are over `groups.stage`, the ranks that hold this stage's parameters between them.
        names: timm names of the whole model's trained parameters, the same list on every rank.
        device: where collectives take their tensors; the flat tensors lie elsewhere when they are offloaded.
        gradients_flat: the reduced gradient of each shard, where engine/ keeps it.
    """

    shards: list[Shard]
    frozen: list[Shard]
    stage: int
    groups: Groups
    names: tuple[str, ...]
    device: torch.device
    gradients_flat: Sequence[torch.Tensor] | None
    _optimizer: Any = field(repr=False)
    _flats: Sequence[FlatGroup] = field(repr=False)
    _by_parameter: dict[int, Shard] = field(repr=False)

    def shard_of(self, parameter: torch.Tensor) -> Shard:
        """The shard of a tensor that the optimizer has in its param_groups."""
        return self._by_parameter[id(parameter)]

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimizer inside ZeRO's, whose `step` sees the flat tensors."""
        return getattr(self._optimizer, "optimizer", self._optimizer)

    def counts(self, segment: Segment) -> bool:
        """Whether sums over `groups.stage` count this rank's copy of a segment."""
        groups = self.groups
        return (self.stage > 0 or groups.dp_rank == 0) and (groups.tp_rank == 0 or not segment.replicated)

    def saves(self, shard: Shard, segment: Segment) -> bool:
        """Whether this rank's copy of a segment is the one that is saved; frozen ones are whole below ZeRO-3."""
        groups, is_partitioned = self.groups, self.stage == 3 or (self.stage > 0 and shard.group >= 0)
        return (is_partitioned or groups.dp_rank == 0) and (groups.tp_rank == 0 or not segment.replicated)

    def state_keys(self) -> tuple[str, ...]:
        """Names of the optimizer's states that have an element for each of the shard's (exp_avg, …), sorted."""
        keys = {
            key
            for shard in self.shards
            for key, value in self.base.state.get(shard.parameter, {}).items()
            if torch.is_tensor(value) and value.numel() == shard.tensor.numel() and value.dim() > 0
        }
        return tuple(sorted(keys - {"step"}))

    def declared_keys(self, shard: Shard) -> tuple[str, ...] | None:
        """The states that the optimizer keeps for a shard, where its groups say so because they keep different ones."""
        return self.base.param_groups[shard.group].get("state_keys")

    def state(self, shard: Shard, key: str) -> torch.Tensor:
        """An optimizer state of a shard, flat."""
        return self.base.state[shard.parameter][key].view(-1)

    @torch.no_grad()
    def values(self, names: Sequence[str]) -> torch.Tensor:
        """The fp32 values of one-element parameters, [number of names] (a collective of `groups.stage`)."""
        found = torch.zeros(len(names), device=self.device)
        for shard in (*self.shards, *self.frozen):
            for segment, view in zip(shard.segments, shard.views(shard.saved), strict=True):
                if segment.name in names and self.saves(shard, segment):
                    found[names.index(segment.name)] = view[0]
        return self.all_reduce(found)

    @torch.no_grad()
    def set_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set fp32 values, by timm name, of this rank's tensor slices; the model's own parameters keep theirs.

        Of a frozen parameter in 16 bits, the ranks that save it keep the values.
        """
        for number, shard in enumerate(self.frozen):
            saves = self.stage == 3 or self.groups.dp_rank == 0
            if saves and shard.exact is None and shard.names[0] in values and shard.tensor.dtype != torch.float32:
                self.frozen[number] = replace(shard, exact=torch.empty(shard.tensor.numel()))
        for shard in (*self.shards, *(shard for shard in self.frozen if shard.exact is not None)):
            for segment in shard.segments:
                if (value := values.get(segment.name)) is not None:
                    part = value.reshape(-1)[segment.start : segment.start + segment.length]
                    segment.of(shard.saved.view(-1)).copy_(part)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the values of the flat tensors into the model's own parameters (a collective).

        As ZeRO at the end of a step: cast, and gather over the data-parallel ranks.
        """
        optimizer = self._optimizer
        if self.stage == 0:
            return
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        for sub_group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
        optimizer._partition_all_parameters()  # what stays gathered between steps is old

    def teacher_writer(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], values: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """A function that copies averages of trained parameters into a teacher's frozen ones, in the model's type.

        It is a collective. Below ZeRO-3 the teacher's move into flat memory that is laid out like the trained ones'.

        Args:
            pairs: (teacher's, student's) parameters of this rank, of the same shapes; where the student's is not
                trained, it is the value itself.
            values: laid out like the shards; each call reads them.
        """
        teachers = {id(parameter): teacher for teacher, parameter in pairs}
        assert len(teachers) == len(pairs), "a parameter with two teachers"
        copies = [(_stored(teacher), _stored(parameter)) for teacher, parameter in pairs if not parameter.requires_grad]
        if self.stage == 3:
            position = self._optimizer.grad_position
            for teacher, parameter in pairs:
                if parameter.requires_grad:
                    number, offset, _ = position[self._optimizer.get_param_id(parameter)]
                    _, length = _zero3_share(parameter)
                    copies.append((_stored(teacher).view(-1)[:length], values[number].narrow(0, offset, length)))
            return partial(_write, copies, self._optimizer._partition_all_parameters)
        own_flats = [_laid_out_like(group, teachers) for group in self._flats]
        self.frozen = [replace(shard, tensor=shard.parameter.detach().view(-1)) for shard in self.frozen]
        ranks, rank = (self.groups.layout.dp, self.groups.dp_rank) if self.stage else (1, 0)
        copies += [(flat.chunk(ranks)[rank], value) for flat, value in zip(own_flats, values, strict=True)]
        return partial(_write, copies, partial(gather_flats, own_flats if ranks > 1 else (), self.groups.dp))

    def gradients(self, clipped_by: float) -> list[torch.Tensor]:
        """The gradient of each shard, flat, fp32, before the update: without loss scale and clipping.

        Args:
            clipped_by: what clipping multiplied those by that the optimizer has already.
        """
        scale = float(getattr(self._optimizer, "loss_scale", 1.0))
        grads = []
        for number, shard in enumerate(self.shards):
            own = shard.parameter.grad
            if own is None:  # of a parameter group or sub-group whose turn has not come
                assert self.gradients_flat is not None, "an offloaded master has its gradient"
                grads.append(self.gradients_flat[number].float() / scale)
            else:
                grads.append(own.view(-1).float() / clipped_by)
        return grads

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over `groups.stage`: one collective, none where that is only this rank."""
        if self.groups.layout.dp * self.groups.layout.tp == 1:
            return vector
        moved = vector.to(self.device)
        dist.all_reduce(moved, group=self.groups.stage)
        return moved.to(vector.device)


def build_zero_map(
    engine: Any,
    groups: Groups,
    names: Mapping[str, str],
    is_fixed: Callable[[str], bool] = lambda name: False,
    flats: Sequence[FlatGroup] = (),
    gradients: Sequence[torch.Tensor] | None = None,
) -> ZeroMap:
    """The map of an initialised DeepSpeed engine (a collective of all ranks).

    Args:
        engine: DeepSpeed's.
        groups: of the run.
        names: from the names of `engine.module.named_parameters()` to timm's.
        is_fixed: whether a frozen parameter of this timm name is never saved nor restored.
        flats: the parameter groups below ZeRO-3.
        gradients: the reduced gradient of each shard; None where DeepSpeed keeps them.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    parameters = dict(engine.module.named_parameters())
    timm = {id(p): names[local] for local, p in parameters.items()}
    shards = list(_zero3(optimizer, timm) if stage == 3 else _partitioned(flats, groups.dp_rank if stage else 0, timm))
    still = [p for p in parameters.values() if not p.requires_grad and not is_fixed(timm[id(p)])]
    frozen = [_frozen(p, timm[id(p)], block) for block, p in enumerate(still, len(shards))]
    own = tuple(names[local] for local, p in parameters.items() if p.requires_grad)
    return ZeroMap(
        shards=shards,
        frozen=frozen,
        stage=stage,
        groups=groups,
        names=_all_names(own, groups),
        device=engine.device,
        gradients_flat=gradients,
        _optimizer=optimizer,
        _flats=flats,
        _by_parameter={id(shard.parameter): shard for shard in shards},
    )


def _all_names(own: tuple[str, ...], groups: Groups) -> tuple[str, ...]:
    """The names of all pipeline stages, in their order."""
    if groups.layout.pp == 1:
        return own
    by_stage = dict(gather_objects((groups.pipeline_stage, own)))
    names = [name for stage in sorted(by_stage) for name in by_stage[stage]]
    assert len(set(names)) == len(names), "a parameter that lives on two pipeline stages"
    return tuple(names)


def _slice_of(parameter: nn.Parameter) -> TensorSlice:
    description: TensorSlice | None = getattr(parameter, "tp_slice", None)
    if description is not None:
        return description
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return TensorSlice(full_shape=shape, dim=None, sections=(), rank=0, size=1)


def _laid_out_like(group: FlatGroup, teachers: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """New flat memory for the teachers' copies of a group's parameters, each at the place of its parameter."""
    own = torch.zeros_like(group.weights)
    for parameter, start in zip(group.parameters, group.starts, strict=True):
        if (teacher := teachers.get(id(parameter))) is not None:
            teacher.data = own.narrow(0, start, teacher.numel()).view_as(teacher)
    return own


@torch.no_grad()
def _write(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], gather: Callable[[], None]) -> None:
    """Copy values into memory of this rank's parameters, then send it to the other ranks."""
    torch._foreach_copy_(*map(list, zip(*copies, strict=True)))
    gather()


def _partitioned(flats: Sequence[FlatGroup], dp_rank: int, timm: Mapping[int, str]) -> Iterator[Shard]:
    """ZeRO-0 to ZeRO-2: one partition of each parameter group's concatenation."""
    for number, group in enumerate(flats):
        size, segments = group.master.numel(), []
        for p, start in zip(group.parameters, group.starts, strict=True):
            inside = start - dp_rank * size
            low, high = max(inside, 0), min(inside + p.numel(), size)
            if low < high:
                segments.append(Segment(timm[id(p)], _slice_of(p), low - inside, high - low, number, low))
        names = tuple(timm[id(p)] for p in group.parameters)
        yield Shard(group.master.detach(), group.master, names, tuple(segments), group.group)


def _zero3(optimizer: Any, timm: Mapping[int, str]) -> Iterator[Shard]:
    """ZeRO-3: rank r of R has elements r·n to (r+1)·n of every parameter, n = ⌈numel/R⌉; the last share is padded."""
    for sub_group, (group, flat) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        segments = []
        for p in group:
            found, offset, _ = optimizer.grad_position[optimizer.get_param_id(p)]
            assert found == sub_group
            start, length = _zero3_share(p)
            if length:
                segments.append(Segment(timm[id(p)], _slice_of(p), start, length, sub_group, offset))
        number = optimizer.sub_group_to_group_id[sub_group]
        yield Shard(flat.detach(), flat, tuple(timm[id(p)] for p in group), tuple(segments), number)


def _zero3_share(parameter: nn.Parameter) -> tuple[int, int]:
    """(first element, elements) of this rank's share of a partitioned parameter, padding excluded."""
    share = parameter.ds_tensor.ds_numel
    start = dist.get_rank(parameter.ds_process_group) * share
    return start, max(0, min(share, parameter.ds_numel - start))


def _stored(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's own memory; of one that ZeRO-3 shards, this rank's shard."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def _frozen(parameter: nn.Parameter, name: str, block: int) -> Shard:
    """A parameter that is not trained: whole on this rank, or (ZeRO-3) this rank's share."""
    start, length = _zero3_share(parameter) if hasattr(parameter, "ds_tensor") else (0, parameter.numel())
    segments = (Segment(name, _slice_of(parameter), start, length, block, 0),) if length else ()
    return Shard(_stored(parameter).view(-1), parameter, (name,), segments, -1)
