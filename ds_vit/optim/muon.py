"""Muon on ZeRO's flat tensors: the orthogonalized matrix is the whole parameter, in every layout.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) with the options and the arithmetic of timm's
`Muon`, whose Newton-Schulz iteration is called. DeepSpeed's own Muon orthogonalizes tensor slices one by one.

ZeRO and tensor parallelism shard a matrix, so each one is gathered on one of the ranks that share it, processed there,
and its parts go back to all who hold them. The matrices are distributed by the cost of the work, so that no two ranks
work on the same one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from timm.optim import muon as timms
from timm.optim.adamw import adamw
from timm.optim.nadamw import nadamw
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.per_parameter import OptimizerRules, PerParameterOptimizer
from ds_vit.optim.rate_factors import RateFactors, scale_steps
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.tensor.slices import Segment, assemble_flat
from ds_vit.parallel.zero_map import ZeroMap

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ADJUSTMENTS = ("match_rms_adamw", "original", "rms_to_rms", None)


class MuonRules(OptimizerRules):
    """Matrices get Muon, the others AdamW, and `fallback_list` names more of those."""

    own_arguments = frozenset({"fallback_list"})
    spelled_otherwise = MappingProxyType(
        {
            "muon_lr": 'Muon here is timm\'s; write it as "lr"',
            "adam_lr": 'Muon here is timm\'s; write "fallback_lr_scale": adam_lr / lr',
            "ns_method": 'Muon here is timm\'s; write "ns_dtype": "bfloat16" for speed, or delete it',
            "per_head_muon": "Muon here is timm's; a matrix is orthogonalized whole; delete it",
        }
    )
    shown_to_deepspeed = False  # it would orthogonalize gradients itself, before this Muon does

    def notes(self, arguments: Mapping[str, Any]) -> list[str]:
        """A note where DeepSpeed's Muon would do something else."""
        if {"nesterov", "adjust_lr_fn"} & arguments.keys():
            return []
        return [
            "Muon is timm's, not DeepSpeed's: no nesterov, and a rate scaled by 0.2·√max(out, in), unless "
            "optimizer.params say nesterov or adjust_lr_fn; see docs/optimizers.md"
        ]

    def fallback(self, model: nn.Module, arguments: Mapping[str, Any]) -> frozenset[str]:
        """As `OptimizerRules.fallback`: no matrices, too thin ones, and what the patterns of `fallback_list` name.

        The rule is timm's: `cls_token`, `pos_embed`, vectors, and matrices with a side below 4 or of a ratio above 128.
        """
        shapes, patterns = dict(model.named_parameters()), arguments.get("fallback_list", ())
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise UserError(f"fallback_list: {patterns!r} is no list of names; write one such as ['head.*']")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in shapes):
                raise UserError(f"fallback_list: no parameter of this model is named {pattern!r}; try 'head.*'")
        return frozenset(
            name
            for name, parameter in shapes.items()
            if not timms._is_suitable_for_muon(parameter) or any(fnmatchcase(name, pattern) for pattern in patterns)
        )


class Muon(PerParameterOptimizer):
    """Momentum, orthogonalized matrix by matrix; AdamW for all other parameters.

    Groups with `use_fallback` get AdamW (NAdamW with `nesterov`); `MuonRules.fallback` says which parameters those are.
    The momentum takes half of AdamW's memory. A matrix is gathered on one rank, orthogonalized there, and sent
    back: two all-to-all for each call of `step`, of 4 bytes per element and holder. The work is shared by the ranks
    that share the parameters. For the time of a step there are 4 bytes more for each element that a rank sends,
    receives and works on.

    Args:
        params: parameters or groups.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: decay of the momentum, an average of gradients.
        nesterov: look ahead along the momentum.
        ns_steps: Newton-Schulz iterations.
        ns_coefficients: timm's name of a preset, three numbers, or a list of such.
        ns_dtype: in which the iterations are computed: "float32" or "bfloat16" (timm's, faster on a GPU).
        eps: floor of a matrix's norm, and AdamW's eps.
        safety_factor: the norm is multiplied by it.
        scale_eps: scale eps by the root of in / out.
        adjust_lr_fn: factor on the rate by a matrix's shape: "match_rms_adamw", "original", "rms_to_rms" or None.
        conv_mode: "flatten" a kernel [out, in, h, w] to one matrix, or "batched": one for each of its h·w places.
        normalize_spatial: divide those by the root of h·w.
        fallback_lr_scale: AdamW's rate over `lr`.
        betas: AdamW's.

    Raises:
        UserError: a value out of range, or a name that does not exist.
    """

    rules = MuonRules()

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_steps: int = 5,
        ns_coefficients: Any = "quintic",
        ns_dtype: str = "float32",
        eps: float = 1e-7,
        safety_factor: float = 1.0,
        scale_eps: bool = False,
        adjust_lr_fn: str | None = "match_rms_adamw",
        conv_mode: str = "flatten",
        normalize_spatial: bool = True,
        fallback_lr_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        if len(betas) != 2 or not all(0.0 <= value < 1.0 for value in (momentum, *betas)):
            raise UserError(f"Muon's momentum {momentum} and two betas {betas} must be at least 0 and below 1")
        for name, number in (("eps", eps), ("safety_factor", safety_factor), ("fallback_lr_scale", fallback_lr_scale)):
            if number < 0.0:
                raise UserError(f"Muon's {name} {number} must not be negative")
        if not isinstance(ns_steps, int) or ns_steps < 1:
            raise UserError(f"Muon's ns_steps {ns_steps} must be at least 1")
        for name, value, choices in (
            ("ns_dtype", ns_dtype, tuple(_TYPES)),
            ("adjust_lr_fn", adjust_lr_fn, _ADJUSTMENTS),
            ("conv_mode", conv_mode, ("flatten", "batched")),
        ):
            if value not in choices:
                raise UserError(f"Muon's {name} {value!r} is not one of {', '.join(map(repr, choices))}")
        try:
            coefficients = timms.resolve_ns_coefficients(ns_coefficients, timms._COEFFICIENTS)
        except TypeError as error:
            raise UserError(f"Muon's ns_coefficients: {error}") from None
        self._newton_schulz = {
            "steps": ns_steps,
            "coefficients": coefficients,
            "eps": eps,
            "safety_factor": safety_factor,
            "dtype": _TYPES[ns_dtype],
            "scale_eps": scale_eps,
        }
        self._conv_mode, self._normalize_spatial, self._adjust = conv_mode, normalize_spatial, adjust_lr_fn
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": eps,
            "fallback_lr_scale": fallback_lr_scale,
            "betas": betas,
            "use_fallback": False,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            group["state_keys"] = ("exp_avg", "exp_avg_sq") if group["use_fallback"] else ("momentum_buffer",)
        self._matrices: dict[tuple[int, ...], WholeMatrices] = {}

    def attach(self, zero_map: ZeroMap, rates: RateFactors) -> None:
        """See `PerParameterOptimizer.attach`."""
        super().attach(zero_map, rates)
        self._matrices.clear()
        scale_steps(self, zero_map, rates)

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        states = self._states(parameters, group["state_keys"])
        if group["use_fallback"]:
            self._fall_back(group, parameters, states)
            return
        torch._foreach_add_([state["step"] for state in states], 1)
        flats = [p.view(-1) for p in parameters]
        updates = [p.grad.view(-1) for p in parameters]  # used up by the step
        buffers = [state["momentum_buffer"].view(-1) for state in states]
        torch._foreach_lerp_(buffers, updates, 1.0 - group["momentum"])
        if group["nesterov"]:
            torch._foreach_lerp_(updates, buffers, group["momentum"])
        else:
            torch._foreach_copy_(updates, buffers)
        self._whole(parameters).apply_(updates, self._orthogonalized)
        torch._foreach_mul_(flats, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(flats, updates, alpha=-group["lr"])

    @staticmethod
    def _fall_back(
        group: dict[str, Any], parameters: Sequence[torch.Tensor], states: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        """timm's AdamW or NAdamW, which are elementwise."""
        lists = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")]
        shared = {
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "lr": group["lr"] * group["fallback_lr_scale"],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "caution": False,
            "maximize": False,
            "max_lr": None,
        }
        grads = [p.grad for p in parameters]
        if group["nesterov"]:
            nadamw(list(parameters), grads, *lists, **shared)
        else:
            adamw(list(parameters), grads, *lists[:2], [], lists[2], amsgrad=False, **shared)

    def _whole(self, parameters: Sequence[torch.Tensor]) -> WholeMatrices:
        key = tuple(map(id, parameters))
        if key not in self._matrices:
            self._matrices[key] = WholeMatrices(self._zero_map, parameters, self._cost)
        return self._matrices[key]

    @staticmethod
    def _cost(shape: tuple[int, ...]) -> float:
        """Multiplications of an iteration: X·Xᵀ, A·A and B·X for X [n, m], n the shorter side."""
        short, long = sorted((shape[0], math.prod(shape[1:])))
        return 2.0 * short * short * long + short**3

    def _orthogonalized(self, update: torch.Tensor) -> torch.Tensor:
        """A whole update, orthogonalized and scaled for its shape, as timm's `_single_tensor_muon` has it."""
        matrix, shape = timms.reshape_for_muon(update, mode=self._conv_mode)
        result = timms.zeropower_via_newtonschulz(matrix, **self._newton_schulz).float()
        scale = timms.get_lr_scale(result.shape, self._adjust) if self._adjust else 1.0
        if result.ndim == 3:
            if self._normalize_spatial:
                scale *= result.shape[0] ** -0.5
            result = result.permute(1, 2, 0)
        return result.reshape(shape) * scale


class WholeMatrices:
    """The transfers of matrices between ranks, for flat tensors that are updated together (a collective).

    Args:
        zero_map: the map of this rank.
        parameters: tensors out of the optimizer's param_groups.
        cost: of the work on a tensor of this shape, in any unit.
    """

    def __init__(
        self,
        zero_map: ZeroMap,
        parameters: Sequence[torch.Tensor],
        cost: Callable[[tuple[int, ...]], float],
    ) -> None:
        self._zero_map, self._group = zero_map, zero_map.groups.stage
        shards = [zero_map.shard_of(parameter) for parameter in parameters]
        self._own = [segment for shard in shards for segment in shard.segments]
        # The map's flat tensors that these parameters are, in their order.
        self._number = {segment.block: number for number, shard in enumerate(shards) for segment in shard.segments}
        # By rank of the group: its segments, and whether each is among those that make every matrix once.
        everyones = gather_objects([(segment, zero_map.counts(segment)) for segment in self._own], self._group)
        held = [[segment for segment, _ in segments] for segments in everyones]
        self._rank = dist.get_rank(self._group)
        self._slices = {segment.name: segment.tp_slice for segments in held for segment in segments}
        owners = _owners(held, {name: cost(described.full_shape) for name, described in self._slices.items()})
        self.owned = tuple(name for name, owner in owners.items() if owner == self._rank)
        """timm names of the matrices that this rank works on."""
        places = [{segment.place for segment in segments} for segments in held]
        counted = [{segment.place for segment, counts in segments if counts} for segments in everyones]

        def travels(segment: Segment, rank: int, owner: int) -> bool:
            """Whether a rank's segment goes into the owner's matrix: its own, or what counts where it has no copy."""
            return rank == owner or (segment.place in counted[rank] and segment.place not in places[owner])

        # By rank; two ranks exchange segments in the order of their holder.
        rank = self._rank
        self._to_take_back = [[s for s in self._own if owners[s.name] == owner] for owner in range(len(held))]
        self._to_give = [[s for s in own if travels(s, rank, to)] for to, own in enumerate(self._to_take_back)]
        self._to_give_back = [[s for s in segments if owners[s.name] == rank] for segments in held]
        self._to_take = [[s for s in own if travels(s, of, rank)] for of, own in enumerate(self._to_give_back)]

    @torch.no_grad()
    def apply_(self, tensors: Sequence[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every matrix by `work` of it, in place (two collectives of the ranks that share the matrices).

        Args:
            tensors: laid out like the shards'; their padding is not touched.
            work: called with the whole tensor, fp32, on the map's device; gives one of that shape.
        """
        flats = [tensor.view(-1) for tensor in tensors]
        whole = self._gather(flats)
        for name in self.owned:
            whole[name] = work(whole.pop(name))
        self._scatter(whole, flats)

    def _gather(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The matrices that this rank owns."""
        given = [[s.of(flats[self._number[s.block]]) for s in segments] for segments in self._to_give]
        slices, device = {}, self._zero_map.device
        for name in self.owned:
            described = self._slices[name]
            slices[name] = torch.empty(described.num_slices, math.prod(described.local_shape), device=device)
        for segments, values in zip(self._to_take, self._exchange(given, self._to_take), strict=True):
            for segment, value in zip(segments, values, strict=True):
                name, number, start, length = segment.place
                slices[name][number].narrow(0, start, length).copy_(value)
        return {name: assemble_flat(slices.pop(name), self._slices[name]) for name in self.owned}

    def _scatter(self, whole: dict[str, torch.Tensor], flats: Sequence[torch.Tensor]) -> None:
        """Every segment of the matrices to those who hold it."""
        slices: dict[tuple[str, int], torch.Tensor] = {}
        given = []
        for segments in self._to_give_back:
            given.append([])
            for segment in segments:
                name, number, start, length = segment.place
                if (name, number) not in slices:
                    own = whole[name] if segment.tp_slice.dim is None else segment.tp_slice.take(whole[name])
                    slices[name, number] = own.reshape(-1)
                given[-1].append(slices[name, number].narrow(0, start, length))
        for segments, values in zip(self._to_take_back, self._exchange(given, self._to_take_back), strict=True):
            for segment, value in zip(segments, values, strict=True):
                segment.of(flats[self._number[segment.block]]).copy_(value)

    def _exchange(
        self, given: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[Segment]]
    ) -> list[Sequence[torch.Tensor]]:
        """One all-to-all.

        Args:
            given: by rank, what it gets.
            expected: by rank, which segments come from it.

        Returns:
            By rank, the values of these segments.
        """
        if len(given) == 1:
            return [given[0]]
        device = self._zero_map.device
        sent = [value.to(device, torch.float32) for values in given for value in values]
        lengths = [[segment.length for segment in segments] for segments in expected]
        sizes = [*map(sum, lengths)]
        received = torch.empty(sum(sizes), device=device)
        dist.all_to_all_single(
            received,
            torch.cat(sent) if sent else torch.empty(0, device=device),
            sizes,
            [sum(value.numel() for value in values) for values in given],
            group=self._group,
        )
        return [values.split(numbers) for values, numbers in zip(received.split(sizes), lengths, strict=True)]


def _owners(held: Sequence[Sequence[Segment]], costs: dict[str, float]) -> dict[str, int]:
    """The rank that works on each matrix: the largest first, to the rank with least to do, or that holds most of it."""
    holds = [defaultdict(int) for _ in held]
    for rank, segments in enumerate(held):
        for segment in segments:
            holds[rank][segment.name] += segment.length
    load = [0.0] * len(held)
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(len(held)), key=lambda rank: (load[rank], -holds[rank][name], rank))
        load[owners[name]] += costs[name]
    return owners
