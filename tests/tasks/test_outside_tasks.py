"""Tasks outside the package: that of docs/own_task.md, clips of frames, and ragged boxes that follow their image.

Each trains with the same loss on one process and on two ranks with ZeRO-1; that of the page also with ZeRO-3, tensor
parallelism, pipeline stages, and resumed on another layout. The page's own commands run as its reader runs them.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from curves import assert_same_curve, read_rows, train_in
from outside_adapters import LoraLinear, add_adapters
from outside_boxes import Boxes, make_boxes
from outside_clips import ClipField, FolderOfClips, make_clips
from pages import run_page
from PIL import Image
from project import ROOT, give_a_clone, run_python
from safetensors.torch import save_file
from vits import shake

from ds_vit import cli
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.field import Sample
from ds_vit.data.fields import ImageField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import ModelSpec, create_model, names_and_shapes
from ds_vit.randomness import mix
from ds_vit.tasks.task import Task
from ds_vit.training.resolve.teacher import open_towers

PAGE = (ROOT / "docs" / "own_task.md").read_text()
MAKE_DISCS, MY_TASK, PROGRAM, _ = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TINY = [
    *("--model", "vit_tiny_patch16_224", "--img-size", "16", "--workers", "0", "--warmup-steps", "0", "--lr", "0.01"),
    *("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "--max-steps", "4"),
]
AUGMENT = AugmentConfig(scale=(0.3, 1.0), vflip=0.5, color_jitter=0.0)


def train(ranks, argv, world=1, batch=8, zero=1, more=()):
    """Train for a few steps, and give the rows of metrics.jsonl."""
    config = ROOT / "ds_configs" / f"cpu_zero{zero}_fp32.json"
    return train_in(ranks, world, [*argv, *TINY, "-b", batch, "--deepspeed_config", config, *more])


def assert_same_evaluations(a, b, name):
    """Assert that two runs evaluated the same samples, with the same metric up to rounding."""
    counted, values = (
        [[row[key] for row in rows if row["kind"] == "eval"] for rows in (a, b)] for key in ("images", name)
    )
    assert counted[0] == counted[1] != []
    assert values[0] == pytest.approx(values[1], rel=1e-5)


# ---- the page's task -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def discs(tmp_path_factory):
    """A folder with what the page's reader saves there, on Python's path; some images have no line in the table."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_task.py").write_text(MY_TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(MAKE_DISCS, "make_discs.py", "exec"), {"__name__": "__main__"})
        lines = (folder / "discs.csv").read_text().splitlines(keepends=True)
        (folder / "discs.csv").write_text("".join(line for line in lines if not re.match(r"\d\d7", line)))
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("my_task", None)


@pytest.fixture(scope="module")
def flags(discs):
    """A short run of the page's task."""
    argv = ["--task", "my_task:Regression", "--table", discs / "discs.csv", "--data-dir", discs / "discs", "--no-aug"]
    argv += ["--train-split", "train[:10%]", "--val-split", "val"]
    return [*argv, "--on-bad-image", "skip", "--max-bad-images", 0.5]


@pytest.fixture(scope="module")
def alone(ranks, flags):
    """Its rows on one process."""
    return train(ranks, flags)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("batch", "zero", "more"),
    [(4, 1, []), (4, 3, []), (8, 1, ["--tp", 2]), (8, 1, ["--pp", 2])],
    ids=["dp 2, ZeRO-1", "dp 2, ZeRO-3", "tp 2", "pp 2"],
)
def test_an_own_input_in_every_layout(ranks, flags, alone, batch, zero, more):
    # Catches: numbers of another image than the one whose place it took, or on another stage than the loss; rows of
    # an evaluation that another rank counted.
    rows = train(ranks, flags, 2, batch, zero, more)
    assert_same_curve(alone, rows, rtol=1e-5)
    assert_same_evaluations(alone, rows, "error")
    assert sum(row["skipped_images"] for row in rows if row["kind"] == "train") > 0


@pytest.mark.slow
def test_it_resumes_on_another_layout(ranks, flags, alone, tmp_path):
    # Catches: a class, a flag or a table that a resumed run does not find again.
    argv = [*flags, "--output", tmp_path / "run", "--epochs", 1]
    train(ranks, argv, 2, 8, 1, ["--pp", 2, "--max-steps", 2, "--checkpoint-interval", 2])
    train(ranks, argv, 2, 4, 3, ["--resume", "auto"])
    assert_same_curve(train(ranks, [*flags, "--epochs", 1]), read_rows(tmp_path / "run"), rtol=1e-5)


@pytest.mark.slow
def test_the_page_to_the_letter(ranks, tmp_path):
    # Catches: a page that lags behind the program.
    give_a_clone(tmp_path)
    for name, text in (("make_discs.py", MAKE_DISCS), ("my_task.py", MY_TASK), ("program.py", PROGRAM)):
        (tmp_path / name).write_text(text)
    run_python(tmp_path, "make_discs.py")
    trained, evaluated, *_ = run_page(ranks, PAGE, tmp_path)
    [promised] = re.findall(r"eval at step 160: mean error ([\d.]+)", PAGE)
    [error] = re.findall(r"eval at step 160: mean error ([\d.]+)", trained)
    assert float(error) == pytest.approx(float(promised), rel=0.02)
    assert "mean error" in evaluated
    assert len(MY_TASK.splitlines()) < 100
    with (tmp_path / "runs/discs/numbers.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 128
    errors = [abs(float(row["radius"]) - float(row["predicted radius"])) for row in rows]
    assert np.mean(errors) < 1.5
    report = (tmp_path / "runs/discs/report.html").read_text()
    assert "Numbers of the first validation images" in report
    run_python(tmp_path, "program.py")
    starts = map(json.loads, (tmp_path / "runs/moved/starts.jsonl").read_text().splitlines())
    assert [(start["step"], start["layout"]["pp"], start["layout"]["zero_stage"]) for start in starts] == [
        *((0, 2, 1), (20, 1, 3))
    ]


# ---- clips -----------------------------------------------------------------------------------------------------------


class CroppedByFrame(ClipField):
    """Planted: each frame has a crop of its own."""

    frames = 0

    def frame(self, image, key):
        self.frames += 1
        return super().frame(image, mix(key, self.frames))


def still_clips(kind, folder):
    """Whether all frames of each clip whose files are the same show the same, as a share of the clips."""
    source = FolderOfClips(folder / "train")
    field = kind(ImageConfig((16, 16)), AUGMENT, 4)
    clips = [field.read(Sample(source, index, key=index)) for index in range(len(source)) if source.target(index)]
    return np.mean([bool((clip == clip[:1]).all()) for clip in clips])


@pytest.mark.slow
def test_clips_of_frames(ranks, tmp_path):
    # Catches: frames that travel, are stacked or embedded in another order or shape on another rank; frames of one clip
    # that are cropped each in another place.
    clips = make_clips(tmp_path / "clips")
    assert still_clips(ClipField, clips) == 1.0
    assert still_clips(CroppedByFrame, clips) < 0.1
    argv = ["--task", "outside_clips:Video", "--data-dir", clips]
    one, two = train(ranks, argv), train(ranks, argv, 2, 4)
    assert_same_curve(one, two, rtol=1e-5)
    assert_same_evaluations(one, two, "loss")


def test_weights_of_clips_are_read_back(ranks, tmp_path, capsys):
    # Catches: a run's own file whose kernels timm's filter cannot read; a traceback where images are expected.
    clips, run = make_clips(tmp_path / "clips"), tmp_path / "run"
    argv = ["--task", "outside_clips:Video", "--data-dir", clips]
    rows = train(ranks, [*argv, "--output", run])
    again = train(ranks, [*argv, "--initial-checkpoint", run / "model.safetensors", "--eval-first"])
    trained, started = ([row["loss"] for row in found if row["kind"] == "eval"] for found in (rows, again))
    assert started[0] == pytest.approx(trained[-1], rel=1e-6)
    assert cli.main(["predict", str(run), str(clips / "val")]) == 2
    assert "--task outside_clips:Video: its model takes something else than images" in capsys.readouterr().err


# ---- boxes -----------------------------------------------------------------------------------------------------------


class Unmoved(Boxes):
    """Planted: boxes that do not follow the flips."""

    def moved(self, boxes, operation):
        return boxes


def bright_in_boxes(kind, folder):
    """The share of the pixels that are bright if, and only if, they lie in a box."""
    source = open_source("", str(folder), "train", labels=False)
    images = ImageField("images", ImageConfig((16, 20)), AUGMENT)
    boxes, agreed = kind(images, 3), []
    for index in range(len(source)):
        sample = Sample(source, index, key=index)
        pixels = torch.as_tensor(images.read(sample)).float().mean(0)
        inside = torch.zeros(pixels.shape, dtype=torch.bool)
        for left, top, right, bottom in (boxes.read(sample) * [20, 16, 20, 16]).round().astype(int):
            inside[top:bottom, left:right] = True
        agreed.append(((pixels > 127) == inside).double().mean())
    return np.mean(agreed)


def test_ragged_boxes(ranks, tmp_path):
    # Catches: boxes of another image, places of another row after padding, boxes that do not follow their image.
    folder = make_boxes(tmp_path / "boxes")
    assert bright_in_boxes(Boxes, folder) > 0.95 > 0.9 > bright_in_boxes(Unmoved, folder)
    argv = ["--task", "outside_boxes:BoxRegression", "--data-dir", folder]
    one, two = train(ranks, argv), train(ranks, argv, 2, 4)
    assert_same_curve(one, two, rtol=1e-5)
    assert_same_evaluations(one, two, "distance")


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "zero", "more"),
    [(4, 3, []), (8, 1, ["--tp", 2]), (8, 3, ["--tp", 2, "--sequence-parallel"]), (8, 1, ["--pp", 2])],
    ids=["dp 2, ZeRO-3", "tp 2", "sequence parallelism, ZeRO-3", "pp 2"],
)
def test_adapters_in_every_layout(ranks, adapted, batch, zero, more):
    # Catches: a small matrix sharded along the wrong axis, or whose gradient is not summed over the ranks; a frozen
    # weight that moves; a base file that is refused because it has no adapters.
    argv, alone = adapted
    assert_same_curve(alone, train(ranks, argv, 2, batch, zero, more), rtol=1e-5)


@pytest.fixture(scope="module")
def adapted(ranks, tmp_path_factory):
    """A short run with adapters that starts from weights without them, and its rows on one process."""
    base = tmp_path_factory.mktemp("base")
    train(ranks, ["--dataset", "digits", "--output", base])
    argv = ["--task", "outside_adapters:Adapted", "--dataset", "digits"]
    argv += ["--initial-checkpoint", base / "model.safetensors"]
    return argv, train(ranks, argv)


@pytest.mark.slow
def test_the_run_of_an_adapter_predicts_and_exports(ranks, adapted, tmp_path, capsys):
    # Catches: tools that build timm's plain model for a run whose task overrides create_model.
    argv, _ = adapted
    run, images = tmp_path / "run", tmp_path / "images"
    train(ranks, [*argv, "--output", run])
    images.mkdir()
    Image.new("RGB", (16, 16), "red").save(images / "red.png")
    assert cli.main(["predict", str(run), str(images)]) == 0
    assert "red.png" in capsys.readouterr().out
    assert cli.main(["export", str(run), "--to", "timm", "--output", str(tmp_path / "timm")]) == 0


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_further_tower_with_adapters(tmp_path, is_fixed):
    # Catches: adapters that a file lacks told as a classifier of other classes; drawn values in a tower that is fixed.
    class Sided(Task):
        tower_flags: ClassVar = {"side": "initial_side"}
        fixed_towers = ("side",) * is_fixed

    spec = ModelSpec("vit_tiny_patch16_224", 10, 16, model_kwargs={"patch_size": 8, "embed_dim": 24, "num_heads": 2})
    whole, side = (create_model(spec, device="cpu") for _ in range(2))
    save_file(side.state_dict(), tmp_path / "side.safetensors")
    whole.side = add_adapters(side, 3)
    config = SimpleNamespace(initial_side=str(tmp_path / "side.safetensors"), eval_only=False)
    start = partial(open_towers, config, Sided, whole, (), None, resumes=False)
    if is_fixed:
        with pytest.raises(UserError, match=r"the side of .* lacks .*lora_a.* by --initial-side"):
            start()
    else:
        assert start()[0]["side"].newly_initialised


def test_folded_adapters():
    # Catches: a plain model for other tools that computes something else, or has other names.
    spec = ModelSpec("vit_tiny_patch16_224", 10, 16, model_kwargs={"patch_size": 8, "embed_dim": 24, "num_heads": 2})
    plain, model = create_model(spec, device="cpu"), add_adapters(create_model(spec, device="cpu"), 3)
    adapters = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for adapter in adapters:
        adapter.init_weights()
    shake(model, seed=0)
    images = torch.randn(2, 3, 16, 16)
    expected = model(images)
    for adapter in adapters:
        adapter.fold()
    assert names_and_shapes(model) == names_and_shapes(plain)
    torch.testing.assert_close(model(images), expected)
