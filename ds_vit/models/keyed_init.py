"""Keyed initialisation: timm's own initial distributions, every draw a pure function of (seed, timm parameter name).

timm's `init_weights` runs as it is, on one layer at a time; under it, the in-place random operations on a parameter
are replaced by counter-based draws keyed by the seed, the parameter's timm name, how often it was drawn before, and the
element's position (`ds_vit.randomness`). So the initial model does not depend on which layers a rank holds, on their
order, on the device's own generator, or on anything else in the process; and no generator is consumed.

For ZeRO-3, `on_layer` partitions a layer as soon as it is filled: at most one layer is ever whole.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from timm.models import named_apply, vitamin
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vit import randomness
from ds_vit.models.layers import BlockLayer, Layer, RopeFrequencies, block_stacks
from ds_vit.models.zoo import TimmViT, fills_nothing


class InitialValues(Protocol):
    """Values from a file, for some or all of a model's layers: `weights.InitialCheckpoint`."""

    def covers(self, layer: nn.Module) -> bool:
        """Whether the file gives every value of a layer."""

    def load(self, layer: nn.Module) -> None:
        """Copy the file's values into a layer."""


# Elements drawn at once. On a CPU the int64 temporaries fit into its cache (four times faster than 2^22 at once);
# elsewhere a chunk is large enough to keep the device busy, and takes a few times 32 MiB.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 22
_aten = torch.ops.aten


def _open_uniform(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Draws number `start`, …, `start + count - 1` under `key`, float32 [count], uniform in the open interval (0, 1).

    The midpoints of 2^23 equal cells. timm maps such a draw through the inverse error function, where an exact 0, which
    generators of half-open intervals give once in 2^24 draws, would become an outlier at the truncation bound.
    """
    counter = torch.arange(start, start + count, dtype=torch.int64, device=device)
    bits = randomness.mix_tensor(torch.tensor(key, dtype=torch.int64, device=device), counter)
    return (((bits >> 41) & ((1 << 23) - 1)).to(torch.float32) + 0.5) * 2.0**-23


def _uniform(key: int, start: int, count: int, device: torch.device, low: float, high: float) -> torch.Tensor:
    return low + (high - low) * _open_uniform(key, start, count, device)


def _normal(key: int, start: int, count: int, device: torch.device, mean: float, std: float) -> torch.Tensor:
    """By Box and Muller (1958), each from two uniform draws."""
    radius = torch.sqrt(-2.0 * torch.log(_open_uniform(randomness.mix(key, 0), start, count, device)))
    angle = (2.0 * math.pi) * _open_uniform(randomness.mix(key, 1), start, count, device)
    return mean + std * (radius * torch.cos(angle))


_DRAWS = {_aten.uniform_.default: _uniform, _aten.normal_.default: _normal}
"""With the defaults of torch's operations: 0 and 1."""


class _KeyedDraws(TorchDispatchMode):
    """Replaces the random operations that initialisers use; any other random operation on real memory is an error."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        """Args: the run's seed; the timm name of each parameter by the address of its storage."""
        super().__init__()
        self.seed = seed
        self.names = names
        self.times_drawn: Counter[str] = Counter()
        self.default_name: str | None = None

    def _fill(self, tensor: torch.Tensor, draw: Callable[..., torch.Tensor], *arguments: float) -> torch.Tensor:
        name = self.names.get(tensor.untyped_storage().data_ptr(), self.default_name)
        assert name is not None, "an initialiser drew random numbers for a tensor that is no parameter of the layer"
        key = randomness.mix(self.seed, randomness.name_key(name), self.times_drawn[name])
        self.times_drawn[name] += 1
        flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), device=tensor.device)
        chunk = _CPU_CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK
        for start in range(0, flat.numel(), chunk):
            count = min(chunk, flat.numel() - start)
            flat[start : start + count] = draw(key, start, count, tensor.device, *arguments)
        return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route random operations on real tensors to keyed draws, all others to torch."""
        kwargs = kwargs or {}
        if fills_nothing(func, args):
            return args[0]
        if func in _DRAWS:
            return self._fill(args[0], _DRAWS[func], *args[1:], *(0.0, 1.0)[len(args) - 1 :])
        if func is _aten.rand.default:
            out = torch.empty(args[0], **{key: value for key, value in kwargs.items() if key != "generator"})
            return out if out.is_meta else self._fill(out, _uniform, 0.0, 1.0)
        if torch.Tag.nondeterministic_seeded in func.tags:
            on_meta = {argument.is_meta for argument in args if isinstance(argument, torch.Tensor)}
            assert on_meta == {True}, f"{func} cannot be keyed"
        return func(*args, **kwargs)


def _grafted(model: TimmViT, layer: Layer) -> TimmViT:
    """The description with this layer's modules in their places: what timm's `init_weights` is called on.

    The other layers' modules are the description's own, on the meta device, where initialising does nothing. One block
    replaces all other blocks: torch walks a module that is met again only once, so the time of initialising a
    model grows with its depth and not with the square of it.
    """
    whole = copy.copy(model)
    whole._modules = dict(model._modules)
    for name, stack in block_stacks(model).items():
        whole._modules[name] = copy.copy(stack)
        whole._modules[name]._modules = dict.fromkeys(stack._modules, stack[0])
    if isinstance(layer, BlockLayer):
        whole._modules[layer.stack]._modules[str(layer.index)] = layer.block
    else:
        whole._modules |= layer._modules
        whole._parameters = {**model._parameters, **layer._parameters}
    return whole


def _tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def materialise(whole: nn.Module, device: torch.device) -> None:
    """Give the meta tensors of a layer or a model memory, filled with NaN, then compute the fixed tables.

    Tables that a layer shares with one filled before are there already.
    """
    for module in whole.modules():
        if any(tensor.is_meta for _, tensor in _tensors(module, recurse=False)):
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                for _, tensor in _tensors(module, recurse=False):
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)
            if hasattr(module, "init_non_persistent_buffers"):
                module.init_non_persistent_buffers()


def _draw_weights(model: TimmViT, layer: Layer, seed: int) -> None:
    names = {
        parameter.untyped_storage().data_ptr(): layer.prefix + name for name, parameter in layer.named_parameters()
    }
    draws = _KeyedDraws(seed, names)
    with draws:
        # What timm's constructors draw and its Eva.init_weights leaves out (the latent query of AttentionPoolLatent).
        for child in layer.children():
            for module in child.modules():
                if hasattr(module, "init_weights"):
                    module.init_weights()
        _grafted(model, layer).init_weights(needs_reset=True)
        # What only timm's constructors draw, so that its init_weights would leave it unset or at a layer's default.
        for name, module in layer.named_modules():
            if isinstance(module, RopeFrequencies):
                draws.default_name = f"{layer.prefix}{name}.freqs"  # it draws into temporary tensors
                module.init_freqs()
                draws.default_name = None
            elif isinstance(module, vitamin.Stem):
                named_apply(vitamin._init_conv, module)
            elif isinstance(module, nn.PReLU):
                module.reset_parameters()


def initialise(
    model: TimmViT,
    layers: Sequence[Layer],
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    checkpoint: InitialValues | None = None,
    on_layer: Callable[[Layer], None] | None = None,
) -> None:
    """Fill layers with their initial values, one after the other.

    Values are drawn in float32 with timm's own distributions (`init_weights`) and are the same for any subset of the
    layers, in any order, on any device up to the rounding of its elementary functions.

    Args:
        model: the description of the whole model, on the meta device; it stays there.
        layers: from `take_apart(model)`; all of them, or the ones of a pipeline stage.
        seed: the run's seed.
        device: of the parameters.
        dtype: the type of parameters and floating buffers in the end.
        checkpoint: values that take the place of the drawn ones.
        on_layer: called with each layer when it is filled, before the next one gets memory. For ZeRO-3:
            `lambda layer: deepspeed.zero.Init(module=layer, config_dict_or_path=config)`.
    """
    device = torch.device(device)
    for layer in layers:
        materialise(layer, device)
        if checkpoint is None or not checkpoint.covers(layer):
            _draw_weights(model, layer, seed)
        if checkpoint is not None:
            checkpoint.load(layer)
        unset = [name for name, tensor in _tensors(layer, recurse=True) if tensor.isnan().any()]
        assert not unset, f"{len(unset)} tensors of {type(layer).__name__} have no value: {unset[:5]}"
        layer.to(dtype)
        if on_layer is not None:
            on_layer(layer)
