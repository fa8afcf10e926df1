"""The embedded scenes: masks agree with pixels, each process draws the same, and the splits share no digit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from colorsys import rgb_to_hsv
from pathlib import Path

import numpy as np
import pytest
from pages import run_page
from project import ON_CPU, ROOT, give_a_clone, run_python

from ds_vit.data.sources.masks import IGNORED
from ds_vit.tasks.segmentation.scenes import SceneSource


@pytest.mark.parametrize("train", [True, False])
def test_masks_agree_with_the_pixels(train):
    # Catches: a mask that is shifted or transposed, another size than the image's, a value that is no class, an outline
    # that counts.
    source = SceneSource(train)
    shares = np.zeros(source.num_classes + 1)
    for index in range(60):
        pixels, mask = np.asarray(source.image(index), dtype=np.float64), source.entry("mask", index)
        assert mask.dtype == np.int16
        assert mask.shape == pixels.shape[:2] == source.entry("mask_size", index)
        # Only ink is as bright as this, and its hue is that of its class, where no ink covers another class's.
        ink = pixels.max(axis=2) > 160.0
        assert (mask[ink] != 0).all()
        if len(present := np.unique(mask[mask > 0])) == 1:
            apart = np.abs(np.array([rgb_to_hsv(*pixel)[0] for pixel in pixels[ink]]) - (present[0] - 1) / 5.0)
            assert (np.minimum(apart, 1.0 - apart) < 0.1).mean() > 0.98
        np.testing.assert_array_equal(np.flatnonzero(source.target(index)), np.unique(mask[mask != IGNORED]))
        shares += np.bincount(mask.ravel() + 1, minlength=len(shares)) / mask.size / 60
    assert (shares > 0.005).all(), shares


def test_splits_share_no_digit_and_no_scene():
    # Catches: a validation scene of digits that were trained on, the same keys for both splits or for all scenes; with
    # the numbers of one scene, a seed that differs from process to process.
    train, validation = SceneSource(train=True), SceneSource(train=False)
    assert (len(train), len(validation)) == (1000, 200)
    digits = [{digit.tobytes() for digit in source.identity()[1]} for source in (train, validation)]
    assert not digits[0] & digits[1]
    assert len({split.image(index).tobytes() for split in (train, validation) for index in range(40)}) == 80
    assert np.bincount(train.entry("mask", 7).ravel() + 1).tolist() == [340, 2409, 183, 0, 554, 172]


@pytest.mark.slow
def test_the_page_goes_from_a_folder_to_masks(ranks, tmp_path):
    # Catches: a command of docs/segmentation.md that fails or says other things, a folder of scenes that training or
    # doctor refuses.
    page = (ROOT / "docs" / "segmentation.md").read_text()
    commands = re.findall(r"runs them -->\n```bash\n(.*?)```", page, re.DOTALL)
    assert len(commands) == 1 + 6
    give_a_clone(tmp_path)
    run_python(tmp_path, *commands[0].split()[1:])
    script = "".join(commands[1:]).replace("--epochs 12", "--epochs 1 --warmup-epochs 0")
    checked, *_ = run_page(ranks, f"```bash\n{script}```", tmp_path)
    assert "280 masks were compared with their images" in checked
    assert {path.stem for path in (tmp_path / "predicted" / "overlays").iterdir()} == {f"{n:03}" for n in range(40)}
    card = (tmp_path / "runs" / "scenes" / "export-timm" / "README.md").read_text()
    assert "pipeline_tag: image-segmentation\n" in card


@pytest.mark.slow
def test_the_launch_script_ends_with_the_picture(tmp_path):
    # Catches: a recipe that does not learn, a flag of predict that was renamed.
    env = {**os.environ, **ON_CPU, "DS_VIT_PYTHON": sys.executable}
    line = ["bash", ROOT / "launch" / "segmentation.sh", tmp_path / "run", "--max-steps", "24"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figure, picture, report = done.stdout.splitlines()[-3:]
    assert float(figure.removeprefix("mIoU: ").removesuffix(" %")) > 20.0
    assert all(Path(line.split(": ")[-1]).is_file() for line in (picture, report))
    assert len([*(tmp_path / "run" / "predicted" / "overlays").iterdir()]) == 6
