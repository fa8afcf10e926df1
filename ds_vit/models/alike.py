"""Layers looked at one by one on the meta device; of blocks that do and cost the same, one.

Shapes: B images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vit.models.keyed_drop import KeyedDrop
from ds_vit.models.layers import BlockLayer, Layer
from ds_vit.models.zoo import TimmViT, image_size

Seen = TypeVar("Seen")


def look_at_each(
    model: TimmViT,
    layers: Sequence[Layer],
    look: Callable[[Layer, Any], tuple[Seen, Any]],
    *,
    images: int,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Seen, Any]]:
    """What is to be seen in each layer, and what it is given; nothing is computed and no memory is used.

    Args:
        model: from `create_model`, for its images.
        layers: all of them, on the meta device.
        look: makes of a layer and what it is given (what is seen, what the layer hands on).
        images: B.
        dtype: of the images.
    """
    height, width = image_size(model)
    keys = torch.zeros(images, dtype=torch.int64, device="meta")
    value: Any = (torch.empty(images, model.in_chans, height, width, device="meta", dtype=dtype), keys)
    found: list[tuple[Seen, Any]] = []
    known: tuple[Any, ...] | None = None
    with _NormsByShape():
        for layer in layers:
            as_it_is = (looks(layer.block), value[0].requires_grad) if isinstance(layer, BlockLayer) else None
            # A block hands on what it was given, in the same shapes.
            if as_it_is is not None and as_it_is == known:
                found.append((found[-1][0], value))
                continue
            given = value
            seen, value = look(layer, given)
            found.append((seen, given))
            known = as_it_is
    return found


_AS_KERNELS_DO = torch.contiguous_format


class _NormsByShape(TorchDispatchMode):
    """What layer norms give on the meta device, where torch takes each apart into operations in Python, slowly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_layer_norm.default:
            tokens, shape = args[0], args[1]
            dtype = torch.promote_types(tokens.dtype, torch.float32)
            mean = tokens.new_empty((*tokens.shape[: -len(shape)], *[1] * len(shape)), dtype=dtype)
            return torch.empty_like(tokens, memory_format=_AS_KERNELS_DO), mean, torch.empty_like(mean)
        if func is torch.ops.aten.native_layer_norm_backward.default:
            _, tokens, _, _, _, weight, bias, wanted = args
            of = zip((tokens, weight, bias), wanted, strict=True)
            return tuple(
                torch.empty_like(one, memory_format=_AS_KERNELS_DO) if one is not None and want else None
                for one, want in of
            )
        return func(*args, **(kwargs or {}))


def looks(module: nn.Module) -> tuple[Any, ...]:
    """What decides on a module's cost: its classes, settings, shapes and types, and not its weights' values."""
    if isinstance(module, (KeyedDrop, nn.Identity)):  # a first block without drop-path has none of it
        return ()
    # A norm that computes in fp32 has a forward of its own: by its name, which is that of every such norm.
    settings = {
        name: repr(value) for name, value in vars(module).items() if not name.startswith("_") and name != "forward"
    }
    shapes = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    inner = [(name, child and looks(child)) for name, child in module._modules.items()]
    return type(module), settings, shapes, inner
