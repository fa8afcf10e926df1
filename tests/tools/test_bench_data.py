"""`ds-vit bench data`: where the loader's time goes on the user's own images."""

from __future__ import annotations

import json

import pytest
from picture_folders import CPU, smooth_photo
from runs import run_quietly

from ds_vit.cli import main
from ds_vit.data.augment.crops import MultiCrop
from ds_vit.tasks.dino.fields import CropField
from ds_vit.tools import bench_data

WORDS = ["--deepspeed_config", CPU, "--model", "test_vit", "--val-split", "", "-b", "4", "--max-steps", "9"]


def bench(*words):
    """The command's exit code and what it prints."""
    return run_quietly(["bench", "data", *map(str, words)], main=main)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve photographs of 400 x 300 in two classes."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        path = root / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        smooth_photo(300, 400, seed=number).save(path)
    return root


def test_stages_and_remedies(photos, monkeypatch):
    """Would catch a stage that is not timed, flags that do not reach the loader, and advice to do what is done."""
    monkeypatch.setattr(bench_data, "_TRIES", 1)
    monkeypatch.setattr(bench_data.os, "sched_getaffinity", lambda process: range(4))
    code, out, _ = bench("--json", "--images", 8, *WORDS, "--data-dir", photos, "--workers", 1)
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert (result["images"], result["workers"], result["ranks"]) == (8, 1, 1)
    assert list(result["seconds"]) == ["read", "decode", "augment", "collate", "transfer"]
    # Measured; augment and collate are differences of noisy times, and may be 0.
    assert all(result["seconds"][stage] > 0 for stage in ("read", "decode", "transfer"))
    assert result["images_per_second"] > 0
    assert result["would_give"]["--workers 4"] == pytest.approx(4 * result["images_per_second"])
    words = ["--json", "--images", 8, *WORDS, "--data-dir", photos, "--workers", 0, "--augment-on", "device"]
    there = json.loads(bench(*words)[1].splitlines()[-1])
    assert there["seconds"]["augment on device"] > 0
    code, out, _ = bench("--json", "--images", 8, *WORDS, "--data-dir", photos, "--workers", 4, "--no-aug")
    again = json.loads(out.splitlines()[-1])
    assert again["would_give"] == {}


def test_all_crops_of_an_image_are_timed(photos, monkeypatch):
    """Would catch a benchmark of one crop for a task that trains on several."""
    monkeypatch.setattr(bench_data, "_TRIES", 1)
    local, decoded = [], []
    finish, transform = CropField.to_device, MultiCrop.decoded
    monkeypatch.setattr(CropField, "to_device", lambda *a: local.append(finish(*a)) or local[-1])
    monkeypatch.setattr(MultiCrop, "decoded", lambda self, *a: decoded.append(a[0]) or transform(self, *a))
    words = ["--json", "--images", 8, *WORDS, "--data-dir", photos, "--workers", 0, "--augment-on", "device"]
    words += ["--task", "dino", "--local-crops-size", 32, "--local-crops-number", 3]
    seconds = json.loads(bench(*words)[1].splitlines()[-1])["seconds"]
    assert {"decode", "augment", "augment on device", "transfer"} <= seconds.keys()
    # In transfer and in the loader as a whole, 8 images each; decoded to time it, to augment, and by the loader.
    of_local = [views for views in local if views.shape[1:] == (3, 3, 32, 32)]
    assert len(local) == 2 * len(of_local)
    assert len(of_local) >= 4
    assert len(decoded) >= 4 * 8


def test_a_bottleneck_is_named():
    """Would catch a sentence about another stage than the slowest one."""
    seconds = {"read": 1e-4, "decode": 3e-3, "augment": 5e-4, "collate": 0.0, "transfer": 1e-4}
    said = bench_data._bottleneck(seconds, 500.0, 2)
    assert "decoding is the bottleneck, 83% of the loader's time: --workers 2 gives 500 images/s; try --decode" in said
    assert bench_data._bottleneck(seconds, 500.0, 2, ["--decode fast"]).endswith(
        "; try smaller files: ds-vit shards --resize"
    )
    there = bench_data._bottleneck({**seconds, "augment on device": 2e-3}, 500.0, 2)
    assert there == "augmentation on the device is the bottleneck: it can do 500 images/s"
    assert "way to the device" in bench_data._bottleneck({**seconds, "transfer": 2e-3}, 500.0, 8)


def test_images_without_files(monkeypatch):
    """Would catch a data set without encoded bytes that ends in a traceback, and a table that cannot be printed."""
    monkeypatch.setattr(bench_data, "_TRIES", 1)
    words = [word for word in WORDS if word not in ("--val-split", "")]
    code, out, err = bench("--images", 8, *words, "--dataset", "digits", "--workers", 0)
    assert code == 0, err
    assert "the training process itself" in out
    code, _, err = bench("--images", 0, *WORDS)
    assert code == 2
    assert "--images: must be at least 1, not 0" in err
