"""Block masks of iBOT (Zhou et al. 2022): which patches of a view are hidden from the student.

The blocks are BEiT's (Bao et al. 2022, algorithm 1) with DINOv2's bounds (Oquab et al. 2023, dinov2/data/masking.py).
DINOv2 masks a fixed share of a rank's batch with stratified ratios. Here each view draws both from its own key, since a
draw for a batch would depend on the layout.

Shapes: V views, N = rows x columns patches of a view, A views whose mask is not complete.
"""

from __future__ import annotations

import numpy as np

from ds_vit import randomness

_LEAST_PATCHES = 4  # of a block's drawn area
_LARGEST_SHARE = 0.5  # of the patches, in one block
_LOG_ASPECT = float(np.log(0.3))  # height over width is log-uniform in [0.3, 1 / 0.3]
_ATTEMPTS = 10  # to place a block


def block_masks(
    keys: np.ndarray, grid: tuple[int, int], probability: float, ratio_min_max: tuple[float, float]
) -> np.ndarray:
    """The masks of views, each a pure function of the view's key.

    A view is masked with `probability`. Its ratio is uniform in `ratio_min_max`, and ratio x N, rounded down, is the
    most patches that are masked. Blocks are placed until there is no room: a block that adds no patch, or more than are
    left, is drawn again, ten times at most. So a mask may have a few patches less, and on a small grid none.

    Args:
        keys: of the views, int64 [V].
        grid: rows and columns of patches.
        probability: that a view is masked.
        ratio_min_max: smallest and largest share of a masked view's patches.

    Returns:
        bool [V, N], row by row of the grid; True where a patch is masked.
    """
    rows, columns = grid
    bits = randomness.mix_array(keys, randomness.name_key("block mask"))
    low, high = ratio_min_max
    ratio = low + (high - low) * _uniform(bits, 1)
    is_masked = _uniform(bits, 0) < probability
    left = np.where(is_masked, (ratio * (rows * columns)).astype(np.int64), 0)  # patches that may still be masked
    masks = np.zeros((len(keys), rows, columns), dtype=bool)
    failed = np.zeros(len(keys), dtype=np.int64)  # attempts at the current block
    number = 2  # of the draw
    row, column = np.arange(rows), np.arange(columns)
    while (active := np.flatnonzero((left > 0) & (failed < _ATTEMPTS))).size:
        area_draw, aspect_draw, top_draw, left_draw = (_uniform(bits[active], number + n) for n in range(4))
        number += 4
        most = np.minimum(left[active], _LARGEST_SHARE * rows * columns)
        area = _LEAST_PATCHES + (most - _LEAST_PATCHES) * area_draw
        aspect = np.exp(_LOG_ASPECT * (1.0 - 2.0 * aspect_draw))
        height, width = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        at_row = np.floor(top_draw * (rows - height + 1))[:, None]
        at_column = np.floor(left_draw * (columns - width + 1))[:, None]
        in_rows = (row >= at_row) & (row < at_row + height[:, None])
        in_columns = (column >= at_column) & (column < at_column + width[:, None])
        new = in_rows[:, :, None] & in_columns[:, None, :] & ~masks[active]  # [A, rows, columns]
        added = new.sum(axis=(1, 2))
        placed = (height < rows) & (width < columns) & (added > 0) & (added <= most)
        masks[active[placed]] |= new[placed]
        left[active] -= np.where(placed, added, 0)
        failed[active] = np.where(placed, 0, failed[active] + 1)
    return masks.reshape(len(keys), rows * columns)


def _uniform(bits: np.ndarray, number: int) -> np.ndarray:
    """Draw `number` of each key, float64 in [0, 1) with 53 random bits."""
    return (randomness.mix_array(bits, number).view(np.uint64) >> np.uint64(11)) * 2.0**-53
