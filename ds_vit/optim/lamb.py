"""LAMB on ZeRO's flat tensors: the trust ratio is a parameter's own, in every layout.

Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (You et al., arXiv:1904.00962), with the options
and the arithmetic of timm's `Lamb`. DeepSpeed #88 asks for it under ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ds_vit.optim.per_parameter import PerParameterOptimizer


class Lamb(PerParameterOptimizer):
    """Adam's update, scaled for each parameter by |w| / |update|.

    The gradient's memory takes up the update, so that a step needs a small scratch tensor alone; the norms take one
    collective of 2·P numbers for the P parameters of a group that is adapted. Gradients are used up by a step.

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
        ValueError: a value out of range.
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
            raise ValueError(f"LAMB's betas {betas} must be at least 0 and below 1")
        if eps < 0.0:
            raise ValueError(f"LAMB's eps {eps} must not be negative")
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
        updates = self._adam(group, parameters, flats)
        if decay and group["decoupled_decay"]:
            if lr_scales is None:
                torch._foreach_mul_(flats, 1.0 - lr * decay)
            else:
                tensors.mul_(flats, 1.0 - lr * decay * lr_scales)
        factors = lr_scales
        if decay or group["always_adapt"]:
            ratios = _trust_ratios(*tensors.norms(flats, updates), clip=group["trust_clip"])
            self._keep_ratios(parameters, tensors.names, ratios)
            factors = ratios if factors is None else ratios * factors
        if factors is None:
            torch._foreach_add_(flats, updates, alpha=lr)
        else:
            tensors.addcmul_(flats, updates, lr * factors)

    def _adam(
        self, group: dict[str, Any], parameters: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Advance the moments, and turn the gradients into minus the update at a learning rate of one.

        Piece by piece: what a piece computes is still in the cache when it is used.
        """
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        grads = [p.grad.view(-1) for p in parameters]
        size = _PIECE_ON_CPU if flats[0].device.type == "cpu" else _PIECE
        scratch = torch.empty(min(size, sum(map(torch.numel, flats))), dtype=grads[0].dtype, device=grads[0].device)
        decay = 0.0 if group["decoupled_decay"] else group["weight_decay"]
        adam = _fused_adam if group["bias_correction"] and group["grad_averaging"] else _plain_adam
        for weights, gradients, first, second, steps in _pieces(size, states, flats, grads):
            lengths = [w.numel() for w in weights]
            updates = list(scratch[: sum(lengths)].zero_().split(lengths))
            adam(group, updates, gradients, first, second, steps)
            if len(updates) == 1:
                torch.add(updates[0], weights[0], alpha=-decay, out=gradients[0])  # one pass instead of two
                continue
            torch._foreach_add_(updates, weights, alpha=-decay)
            torch._foreach_copy_(gradients, updates)
        return grads


def _pieces(
    size: int, states: Sequence[dict[str, torch.Tensor]], flats: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], ...]]:
    """Lists of at most `size` elements in all: a part of a large tensor, or several small ones.

    Yields:
        weights, gradients, first moments, second moments, steps.
    """
    waiting: tuple[list[torch.Tensor], ...] = ([], [], [], [], [])
    held = 0
    for state, flat, grad in zip(states, flats, grads, strict=True):
        moments = (state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        for piece in zip(*(tensor.split(size) for tensor in (flat, grad, *moments)), strict=True):
            if held + piece[0].numel() > size:
                yield waiting
                waiting, held = ([], [], [], [], []), 0
            for tensors, tensor in zip(waiting, (*piece, state["step"]), strict=True):
                tensors.append(tensor)
            held += piece[0].numel()
    yield waiting


# Elements that are worked on together: a few of them fit into a processor's cache; a GPU wants more at a time.
_PIECE_ON_CPU, _PIECE = 2**17, 2**26


def _fused_adam(
    group: dict[str, Any],
    updates: list[torch.Tensor],
    grads: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    """Adam with a learning rate of one, on zeros in place of weights."""
    beta1, beta2 = group["betas"]
    torch._fused_adam_(
        updates,
        grads,
        first,
        second,
        [],
        steps,
        lr=1.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _plain_adam(
    group: dict[str, Any],
    updates: list[torch.Tensor],
    grads: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    steps: list[torch.Tensor],
) -> None:
    """The same without bias correction, or with the gradient's full weight in the first moment."""
    beta1, beta2 = group["betas"]
    torch._foreach_mul_(first, beta1)
    torch._foreach_add_(first, grads, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, value=1.0 - beta2)
    step = float(steps[0])
    corrections = (1.0 - beta1**step, 1.0 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    roots = torch._foreach_sqrt(second)
    torch._foreach_div_(roots, corrections[1] ** 0.5)
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(updates, first, roots, value=-1.0 / corrections[0])


def _trust_ratios(weights: torch.Tensor, updates: torch.Tensor, *, clip: bool) -> torch.Tensor:
    """|w| / |update| for each parameter, 1 where either is zero."""
    ratios = torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)
    return ratios.clamp(max=1.0) if clip else ratios
