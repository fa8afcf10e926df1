"""A linear map that computes more than its matrix: the base of adapters (LoRA) and of other arithmetic (fp8).

Sharding, files of weights and exports ask a linear map for its parameters by this class; timm's own are plain.

Shapes: x [..., in_features].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ds_vit.models.keyed_drop import convert


class Linear(nn.Linear):
    """The base class, which computes as nn.Linear does. Also mixed in before the class of a linear map (`mix_in`)."""

    outputs: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}
    """Parameters with an axis over the output features → that axis. Without it a parameter is whole on each rank."""
    inputs: ClassVar[Mapping[str, int]] = {"weight": 1}
    """The same for the input features."""
    added: ClassVar[tuple[str, ...]] = ()
    """Parameters that a file of initial weights may lack; `init_weights` draws them."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs without the bias; of sharded input features this rank's summand."""
        return F.linear(x, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        out, bias = self.product(x), self.bias
        return out if bias is None else out + bias.to(out.dtype)

    def fold(self) -> None:
        """Become a plain linear map of the same outputs, in place, for the tools that read exported weights."""
        convert(self, nn.Linear)


def added_names(model: nn.Module) -> list[str]:
    """The names of `Linear.added` in a model."""
    extended = {path: module for path, module in model.named_modules() if isinstance(module, Linear)}
    return [f"{path}.{name}" for path, module in extended.items() for name in module.added]
