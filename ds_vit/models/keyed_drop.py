"""Drop-path, dropout and patch dropout whose masks are a pure function of (sample key, timm's module name).

Each module stands in place of timm's of the same meaning, with timm's expectation and scaling. It draws nothing from
a generator: the layer that runs it lends it the keys of its samples (`sample_keys`), so a mask does not depend on the
micro-batch, the rank, the stage, or on whether the forward pass runs once or again for activation checkpointing.

Shapes: B samples, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from timm.layers import DropPath, PatchDropout
from timm.layers.patch_dropout import PatchDropoutWithIndices
from torch import nn

from ds_vit import randomness
from ds_vit.fault_tolerance.errors import UserError


class KeyedDrop(nn.Module):
    """What the keyed modules share: a name and, while their layer runs, the keys of its samples (int64 [B])."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.keys: torch.Tensor | None = None

    def uniform(self, shape: tuple[int, ...] = ()) -> torch.Tensor:
        """Draws in [0, 1) of shape [B, *shape] under this module's name."""
        if self.keys is None:
            raise UserError(f"{self.name!r} is random: give the model the samples' keys")
        return randomness.uniform(self.keys, self.name, shape)


class KeyedDropPath(KeyedDrop):
    """Stochastic depth (Huang et al. 2016): drops a sample's residual branch; timm's `DropPath`."""

    def __init__(self, name: str, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__(name)
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, ...] -> the same, with whole samples zeroed and (by default) the others divided by the keep rate."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1.0 - self.drop_prob
        mask = (self.uniform() >= self.drop_prob).to(torch.float32)
        if self.scale_by_keep:
            mask = mask / keep_prob
        return x * mask.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))


class KeyedDropout(KeyedDrop):
    """Dropout (Srivastava et al. 2014) of single elements; `nn.Dropout`."""

    def __init__(self, name: str, p: float) -> None:
        super().__init__(name)
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, ...] -> the same, elements zeroed with probability p and the others divided by 1 - p."""
        if self.p == 0.0 or not self.training:
            return x
        mask = (self.uniform(tuple(x.shape[1:])) >= self.p).to(torch.float32) / (1.0 - self.p)
        return x * mask.to(x.dtype)


class KeyedPatchDropout(KeyedDrop):
    """Patch dropout (Li et al. 2022, https://arxiv.org/abs/2212.00794); timm's `PatchDropout` and `…WithIndices`.

    Which patches stay can be asked again by later layers (`keep_indices`): a rotary table must be gathered likewise.
    """

    def __init__(
        self,
        name: str,
        prob: float,
        num_prefix_tokens: int,
        ordered: bool,
        with_indices: bool,
        always: bool = False,
    ) -> None:
        """Args: as timm's, and whether patches are left out in evaluation too (masked autoencoding)."""
        super().__init__(name)
        self.prob = prob
        self.num_prefix_tokens = num_prefix_tokens
        self.ordered = ordered
        self.with_indices = with_indices
        self.always = always
        self.lifted = False
        """While True nothing is left out, whatever the mode."""

    def _leaves_out(self, training: bool) -> bool:
        return (training or self.always) and not self.lifted

    def num_kept(self, num_patches: int, training: bool = True) -> int:
        """How many of `num_patches` stay."""
        return max(1, int(num_patches * (1.0 - self.prob))) if self._leaves_out(training) else num_patches

    def keep_indices(self, num_patches: int) -> torch.Tensor | None:
        """Indices of the kept patches, int64 [B, kept], of `num_patches`; None where nothing is dropped."""
        if self.prob == 0.0 or not self._leaves_out(self.training):
            return None
        num_keep = self.num_kept(num_patches)
        keep = torch.argsort(self.uniform((num_patches,)), dim=-1, stable=True)[:, :num_keep]
        return keep.sort(dim=-1)[0] if self.ordered else keep

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, S, D] -> [B, prefix + kept, D], and the indices too where timm's module returns them."""
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        keep = self.keep_indices(patches.shape[1])
        if keep is not None:
            patches = patches.gather(1, keep.unsqueeze(-1).expand(-1, -1, patches.shape[2]))
            x = torch.cat((prefix, patches), dim=1)
        return (x, keep) if self.with_indices else x


def _keyed_twin(module: nn.Module, name: str) -> KeyedDrop | None:
    """The keyed module that stands in for timm's, or None where `module` draws nothing."""
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
    """Put a keyed module in place of every random module of a timm model, named by its timm path (in place).

    Dropout with rate 0 stays timm's own: it draws nothing, and the attention classes read its rate.
    """
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            twin = _keyed_twin(child, f"{parent_name}.{child_name}" if parent_name else child_name)
            if twin is not None:
                setattr(parent, child_name, twin)


@contextmanager
def sample_keys(drops: Iterable[KeyedDrop], keys: torch.Tensor | None) -> Iterator[None]:
    """Lend the keys of a micro-batch (int64 [B]) to keyed modules while their layer runs."""
    for drop in drops:
        drop.keys = keys
    try:
        yield
    finally:
        for drop in drops:
            drop.keys = None
