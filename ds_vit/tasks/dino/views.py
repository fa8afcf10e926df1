"""A micro-batch's crops as a step reads them: their keys, and which patches of the global ones are masked.

Shapes: B samples, V crops of each, N patches of a global crop, M masked patches of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_vit.device import send
from ds_vit.tasks.dino.fields import keys_of_views
from ds_vit.tasks.dino.loss import patch_weights
from ds_vit.tasks.metrics import Batch


@dataclass(frozen=True, eq=False)
class Views:
    """Keys and masks of a micro-batch's crops.

    Attributes:
        keys: of the crops, int64 [B, V].
        masks: bool [2B, N], or None without masked patches.
        patches: places of the masked ones among the 2B * N patches of the global crops, int64 [M].
        weights: of the masked patches in the loss, float64 [M, 1, 1]; 0 for those that `fill_up` adds.
        filled_up: whether there are such.
    """

    keys: torch.Tensor
    masks: torch.Tensor | None
    patches: torch.Tensor
    weights: torch.Tensor
    filled_up: bool = False

    @property
    def counted(self) -> dict[str, torch.Tensor]:
        """Of the parts that are filled up, which rows count, bool [M]."""
        return {"patch": self.weights.flatten() > 0} if self.filled_up else {}


def views_of(batch: Batch, num_views: int) -> Views:
    """Those of a batch whose masks, if any, are on the host, which knows M without a wait, or of a `fill_up`."""
    keys = keys_of_views(batch["keys"], num_views)
    if "masks" not in batch:
        none = torch.empty(0, dtype=torch.int64, device=keys.device)
        return Views(keys, None, none, torch.empty(0, 1, 1, device=keys.device))
    if "patches" in batch:
        return Views(keys, batch["masks"], batch["patches"], batch["weights"], filled_up=True)
    return Views(keys, *(send(tensor, keys.device) for tensor in _drawn_masks(batch)))


def fill_up(batch: Batch, largest_share: float) -> Batch:
    """A batch with as many masked patches as there may be; the weight of those beyond the drawn is 0.

    Args:
        batch: with masks on the host.
        largest_share: of a global crop's patches that may be masked.
    """
    masks, patches, weights = _drawn_masks(batch)
    missing = len(masks) * int(largest_share * masks.shape[1]) - len(patches)
    patches, weights = F.pad(patches, (0, missing)), F.pad(weights, (0, 0, 0, 0, 0, missing))
    made = {"masks": masks, "patches": patches, "weights": weights}
    return {**batch, **{name: send(tensor, batch["keys"].device) for name, tensor in made.items()}}


def _drawn_masks(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masks, patches and weights of `Views` on the host."""
    masks = batch["masks"].flatten(0, 1)
    return masks, masks.flatten().nonzero()[:, 0], patch_weights(masks)
