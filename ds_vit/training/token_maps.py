"""Where in an image a model's tokens are long: the picture of the norms that the last block leaves, patch by patch.

It is taken in passing, from the first batch of an evaluation, so it costs no forward pass of its own. High-norm tokens
in dull places are the artefacts of "Vision Transformers Need Registers" (arXiv 2309.16588).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ds_vit.data import ImageConfig
from ds_vit.models import SequentialViT
from ds_vit.monitoring.report.charts import viridis
from ds_vit.training.plan import Plan

SIDE = 112  # pixels of an image in the picture
MOST = 8
_GAP = 4
NAME = "token-norms"


def can_be_seen(plan: Plan) -> bool:
    """Whether rank 0 sees images and all of their tokens: not in a pipeline, nor where ranks share a sequence."""
    return plan.parallel.layout.pp == 1 and not plan.config.sequence_parallel and bool(plan.model.task.class_names)


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Look at the first batch that goes through a `SequentialViT`.

    Yields:
        Filled by that batch: "images" [B, 3, H, W], "tokens" [B, S, D]; at most `MOST` samples.
    """
    assert isinstance(model, SequentialViT)
    seen: dict[str, torch.Tensor] = {}

    def look(name: str, layer: nn.Module) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.setdefault(name, inputs[0][0][:MOST].detach().float().cpu())
            handles[name].remove()

        return layer.register_forward_pre_hook(hook)

    handles = {"images": look("images", model.layers[0]), "tokens": look("tokens", model.layers[-1])}
    try:
        yield seen
    finally:
        for handle in handles.values():
            handle.remove()


def norms_of(seen: dict[str, torch.Tensor], model: SequentialViT) -> torch.Tensor | None:
    """The lengths of the tokens of patches behind the last block, before any norm: float [B, rows, columns].

    Args:
        seen: from `watched`.
        model: that was watched.

    Returns:
        None where no batch came by, or the tokens are no grid of patches.
    """
    count = model.layers[-1].num_tokens
    if "tokens" not in seen or seen["tokens"].shape[1] != count.num_prefix_tokens + count.num_patches:
        return None
    rows, columns = model.layers[0].patch_embed.grid_size
    if rows * columns != count.num_patches:
        return None
    return seen["tokens"][:, count.num_prefix_tokens :].norm(dim=-1).reshape(-1, rows, columns)


def picture(images: torch.Tensor, norms: torch.Tensor, image: ImageConfig) -> torch.Tensor:
    """The images, and under each the norms of its tokens, from its shortest (dark) to its longest (bright).

    Args:
        images: [B, 3, H, W], as the model gets them.
        norms: [B, rows, columns].
        image: for mean and std.

    Returns:
        uint8 [3, height, width], in two rows of B.
    """
    low, high = norms.amin((1, 2), keepdim=True), norms.amax((1, 2), keepdim=True)
    shares = ((norms - low) / (high - low).clamp(min=1e-12)).nan_to_num(0.0)
    maps = torch.from_numpy(viridis(shares.numpy())).permute(0, 3, 1, 2).float()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (image.mean, image.std))
    pixels = (images * std + mean).clamp(0.0, 1.0) * 255.0
    rows = [_fit(pixels, "bilinear" if pixels.shape[-1] > SIDE else "nearest"), _fit(maps, "nearest")]
    apart = ((0, 0), (0, 0), (0, _GAP), (0, _GAP))
    rows = [np.pad(row, apart, constant_values=128) for row in rows]
    both = np.concatenate([np.concatenate(list(row), axis=2) for row in rows], axis=1)
    return torch.from_numpy(both[:, :-_GAP, :-_GAP])


def _fit(images: torch.Tensor, mode: str) -> np.ndarray:
    """float [B, 3, h, w] in 0 to 255 → uint8 [B, 3, SIDE, SIDE]."""
    antialias = {"antialias": True} if mode == "bilinear" else {}
    return functional.interpolate(images, (SIDE, SIDE), mode=mode, **antialias).round().to(torch.uint8).numpy()
