"""DINO with iBOT against one plain process (tests/support/plain_dino.py), its evaluation, files and refusals."""

import contextlib
import functools
import json

import numpy as np
import plain_dino
import pytest
from accidents import spoil_batches
from curves import assert_same_curve, read_rows, train_in, train_rows
from picture_folders import CPU, write_images
from PIL import Image
from plain_dino import DINOV3, PLAIN, assert_same_run, train_ours
from project import ROOT
from runs import resolved, run_quietly

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.training.resolve.record import resolved_flags

RECIPES = ROOT / "launch" / "recipes"


@pytest.fixture(scope="module")
def plain(dino_folder):
    """The plain loop, by its centering and a step that it rejects."""
    return functools.cache(functools.partial(plain_dino.train, dino_folder))


# The centring, and the layout: tests/parallel/test_layouts.py has more.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("centering", "layout"), [("ema", (1, 2, 0, 1)), ("sinkhorn", (3, 1, 3, 4))])
def test_trains_as_one_plain_process(ranks, tmp_path, dino_folder, plain, centering, layout):
    # Catches: a centre that moves before its use, a teacher that lags, schedules off by one, a factor of dp or tp.
    rows = train_ours(ranks, dino_folder, tmp_path / "run", layout, "--centering", centering)
    assert_same_run(plain(centering), rows, tmp_path / "run")


def test_the_plain_loop_learns_and_is_clipped(plain):
    # A loop that stands still would let a wrong factor through.
    for centering in ("ema", "sinkhorn"):
        rows = plain(centering).rows
        assert min(row["grad_norm"] for row in rows) > 3 * plain_dino.CLIP
        assert abs(rows[-1]["loss"] / rows[0]["loss"] - 1) > 0.05


def with_bad_batch(bad):
    """On a rank: this batch, counted from 0, is not finite."""
    spoil_batches([bad])
    return contextlib.nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rejected_step_moves_neither_teacher_nor_centre(ranks, tmp_path, dino_folder, plain, stage):
    """A teacher that is updated on a step that the optimizer did not take; NaN in the centre."""
    bad, words = 6, ("--centering", "ema", "--on-nonfinite", "skip", "--max-steps", 9)
    within = functools.partial(with_bad_batch, bad - 1)
    rows = train_ours(ranks, dino_folder, tmp_path / "run", (2, 1, stage, 1), *words, within=within)
    assert_same_curve(plain("ema", bad).rows[:8], [row for row in rows if row["step"] != bad], rtol=plain_dino.RTOL)


# ---- evaluation and files --------------------------------------------------------------------------------------------


NO_BEST = "no weights are marked as the best: the feature deviation of random weights is the largest; --eval-knn"


@pytest.mark.slow
def test_the_spread_of_features_does_not_choose_the_best_weights(ranks, tmp_path, dino_folder):
    # Catches: a "best" that an untrained model wins; an end that shows no figure at all.
    words = ("--max-steps", 5, "--checkpoint-interval", 2, "--val-fraction", 0.2, "--val-split", "validation")
    words += ("-b", plain_dino.GLOBAL_BATCH)
    for flags, has_best in (((), False), (("--eval-metric", "feature_std"), True)):
        output = tmp_path / f"run-{has_best}"
        argv = plain_dino.words_of(dino_folder, 1, output, *words, *flags)
        [(code, out, _)] = ranks.run(1, run_quietly, argv)
        assert code == 0
        assert (NO_BEST in out) == ("the newest 2 stay" in out) == (not has_best)
        assert ("the newest 2 and the best stay" in out) == has_best
        assert ("at most 4 at a time;" in out) == has_best
        assert ("at most 3 at a time;" in out) == (not has_best)
        assert (output / "best.safetensors").exists() == (output / "checkpoints" / "best").exists() == has_best
        summary = json.loads((output / "summary.json").read_text())
        assert any(key.startswith("best_") for key in summary) == has_best
        loss = train_rows(read_rows(output))[-1]["loss"]
        assert (f"│ training loss │ {loss:.5f} " in out) == (not has_best)
    knn = plain_dino.words_of(dino_folder, 1, tmp_path / "knn", *words, "--eval-knn", 5)
    notes = resolved(knn).notes
    assert not any("no weights" in note for note in notes)
    assert any("of one class, 'all': every prediction is correct" in note for note in notes)


def test_the_weights_that_training_starts_from_are_rated_first(ranks, tmp_path, dino_folder):
    # Catches: figures of random weights, or of those after a step; a step without a checkpoint that is the best.
    output, weights = tmp_path / "run", dino_folder / f"{PLAIN.model}.safetensors"
    words = ("-b", plain_dino.GLOBAL_BATCH, "--val-fraction", 0.2, "--val-split", "validation", "--max-steps", 2)
    words += ("--eval-first", "--eval-metric", "feature_std")
    rows = train_in(ranks, 1, plain_dino.words_of(dino_folder, 1, output, *words))
    first, last = (row for row in rows if row["kind"] == "eval")
    recipe = ["--recipe", output / "config.yaml", "--output", tmp_path / "only"]
    [only] = train_in(ranks, 1, [*recipe, "--eval-only", "--initial-checkpoint", weights])
    assert (first["step"], last["step"]) == (0, 2)
    assert first["rankme"] == only["rankme"] != last["rankme"]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["best_feature_std"] == last["feature_std"] < first["feature_std"]


@pytest.mark.slow
def test_patches_of_training_images_are_drawn_without_a_validation_split(ranks, tmp_path, dino_folder):
    # Catches: a report without the pictures that show whether the features say anything; images that depend on the
    # layout; similarities of the last evaluation only.
    drawn, similar = [], []
    for layout in ((1, 1, 0, 1), (2, 1, 3, 1)):
        output = tmp_path / str(layout[0])
        train_ours(ranks, dino_folder, output, layout, "--centering", "ema", "--max-steps", 6, "--eval-interval", 1)
        page = (output / "report.html").read_text()
        assert "principal components of their patch tokens" in page
        assert "the cosine of each patch token of the teacher" in page
        assert all(f"step {step}" in page for step in (5, 6))
        drawn.append(np.asarray(Image.open(output / "patch-pca.png")).astype(int))
        similar.append(np.asarray(Image.open(output / "patch-similarity.png")).astype(int))
    assert drawn[0].shape == (2 * 116 - 4, 8 * 116 - 4, 3)
    assert np.abs(drawn[0] - drawn[1]).max() <= 1
    assert similar[0].shape == (3 * 112, 8 * 112, 3)
    assert np.abs(similar[0] - similar[1]).max() <= 1
    centre = similar[0][112 + 2 * 28 + 14, 2 * 28 + 14 :: 112]
    assert (centre == [253, 231, 37]).all(), "the centre patch is like itself"
    assert np.abs(similar[0][112:224] - similar[0][224:]).max() > 1, "the teacher has moved"


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = [
    (("--model-kwargs", "global_pool=avg"), "reads the class token, and 'vit_tiny_patch16_224' has global_pool 'avg'"),
    (("--model-kwargs", "patch_drop_rate=0.2"), "masks patches and predicts them"),
    (
        ("--local-crops-size", 6),
        "images of 6 pixels are no multiple of the patch size 4 .*; the nearest for --local-crops-size is 8",
    ),
    (("--model-ema",), "--model-ema: the teacher of --task dino already is such an average"),
    (("--pp", 2), "--task dino cannot be split into pipeline stages"),
    (("--tp", 2, "--class-parallel", "on"), "--class-parallel has no effect with --task dino"),
    (("--tp", 2, "--prototypes", 49), "--prototypes 49 cannot be split over tp 2"),
    (("--mixup", 0.8), "--mixup has no effect with --task dino: the teacher gives the targets"),
    (("--aa", "rand-m9-mstd0.5-inc1"), "--aa has no effect with --task dino: its crops have DINO's own augmentation"),
    (("-b", 1, "--grad-accum-steps", 1), "--koleo-weight needs a neighbour in the global batch, which has 1 sample"),
    (("--smoothing", 0.2), "--smoothing has no effect with --task dino"),
    (("--train-img-sizes", 8, 16), "--train-img-sizes has no effect with --task dino: its crops are of two sizes"),
]
VIT = ("--model", "vit_tiny_patch16_224")
REFUSED_WITH_DINOV3 = [
    (VIT, r"change DINOv3's rotary positions, and 'vit_tiny_patch16_224' has none; take a name with dinov3"),
    (("--rope-jitter-coords", 1), "--rope-jitter-coords must be above 1"),
    (("--ibot-weight", 0), "--untie-cls-and-patch-norms has no effect without --ibot-weight"),
    (("--local-crops-number", 0), "--untie-global-and-local-cls-norm has no effect without --local-crops-number"),
    (("--local-crops-size", 16), "by their size, and both kinds have 16 pixels; give another --local-crops-size"),
    (
        ("--freeze-backbone-epochs", 0.005),
        "--freeze-backbone-epochs 0.005 is less than half a step of the 60 of an epoch",
    ),
    (("--model-kwargs", "rope_jitter_coords=1.2"), "draws random RoPE coordinates once per batch"),
]


@pytest.mark.parametrize(
    ("variant", "words", "message"),
    [*((PLAIN, *row) for row in REFUSED), *((DINOV3, *row) for row in REFUSED_WITH_DINOV3)],
    ids=lambda value: getattr(value, "model", str(value)),
)
def test_what_has_no_meaning_is_refused(tmp_path, dino_folder, variant, words, message):
    argv = plain_dino.words_of(dino_folder, 1, tmp_path / "run", "-b", 4, *words, variant=variant)
    if words[0] == "--model-kwargs":
        argv += [f"{name}={value}" for name, value in variant.kwargs.items()]
    with pytest.raises(UserError, match=message):
        resolved(argv, world=2 if words[0] in ("--pp", "--tp") else 1)


# ---- images without classes ------------------------------------------------------------------------------------------

TREES = {
    "flat": ("{}.png", None),
    "nested": ("{}/01/x.png", None),
    "flat splits": ("train/{}.png", "val/{}.png"),
    "other classes": ("train/{}/x.png", "val/other/{}.png"),
    "classes": ("train/{}/x.png", "val/{}/y.png"),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("task", ["dino", "mae"])
def test_a_tree_of_images_needs_no_flag(tmp_path, tree, task):
    """A refusal of images without class folders, which are these tasks' usual input, or k-NN without classes."""
    for split in filter(None, TREES[tree]):
        write_images(tmp_path, *(split.format(number) for number in range(24)))
    write_images(tmp_path, "._0.png", ".cache/0.png")
    recipe = ("--recipe", RECIPES / "dinov2_vit_s14_own_data.yaml") if task == "dino" else ("--task", "mae")
    words = [*recipe, "--deepspeed_config", CPU, "--data-dir", tmp_path, "-b", 2, "--eval-knn", 20]
    words += ["--model", "vit_tiny_patch16_224", "--img-size", 28, "--workers", 0, "--output", tmp_path / "run"]
    words += ["--model-kwargs", "patch_size=14", "embed_dim=24", "depth=1", "num_heads=2"]
    words += ["--local-crops-size", 14] if task == "dino" else []
    run = resolved(words)
    has_classes, evaluates = tree == "classes", TREES[tree][1] is not None
    assert (len(run.data.train_source), run.data.val_source is not None) == (24, evaluates)
    assert bool(run.model.task.evaluators) == has_classes
    assert any("features are not evaluated" in note for note in run.notes) == (not has_classes)
    assert any("nothing is evaluated" in note for note in run.notes) == (not evaluates)
    assert resolved_flags(run)["eval_knn"] == 20 * has_classes
