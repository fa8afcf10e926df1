"""The sheet of training images that the report shows."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from micro_batches import load
from PIL import Image
from run_folders import Tags, page_of, write_run

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.field import finished
from ds_vit.data.fields import LabelField
from ds_vit.data.sampler import Share
from ds_vit.data.settings import CropConfig, ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.monitoring.sheets import TrainingSheet
from ds_vit.tasks.dino.fields import crop_fields
from ds_vit.tasks.panels import save_sheet


@pytest.mark.parametrize("wanted", [0, 3, 9])
def test_a_sheet_shows_what_the_model_gets(tmp_path, wanted):
    """Pixels before erasing, mixing or normalisation; labels of other rows; more images than were asked for."""
    image, mix = ImageConfig((8, 8), mean=(0.3, 0.4, 0.5), std=(0.2, 0.3, 0.4)), MixConfig(mixup=0.8, cutmix=1.0)
    source, share = open_source("digits", None, "train"), Share(0, 1, 4, 3)
    loaded = load(source, share, stop=2, image=image, augment=AugmentConfig(reprob=0.5), mix=mix)
    sheet = TrainingSheet(image, source, [f"digit {n}" for n in range(10)], wanted, share.accumulation)
    saved, seen, captions = [], [], []
    for number, drawn in enumerate(loaded):
        batch = finished(loaded.fields[:1], drawn, device="cpu")
        shown = drawn._replace(packed={"images": drawn.packed["images"]}) if number % 2 else drawn
        sheet.add(shown, batch, saved.append)
        seen.append(batch["images"] * torch.tensor(image.std)[:, None, None] + torch.tensor(image.mean)[:, None, None])
        targets, mixing = drawn.packed["targets"].tolist(), drawn.rows.mix
        for row, (partner, lam) in enumerate(zip(mixing.partner.tolist(), mixing.lam.tolist(), strict=True)):
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


@pytest.mark.parametrize(("wanted", "samples"), [(3, 1), (13, 3), (40, 6)])
def test_a_row_of_a_sheet_shows_the_crops_of_a_sample(tmp_path, wanted, samples):
    """Would catch crops of another sample in a row, a label at the wrong crop, and a count in crops."""
    image, crops = ImageConfig((8, 8), mean=(0.3, 0.4, 0.5), std=(0.2, 0.3, 0.4)), CropConfig(4, num_local=3)
    source, share = open_source("digits", None, "train"), Share(0, 1, 2, 3)
    fields = [*crop_fields(image, crops, AugmentConfig()), LabelField("targets", 10)]
    sheet = TrainingSheet(image, source, [f"digit {n}" for n in range(10)], wanted, share.accumulation)
    saved, seen, captions = [], [], []
    for drawn in load(source, share, stop=2, image=image, fields=fields):
        sheet.add(drawn, finished(fields[:2], drawn, device="cpu"), saved.append)
        large, small = (drawn.packed[field.name].pixels for field in fields[:2])
        seen += [[*two, *others] for two, others in zip(large, small, strict=True)]
        captions += [f"digit {target}" for target in drawn.packed["targets"].tolist()]
    assert saved == [sheet]
    sheet.save(tmp_path / "augmented.png")
    told = json.loads((tmp_path / "augmented.json").read_text())
    assert told["views"] == 5
    assert told["captions"] == [text for own in captions[:samples] for text in (own, "", "", "", "")]
    shown, side = torch.from_numpy(np.array(Image.open(tmp_path / "augmented.png"))).permute(2, 0, 1), told["tile"]
    assert shown.shape == (3, side * samples, side * 5)
    for row, column in itertools.product(range(samples), range(5)):
        pixels, step = seen[row][column], side // (8 if column < 2 else 4)
        tile = shown[:, row * side : (row + 1) * side : step, column * side : (column + 1) * side : step]
        assert (tile.int() - pixels.int()).abs().max() <= 1


def test_the_report_keeps_the_crops_of_a_sample_in_a_row(tmp_path, capsys):
    """Would catch a grid that fills the width of the page, where the crops of a sample wrap."""
    run = write_run(tmp_path / "run")
    save_sheet([Image.new("RGB", (8, 8))] * 10, ["label", *[""] * 4] * 2, run / "augmented.png", num_views=5)
    page, _ = page_of(capsys, "report", run)
    grids = [fields for name, fields in Tags(page).elements if fields.get("class") == "tilesheet"]
    assert [fields.get("style") for fields in grids] == ["grid-template-columns: repeat(5, 1fr)", None]
