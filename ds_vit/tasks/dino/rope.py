"""Random coordinates of a student's rotary positions, as in DINOv3 (Siméoni et al. 2025,
https://arxiv.org/abs/2508.10104; facebookresearch/dinov3, dinov3/layers/rope_position_encoding.py).

The coordinates of patches, in [-1, 1] along each axis, are shifted, then stretched by a factor for each axis (jitter),
then by a factor for both (rescale). As in its source, there is one draw for each step, block and size of crops. It is a
function of (seed, step, size, block), so it is the same on every rank, in every micro-batch, and when activations are
recomputed. A teacher, and evaluation, have the plain coordinates.

The tables of all blocks are computed at once, in the embedding layer, and are passed on with the tokens.

Shapes: L blocks, N patches, K head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3, _build_grid
from torch import nn

from ds_vit import randomness
from ds_vit.config.schema import RunConfig
from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import BlockLayer, EmbedLayer, Layer


@dataclass(frozen=True)
class CoordinateDraws:
    """What is drawn.

    Attributes:
        shift: uniform in ±shift, for each axis.
        jitter: log-uniform in [1 / jitter, jitter], for each axis.
        rescale: log-uniform in [1 / rescale, rescale], for both axes.
    """

    shift: float = 0.0
    jitter: float = 1.0
    rescale: float = 1.0

    @classmethod
    def of(cls, config: RunConfig) -> CoordinateDraws | None:
        """The draws of the flags; None for nothing to draw."""
        shift, jitter, rescale = config.rope_shift_coords, config.rope_jitter_coords, config.rope_rescale_coords
        return cls(shift or 0.0, jitter or 1.0, rescale or 1.0) if shift or jitter or rescale else None

    def draw(
        self, seed: int, step: int | torch.Tensor, size: int, num_blocks: int, device: torch.device
    ) -> torch.Tensor:
        """Shifts and factors of each block: float32 [L, 2, 2], of which [:, 0] are added before [:, 1] multiply.

        Args:
            seed: of the run.
            step: counted from 1; a tensor on the device while a CUDA graph is captured.
            size: of the crops, in pixels.
            num_blocks: L.
            device: of the result.
        """
        keys, spread = _constants(self, seed, size, num_blocks, device)
        step = step.long() if isinstance(step, torch.Tensor) else int(step)
        drawn = (2.0 * randomness.uniform_of(randomness.mix_tensor(keys, step)) - 1.0) * spread
        shift, jitter, rescale = drawn.split([2, 2, 1], dim=1)
        return torch.stack((shift, (jitter + rescale).exp()), dim=1)


@functools.cache  # without a limit: CUDA graphs read them at their addresses
def _constants(
    draws: CoordinateDraws, seed: int, size: int, num_blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys int64 [L, 5] and half the width of each distribution, float32 [5]; of the factors, in logarithms."""
    name = randomness.name_key("rope")
    keys = [[randomness.mix(seed, name, size, block, number) for number in range(5)] for block in range(num_blocks)]
    of_axes, of_both = math.log(draws.jitter), math.log(draws.rescale)
    spread = [draws.shift, draws.shift, of_axes, of_axes, of_both]
    return torch.tensor(keys, device=device), torch.tensor(spread, device=device)


@functools.cache
def _coordinates(
    size: tuple[int, int], offset: float, indexing: str, normalize: str, device: torch.device
) -> torch.Tensor:
    """Of a grid's patches, float32 [N, 2]."""
    how = {"grid_offset": offset, "grid_indexing": indexing, "normalize_coords": normalize}
    return _build_grid([*size], grid_type="centered", ndim=2, **how).flatten(0, 1).to(device)


class DrawnEmbed(EmbedLayer):
    """Mixed in before a `MaskedEmbed`: it passes on rotary tables.

    Attributes:
        drawn_rope: makes the tables; the blocks have it too.
        num_blocks: L.
    """

    drawn_rope: RotaryEmbeddingDinoV3
    num_blocks: int

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(images, keys, draws [L, 2, 2] or none, mask or none) -> (tokens, keys, tables [L, N, 2K])."""
        images, keys, *further = inputs
        tokens, keys = super().forward((images, keys, *further[1:]))
        return tokens, keys, self._tables(further[0] if further else None, tokens.dtype)

    def _tables(self, drawn: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        rope = self.drawn_rope
        if drawn is None:
            return rope.get_embed().to(dtype).expand(self.num_blocks, -1, -1)
        rows, columns = rope.feat_shape
        how = (rope.grid_offset, rope.grid_indexing, rope.normalize_coords)
        grid = _coordinates((rows, columns), *how, drawn.device)
        coordinates = (grid + drawn[:, :1]) * drawn[:, 1:]
        table = torch.cat(rope._get_pos_embed_from_coords(coordinates.flatten(0, 1)), dim=-1)
        return table.to(dtype).unflatten(0, (self.num_blocks, len(grid)))


class DrawnBlock(BlockLayer):
    """Mixed in before the class of a block layer: it receives its rotary table."""

    def rotary_table(self, tokens: torch.Tensor, freqs: torch.Tensor | None) -> torch.Tensor:
        """As `BlockLayer.rotary_table`, of tables [L, N, 2K]."""
        assert freqs is not None
        return freqs[self.index]


def draw_coordinates(embed: nn.Module, blocks: Sequence[Layer]) -> None:
    """Give layers of a model with DINOv3's rotary positions drawn coordinates, in place."""
    mix_in(embed, DrawnEmbed, drawn_rope=blocks[0].rope, num_blocks=len(blocks))
    for block in blocks:
        mix_in(block, DrawnBlock, reads_frequencies=True)
