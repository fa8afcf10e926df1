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
from curves import read_rows
from pages import run_page
from PIL import Image
from project import ON_CPU, ROOT, give_a_clone, run_python

from ds_vit.data.sources.masks import IGNORED
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.segmentation.scenes import SceneSource, open_scenes


@pytest.fixture(scope="module", params=["train", "validation"])
def source(request) -> SceneSource:
    return open_scenes(request.param)


def test_masks_agree_with_the_pixels(source):
    # Catches: a mask that is shifted or transposed, another size than the image's, a value that is no class, an outline
    # that counts.
    shares = np.zeros(source.num_classes + 1)
    for index in range(60):
        pixels, mask = np.asarray(source.image(index), dtype=np.float64), source.entry("mask", index)
        assert mask.dtype == np.int16
        assert mask.shape == pixels.shape[:2] == source.entry("mask_size", index)
        assert mask.min() >= IGNORED
        assert mask.max() < source.num_classes
        # Only ink is as bright as this, and its hue is that of its class, where no ink covers another class's.
        ink = pixels.max(axis=2) > 160.0
        assert (mask[ink] != 0).all()
        if len(present := np.unique(mask[mask > 0])) == 1:
            apart = np.abs(np.array([rgb_to_hsv(*pixel)[0] for pixel in pixels[ink]]) - (present[0] - 1) / 5.0)
            assert (np.minimum(apart, 1.0 - apart) < 0.1).mean() > 0.98
        np.testing.assert_array_equal(np.flatnonzero(source.target(index)), np.unique(mask[mask != IGNORED]))
        shares += np.bincount(mask.ravel() + 1, minlength=len(shares)) / mask.size / 60
    assert 0.5 < shares[1] < 0.9, shares
    assert 0.01 < shares[0] < 0.2, shares
    assert (shares[2:] > 0.005).all(), shares


def test_a_scene_is_a_function_of_its_index(source):
    # Catches: a draw from a process's own generator, an order of reading that matters, a cache that mixes scenes up.
    again = open_scenes("train" if len(source) > 500 else "val")
    for index in (5, 0, 5, len(source) - 1):
        np.testing.assert_array_equal(np.asarray(source.image(index)), np.asarray(again.image(index)))
    for index in (len(source) - 1, 5, 0):
        np.testing.assert_array_equal(source.entry("mask", index), again.entry("mask", index))
    assert len({source.image(index).tobytes() for index in range(40)}) == 40


def test_splits_share_no_digit_and_no_scene():
    # Catches: a validation scene of digits that were trained on, the same keys for both splits; with the numbers of one
    # scene, a seed that differs from process to process.
    train, validation = open_scenes("train"), open_scenes("validation")
    assert (len(train), len(validation)) == (1000, 200)
    assert train.class_names == validation.class_names
    digits = [{digit.tobytes() for digit in source.identity()[1]} for source in (train, validation)]
    assert not digits[0] & digits[1]
    assert train.image(0).tobytes() != validation.image(0).tobytes()
    assert np.bincount(train.entry("mask", 7).ravel() + 1).tolist() == [340, 2409, 183, 0, 554, 172]
    with pytest.raises(UserError, match="scenes has no split 'test'"):
        open_scenes("test")


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
    paths = tmp_path / "predicted" / "masks" / "003.png", tmp_path / "scenes" / "val" / "images" / "003.png"
    with Image.open(paths[0]) as mask, Image.open(paths[1]) as image:
        assert (mask.mode, mask.size) == ("P", image.size)
    exported = tmp_path / "runs" / "scenes" / "export-timm"
    assert (exported / "head.safetensors").is_file()
    assert "pipeline_tag: image-segmentation\n" in (exported / "README.md").read_text()


@pytest.mark.slow
def test_the_launch_script_ends_with_the_picture(tmp_path):
    # Catches: a recipe that does not learn, a flag of predict that was renamed.
    env = {**os.environ, **ON_CPU, "DS_VIT_PYTHON": sys.executable}
    line = ["bash", ROOT / "launch" / "segmentation.sh", tmp_path / "run", "--max-steps", "24", "--log-interval", "1"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [row["loss"] for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert losses[-1] < losses[0] / 3
    figure, picture, report = done.stdout.splitlines()[-3:]
    assert float(figure.removeprefix("mIoU: ").removesuffix(" %")) > 20.0
    assert all(Path(line.split(": ")[-1]).is_file() for line in (picture, report))
    assert len([*(tmp_path / "run" / "predicted" / "overlays").iterdir()]) == 6
