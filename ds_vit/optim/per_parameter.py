"""Bases of this package's optimizers: rules besides the arithmetic, and updates that need whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from ds_vit.optim.rate_factors import RateFactors
from ds_vit.optim.segmented import SegmentedTensors
from ds_vit.parallel.zero_map import ZeroMap


class OptimizerRules:
    """The rules of an elementwise optimizer that treats all parameters alike; another one overrides what differs.

    An optimizer of this package has its rules as its class attribute `rules`; those of others are in build.py.

    Attributes:
        own_arguments: arguments of the JSON that are for these rules, and not for the constructor.
        spelled_otherwise: arguments of DeepSpeed's optimizer of this name, and what to write instead.
        shown_to_deepspeed: the JSON's block may be read by DeepSpeed, which then knows the optimizer by its name.
    """

    own_arguments: ClassVar[frozenset[str]] = frozenset()
    spelled_otherwise: ClassVar[Mapping[str, str]] = MappingProxyType({})
    shown_to_deepspeed: ClassVar[bool] = True

    def notes(self, arguments: Mapping[str, Any]) -> list[str]:
        """Lines for people about what these arguments of the JSON mean here."""
        return []

    def fallback(self, model: nn.Module, arguments: Mapping[str, Any]) -> frozenset[str] | None:
        """timm names of the parameters that get AdamW, in groups with `use_fallback`; None: all are updated alike.

        Args:
            model: the whole one; only its parameters' names and shapes are read.
            arguments: of the JSON, `own_arguments` among them.

        Raises:
            UserError: an argument that does not fit the model.
        """
        return None


class PerParameterOptimizer(torch.optim.Optimizer):
    """Base of LAMB, LARS and Muon.

    The parameters in `param_groups` are replaced by flat tensors, and `step` is called once, once per group (ZeRO-1 and
    ZeRO-2 with offload) or once a sub-group (ZeRO-3). Call `attach` in between.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._zero_map: ZeroMap  # set by `attach`
        self._rates = RateFactors({})
        self._together: dict[tuple[int, ...], SegmentedTensors] = {}

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
            for tensors in self._together.values()
            if tensors.ratios is not None
            for name, ratio in zip(tensors.names, tensors.ratios.tolist(), strict=True)
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

    def _segmented(self, parameters: Sequence[torch.Tensor]) -> tuple[SegmentedTensors, torch.Tensor | None]:
        """The segments of these tensors, and the learning-rate factors of their parameters [P] (None: all are one)."""
        key = tuple(map(id, parameters))
        if key not in self._together:
            self._together[key] = SegmentedTensors(self._zero_map, parameters)
        tensors = self._together[key]
        return tensors, self._rates.of(tensors)

    def _states(self, parameters: Sequence[torch.Tensor], keys: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """The states of these tensors, zeros at first: a `step`, and for each key one of the tensor's shape."""
        for p in parameters:
            if not self.state[p]:
                # On the CPU, as in torch's Adam: the host reads it at each step.
                self.state[p] = {"step": torch.zeros(()), **{key: torch.zeros_like(p) for key in keys}}
        return [self.state[p] for p in parameters]
