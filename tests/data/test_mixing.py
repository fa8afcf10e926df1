"""Mixup and CutMix of pairs: timm's Mixup from the same stream, with fixed partners."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.mixup import Mixup, mixup_target

from ds_vit import randomness
from ds_vit.data import MixConfig
from ds_vit.data.augment.draws import seeded
from ds_vit.data.augment.mixing import PairDraws, PairMix, mix_images, mix_targets

SIZE = (12, 16)
CASES = {
    "mixup": MixConfig(mixup=0.8),
    "cutmix": MixConfig(cutmix=1.0, smoothing=0.0),
    "both": MixConfig(mixup=0.3, cutmix=1.0, mixup_switch_prob=0.4),
    "both, sometimes": MixConfig(mixup=0.8, cutmix=1.0, mixup_prob=0.5, smoothing=0.2),
    "minmax": MixConfig(mixup=0.8, cutmix_minmax=(0.2, 0.8)),
}


def _pairs(mix: MixConfig, num_pairs: int) -> tuple[PairMix, list[int]]:
    """Pairs side by side, as in a micro-batch of 2 * num_pairs rows, and the key of each pair's first row."""
    draws = PairDraws(mix)
    keys = randomness.sample_keys(0, 0, np.arange(0, 2 * num_pairs, 2)).tolist()
    drawn = [draws.draw(key, SIZE) for key in keys for _ in range(2)]
    partner = torch.arange(2 * num_pairs) ^ 1
    lam = torch.tensor([lam for lam, _ in drawn])
    return PairMix(partner, lam, torch.tensor([box for _, box in drawn], dtype=torch.int32)), keys


def _images(num_rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(num_rows, 3, *SIZE)).astype(np.float32))


@pytest.mark.parametrize("multi_label", [False, True], ids=["one label", "multi-label"])
@pytest.mark.parametrize("name", CASES)
def test_a_pair_is_mixed_as_by_timm_from_the_same_stream(name, multi_label):
    """Would catch any difference from timm's pair mode: lambdas (corrected ones too), boxes, partners, smoothing."""
    mix, num_pairs = CASES[name], 80
    pairs, keys = _pairs(mix, num_pairs)
    images = _images(2 * num_pairs)
    rng = np.random.default_rng(1)
    labels = torch.from_numpy(
        rng.integers(0, 2, (160, 5)).astype(np.float32) if multi_label else rng.integers(0, 5, 160)
    )
    mixed = mix_images(images, 2 * num_pairs, pairs)
    targets = mix_targets(labels, 2 * num_pairs, pairs, 5, mix.smoothing)
    assert targets.dtype == torch.float32
    timms = Mixup(
        mix.mixup, mix.cutmix, mix.cutmix_minmax, mix.mixup_prob, mix.mixup_switch_prob, mode="pair",
        label_smoothing=mix.smoothing, num_classes=5, multi_label=multi_label,
    )  # fmt: skip
    changed = 0
    for pair, key in enumerate(keys):
        rows = slice(2 * pair, 2 * pair + 2)
        with seeded(key, "mix"):
            expected, expected_targets = timms(images[rows].clone(), labels[rows])
        assert torch.equal(mixed[rows], expected), pair
        assert torch.equal(targets[rows], expected_targets), pair
        changed += not torch.equal(mixed[rows], images[rows])
    assert changed > 25


def test_every_pair_has_a_draw_of_its_own():
    """Would catch one lambda for a whole batch, and lambdas that do not follow the Beta distribution."""
    pairs, _ = _pairs(MixConfig(mixup=0.8), 1000)
    assert torch.equal(pairs.lam[0::2], pairs.lam[1::2])
    assert stats.kstest(pairs.lam[0::2].numpy(), "beta", args=(0.8, 0.8)).pvalue > 1e-3


def test_cutmix_targets_follow_the_area_that_was_pasted():
    """Would catch a target mixed by the drawn lambda where the box is cut off by the image's edge."""
    pairs, _ = _pairs(MixConfig(cutmix=1.0), 50)
    ones_and_zeros = torch.zeros(100, 3, *SIZE)
    ones_and_zeros[0::2] = 1.0
    mixed = mix_images(ones_and_zeros, 100, pairs)
    assert torch.allclose(mixed[0::2].mean(dim=(1, 2, 3)), pairs.lam[0::2], atol=1e-6)
    assert set(mixed.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("name", CASES)
def test_partners_behind_the_own_rows(name):
    """Would catch an odd micro-batch mixed with the wrong row, or its partners returned with it."""
    mix = CASES[name]
    pairs, _ = _pairs(mix, 4)
    images, labels = _images(8), torch.arange(8)
    whole, whole_targets = mix_images(images, 8, pairs), mix_targets(labels, 8, pairs, 8, mix.smoothing)
    # Rows 1 to 4 are own; row 0 and row 5 are partners and stand behind them.
    order = torch.tensor([1, 2, 3, 4, 0, 5])
    part = PairMix(torch.tensor([4, 2, 1, 5]), pairs.lam[1:5], pairs.box[1:5])
    assert torch.equal(mix_images(images[order], 4, part), whole[1:5])
    targets = mix_targets(labels[order], 4, part, 8, mix.smoothing)
    assert torch.equal(targets, whole_targets[1:5])


def test_unmixed_rows_keep_their_images_and_smooth_their_targets():
    """Would catch hard targets after --mixup-off-epoch, where timm's stay soft."""
    off = PairMix(torch.arange(4), torch.ones(4), torch.zeros((4, 4), dtype=torch.int32))
    images, labels = _images(4), torch.tensor([0, 2, 1, 1])
    assert torch.equal(mix_images(images, 4, off), images)
    assert torch.equal(mix_targets(labels, 4, off, 3, 0.1), mixup_target(labels, 3, 1.0, 0.1))
