"""A timm ViT taken apart: an embedding, its blocks, a head; each calls timm's own code under timm's own names.

`take_apart` returns a list of layers that can be run one after the other (`SequentialViT`) or split into pipeline
stages. A layer is a shallow part of the timm model: it holds some of its sub-modules and parameters under their timm
paths, so `layer.state_dict()` has timm's names, and a container's prefix is all that has to be stripped from a name.

Layers exchange a tuple of tensors: tokens [B, S, D]; the sample keys, int64 [B]; where several towers form one
list (`chain_towers`), the inputs of the later towers and the outputs of the earlier ones; and, for models whose blocks
learn their rotary frequencies together (timm's rope type `mixed`), those frequencies [2, depth, H, K/2]. The last are
one small parameter of the embedding layer: passing its value on keeps it in one place for the optimizer, the gradient
norm and the checkpoint, and autograd adds up the blocks' gradients, across stages too.

Shapes: B samples, S tokens, D width, H heads, K head width, N patches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any, Literal

import torch
from timm.layers import RotaryEmbeddingMixed, apply_keep_indices_nlc, get_mixed_freqs
from timm.layers.pos_embed_sincos import init_random_2d_freqs
from timm.models import Eva, VisionTransformer, VisionTransformerDistilled
from torch import nn

from ds_vit.models.keyed_drop import KeyedDrop, KeyedPatchDropout, replace_drops
from ds_vit.models.zoo import TimmViT

_EMBED = (
    "patch_embed",
    "cls_token",
    "dist_token",
    "reg_token",
    "pos_embed",
    "pos_drop",
    "patch_drop",
    "rope",
    "norm_pre",
)
MAIN_TOWER = "image"
"""The tower that evaluation runs; its parameters have timm's names, those of another tower begin with its name."""
_HEAD = ("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist")


@dataclass
class TokenCount:
    """The number of tokens per sample between the layers.

    Attributes:
        num_prefix_tokens: class and register tokens.
        num_patches: of an image, of the size that images have now (`SizeSwitch`).
        patch_drop: the module that drops some of the patches.
    """

    num_prefix_tokens: int
    num_patches: int
    patch_drop: KeyedPatchDropout | None = None

    def count(self, training: bool) -> int:
        """In training, or in evaluation."""
        drop = self.patch_drop
        return self.num_prefix_tokens + (drop.num_kept(self.num_patches, training) if drop else self.num_patches)


class Layer(nn.Module):
    """One element of the list; its parameter names are timm's. `num_tokens` says how long its sequences are.

    Attributes:
        prefix: of its parameters' names in the whole model; empty in the main tower.
        gives_features: whether, in evaluation, the last layer's outputs are the features of the images [B, D]; see
            `giving_features`.
        evaluates_only: whether it is in evaluation mode in training too: a layer of a fixed teacher.
        images_per_sample: images of the model's size, or rows, that a sample of a training batch brings: in all calls
            of a micro-batch, and in the largest one. Estimates of memory and time multiply by them.
    """

    num_tokens: TokenCount
    images_per_sample: tuple[float, float] = (1.0, 1.0)
    prefix: str = ""
    gives_features: bool = False
    evaluates_only: bool = False

    def train(self, mode: bool = True) -> Layer:
        """As torch's; no mode but evaluation where `evaluates_only`."""
        return super().train(mode and not self.evaluates_only)

    def example(self, samples: int) -> tuple[torch.Tensor, ...] | None:
        """Of a layer that begins a tower: its inputs without the keys, on the meta device, to count what it costs."""
        return None

    @cached_property
    def keyed_drops(self) -> list[KeyedDrop]:
        """The layer's random modules (found once: walking the modules at every call would cost more than they do)."""
        return [module for module in self.modules() if isinstance(module, KeyedDrop)]


class EmbedLayer(Layer):
    """Images to tokens: patches, class and register tokens, positions.

    Attributes:
        takes_sizes: whether each call may bring images of another size; see `SizeSwitch`.
    """

    takes_sizes: bool = False

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """As `Layer.example`: images."""
        dtype = next(self.patch_embed.parameters()).dtype
        return (torch.empty(samples, self.in_chans, *self.patch_embed.img_size, dtype=dtype, device="meta"),)

    def patches(self, images: torch.Tensor) -> torch.Tensor:
        """images [B, C, height, width] -> [B, N, D]; [B, rows, columns, D] where positions are resampled."""
        return self.patch_embed(images)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """images [B, C, height, width] -> tokens [B, S, D]."""
        raise NotImplementedError

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(images [B, C, height, width], keys int64 [B], …) -> (tokens, keys, …), with frequencies at the end."""
        images, keys, *carried = inputs
        images = images.to(next(self.patch_embed.parameters()).dtype)
        tokens = self.embed(images)
        rope = getattr(self, "rope", None)
        return (tokens, keys, *carried) if rope is None else (tokens, keys, *carried, rope())


class VisionTransformerEmbed(EmbedLayer, VisionTransformer):
    """The front of timm's `VisionTransformer.forward_features`."""

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """As `EmbedLayer.embed`."""
        return self.norm_pre(self.patch_drop(self._pos_embed(self.patches(images))))


class DistilledEmbed(VisionTransformerEmbed, VisionTransformerDistilled):
    """The front of timm's `VisionTransformerDistilled.forward_features`, which has a distillation token too."""


class EvaEmbed(EmbedLayer, Eva):
    """The front of timm's `Eva.forward_features`; the rotary tables belong to the blocks."""

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """As `EmbedLayer.embed`."""
        tokens, _ = self._pos_embed(self.patches(images))
        return self.norm_pre(tokens)


class RopeFrequencies(nn.Module):
    """The learned frequencies of timm's `RotaryEmbeddingMixed`, read in the forward of the module that owns them.

    ZeRO-3 gathers a parameter around its owner's forward and frees it after. `forward` returns a copy, because
    DeepSpeed never frees a parameter that a forward returns.
    """

    def __init__(self, rope: RotaryEmbeddingMixed) -> None:
        super().__init__()
        self.freqs = rope.freqs
        self.head_width = rope.dim // rope.num_heads
        self.temperature = rope.temperature

    def init_freqs(self) -> None:
        """timm's initial values; its `init_weights` leaves them out because its constructor has drawn them."""
        with torch.no_grad():
            _, depth, num_heads, _ = self.freqs.shape
            self.freqs.copy_(init_random_2d_freqs(self.head_width, depth, num_heads, temperature=self.temperature))

    def get_embed(self, shape: tuple[int, int]) -> None:
        """No table for timm's `Eva._pos_embed`: the blocks make theirs."""

    def forward(self) -> torch.Tensor:
        """The frequencies [2, depth, H, K/2], a copy."""
        return self.freqs.clone()


class BlockLayer(Layer):
    """One timm block. Its parameters are named `blocks.<index>.…`, as in the whole model.

    Attributes:
        stack: the model's member that holds the blocks; its name ends in "blocks".
        block: timm's block.
        head_reads_only_class_token: whether the next layer is a head that reads no other token (`compute_class_token`).
        reads_frequencies: whether rotary frequencies are passed with the tokens.
    """

    stack = "blocks"
    block: nn.Module
    reads_frequencies: bool = False
    head_reads_only_class_token: bool = False

    def __init__(
        self, index: int, block: nn.Module, rope: nn.Module | None = None, patch_drop: nn.Module | None = None
    ) -> None:
        """Args: the block's index and timm module; the model's rotary embedding, if it has one, and its patch dropout,
        if that is random (blocks with a rotary table must know which patches are left)."""
        super().__init__()
        self.index = index
        self.add_module(self.stack, nn.ModuleDict({str(index): block}))
        self.__dict__["block"] = block  # no second place among the modules
        self.rope = rope
        self.patch_drop = patch_drop if rope is not None else None

    def rotary_table(self, tokens: torch.Tensor, freqs: torch.Tensor | None) -> torch.Tensor:
        """The sine and cosine table of this block's tokens, in the shape in which timm's `Eva` passes it to a block.

        [N, 2K] (one for all heads), [H, N, 2K] (learned) or, with patch dropout, [B, 1 or H, kept, 2K].
        """
        rope = self.rope
        assert rope is not None, "the model has no rotary embedding"
        if freqs is not None:
            table = get_mixed_freqs(freqs[:, self.index], rope.t_x, rope.t_y)
        elif getattr(rope, "feat_shape", None) is not None:
            table = rope.get_embed()
        else:  # a kind that caches no table (timm's `mrope`)
            table = rope.get_embed(shape=rope.grid_size)
        keep = None if self.patch_drop is None else self.patch_drop.keep_indices(table.shape[-2])
        if keep is None:
            return table
        kept = apply_keep_indices_nlc(tokens, table, keep)
        return kept.unsqueeze(1) if table.ndim == 2 else kept

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(tokens [B, S, D], keys int64 [B], …) -> the same, the tokens after the block."""
        tokens, keys, *rest = inputs
        if self.rope is None:
            tokens = self.block(tokens)
        else:
            table = self.rotary_table(tokens, rest[-1] if self.reads_frequencies else None)
            # DeepSpeed casts parameters and leaves buffers, and timm's rotary attention does not mix types.
            tokens = self.block(tokens, rope=table.to(tokens.dtype))
        return (tokens, keys, *rest)


def block_stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's lists of blocks, in the order in which tokens pass through them, by the member's name."""
    return {name: child for name, child in model.named_children() if name.endswith(BlockLayer.stack)}


class HeadLayer(Layer):
    """Tokens to logits: final norm, pooling, classifier. The features are the classifier's input.

    Attributes:
        chained: set by `chain_towers`: whether another tower follows ("inner") or none ("last"); None for one tower.
        drops_frequencies: whether rotary frequencies are its last input.
        adds_features: whether, in training, the features follow the logits: [B, num_classes + D].
    """

    chained: Literal["inner", "last"] | None = None
    drops_frequencies: bool = False
    adds_features: bool = False

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """(tokens [B, S, D], keys int64 [B], ...) -> logits [B, num_classes].

        Of a chain, "inner": (input of the next tower, keys, further inputs …, outputs so far …); "last": all outputs.
        """
        tokens, keys, *carried = inputs
        normed = self.norm(tokens)
        outputs = self.forward_head(normed, pre_logits=self.gives_features)
        if self.adds_features and self.training:
            outputs = torch.cat((outputs, self.forward_head(normed, pre_logits=True)), dim=1)
        if self.drops_frequencies and self.chained is not None:
            carried.pop()
        return self.pass_on(outputs, keys, carried)

    def pass_on(
        self, outputs: torch.Tensor, keys: torch.Tensor, carried: Sequence[torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The outputs; within a chain, the inputs of the next layer or the outputs of all towers."""
        if self.chained is None:
            return outputs
        return (carried[0], keys, *carried[1:], outputs) if self.chained == "inner" else (*carried, outputs)


class VisionTransformerHead(HeadLayer, VisionTransformer):
    """The end of timm's `VisionTransformer.forward`."""


class DistilledHead(VisionTransformerHead, VisionTransformerDistilled):
    """The end of timm's `VisionTransformerDistilled.forward`: the mean of the logits of both heads.

    In training with `distilled_training` it gives both, those of the class token first: [B, 2 num_classes].
    """

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """As timm's, the two outputs as one."""
        outputs = super().forward_head(x, pre_logits=pre_logits)
        return torch.cat(outputs, dim=1) if isinstance(outputs, tuple) else outputs


class EvaHead(HeadLayer, Eva):
    """The end of timm's `Eva.forward`."""


_ENDS: dict[type, tuple[type[EmbedLayer], type[HeadLayer]]] = {
    VisionTransformerDistilled: (DistilledEmbed, DistilledHead),  # a subclass of the next one
    VisionTransformer: (VisionTransformerEmbed, VisionTransformerHead),
    Eva: (EvaEmbed, EvaHead),
}


def part_of_model(model: nn.Module, kind: type[Layer], members: Collection[str]) -> Layer:
    """A `kind` with the model's hyper-parameters and those of its direct members (modules, parameters) that are named.

    It does not call a constructor; timm's would build the whole model again.
    """
    part = kind.__new__(kind)
    nn.Module.__init__(part)
    own = set(part.__dict__)
    part.__dict__.update({key: value for key, value in model.__dict__.items() if key not in own})
    for store in ("_modules", "_parameters", "_buffers"):
        getattr(part, store).update({key: value for key, value in getattr(model, store).items() if key in members})
    return part


def _rope_of_blocks(model: TimmViT) -> nn.Module | None:
    """The module that makes the blocks' rotary tables; learned frequencies stay in the model, for the embedding layer.

    The blocks share it, since it holds fixed tables only: buffers that no state dict contains.
    """
    rope = getattr(model, "rope", None)
    if rope is None:
        return None
    if isinstance(rope, RotaryEmbeddingMixed):
        frequencies = RopeFrequencies(rope)
        model.rope = frequencies
        tables = copy.copy(rope)
        tables._parameters = {}
        tables.freqs = torch.empty(0)  # no parameter: timm asks it for the device on which to lay out the grid
        return tables
    model.rope = None
    rope.grid_size = model.patch_embed.grid_size
    assert not list(rope.parameters()), f"{type(rope).__name__} has parameters, which blocks would share"
    return rope


def _ends_of(model: TimmViT) -> tuple[type[EmbedLayer], type[HeadLayer]]:
    return next(ends for kind, ends in _ENDS.items() if isinstance(model, kind))


def encoder_layers(model: TimmViT) -> list[Layer]:
    """The embedding and the blocks of a copy that `take_apart` made; they take its modules."""
    rope = _rope_of_blocks(model)
    random_patches = model.patch_drop if isinstance(model.patch_drop, KeyedPatchDropout) else None
    layers = [
        part_of_model(model, _ends_of(model)[0], _EMBED),
        *(BlockLayer(index, block, rope, random_patches) for index, block in enumerate(model.blocks)),
    ]
    for layer in layers:
        layer.num_tokens = TokenCount(model.num_prefix_tokens, model.patch_embed.num_patches, random_patches)
        if isinstance(layer, BlockLayer):
            layer.reads_frequencies = isinstance(getattr(model, "rope", None), RopeFrequencies)
    return layers


def head_layer(model: TimmViT) -> HeadLayer:
    """The head of a copy that `take_apart` made."""
    head = part_of_model(model, _ends_of(model)[1], _HEAD)
    assert isinstance(head, HeadLayer)
    return head


def tower_names(model: nn.Module) -> tuple[str, ...]:
    """The towers of a model, the main one first; the others are members that `model.further_towers` names."""
    return (MAIN_TOWER, *getattr(model, "further_towers", ()))


def tower_of(model: TimmViT, name: str) -> TimmViT:
    """One tower's model; the main one is what is left without the others (a shallow copy)."""
    if name != MAIN_TOWER:
        return model.get_submodule(name)
    main = copy.copy(model)
    main._modules = {key: child for key, child in model._modules.items() if key not in tower_names(model)}
    return main


def take_apart_towers(model: TimmViT) -> dict[str, list[Layer]]:
    """The layers of each tower of a model.

    Parameters of a tower other than the main one, and the draws of its random modules, have names that begin with the
    tower's.
    """
    towers = {name: take_apart(tower_of(model, name)) for name in tower_names(model)}
    for name, layers in towers.items():
        if name == MAIN_TOWER:
            continue
        for layer in layers:
            layer.prefix = f"{name}."
        for drop in {drop for layer in layers for drop in layer.keyed_drops}:
            drop.name = f"{name}.{drop.name}"
    return towers


def chain_towers(towers: Iterable[Sequence[Layer]]) -> list[Layer]:
    """Towers that end in a `HeadLayer` as one list of layers, for a pipeline (in place).

    The first layer takes (input of the first tower, keys, inputs of the others …); the last one returns the outputs of
    all towers in order. Stages pass on the images of later towers and the outputs of earlier ones.
    """
    chain: list[Layer] = []
    for tower in towers:
        head, block = tower[-1], tower[-2]
        assert isinstance(head, HeadLayer)
        assert isinstance(block, BlockLayer)
        head.chained, head.drops_frequencies = "inner", block.reads_frequencies
        chain += tower
    chain[-1].chained = "last"
    return chain


@singledispatch
def _layers_of(model: TimmViT) -> list[Layer]:
    """Of a model of timm's: an `EmbedLayer`, a `BlockLayer` for each block, a `HeadLayer`; depth + 2 layers."""
    layers, head = encoder_layers(model), head_layer(model)
    head.num_tokens = layers[-1].num_tokens
    reads_one = model.global_pool == "token" and model.attn_pool is None
    layers[-1].head_reads_only_class_token = reads_one and not isinstance(model, VisionTransformerDistilled)
    return [*layers, head]


class _TakeApart:
    """Makes the layers of a model, by the function of its class.

    A kind of model that is more than timm's registers a function. It receives a copy of the model, timm's random
    modules replaced by keyed ones (`keyed_drop`), whose modules go into the layers. The model itself stays as it is, to
    describe the run. The function that `dispatch` gives for a class neither copies nor checks.
    """

    dispatch = staticmethod(_layers_of.dispatch)

    @staticmethod
    def register(function: Callable[[Any], list[Layer]]) -> Callable[[Any], list[Layer]]:
        """Use a function for models of the class with which its argument is annotated."""
        return _layers_of.register(function)

    def __call__(self, model: nn.Module) -> list[Layer]:
        """The layers, on the model's device; together they hold each of its parameters once, under its name.

        Args:
            model: the description, as from `create_model`, on any device.
        """
        own = copy.deepcopy(model)
        replace_drops(own)
        layers = _layers_of(own)
        names, held = set(model.state_dict()), [name for layer in layers for name in layer.state_dict()]
        assert sorted(held) == sorted(names), f"lost or doubled: {names.symmetric_difference(held) or held}"
        return layers


take_apart = _TakeApart()
