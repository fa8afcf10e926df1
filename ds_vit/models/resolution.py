"""Images of a size other than the model's: positions are resampled as in timm, parameters do not change."""

from __future__ import annotations

from collections.abc import Iterable

from timm.layers import PatchEmbed
from timm.layers.format import Format
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import EmbedLayer, Layer
from ds_vit.models.zoo import TimmViT


def check_sizes(model: TimmViT, name: str, sizes: Iterable[int]) -> None:
    """Check that a model can take square images of these sizes.

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
            raise UserError(f"images of {size} pixels are no multiple of the patch size {wrong[0]} of {name!r}")


def set_image_size(module: nn.Module, size: int, patch_size: tuple[int, int]) -> None:
    """Set the image size of the layers inside any container to `size` pixels (square).

    The table of positions stays a parameter of the model's own grid: timm's `dynamic_img_size` resamples it in each
    forward pass, and its gradient comes back through that. Rotary tables are made anew for the grid. At the model's own
    size all is as if it had never been another one.

    Args:
        module: a `SequentialViT`, a pipeline stage or a layer, of a model that `check_sizes` accepts.
        size: pixels.
        patch_size: of the model; not every stage has its stem.
    """
    grid = size // patch_size[0], size // patch_size[1]
    ropes: dict[int, nn.Module] = {}
    for layer in (child for child in module.modules() if isinstance(child, Layer)):
        layer.num_tokens.num_patches = grid[0] * grid[1]
        if isinstance(layer, EmbedLayer):
            stem = layer.patch_embed
            stem.img_size = (size, size)
            layer.dynamic_img_size = grid != stem.grid_size
            stem.flatten = not layer.dynamic_img_size
            stem.output_fmt = Format.NHWC if layer.dynamic_img_size else Format.NCHW
        elif (rope := getattr(layer, "rope", None)) is not None:
            ropes[id(rope)] = rope
    for rope in ropes.values():
        if getattr(rope, "feat_shape", None) is None:  # a kind that caches no table
            rope.grid_size = grid
        else:
            rope.update_feat_shape(grid)
