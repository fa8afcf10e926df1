"""`ds-vit export` and `ds-vit import`: what other tools make of our weights, and we of theirs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from vits import KINDS, images, shake, small_image_size, small_spec, timm_model

from ds_vit import cli
from ds_vit.models.zoo import create_model
from ds_vit.weights import export as export_module
from ds_vit.weights.commands import import_weights
from ds_vit.weights.export import export
from ds_vit.weights.initial_checkpoint import InitialCheckpoint

SPEC = small_spec("vit_tiny_patch16_224", img_size=64)
PIXELS = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic", "crop_pct": 0.9}
PIXELS |= {"crop_mode": "center"}


def run_folder(folder, spec, **more):
    """What a run leaves of its model: config.yaml and model.safetensors. Returns timm's model with those weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model = timm_model(spec).eval()
    save_file(model.state_dict(), folder / "model.safetensors")
    recipe = {"model": spec.name, "model_kwargs": dict(spec.model_kwargs), "num_classes": spec.num_classes or None}
    recipe |= {"img_size": spec.img_size} if spec.img_size else {}
    recipe |= {"deepspeed_config": "deepspeed.json", "data_dir": "nowhere", "epochs": 3, **PIXELS, **more}
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    return model


def spec_of(kind):
    """A small model of a kind, on images of few patches."""
    return small_spec(KINDS[kind], img_size=small_image_size(KINDS[kind]))


@torch.no_grad()
def logits(model, spec, **kwargs):
    return model(images(spec, **kwargs))


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("class token", "classification"),
        ("convolutional stem", "classification"),
        ("Eva with rotary tables", "classification"),
        ("Eva with attention pool", "classification"),
        ("registers and layer scale", "mae"),
    ],
)
def test_timm_and_transformers_read_one_folder(tmp_path, kind, task):
    """A folder without the arguments, the image size or the pixels of the run; both load it without ds_vit."""
    transformers = pytest.importorskip("transformers")
    spec = replace(spec_of(kind), num_classes=10 if task == "classification" else 0)
    reference = run_folder(tmp_path / "run", spec, task=task)
    found = export(tmp_path / "run", "hf")
    assert found.folder == tmp_path / "run" / "export-hf"
    model = timm.create_model(f"local-dir:{found.folder}", pretrained=True).eval()
    expected = logits(reference, spec)
    assert torch.equal(logits(model, spec), expected)
    kinds = {"classification": "AutoModelForImageClassification", "mae": "AutoModel"}
    theirs = getattr(transformers, kinds[task]).from_pretrained(found.folder).eval()
    with torch.no_grad():
        outputs = theirs(pixel_values=images(spec))
    given = outputs.logits if task == "classification" else outputs.pooler_output
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)
    data = timm.data.resolve_data_config({}, model=model)
    assert data["input_size"] == (3, spec.img_size, spec.img_size)
    for name, value in PIXELS.items():
        assert (list(data[name]) if isinstance(value, list) else data[name]) == value, name
    text = (found.folder / "config.json").read_text()
    assert not any(word in text for word in ('"license"', '"tag"')), "timm's claims about its own weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["class token", "attention pool", "Eva with rotary tables", "learned rotary frequencies"]
)
def test_onnx_takes_a_batch_of_any_size(tmp_path, kind, capfd):
    """A batch, or a table, that was burnt into the graph; pages of the exporter's warnings."""
    runtime = pytest.importorskip("onnxruntime")
    spec = spec_of(kind)
    reference = run_folder(tmp_path / "run", spec)
    found = export(tmp_path / "run", "onnx", output=tmp_path / "onnx")
    assert found.within
    assert "onnxruntime" in found.reader
    assert capfd.readouterr() == ("", "")
    session = runtime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    [graph_input] = session.get_inputs()
    assert (graph_input.name, graph_input.shape[1:]) == ("images", [3, spec.img_size, spec.img_size])
    for batch in (1, 2, 5):
        pixels = torch.randn(batch, 3, spec.img_size, spec.img_size)
        with torch.no_grad():
            expected = reference(pixels)
        [given] = session.run(None, {"images": pixels.numpy()})
        assert np.abs(given - expected.numpy()).max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_averaged_weights_and_a_bare_file(tmp_path):
    """`--weights ema` that exports the raw ones; weights that no run made."""
    model = run_folder(tmp_path / "run", SPEC)
    shake(model, seed=1)
    save_file(model.state_dict(), tmp_path / "run" / "ema.safetensors")
    found = export(tmp_path / "run", "timm", weights="ema")
    again = timm.create_model(f"local-dir:{found.folder}", pretrained=True).eval()
    assert torch.equal(logits(again, SPEC), logits(model, SPEC))
    settings = {"model": SPEC.name, "model_kwargs": dict(SPEC.model_kwargs), "img_size": 64}
    bare = tmp_path / "w.safetensors"
    save_file(model.state_dict(), bare)
    with pytest.raises(ValueError, match="give the --num-classes that it has"):
        export(bare, "timm", **settings)
    assert export(bare, "timm", **settings, num_classes=10).largest == 0.0
    with pytest.raises(ValueError, match="give --model"):
        export(bare, "timm", output=tmp_path / "x")


def test_an_export_that_differs_is_not_kept(tmp_path, monkeypatch, capsys):
    """A check that cannot fail."""
    run_folder(tmp_path / "run", SPEC)
    save = export_module.save_weights

    def save_others(folder, state, **more):
        save(folder, {**state, "head.weight": state["head.weight"].roll(1, 0)}, **more)

    monkeypatch.setattr(export_module, "save_weights", save_others)
    assert cli.main(["export", str(tmp_path / "run"), "--to", "timm"]) == 1
    out, err = capsys.readouterr()
    assert "largest difference of the logits" in out
    assert "is not kept" in err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "model.safetensors"}
    monkeypatch.setattr(export_module, "save_weights", save)
    assert cli.main(["export", str(tmp_path / "run"), "--to", "timm"]) == 0
    assert cli.main(["export", str(tmp_path / "run"), "--to", "timm"]) == 2
    assert "export-timm exists already" in capsys.readouterr().err


def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys):
    """A traceback of an import."""
    run_folder(tmp_path / "run", SPEC)
    monkeypatch.setattr(export_module, "find_spec", lambda name: None)
    assert cli.main(["export", str(tmp_path / "run"), "--to", "hf"]) == 2
    assert capsys.readouterr().err.endswith("--to hf needs transformers: bash launch/setup.sh export\n")


def test_hugging_face_weights_start_a_run(tmp_path):
    """A checkpoint that transformers made: the same logits in timm's model, and what no shape shows refused."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=384, image_size=64, num_labels=10
    )
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(config).eval()
    shake(theirs)
    theirs.save_pretrained(tmp_path / "hf")
    line = import_weights(tmp_path / "hf", tmp_path / "w.safetensors", model=SPEC.name, **_settings())
    assert "which fits vit_tiny_patch16_224" in line
    with torch.no_grad():
        expected = theirs(pixel_values=images(SPEC)).logits
    for source in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors", tmp_path / "w.safetensors"):
        model = create_model(SPEC, for_training=False, device="cpu").eval()
        InitialCheckpoint(source, create_model(SPEC)).load(model)
        # Hugging Face's default eps is 1e-12, timm's 1e-6.
        assert (logits(model, SPEC) - expected).abs().max() < 1e-4
    # A decoder's tensors in the same file are left out, under these names too.
    (tmp_path / "with").mkdir()
    tensors = load_file(tmp_path / "hf" / "model.safetensors") | {"decoder_pred.bias": torch.zeros(3)}
    save_file(tensors, tmp_path / "with" / "model.safetensors")
    assert InitialCheckpoint(tmp_path / "with", create_model(SPEC)).left_out.keys() == {"decoder_pred.bias"}
    heads = create_model(small_spec(SPEC.name, img_size=64, num_heads=6))
    with pytest.raises(ValueError, match="it has 3 heads and the model 6; give --model-kwargs num_heads=3"):
        InitialCheckpoint(tmp_path / "hf", heads)
    with pytest.raises(ValueError, match="hidden_act is gelu and the model's MLP has ReLU"):
        InitialCheckpoint(tmp_path / "hf", create_model(small_spec(SPEC.name, img_size=64, act_layer="relu")))


def _settings():
    return {"model_kwargs": dict(SPEC.model_kwargs), "img_size": 64, "num_classes": 10}


def save_with_deepspeed(folder, stage):
    """On a rank: a plain timm module, DeepSpeed's own checkpoints of two steps; the weights of the first."""
    import deepspeed

    torch.manual_seed(0)
    model = timm_model(SPEC)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(torch.nn.functional.cross_entropy(engine(images(SPEC)[:2]), torch.tensor([1, 2])))
    engine.step()
    engine.save_checkpoint(folder, tag="global_step1")
    saved = {name: parameter.detach().numpy().copy() for name, parameter in engine.module.named_parameters()}
    engine.backward(torch.nn.functional.cross_entropy(engine(images(SPEC)[:2]), torch.tensor([3, 4])))
    engine.step()
    engine.save_checkpoint(folder, tag="global_step2")
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeeds_own_checkpoints_are_read(ranks, tmp_path, stage):
    """The way out that the error names leads to no weights, or to others."""
    [full] = ranks.run(1, save_with_deepspeed, str(tmp_path / "ds"), stage)
    for folder, step in ((tmp_path / "ds", 2), (tmp_path / "ds" / "global_step1", 1)):
        with pytest.raises(ValueError, match="are pickles; if you trust it, run python") as error:
            InitialCheckpoint(folder, create_model(SPEC))
        command, file = re.search("run python (.* --safe_serialization) .* give (.*)$", str(error.value)).groups()
        assert f"-t global_step{step} " in command
        assert f"/global_step{step}/" in file
    if stage:
        file = tmp_path / "weights"
        subprocess.run([sys.executable, *command.split()], cwd=tmp_path, check=True, capture_output=True)
    model = create_model(SPEC, for_training=False, device="cpu")
    InitialCheckpoint(file, create_model(SPEC)).load(model)
    state = model.state_dict()
    assert state.keys() == full.keys()
    assert all(np.array_equal(state[name].numpy(), value) for name, value in full.items())


def test_import_refuses_in_one_line(tmp_path, capsys):
    """An overwritten file, weights of another model, a flag that does nothing."""
    save_file(timm_model(SPEC).state_dict(), tmp_path / "a.safetensors")
    source, to = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    for words, message in (
        (["--to", source], "exists already"),
        (["--to", "b.pth"], "must end in .safetensors"),
        (["--to", str(tmp_path / "no" / "b.safetensors")], "not a folder that can be written to"),
        (["--to", to, "--img-size", "64"], "--img-size has no effect without --model"),
        (["--to", to, "--model", "vit_base_patch16_224"], "does not fit vit_base_patch16_224"),
    ):
        assert cli.main(["import", source, *words]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert cli.main(["import", source, "--to", to]) == 0
    assert "32 tensors" in capsys.readouterr().out
