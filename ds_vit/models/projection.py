"""The projection of a student's features to the width of its teacher's, a tower with one layer.

Shapes: B samples, D width of the student's features, E width of the teacher's.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from ds_vit.models.layers import Layer, TokenCount, copy_to_take_apart, take_apart


class Projection(nn.Module):
    """The description: one linear layer with torch's initial values, as in timm's feature distillation.

    Args:
        width: D.
        taught: E.
        device: of the weights, which get no values.
    """

    attn_pool: ClassVar[None] = None

    def __init__(self, width: int, taught: int, device: str = "meta") -> None:
        super().__init__()
        self.linear = nn.Linear(width, taught, device=device)

    def init_weights(self, needs_reset: bool = True) -> None:
        """torch's initial values."""
        self.linear.reset_parameters()


class ProjectionLayer(Layer):
    """Features [B, D] to the teacher's width [B, E].

    Args:
        linear: of a copy of the description.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.num_tokens = TokenCount(1, 0)

    def example(self, images: int) -> torch.Tensor:
        """Features [B, D] without values, to count what the tower costs."""
        weight = self.linear.weight
        return torch.empty(images, weight.shape[1], dtype=weight.dtype, device="meta", requires_grad=True)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(features [B, D], keys, ...) -> [B, E]."""
        return self.linear(inputs[0])


@take_apart.register
def _(model: Projection) -> list[Layer]:
    return [ProjectionLayer(copy_to_take_apart(model).linear)]
