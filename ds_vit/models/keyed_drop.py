"""Drop-path, dropout and patch dropout whose masks are a pure function of (sample key, timm's module name).

Each module replaces timm's equivalent, with timm's expectation and scaling. It uses no generator: a hash of the
samples' keys decides. A mask therefore does not depend on the micro-batch, the rank, the stage, or on recomputation by
activation checkpointing.

Hashing takes about twenty operations, whose cost on a GPU hardly depends on their size: `Together` hashes for all
layers of a micro-batch at once, and gives each module its row.

Shapes: B samples, S tokens, D width, M keyed modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
from timm.layers import DropPath, PatchDropout
from timm.layers.patch_dropout import PatchDropoutWithIndices
from torch import nn

from ds_vit import randomness
from ds_vit.fault_tolerance.errors import UserError


class KeyedDrop(nn.Module):
    """Base of the keyed modules.

    Attributes:
        name: of its draws.
        rate: the share that it drops.
        divisor: of what stays in a drop-path.
        row: for each sample of the micro-batch that runs, its hash, int64 [B], or of a drop-path its factor, fp32 [B].
        shared: what it was hashed with, and its row there.
    """

    divisor: float = 1.0
    row: torch.Tensor | None = None
    shared: tuple[Together, int]
    always = False
    """Whether it draws in evaluation too."""
    lifted = False
    """While True it draws nothing, whatever the mode."""

    def __init__(self, name: str, rate: float) -> None:
        super().__init__()
        self.name = name
        self.rate = rate

    def own_row(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Its row, in another type if one is given; None where it draws nothing.

        A compiled block runs this: it reads no rate in training, because rates differ from block to block.

        Raises:
            UserError: it draws, and the model has received no keys.
        """
        row = self.row
        if row is None:
            if drawing((self,)):
                raise UserError(f"{self.name!r} is random: give the model the samples' keys")
            return None
        if dtype is not None and row.dtype != dtype:  # eager modules cast the masks of all of them once
            row = row.to(dtype) if torch.compiler.is_compiling() else self.shared[0].row_in(self.shared[1], dtype)
        return row


def _mask(draws: torch.Tensor, drop_prob: float | torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """0 for the share `drop_prob` of the draws, 1 / divisor for the others, fp32."""
    return (draws >= drop_prob).to(torch.float32) / divisor


class KeyedDropPath(KeyedDrop):
    """Stochastic depth (Huang et al. 2016): drops a sample's residual branch; timm's `DropPath`."""

    def __init__(self, name: str, rate: float, scale_by_keep: bool = True) -> None:
        super().__init__(name, rate)
        if scale_by_keep:
            self.divisor = 1.0 - rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, ...] -> the same, with whole samples zeroed and (by default) the others divided by the keep rate."""
        row = self.own_row(x.dtype)
        return x if row is None else x * row.view(-1, *(1,) * (x.ndim - 1))


class KeyedDropout(KeyedDrop):
    """Dropout (Srivastava et al. 2014) of single elements; `nn.Dropout`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, ...] -> the same, elements zeroed with probability `rate` and the others divided by 1 - rate."""
        row = self.own_row()
        if row is None:
            return x
        return x * _mask(self.uniform(row, tuple(x.shape[1:])), self.rate, 1.0 - self.rate).to(x.dtype)

    def uniform(self, row: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Draws in [0, 1) of shape [B, *shape] from the samples' hashes [B]."""
        return randomness.uniform_of(row, shape)


class KeyedPatchDropout(KeyedDrop):
    """Patch dropout (Li et al. 2022, https://arxiv.org/abs/2212.00794); timm's `PatchDropout` and `…WithIndices`.

    Later layers ask `keep_indices` which patches stay: a rotary table must be gathered likewise.
    """

    def __init__(
        self,
        name: str,
        rate: float,
        num_prefix_tokens: int,
        ordered: bool,
        with_indices: bool,
        always: bool = False,
    ) -> None:
        """Args: as timm's, and whether patches are left out in evaluation too (masked autoencoding)."""
        super().__init__(name, rate)
        self.num_prefix_tokens = num_prefix_tokens
        self.ordered = ordered
        self.with_indices = with_indices
        self.always = always

    def num_kept(self, num_patches: int, training: bool = True) -> int:
        """The number of patches that stay, of `num_patches`."""
        leaves_out = (training or self.always) and not self.lifted
        return max(1, int(num_patches * (1.0 - self.rate))) if leaves_out else num_patches

    def keep_indices(self, num_patches: int) -> torch.Tensor | None:
        """Indices of the kept patches, int64 [B, kept], of `num_patches`; None where nothing is dropped."""
        row = self.own_row()
        if row is None:
            return None
        num_keep = self.num_kept(num_patches)
        keep = torch.argsort(randomness.uniform_of(row, (num_patches,)), dim=-1, stable=True)[:, :num_keep]
        return keep.sort(dim=-1)[0] if self.ordered else keep

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, S, D] -> [B, prefix + kept, D], and the indices too where timm's module returns them."""
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        keep = self.keep_indices(patches.shape[1])
        if keep is not None:
            patches = patches.gather(1, keep.unsqueeze(-1).expand(-1, -1, patches.shape[2]))
            x = torch.cat((prefix, patches), dim=1)
        return (x, keep) if self.with_indices else x


def drawing(drops: Iterable[KeyedDrop]) -> list[KeyedDrop]:
    """The modules that draw in their current mode; the rate is read last, as `KeyedDrop.own_row` needs."""
    return [drop for drop in drops if (drop.training or drop.always) and not drop.lifted and drop.rate > 0.0]


@cache  # without a limit: CUDA graphs read them at their addresses
def _constants(
    settings: tuple[tuple[str, float, float], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns [M, 1] of name keys, drop rates and divisors; kept, because a copy to a GPU would wait for it."""
    names, rates, divisors = zip(*settings, strict=True)
    keys = torch.tensor([randomness.name_key(name) for name in names], device=device)
    rates, divisors = (torch.tensor(column, dtype=torch.float32, device=device) for column in (rates, divisors))
    return keys[:, None], rates[:, None], divisors[:, None]


def _columns(drops: Sequence[KeyedDrop], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings = [(drop.name, drop.rate, drop.divisor) for drop in drops]  # a generator would be a call for each
    return _constants(tuple(settings), device)


def hash_together(drops: Sequence[KeyedDrop], keys: torch.Tensor) -> torch.Tensor:
    """The `bits` of all modules for the samples' keys int64 [B], by one hash: int64 [M, B]."""
    return randomness.mix_tensor(keys[None, :], _columns(drops, keys.device)[0])


class Together:
    """The draws of several keyed modules for one micro-batch.

    Attributes:
        drops: the modules, of which each has a row.
        bits: of `hash_together`, int64 [M, B].
    """

    def __init__(self, drops: Sequence[KeyedDrop], bits: torch.Tensor) -> None:
        self.drops, self.bits = drops, bits
        self._cast: dict[torch.dtype, Sequence[torch.Tensor]] = {}

    @cached_property
    def masks(self) -> torch.Tensor:
        """The masks of the drop-path modules, fp32 [M, B]; the rows of other modules are meaningless."""
        _, rates, divisors = _columns(self.drops, self.bits.device)
        return _mask(randomness.uniform_of(self.bits), rates, divisors)

    def row_in(self, row: int, dtype: torch.dtype) -> torch.Tensor:
        """A row of the masks, [B], in another type."""
        if dtype not in self._cast:
            self._cast[dtype] = self.masks.to(dtype).unbind()
        return self._cast[dtype][row]

    def _rows(self) -> list[torch.Tensor]:
        paths = [isinstance(drop, KeyedDropPath) for drop in self.drops]
        masks = self.masks.unbind() if any(paths) else ()
        bits = () if all(paths) else self.bits.unbind()
        return [masks[row] if path else bits[row] for row, path in enumerate(paths)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set the rows that these modules use, replacing any set before.

        In their dictionaries: `Module.__setattr__` would cost the host a call for each.
        """
        own = [drop.__dict__ for drop in self.drops]
        before = [(of_drop.get("row"), of_drop.get("shared")) for of_drop in own]
        for number, (of_drop, row) in enumerate(zip(own, self._rows(), strict=True)):
            of_drop["row"], of_drop["shared"] = row, (self, number)
        try:
            yield
        finally:
            for of_drop, old in zip(own, before, strict=True):
                of_drop["row"], of_drop["shared"] = old


def convert(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Make a module behave as `kind`, in place: the one assignment to `__class__` in this project.

    timm's constructors would create new parameters. A wrapper would change the names of parameters and of hashed draws,
    and a module that several parents share would have to be replaced in each of them.

    Args:
        module: its parameters, buffers and hooks stay.
        kind: a class that adds nothing to what the module holds but `attributes`.
        attributes: set on the module.
    """
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _mixed(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": mixin.__module__})


def mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Put a class before a module's own, in place; see `convert`."""
    convert(module, _mixed(mixin, module.__class__), **attributes)


def _keyed_counterpart(module: nn.Module, name: str) -> KeyedDrop | None:
    """The keyed counterpart of timm's module, or None if `module` draws nothing."""
    if isinstance(module, DropPath):
        return KeyedDropPath(name, module.drop_prob, module.scale_by_keep)
    if isinstance(module, (PatchDropout, PatchDropoutWithIndices)):
        with_indices = isinstance(module, PatchDropoutWithIndices)
        return KeyedPatchDropout(name, module.prob, module.num_prefix_tokens, module.ordered, with_indices)
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0:
        if type(module) is not nn.Dropout:
            raise UserError(f"{name}: {type(module).__name__} has no keyed counterpart; set its rate to 0")
        return KeyedDropout(name, module.p)
    return None


def replace_drops(model: nn.Module) -> None:
    """Replace every random module of a timm model by a keyed one, named by its timm path (in place).

    Dropout with rate 0 stays timm's own: it draws nothing, and the attention classes read its rate.
    """
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            counterpart = _keyed_counterpart(child, f"{parent_name}.{child_name}" if parent_name else child_name)
            if counterpart is not None:
                setattr(parent, child_name, counterpart)


def sample_keys(drops: Iterable[KeyedDrop], keys: torch.Tensor) -> AbstractContextManager[None]:
    """Hash the keys of a micro-batch (int64 [B]) for those of the modules that draw, while the context lasts."""
    found = drawing(drops)
    return Together(found, hash_together(found, keys)).active() if found else nullcontext()
