"""LAMB on ZeRO's flat tensors: the trust ratio is a parameter's own, in every layout.

Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (You et al., arXiv:1904.00962), with the options
and the arithmetic of timm's `Lamb`. DeepSpeed #88 asks for it under ZeRO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.per_parameter import PerParameterOptimizer


class Lamb(PerParameterOptimizer):
    """Adam's update, scaled for each parameter by |w| / |update|.

    The update is computed in the gradient's memory, so that a step needs no other; the norms take one collective of 2·P
    numbers for the P parameters of a group that is adapted. Gradients are used up by a step.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: times the weight, added to the update (to the weight itself where decay is decoupled).
        grad_averaging: weigh the gradient by 1 - beta1 in the first moment.
        trust_clip: the ratio is at most 1 (LAMBC).
        always_adapt: adapt groups without weight decay too, which by default get plain Adam.
        decoupled_decay: decay as AdamW does, outside the trust ratio.

    Raises:
        UserError: a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        grad_averaging: bool = True,
        trust_clip: bool = False,
        always_adapt: bool = False,
        decoupled_decay: bool = False,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise UserError(f"LAMB's betas {betas} must be at least 0 and below 1")
        if eps < 0.0:
            raise UserError(f"LAMB's eps {eps} must not be negative")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "trust_clip": trust_clip,
            "always_adapt": always_adapt,
            "decoupled_decay": decoupled_decay,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        tensors, lr_scales = self._segmented(parameters)
        flats = [p.view(-1) for p in parameters]
        lr, decay = group["lr"], group["weight_decay"]
        updates = self._adam(group, parameters)
        if decay and not group["decoupled_decay"]:
            torch._foreach_add_(updates, flats, alpha=-decay)
        elif decay:
            if lr_scales is None:
                torch._foreach_mul_(flats, 1.0 - lr * decay)
            else:
                tensors.mul_(flats, 1.0 - lr * decay * lr_scales)
        factors = lr_scales
        if decay or group["always_adapt"]:
            ratios = tensors.ratios = _trust_ratios(*tensors.norms(flats, updates), clip=group["trust_clip"])
            factors = ratios if factors is None else ratios * factors
        if factors is None:
            torch._foreach_add_(flats, updates, alpha=lr)
        else:
            tensors.addcmul_(flats, updates, lr * factors)

    def _adam(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Advance the moments, and turn the gradients into minus Adam's update at a learning rate of one."""
        states = self._states(parameters, ("exp_avg", "exp_avg_sq"))
        torch._foreach_add_([state["step"] for state in states], 1)
        step, (beta1, beta2) = float(states[0]["step"]), group["betas"]
        grads = [p.grad.view(-1) for p in parameters]
        first, second = ([state[key].view(-1) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1.0 - beta2)
        corrections = (1.0 - beta1**step, 1.0 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        torch._foreach_copy_(grads, second)  # the gradients are used up: their memory holds the roots, then the update
        torch._foreach_sqrt_(grads)
        torch._foreach_div_(grads, corrections[1] ** 0.5)
        torch._foreach_add_(grads, group["eps"])
        torch._foreach_reciprocal_(grads)
        torch._foreach_mul_(grads, first)
        torch._foreach_mul_(grads, -1.0 / corrections[0])
        return grads


def _trust_ratios(weights: torch.Tensor, updates: torch.Tensor, *, clip: bool) -> torch.Tensor:
    """|w| / |update| for each parameter, 1 where either is zero."""
    ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
    return ratios.clamp(max=1.0) if clip else ratios
