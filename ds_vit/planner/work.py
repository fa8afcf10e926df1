"""What a layer's forward and backward pass ask of the hardware, counted on the meta device, an operation at a time.

Products of matrices and attention are counted by their FLOPs, everything else by the bytes that it reads and writes: a
norm or a GELU waits for memory and not for arithmetic (the roofline model, Williams et al. 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_vit.models import Layer, TimmViT
from ds_vit.models.activations import FusedAttention
from ds_vit.models.alike import look_at_each
from ds_vit.planner.hardware import Accelerator


class Product(NamedTuple):
    """Products of matrices of one shape, or attention and the patches' convolution.

    Attributes:
        width: the least dimension that the images have no part in; 0 for attention.
        rows: the least other one, of an image; 0 where there is none.
        flops: of all of them, for an image.
    """

    width: int
    rows: int
    flops: float

    def seconds(self, accelerator: Accelerator, of_type: int, micro_batch: int) -> float:
        """The device's time; the arguments are those of `Pass.seconds`."""
        least = min(self.width, self.rows * micro_batch) if self.rows else self.width
        return micro_batch * self.flops / accelerator.flops_per_second(of_type, least)


class Pass(NamedTuple):
    """One pass through a layer, for an image.

    Attributes:
        products: of matrices, and attention.
        bytes: that other operations read and write.
        operations: how many there are; of any number of images.
    """

    products: tuple[Product, ...]
    bytes: float
    operations: int

    @property
    def flops(self) -> float:
        """Of all products."""
        return sum(one.flops for one in self.products)

    @property
    def cheap(self) -> Pass:
        """Without the products: what selective recomputing repeats."""
        return Pass((), self.bytes, self.operations)

    def seconds(self, accelerator: Accelerator, of_type: int, micro_batch: int) -> float:
        """The device's time, or the host's where that is longer.

        Args:
            accelerator: that computes.
            of_type: bytes of an element of a product.
            micro_batch: images.
        """
        computing = sum(one.seconds(accelerator, of_type, micro_batch) for one in self.products)
        moving = micro_batch * self.bytes / (accelerator.copied_per_second * accelerator.elementwise_efficiency)
        return max(computing + moving, self.operations * accelerator.seconds_per_operation)


@dataclass(frozen=True)
class LayerWork:
    """A layer's work.

    Attributes:
        forward: once.
        backward: once, without running the layer again.
        given: bytes of the tokens that it hands on, of an image.
        tensors: parameters that it has, each a tensor.
    """

    forward: Pass
    backward: Pass
    given: int
    tensors: int = 0


def work_of_layers(model: TimmViT, layers: Sequence[Layer], dtype: torch.dtype) -> list[LayerWork]:
    """The work of each layer.

    Args:
        model: the whole one, for its images.
        layers: from `as_a_rank_has_them`.
        dtype: of the images.
    """

    def count(layer: Layer, inputs: Any) -> tuple[LayerWork, Any]:
        with _Counter() as forward, FusedAttention():
            outputs = layer(inputs)
        grown = [tensor for tensor in tree_leaves(outputs) if tensor.requires_grad]
        with _Counter() as backward:
            if grown:
                torch.autograd.backward(grown, [torch.ones_like(tensor) for tensor in grown])
        for parameter in layer.parameters():
            parameter.grad = None
        handed_on = tuple(t.detach().requires_grad_(t.requires_grad) for t in tree_leaves(outputs))
        given = handed_on[0].numel() * handed_on[0].element_size() // _IMAGES
        tensors = len([*layer.parameters()])
        return LayerWork(forward.counted(), backward.counted(), given, tensors), handed_on

    for layer in layers:
        layer.train()
    return [work for work, _ in look_at_each(model, layers, count, images=_IMAGES, dtype=dtype)]


_IMAGES = 31  # a prime that divides no usual width: which dimensions are the images' is seen by it


class _Counter(TorchDispatchMode):
    """Adds up what operations ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[tuple[int, int], float] = {}
        self.bytes = 0.0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        self.operations += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (counting := flop_registry.get(func.overloadpacket)) is not None:
            shape = _least(tensors) if func.overloadpacket in _MATRICES else (0, 0)
            flops = counting(*args, **(kwargs or {}), out_val=out)
            self.products[shape] = self.products.get(shape, 0.0) + flops
        else:
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in (*tensors, *made))
        return out

    def counted(self) -> Pass:
        """What it came to."""
        products = tuple(Product(*shape, flops / _IMAGES) for shape, flops in sorted(self.products.items()))
        return Pass(products, self.bytes / _IMAGES, self.operations)


def _least(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """A product's least (dimension that the images have no part in, other one of an image)."""
    dimensions = {size for tensor in tensors if tensor.ndim > 1 for size in tensor.shape[-2:]}
    of_images = {size for size in dimensions if size % _IMAGES == 0}
    rows = min(of_images, default=0) // _IMAGES
    return min(dimensions - of_images, default=rows), rows


_MATRICES = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}
