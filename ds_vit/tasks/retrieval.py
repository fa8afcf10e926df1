"""Retrieval: how often the caption of an image is among the nearest captions, and the reverse.

Shapes: B samples of a micro-batch, E common width of both towers, N samples of a split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ds_vit.data import evaluation_keys
from ds_vit.tasks.metrics import Batch, Metrics

RANKS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")


class Retrieval(Metrics):
    """Recall at 1, 5 and 10 in percent over a whole split, from images to captions and the reverse.

    Features of all ranks are added up into one table; the order of the samples is the split's. Of equally similar
    candidates the first counts as nearer.

    Args:
        device: where the features are kept.
        width: E.

    Attributes:
        rows: float32 [N, 2E], zero where a sample does not count.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        super().__init__(1, device)  # images
        self._width = width
        self.rows: torch.Tensor = torch.zeros(0, 2 * width, device=device)

    def expect(self, num_samples: int) -> None:
        """As `Metrics.expect`."""
        super().expect(num_samples)
        self.rows = self.rows.new_zeros(num_samples, 2 * self._width)
        keys = torch.from_numpy(evaluation_keys(np.arange(num_samples))).to(self.rows.device)
        self._keys, self._samples = keys.sort()

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Normalised features of both towers float32 [B, 2E]."""
        valid = batch["valid"]
        samples = self._samples[torch.searchsorted(self._keys, batch["keys"][valid])]
        self.rows[samples] = outputs[valid]
        self.sums += valid.double().sum()

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`."""
        features = self.rows[self.rows.any(dim=1)].double()
        images, texts = features.split(self._width, dim=1)
        found: dict[str, Any] = {}
        for direction, pair in zip(DIRECTIONS, ((images, texts), (texts, images)), strict=True):
            places = places_of_partners(*pair)
            found |= {
                f"{direction}_r{k}": 100.0 * (places < k).double().sum().item() / max(1, len(places)) for k in RANKS
            }
        mean = sum(found[f"{direction}_r1"] for direction in DIRECTIONS) / len(DIRECTIONS)
        return {"r1": mean, **found, "images": int(self.sums[0])}


def places_of_partners(queries: torch.Tensor, gallery: torch.Tensor, at_once: int = 1 << 22) -> torch.Tensor:
    """How many rows of the gallery are nearer to query i than row i, int64 [N].

    Args:
        queries, gallery: [N, E] each, the pairs in the same order.
        at_once: similarities that are computed at a time.
    """
    number, found = len(queries), [torch.zeros(0, dtype=torch.int64, device=queries.device)]
    columns = torch.arange(number, device=queries.device)
    for rows in columns.split(max(1, at_once // max(1, number))):
        similarities = queries[rows] @ gallery.T
        own = similarities.gather(1, rows[:, None])
        nearer = (similarities > own) | ((similarities == own) & (columns < rows[:, None]))
        found.append(nearer.sum(dim=1))
    return torch.cat(found)
