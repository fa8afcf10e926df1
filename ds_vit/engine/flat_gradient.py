"""The flat gradient of ZeRO-0, ZeRO-1 and ZeRO-2, in place of DeepSpeed's loops over parameters.

A bucket holds neighbouring parameters of a group. As soon as the backward pass has all of its gradients, one operation
copies them into flat memory, they are freed, and the ranks begin to reduce them. The optimizer steps once on the flat
masters. Where masters have another type than the weights, one copy per group casts them back; on several ranks one
gather per group distributes the weights.

| | flat gradient of a rank | reduced |
|---|---|---|
| ZeRO-0 | whole | in the last micro-batch, by all-reduce |
| ZeRO-1, and ZeRO-2 on one rank | whole | in the last micro-batch, each part to its owner |
| ZeRO-2 | its partition | in each micro-batch, each part to its owner |

At ZeRO-0, and at ZeRO-2 on several ranks, the memory is freed from the update to the next backward pass, except where
graphs need it in place.

DeepSpeed keeps the JSON, its flat weights and masters, `backward`, `step` and the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import elements_of_bucket
from ds_vit.device import is_accelerator
from ds_vit.engine.patches import autocast_scaler
from ds_vit.engine.step_guard import CountedGradients, SquareNorms, StepGuard
from ds_vit.parallel.groups import Groups, gather_flats
from ds_vit.parallel.zero_map import FlatGroup, ZeroMap, flat_groups

_ALIGNMENT = 32
"""Elements: at ZeRO-0 each parameter begins at a multiple of 128 bytes, as a separate tensor does."""
_NORM_PIECE = 2**16
"""Elements whose squares a CPU sums in fp32, one after the other: of 2**24 the norm is 7e-4 too small."""


class _Places(NamedTuple):
    """Memory for the gradients of a bucket: a view per parameter, and the gaps between the views."""

    memory: torch.Tensor
    views: list[torch.Tensor]
    gaps: list[torch.Tensor]


@dataclass(eq=False)
class _Bucket:
    """Gradients of neighbouring parameters of one group.

    Attributes:
        group: number of the group.
        start: first element in the group's flat memory.
        stop: element behind the last one.
        parameters: last one first.
        starts: first element of each.
        home: of the gradients.
        lasting: memory that has the bucket's gradients, or this rank's part of their sums, until the update.
        added: of the gradients of later micro-batches, which are added to `home`.
        sent: memory that is reduced: that of `home`, or a buffer in the type of the reduction.
        parts: (rank that receives the sum, or None for all; piece of `sent`).
        own: (piece of `sent`, its place in the flat gradient), for pieces that this rank receives out of place.
        slot: index of the buffer that `home` or `sent` uses.
        taken: whether the gradients of this micro-batch are written.
    """

    group: int
    start: int
    stop: int
    parameters: list[torch.Tensor] = field(init=False, default_factory=list)
    starts: list[int] = field(init=False, default_factory=list)
    home: _Places = field(init=False)
    lasting: torch.Tensor = field(init=False)
    added: _Places = field(init=False)
    sent: torch.Tensor = field(init=False)
    parts: list[tuple[int | None, torch.Tensor]] = field(init=False, default_factory=list)
    own: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=list)
    slot: int = field(init=False, default=0)
    taken: bool = field(init=False, default=False)

    def lay_out(self, buffer: torch.Tensor) -> _Places:
        """Places of this bucket at the beginning of a buffer."""
        memory, done = buffer.narrow(0, 0, self.stop - self.start), self.stop - self.start
        views, gaps = [], []
        for p, start in zip(self.parameters, self.starts, strict=True):
            low, high = start - self.start, start - self.start + p.numel()
            views.append(memory.narrow(0, low, p.numel()).view_as(p))
            if high < done:
                gaps.append(memory[high:done])
            done = low
        return _Places(memory, views, gaps)


def flatten_parameters(optimizer: torch.optim.Optimizer, most: int) -> list[FlatGroup]:
    """Without ZeRO: replace the optimizer's parameters by flat ones, of which the model's parameters become views.

    Args:
        optimizer: torch's, or one like it.
        most: elements of a flat parameter, unless one of the model's has more.
    """
    flats = []
    for number, group in enumerate(optimizer.param_groups):
        pieces: list[tuple[list[torch.Tensor], list[int]]] = []
        done = most
        for p in group["params"]:
            if done + p.numel() > most or not pieces:
                pieces.append(([], []))
                done = 0
            pieces[-1][0].append(p)
            pieces[-1][1].append(done)
            done += -(-p.numel() // _ALIGNMENT) * _ALIGNMENT
        group["params"] = []
        for parameters, starts in pieces:
            flat = parameters[0].new_zeros(starts[-1] + parameters[-1].numel()).detach()
            for p, start in zip(parameters, starts, strict=True):
                p.data = flat.narrow(0, start, p.numel()).view_as(p).copy_(p.detach())
            group["params"].append(flat.detach().requires_grad_())
            flats.append(FlatGroup(parameters, starts, flat, group["params"][-1], number))
    return flats


class FlatGradient:
    """The gradients of a step, from the first one in the backward pass to the update.

    Args:
        engine: DeepSpeed's, initialized; without offload of the optimizer.
        groups: of the run.
        json: without "auto".

    Attributes:
        flats: the parameter groups, at ZeRO-0 in pieces of a bucket each.
        shares: the flat gradient of each master on this rank; valid within a step.
        fresh: whether the next micro-batch is the first of a step.
        grad_norm: global, of the step under way, before clipping; None where the JSON says not to compute it.
        releases: whether the memory of an applied gradient is freed; a captured graph needs it to stay where it is.
        guard: decides where gradients that overflowed are skipped; set by the engine.
    """

    def __init__(self, engine: Any, groups: Groups, json: DeepSpeedJson) -> None:
        from deepspeed.runtime.config import DtypeEnum

        self._engine, self._optimizer = engine, engine.optimizer
        self._clip = json.gradient_clipping or 0.0
        self._stage, self._pipeline = engine.zero_optimization_stage(), groups.layout.pp > 1
        self._dp, self._ranks, self._rank = groups.dp, groups.layout.dp, groups.dp_rank
        self._base = getattr(self._optimizer, "optimizer", self._optimizer)
        self._scaler = autocast_scaler(engine)
        self._scaled = self._scaler is not None or engine.fp16_enabled()
        self._measures = self._scaled or getattr(self._optimizer, "compute_grad_norm", True)
        self._most = elements_of_bucket(json, sum(p.numel() for p in engine.module.parameters() if p.requires_grad))
        self.flats = flat_groups(self._optimizer) if self._stage else flatten_parameters(self._optimizer, self._most)
        self._masters = [group.master for group in self.flats]
        self._own_weights = [g.weights.chunk(self._ranks)[self._rank] for g in self.flats] if self._stage else []
        self._model_type, wire = self.flats[0].weights.dtype, engine.communication_data_type
        named = json.data_types.grad_accum_dtype
        self._sum_type, self._wire = DtypeEnum(named).value if named else self._model_type, wire
        self._casts = self._stage > 0 and self._masters[0].dtype != self._model_type
        if self._stage and not self._casts:  # the masters become this rank's part of the weights
            for group, own in zip(self.flats, self._own_weights, strict=True):
                group.master.data = own
                for p in group.parameters:
                    p._hp_mapping = None  # DeepSpeed's views of the old masters
        self._sharded = self._stage == 2 and self._ranks > 1
        self.releases = self._stage == 0 or self._sharded
        self._in_place = self._ranks == 1 or (not self._sharded and wire == self._sum_type)
        divisor, prescaled = float(engine.gradient_predivide_factor()), not engine.postscale_gradients()
        # As DeepSpeed does: sums in 16 bits are divided before, where they could overflow.
        before = prescaled or (wire.itemsize == 2 and divisor == 1)
        self._before = 1 / self._ranks if before else 1 / divisor
        self._after = 1 / (self._ranks * self._before)
        whole = [torch.zeros_like(g.master if self._sharded else g.weights, dtype=self._sum_type) for g in self.flats]
        is_cut = self._stage and not self._sharded
        self.shares = [flat.chunk(self._ranks)[self._rank] if is_cut else flat for flat in whole]
        self._direct = self._sum_type == self._masters[0].dtype
        if not self._stage:  # DeepSpeed calls the optimizer
            for master, share in zip(self._masters, self.shares, strict=True):
                master.grad = share
        self._one = torch.ones((), device=engine.device)
        self._order = {id(p): number for number, p in enumerate(engine.module.parameters())}
        self._buckets = self._cut(whole, accumulates=engine.gradient_accumulation_steps() > 1)
        self._in_flight: list[tuple[_Bucket, list[Any]] | None] = [None, None]
        self._works: list[Any] = []
        self._next, self.fresh = 0, True
        self._boundary: bool | None = None
        self.grad_norm: torch.Tensor | None = None
        self.guard: StepGuard
        # The ranks that a norm is summed over: with ZeRO all, without it those that hold a model between them.
        self._over = groups.replica if self._stage == 0 else None
        self._alone = groups.layout.world_size == 1 if self._stage else groups.replica is None
        self._hooks: list[Any] = []
        self._install()

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _cut(self, whole: Sequence[torch.Tensor], *, accumulates: bool) -> list[_Bucket]:
        """The buckets of all groups, in the order in which a backward pass completes them."""
        buckets: list[_Bucket] = []
        for number, group in enumerate(self.flats):
            bucket = None
            for p, start in zip(reversed(group.parameters), reversed(group.starts), strict=True):
                if bucket is None or (self._stage and bucket.stop - start > self._most):
                    bucket = _Bucket(number, start, start + p.numel())
                    buckets.append(bucket)
                bucket.start = start
                bucket.parameters.append(p)
                bucket.starts.append(start)
        buckets.sort(key=lambda bucket: -min(self._order[id(p)] for p in bucket.parameters))
        largest, device = max(bucket.stop - bucket.start for bucket in buckets), self._engine.device
        slots = [] if self._in_place else [torch.zeros(largest, dtype=self._wire, device=device) for _ in range(2)]
        adding = torch.zeros(largest, dtype=self._model_type, device=device) if accumulates else None
        for turn, bucket in enumerate(buckets):
            bucket.slot = turn % 2
            length = bucket.stop - bucket.start
            home = slots[bucket.slot] if self._sharded else whole[bucket.group].narrow(0, bucket.start, length)
            bucket.home = bucket.lay_out(home)
            bucket.lasting = self.shares[bucket.group] if self._sharded else home
            bucket.sent = bucket.home.memory if self._in_place else slots[bucket.slot].narrow(0, 0, length)
            if adding is not None and not self._sharded:
                bucket.added = bucket.lay_out(adding)
            self._address(bucket, self.shares[bucket.group])
        return buckets

    def _address(self, bucket: _Bucket, share: torch.Tensor) -> None:
        """Assign each part of a bucket to the rank that receives its sum."""
        if self._stage == 0:
            bucket.parts = [(None, bucket.sent)]
            bucket.own = [] if self._in_place else [(bucket.sent, bucket.home.memory)]
            return
        size = share.numel()
        for owner in range(bucket.start // size, (bucket.stop - 1) // size + 1):
            low, high = max(bucket.start, owner * size), min(bucket.stop, (owner + 1) * size)
            piece = bucket.sent.narrow(0, low - bucket.start, high - low)
            bucket.parts.append((owner, piece))
            if owner == self._rank and not self._in_place:
                bucket.own.append((piece, share.narrow(0, low - owner * size, high - low)))

    def _install(self) -> None:
        """Replace DeepSpeed's reduction and its step."""
        engine, optimizer = self._engine, self._optimizer
        if self._pipeline:
            self._collect_behind_each_pass()
        else:
            for bucket in self._buckets:
                last = min(bucket.parameters, key=lambda p: self._order[id(p)])
                self._hooks.append(last.register_post_accumulate_grad_hook(partial(self._arrived, bucket)))
        engine.allreduce_gradients = self.finish
        if self._stage == 0:
            take_step = engine._take_model_step

            def clip_and_take_step(*args: Any, **kwargs: Any) -> None:
                self.clip()
                take_step(*args, **kwargs)

            engine._take_model_step, engine.zero_grad = clip_and_take_step, self._clear
            return
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        optimizer._grad_acc_hooks = []
        optimizer.step = self._step
        optimizer.zero_grad = self._clear
        optimizer.backward_prologue = optimizer.backward_epilogue = lambda *_, **__: None
        optimizer.clear_backward_seen_flag = lambda: ZeROOptimizer.clear_backward_seen_flag(optimizer)

    def _collect_behind_each_pass(self) -> None:
        """In a pipeline, whose micro-batch may take several backward calls: hooks would see half of a gradient."""
        from deepspeed.runtime.pipe.schedule import BackwardPass

        instructions = self._engine._INSTRUCTION_MAP
        go_back = instructions[BackwardPass]

        def backward_pass(engine: Any, buffer_id: int) -> None:
            go_back(engine, buffer_id)
            with torch.no_grad():
                for bucket in self._buckets:
                    self._collect(bucket)
            self.fresh = False

        self._engine._INSTRUCTION_MAP = {**instructions, BackwardPass: backward_pass}

    def _clear(self, set_to_none: bool = True) -> None:
        """After the update: free the memory for the forward pass; views stay valid.

        Otherwise zero it where `clip` has spread NaN: no gradient overwrites the padding, and the scaler would skip all
        later steps.
        """
        if self.releases:
            for bucket in self._buckets:
                bucket.lasting.untyped_storage().resize_(0)
        elif self._scaler is not None and self.overflow:
            torch._foreach_zero_(self.shares)

    def end_replay(self, boundary: bool) -> None:
        """Set what hooks set, after a graph has replayed a micro-batch's pass; `boundary`: the last of the step."""
        self.fresh = boundary
        if self._stage > 0:
            self._optimizer.set_gradient_accumulation_boundary(boundary)
            self._optimizer._epilogue_ran_this_backward = True

    def abandon(self, fresh: bool) -> None:
        """Drop a backward pass that has not ended; `fresh` is as before it."""
        for bucket in self._buckets:
            bucket.taken = False
            for p in bucket.parameters:
                p.grad = None
        self._works, self._in_flight, self._next = [], [None, None], 0
        self.fresh, self._boundary = fresh, None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    # ---- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _arrived(self, bucket: _Bucket, _: torch.Tensor) -> None:
        """Hook of a bucket's first parameter in the model: the others should have their gradients."""
        if self._boundary is None:
            self._boundary = self._engine.is_gradient_accumulation_boundary()
        if not self._sharded and not [p for p in bucket.parameters if p.grad is None]:
            self._collect(bucket)
        while self._next < len(self._buckets):  # sums begin in the same order on every rank
            bucket = self._buckets[self._next]
            if not bucket.taken:
                if [p for p in bucket.parameters if p.grad is None]:
                    return
                self._collect(bucket)
            self._send(bucket)
            self._next += 1

    def _collect(self, bucket: _Bucket) -> None:
        """Write a bucket's gradients into flat memory, zeros for those that are missing, and free them."""
        bucket.taken = True
        adds = not (self.fresh or self._sharded)
        if self._sharded:
            self._fold(bucket.slot)
        if self.releases and self.fresh and not bucket.lasting.untyped_storage().nbytes():
            bucket.lasting.untyped_storage().resize_(bucket.lasting.nbytes)
            if self._sharded:
                bucket.lasting.zero_()  # between the parameters is padding
        _, views, gaps = bucket.added if adds else bucket.home
        if gaps:
            torch._foreach_zero_(gaps)
        # A view is zeroed, and copied to itself, where there is no gradient: one call writes all.
        grads = [view.zero_() if p.grad is None else p.grad for p, view in zip(bucket.parameters, views, strict=True)]
        torch._foreach_copy_(views, grads)
        for p in bucket.parameters:
            p.grad = None
        if adds:
            bucket.home.memory.add_(bucket.added.memory)

    def _send(self, bucket: _Bucket) -> None:
        """Begin to reduce a bucket, if this micro-batch reduces."""
        if self._ranks == 1 or not (self._boundary or self._sharded):
            return
        if bucket.sent is not bucket.home.memory:
            self._fold(bucket.slot)
            bucket.sent.copy_(bucket.home.memory)
        if self._before != 1:
            bucket.sent.mul_(self._before)
        works = [
            dist.all_reduce(piece, group=self._dp, async_op=True)
            if owner is None
            else dist.reduce(piece, group_dst=owner, group=self._dp, async_op=True)
            for owner, piece in bucket.parts
        ]
        if self._in_place:
            self._works += works
        else:
            self._in_flight[bucket.slot] = bucket, works

    def _fold(self, slot: int) -> None:
        """Wait for the sum in a buffer, and copy this rank's part of it to its place."""
        in_flight, self._in_flight[slot] = self._in_flight[slot], None
        if in_flight is None:
            return
        bucket, works = in_flight
        for work in works:
            work.wait()
        for piece, place in bucket.own:
            if self._after != 1:
                piece.mul_(self._after)
            if self._sharded and not self.fresh:
                place.add_(piece)
            else:
                place.copy_(piece)

    @torch.no_grad()
    def finish(self, *_: Any, **__: Any) -> None:
        """End a backward pass, in a pipeline all those of a step: write the other buckets, and wait for the sums."""
        if self._boundary is None:
            self._boundary = self._engine.is_gradient_accumulation_boundary()
        for bucket in self._buckets[self._next :]:
            if not bucket.taken:
                self._collect(bucket)
            self._send(bucket)
        for slot in (0, 1):
            self._fold(slot)
        for work in self._works:
            work.wait()
        if self._works and self._after != 1:
            torch._foreach_mul_(self.shares, self._after)
        for bucket in self._buckets:
            bucket.taken = False
        self._works, self._next, self.fresh, self._boundary = [], 0, self._boundary, None
        if self._stage > 0:
            self._optimizer._epilogue_ran_this_backward = True

    # ---- the step ----------------------------------------------------------------------------------------------------

    def count(self, zero_map: ZeroMap) -> None:
        """Set the gradients that the norm counts, by the map of the engine.

        Without ZeRO each data-parallel rank has all of them: `square_norms` takes those of the first one.
        """
        most = None if is_accelerator(self._engine.device) else _NORM_PIECE
        counts = lambda segment: zero_map.groups.tp_rank == 0 or not segment.replicated  # noqa: E731
        self._counted = CountedGradients(zero_map.shards, self.shares, counts, most)

    def _norm(self) -> torch.Tensor:
        """The norm of the reduced gradients, loss scale included (a collective of all ranks)."""
        norm = torch.linalg.vector_norm(self._counted.norms(torch.float32))
        if self._alone:
            return norm
        square = norm.square()
        dist.all_reduce(square, group=self._over)
        return square.sqrt()

    def square_norms(self) -> SquareNorms:
        """As `CountedGradients.square_norms`, on one data-parallel rank without ZeRO."""
        return tuple if self._stage == 0 and self._rank > 0 else self._counted.square_norms()

    @torch.no_grad()
    def clip(self) -> list[torch.Tensor]:
        """Measure, unscale and clip the gradient (a collective).

        A GradScaler decides on each rank by the gradients there: a norm that is not finite spreads to all of them.

        Returns:
            The gradients that the optimizer reads, one for each master.
        """
        scaler, scale = self._scaler, 1.0
        if scaler is not None:
            scale = scaler.scale(self._one)
        elif self._scaled:
            scale = self._optimizer.loss_scale
        norm = self._norm() if self._measures else self._one
        self.grad_norm = norm / scale if self._scaled else norm if self._measures else None
        self.overflow = self._scaled and not self.guard.device_decides and not math.isfinite(float(norm))
        if self.overflow:
            self.guard.overflowed()
        grads = self.shares
        if not self._direct:
            grads = [share.to(master.dtype) for share, master in zip(grads, self._masters, strict=True)]
        factor = None
        if self._clip > 0:
            # fmin ignores NaN: layers that are finite stay so, for the report on the others.
            factor = torch.fmin(self._clip / (norm / scale + 1e-6), self._one)
        if scaler is not None:
            factor = (self._one if factor is None else factor) + 0 * norm
        elif self._scaled:
            factor = 1 / scale if factor is None else factor / scale
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        return grads

    @torch.no_grad()
    def _step(self, closure: None = None) -> None:
        """The step of ZeRO-1 and ZeRO-2."""
        optimizer, scaler = self._optimizer, self._scaler
        grads = self.clip()
        optimizer.overflow = self.overflow
        if self.overflow and scaler is None:
            return
        for master, grad in zip(self._masters, grads, strict=True):
            master.grad = grad
        if scaler is None:
            self._base.step()
        else:
            scaler.unscale_(self._base)
            scaler.step(self._base)
            scaler.update()
        for master in self._masters:
            master.grad = None
        if self._casts:
            torch._foreach_copy_(self._own_weights, self._masters)
        if self._ranks > 1:
            gather_flats([group.weights for group in self.flats], self._dp)
