"""Random erasing: timm's boxes from the same stream, and noise that is keyed by the sample and the pixel's place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data.random_erasing import RandomErasing

from ds_vit import randomness
from ds_vit.data import AugmentConfig
from ds_vit.data.augment.draws import seeded
from ds_vit.data.augment.erasing import ErasingBoxes, erase


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
        with seeded(key, "erase"):
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


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erasing_a_row_does_not_depend_on_the_batch(mode):
    """Would catch noise that changes with the micro-batch."""
    keys = torch.from_numpy(randomness.sample_keys(0, 0, np.arange(9)))
    boxes = torch.from_numpy(
        np.stack([ErasingBoxes(AugmentConfig(reprob=0.7)).draw(k, (24, 32)) for k in keys.tolist()])
    )
    whole = erase(torch.ones(9, 3, 24, 32), boxes, keys, mode)
    for start, stop in ((0, 1), (1, 4), (4, 9)):
        part = erase(torch.ones(stop - start, 3, 24, 32), boxes[start:stop], keys[start:stop], mode)
        assert torch.equal(part, whole[start:stop])
