"""The sheet of training images that the report shows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data import ImageConfig, SampleOrder, Share, finish_images, open_source, train_loader
from ds_vit.monitoring.sheets import TrainingSheet


@pytest.mark.parametrize("wanted", [0, 3, 9])
def test_a_sheet_shows_what_the_model_gets(tmp_path, wanted):
    """Pixels before erasing, mixing or normalisation; labels of other rows; more images than were asked for."""
    image, mix = ImageConfig((8, 8), mean=(0.3, 0.4, 0.5), std=(0.2, 0.3, 0.4)), MixConfig(mixup=0.8, cutmix=1.0)
    source, augment = open_source("digits", None, "train"), AugmentConfig(reprob=0.5)
    order, share = SampleOrder(len(source), 12, seed=1), Share(0, 1, 4, 3)
    options = {"order": order, "share": share, "image": image, "augment": augment, "mix": mix, "stop_step": 2}
    sheet = TrainingSheet(image, source, [f"digit {n}" for n in range(10)], wanted, share.accumulation)
    saved, seen, captions = [], [], []
    for number, drawn in enumerate(train_loader(source, **options)):
        batch = {"images": finish_images(drawn, image, augment, device="cpu")}
        sheet.add(drawn._replace(targets=None) if number % 2 else drawn, batch, saved.append)
        seen.append(batch["images"] * torch.tensor(image.std)[:, None, None] + torch.tensor(image.mean)[:, None, None])
        targets = drawn.targets.tolist()
        for row, (partner, lam) in enumerate(zip(drawn.mix.partner.tolist(), drawn.mix.lam.tolist(), strict=True)):
            mixed = f"\N{GREEK SMALL LETTER LAMDA} {lam:.2f}: digit {targets[row]} + digit {targets[partner]}"
            captions.append(mixed if lam < 1.0 else f"digit {targets[row]}")
    assert len(saved) == (wanted > 0)
    if not wanted:
        return
    sheet.save(tmp_path / "augmented.png")
    told = json.loads((tmp_path / "augmented.json").read_text())
    assert len(told["captions"]) == wanted
    for own, expected in zip(told["captions"], captions, strict=False):
        assert own == expected or own in (f"mixup {expected}", f"cutmix {expected}")
    shown = torch.from_numpy(np.array(Image.open(tmp_path / "augmented.png")))
    for number, pixels in enumerate(torch.cat(seen)[:wanted]):
        top, left = number // 8 * told["tile"], number % 8 * told["tile"]
        tile = shown[top : top + told["tile"] : 14, left : left + told["tile"] : 14]  # nearest of 8 pixels
        assert (tile.permute(2, 0, 1) - (pixels.clamp(0, 1) * 255).round()).abs().max() <= 1
