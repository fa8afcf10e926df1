"""What a layer keeps for its backward pass, counted on the meta device: every tensor that autograd saves, each once.

The layers run as a rank has them: cut, cast and frozen. Nothing is computed and no memory is used. What is not seen is
what lives within one operation alone. What the backward pass itself makes is counted apart (`made_going_back`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_vit.models.alike import look_at_each
from ds_vit.models.checkpointing import GivenByDear, Storages, storages_of
from ds_vit.models.layers import Layer
from ds_vit.models.zoo import TimmViT

_IMAGES = 2  # of one alone some copies are views


class Kept(NamedTuple):
    """What a layer keeps of one image in bytes, and what it was given: tensors on the meta device.

    Attributes:
        bytes: that autograd saves.
        inputs: what it was given.
        given: bytes of the tokens that it was given.
        given_saved: of those, what is among `bytes`.
        dear: bytes that its dear operations give (checkpointing.py).
        dear_saved: of those, what is among `bytes`.
    """

    bytes: int
    inputs: Any
    given: int
    given_saved: int
    dear: int
    dear_saved: int


def kept_by_layers(model: TimmViT, layers: Sequence[Layer], dtype: torch.dtype = torch.float32) -> list[Kept]:
    """What each layer keeps of an image in training; of blocks that are alike one is counted.

    Args:
        model: from `create_model`, for its images.
        layers: all of them, on the meta device; they are put into training mode.
        dtype: of the images.
    """

    def count(layer: Layer, inputs: Any) -> tuple[tuple[int, ...], Any]:
        with FusedAttention(), GivenByDear() as dear:
            saved, out = _saved(lambda: layer(inputs), (*layer.parameters(), *layer.buffers()))
        given = storages_of([inputs[0]])
        sizes = (saved, given, given.keys() & saved, dear.storages, dear.storages.keys() & saved)
        return tuple(sum({**saved, **given, **dear.storages}[key].nbytes() for key in keys) for keys in sizes), out

    for layer in layers:
        layer.train()
    found = look_at_each(model, layers, count, images=_IMAGES, dtype=dtype)
    return [Kept(total // _IMAGES, inputs, *(part // _IMAGES for part in parts)) for (total, *parts), inputs in found]


class GoingBack(NamedTuple):
    """What a layer holds at its fullest moment beyond what its forward pass keeps, gradients included.

    Attributes:
        moments: (bytes whatever the micro-batch, bytes for each image) of every moment that may be the fullest.
    """

    moments: tuple[tuple[float, float], ...]

    def of(self, micro_batch: int) -> float:
        """Bytes with a micro-batch."""
        return max(fixed + by_image * micro_batch for fixed, by_image in self.moments)


def made_going_back(model: TimmViT, layers: Sequence[Layer], dtype: torch.dtype = torch.float32) -> list[GoingBack]:
    """What each layer makes for a moment, forward or back; the arguments are those of `kept_by_layers`.

    Each is run with two and with four images: what grows between the same moments of both belongs to the images.
    """

    def course(layer: Layer, inputs: Any) -> tuple[list[int], Any]:
        with _Live() as live:
            with FusedAttention():
                outputs = layer(inputs)
            before = live.now
            grown = [tensor for tensor in tree_leaves(outputs) if tensor.requires_grad]
            if grown:
                torch.autograd.backward(grown, [torch.ones_like(tensor) for tensor in grown])
        for parameter in layer.parameters():
            parameter.grad = None
        handed_on = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tree_leaves(outputs)]
        return [bytes_then - before for bytes_then in live.course], tuple(handed_on)

    for layer in layers:
        layer.train()
    few, more = ([made for made, _ in look_at_each(model, layers, course, images=n, dtype=dtype)] for n in (2, 4))
    found: dict[int, GoingBack] = {}
    for of_two, of_four in zip(few, more, strict=True):
        if id(of_two) not in found:  # blocks that are alike share one list
            slopes = [(b - a) / 2 for a, b in zip(of_two, of_four, strict=True)]
            found[id(of_two)] = GoingBack(_fullest({(a - 2 * n, n) for a, n in zip(of_two, slopes, strict=True)}))
    return [found[id(of_two)] for of_two in few]


def _fullest(moments: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Those moments that no other one exceeds with every micro-batch."""
    kept: list[tuple[float, float]] = []
    for fixed, by_image in sorted(moments, key=lambda moment: (-moment[1], -moment[0])):
        if not kept or fixed > kept[-1][0]:
            kept.append((fixed, by_image))
    return tuple(kept)


class _Live(TorchDispatchMode):
    """Counts the memory of what operations give, from the operation on until nothing refers to it.

    Attributes:
        now: bytes that are alive.
        course: that were alive after each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.course: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.course.append(self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def saved_bytes(function: Callable[[], Any], held_anyway: Iterable[torch.Tensor] = ()) -> tuple[int, Any]:
    """The bytes that autograd saves while `function` runs, and what it gives.

    Args:
        function: a forward pass.
        held_anyway: tensors that are not counted: the weights.
    """
    saved, out = _saved(function, held_anyway)
    return sum(storage.nbytes() for storage in saved.values()), out


def _saved(function: Callable[[], Any], held_anyway: Iterable[torch.Tensor]) -> tuple[Storages, Any]:
    not_counted = storages_of(held_anyway)
    kept: Storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.update(storages_of([tensor]))  # all of it stays, however small the view
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()
    return {key: storage for key, storage in kept.items() if key not in not_counted}, out


class FusedAttention(TorchFunctionMode):
    """Attention by a fused kernel, as on every real device; on the meta device torch would write the scores out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func is F.scaled_dot_product_attention and len(args) >= 3
        if is_attention and args[0].shape[-1] == args[2].shape[-1]:  # values of another width have no such kernel
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args[:3])[0]
        return func(*args, **(kwargs or {}))
