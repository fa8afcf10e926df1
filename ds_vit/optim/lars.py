"""LARS on ZeRO's flat tensors, with one trust ratio per parameter in every layout.

Large Batch Training of Convolutional Networks (You et al., arXiv:1708.03888), with the options and the arithmetic of
timm's `Lars`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm.optim
import torch

from ds_vit.optim.per_parameter import PerParameterOptimizer


class Lars(PerParameterOptimizer):
    """SGD with momentum whose gradient is scaled for each parameter by c·|w| / (|g| + decay·|w|).

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: decay of the running sum of scaled gradients.
        dampening: a gradient enters the momentum times 1 - dampening, except the first one.
        weight_decay: the weight times this is added to the gradient.
        nesterov: look ahead along the momentum.
        trust_coeff: c.
        eps: added to the denominator.
        trust_clip: use min(ratio / lr, 1) as the ratio (LARC).
        always_adapt: adapt groups without weight decay too, which by default get plain SGD.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coeff: float = 0.001,
        eps: float = 1e-8,
        trust_clip: bool = False,
        always_adapt: bool = False,
    ) -> None:
        numbers = (lr, momentum, dampening, weight_decay, nesterov, trust_coeff, eps, trust_clip, always_adapt)
        super().__init__(params, timm.optim.Lars([torch.zeros(1)], *numbers).defaults)  # which it has checked

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        tensors, lr_scales = self._segmented(parameters)
        flats = [p.view(-1) for p in parameters]
        grads = [p.grad.view(-1) for p in parameters]
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        if decay or group["always_adapt"]:
            weight_norms, grad_norms = tensors.norms(flats, grads)
            denominators = grad_norms + decay * weight_norms + group["eps"]
            ratios = group["trust_coeff"] * weight_norms / denominators
            ratios = torch.where((weight_norms > 0) & (grad_norms > 0), ratios, 1.0)
            if group["trust_clip"]:
                rates = lr if lr_scales is None else lr * lr_scales
                ratios = (ratios / rates).clamp(max=1.0)
            tensors.ratios = ratios
            if decay:
                torch._foreach_add_(grads, flats, alpha=decay)
            tensors.mul_(grads, ratios)
        if momentum:
            started = [p for p in parameters if "momentum_buffer" in self.state[p]]
            for p in parameters:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = p.grad.clone()
            buffers = [self.state[p]["momentum_buffer"].view(-1) for p in started]
            if buffers:
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, [p.grad.view(-1) for p in started], alpha=1.0 - group["dampening"])
            buffers = [self.state[p]["momentum_buffer"].view(-1) for p in parameters]
            if group["nesterov"]:
                torch._foreach_add_(grads, buffers, alpha=momentum)
            else:
                grads = buffers
        if lr_scales is None:
            torch._foreach_add_(flats, grads, alpha=-lr)
        else:
            tensors.addcmul_(flats, grads, -lr * lr_scales)
