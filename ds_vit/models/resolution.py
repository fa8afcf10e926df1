"""Images of a size other than the model's: positions are resampled as in timm, parameters do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.layers.format import Format

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import EmbedLayer, Layer
from ds_vit.models.zoo import TimmViT


def check_sizes(model: TimmViT, name: str, sizes: Iterable[int], flag: str = "--img-size") -> None:
    """Check that a model, named as `name`, can take square images of a flag's sizes.

    Raises:
        UserError: its stem is no plain patch embedding, or a size is no multiple of its patches.
    """
    stem = model.patch_embed
    if type(stem) is not PatchEmbed:
        raise UserError(
            f"images of several sizes: the stem of {name!r} is timm's {type(stem).__name__}, which takes one "
            "size; use a name whose stem cuts patches, or one --img-size"
        )
    for size in sizes:
        if wrong := [patch for patch in stem.patch_size if size % patch]:
            near = max(1, round(size / wrong[0])) * wrong[0]
            why = f"no multiple of the patch size {wrong[0]} of {name!r}"
            raise UserError(f"{flag}: images of {size} pixels are {why}; the nearest is {near}")


class SizeSwitch:
    """Sets the image size of layers (square), as often as a step needs it.

    The table of positions stays a parameter of the model's own grid: timm's `dynamic_img_size` resamples it in each
    forward pass, and its gradient comes back through that. Rotary tables of each size are computed once. At the model's
    own size all is as if it had never been another one.

    Layers that are run again for their activations need the size of their first run: `BlockRun` sets it.

    Args:
        layers: of a model that `check_sizes` accepts.
        patch_size: of the model.
    """

    def __init__(self, layers: Sequence[Layer], patch_size: tuple[int, int]) -> None:
        self._layers, self._patch_size = layers, patch_size
        ropes = {
            id(layer.rope): layer.rope
            for layer in layers
            if not isinstance(layer, EmbedLayer) and getattr(layer, "rope", None) is not None
        }
        self._ropes = [*ropes.values()]
        self._tables: dict[int, list[tuple[Any, dict[str, torch.Tensor | None]]]] = {}
        self._size: int | None = None

    def set(self, size: int) -> None:
        """Let the layers take square images of another size.

        Args:
            size: pixels.
        """
        if size == self._size:
            return
        self._size = size
        grid = size // self._patch_size[0], size // self._patch_size[1]
        for layer in self._layers:
            layer.num_tokens.num_patches = grid[0] * grid[1]
            if isinstance(layer, EmbedLayer):
                stem = layer.patch_embed
                stem.img_size = (size, size)
                layer.dynamic_img_size = grid != stem.grid_size
                stem.flatten = not layer.dynamic_img_size
                stem.output_fmt = Format.NHWC if layer.dynamic_img_size else Format.NCHW
        if size not in self._tables:
            for rope in self._ropes:
                if getattr(rope, "feat_shape", None) is None:  # a kind that caches no table
                    rope.grid_size = grid
                else:
                    rope.update_feat_shape(grid)
            self._tables[size] = [(getattr(rope, "feat_shape", None), {**rope._buffers}) for rope in self._ropes]
        for rope, (shape, tables) in zip(self._ropes, self._tables[size], strict=True):
            rope._buffers.update(tables)
            if shape is None:
                rope.grid_size = grid
            else:
                rope.feat_shape = shape
