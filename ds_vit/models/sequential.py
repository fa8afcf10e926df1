"""The layer list as one module (no pipeline): activation checkpointing, image sizes, timm's names for any container.

Shapes: B samples, C channels, S tokens, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.layers.format import Format
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.checkpointing import CheckpointFunction, recompute_all
from ds_vit.models.keyed_drop import KeyedDrop, Together, drawing, hash_together
from ds_vit.models.layers import BlockLayer, EmbedLayer, Layer
from ds_vit.models.zoo import TimmViT, require_whole_patches


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
    require_whole_patches(model, name, sizes, flag)


class SizeSwitch:
    """Sets the image size of layers (square), as often as a step needs it.

    The table of positions stays a parameter of the model's own grid: timm's `dynamic_img_size` resamples it in each
    forward pass, and its gradient comes back through that. Rotary tables of each size are computed once. At the model's
    own size the results are those of a model that never takes another.

    Layers that are run again for their activations need the size of their first run: `BlockRun` sets it.

    Args:
        layers: of a model that `check_sizes` accepts.
        patch_size: of the model.
    """

    def __init__(self, layers: Sequence[Layer], patch_size: tuple[int, int]) -> None:
        self._layers, self._patch_size = layers, patch_size
        of_blocks = (getattr(layer, "rope", None) for layer in layers if not isinstance(layer, EmbedLayer))
        self._ropes = [*dict.fromkeys(rope for rope in of_blocks if rope is not None)]
        self._caching = [rope for rope in self._ropes if getattr(rope, "feat_shape", None) is not None]
        self._tables: dict[int, list[dict[str, torch.Tensor | None]]] = {}
        self._size: int | None = None

    def set(self, size: int) -> None:
        """Set the size of the square images that the layers take.

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
        for rope in self._ropes:
            rope.grid_size = grid
        if size not in self._tables:
            for rope in self._caching:
                rope.update_feat_shape(grid)
            self._tables[size] = [{**rope._buffers} for rope in self._caching]
        for rope, tables in zip(self._caching, self._tables[size], strict=True):
            rope.feat_shape = grid
            rope._buffers.update(tables)


@dataclass(eq=False)
class BlockRun:
    """Consecutive blocks as a function of tensors, for a checkpoint function; only the tokens change in them.

    Hashed draws come as the last tensor: when the run is repeated, the drops may hold those of another micro-batch.
    The image size is known by then, and stays with the run.
    """

    blocks: Sequence[BlockLayer]
    drops: Sequence[KeyedDrop]
    set_size: Callable[[], None] = lambda: None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.set_size()
        if not self.drops:
            return self._through(inputs)
        with Together(self.drops, inputs[-1]).active():
            return self._through(inputs[:-1])

    def _through(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs[0]


def run_layers(
    layers: Iterable[Layer],
    inputs: Any,
    recompute_interval: int,
    checkpoint_function: CheckpointFunction,
    set_size: Callable[[], None] = lambda: None,
) -> Any:
    """Run layers one after the other on `inputs`; returns the outputs of the last.

    All random draws of the layers are hashed before the first of them runs. If gradients are enabled, every
    `recompute_interval` consecutive blocks are run by `checkpoint_function`, which recomputes them in the backward
    pass; 0 keeps all activations. `set_size` is called before the layers run, and before blocks run again.
    """
    set_size()
    layers, keys = tuple(layers), inputs[1]
    own = dict.fromkeys([drop for layer in layers for drop in layer.keyed_drops])
    drops = [] if keys is None else drawing(own)  # without keys a module that draws says so itself
    bits = [hash_together(drops, keys)] if drops else []
    recompute = recompute_interval > 0 and torch.is_grad_enabled()
    with Together(drops, bits[0]).active() if drops else nullcontext():
        for are_blocks, group in itertools.groupby(layers, lambda layer: recompute and isinstance(layer, BlockLayer)):
            if not are_blocks:
                for layer in group:
                    inputs = layer(inputs)
                continue
            while blocks := list(itertools.islice(group, recompute_interval)):
                run = BlockRun(blocks, drops, set_size).forward
                inputs = (checkpoint_function(run, *inputs, *bits), *inputs[1:])
    return inputs


class SequentialViT(nn.Module):
    """The layers of a ViT run one after the other on one rank."""

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        recompute_interval: int = 0,
        checkpoint_function: CheckpointFunction = recompute_all,
    ) -> None:
        """Args:
        layers: from `take_apart`, initialised.
        recompute_interval: blocks that are recomputed together in the backward pass; 0 keeps all activations.
        checkpoint_function: from checkpointing.py.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute_interval = recompute_interval
        self.checkpoint_function = checkpoint_function
        embed = layers[0]
        takes_sizes = isinstance(embed, EmbedLayer) and embed.takes_sizes
        self._sizes = SizeSwitch(layers, embed.patch_embed.patch_size) if takes_sizes else None

    def forward(
        self, images: torch.Tensor, keys: torch.Tensor | None = None, *others: torch.Tensor | None
    ) -> torch.Tensor:
        """images [B, C, height, width], keys int64 [B], further inputs of the first layer -> logits [B, num_classes],
        or another last layer's outputs.

        Raises:
            UserError: no keys for a model that draws random numbers: with drop-path, dropout or a mask.
        """
        set_size = () if self._sizes is None else (partial(self._sizes.set, images.shape[-1]),)
        inputs = (images, keys, *others)
        return run_layers(self.layers, inputs, self.recompute_interval, self.checkpoint_function, *set_size)


class Towers(nn.Module):
    """All towers of a task, the module that DeepSpeed trains: one forward call runs a function that may run several.

    Args:
        towers: by name.
    """

    def __init__(self, towers: Mapping[str, SequentialViT]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(towers)

    def __getitem__(self, name: str) -> SequentialViT:
        tower = self.towers[name]
        assert isinstance(tower, SequentialViT)
        return tower

    def forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return `run()`; DeepSpeed and torch prepare the parameters around this call."""
        return run()


def _layers_of(module: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The layers inside any container, or the module itself, with the prefix of their parameters' names."""
    for name, child in module.named_modules():
        if isinstance(child, Layer):
            yield f"{name}." if name else "", child


@contextmanager
def giving_features(module: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Make the layers inside any container return features instead of their outputs, in evaluation.

    Features are the classifier's input, after pooling; for a masked autoencoder, the mean of the encoder's patch
    tokens without a mask. The last layer returns them, float [B, D], on any stage.

    Args:
        module: a `SequentialViT`, a pipeline stage or a layer.
        wanted: False changes nothing.
    """
    layers = [layer for _, layer in _layers_of(module)] if wanted else []

    def switch(on: bool) -> None:
        for layer in layers:
            layer.gives_features = on
            if layer.num_tokens.patch_drop is not None:
                layer.num_tokens.patch_drop.lifted = on

    switch(True)
    try:
        yield
    finally:
        switch(False)


def timm_names(module: nn.Module) -> dict[str, str]:
    """From the names of `module.named_parameters()` to timm's, for a `SequentialViT`, a pipeline stage or a layer."""
    return {
        path + name: layer.prefix + name for path, layer in _layers_of(module) for name, _ in layer.named_parameters()
    }
