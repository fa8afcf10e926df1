"""Shard a model over a tensor-parallel group: reject unsupported modules, then slice and rewire layer by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from ds_vit.config.schema import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.conversions import cast_block_buffers, norms_in_fp32
from ds_vit.models.keyed_drop import KeyedDropout, convert, mix_in
from ds_vit.models.layers import (
    BlockLayer,
    EmbedLayer,
    HeadLayer,
    Layer,
    RopeFrequencies,
    block_stacks,
)
from ds_vit.models.linear import Linear
from ds_vit.models.param_groups import freeze
from ds_vit.models.zoo import TimmViT
from ds_vit.parallel.tensor.collectives import Region, TensorParallel, join_tokens, split_tokens, sum_over_group
from ds_vit.parallel.tensor.plans import NORMS, PLANS, Sections, ShardingPlan
from ds_vit.parallel.tensor.region import Entered, RowLinear, ShardedNorm, ShareDropout, SummandLinear
from ds_vit.parallel.tensor.slices import TensorSlice


def _planned(module: nn.Module) -> list[tuple[nn.Module, ShardingPlan]]:
    """The modules to shard in a block or head, with their plans."""
    return [(child, PLANS[type(child)]) for child in module.modules() if type(child) in PLANS]


def _members(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """The named members that exist and are not an identity."""
    for name in names:
        member = getattr(module, name, None)
        if member is not None and not isinstance(member, nn.Identity):
            yield name, member


def _refused_kind(model: TimmViT) -> str | None:
    """Why some kind of module in the model cannot be sharded, or None."""
    for block in itertools.chain(*block_stacks(model).values()):
        planned = _planned(block)
        covered = {id(parameter) for module, _ in planned for parameter in module.parameters()}
        for name, parameter in block.named_parameters():
            if parameter.ndim > 1 and id(parameter) not in covered:
                owner = block.get_submodule(name.split(".")[0]) if "." in name else block
                return f"{type(owner).__name__} in {type(block).__name__} ({name}) cannot be sharded"
        for module, plan in planned:
            for name, norm in _members(module, plan.norms):
                if type(norm) not in NORMS:
                    kind = f"{type(norm).__name__} over the features of {type(module).__name__} ({name})"
                    return f"{kind} cannot be sharded"
    return None


def _counts(model: TimmViT) -> Iterator[tuple[str, int]]:
    """The numbers that a degree must divide: (name, number), for each module to shard."""
    for part, child in model.named_children():
        prefix = part.removesuffix("blocks").replace("_", " ") if part in block_stacks(model) else ""
        for module, plan in _planned(child):
            yield from ((prefix + name, number) for name, number in plan.counts(module).items())


def legal_degrees(model: TimmViT) -> list[int]:
    """The tensor-parallel degrees that a model supports, ascending; [1] if it cannot be sharded.

    Args:
        model: from `create_model`, on the meta device.
    """
    if _refused_kind(model) is not None:
        return [1]
    common = math.gcd(*(number for _, number in _counts(model)))
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def check_degree(model: TimmViT, size: int) -> None:
    """Reject a tensor-parallel degree that does not fit the model, before any process group exists.

    Args:
        model: from `create_model`, on the meta device.
        size: the degree; 1 always fits.

    Raises:
        UserError: a kind of module is not supported, or the degree does not divide its heads or hidden features.
    """
    if size == 1:
        return
    refused = _refused_kind(model)
    if refused is not None:
        raise UserError(f"{refused} over tp {size}; tp must be 1 for this model")
    for name, number in _counts(model):
        if number % size:
            *some, last = map(str, legal_degrees(model))
            legal = f"may be {', '.join(some)} or {last}" if some else "must be 1"
            raise UserError(f"{name} {number} cannot be split over tp {size}; tp {legal}")


class _Splitting(EmbedLayer):
    """Mixed in before an embedding: gives this rank's share of its tokens."""

    tp: TensorParallel

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        return split_tokens(super().embed(images), self.tp)


class Joining(Layer):
    """Mixed in before a layer that takes all tokens: joins the ranks' shares at its input."""

    tp: TensorParallel

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As the layer's, of (share of the tokens [B, ceil(S / t), D], keys, …)."""
        share, *rest = inputs
        return super().forward((join_tokens(share, self.num_tokens.count(self.training), self.tp), *rest))


Converter = Callable[[Layer], object]
"""Changes a layer in place."""


def _shard_tensor(owner: nn.Module, name: str, dim: int, sections: tuple[int, ...], tp: TensorParallel) -> None:
    """Replace a parameter or buffer by this rank's slice, described and tagged."""
    full = getattr(owner, name)
    description = TensorSlice(tuple(full.shape), dim, sections, tp.rank, tp.size)
    part = description.take(full.detach())
    if isinstance(full, nn.Parameter):
        part = nn.Parameter(part, requires_grad=full.requires_grad)
        part.tp_slice = description
        part.tensor_model_parallel = True  # DeepSpeed's norms and overflow checks count by it
    setattr(owner, name, part)


def _lengths(sections: Sections, module: nn.Module, total: int) -> tuple[int, ...]:
    return sections(module) if callable(sections) else (total // sections,) * sections


def _shard_linear(linear: nn.Linear, side: str, sections: tuple[int, ...], tp: TensorParallel) -> list[nn.Parameter]:
    """Shard the features of one side, "outputs" or "inputs"; returns the whole parameters that get a partial gradient.

    The bias of sharded inputs is added to the sum of all ranks, and gets a whole one.
    """
    axes: Mapping[str, int] = getattr(linear, side, getattr(Linear, side))
    whole = [p for name, p in linear.named_parameters(recurse=False) if name not in ("bias", *axes)]
    for name, _ in _members(linear, tuple(axes)):
        _shard_tensor(linear, name, axes[name], sections, tp)
    linear.out_features, linear.in_features = linear.weight.shape
    return whole


def _shard_norm(norm: nn.Module, tp: TensorParallel) -> None:
    for name, parameter in list(norm.named_parameters(recurse=False)):
        _shard_tensor(norm, name, 0, tuple(parameter.shape), tp)
    shape = (norm.normalized_shape[0] // tp.size,)
    convert(norm, ShardedNorm, centred=NORMS[type(norm)], tp=tp, normalized_shape=shape)


def _shard_module(module: nn.Module, plan: ShardingPlan, region: Region) -> list[nn.Parameter]:
    """Shard one module by its plan, in place; returns the whole parameters that get a partial gradient."""
    tp = region.tp
    summed: list[nn.Parameter] = []
    # The lengths are those of the whole module: read them all before anything is changed.
    columns = {n: _lengths(plan.columns[n], module, m.out_features) for n, m in _members(module, tuple(plan.columns))}
    rows = {n: _lengths(plan.rows[n], module, m.in_features) for n, m in _members(module, tuple(plan.rows))}
    for name, sections in columns.items():
        summed += _shard_linear(getattr(module, name), "outputs", sections, tp)
    for name, sections in rows.items():
        linear = getattr(module, name)
        summed += _shard_linear(linear, "inputs", sections, tp)
        mix_in(linear, SummandLinear if name in plan.summands else RowLinear, region=region)
    for name, tensor in _members(module, plan.vectors):
        _shard_tensor(module, name, 0, tuple(tensor.shape[:1]), tp)
    for _, norm in _members(module, plan.norms):
        _shard_norm(norm, tp)
    for _, dropout in _members(module, plan.dropouts):
        if isinstance(dropout, KeyedDropout):
            convert(dropout, ShareDropout, dim=-1, tp=tp)
    for name in plan.divided:
        whole = getattr(module, name)
        own = [number // tp.size for number in whole] if isinstance(whole, list) else whole // tp.size
        setattr(module, name, own)
    if plan.sharded_class is None:
        mix_in(module, Entered, region=region)
    else:
        convert(module, plan.sharded_class, region=region)
    for _, member in _members(module, plan.partial):
        summed += [member] if isinstance(member, nn.Parameter) else member.parameters()
    return summed


TOKEN_SHARING: dict[type[Layer], type[Layer]] = {EmbedLayer: _Splitting, HeadLayer: Joining}
"""The class that is mixed in before a kind of layer under sequence parallelism, so that it takes and gives this rank's
tokens. A task adds its own layers. Other layers stay as they are."""


def share_tokens(layer: Layer, tp: TensorParallel) -> None:
    """Sequence parallelism: make a layer take and give this rank's tokens, in place."""
    if mixins := [TOKEN_SHARING[kind] for kind in type(layer).__mro__ if kind in TOKEN_SHARING]:
        mix_in(layer, mixins[0], tp=tp)
    for module in layer.modules() if isinstance(layer, BlockLayer) else ():
        if type(module) is KeyedDropout:  # outside the regions, where it works on a share
            convert(module, ShareDropout, dim=1, tp=tp)


def shard_layer(layer: Layer, tp: TensorParallel, *, class_parallel: bool = False) -> None:
    """Shard an initialised layer, in place: this rank keeps its part.

    Parameters are replaced by slices; their names stay timm's. Every parameter gets a description, `tp_slice`, from
    which `assemble` makes the whole; the sharded ones get DeepSpeed's tag `tensor_model_parallel`. Whole parameters
    whose gradient is partial on each rank have it summed over the group in the backward pass. All ranks of the group
    must receive the same samples.

    The tuple that layers exchange keeps its structure. Under sequence parallelism its tokens are [B, ceil(S / t), D];
    learned rotary frequencies are those of this rank's heads.

    Args:
        layer: from `take_apart`, filled, in its final type; of a model that `check_degree` accepts for this size.
        tp: this rank's place in the group; of size 1, only the descriptions are written.
        class_parallel: shard the classifier over the classes: a `HeadLayer` then returns [B, ceil(C / t)] logits, those
            past the last class zero, for the loss and `gather_logits`.
    """
    if tp.size > 1:
        # Layers other than blocks work on all tokens, under sequence parallelism too.
        region = Region(tp if isinstance(layer, BlockLayer) else tp.with_all_tokens, layer.num_tokens)
        summed = [parameter for module, plan in _planned(layer) for parameter in _shard_module(module, plan, region)]
        if isinstance(layer, EmbedLayer) and isinstance(getattr(layer, "rope", None), RopeFrequencies):
            _shard_tensor(layer.rope, "freqs", 2, (layer.rope.freqs.shape[2],), tp)
        if class_parallel and isinstance(layer, HeadLayer):
            for _, head in _members(layer, ("head", "head_dist")):
                summed += _shard_linear(head, "outputs", (head.out_features,), tp)
                mix_in(head, Entered, region=region)
        if tp.sequence_parallel:
            share_tokens(layer, tp)
            if isinstance(layer, BlockLayer):
                summed = [p for p in layer.parameters() if not getattr(p, "tensor_model_parallel", False)]
        for parameter in (p for p in summed if p.requires_grad):
            # Sees the gradient of each backward pass before anything accumulates or reduces it further.
            parameter.register_hook(partial(sum_over_group, tp=tp))
    for parameter in layer.parameters():
        if not hasattr(parameter, "tp_slice"):
            parameter.tp_slice = TensorSlice(tuple(parameter.shape), None, (), tp.rank, tp.size)


def rank_converters(
    config: RunConfig, tp: TensorParallel | None, *, class_parallel: bool, dtype: torch.dtype, frozen: frozenset[str]
) -> list[Converter]:
    """The converters that make a rank's layers of whole ones, in the order in which they are applied to each.

    Args:
        config: the flags, of which --norm-dtype is read.
        tp: the ranks that share each layer, if there are several.
        class_parallel: as for `shard_layer`.
        dtype: of the parameters, which have it already.
        frozen: timm names of parameters that are not trained.
    """
    converters: list[Converter] = []
    if tp is not None and tp.size > 1:
        converters.append(partial(shard_layer, tp=tp, class_parallel=class_parallel))
    if dtype != torch.float32:
        converters.append(partial(cast_block_buffers, dtype=dtype))  # DeepSpeed casts only parameters
        if config.norm_dtype == "float32":
            converters.append(norms_in_fp32)
    return [*converters, partial(freeze, names=frozen)]
