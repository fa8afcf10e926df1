"""ZeRO-3 by layer: DeepSpeed partitions the weights and takes the step; gathering and reducing happen here.

A unit is a `Layer` (embedding, block, head). On several ranks it has one buffer, and its parameters are fixed views of
it: releasing a unit frees the buffer's storage, gathering allocates and fills it. On one rank the parameters are views
of their shards, and nothing is gathered.

A unit is gathered for its forward pass, and again when the first of its outputs gets its gradient. Its backward pass
ends when the next unit's begins: autograd runs the ready node that was created last, a unit's nodes are created one
after the other, and none of them waits for a node that was created before the unit's. The gradients are then reduced
into this rank's shard of a flat gradient, and the weights are released. Every rank calls the same layers in the same
order; a unit whose outputs are not used on this rank is reduced with zeros.

Collectives run on two streams, one a direction, each with one buffer as large as the largest unit. Everything that
reads or writes a unit's own memory runs on the stream of the model. The next unit is gathered into the buffer
while the current one computes. On a CPU there are no streams: gloo's threads gather, and reduce to each owner.

| JSON | meaning |
|---|---|
| `stage3_param_persistence_threshold` | units of up to so many elements stay gathered from first use to the step |
| `stage3_model_persistence_threshold` | elements that may stay gathered so |
| `stage3_prefetch_bucket_size` | 0: no unit is gathered ahead; otherwise the next one is, whole |
| `stage3_max_live_parameters` | gathered elements beyond which no unit is gathered ahead |
| `overlap_comm` | false: no streams, and no unit is gathered ahead |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOptions, ReduceScatterOptions

from ds_vit.device import is_accelerator
from ds_vit.engine.patches import autocast_scaler, replaced
from ds_vit.engine.step_guard import CountedGradients
from ds_vit.models.layers import Layer
from ds_vit.parallel.groups import over_gloo
from ds_vit.parallel.zero_map import ZeroMap

GRADIENT_VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""DeepSpeed's attribute with the view of the flat gradient for each parameter."""
_ALIGNED = 64
"""Elements: each parameter begins at a multiple of it, for aligned kernels."""


class Order:
    """The order in which the last pass reached the units, to predict the next one."""

    def __init__(self) -> None:
        self._before: list[Unit] = []
        self._now: list[Unit] = []

    def begin(self) -> None:
        """Begin a new pass."""
        if self._now:
            self._before, self._now = self._now, []

    def after(self, unit: Unit) -> Unit | None:
        """Record that the pass has reached `unit`; returns the one that followed it in the pass before."""
        place = len(self._now)
        self._now.append(unit)
        if place + 1 < len(self._before) and self._before[place] is unit:
            return self._before[place + 1]
        return None


class Unit:
    """A layer's parameters: trained ones in the order of DeepSpeed's sub-groups, then frozen ones.

    Attributes:
        layer: the layer.
        parameters, trained: all, and those with a gradient.
        sizes: elements of this rank's shard of each parameter, padding included.
        total: their sum.
        runs: [sub-group, start, length] of consecutive trained parameters in this rank's flat memory.
        segments: their places in the flat gradient.
        views: the same for each trained parameter, on one rank.
        shard: this rank's shard of the unit in one tensor of the model's type, or None where it is in `pieces`.
        elements: of the gathered unit, padding included; 0 where it is never released.
        keeps: the unit stays gathered until the step.
        held: an output of its forward pass is a view of its weights, which stay until the end of the backward pass.
        whole: the weights are gathered.
        counted: the flat gradient has one of this step for it (one rank).
    """

    def __init__(self, layer: Layer, parameters: Sequence[nn.Parameter], num_trained: int) -> None:
        self.layer, self.parameters, self.trained = layer, list(parameters), list(parameters[:num_trained])
        self.forward = layer.forward
        self.sizes = [p.ds_tensor.ds_numel for p in self.parameters]
        self.total = sum(self.sizes)
        self.runs: list[list[int]] = []
        self.segments: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []
        self.segment_sizes: list[int] = []
        self.shard: torch.Tensor | None = None
        self.pieces: list[torch.Tensor] = []
        self.elements = 0
        self.keeps = self.held = self.counted = False
        self.whole = True

    # ---- memory ----

    def allocate(self, ranks: int, device: torch.device) -> None:
        """Make the parameters views of a buffer without memory."""
        starts = [0, *itertools.accumulate(-(ranks * size // -_ALIGNED) * _ALIGNED for size in self.sizes)]
        buffer = torch.empty(starts[-1], dtype=self.parameters[0].dtype, device=device)
        self.elements, self.storage = ranks * self.total, buffer.untyped_storage()
        self.bytes, self.whole = self.storage.nbytes(), False
        self.targets: list[torch.Tensor] = []  # [rank, elements of its shard] of each parameter
        for parameter, size, start in zip(self.parameters, self.sizes, starts, strict=False):
            place = buffer.narrow(0, start, ranks * size)
            self.targets.append(place.view(ranks, size))
            parameter.data = place.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)
        self.storage.resize_(0)

    def take_landing(self, landing: torch.Tensor, ranks: int, rank: int) -> None:
        """Set the buffer that the unit is gathered into."""
        self.landing = landing.narrow(0, 0, self.elements)
        self.rows = self.landing.view(ranks, self.total)
        self.own = self.rows[rank]
        self.sent = self.own if self.shard is None or self.shard.device != landing.device else self.shard

    def copy_out(self) -> None:
        """Fill the parameters from the landing buffer."""
        self.storage.resize_(self.bytes)
        torch.split_with_sizes_copy(self.rows, self.sizes, 1, out=self.targets)
        self.whole = True

    def aliases(self, outputs: Iterable[Any]) -> bool:
        """Whether an output of the forward pass is a view of the weights."""
        start = self.storage.data_ptr()
        stop = start + self.bytes
        for output in outputs:  # noqa: SIM110 - a generator costs the host a call for each
            if output is not None and start <= output.data_ptr() < stop:
                return True
        return False

    # ---- gradients ----

    def take_leaving(self, leaving: torch.Tensor, arriving: torch.Tensor | None, ranks: int, rank: int) -> None:
        """Set the buffers of the reduction: the whole gradient, and this rank's shard of the sum (None: in place)."""
        total = sum(self.segment_sizes)
        self.leaving = leaving.narrow(0, 0, ranks * total)
        self.leaving_rows = self.leaving.view(ranks, total)
        self.rows_to_send = list(self.leaving_rows)
        self.arriving = self.rows_to_send[rank] if arriving is None else arriving.narrow(0, 0, total)
        self.arrived = list(self.arriving.split(self.segment_sizes))
        # torch splits rows and ZeRO elements: the same where the rows divide by the ranks.
        self.uneven = [i for i, p in enumerate(self.trained) if p.ds_shape[0] % ranks]

    def take_gradients(self) -> list[torch.Tensor]:
        """Take the gradients off the trained parameters."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
        for parameter in self.trained:
            parameter.grad = None
        return grads


class ZeroUnits:
    """Gathers the weights and reduces the gradients of a DeepSpeed engine at ZeRO-3.

    Args:
        engine: DeepSpeed's, initialised.
        trains: whether it has an optimizer.

    Attributes:
        units: in the order of the model.
        shares: the flat gradient of each sub-group on this rank; set where it trains.
        live: elements that are gathered now.
    """

    def __init__(self, engine: Any, *, trains: bool) -> None:
        self.engine, self.module, self.device = engine, engine.module, engine.device
        self.optimizer: Any = engine.optimizer if trains else None
        self.units = list(_units_of(self.module, self.optimizer))
        group = self.units[0].parameters[0].ds_process_group
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        overlaps = bool(engine.zero_overlap_comm())
        self._ahead = overlaps and engine.zero_prefetch_bucket_size() > 0
        self._max_live = engine.zero_max_live_parameters()
        self.live = 0
        self._gathered: dict[Unit, None] = {}
        self._coming: Unit | None = None  # the unit in the landing buffer
        self._work: Any = None
        self._calls: list[Unit] = []  # whose backward passes are to come, last one first
        self._open: Unit | None = None  # the unit whose backward pass runs
        self._backward_runs = self._accumulates = False  # the latter: there are gradients of this step
        self._forward = {kind: Order() for kind in itertools.product((False, True), repeat=2)}
        self._order, self._back = self._forward[False, False], Order()
        self._gathering = self._reducing = None
        if overlaps and is_accelerator(self.device):
            self._gathering, self._reducing = torch.Stream(self.device), torch.Stream(self.device)
            self._landed, self._copied_out, self._filled, self._sent = (torch.Event(self.device) for _ in range(4))
        self._gather_options, self._scatter_options = AllgatherOptions(), ReduceScatterOptions()
        self._to_owner: list[ReduceOptions] = []  # over gloo, half the time of its reduce-scatter
        for rank in range(self.ranks if over_gloo(self.device, group) else 0):
            self._to_owner.append(ReduceOptions())
            self._to_owner[-1].rootRank = rank
        _remove_hooks(engine, self.optimizer)
        if self.optimizer is not None:
            self._flatten_gradients()
        self._place_weights()
        threshold, of_all = engine.zero_param_persistence_threshold(), engine.zero_model_persistence_threshold()
        kept = 0
        for unit in self.units:
            unit.keeps = unit.elements <= threshold and kept + unit.elements <= of_all
            kept += unit.elements if unit.keeps else 0
            unit.layer.forward = partial(self._run, unit)  # type: ignore[method-assign]
        self._forward_of_module = self.module.forward
        self.module.forward = self._run_module
        self._replace_methods()

    def close(self) -> None:
        """Restore the layers' forward passes, and drop buffers, streams and the process group."""
        for unit in self.units:
            unit.layer.forward = unit.forward  # type: ignore[method-assign]
        self.module.forward = self._forward_of_module
        self._wait()
        vars(self).clear()

    # ---- layout ----

    def _flatten_gradients(self) -> None:
        """Split DeepSpeed's flat gradient by sub-groups and units."""
        optimizer = self.optimizer
        self.flat, masters = optimizer.grad_partitions_flat_buffer, optimizer.fp32_partitioned_groups_flat
        self.shares = list(self.flat.split([master.numel() for master in masters]))
        views = getattr(optimizer, GRADIENT_VIEWS)
        for unit in self.units:
            unit.views = [views[p.ds_id].view(p.ds_shape) for p in unit.trained] if self.ranks == 1 else []
            unit.runs = self._runs(unit)
            unit.segments = [self.shares[number].narrow(0, start, length) for number, start, length in unit.runs]
            unit.segment_sizes = [segment.numel() for segment in unit.segments]
        self._is_far = self.flat.device != self.device
        self._writes_in_place = self.ranks == 1 and not self._is_far
        sent = optimizer.communication_data_type if self.ranks > 1 else self.units[0].parameters[0].dtype
        # A sum of 16 bits could overflow where its mean does not.
        self._divides_first = sent == torch.float16 or not optimizer.postscale_gradients
        self._sent_type, self._is_buffered = sent, False

    def _make_buffers(self) -> None:
        """Allocate the buffers that gradients are sent from; on one rank, cast in before they are added."""
        size, self._is_buffered = max(sum(unit.segment_sizes) for unit in self.units), True
        whole = torch.empty(self.ranks * size, dtype=self._sent_type, device=self.device)
        in_place = self.ranks == 1 or self._to_owner
        own = None if in_place else torch.empty(size, dtype=self._sent_type, device=self.device)
        for unit in self.units:
            unit.take_leaving(whole, own, self.ranks, self.rank)

    def _runs(self, unit: Unit) -> list[list[int]]:
        """As `Unit.runs`."""
        runs: list[list[int]] = []
        for p, size in zip(unit.trained, unit.sizes, strict=False):
            number, start, _ = self.optimizer.grad_position[self.optimizer.get_param_id(p)]
            if runs and [number, start] == [runs[-1][0], sum(runs[-1][1:])]:
                runs[-1][2] += size
            else:
                runs.append([number, start, size])
        return runs

    @torch.no_grad()
    def _place_weights(self) -> None:
        """Allocate the parameters.

        Weights that can be read from the masters are not kept in addition to them: on several ranks the shards, which
        are cast as they are gathered; on one rank those of the masters' type.
        """
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        optimizer = self.optimizer
        masters = [] if optimizer is None else [m.detach() for m in optimizer.fp32_partitioned_groups_flat]
        flats = [] if optimizer is None else [f.detach() for f in optimizer.fp16_partitioned_groups_flat]
        # 16-bit weights, and the masters that they are copies of, by sub-group.
        self._copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in masters]
        is_there = all(p.ds_tensor.device == self.device for unit in self.units for p in unit.parameters)
        are_masters = is_there and optimizer is not None and not optimizer.offload_optimizer
        stay = is_there and self.ranks == 1  # nothing is gathered
        if stay:
            are_masters = are_masters and flats[0].dtype == masters[0].dtype
            if not are_masters:
                self._copies = [([low], [high]) for low, high in zip(flats, masters, strict=True)]
            for params, master in zip(optimizer.fp16_groups, masters, strict=True) if are_masters else ():
                for p, view in zip(params, master.split([p.ds_numel for p in params]), strict=True):
                    p.ds_tensor.data = view
        for parameter in (p for unit in self.units for p in unit.parameters):
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            parameter.all_gather = parameter.partition = _refuse
            if stay:
                parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
        if optimizer is not None and (are_masters or not stay):  # their memory goes
            optimizer.lp_param_buffer = None
            optimizer.fp16_partitioned_groups_flat, optimizer.param_groups_fp16_flat_cpu_memory = [], []
        if stay:
            return
        sources = masters if are_masters else flats
        for unit in self.units:
            unit.pieces = [sources[number].narrow(0, start, length) for number, start, length in unit.runs]
            unit.pieces += [p.ds_tensor.data.view(-1) for p in unit.parameters[len(unit.trained) :]]
            if sources is flats or not unit.runs:
                unit.shard = torch.cat(unit.pieces)
                unit.shard = unit.shard.pin_memory() if unit.pieces[0].is_pinned() else unit.shard
                for parameter, view in zip(unit.parameters, unit.shard.split(unit.sizes), strict=True):
                    parameter.ds_tensor.data = view
                lengths = [piece.numel() for piece in unit.pieces]
                for (number, start, length), low in zip(unit.runs, unit.shard.split(lengths), strict=False):
                    self._copies[number][0].append(low)
                    self._copies[number][1].append(masters[number].narrow(0, start, length))
                unit.pieces = []  # their memory goes
            else:
                if len(unit.pieces) == 1 and unit.pieces[0].dtype == unit.parameters[0].dtype:
                    unit.shard = unit.pieces[0]
                for parameter in unit.trained:
                    parameter.ds_tensor.data = parameter.ds_tensor.new_empty(0)
            unit.allocate(self.ranks, self.device)
        dtype = self.units[0].parameters[0].dtype
        landing = torch.empty(max(unit.elements for unit in self.units), dtype=dtype, device=self.device)
        for unit in self.units:
            unit.take_landing(landing, self.ranks, self.rank)

    # ---- gathering ----

    def _run_module(self, *args: Any) -> Any:
        self._begin_pass()
        return self._forward_of_module(*args)

    def _begin_pass(self) -> None:
        """Before each forward pass: drop units that were gathered before the shards changed."""
        self._calls.clear()  # of a step that ended after its forward pass
        if self._open is not None:  # a backward pass was interrupted
            self._open, self._backward_runs = None, False
            self._zero_grad()
            self.module.zero_grad()
        self._order = self._forward[self.module.training, torch.is_grad_enabled()]
        self._order.begin()
        self._back.begin()
        self._release_all(kept=False)
        if self._gathering is not None:
            self._compute = torch.accelerator.current_stream()
            self._gathering.wait_stream(self._compute)

    def _run(self, unit: Unit, *args: Any) -> Any:
        """The forward pass of a unit's layer, also where a backward pass repeats it."""
        repeats = self._backward_runs
        if unit.elements:
            self._gather(unit, None if repeats else self._order.after(unit))
        outputs = unit.forward(*args)
        if repeats:
            return outputs
        if torch.is_grad_enabled() and (unit.elements or unit.trained):
            outputs = self._watch(unit, args[0], outputs)
        if unit.elements:
            unit.held = unit.held or unit.aliases(outputs if type(outputs) is tuple else (outputs,))
            self._release(unit)
        return outputs

    def _watch(self, unit: Unit, inputs: Any, outputs: Any) -> Any:
        """Begin the unit's backward pass when one of its outputs gets its gradient."""
        given = set(map(id, inputs if type(inputs) is tuple else (inputs,)))
        each = outputs if type(outputs) is tuple else (outputs,)
        if id(each[0]) in given and each[0].requires_grad:  # a layer that changes nothing: it needs a separate node
            each = (each[0].view_as(each[0]), *each[1:])
        for output in each:
            if output is not None and id(output) not in given and (node := output.grad_fn) is not None:
                if not self._calls or self._calls[-1] is not unit:
                    self._calls.append(unit)
                node.register_prehook(partial(self._begin_backward, len(self._calls) - 1))
        return each if type(outputs) is tuple else each[0]

    def _gather(self, unit: Unit, following: Unit | None) -> None:
        if not unit.whole:
            if self._coming is not unit:
                self._start(unit)
            self._wait()
            unit.copy_out()
            if self._gathering is not None:
                self._copied_out.record(self._compute)
            self._gathered[unit] = None
            self.live += unit.elements
        if (
            following is not None
            and not following.whole
            and self._ahead
            and self._coming is not following
            and self.live + following.elements <= self._max_live
        ):
            self._start(following)

    def _start(self, unit: Unit) -> None:
        """Begin to gather into the landing buffer, without a wait."""
        self._wait()
        self._coming = unit
        if self._gathering is None:
            self._work = self._send(unit)
            return
        self._gathering.wait_event(self._copied_out)
        with self._gathering:
            self._work = self._send(unit)
            self._landed.record(self._gathering)

    def _send(self, unit: Unit) -> Any:
        if unit.shard is None:
            torch.cat(unit.pieces, out=unit.own)
        elif unit.sent is unit.own:  # offloaded
            unit.own.copy_(unit.shard, non_blocking=True)
        if self.ranks > 1:
            return self.group._allgather_base(unit.landing, unit.sent, self._gather_options)
        return None

    def _wait(self) -> None:
        """Order the current stream after the gather into the landing buffer, if there is one."""
        if self._coming is None:
            return
        if self._gathering is not None:
            self._compute.wait_event(self._landed)
        if self._work is not None:
            self._work.wait()
        self._coming = self._work = None

    def _release(self, unit: Unit, *, kept: bool = False) -> None:
        """Release a unit whose weights are not held; one that stays until the step only if `kept` is set."""
        if unit.whole and (kept or not unit.keeps) and not unit.held:
            unit.storage.resize_(0)
            unit.whole = False
            del self._gathered[unit]
            self.live -= unit.elements

    def _release_all(self, *, kept: bool) -> None:
        """Release what is gathered; the units that stay until the step only if `kept` is set."""
        self._wait()
        for unit in list(self._gathered):
            unit.held = False
            self._release(unit, kept=kept)

    # ---- backward pass ----

    def _begin_backward(self, call: int, _: Any = None) -> None:
        """Hook of an output of this call that has its gradient: units called after it have all of theirs.

        Outputs of the units that are passed over have no gradient on this rank. Other ranks may have some, so all ranks
        run the collectives of all calls in the same order.
        """
        while len(self._calls) > call:
            if self._open is not None:
                self._end_backward(self._open)
            unit = self._open = self._calls.pop()
            self._backward_runs = True
            if unit.elements:
                self._gather(unit, self._back.after(unit))

    def _end_backward(self, unit: Unit) -> None:
        if unit.trained:
            self._reduce(unit)
        if unit.elements:
            self._release(unit)

    @torch.no_grad()
    def _reduce(self, unit: Unit) -> None:
        grads = unit.take_gradients()
        if self._writes_in_place and (not unit.counted or self.flat.dtype == grads[0].dtype):
            (torch._foreach_add_ if unit.counted else torch._foreach_copy_)(unit.views, grads)
            unit.counted = True
            return
        if not self._is_buffered:
            self._make_buffers()
        if not self._accumulates and not self._writes_in_place:
            self.flat.zero_()
        self._accumulates = True
        for i in unit.uneven:
            grads[i] = grads[i].reshape(-1)
        if self._reducing is not None:
            self._compute.wait_event(self._sent)
        torch._chunk_cat(grads, 0, self.ranks, out=unit.leaving_rows)
        if self._reducing is None:
            self._sum(unit)
            return
        self._filled.record(self._compute)
        self._reducing.wait_event(self._filled)
        with self._reducing:
            self._sum(unit)
            self._sent.record(self._reducing)

    def _sum(self, unit: Unit) -> None:
        """Add the mean over the ranks to this rank's flat gradient."""
        scale = 1 / self.ranks
        if self.ranks > 1:
            if self._divides_first:
                unit.leaving.mul_(scale)
                scale = 1.0
            if self._to_owner:
                reduce = self.group.reduce
                for work in [reduce([row], to) for row, to in zip(unit.rows_to_send, self._to_owner, strict=True)]:
                    work.wait()
            else:
                self.group._reduce_scatter_base(unit.arriving, unit.leaving, self._scatter_options).wait()
        if not self._is_far:
            torch._foreach_add_(unit.segments, unit.arrived, alpha=scale)
            return
        for segment, arrived in zip(unit.segments, unit.arrived, strict=True):  # added on the device
            there = segment.to(self.device, non_blocking=True)
            segment.copy_(there.add_(arrived, alpha=scale), non_blocking=True)

    def _finish_backward(self) -> None:
        """At the end of each backward pass, in place of DeepSpeed's epilogue."""
        self._begin_backward(0)
        if self._open is not None:
            self._end_backward(self._open)
        self._open, self._backward_runs = None, False
        self._release_all(kept=False)
        self._join()
        self.optimizer._epilogue_ran_this_backward = True

    def _join(self) -> None:
        """Order readers of the flat gradient after the sums."""
        if self._reducing is not None:
            self._compute.wait_stream(self._reducing)
            if self._is_far:  # the host reads it
                self._reducing.synchronize()

    # ---- step ----

    def count(self, zero_map: ZeroMap) -> None:
        """Set the gradients that the norm counts, by the map of the engine."""
        self._counted = CountedGradients(zero_map.shards, self.shares, zero_map.counts)
        self.square_norms = self._counted.square_norms

    @torch.no_grad()
    def _norms(self) -> list[torch.Tensor]:
        """The gradient norm over all ranks, in place of those of DeepSpeed's sub-groups (a collective)."""
        square = self._counted.norms(torch.float64).square().sum().to(self.device)
        if self.ranks > 1:
            dist.all_reduce(square, group=self.group)
        self.optimizer._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
        if self._scaler is not None:
            self._seen.grad = square.float()
            self._scaler.unscale_(self._sees)
            self._update_scale()
        return [square.sqrt().float().to(self.flat.device)]

    def _hand_over(self, number: int) -> None:
        """Set a sub-group's gradient as its master's, in place of DeepSpeed's copies."""
        master = self.optimizer.fp32_partitioned_groups_flat[number]
        master.grad = self.shares[number].to(master.dtype)

    @torch.no_grad()
    def _write_back(self, number: int) -> None:
        """Cast a sub-group's masters to the model's type."""
        low, high = self._copies[number]
        if low:
            torch._foreach_copy_(low, high, non_blocking=True)

    def _pre_step(self) -> None:
        for unit in self.units if self._writes_in_place else ():
            if unit.trained and not unit.counted:
                torch._foreach_zero_(unit.segments)
        if self._scaler is not None:
            self.flat.mul_(1 / self._scaler.get_scale())
        if self.optimizer.offload_optimizer:  # DeepSpeed's step takes the gradients of offloaded masters as they are
            for number in range(len(self.shares)):
                self._hand_over(number)
        self._zero_grad()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the flat gradient, which the next backward pass overwrites; parameters hold no gradient."""
        optimizer = self.optimizer
        optimizer.micro_step_id, optimizer._epilogue_ran_this_backward = 0, False
        self._accumulates = False
        for unit in self.units:
            unit.counted = False

    def defer_norm_check(self, deferred: Callable[[], bool]) -> None:
        """Keep DeepSpeed from reading the norm before it calls the optimizer, in steps in which `deferred()` holds.

        The optimizer's kernel receives `found_inf` instead, and leaves weights and state as they are.
        """
        from deepspeed.runtime.zero import stage3

        invalid, take_step = stage3.is_invalid_grad_norm, self.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            with replaced(stage3, "is_invalid_grad_norm", lambda norm: not deferred() and invalid(norm)):
                return take_step(*args, **kwargs)

        self.optimizer.step = step

    # ---- DeepSpeed's methods ----

    def _replace_methods(self) -> None:
        engine, optimizer = self.engine, self.optimizer
        # DeepSpeed would visit every module before and after each forward pass, for its own gathering.
        engine.zero_optimization_partition_weights = lambda: False
        engine.save_checkpoint = engine.save_16bit_model = _refuse
        if optimizer is None:
            return
        replaced: dict[str, Callable[..., Any]] = {
            "_partition_all_parameters": partial(self._release_all, kept=True),
            "independent_gradient_partition_epilogue": self._finish_backward,
            "_pre_step": self._pre_step,
            "zero_grad": self._zero_grad,
            "_get_norm_groups": self._norms,
            "_prepare_fp32_grad_for_sub_group": self._hand_over,
            "_reassign_or_swap_out_partitioned_parameters": self._write_back,
            "invalidate_secondary_tensor": lambda: None,
            "check_overflow": lambda **_: None,  # the norm is finite exactly where all gradients are
        }
        for name, function in replaced.items():
            setattr(optimizer, name, function)
        optimizer.persistent_parameters = []
        optimizer.parameter_offload.release_backward_leftovers = lambda: None
        self._scaler = scaler = autocast_scaler(self.engine)
        if scaler is not None:
            # DeepSpeed clips by the norm of scaled gradients, and never lowers a scale that overflows. Here gradients
            # are unscaled before their norm, by which the scaler decides.
            self._seen = torch.zeros((), device=self.device, requires_grad=True)
            self._sees = torch.optim.SGD([self._seen])
            self._update_scale, scaler.update, scaler.step = scaler.update, lambda: None, lambda base: base.step()


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("ds_vit gathers ZeRO-3's weights by layer: read them in a checkpoint")


def _units_of(module: nn.Module, optimizer: Any | None) -> Iterator[Unit]:
    """The layers that have parameters.

    Raises:
        ValueError: a parameter outside of the layers or in two of them, or a layer within another one.
    """
    groups = () if optimizer is None else optimizer.fp16_groups
    place = {id(p): number for number, p in enumerate(itertools.chain(*groups))}
    names = {id(p): name for name, p in module.named_parameters()}
    for path, layer in module.named_modules():
        if not isinstance(layer, Layer):
            continue
        if any(isinstance(inner, Layer) for inner in layer.modules() if inner is not layer):
            raise ValueError(f"ZeRO-3 gathers weights by layer, and {path} contains another Layer; make them siblings")
        own = list(layer.parameters())
        for parameter in own:
            if names.pop(id(parameter), None) is None:
                raise ValueError(f"ZeRO-3 gathers weights by layer, and {path} shares a parameter with another Layer")
        trained = sorted((p for p in own if id(p) in place), key=lambda p: place[id(p)])
        if own:
            yield Unit(layer, [*trained, *(p for p in own if id(p) not in place)], len(trained))
    if names:
        raise ValueError(f"ZeRO-3 gathers weights by layer, and {', '.join(names.values())} belongs to no Layer")


def _remove_hooks(engine: Any, optimizer: Any | None) -> None:
    """Remove DeepSpeed's hooks of modules and gradients, and its dictionaries, which run Python at each access."""
    offload = engine.optimizer if optimizer is None else optimizer.parameter_offload
    offload.partition_all_parameters()
    offload._remove_module_hooks()
    offload.forward_hooks, offload.backward_hooks = [], []
    if optimizer is not None:
        for hook in (*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks):
            hook.remove()
        optimizer._grad_acc_hooks, optimizer._leaf_module_hooks = [], []
    for module in engine.module.modules():
        module._parameters = dict(module._parameters)
