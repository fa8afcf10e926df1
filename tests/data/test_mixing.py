"""Random erasing, mixup and CutMix: timm's draws from the same stream, keyed noise, fixed partners."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.augment.mixing import ErasingBoxes, PairDraws, PairMix, erase, mix_images, mix_targets
from ds_vit.data.augment.steps import seed_generators

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
        seed_generators(key, "mix")
        expected, expected_targets = timms(images[rows].clone(), labels[rows])
        assert torch.equal(mixed[rows], expected), pair
        assert torch.equal(targets[rows], expected_targets), pair
        changed += not torch.equal(mixed[rows], images[rows])
    assert changed > 25


# Random erasing


@pytest.mark.parametrize("count", [1, 3])
def test_erased_boxes_are_timms_from_the_same_stream(count):
    """Would catch boxes of another size, place, number or probability than timm's RandomErasing draws."""
    boxes = ErasingBoxes(AugmentConfig(reprob=0.6, recount=count))
    keys = torch.from_numpy(randomness.sample_keys(0, 0, np.arange(200)))
    drawn = torch.from_numpy(np.stack([boxes.draw(key, (24, 32)) for key in keys.tolist()]))
    assert drawn.shape == (200, count, 4)
    ours = erase(torch.ones(200, 3, 24, 32), drawn, keys, "const")
    original = RandomErasing(0.6, max_count=count, mode="const", device="cpu")
    for number, key in enumerate(keys.tolist()):
        seed_generators(key, "erase")
        assert torch.equal(ours[number], original(torch.ones(3, 24, 32))), number
    assert 90 < (ours == 0).flatten(1).any(dim=1).sum() < 150


def test_erasing_noise_is_standard_normal_and_keyed():
    """Would catch noise of another scale than timm's, shared between samples, or drawn from the process."""
    keys = torch.from_numpy(randomness.sample_keys(0, 0, np.arange(8)))
    boxes = torch.tensor([[[4, 6, 20, 30]]]).expand(8, 1, 4).to(torch.int32)
    torch.manual_seed(0)
    noise = erase(torch.full((8, 3, 24, 32), 9.0), boxes, keys, "pixel")
    torch.manual_seed(1)
    assert torch.equal(erase(torch.full((8, 3, 24, 32), 9.0), boxes, keys, "pixel"), noise)
    inside = noise[:, :, 4:20, 6:30]
    assert stats.kstest(inside.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(np.corrcoef(inside[0].flatten(), inside[1].flatten())[0, 1]) < 0.1
    inside.fill_(9.0)
    assert (noise == 9.0).all()  # nothing outside the box


def test_erasing_colours_are_one_for_each_box_and_channel():
    """Would catch mode rand filling with noise, or two boxes of an image with one colour."""
    keys = torch.from_numpy(randomness.sample_keys(0, 0, np.arange(300)))
    boxes = torch.tensor([[[0, 0, 8, 8], [10, 10, 20, 20]]]).expand(300, 2, 4).to(torch.int32)
    result = erase(torch.full((300, 3, 24, 32), 9.0), boxes, keys, "rand")
    first, second = result[:, :, :8, :8], result[:, :, 10:20, 10:20]
    for box in (first, second):
        assert (box == box[:, :, :1, :1]).all()
    colours = torch.stack([first[:, :, 0, 0], second[:, :, 0, 0]]).flatten().numpy()
    assert len(np.unique(colours)) == 1800
    assert stats.kstest(colours, "norm").pvalue > 1e-3
