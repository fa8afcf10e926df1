"""What tells a run of DINO that learns from one whose features collapse: figures, pictures and warnings."""

import json
from unittest import mock

import numpy as np
import plain_dino
import pytest
import torch
from curves import read_rows, train_main
from PIL import Image
from runs import run_quietly

from ds_vit.config.run_folder import RunFolder
from ds_vit.tasks.dino.metrics import FeatureSpread, collapse_concerns
from ds_vit.tasks.dino.similarity import MOST_STEPS, add_step, centre_similarities
from ds_vit.tasks.panels import viridis
from ds_vit.training.output import move_unsaved_run

WIDTH = 24


def expected_spread(features):
    """The figures of features [N, D] by numpy, from the papers' formulas."""
    features = features.astype(np.float64)
    singular = np.linalg.svd(features, compute_uv=False)
    shares = singular / singular.sum() + 1e-7
    rows = features / np.linalg.norm(features, axis=1, keepdims=True)
    deviation = rows.std(0).mean() * np.sqrt(features.shape[1])
    return {"feature_std": deviation, "rankme": np.exp(-(shares * np.log(shares)).sum()), "images": len(features)}


def spread_of(features, batch=5):
    """The figures of `FeatureSpread`, over batches the last of which is filled up with rows that do not count."""
    metrics = FeatureSpread(features.shape[1], torch.device("cpu"))
    for first in range(0, len(features), batch):
        rows = features[first : first + batch]
        filled = torch.full((batch, features.shape[1]), float("nan"))
        filled[: len(rows)] = rows
        metrics.update(filled, {"valid": torch.arange(batch) < len(rows)})
    return metrics.compute()


@pytest.mark.parametrize("images", [7, WIDTH, 101])
@pytest.mark.parametrize("rank", [1, 3, WIDTH])
def test_the_spread_is_that_of_numpy(images, rank):
    # Catches: fewer images than features, the roots of rounding, padding that counts, rows normalised for RankMe.
    generator = torch.Generator().manual_seed(images)
    features = (
        torch.randn(images, rank, generator=generator).double()
        @ torch.randn(rank, WIDTH, generator=generator).double()
        * torch.linspace(0.1, 3.0, WIDTH)
    )
    assert spread_of(features.float()) == pytest.approx(expected_spread(features.float().numpy()), rel=1e-4)
    metrics = FeatureSpread(WIDTH, torch.device("cpu"))
    metrics.update(features, {"valid": torch.ones(images, dtype=torch.bool)})
    assert metrics.compute() == pytest.approx(expected_spread(features.numpy()), rel=1e-12)
    assert metrics.compute()["rankme"] <= min(images, rank) * (1 + 1e-4)


def test_features_without_a_spread():
    # Catches: a run that ends at an evaluation whose features are not finite.
    same = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0)).expand(9, -1)
    assert spread_of(same) == pytest.approx({"feature_std": 0.0, "rankme": 1.0, "images": 9}, rel=1e-4, abs=1e-6)
    for value in (float("nan"), float("inf"), 0.0):
        assert np.isnan(spread_of(torch.full((3, WIDTH), value))["rankme"])


def test_similarities_are_cosines_with_the_centre_patch():
    # Catches: the class token or a corner in place of the centre, rows taken for columns, tokens that are not normed.
    tokens = 3.0 + torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)).double()
    normed = (tokens - tokens.mean(-1, keepdim=True)).numpy()
    expected = [
        [
            [row @ of_image[1, 2] / np.linalg.norm(row) / np.linalg.norm(of_image[1, 2]) for row in line]
            for line in of_image
        ]
        for of_image in normed
    ]
    np.testing.assert_allclose(centre_similarities(tokens), expected, atol=1e-4)


def drawn_at(path, step, images=2):
    """Add a step with some images, whose similarity is step / 1000; the colours of the sheet's tiles."""
    add_step(path, step, torch.full((images, 3, 8, 8), 0.5), torch.full((images, 2, 2), step / 1000))
    return np.asarray(Image.open(path))[56::112, 56::112]


def test_a_sheet_keeps_the_maps_of_several_steps(tmp_path):
    # Catches: only the newest maps, steps that a resumed run repeats, a sheet that grows with each evaluation, a
    # separate scale for each step.
    path = tmp_path / "sheet.png"

    def steps():
        return [int(text[5:]) for text in json.loads(path.with_suffix(".json").read_text())["captions"][2::2]]

    path.write_bytes(b"no picture")
    for step in (100, 200, 300):
        colours = drawn_at(path, step)
    assert steps() == [100, 200, 300]
    assert (colours[0] == 128).all()
    expected = viridis(np.array([0.1, 0.2, 0.3]))
    assert (colours[1:] == expected[:, None]).all()
    drawn_at(path, 200)
    assert steps() == [100, 200]
    for step in range(300, 1001, 100):
        colours = drawn_at(path, step)
    found = steps()
    assert len(found) == MOST_STEPS
    assert (found[0], found[-1]) == (100, 1000)
    assert max(np.diff(found)) <= 400
    assert (colours[1:] == viridis(np.array(found) / 1000)[:, None]).all()
    for images in (4, 1, 2):  # another validation split
        assert drawn_at(path, 1100, images).shape == (2, images, 3)


def test_a_new_run_does_not_continue_the_sheet_of_one_that_saved_nothing(tmp_path):
    # Catches: maps of other weights above those of this run.
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("")
    drawn_at(folder.picture("patch-similarity"), 100)
    assert "holds a run that saved nothing" in move_unsaved_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["unsaved-1"]


def evaluate_on_rank(argv, folder):
    """On a rank: train, and write the features that this rank counts to a file."""
    counted, count = [], FeatureSpread.update

    def update(self, outputs, batch):
        counted.append(outputs[batch["valid"]].numpy())
        count(self, outputs, batch)

    with mock.patch.object(FeatureSpread, "update", update):
        code = train_main(argv)
    np.save(folder / f"{torch.distributed.get_rank()}.npy", np.concatenate(counted or [np.empty((0, WIDTH))]))
    return code, len(counted) * 7 - sum(map(len, counted))


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_has_the_spread_of_the_gathered_features(ranks, tmp_path, dino_folder, size):
    """Images counted twice, or not at all, where a last batch is not full; the Gram matrix of one rank."""
    words = ("--val-fraction", 0.2, "--val-split", "validation", "--validation-batch-size", 7, "--max-steps", 1)
    argv = plain_dino.words_of(dino_folder, 1, tmp_path / "run", *words, "-b", plain_dino.GLOBAL_BATCH // size)
    done = ranks.run(size, evaluate_on_rank, argv, tmp_path)
    assert [code for code, _ in done] == [0] * size
    assert done[0][1] == 1, "the first rank's last batch is one short of full"
    features = np.concatenate([np.load(tmp_path / f"{rank}.npy") for rank in range(size)])
    [row] = [row for row in read_rows(tmp_path / "run") if row["kind"] == "eval"]
    expected = expected_spread(features)
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-10)
    assert row["images"] == 48
    assert 2 < row["rankme"] < WIDTH


# ---- warnings --------------------------------------------------------------------------------------------------------


def test_bounds_of_collapse():
    # Catches: a warning of random weights, whose class tokens LayerScale makes alike; of three images; of NaN.
    def concerns(step=40, epoch=40, width=384, **figures):
        return [*collapse_concerns({"feature_std": 0.5, **figures}, width, step, epoch)]

    assert concerns() == concerns(rankme=5.0, images=500) == concerns(rankme=3.0, images=24) == []
    assert concerns(feature_std=0.149) == ["feature_std"]
    assert concerns(feature_std=0.1, rankme=4.9, images=500) == ["feature_std", "rankme"]
    assert concerns(rankme=2.9, images=24) == concerns(rankme=2.9, images=500, width=24) == ["rankme"]
    assert concerns(feature_std=0.0, step=39) == concerns(feature_std=0.0, step=999, epoch=5000) == []
    assert concerns(feature_std=0.0, step=1000, epoch=5000) == ["feature_std"]
    assert concerns(feature_std=float("nan"), rankme=float("nan"), images=500) == []
    assert collapse_concerns({}, 384, 40, 40) == {}


def train_with_bounds(argv, bounds):
    """On a rank: what a run prints, with other bounds."""
    with mock.patch.multiple("ds_vit.tasks.dino.metrics", **bounds):
        return run_quietly(argv)


@pytest.mark.slow
def test_a_run_warns_once(ranks, tmp_path, dino_folder):
    # Catches: a warning in each row; one before the first epoch is over; evaluations or training that never warn.
    words = ("--val-fraction", 0.2, "--val-split", "validation", "-b", plain_dino.GLOBAL_BATCH, "--max-steps", 12)
    bounds = {"LEAST_DEVIATION": 50.0, "LEAST_RANKME": 50.0, "_SHARE_OF_RANKME": 50.0}
    argv = plain_dino.words_of(dino_folder, 1, tmp_path / "run", *words, "--eval-interval", 1)
    [(code, out, _)] = ranks.run(1, train_with_bounds, argv, bounds)
    assert code == 0
    warnings = [line for line in out.splitlines() if "may have collapsed" in line]
    assert [line.split("is ")[0] for line in warnings] == [
        "WARNING: at step 4 the feature deviation of the teacher ",
        "WARNING: at step 4 the RankMe of the teacher ",
    ], out
