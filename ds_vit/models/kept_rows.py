"""Drop-path that computes only what it keeps: a branch is run on the samples whose mask is not 0.

Stochastic depth multiplies a residual branch by 0 or 1 / keep, a sample at a time, and a branch that is multiplied by
0 need not be computed. timm's own forward stays: the first module of a branch receives only the kept rows, its
drop-path puts them back among zeros, and the residual stream never sees the difference. Draws, rates and scaling are
those of `keyed_drop`; only the rounding of matrix products over fewer rows changes.

How many rows stay is known on the host before the first layer runs, by the same hash of the samples' keys
(`find_rows`): on a GPU nothing waits for a mask. At least one row is always computed, times 0 where none is kept, so
that each parameter has its gradient wherever ZeRO waits for one, and each tensor-parallel rank takes part in its
collectives.

Shapes: B samples, k of them kept, S tokens, D width, M keyed modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from timm.layers import DropPath
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import (
    Block,
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
)
from torch import nn

from ds_vit.device import send
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_drop import KeyedDrop, KeyedDropPath, Together, convert, hash_together
from ds_vit.models.layers import BlockLayer, Layer, block_stacks

Branch = tuple[str, tuple[str, ...]]
"""A drop-path's name in its block, and the modules of its branch in the order in which the tokens pass through them;
none where the block is one branch, which then runs on the kept rows as a whole."""

_PRE_NORM: tuple[Branch, ...] = (("drop_path1", ("norm1", "attn")), ("drop_path2", ("norm2", "mlp")))
_POST_NORM: tuple[Branch, ...] = (("drop_path1", ("attn", "norm1")), ("drop_path2", ("mlp", "norm2")))
_WHOLE: tuple[Branch, ...] = (("drop_path", ()),)


def _things(block: nn.Module) -> tuple[Branch, ...]:
    found = [(f"attns.{i}", "attn") for i in range(len(block.attns))]
    found += [(f"ffns.{i}", "mlp") for i in range(len(block.ffns))]
    return tuple((f"{branch}.drop_path", (f"{branch}.norm", f"{branch}.{inner}")) for branch, inner in found)


_BRANCHES: dict[type[nn.Module], Callable[[nn.Module], tuple[Branch, ...]]] = {
    Block: lambda block: _PRE_NORM,
    ResPostBlock: lambda block: _POST_NORM,
    EvaBlock: lambda block: _PRE_NORM,
    EvaBlockPostNorm: lambda block: _POST_NORM,
    ParallelScalingBlock: lambda block: _WHOLE,
    DiffParallelScalingBlock: lambda block: _WHOLE,
    ParallelThingsBlock: _things,
}
"""The kinds of block whose branches are known; a kind that is not here computes all rows."""


def _branches(block: nn.Module) -> tuple[Branch, ...]:
    kind = next((kind for kind in type(block).__mro__ if kind in _BRANCHES), None)  # a cut block is of a subclass
    return _BRANCHES[kind](block) if kind else ()


# ---- which drop-paths ------------------------------------------------------------------------------------------------


def pays(rate: float, micro_batch: int, device_type: str) -> bool:
    """Whether it is faster to compute a branch for the kept samples only.

    On a CPU, gathering and scattering rows costs as much as 0.2 rows of a vit_tiny branch, forward and backward, in
    micro-batches of 2 to 8, and 0.02 of the micro-batch in larger ones, in fp32 and under bf16 autocast. It costs
    nothing if all samples are kept. The threshold is half a row, because each branch adds a few operations. On a GPU it
    has not been measured: small kernels of varying shapes may be slower, so it needs --drop-path-compute kept.
    """
    return device_type == "cpu" and rate * micro_batch >= 0.5 + 0.02 * micro_batch


def wants_kept(choice: str, rate: float, micro_batch: int, device_type: str) -> bool:
    """--drop-path-compute, "auto" resolved for one drop-path."""
    return choice == "kept" or (choice == "auto" and pays(rate, micro_batch, device_type))


def _rates(model: nn.Module) -> Iterator[tuple[float, bool]]:
    """For each active drop-path of a timm model: its rate, and whether its branch is supported."""
    for block in (block for stack in block_stacks(model).values() for block in stack):
        known = {block.get_submodule(name) for name, _ in _branches(block)}
        for module in block.modules():
            if isinstance(module, DropPath) and module.drop_prob > 0.0:
                yield module.drop_prob, module in known


def check_kept(model: nn.Module) -> None:
    """Reject --drop-path-compute kept for a model some of whose branches cannot be run on kept rows.

    Args:
        model: from `create_model`.

    Raises:
        UserError: names the kinds of block.
    """
    if all(known for _, known in _rates(model)):
        return
    kinds = {type(block).__name__ for stack in block_stacks(model).values() for block in stack if not _branches(block)}
    raise UserError(
        f"--drop-path-compute kept: where a branch of {', '.join(sorted(kinds))} begins is not known; use all or auto"
    )


def count_kept(model: nn.Module, choice: str, micro_batch: int, device_type: str) -> tuple[int, int]:
    """(drop-paths whose branch runs on the kept rows only, all drop-paths) of the model."""
    rates = [*_rates(model)]
    return sum(known and wants_kept(choice, rate, micro_batch, device_type) for rate, known in rates), len(rates)


# ---- how a branch is run on them -------------------------------------------------------------------------------------


class KeptDropPath(KeyedDropPath):
    """A drop-path whose branch has computed only the kept rows."""

    puts_back: bool
    """Whether the rows are put back here, among zeros; else whoever took them does it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [k, ...] of the kept rows -> [B, ...], the others zero; with all rows, as `KeyedDropPath`."""
        x = super().forward(x)
        if self.row is None or self.kept is None or not self.puts_back:
            return x
        return x.new_zeros(len(self.row), *x.shape[1:]).index_copy(0, self.kept, x)


def compute_kept(layer: Layer, wanted: Callable[[float], bool]) -> None:
    """Run the branches of a block on kept rows only, in place; parameters and their names stay.

    Args:
        layer: from `take_apart`, cut already where it is cut; one that is no block is left as it is.
        wanted: for which drop rates.
    """
    if not isinstance(layer, BlockLayer):
        return
    block = layer.block
    for name, members in _branches(block):
        path = block.get_submodule(name)
        if not isinstance(path, KeyedDropPath) or not wanted(path.rate):
            continue
        convert(path, KeptDropPath, puts_back=bool(members))
        inside = [block.get_submodule(member) for member in members] or [block]
        for module in inside:
            for drop in module.modules():
                if isinstance(drop, KeyedDrop):
                    drop.__dict__["branch"] = path  # no submodule: it has its place in the block
        path.__dict__["branch"] = path
        if members:
            _give_kept_rows(path, inside)
        else:
            _run_on_kept_rows(path, block)


def _give_kept_rows(path: KeptDropPath, inside: Sequence[nn.Module]) -> None:
    def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if path.rows is None else (args[0].index_select(0, path.rows), *args[1:])

    def take_rotations(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        rope = kwargs.get("rope")
        # With patches left out each sample has its own table, [B, 1 or H, S, 2K].
        if path.rows is None or rope is None or rope.ndim < 4:
            return None
        return args, kwargs | {"rope": rope.index_select(0, path.rows)}

    inside[0].register_forward_pre_hook(take)
    for module in inside:
        module.register_forward_pre_hook(take_rotations, with_kwargs=True)


def _run_on_kept_rows(path: KeptDropPath, block: nn.Module) -> None:
    forward = block.forward

    def on_kept_rows(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = path.rows
        if rows is None:
            return forward(x, *args, **kwargs)
        return x.index_copy(0, rows, forward(x.index_select(0, rows), *args, **kwargs))

    block.forward = on_kept_rows  # through the instance: the class, by which others recognise a block, stays


# ---- which rows ------------------------------------------------------------------------------------------------------


def find_rows(
    drops: Sequence[KeyedDrop], bits: torch.Tensor, keys_on_host: torch.Tensor | None
) -> Mapping[KeyedDrop, torch.Tensor]:
    """The rows of a micro-batch that each `KeptDropPath` keeps, unless it keeps all.

    Args:
        drops: with a row of `bits` each.
        bits: of `hash_together`, int64 [M, B].
        keys_on_host: of the samples, int64 [B] on the CPU; without them the host reads the bits of a device, once.

    Returns:
        Indices int64 [k] on the device of `bits`, ascending, at least one.
    """
    kept = [(row, drop) for row, drop in enumerate(drops) if isinstance(drop, KeptDropPath)]
    if not kept:
        return {}
    paths = [drop for _, drop in kept]
    if bits.device.type == "cpu" or keys_on_host is None:
        on_host = bits.cpu()[[row for row, _ in kept]]
    else:
        on_host = hash_together(paths, keys_on_host)
    masks = Together(paths, on_host).masks.numpy()
    found = {path: np.flatnonzero(mask) for path, mask in zip(paths, masks, strict=True) if not mask.all()}
    if not found:
        return {}
    rows = [places if len(places) else np.zeros(1, np.int64) for places in found.values()]
    together = torch.from_numpy(np.concatenate(rows))
    together = send(together, bits.device)
    return dict(zip(found, together.split([len(places) for places in rows]), strict=True))
