"""`ds-vit predict`, `embed` and `export` of segmentation runs, held against timm and torch alone."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import timm
import torch
import yaml
from picture_folders import smooth_photo
from PIL import Image
from plain_segmenter import CLASSES, KWARGS, NAME, SIDE, Plain, classes_of
from safetensors.torch import load_file, save_file

from ds_vit import cli
from ds_vit.api import export, predict
from ds_vit.data.sources.masks import find_labels
from ds_vit.tasks.segmentation.predictions import mask_picture, write_labels
from ds_vit.tasks.segmentation.scenes import open_scenes
from ds_vit.tools.predict import embed

VALUES, NAMES = [3, 10, 200, 7, 0], ["sky, clear", "Größe", "road", "tree", "sea"]
COLOURS = [(0, 128, 255), (200, 10, 10), (90, 90, 90), (255, 255, 0), (0, 255, 90)]
SIZES = {"wide.jpg": (40, 90), "tall.png": (70, 33)}  # height, width


@torch.no_grad()
def random_run(folder, head="linear", labels=True, **more):
    """What a run with random weights leaves; its head's bias makes all classes about as frequent."""
    model, generator = Plain(head), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data.normal_(std=0.3, generator=generator)
    last = model.seg_head if head == "linear" else model.seg_head[-1]
    last.bias -= model(torch.randn(8, 3, SIDE, SIDE, generator=generator)).mean((0, 2, 3))
    state = model.named_values()
    of_head = {name: state.pop(name) for name in [*state] if name.startswith("seg_head.")}
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors")
    save_file(of_head, folder / "seg_head.safetensors")
    recipe = {"task": "segmentation", "seg_head": head, "model": NAME, "model_kwargs": KWARGS, "num_classes": CLASSES}
    recipe |= {"img_size": SIDE, "mean": [0.5] * 3, "std": [0.5] * 3, "deepspeed_config": "deepspeed.json", **more}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "classes.json").write_text(json.dumps(NAMES))
    if labels:
        lines = [f'{value},"{name}",#{bytes(at).hex()}' for value, name, at in zip(VALUES, NAMES, COLOURS, strict=True)]
        (folder / "labels.csv").write_text("\n".join(["index,name,colour", *lines]))
    return folder


def write_photos(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, size) in enumerate(SIZES.items()):
        smooth_photo(*size, seed=number).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return random_run(tmp_path_factory.mktemp("masks") / "run")


def plain_model(run):
    """The run's weights in modules of timm's and torch's."""
    files = [load_file(run / f"{name}.safetensors") for name in ("model", "seg_head")]
    return Plain().load(files[0] | files[1]).eval()


@torch.no_grad()
@pytest.mark.parametrize("stride", [None, 0])
def test_masks_have_the_images_sizes_and_the_values_of_the_data(run, tmp_path, capsys, stride):
    """Class numbers in place of the data's values, a mask of the model's size, other windows than evaluation's; a bad
    file whose neighbour loses its mask."""
    photos, output = write_photos(tmp_path / "photos" / "deeper").parent, tmp_path / "out"
    (photos / "deeper" / "bad.jpg").write_text("not a picture")
    words = [] if stride is None else ["--slide-stride", str(stride)]
    assert cli.main(["predict", str(run), str(photos), "--output", str(output), *words]) == 65
    out, err = capsys.readouterr()
    rows = {row["image"]: row for row in csv.DictReader(io.StringIO(out))}
    assert f"{output}: 2 images" in err
    assert "bad.jpg: cannot be read" in err
    assert len([*output.glob("*/deeper/*")]) == 4
    seen = set()
    for name, size in SIZES.items():
        path = photos / "deeper" / name
        classes = classes_of(plain_model(run), Image.open(path), stride=stride)
        mask = Image.open((output / "masks" / "deeper" / name).with_suffix(".png"))
        assert (mask.mode, np.asarray(mask).shape) == ("P", size)
        agree = np.asarray(mask) == np.array(VALUES)[classes]
        assert agree.mean() > 0.999, "rounding may turn a tie"
        painted = np.asarray(mask.convert("RGB"))
        assert (painted[agree] == np.array(COLOURS)[classes[agree]]).all()
        seen |= {*np.unique(classes)}
        row = rows[str(path)]
        assert list(row) == ["image", "class1", "share1", "class2", "share2", "class3", "share3"]
        largest = np.bincount(classes.flatten(), minlength=CLASSES)
        assert NAMES.index(row["class1"]) == largest.argmax()
        assert float(row["share1"]) == pytest.approx(largest.max() / classes.size, abs=1e-3)
        overlay = np.asarray(Image.open((output / "overlays" / "deeper" / name).with_suffix(".jpg")), dtype=float)
        photo = np.asarray(Image.open(path), dtype=float)
        assert np.abs(overlay - (painted + photo) / 2).mean() < 12 < 24 < np.abs(overlay - photo).mean()  # JPEG
    assert len(seen) > 1, "the random weights give several classes"


def test_from_python_and_without_a_table_of_labels(run, tmp_path, capsys, monkeypatch):
    """Values of the file in place of class numbers; a run of which nothing says the colours; the default folder."""
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path)
    found = predict(run, [str(tmp_path / name) for name in SIZES])
    assert found["by"] == "pixels"
    for row, size in zip(found["images"], SIZES.values(), strict=True):
        assert row["mask"].shape == size
        for one in row["classes"]:
            assert one["share"] == pytest.approx((row["mask"] == one["number"]).mean())
    bare = random_run(tmp_path / "bare", labels=False, reduce_zero_label=True)
    assert cli.main(["predict", str(bare), "tall.png", "-k", "2"]) == 0
    assert "probability" not in (table := capsys.readouterr().out)
    assert "share" in table
    mask = np.asarray(Image.open("predictions/masks/tall.png"))
    assert np.array_equal(mask, found["images"][1]["mask"] + 1)


def test_masks_hold_large_values_exactly():
    """A value of 300 that is 44 in a file of 8 bits."""
    classes, colours = np.array([[0, 1], [2, 2]]), np.array(COLOURS, dtype=np.uint8)
    assert np.asarray(mask_picture(classes, np.array([300, 0, 65535]), colours)).tolist() == [[300, 0], [65535, 65535]]


def test_a_run_keeps_the_labels_of_its_data(tmp_path):
    """Names that lose a comma, colours of another order, the values of other classes."""
    source = open_scenes("val")
    write_labels(tmp_path, source)
    labels = find_labels(str(tmp_path), None, 255, False)
    assert labels.names == source.class_names
    assert np.array_equal(labels.values, source.entry("values", 0))
    assert np.array_equal(labels.colours, source.entry("colours", 0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bce-loss"], "--bce-loss has no effect"),
        (["--workers", "1"], "--workers has no effect"),
        (["--crop-pct", "0.9"], "windows slide over whole images"),
        (["--top-k", "6"], "--top-k 6 must lie between 1 and the model's 5 classes"),
        (["--slide-stride", "17"], "--slide-stride 17 must be at most 16"),
        (["--output", "table.csv"], "name the folder of the masks"),
        (["--output", "full"], "full exists already; remove it"),
        (["wide.png"], "wide.jpg and wide.png would have one mask, wide.png"),
    ],
)
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
def test_embed_gives_the_backbones_features(run, tmp_path):
    """Features of a model with a drawn backbone, or other ones than those of its file as a model of timm's."""
    photo, bare = str(write_photos(tmp_path) / "wide.jpg"), tmp_path / "bare.safetensors"
    bare.write_bytes((run / "model.safetensors").read_bytes())
    given = {"model": NAME, "model_kwargs": KWARGS, "img_size": SIDE, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert np.array_equal(embed(run, [photo])["features"], embed(bare, [photo], **given)["features"])


@torch.no_grad()
@pytest.mark.parametrize("head", ["linear", "conv"])
def test_timm_reads_the_exported_backbone(tmp_path, head):
    """A folder that timm refuses, or a head whose file does not fit its description."""
    run = random_run(tmp_path / "run", head)
    found = export(run, "timm")
    assert found.largest < 1e-6
    model = timm.create_model(f"local-dir:{found.folder}", pretrained=True)
    written = load_file(run / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())
    assert json.loads((found.folder / "head.json").read_text()) == {
        **{"kind": head, "grid": [4, 4], "num_classes": CLASSES, "classes": NAMES, "img_size": [SIDE, SIDE]}
    }


@pytest.mark.slow
def test_onnx_has_the_whole_model(tmp_path):
    """The backbone without its head."""
    runtime = pytest.importorskip("onnxruntime")
    run = random_run(tmp_path / "run", "conv")
    found = export(run, "onnx")
    assert found.within
    session = runtime.InferenceSession(str(found.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    [logits] = session.run(None, {"images": np.zeros((2, 3, SIDE, SIDE), dtype=np.float32)})
    assert logits.shape == (2, CLASSES, SIDE, SIDE)
