"""Exports of self-distillation: the teacher under timm's names, its head in a second file, and the model card."""

import json
import shutil

import plain_dino
import pytest
import timm
import torch
from curves import read_rows
from runs import run_quietly
from safetensors.torch import load_file, save_file

from ds_vit.tools.predict import embed
from ds_vit.weights.export import export
from ds_vit.weights.files import find_weights
from ds_vit.weights.initial_checkpoint import InitialCheckpoint

WORDS = [
    *("--centering", "ema", "-b", 12, "--val-fraction", 0.2, "--val-split", "validation", "--eval-knn", 3),
    *("--set", "bf16.enabled=true", "zero_optimization.stage3_param_persistence_threshold=0"),
]
LAST = "teacher.safetensors"


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory, dino_folder):
    """A run of 3 steps in bfloat16 at ZeRO-3, interrupted after the second and resumed."""
    output = tmp_path_factory.mktemp("export") / "run"
    for words in (("--max-steps", 2), ("--max-steps", 3, "--resume", "auto")):
        results = ranks.run(2, run_quietly, plain_dino.words_of(dino_folder, 3, output, *WORDS, *words))
        assert [code for code, *_ in results] == [0, 0], results[0][1:]
    return output


@torch.no_grad()
def features(checkpoint):
    """Features of timm's model with a file's weights, computed without this project."""
    kwargs = {"num_classes": 0, "img_size": plain_dino.SIZE, **plain_dino.KWARGS}
    model = timm.create_model(plain_dino.MODEL, checkpoint_path=str(checkpoint), **kwargs).eval()
    images = torch.randn(3, 3, plain_dino.SIZE, plain_dino.SIZE, generator=torch.Generator().manual_seed(0))
    return model(images)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "backbone", "head"),
    [
        ({}, "best.safetensors", "best-head.safetensors"),
        ({"weights": "last"}, LAST, "teacher_head.safetensors"),
        ({"checkpoint": "latest"}, LAST, "teacher_head.safetensors"),
    ],
    ids=str,
)
def test_timm_gets_the_features_of_the_teacher(run, tmp_path, options, backbone, head):
    # Catches: the student's backbone or head, a head of another step, a card that lacks the source.
    found = export(run, "timm", output=tmp_path / "export", **options)
    assert found.largest < 1e-6
    given = features(found.folder / "model.safetensors")
    torch.testing.assert_close(given, features(run / backbone), rtol=0, atol=1e-6)
    # The student's file has a mask token, which timm refuses.
    student = {name: tensor for name, tensor in load_file(run / "model.safetensors").items() if name != "mask_token"}
    save_file(student, tmp_path / "student.safetensors")
    assert not torch.allclose(given, features(tmp_path / "student.safetensors"), atol=1e-4)
    own, of_run = load_file(found.folder / "head.safetensors"), load_file(run / head)
    assert own.keys() == of_run.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in of_run.items())
    assert not torch.equal(own["dino_head.mlp.0.weight"], load_file(run / "head.safetensors")["dino_head.mlp.0.weight"])


def test_the_teacher_is_evaluated_and_read(run, dino_folder):
    # Catches: the student's features, features of a teacher that a file rounds.
    row = [row for row in read_rows(run) if row["kind"] == "eval"][-1]
    assert 0.0 < row["feature_std"] < 1.0
    state = load_file(run / LAST)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in state.values()), "kept in fp32"
    best = find_weights(run)
    assert (str(best), best.kind) == (f"{run}/best.safetensors (the teacher), step 3, knn_top1 100 %", "teacher")
    images = sorted((dino_folder / "train" / "all").iterdir())[:3]
    of_run = embed(run, images)["features"]
    assert of_run == pytest.approx(embed(run / LAST, images)["features"])
    assert of_run == pytest.approx(embed(run, images, checkpoint="latest")["features"])
    assert of_run != pytest.approx(embed(run / "model.safetensors", images)["features"], rel=1e-3)


def test_a_sharded_teacher_keeps_its_head(run, tmp_path):
    # Catches: a head that is looked for by the ending of the backbone's file.
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("best*", "checkpoints"))
    (folder / LAST).rename(folder / "teacher-00001-of-00001.safetensors")
    names = dict.fromkeys(load_file(run / LAST), "teacher-00001-of-00001.safetensors")
    (folder / f"{LAST}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    found = export(folder, "timm", weights="last", output=tmp_path / "export")
    own, of_run = load_file(found.folder / "head.safetensors"), load_file(run / "teacher_head.safetensors")
    assert own.keys() == of_run.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in of_run.items())


@pytest.mark.slow
def test_the_card_of_another_tool_names_what_is_there(run, tmp_path):
    # Catches: a head that only the folder of timm has, the wrong library.
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    card = (export(run, "onnx", output=tmp_path / "export").folder / "README.md").read_text()
    assert "library_name: onnxruntime\n" in card
    assert "head.safetensors" not in card


def test_the_card_says_where_the_weights_come_from(run, dino_folder, tmp_path):
    # Catches: a resumed run that forgets its initial weights, a hash of the name, the steps of another checkpoint.
    export(run, "timm", output=tmp_path / "export")
    card = (tmp_path / "export" / "README.md").read_text()
    file = dino_folder / f"{plain_dino.MODEL}.safetensors"
    model = timm.create_model(plain_dino.MODEL, num_classes=0, img_size=plain_dino.SIZE, **plain_dino.KWARGS)
    fingerprint = InitialCheckpoint(file, model).fingerprint
    assert card.startswith("---\nlibrary_name: timm\npipeline_tag: image-feature-extraction\n---\n")
    rows = dict(line[2:-2].split(" | ", 1) for line in card.splitlines() if line.startswith("| ") and line != "| | |")
    assert rows["task"] == "dino"
    assert rows["data"] == f"{dino_folder.name}, {plain_dino.IMAGES * 4 // 5} images"
    assert rows["training"] == f"{find_weights(run).origin['step']} steps of 24 images"
    assert rows["initial weights"] == f"{file}, blake2b {fingerprint} of a sample of its values"
    other = {name: tensor + 1.0 for name, tensor in load_file(file).items()}
    save_file(other, tmp_path / "other.safetensors")
    assert InitialCheckpoint(tmp_path / "other.safetensors", model).fingerprint != fingerprint
    state = json.loads((run / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert state["origin"]["initial_weights"] == rows["initial weights"]
