"""Block masks: pure functions of the keys, within their bounds, and distributed as by BEiT's plain loop."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy import stats

from ds_vit import randomness
from ds_vit.data.augment.crops import block_masks

KEYS = randomness.sample_keys(3, 0, np.arange(600))
GRIDS = [(14, 14), (7, 16), (4, 4), (2, 3)]


def _plain_mask(grid, ratio, uniform):
    """One mask by BEiT's loop with DINOv2's bounds, drawing from `uniform`; the blocks that were placed."""
    rows, columns = grid
    mask, blocks, failed = np.zeros(grid, dtype=bool), [], 0
    left = int(ratio * rows * columns)
    while left > 0 and failed < 10:
        most = min(left, rows * columns / 2)
        area = 4 + (most - 4) * uniform()
        aspect = math.exp(math.log(0.3) * (1 - 2 * uniform()))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        top, start = math.floor(uniform() * (rows - height + 1)), math.floor(uniform() * (columns - width + 1))
        failed += 1
        if height >= rows or width >= columns:
            continue
        block = np.zeros(grid, dtype=bool)
        block[top : top + height, start : start + width] = True
        if 0 < (block & ~mask).sum() <= most:
            left -= int((block & ~mask).sum())
            mask |= block
            blocks.append((height, width))
            failed = 0
    return mask.reshape(-1), blocks


def _draws_of(key):
    """The draws of a key, one after the other."""
    counter = iter(range(10**6))
    bits = [key, randomness.name_key("block mask")]

    def uniform():
        # Keys are results of `mix`; one more value is mixed into each.
        mixed = randomness.mix_array(randomness.mix_array(np.array([bits[0]]), bits[1]), next(counter))
        return (int(mixed[0]) % 2**64 >> 11) * 2.0**-53

    return uniform


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_masks_are_those_of_a_plain_loop_with_the_same_draws(grid):
    """Would catch a mask of another key, a block beside its place, and a count that lets too much be masked."""
    found = block_masks(KEYS, grid, 0.6, (0.1, 0.5))
    assert found.shape == (600, math.prod(grid))
    for key, mask in zip(KEYS.tolist(), found, strict=True):
        uniform = _draws_of(key)
        is_masked, ratio = uniform() < 0.6, 0.1 + 0.4 * uniform()
        expected = _plain_mask(grid, ratio, uniform)[0] if is_masked else np.zeros(math.prod(grid), dtype=bool)
        assert np.array_equal(mask, expected)


def test_probability_and_ratio_are_what_was_asked_for():
    """Would catch a swapped bound, a ratio of the batch, and a share of masked views that is another."""
    masks = block_masks(randomness.sample_keys(4, 0, np.arange(4000)), (14, 14), 0.3, (0.2, 0.4))
    masked = masks[masks.any(axis=1)]
    assert stats.binomtest(len(masked), 4000, 0.3).pvalue > 1e-3
    shares = masked.mean(axis=1)
    assert shares.max() <= 0.4
    # A mask lacks a few patches of its drawn share; few lack more than a twentieth of the image.
    lacking = 0.2 + 0.2 * np.linspace(0, 1, len(shares)) - np.sort(shares)
    assert lacking.mean() < 0.02
    assert (shares < 0.15).mean() < 0.01
    assert not block_masks(KEYS, (14, 14), 0.0, (0.1, 0.5)).any()
    assert block_masks(KEYS, (14, 14), 1.0, (0.1, 0.5)).any(axis=1).all()


def test_masks_cost_little():
    """Would catch a loop over views or patches: a step's 128 masks are made on the host while the device waits."""
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        block_masks(KEYS[:128], (14, 14), 0.5, (0.1, 0.5))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.010
