"""Adagrad (Duchi, Hazan, Singer; JMLR 12, 2011) under ZeRO: torch's arithmetic, with states made at the first step.

`torch.optim.Adagrad` makes its states in its constructor, with the shapes of the model's parameters. ZeRO then puts its
flat partitions in their place, which the states do not fit, and so DeepSpeed 0.19.8 makes another Adagrad in
ZeRO-1 to 3: one parameter group for all partitions, with torch's default weight decay of zero. The decay of every group
is lost, and parameters of all groups but the first are never mapped (`_hp_mapping`). It does so for torch's class and
those that inherit from it; hence this one, which does not.
"""

from __future__ import annotations

from typing import Any

import torch


class Adagrad(torch.optim.Optimizer):
    """As `torch.optim.Adagrad`; other tensors may be put into `param_groups` before the first step.

    State of a parameter: `sum`, of its shape, begun at `initial_accumulator_value`; `step`, a scalar tensor on the CPU.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        lr_decay: the rate at step t is lr / (1 + (t - 1) · lr_decay).
        weight_decay: added to the gradient, times the weight.
        initial_accumulator_value: what the sum of squares begins with.
        eps: added to the root of the sum.
        maximize: go uphill.
        foreach: as torch's.

    Raises:
        ValueError: a negative number.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        numbers = (lr, lr_decay, weight_decay, initial_accumulator_value, eps)
        of_torch = torch.optim.Adagrad([torch.zeros(1)], *numbers, foreach, maximize=maximize)
        super().__init__(params, of_torch.defaults)  # which it has checked

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> tuple[bool, bool]:
        """As torch's, which finds the states of whatever lies in `param_groups` now."""
        for p in group["params"]:
            if p.grad is not None and not self.state[p]:
                self.state[p]["step"] = torch.tensor(0.0)
                self.state[p]["sum"] = torch.full_like(p, group["initial_accumulator_value"])
        return torch.optim.Adagrad._init_group(self, group, *lists)

    step = torch.optim.Adagrad.step
