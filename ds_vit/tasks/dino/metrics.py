"""The spread of the teacher's features."""

from __future__ import annotations

import torch
from torch import nn

from ds_vit.tasks.metrics import Batch, Metrics


class FeatureSpread(Metrics):
    """The deviation of normalised features times √D: near 1 where they are spread, 0 where they have collapsed.

    Chen and He 2021, https://arxiv.org/abs/2011.10566, section 4.1.

    Args:
        width: D.
        device: where the sums are kept.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(2 * width + 1, device)  # features, their squares, images

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Features fp32 [B, D]."""
        rows = nn.functional.normalize(outputs.double(), dim=1)
        rows = torch.cat((rows, rows.square(), torch.ones_like(rows[:, :1])), dim=1)
        self.sums += torch.where(batch["valid"][:, None], rows, 0.0).sum(0)

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`."""
        images = int(self.sums[-1])
        means, squares = (self.sums[:-1] / max(images, 1)).chunk(2)
        deviation = (squares - means.square()).clamp(min=0.0).sqrt().mean() * len(means) ** 0.5
        return {"feature_std": float(deviation), "images": images}
