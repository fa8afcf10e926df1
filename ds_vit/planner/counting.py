"""The cost of each layer of a model, counted on the meta device: FLOPs, memory traffic, activations, temporary memory.

The layers run one after the other on tensors without data: nothing is computed and no memory is used. Consecutive
blocks that are alike are counted once. Products of matrices and attention count by their FLOPs, everything else by the
bytes that it reads and writes: a norm or a GELU waits for memory and not for arithmetic (the roofline model, Williams
et al. 2009). Memory that lives within one operation only is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ds_vit.models.checkpointing import ExpensiveOutputs, Storages, storages_of
from ds_vit.models.keyed_drop import KeyedDrop, sample_keys
from ds_vit.models.layers import BlockLayer, Layer, take_apart_towers
from ds_vit.models.zoo import TimmViT
from ds_vit.parallel.tensor.region import Entered
from ds_vit.planner.hardware import Accelerator

Counted = TypeVar("Counted")

# One layer after the other


def count_each(
    layers: Sequence[Layer], count: Callable[[Layer, Any], tuple[Counted, Any]], *, images: int, training: bool = True
) -> list[tuple[Counted, Any]]:
    """For each layer what `count` returns, and the layer's inputs.

    Args:
        layers: all of a tower or of several, on the meta device; they are put into training or evaluation mode.
        count: (layer, inputs) -> (count, outputs).
        images: B.
        training: the mode.
    """
    keys = torch.zeros(images, dtype=torch.int64, device="meta")
    value: Any = None
    found: list[tuple[Counted, Any]] = []
    known: tuple[Any, ...] | None = None
    for layer in layers:
        layer.train(training)
        if (example := layer.example(images)) is not None:
            value = (example[0], keys, *example[1:])
        key = (cost_key(layer.block), value[0].requires_grad) if isinstance(layer, BlockLayer) else None
        if key is not None and key == known:  # a block returns the shapes that it received
            found.append((found[-1][0], value))
            continue
        inputs = value
        with sample_keys(layer.keyed_drops, keys):
            counted, value = count(layer, inputs)
        found.append((counted, inputs))
        known = key
    return found


def cost_key(module: nn.Module) -> tuple[Any, ...]:
    """A key of a module's cost: its classes, settings, shapes and types, not the values of its weights."""
    if isinstance(module, (KeyedDrop, nn.Identity)):  # a first block without drop-path has none of it
        return ()
    # A norm that computes in fp32 has another forward: by its name, which is that of every such norm.
    settings = {
        name: repr(value) for name, value in vars(module).items() if not name.startswith("_") and name != "forward"
    }
    shapes = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    inner = [(name, child and cost_key(child)) for name, child in module._modules.items()]
    return type(module), settings, shapes, inner


class FusedAttention(TorchFunctionMode):
    """Attention by a fused kernel, as on every real device; on the meta device torch would write the scores out.

    Args:
        kernel: the CPU's keeps what every kernel keeps; torch 2.14 has no count of its operations.
    """

    def __init__(self, kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu) -> None:
        super().__init__()
        self._kernel = kernel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func is F.scaled_dot_product_attention and len(args) >= 3
        if is_attention and args[0].shape[-1] == args[2].shape[-1]:  # values of another width have no such kernel
            return self._kernel(*args[:3])[0]
        return func(*args, **(kwargs or {}))


def _run_backward(layer: Layer, outputs: Any) -> tuple[torch.Tensor, ...]:
    """Run the backward pass of a layer's outputs; returns them as the next layer's inputs, gradients removed."""
    if grown := [tensor for tensor in tree_leaves(outputs) if tensor.requires_grad]:
        torch.autograd.backward(grown, [torch.ones_like(tensor) for tensor in grown])
    for parameter in layer.parameters():
        parameter.grad = None
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tree_leaves(outputs))


# FLOPs


class Flops(NamedTuple):
    """Floating-point operations of one image: of the forward pass, and of a training step."""

    forward: int
    training: int


def count_flops(model: TimmViT, frozen: frozenset[str] = frozenset()) -> Flops:
    """Floating-point operations of one image, 2 for each multiply-add.

    Matrix products, convolutions and attention are counted; normalisation, activations and sums are not. Half of the
    forward pass is what timm publishes as GMACs less fvcore's count of norms (0.1 % of ViT-B). A training step of a
    model that is trained whole costs three times as much: backward costs each layer as much as forward for its input's
    gradient, from the first trained layer on, and as much for its weights', by the share of them that is trained. No
    gradient is computed before the first trained layer.

    Args:
        model: from `create_model`, on the meta device.
        frozen: names of the parameters that are not trained.
    """
    forward, training = 0, 0.0
    for layers in take_apart_towers(model).values():
        has_gradient = False
        for layer, flops in zip(layers, layer_flops(layers), strict=True):
            names = {name: layer.prefix + name for name, _ in layer.named_parameters()}
            sizes = {names[name]: p.numel() for name, p in layer.named_parameters() if p.ndim > 1}
            trained = sum(size for name, size in sizes.items() if name not in frozen)
            has_gradient = has_gradient or any(name not in frozen for name in names.values())
            of_sample = flops * layer.images_per_sample[0]
            forward += round(of_sample)
            training += of_sample * (1 + has_gradient + (trained / sum(sizes.values()) if sizes else has_gradient))
    return Flops(forward, round(training))


def layer_flops(layers: Sequence[Layer]) -> list[int]:
    """Forward FLOPs of each layer for one image: all of a tower on the meta device, put into evaluation mode."""
    return [flops for flops, _ in count_each(layers, _count_forward, images=1, training=False)]


def _count_forward(layer: Layer, value: Any) -> tuple[int, Any]:
    # With gradients on: without, torch 2.15's module tracker fails on the expanded latent of attention pooling.
    with FlopCounterMode(display=False) as counter:
        value = layer(value)
    return counter.get_total_flops(), value


# Work: what the two passes ask of the hardware


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
    """The work of a layer on a rank.

    Attributes:
        forward: the forward pass.
        backward: the backward pass, without running the layer again.
        given: bytes of the tokens that it outputs, for an image.
        parameters: number of elements.
        regions: number of tensor-parallel parts, after each of which the tokens are summed over the group.
        is_block: whether the layer can be recomputed.
    """

    forward: Pass
    backward: Pass
    given: int
    parameters: int
    regions: int
    is_block: bool


_IMAGES = 31  # a prime that divides no usual width: it marks the dimensions of the images


def work_of_layers(layers: Sequence[Layer]) -> list[LayerWork]:
    """The work of each layer; they come from `layers_of_rank`."""

    def count(layer: Layer, inputs: Any) -> tuple[LayerWork, Any]:
        with _Counter() as forward, FusedAttention(torch.ops.aten._scaled_dot_product_flash_attention):
            outputs = layer(inputs)
        with _Counter() as backward:
            outputs = _run_backward(layer, outputs)
        is_block = isinstance(layer, BlockLayer)
        work = LayerWork(
            forward.counted(layer.images_per_sample[0]),
            backward.counted(layer.images_per_sample[0]),
            given=outputs[0].numel() * outputs[0].element_size() // _IMAGES,
            parameters=sum(parameter.numel() for parameter in layer.parameters()),
            regions=sum(isinstance(module, Entered) for module in layer.modules()) if is_block else 0,
            is_block=is_block,
        )
        return work, outputs

    return [work for work, _ in count_each(layers, count, images=_IMAGES)]


class _Counter(TorchDispatchMode):
    """Adds up the products, bytes and number of operations."""

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

    def counted(self, images: float) -> Pass:
        """The sum for a sample that brings so many images; the number of operations is that of any batch."""
        share, products = images / _IMAGES, sorted(self.products.items())
        of_sample = (Product(width, round(rows * images), flops * share) for (width, rows), flops in products)
        return Pass(tuple(of_sample), self.bytes * share, self.operations)


_MATRICES = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}


def _least(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """A product's least (dimension that the images have no part in, other one of an image)."""
    dimensions = {size for tensor in tensors if tensor.ndim > 1 for size in tensor.shape[-2:]}
    of_images = {size for size in dimensions if size % _IMAGES == 0}
    rows = min(of_images, default=0) // _IMAGES
    return min(dimensions - of_images, default=rows), rows


# Activations: what waits for the backward pass


class Kept(NamedTuple):
    """The bytes that a layer keeps of one image, and its inputs: tensors on the meta device.

    Attributes:
        bytes: that autograd saves.
        inputs: of the layer.
        given: bytes of the tokens among the inputs.
        given_saved: of those, what is among `bytes`.
        expensive: bytes of the outputs of its matrix products and attention (models/checkpointing.py).
        expensive_saved: of those, what is among `bytes`.
    """

    bytes: int
    inputs: Any
    given: int
    given_saved: int
    expensive: int
    expensive_saved: int


def kept_by_layers(layers: Sequence[Layer]) -> list[Kept]:
    """The bytes that each layer keeps of an image in training: a whole tower on the meta device, put into that mode."""

    def count(layer: Layer, inputs: Any) -> tuple[tuple[int, ...], Any]:
        with FusedAttention(), ExpensiveOutputs() as expensive:
            saved, out = saved_storages(lambda: layer(inputs), (*layer.parameters(), *layer.buffers()))
        given = storages_of([inputs[0]])
        sizes = (saved, given, given.keys() & saved, expensive.storages, expensive.storages.keys() & saved)
        return tuple(sum({**saved, **given, **expensive.storages}[key].nbytes() for key in keys) for keys in sizes), out

    images = 2  # of a single one some copies are views
    found = count_each(layers, count, images=images)
    kept = []
    for layer, (sizes, inputs) in zip(layers, found, strict=True):
        total, *parts = (int(size * layer.images_per_sample[0] / images) for size in sizes)
        kept.append(Kept(total, inputs, *parts))
    return kept


def saved_storages(function: Callable[[], Any], held_anyway: Iterable[torch.Tensor]) -> tuple[Storages, Any]:
    """The storages that autograd saves while `function` runs, and what it returns.

    Args:
        function: a forward pass.
        held_anyway: tensors that are not counted: the weights.
    """
    not_counted = storages_of(held_anyway)
    kept: Storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.update(storages_of([tensor]))  # all of it stays, however small the view
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()
    return {key: storage for key, storage in kept.items() if key not in not_counted}, out


# Temporary memory of the two passes


@dataclass(frozen=True, eq=False)
class Temporary:
    """The memory of a layer at its fullest moment, in addition to what its forward pass keeps; gradients included.

    Attributes:
        moments: (bytes whatever the micro-batch, bytes for each image) of every moment that may be the fullest.
    """

    moments: tuple[tuple[float, float], ...]

    def of(self, micro_batch: int) -> float:
        """Bytes with a micro-batch."""
        return max(fixed + by_image * micro_batch for fixed, by_image in self.moments)


def temporary_memory(layers: Sequence[Layer]) -> list[Temporary]:
    """The memory that each layer allocates temporarily, forward or backward; the layers are as for `kept_by_layers`.

    Each runs with two and with four images: what grows between the same moments of both belongs to the images.
    """

    def count(layer: Layer, inputs: Any) -> tuple[list[int], Any]:
        with _Live() as live:
            with FusedAttention():
                outputs = layer(inputs)
            before = live.now
            outputs = _run_backward(layer, outputs)
        return [bytes_then - before for bytes_then in live.course], outputs

    few, more = ([made for made, _ in count_each(layers, count, images=n)] for n in (2, 4))
    found: dict[int, Temporary] = {}
    for layer, of_two, of_four in zip(layers, few, more, strict=True):
        if id(of_two) not in found:  # blocks that are alike share one list
            slopes, at_once = [(b - a) / 2 for a, b in zip(of_two, of_four, strict=True)], layer.images_per_sample[1]
            moments = {(a - 2 * n, n * at_once) for a, n in zip(of_two, slopes, strict=True)}
            found[id(of_two)] = Temporary(_fullest(moments))
    return [found[id(of_two)] for of_two in few]


def most_allocated(function: Callable[[], object]) -> int:
    """The most bytes that what `function` allocates takes at a time, on the meta device."""
    with _Live() as live:
        function()
    return max(live.course, default=0)


def _fullest(moments: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Those moments that no other one exceeds with every micro-batch."""
    kept: list[tuple[float, float]] = []
    for fixed, by_image in sorted(moments, key=lambda moment: (-moment[1], -moment[0])):
        if not kept or fixed > kept[-1][0]:
            kept.append((fixed, by_image))
    return tuple(kept)


class _Live(TorchDispatchMode):
    """Counts the memory of what operations return, from the operation on until nothing refers to it.

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
        for tensor in [] if func.is_view else tree_leaves(out):
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
