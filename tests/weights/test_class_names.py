"""The names of a run's classes: in all that it writes, in what is made of that, and used without being given again."""

from __future__ import annotations

import json
import shutil

import pytest
import timm
from class_folders import NAMES, make_folders, short_run
from runs import run_quietly
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ds_vit import cli
from ds_vit.config.run_folder import RunFolder
from ds_vit.tools import evaluate
from ds_vit.weights.files import find_weights


def words_of(path):
    """The metadata of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.fixture(scope="module")
def data(real_images, tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("named"), real_images)


@pytest.fixture(scope="module")
def run(ranks, data):
    return short_run(ranks, data, data / "run", "--model-ema", "--checkpoint-interval", 2, "--num-classes", 4)


@pytest.mark.slow
def test_a_run_writes_them(run):
    """A file that is moved away from its run, or a run whose weights are gone, and with it the names."""
    checkpoint = run / "checkpoints" / "step-00000002"
    assert json.loads(RunFolder(run).classes.read_text()) == list(NAMES)
    assert json.loads(RunFolder(run).summary.read_text())["class_names"] == list(NAMES)
    assert json.loads((checkpoint / "state.json").read_text())["run"]["class_names"] == list(NAMES)
    for folder in (run, checkpoint):
        for name in ("model.safetensors", "ema.safetensors"):
            assert json.loads(words_of(folder / name)["class_names"]) == list(NAMES), folder / name
    assert words_of(checkpoint / "optimizer-exp_avg.safetensors") == {"format": "pt"}


def test_a_task_without_classes_has_none(ranks, data, tmp_path, capsys):
    """Folders' names as if a masked autoencoder could tell them apart."""
    words = ["--task", "mae", "--decoder-dim", 48, "--decoder-depth", 1, "--decoder-heads", 3]
    run = short_run(ranks, data, tmp_path / "run", *words, "--checkpoint-interval", 2)
    assert not RunFolder(run).classes.exists()
    assert "class_names" not in json.loads(RunFolder(run).summary.read_text())
    for folder in (run, run / "checkpoints" / "step-00000002"):
        assert "class_names" not in words_of(folder / "model.safetensors")
        assert find_weights(folder).class_names == ()
    image = str(next(data.glob("val/*/*.jpg")))
    assert cli.main(["predict", str(run), image]) == 2
    assert "has no classifier: its run's task has no classes; `ds-vit embed`" in capsys.readouterr().err
    assert cli.main(["embed", str(run), image, "--output", str(tmp_path / "f.npz")]) == 0


# An output of the model that has no class: --num-classes 4 for three folders.
ALL = [*NAMES, "LABEL_3"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["timm", "hf", "onnx"])
def test_exports_have_them(run, tmp_path, capsys, to):
    """Another tool that answers "class 2"; a line that does not load what it says it loads."""
    packages = {"timm": ["timm"], "hf": ["transformers"], "onnx": ["onnx", "onnxruntime"]}[to]
    modules = [pytest.importorskip(package) for package in packages]
    folder = tmp_path / to
    assert cli.main(["export", str(run), "--to", to, "--output", str(folder)]) == 0
    if to == "onnx":
        session = modules[1].InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        found = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    elif to == "timm":
        told = capsys.readouterr().out.splitlines()[-1]
        found = eval(told.removeprefix("load it with "), {"timm": timm}).pretrained_cfg["label_names"]
    else:
        config = modules[0].AutoConfig.from_pretrained(folder)
        found = [config.id2label[number] for number in range(4)]
        assert config.label2id == {name: number for number, name in enumerate(found)}
    assert found == ALL
    if to != "onnx":  # and back: by themselves, and from the file's header
        assert find_weights(folder).class_names == tuple(ALL)
        (folder / "config.json").unlink()
        assert find_weights(folder).class_names == tuple(ALL)


def test_imported_weights_keep_them(tmp_path, run):
    """Names that get lost on the way in."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=96, image_size=32, id2label={}
    )
    theirs.id2label = {number: f"no. {number}" for number in range(11)}  # 10 comes after 9, not after 1
    transformers.ViTForImageClassification(theirs).save_pretrained(tmp_path / "hf")
    assert cli.main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "w.safetensors")]) == 0
    assert find_weights(tmp_path / "w.safetensors").class_names == tuple(f"no. {number}" for number in range(11))


def test_outputs_without_names_work(run, data, tmp_path, capsys):
    """A run whose weights have no names."""
    old = tmp_path / "old"
    shutil.copytree(run, old)
    RunFolder(old).classes.unlink()
    save_file(load_file(old / "model.safetensors"), old / "model.safetensors", metadata={"format": "pt"})
    image = str(next(data.glob("val/*/*.jpg")))
    assert cli.main(["predict", str(old), image, "--json", "--weights", "last"]) == 0
    found = json.loads(capsys.readouterr().out)["images"][0]["classes"]
    assert {one["name"] for one in found} == {"LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"}
    assert cli.main(["export", str(old), "--to", "timm", "--weights", "last"]) == 0
    assert "label_names" not in (old / "export-timm" / "config.json").read_text()


def test_names_and_logits_that_differ_in_number(run, data, tmp_path, capsys):
    """A probability with the wrong name."""
    state = load_file(run / "model.safetensors")
    names = {"class_names": json.dumps([*ALL, "a fifth"])}
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    save_file(state, tmp_path / "run" / "model.safetensors", metadata=names)
    image = str(next(data.glob("val/*/*.jpg")))
    words = ["predict", str(tmp_path / "run"), image, "--weights", "last"]
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "comes with the names of 5 classes and the model has 4" in err
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\n")
    assert cli.main([*words, "--labels", str(tmp_path / "names.txt")]) == 0
    (tmp_path / "names.txt").write_text("one\n")
    assert cli.main([*words, "--labels", str(tmp_path / "names.txt")]) == 2
    assert "has 1 names and the model 4 classes" in capsys.readouterr().err


def test_evaluation_refuses_other_classes(ranks, run, data, tmp_path):
    """An accuracy whose classes are numbered otherwise than the weights'."""
    other = tmp_path / "data"
    for split in ("train", "val"):
        shutil.copytree(data / split, other / split)
        (other / split / NAMES[2]).rename(other / split / "another")
    words = [str(run), "--data-dir", str(other), "--output", str(tmp_path / "eval.json")]
    [(code, _, err)] = ranks.run(1, run_quietly, words, main=evaluate.main)
    assert code == 2
    assert "was trained on 3 classes and the data has 3; " in err
    assert "there and 'another' here" in err
    words = [str(run), "--output", str(tmp_path / "eval.json")]
    assert ranks.run(1, run_quietly, words, main=evaluate.main)[0][0] == 0
