"""Layer-wise learning-rate decay (BEiT, arXiv:2106.08254; MAE, arXiv:2111.06377) without further parameter groups.

A factor on the learning rate is a factor on the update for every optimizer whose update is proportional to its rate:
AdamW, Adam, SGD, Lion and the others that this package offers. So the optimizer takes its step at the base rate, and
each parameter then goes back towards where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.models import group_parameters
from torch import nn

from ds_vit.optim.segmented import SegmentedTensors
from ds_vit.parallel.zero_map import ZeroMap


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """timm name → factor on the learning rate: `layer_decay` to the power of the layers above, the head's is 1.

    The layers are timm's own (`model.group_matcher`), as in `timm.optim.param_groups_layer_decay`.
    """
    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: layer_decay ** (last - layers.get(name, last)) for name, _ in model.named_parameters()}


class LayerDecay:
    """Makes an elementwise optimizer take shorter steps in lower layers; costs a transient copy of the flat weights.

    Args:
        optimizer: the one inside ZeRO's, whose `step` sees the flat tensors.
        zero_map: the map of this rank.
        scales: timm name → factor on the learning rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, zero_map: ZeroMap, scales: Mapping[str, float]) -> None:
        self._zero_map = zero_map
        self._scales = scales
        self._old: list[torch.Tensor] = []
        self._together: dict[tuple[int, ...], tuple[SegmentedTensors, torch.Tensor]] = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @staticmethod
    def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._old = [p.detach().clone().view(-1) for p in self._parameters(optimizer)]

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters, old, self._old = self._parameters(optimizer), self._old, []
        if not parameters:
            return
        key = tuple(map(id, parameters))
        if key not in self._together:
            tensors = SegmentedTensors(self._zero_map, parameters)
            self._together[key] = tensors, 1.0 - tensors.values(self._scales)
        tensors, back = self._together[key]
        tensors.lerp_([p.detach().view(-1) for p in parameters], old, back)
