"""Which patches a teacher sees alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F

SIMILARITY = "patch-similarity"
SIMILARITIES = (
    "Images, and at several steps the cosine of each patch token of the teacher with the one in the centre, dark: 0 or "
    "less, bright: 1"
)


def centre_similarities(tokens: torch.Tensor) -> torch.Tensor:
    """The cosine of patch tokens with the one in the centre, as by Siméoni et al. 2025, arXiv 2508.10104.

    Args:
        tokens: [B, rows, columns, D], which a norm without weights precedes.

    Returns:
        float [B, rows, columns].
    """
    rows = F.normalize(F.layer_norm(tokens.double(), tokens.shape[-1:]), dim=-1)
    centre = rows[:, rows.shape[1] // 2, rows.shape[2] // 2]
    return torch.einsum("brcd,bd->brc", rows, centre).float()
