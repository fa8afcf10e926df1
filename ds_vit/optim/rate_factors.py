"""Learning rates by parameter without further parameter groups: layer-wise decay (BEiT, arXiv:2106.08254; MAE,
arXiv:2111.06377), a task's factors, and parameters that are held at a rate of 0 for some steps.

A factor on the learning rate is a factor on the update for every optimizer whose update is proportional to its rate:
AdamW, Adam, SGD, Lion and the others that this package offers. So the optimizer takes its step at the base rate, and
each parameter then goes back towards where it was. A held parameter goes all the way back: its weights stay to the bit,
without weight decay, while the optimizer's state advances, as at a learning rate of 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from timm.models import group_parameters
from torch import nn

from ds_vit.optim.segmented import SegmentedTensors
from ds_vit.parallel.zero_map import ZeroMap


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """timm name → factor on the learning rate: `layer_decay` to the power of the layers above, the head's is 1.

    The layers are timm's own (`model.group_matcher`), as in `timm.optim.param_groups_layer_decay`. What they do not
    name (a head, a further tower that is trained) is the layer above the last block; a frozen tower is none.
    """
    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    parameters = dict(model.named_parameters())
    last = max(layer for name, layer in layers.items() if name in parameters and parameters[name].requires_grad)
    return {name: layer_decay ** max(0, last - layers.get(name, last)) for name in parameters}


def rate_factors(model: nn.Module, layer_decay: float | None, of_task: Mapping[str, float]) -> dict[str, float]:
    """timm name → factor on the learning rate, for every parameter; empty if all are 1.

    Args:
        model: the description of the whole model.
        layer_decay: from layer to layer downward; None or 1 for none.
        of_task: factors of the task (`Task.rate_factors`) that multiply those of the layers; 1 for other names.
    """
    names = [name for name, _ in model.named_parameters()]
    scales = dict.fromkeys(names, 1.0) if layer_decay in (None, 1.0) else layer_scales(model, layer_decay)
    assert of_task.keys() <= scales.keys(), f"no parameters: {sorted(of_task.keys() - scales.keys())}"
    factors = {name: scales[name] * of_task.get(name, 1.0) for name in names}
    return factors if any(factor != 1.0 for factor in factors.values()) else {}


class RateFactors:
    """The factors on the learning rate in the current step.

    Args:
        factors: timm name → factor, for every parameter; empty if all are 1.
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        self._factors = factors
        self._held: frozenset[str] = frozenset()
        # Kept on the device: made in each step, they would be a copy from the host.
        self._values: dict[tuple[SegmentedTensors, frozenset[str]], torch.Tensor] = {}

    def hold(self, names: Collection[str]) -> None:
        """Hold these parameters, and no others, at a rate of 0 from the next step on."""
        self._held = frozenset(names)

    @property
    def act(self) -> bool:
        """Whether any factor is not 1."""
        return bool(self._factors or self._held)

    def of(self, tensors: SegmentedTensors) -> torch.Tensor | None:
        """The factors of the parameters of these tensors, fp32 [P]; None if all are 1."""
        if not self.act:
            return None
        key = tensors, self._held
        if key not in self._values:
            self._values[key] = tensors.values({name: self.factor(name) for name in tensors.names})
        return self._values[key]

    def factor(self, name: str) -> float:
        """The factor of one parameter."""
        return 0.0 if name in self._held else self._factors.get(name, 1.0)


def scale_steps(optimizer: torch.optim.Optimizer, zero_map: ZeroMap, rates: RateFactors) -> None:
    """Make an elementwise optimizer take each parameter's step by its factor; costs a transient copy of the weights
    whose factor is not 1.

    Args:
        optimizer: the one inside ZeRO's, whose `step` sees the flat tensors.
        zero_map: the map of this rank.
        rates: of each step.
    """
    kept: list[tuple[float, list[torch.Tensor], Sequence[torch.Tensor]]] = []  # factor, weights, their copies

    @torch.no_grad()
    def before(*_: Any) -> None:
        if not rates.act:
            return
        by_factor: defaultdict[float, list[torch.Tensor]] = defaultdict(list)
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            flat = parameter.detach().view(-1)
            for segment in zero_map.shard_of(parameter).segments:
                if (factor := rates.factor(segment.name)) != 1.0:
                    by_factor[factor].append(segment.of(flat))
        # Multiplied by 1: a copy of all of them in few kernels.
        kept[:] = [(factor, own, torch._foreach_mul(own, 1.0)) for factor, own in by_factor.items()]

    @torch.no_grad()
    def after(*_: Any) -> None:
        for factor, own, old in kept:
            torch._foreach_lerp_(own, old, 1.0 - factor)
        kept.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
