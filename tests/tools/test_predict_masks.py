"""`ds-vit predict` and `export` of segmentation runs, compared with timm and torch."""

from __future__ import annotations

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from picture_folders import made, smooth_photo
from PIL import Image
from plain_segmenter import CLASSES, KWARGS, NAME, SIDE, classes_of, segmenter
from safetensors.torch import load_file, save_file

from ds_vit import cli
from ds_vit.api import export, predict
from ds_vit.tasks.segmentation.predictions import mask_picture, write_labels
from ds_vit.tools.predict import embed
from ds_vit.weights.files import open_prefixed

VALUES, NAMES = [3, 10, 200, 7, 0], ["sky, clear", "Größe", "road", "tree", "sea"]
COLOURS = [(0, 128, 255), (200, 10, 10), (90, 90, 90), (255, 255, 0), (0, 255, 90)]
SIZES = {"wide.jpg": (40, 90), "tall.png": (70, 33)}  # height, width


@torch.no_grad()
def random_run(folder, head="linear", labels=True, **more):
    """What a run with random weights leaves; its head's bias makes all classes about as frequent."""
    model, generator = segmenter(head), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(std=0.3, generator=generator)
    last = model.seg_head if head == "linear" else model.seg_head[-1]
    last.bias -= model(torch.randn(8, 3, SIDE, SIDE, generator=generator)).mean((0, 2, 3))
    state = model.state_dict()
    of_head = {name: state.pop(name) for name in [*state] if name.startswith("seg_head.")}
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
    save_file(of_head, folder / "seg_head.safetensors")
    recipe = {"task": "segmentation", "seg_head": head, "model": NAME, "model_kwargs": KWARGS, "num_classes": CLASSES}
    recipe |= {"img_size": SIDE, "mean": [0.5] * 3, "std": [0.5] * 3, "deepspeed_config": "deepspeed.json", **more}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "classes.json").write_text(json.dumps(NAMES))
    if labels:
        entries = {"values": VALUES, "colours": COLOURS}
        write_labels(folder, SimpleNamespace(class_names=NAMES, entry=lambda name, index: entries[name]))
    return folder


def write_photos(folder):
    for number, (name, size) in enumerate(SIZES.items()):
        smooth_photo(*size, seed=number).save(made(folder / name))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("masks") / "run")


@torch.no_grad()
def test_masks_have_the_images_sizes_and_the_values_of_the_data(run, tmp_path, capsys):
    """Class numbers in place of the data's values, a mask of the model's size, other windows than evaluation's; a bad
    file whose neighbour loses its mask."""
    photos, output = tmp_path / "photos", tmp_path / "out"
    write_photos(photos / "deeper")
    (photos / "deeper" / "bad.jpg").write_text("not a picture")
    assert cli.main(["predict", str(run), str(photos), "--output", str(output), "--slide-stride", "5"]) == 65
    out, err = capsys.readouterr()
    rows = {row["image"]: row for row in csv.DictReader(io.StringIO(out))}
    assert f"{output}: 2 images" in err
    assert "bad.jpg: cannot be read" in err
    assert len([*output.glob("*/deeper/*")]) == 4
    plain = segmenter()
    plain.load_state_dict(load_file(run / "model.safetensors") | load_file(run / "seg_head.safetensors"))
    for name, size in SIZES.items():
        path = photos / "deeper" / name
        classes = classes_of(plain, Image.open(path), stride=5)
        mask = Image.open((output / "masks" / "deeper" / name).with_suffix(".png"))
        assert (mask.mode, np.asarray(mask).shape) == ("P", size)
        agree = np.asarray(mask) == np.array(VALUES)[classes]
        assert agree.mean() > 0.999, "rounding may turn a tie"
        painted = np.asarray(mask.convert("RGB"))
        assert (painted[agree] == np.array(COLOURS)[classes[agree]]).all()
        assert len(np.unique(classes)) > 1, "the random weights give several classes"
        row = rows[str(path)]
        assert list(row) == ["image", "class1", "share1", "class2", "share2", "class3", "share3"]
        largest = np.bincount(classes.flatten(), minlength=CLASSES)
        assert NAMES.index(row["class1"]) == largest.argmax()
        assert float(row["share1"]) == pytest.approx(largest.max() / classes.size, abs=1e-3)
        overlay = np.asarray(Image.open((output / "overlays" / "deeper" / name).with_suffix(".jpg")), dtype=float)
        photo = np.asarray(Image.open(path), dtype=float)
        assert np.abs(overlay - (painted + photo) / 2).mean() < 12 < 24 < np.abs(overlay - photo).mean()  # JPEG


def test_from_python_and_without_a_table_of_labels(run, tmp_path, capsys, monkeypatch):
    """Values of the file in place of class numbers; a run of which nothing says the colours; the default folder."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path)
    found = predict(run, [str(tmp_path / name) for name in SIZES])
    assert found["by"] == "pixels"
    assert [row["mask"].shape for row in found["images"]] == [*SIZES.values()]
    bare = random_run(tmp_path / "bare", labels=False, reduce_zero_label=True)
    assert cli.main(["predict", str(bare), "tall.png", "-k", "2"]) == 0
    assert "share" in capsys.readouterr().out
    mask = np.asarray(Image.open("predictions/masks/tall.png"))
    assert np.array_equal(mask, found["images"][1]["mask"] + 1)


def test_masks_hold_large_values_exactly():
    """A value of 300 that is 44 in a file of 8 bits."""
    classes, colours = np.array([[0, 1], [2, 2]]), np.array(COLOURS, dtype=np.uint8)
    assert np.asarray(mask_picture(classes, np.array([300, 0, 65535]), colours)).tolist() == [[300, 0], [65535, 65535]]


REFUSALS = [
    (["--slide-stride", "17"], "--slide-stride 17 must be at most 16"),
    (["--crop-pct", "0.9"], "--crop-pct has no effect with --task segmentation: windows slide over whole images"),
    (["--output", "table.csv"], "name the folder of the masks"),
    (["--output", "full"], "full exists already; remove it"),
    (["wide.png"], "wide.jpg and wide.png would have one mask, wide.png"),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS)
def test_refusals(run, tmp_path, capsys, monkeypatch, words, message):
    """A flag that is ignored, masks of another run overwritten, a mask that overwrites another's."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path)
    (tmp_path / "wide.png").write_bytes((tmp_path / "tall.png").read_bytes())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    assert cli.main(["predict", str(run), "wide.jpg", *words]) == 2
    assert message in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("head", ["linear", "conv"])
def test_timm_reads_the_exported_backbone(tmp_path, head):
    """A folder that timm refuses, a head whose file does not fit it; features of other weights or pixels; a head
    that is taken for a part of the backbone."""
    run = random_run(tmp_path / "run", head)
    found = export(run, "timm")
    assert found.largest < 1e-6
    model = timm.create_model(f"local-dir:{found.folder}", pretrained=True)
    written = load_file(run / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())
    assert open_prefixed(found.folder / "model.safetensors")[0].keys() == written.keys()
    about = {"kind": head, "grid": [4, 4], "num_classes": CLASSES, "classes": NAMES, "img_size": [SIDE, SIDE]}
    assert json.loads((found.folder / "head.json").read_text()) == about
    write_photos(tmp_path)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    expected = model.eval()(transform(Image.open(tmp_path / "wide.jpg"))[None])
    features = embed(run, [str(tmp_path / "wide.jpg")])["features"]
    np.testing.assert_allclose(features, expected.numpy(), atol=1e-4)
