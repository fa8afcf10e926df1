"""What a model sees in an image: the norms that the last block leaves its tokens, the attention they get, and the
principal components of the patches.

All are observed in a separate forward pass of a few images, without compiled blocks.
High-norm tokens in dull places are the artefacts of "Vision Transformers Need Registers" (arXiv 2309.16588). Attention
is what the classifier's input pays to each patch in the last step before it: the class token in the last block, the
latent of an attention pooling, or else the patches themselves, in the mean; always the mean over all heads. The first
three principal components of the normalised patch tokens of all images, as red, green and blue, give patches alike the
same colour (Oquab et al. 2024, arXiv 2304.07193, figure 1).

Shapes: B samples, S tokens, D width, H heads of this rank, K head width, Q queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torchvision.utils import make_grid

from ds_vit.data.settings import ImageConfig
from ds_vit.models.sequential import SequentialViT
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.panels import TILE, viridis

SIDE = TILE  # pixels of an image in the picture
MOST = 8
_GAP = 4
NORMS, ATTENTION, COMPONENTS = "token-norms", "attention", "patch-pca"


@dataclass
class Seen:
    """What was seen of the valid rows of some batches.

    Attributes:
        rows: the valid ones of the batch under way, int64 [B]; from `passing`.
        images: of each batch, [B, 3, height, width].
        tokens: behind the last block, before any norm: of each batch, float [B, S, D].
        attention: that each token gets, in the mean over this rank's heads: of each batch, float [B, S]. Of none where
            the last step is not one attention (differential attention takes the difference of two).
    """

    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    images: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    attention: list[torch.Tensor] = field(default_factory=list)

    def passing(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on to the model that is watched, to see which of their rows are valid."""
        for batch in batches:
            self.rows = batch["valid"].nonzero().flatten()
            yield batch

    def maps(self, model: SequentialViT, tp: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
        """What can be drawn, by its name: a value for each patch, float [B, rows, columns], or [B, 3, rows, columns].

        Args:
            model: that was watched.
            tp: the ranks that share its heads, all of which must call this (a collective), or None.
        """
        if not self.tokens:
            return {}
        of_tokens = torch.cat(self.tokens)
        found = {NORMS: of_tokens.norm(dim=-1)}
        if self.attention:
            found[ATTENTION] = torch.cat(self.attention)
            if tp is not None:
                dist.all_reduce(found[ATTENTION], group=tp)  # times tp, which the picture does not show
        grids = {name: _grid(values, model) for name, values in found.items()}
        if (tokens := self.patch_tokens(model)) is not None:
            grids[COMPONENTS] = principal_components(tokens)
        return {name: grid.cpu() for name, grid in grids.items() if grid is not None}

    def patch_tokens(self, model: SequentialViT) -> torch.Tensor | None:
        """The tokens of the patches of all batches, float [B, rows, columns, D]; None where they are no grid.

        At least one batch was seen.
        """
        return _grid(torch.cat(self.tokens), model)


def principal_components(tokens: torch.Tensor) -> torch.Tensor:
    """Patch tokens [B, rows, columns, D] → their first three principal components over all patches.

    Returns:
        float [B, 3, rows, columns], each component from 0 (its least) to 1 (its largest); the sign is the one with
        which the largest weight of a component is positive.
    """
    rows = functional.layer_norm(tokens.double(), tokens.shape[-1:]).flatten(0, 2)
    rows = rows - rows.mean(0)
    directions = torch.linalg.eigh(rows.T @ rows)[1][:, -3:].flip(1)
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    values = rows @ (directions * largest.sign())
    values = values - values.amin(0)
    values = values / values.amax(0).clamp(min=1e-12)
    return values.float().unflatten(0, tokens.shape[:3]).movedim(-1, 1)


def _grid(of_tokens: torch.Tensor, model: SequentialViT) -> torch.Tensor | None:
    """[B, S or patches, …] → [B, rows, columns, …]; None where the tokens are no grid of patches."""
    count = model.layers[-1].num_tokens
    rows, columns = model.layers[0].patch_embed.grid_size
    if of_tokens.shape[1] == count.num_prefix_tokens + count.num_patches:
        of_tokens = of_tokens[:, count.num_prefix_tokens :]
    return of_tokens.unflatten(1, (rows, columns)) if of_tokens.shape[1] == rows * columns else None


class _Attention(TorchFunctionMode):
    """Sees attention as it is computed, whatever module of timm's computes it."""

    def __init__(self, rows: torch.Tensor, queries: slice) -> None:
        super().__init__()
        self.rows, self.queries = rows, queries
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.found.append(_mean_attention(args[0][self.rows][:, :, self.queries], args[1][self.rows]))
        return func(*args, **(kwargs or {}))


def _mean_attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [B, H, Q, K], k [B, H, S, K] → what each token gets, in the mean over queries and heads: float [B, S]."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.float() * q.shape[-1] ** -0.5, k.float()
        # One head of one image after another: all at once would be gigabytes with large images.
        one_by_one = [(a @ b.mT).softmax(-1).mean(0) for a, b in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)]
        return torch.stack(one_by_one).view(*q.shape[:2], -1).mean(1)


@contextmanager
def watched(model: SequentialViT) -> Iterator[Seen]:
    """Look at the batches that go through a `SequentialViT`; `Seen.passing` says which of their rows count.

    Yields:
        Filled by these batches.
    """
    embed, last, head = model.layers[0], model.layers[-2], model.layers[-1]
    # What the classifier reads: the class token, or all patches.
    queries = slice(0, 1) if head.global_pool == "token" else slice(head.num_tokens.num_prefix_tokens, None)
    seen, handles, under_way = Seen(), ExitStack(), ExitStack()
    modes: list[_Attention] = []  # of the last block, of the head

    def begin(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not len(seen.rows):
            return
        taken = inputs[0][0][seen.rows].detach().float()
        if layer is embed:
            seen.images.append(taken.cpu())
            return
        under_way.close()
        if layer is head:
            seen.tokens.append(taken)
        modes.append(_Attention(seen.rows, slice(None) if layer is head else queries))
        under_way.enter_context(modes[-1])

    def end(*_: Any) -> None:
        under_way.close()
        found = next((mode.found for mode in reversed(modes) if mode.found), [])
        seen.attention += found if len(found) == 1 else []
        modes.clear()

    for layer in (embed, last, head):
        handles.callback(layer.register_forward_pre_hook(begin).remove)
    handles.callback(head.register_forward_hook(end).remove)
    try:
        with torch.compiler.set_stance("force_eager"):  # no Python sees a graph's attention
            yield seen
    finally:
        under_way.close()
        handles.close()


def picture(images: torch.Tensor, values: torch.Tensor, image: ImageConfig) -> torch.Tensor:
    """The images, and under each a value for each of its patches, from its least (dark) to its highest (bright), or a
    colour.

    Args:
        images: [B, 3, height, width], as the model gets them.
        values: [B, rows, columns], or shares of red, green and blue [B, 3, rows, columns].
        image: for mean and std.

    Returns:
        uint8 [3, height, width], in two rows of B.
    """
    if values.ndim == 4:
        maps = values.nan_to_num(0.0) * 255.0
    else:
        low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
        shares = ((values - low) / (high - low).clamp(min=1e-12)).nan_to_num(0.0)
        maps = torch.from_numpy(viridis(shares.numpy())).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (image.mean, image.std))
    pixels = (images * std + mean).clamp(0.0, 1.0) * 255.0
    # What is enlarged keeps its pixels.
    shrink: dict[str, Any] = {"mode": "bilinear", "antialias": True} if pixels.shape[-1] > SIDE else {}
    pixels = functional.interpolate(pixels, (SIDE, SIDE), **shrink)
    maps = functional.interpolate(maps.float(), (SIDE, SIDE))
    grid = make_grid(torch.cat((pixels, maps)), nrow=len(images), padding=_GAP, pad_value=128)
    return grid[:, _GAP:-_GAP, _GAP:-_GAP].round().to(torch.uint8)
