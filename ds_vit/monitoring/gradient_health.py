"""Gradient health: how large gradients, updates and weights are, layer by layer, in every layout.

What a number format loses can be read off the powers of two: fp16 has nothing below 2^-24 and loses precision below
2^-14 (Micikevicius et al., arXiv:1710.03740), which is why it needs a loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.layer_norms import layers_of
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.zero_map import Shard, ZeroMap

LOWEST, HIGHEST = -60, 20
"""Powers of two that the histogram tells apart; what lies outside falls into the first or the last."""

_BINS = HIGHEST - LOWEST + 1
# Columns of the table of sums, before the histogram's.
_SQUARE, _ELEMENTS, _ZEROS, _NONFINITE, _UPDATE, _WEIGHT, _SUMS = range(7)


class GradientHealth:
    """Measures the gradients, the weights and the update of single optimizer steps.

    Args:
        zero_map: the map of this rank.
        clipped_by: the factor that the gradients of the step under way were multiplied by to clip them.
    """

    def __init__(self, zero_map: ZeroMap, clipped_by: Callable[[], float]) -> None:
        self._zero_map = zero_map
        self._clipped_by = clipped_by
        layers = layers_of(zero_map.names)
        self.layers = list(dict.fromkeys(layers.values()))
        self._rows = {name: self.layers.index(layer) for name, layer in layers.items()}
        self._armed = False
        self._old: dict[int, torch.Tensor] = {}
        self._sums = self._largest = torch.zeros(0)
        zero_map.base.register_step_pre_hook(self._before)
        zero_map.base.register_step_post_hook(self._after)

    def arm(self) -> None:
        """Measure the next step."""
        self._armed = True
        self._sums = torch.zeros(len(self.layers), _SUMS + _BINS, dtype=torch.float64)
        self._largest = torch.zeros(len(self.layers), dtype=torch.float64)

    def _shards(self, optimizer: torch.optim.Optimizer) -> list[Shard]:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [self._zero_map.shard_of(p) for p in parameters]

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._armed:
            return
        factor = self._clipped_by()
        for shard in self._shards(optimizer):
            self._old[id(shard)] = shard.tensor.clone()
            grad = shard.parameter.grad.view(-1)
            for segment in shard.segments:
                if self._zero_map.counts(segment):
                    self._look_at(self._rows[segment.name], segment.of(grad).float() / factor)

    def _look_at(self, row: int, grad: torch.Tensor) -> None:
        finite = grad[grad.isfinite()]
        sizes = finite[finite != 0].abs()
        sums = self._sums[row]
        sums[_SQUARE] += float(finite.double().square().sum())
        sums[_ELEMENTS] += grad.numel()
        sums[_ZEROS] += finite.numel() - sizes.numel()
        sums[_NONFINITE] += grad.numel() - finite.numel()
        exponents = (torch.frexp(sizes).exponent.long() - 1).clamp(LOWEST, HIGHEST) - LOWEST
        sums[_SUMS:] += torch.bincount(exponents, minlength=_BINS).cpu()
        if sizes.numel():
            self._largest[row] = max(float(self._largest[row]), float(sizes.max()))

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._armed:
            return
        for shard in self._shards(optimizer):
            old = self._old.pop(id(shard))
            for segment in shard.segments:
                if self._zero_map.counts(segment):
                    sums = self._sums[self._rows[segment.name]]
                    before, now = segment.of(old).double(), segment.of(shard.tensor).double()
                    sums[_UPDATE] += float((now - before).square().sum())
                    sums[_WEIGHT] += float(before.square().sum())

    def finish(self) -> dict[str, Any]:
        """What was seen since `arm`, the same on every rank (two collectives of all ranks, and one for trust ratios).

        Returns:
            The figures of the whole model (`norm`, `max`, `zeros`, `nonfinite`, `below_2^-24`, `below_2^-14`,
            `update_to_weight`), the same under `layers` for each layer, `histogram` (`lowest` power of two, and under
            `counts` how many gradients of each layer have which), and for LAMB and LARS `trust_ratios` by parameter.
            Shares are of all elements for zeros and what is not finite, of those that are neither for the rest.
        """
        self._armed = False
        self._old.clear()
        sums, largest = self._sums.to(self._zero_map.device), self._largest.to(self._zero_map.device)
        dist.all_reduce(sums)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sums, largest = sums.cpu(), largest.cpu()
        by_layer = dict(zip(self.layers, zip(sums, largest.tolist(), strict=True), strict=True))
        row: dict[str, Any] = _figures(sums.sum(dim=0), float(largest.max()))
        row["layers"] = {layer: _figures(*seen) for layer, seen in by_layer.items() if seen[0][_ELEMENTS]}
        counts = {layer: own[_SUMS:].long().tolist() for layer, (own, _) in by_layer.items()}
        row["histogram"] = {"lowest": LOWEST, "counts": counts}
        ratios = self._trust_ratios()
        if ratios:
            row["trust_ratios"] = ratios
        return row

    def _trust_ratios(self) -> Mapping[str, float]:
        """Those of all pipeline stages (a collective where there are several)."""
        own = getattr(self._zero_map.base, "trust_ratios", dict)()
        if self._zero_map.groups.stage is None:
            return own
        return {name: ratio for part in gather_objects(own) for name, ratio in part.items()}


def _figures(sums: torch.Tensor, largest: float) -> dict[str, float]:
    """A row of sums as the figures that people read."""
    histogram = sums[_SUMS:]
    counted = max(float(histogram.sum()), 1.0)
    elements = max(float(sums[_ELEMENTS]), 1.0)
    weight = float(sums[_WEIGHT])
    return {
        "norm": math.sqrt(float(sums[_SQUARE])),
        "max": largest,
        "zeros": float(sums[_ZEROS]) / elements,
        "nonfinite": float(sums[_NONFINITE]) / elements,
        "below_2^-24": float(histogram[: -24 - LOWEST].sum()) / counted,
        "below_2^-14": float(histogram[: -14 - LOWEST].sum()) / counted,
        "update_to_weight": math.sqrt(float(sums[_UPDATE]) / weight) if weight else 0.0,
    }
