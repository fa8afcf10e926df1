"""What a layer keeps for its backward pass, counted on the meta device: every tensor that autograd saves, each once.

The layers run as a rank has them: cut, cast and frozen. Nothing is computed and no memory is used. What is not seen is
what lives within one operation alone, and what the backward pass itself makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ds_vit.models.alike import look_at_each
from ds_vit.models.layers import Layer
from ds_vit.models.zoo import TimmViT

_IMAGES = 2  # of one alone some copies are views


class Kept(NamedTuple):
    """What a layer keeps of one image in bytes, and what it was given: tensors on the meta device."""

    bytes: int
    inputs: Any


def kept_by_layers(model: TimmViT, layers: Sequence[Layer], dtype: torch.dtype = torch.float32) -> list[Kept]:
    """What each layer keeps of an image in training; of blocks that are alike one is counted.

    Args:
        model: from `create_model`, for its images.
        layers: all of them, on the meta device; they are put into training mode.
        dtype: of the images.
    """

    def count(layer: Layer, inputs: Any) -> tuple[int, Any]:
        with _FusedAttention():
            return saved_bytes(lambda: layer(inputs), (*layer.parameters(), *layer.buffers()))

    for layer in layers:
        layer.train()
    found = look_at_each(model, layers, count, images=_IMAGES, dtype=dtype)
    return [Kept(num_bytes // _IMAGES, inputs) for num_bytes, inputs in found]


def saved_bytes(function: Callable[[], Any], held_anyway: Iterable[torch.Tensor] = ()) -> tuple[int, Any]:
    """The bytes that autograd saves while `function` runs, and what it gives.

    Args:
        function: a forward pass.
        held_anyway: tensors that are not counted: the weights.
    """
    not_counted = {tensor.untyped_storage()._cdata for tensor in held_anyway}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()  # all of it stays, however small the view
        if storage._cdata not in not_counted:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()
    return sum(storage.nbytes() for storage in kept.values()), out


class _FusedAttention(TorchFunctionMode):
    """Attention by a fused kernel, as on every real device; on the meta device torch would write the scores out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func is F.scaled_dot_product_attention and len(args) >= 3
        if is_attention and args[0].shape[-1] == args[2].shape[-1]:  # values of another width have no such kernel
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:3])[0]
        return func(*args, **(kwargs or {}))
