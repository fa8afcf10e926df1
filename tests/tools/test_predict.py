"""`ds-vit predict` and `ds-vit embed`, held against timm alone; what a person sees, and what a program reads."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import numpy as np
import oracle
import pytest
import timm
import torch
import yaml
from class_folders import NAMES, NUM_VAL, make_folders, short_run
from PIL import Image
from safetensors.torch import load_file, save_file

from ds_vit import cli
from ds_vit.api import predict
from ds_vit.config.run_folder import RunFolder
from ds_vit.data.sources.folders import FolderSource


@pytest.fixture(scope="module")
def data(real_images, tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("predict"), real_images)


@pytest.fixture(scope="module")
def run(ranks, data):
    return short_run(ranks, data, data / "run")


@pytest.fixture(scope="module")
def by_timm(run, data):
    """timm's model and transform alone: path → logits float32 [3], features float32 [48]."""
    model = timm.create_model(oracle.MODEL, num_classes=3, img_size=oracle.IMG_SIZE, **oracle.KWARGS).eval()
    model.load_state_dict(load_file(run / "model.safetensors"))
    transform = timm.data.create_transform(
        (3, oracle.IMG_SIZE, oracle.IMG_SIZE), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=0.9
    )
    files = [str(path) for path in sorted(data.glob("val/*/*.jpg"))]
    with torch.no_grad():
        pixels = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
        logits, features = model(pixels), model.forward_head(model.forward_features(pixels), pre_logits=True)
    assert len(files) == 3 * NUM_VAL
    return dict(zip(files, zip(logits.numpy(), features.numpy(), strict=True), strict=True))


def said(capsys, *words):
    """Exit code, stdout and stderr of `ds-vit`."""
    code = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def weights_of(run):
    """The first line of stderr."""
    top1 = json.loads(RunFolder(run).summary.read_text())["last_top1"]
    return f"weights: {run}/model.safetensors, step 2, top1 {top1:.4g} %\n"


@pytest.mark.slow
def test_a_table_of_files(run, data, by_timm, capsys):
    """Names of other classes, an image's share given to its neighbour, markup that swallows a name."""
    files = [path for name in NAMES for path in sorted(data.glob(f"val/{name.replace('[', '[[]')}/*.jpg"))[:1]]
    code, out, err = said(capsys, "predict", run, *files, "--top-k", 2)
    assert (code, err) == (0, weights_of(run))
    assert "vit_tiny_patch16_224, probabilities by softmax" in out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line[:1] == "│"]
    expected = []
    for file in map(str, files):
        shares = torch.tensor(by_timm[file][0]).softmax(0)
        best = shares.argsort(descending=True)[:2].tolist()
        expected += [[file if not place else "", NAMES[n], f"{100 * shares[n]:.2f} %"] for place, n in enumerate(best)]
    assert rows == expected


def test_csv_of_a_folder_counts_as_evaluation_does(run, data, by_timm, capsys):
    """An image that is lost or doubled at the end of a batch; other pixels than evaluation's."""
    code, out, err = said(capsys, "predict", run, data / "val", "--batch-size", 8, "--workers", 1)
    assert (code, err) == (0, weights_of(run))
    header, *rows = csv.reader(io.StringIO(out))
    assert header == ["image", "class1", "probability1", "class2", "probability2", "class3", "probability3"]
    source = FolderSource(str(data / "val"))
    assert [row[0] for row in rows] == [source.describe(index) for index in range(len(source))], "their natural order"
    for row in rows:
        shares = torch.tensor(by_timm[row[0]][0]).softmax(0)
        assert row[1::2] == [NAMES[n] for n in shares.argsort(descending=True)]
        np.testing.assert_allclose([float(v) for v in row[2::2]], shares.sort(descending=True).values, atol=2e-6)
    right = sum(row[1] == NAMES[source.target(index)] for index, row in enumerate(rows))
    assert 100 * right / len(rows) == pytest.approx(json.loads(RunFolder(run).summary.read_text())["last_top1"])


def test_images_that_cannot_be_read_are_named_and_counted(run, data, tmp_path, by_timm, capsys):
    """Everything lost for one bad file, or its neighbours' results under its name."""
    good = list(by_timm)[:5]
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "cut.jpg").write_bytes(Path(good[0]).read_bytes()[:300])
    files = [good[0], tmp_path / "text.jpg", *good[1:4], tmp_path / "cut.jpg", good[4]]
    output = tmp_path / "classes.json"
    code, out, err = said(capsys, "predict", run, *files, "--batch-size", 2, "--output", output)
    assert (code, out) == (65, "")
    assert err.startswith(weights_of(run))
    lines = err.splitlines()[1:]
    assert lines[0] == f"{tmp_path}/text.jpg: cannot be read (13 bytes; not an image that Pillow knows)"
    assert lines[1].startswith(f"{tmp_path}/cut.jpg: cannot be read (300 bytes; ")
    assert lines[2:] == ["2 of 7 images could not be read and are left out", f"{output}: 5 images"]
    found = json.loads(output.read_text())
    assert [one["image"] for one in found["images"]] == good
    assert [one["image"] for one in found["unreadable"]] == [f"{tmp_path}/text.jpg", f"{tmp_path}/cut.jpg"]
    assert [one["classes"][0]["number"] for one in found["images"]] == [int(by_timm[f][0].argmax()) for f in good]
    assert {path.name for path in tmp_path.iterdir()} == {"text.jpg", "cut.jpg", "classes.json"}
    code, out, err = said(capsys, "predict", run, tmp_path / "text.jpg")
    assert (code, out) == (65, ""), "no empty table"
    code, _, err = said(capsys, "embed", run, tmp_path / "text.jpg", "--output", tmp_path / "f.npz")
    assert code == 2
    assert "none of 1 images can be read" in err
    assert not (tmp_path / "f.npz").exists()


def test_names_of_any_bytes_and_characters(run, data, tmp_path, by_timm, capsys, monkeypatch):
    """A traceback after all images were predicted, and a table that loses a name or its bytes."""
    names = ["caf\udce9.jpg", "\u732b \u2028,\t.jpg", "new\nline.jpg"]  # the first one is in Latin-1
    for name in names:
        (tmp_path / name).write_bytes(Path(next(iter(by_timm))).read_bytes())
    files = [str(tmp_path / name) for name in names]
    assert said(capsys, "predict", run, *files, "--output", tmp_path / "p.csv")[0] == 0
    table = (tmp_path / "p.csv").read_bytes().decode(errors="surrogateescape")
    assert [row["image"] for row in csv.DictReader(io.StringIO(table))] == files
    assert said(capsys, "predict", run, *files, "--output", tmp_path / "p.json")[0] == 0
    found = json.loads((tmp_path / "p.json").read_text(encoding="ascii"))
    assert [one["image"] for one in found["images"]] == files
    assert said(capsys, "embed", run, *files, "--output", tmp_path / "e.npz")[0] == 0
    assert np.load(tmp_path / "e.npz")["images"].tolist() == files
    for encoding, shown in (("utf-8", os.fsencode(names[0])), ("ascii", rb"\u732b"), ("iso-8859-1", rb"caf\udce9")):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr("sys.stdout", stdout)
        assert cli.main(["predict", str(run), *files]) == 0
        assert shown in stdout.buffer.getvalue()


def test_binary_cross_entropy_means_sigmoid(run, tmp_path, by_timm, capsys):
    """Shares that sum to one of classes that an image may have all of."""
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"bce_loss": True}
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    save_file(load_file(run / "model.safetensors"), other / "model.safetensors")
    file = next(iter(by_timm))
    expected = torch.tensor(by_timm[file][0]).sigmoid()
    _, out, _ = said(capsys, "predict", other, file, "--json")
    found = json.loads(out)
    assert found["by"] == "sigmoid"
    shares = {one["number"]: one["probability"] for one in found["images"][0]["classes"]}
    np.testing.assert_allclose([shares[n] for n in range(3)], expected, atol=2e-6)
    assert "probabilities by sigmoid, each class by itself" in said(capsys, "predict", other, file)[1]
    assert "by softmax" in said(capsys, "predict", other, file, "--no-bce-loss")[1]


def test_features_are_what_the_classifier_gets(run, data, tmp_path, by_timm, capsys):
    """Logits, tokens that are not pooled, or rows under another file's name."""
    output = tmp_path / "features.npz"
    code, out, err = said(capsys, "embed", run, data / "val", "--batch-size", 8, "--output", output)
    assert (code, out, err) == (0, "", f"{weights_of(run)}{output}: 39 images\n")
    with np.load(output, allow_pickle=False) as found:
        assert sorted(found) == ["features", "images"]
        assert found["features"].dtype == np.float32
        assert set(found["images"]) == set(by_timm)
        for name, row in zip(found["images"], found["features"], strict=True):
            np.testing.assert_allclose(row, by_timm[name][1], atol=2e-5)


def test_weights_of_a_timm_name(tmp_path, by_timm, capsys):
    """Weights at hand for one of timm's names: nothing but the name says the pixels and the classes."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    model = timm.create_model(name, img_size=32, depth=1).eval()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    words = ["--model", name, "--img-size", 32, "--model-kwargs", "depth=1", "--json", "--top-k", 1000]
    file = next(iter(by_timm))
    code, out, err = said(capsys, "predict", tmp_path / "w.pth", file, *words)
    assert code == 0, err
    classes = json.loads(out)["images"][0]["classes"]
    assert {one["number"]: one["name"] for one in classes}[0] == "tench, Tinca tinca"
    settings = timm.data.resolve_data_config({}, model=model)
    transform = timm.data.create_transform(**{**settings, "input_size": (3, 32, 32)})
    with torch.no_grad():
        shares = model(transform(Image.open(file).convert("RGB"))[None])[0].softmax(0)
    assert classes[0]["number"] == int(shares.argmax())
    assert sum(one["probability"] for one in classes) == pytest.approx(1, abs=1e-5)


def test_from_python(run, data, by_timm):
    """Other results than the command's, and a second call in one process."""
    files = list(by_timm)[:2]
    for _ in range(2):
        found = predict(run, files, top_k=1, device="cpu")
    assert (found["by"], found["unreadable"], found["weights"]) == ("softmax", [], str(run / "model.safetensors"))
    assert [one["image"] for one in found["images"]] == files
    best = found["images"][0]["classes"][0]
    assert best["name"] == NAMES[best["number"]]
    assert best["number"] == int(by_timm[files[0]][0].argmax())
    assert predict(run / "model.safetensors", files, top_k=1) == found, "the file finds its run"
    with pytest.raises(ValueError, match='there is no setting "topk"; the nearest is top_k'):
        predict(run, files, topk=1)
    assert [image["image"] for image in predict(run, files[0])["images"]] == files[:1], "a path is no list of letters"
    with pytest.raises(ValueError, match="no images are given; give image files, or a folder of them"):
        predict(run, [])
    for images in (Image.new("RGB", (8, 8)), [Image.new("RGB", (8, 8))], np.zeros((8, 8, 3), np.uint8)):
        with pytest.raises(ValueError, match="images are given as paths of files and folders"):
            predict(run, images)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict {run} {data}/nowhere.jpg", "nowhere.jpg does not exist; give image files, or a folder of them"),
        ("predict {run} {run}/tensorboard", "holds no images (files found: 1 "),
        ("predict {data}/nowhere {image}", "does not exist; give a run's folder, a checkpoint or a file of weights"),
        ("predict {run} {image} --top-k 4", "--top-k 4 must lie between 1 and the model's 3 classes"),
        ("predict {run} {image} --batch-size 0", "--batch-size must be at least 1, not 0"),
        ("predict {run} {image} --device cuda:99", "--device cuda:99: there is"),
        ("predict {run} {image} --output a.txt", "--output a.txt: the file's name must end in .csv or .json"),
        ("predict {run} {image} --output {data}/no/a.csv", "No such file or directory"),
        ("predict {run} {image} --json --output a.csv", "--json and --output a.csv contradict each other"),
        ("predict {run} {image} --weights ema", "there is no ema.safetensors"),
        ("embed {run} {image} --output a.csv", "--output a.csv: the file's name must end in .npz"),
    ],
)
def test_bad_input_is_one_line(run, data, by_timm, capsys, words, message):
    """A traceback, a half-written file, or a flag that is passed over."""
    argv = [word.format(run=run, data=data, image=next(iter(by_timm))) for word in words.split()]
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("ds-vit: error: ")
    assert err.count("\n") == 1
