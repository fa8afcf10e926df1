"""Whether an exported model is the one it came from: logits on random images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Predict = Callable[[torch.Tensor], torch.Tensor]

TOLERANCE = 1e-4
_BATCHES = (1, 3)  # two sizes: a batch that was burnt in shows


@dataclass(frozen=True)
class Difference:
    """What came of the check of an export.

    Attributes:
        folder: where the export is, or would have been.
        reader: the tool that loaded it back.
        largest: largest difference of a logit.
        scale: largest magnitude of a logit of the source.
    """

    folder: Path
    reader: str
    largest: float
    scale: float

    @property
    def within(self) -> bool:
        """Whether the difference is within the tolerance, relative to the logits where they are larger than 1."""
        return self.largest <= TOLERANCE * max(1.0, self.scale)  # False for NaN

    @property
    def failure(self) -> str:
        """What to say where it is not."""
        return f"the largest difference {self.largest:.1e} is beyond {TOLERANCE:g}; {self.folder} is not kept"

    def __str__(self) -> str:
        return (
            f"{self.folder}: loaded back by {self.reader}; largest difference of the logits {self.largest:.1e} "
            f"(largest logit {self.scale:.2f})"
        )


@torch.no_grad()
def compare(model: Predict, other: Predict, img_size: tuple[int, int], folder: Path, reader: str) -> Difference:
    """Compare two models on random images, in batches of 1 and 3.

    Args:
        model: the source, [B, 3, H, W] → logits [B, C].
        other: the export as its tool loads it.
        img_size: (H, W).
        folder: where the export will be.
        reader: the tool's name and version.
    """
    generator = torch.Generator().manual_seed(0)
    largest = scale = 0.0
    for size in _BATCHES:
        images = torch.randn(size, 3, *img_size, generator=generator)
        expected, given = model(images), other(images)
        if expected.shape != given.shape:
            return Difference(folder, reader, float("inf"), float(expected.abs().max()))
        # Not Python's max, which loses a NaN.
        largest = float(torch.tensor([largest, (expected - given).abs().max()]).max())
        scale = max(scale, float(expected.abs().max()))
    return Difference(folder, reader, largest, scale)
