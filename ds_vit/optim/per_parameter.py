"""Base of optimizers that need whole parameters: they receive the places of the shards that ZeRO has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_vit.optim.rate_factors import RateFactors
from ds_vit.optim.segmented import SegmentedTensors
from ds_vit.parallel.zero_map import ZeroMap


class PerParameterOptimizer(torch.optim.Optimizer):
    """Base of LAMB, LARS and Muon.

    The parameters in `param_groups` are replaced by flat tensors, and `step` is called once, once per group (ZeRO-1 and
    ZeRO-2 with offload) or once a sub-group (ZeRO-3). Call `attach` in between.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._zero_map: ZeroMap | None = None
        self._rates = RateFactors({})
        self._together: dict[tuple[int, ...], SegmentedTensors] = {}
        self._ratios: dict[tuple[int, ...], tuple[list[str], torch.Tensor]] = {}

    def attach(self, zero_map: ZeroMap, rates: RateFactors) -> None:
        """Set the map of the flat tensors.

        Args:
            zero_map: the map of this rank.
            rates: factors on the learning rate by parameter.
        """
        self._zero_map = zero_map
        self._rates = rates
        self._together.clear()

    def trust_ratios(self) -> dict[str, float]:
        """timm name → trust ratio of the last step, for the parameters of this pipeline stage that are adapted."""
        return {
            name: ratio
            for names, ratios in self._ratios.values()
            for name, ratio in zip(names, ratios.tolist(), strict=True)
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of the tensors in `param_groups` (a collective of the ranks that share the parameters)."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError

    def _attached(self) -> ZeroMap:
        """The map that `attach` was given."""
        if self._zero_map is None:
            raise RuntimeError(f"{type(self).__name__}.attach was not called after deepspeed.initialize")
        return self._zero_map

    def _segmented(self, parameters: Sequence[torch.Tensor]) -> tuple[SegmentedTensors, torch.Tensor | None]:
        """The segments of these tensors, and the learning-rate factors of their parameters [P] (None: all are one)."""
        key = tuple(map(id, parameters))
        if key not in self._together:
            self._together[key] = SegmentedTensors(self._attached(), parameters)
        tensors = self._together[key]
        return tensors, self._rates.of(tensors)

    def _states(self, parameters: Sequence[torch.Tensor], keys: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """The states of these tensors, zeros at first: a `step`, and for each key one of the tensor's shape."""
        for p in parameters:
            if not self.state[p]:
                # On the CPU, as in torch's Adam: the host reads it at each step.
                self.state[p] = {"step": torch.zeros(()), **{key: torch.zeros_like(p) for key in keys}}
        return [self.state[p] for p in parameters]

    def _keep_ratios(self, parameters: Sequence[torch.Tensor], names: list[str], ratios: torch.Tensor) -> None:
        self._ratios[tuple(map(id, parameters))] = names, ratios
