"""Initial weights from files: every format, resampling as timm does it, and what does not fit named."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import eva, vision_transformer
from vits import KINDS, images, shake, small_spec, timm_model, timm_state_dict

from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import create_model
from ds_vit.weights.files import find_weights, names_as_metadata
from ds_vit.weights.initial_checkpoint import InitialCheckpoint
from ds_vit.weights.source import load_source

SPEC = small_spec("vit_tiny_patch16_224")


def load(path: Path, spec=SPEC, **options) -> tuple[InitialCheckpoint, SequentialViT]:
    model = create_model(spec, for_training=False)
    checkpoint = InitialCheckpoint(path, model, **options)
    layers = take_apart(model)
    initialise(model, layers, seed=0, device="cpu", checkpoint=checkpoint)
    return checkpoint, SequentialViT(layers)


def assert_equal_states(model: SequentialViT, expected: dict[str, torch.Tensor]) -> None:
    state = timm_state_dict(model)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def write_shards(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    names = sorted(state)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("given", ["", "model.safetensors", "index", "folder of shards", "timm's folder", "half"])
def test_safetensors(tmp_path, given):
    """A tensor that keeps its drawn value, a shard that is not read, a folder that is not searched, a model in half."""
    reference = timm_model(SPEC)
    if given == "half":
        shake(reference)
        reference = reference.half()
    state = reference.state_dict()
    if given == "timm's folder":
        timm.models.save_for_hf(reference, tmp_path, safe_serialization=True)
        path = tmp_path
    elif given in ("index", "folder of shards"):
        index = write_shards(tmp_path, state)
        path = index if given == "index" else tmp_path
    else:
        save_file(state, tmp_path / "model.safetensors")
        path = tmp_path / given if given == "model.safetensors" else tmp_path
    checkpoint, model = load(path)
    assert checkpoint.newly_initialised == ()
    assert_equal_states(model, {name: tensor.float() for name, tensor in state.items()})


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".pth.tar"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_ema", "torch < 1.6, which is not mapped"])
def test_torch_files(tmp_path, suffix, wrapper):
    """timm's own training checkpoints, weights wrapped by DDP, and the EMA that is wanted rather than the weights."""
    state = timm_model(SPEC).state_dict()
    contents = {f"module.{name}": tensor for name, tensor in state.items()} if wrapper == "state_dict" else state
    old = wrapper is not None and wrapper.startswith("torch")
    if wrapper and not old:
        contents = {"epoch": 3, "args": argparse.Namespace(lr=0.1), wrapper: contents}
    if wrapper == "model_ema":
        contents["model"] = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch.save(contents, tmp_path / f"weights{suffix}", _use_new_zipfile_serialization=not old)
    assert_equal_states(load(tmp_path / f"weights{suffix}")[1], state)


def _below(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("contents", "prefix"),
    [
        (lambda own, other: {"state_dict": _below("model.", own) | {"loss.weight": torch.ones(2)}}, "model."),
        (
            lambda own, other: {
                "student": _below("module.backbone.", other),
                "teacher": _below("backbone.", own) | {"head.last_layer.weight": torch.ones(2)},
                "epoch": 3,
                "optimizer": {"state": {0: {"step": torch.ones(())}}},
            },
            "teacher.backbone.",
        ),
        (lambda own, other: _below("model.", other) | _below("ema.module.", own), "ema.module."),
    ],
)
def test_a_prefix_of_all_names_is_cut_off_and_named(tmp_path, contents, prefix):
    """A file of Lightning, torch.compile, DeepSpeed or DINO that is refused, and a student in place of its teacher."""
    own = timm_model(SPEC).state_dict()
    torch.save(contents(own, {name: torch.zeros_like(tensor) for name, tensor in own.items()}), tmp_path / "w.pth")
    checkpoint, model = load(tmp_path / "w.pth")
    assert_equal_states(model, own)
    assert f'names begin with "{prefix}" in the file, which is cut off' in checkpoint.summary
    save_file(own, tmp_path / "plain.safetensors")
    assert "cut off" not in load(tmp_path / "plain.safetensors")[0].summary


def test_several_models_in_a_file_are_named(tmp_path):
    """One of two models that is taken without a word, or a message that does not say why neither fits."""
    state = timm_model(SPEC).state_dict()
    save_file(
        _below("a.", state) | _below("b.net.", {n: t.clone() for n, t in state.items()}), tmp_path / "w.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"w.safetensors: it holds 2 models, whose names begin with a\., b\.net\.; save"
    ):
        load(tmp_path / "w.safetensors")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_of_a_diverged_run_are_refused(tmp_path, bad):
    """An assertion about the initial values, and predictions of nan % with exit code 0."""
    state = timm_model(SPEC).state_dict()
    state["blocks.1.mlp.fc1.weight"][0, :3] = bad
    save_file(state, tmp_path / "w.safetensors")
    bad_tensor = r"w\.safetensors: blocks\.1\.mlp\.fc1\.weight has 3 NaN or infinite values of "
    with pytest.raises(ValueError, match=bad_tensor):
        load(tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=bad_tensor):  # ds-vit predict, embed, eval and export
        load_source(
            find_weights(tmp_path / "w.safetensors"),
            {"model": SPEC.name, "num_classes": SPEC.num_classes, "model_kwargs": dict(SPEC.model_kwargs)},
        )


class _Surprise:
    def __reduce__(self):
        return (print, ("this ran",))


def test_a_file_that_would_run_code_is_refused(tmp_path, capsys):
    """Unpickling whatever a stranger wrote."""
    torch.save({"model": _Surprise()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth holds more than tensors.*safetensors"):
        load(tmp_path / "evil.pth")
    assert "this ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "source", "filter_module"),
    [
        ("class token", 224, vision_transformer),
        ("registers and layer scale", 518, vision_transformer),
        ("Eva with rotary tables", 336, eva),
        ("learned rotary frequencies", 224, eva),
    ],
)
def test_position_embeddings_are_resampled_as_timm_does(tmp_path, kind, source, filter_module):
    """Positions of another image size that are refused, cropped, or resampled differently."""
    small = small_spec(KINDS[kind], img_size=112)
    state = timm_model(small_spec(KINDS[kind], img_size=source)).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    reference = timm_model(small)
    reference.load_state_dict(filter_module.checkpoint_filter_fn(dict(state), reference))
    _, model = load(tmp_path / "model.safetensors", small)
    assert_equal_states(model, reference.state_dict())
    torch.testing.assert_close(model.eval()(images(small)), reference.eval()(images(small)), rtol=0, atol=1e-5)


def test_another_patch_size_is_resampled_on_request(tmp_path):
    """A kernel of 16 x 16 weights that a model of 8 x 8 patches cannot take as it is."""
    state = timm_model(SPEC).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    spec = small_spec(SPEC.name, patch_size=8, img_size=112)
    reference = timm_model(spec)
    reference.load_state_dict(vision_transformer.checkpoint_filter_fn(dict(state), reference))
    checkpoint, model = load(tmp_path / "model.safetensors", spec, resample_patch_embed=True)
    assert_equal_states(model, reference.state_dict())
    assert checkpoint.adapted["patch_embed.proj.weight"] == (96, 3, 16, 16)


def test_foreign_names_go_through_timms_filter(tmp_path):
    """Layer scale under the names of the original DeiT III code."""
    spec = small_spec("deit3_small_patch16_224")
    state = timm_model(spec).state_dict()
    foreign = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t for name, t in state.items()}
    assert foreign.keys() != state.keys()
    torch.save({"model": foreign}, tmp_path / "deit3.pth")
    assert_equal_states(load(tmp_path / "deit3.pth", spec)[1], state)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_classifier_of_other_classes_is_drawn_anew_and_named(tmp_path, has_head):
    """Fine-tuning that is refused, or a new head that is not reported."""
    state = timm_model(dataclasses.replace(SPEC, num_classes=7)).state_dict()
    if not has_head:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint, model = load(tmp_path / "model.safetensors")
    assert checkpoint.newly_initialised == ("head.bias", "head.weight")
    drawn = create_model(SPEC)
    layers = take_apart(drawn)
    initialise(drawn, layers, seed=0, device="cpu")
    expected = timm_state_dict(SequentialViT(layers))
    expected |= {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    assert_equal_states(model, expected)


def test_what_does_not_fit_is_named_with_shapes(tmp_path):
    """A run that starts from half of a checkpoint."""
    state = timm_model(SPEC).state_dict()
    del state["blocks.1.mlp.fc1.bias"], state["head.bias"]
    state["blocks.0.norm1.weight"] = torch.zeros(5)
    state["norm.extra"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="does not fit vit_tiny_patch16_224: a model of 32 tensors, in 4 places: "
    ) as caught:
        load(tmp_path / "model.safetensors")
    for part in (
        "blocks.1.mlp.fc1.bias is missing in the file and (384,) in the model",
        "head.bias is missing in the file",
        "blocks.0.norm1.weight is (5,) in the file and (96,) in the model",
        "norm.extra is (2,) in the file and missing in the model",
    ):
        assert part in str(caught.value)
    save_file(timm_model(small_spec(SPEC.name, depth=4)).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="in 24 places") as caught:
        load(tmp_path / "model.safetensors")
    assert str(caught.value).count(";") == 5, "the first five, and what to do"
    assert "give the --model and --model-kwargs of the file" in str(caught.value)
    save_file(timm_model(SPEC).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"reg_token is missing in the file and \(1, 4, 96\) in the model"):
        load(tmp_path / "model.safetensors", small_spec(SPEC.name, reg_tokens=4))


@pytest.mark.parametrize(
    ("file", "contents", "message"),
    [
        ("absent.safetensors", None, "does not exist"),
        ("weights.npz", b"x", r"its ending '\.npz' is none of \.safetensors"),
        ("broken.safetensors", b"not a header", "cannot be read"),
        ("broken.pth", b"not a pickle", "cannot be read|holds more than tensors"),
        ("empty.pth", b"", "cannot be read"),
        ("model.safetensors.index.json", b"{}", "cannot be read.*weight_map"),
        ("broken.json", b"{", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, file, contents, message):
    """A traceback of safetensors, zipfile, pickle or json."""
    if contents is not None:
        (tmp_path / file).write_bytes(contents)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / file)


def test_other_contents_are_refused(tmp_path):
    """A folder that is taken for a file; a list, or a dictionary of numbers, that fails somewhere inside."""
    with pytest.raises(ValueError, match=r"a folder without model\.safetensors"):
        load(tmp_path)
    torch.save([torch.zeros(2)], tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth cannot be read: it is not a"):
        load(tmp_path / "other.pth")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"does not fit .* is no state dict: it holds epoch \(int\)"):
        load(tmp_path / "other.pth")


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs Linux's list of mapped files")
@pytest.mark.parametrize("file", ["mapped.safetensors", "mapped.pth"])
def test_files_are_mapped_into_memory(tmp_path, file):
    """A file of 88 GB that every rank reads whole before ZeRO-3 can cut anything."""
    state = timm_model(SPEC).state_dict()
    save_file(state, tmp_path / file) if file.endswith("tensors") else torch.save(state, tmp_path / file)
    opened = InitialCheckpoint(tmp_path / file, create_model(SPEC))
    assert str(tmp_path / file) in Path("/proc/self/maps").read_text()
    assert opened._values["head.bias"].equal(state["head.bias"])


def test_a_layer_reads_its_own_tensors_alone(tmp_path, monkeypatch):
    """A pipeline stage, or a ZeRO-3 rank, that reads all layers to fill one."""
    state = timm_model(SPEC).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    model = create_model(SPEC)
    checkpoint = InitialCheckpoint(tmp_path / "model.safetensors", model)
    read = []

    class Recording(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    monkeypatch.setattr(checkpoint, "_values", Recording(checkpoint._values))
    layers = take_apart(model)
    for layer in layers:
        read.clear()
        initialise(model, [layer], seed=0, device="cpu", checkpoint=checkpoint)
        assert set(read) <= set(layer.state_dict()), "of another layer"
    assert set(read) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_a_classifier_follows_the_names_of_its_classes(tmp_path):
    """Weights of another class for each name, in silence, where a folder sorts its classes otherwise."""
    state = timm_model(SPEC).state_dict()
    theirs = [f"class {number}" for number in range(len(state["head.weight"]))]
    save_file(state, tmp_path / "model.safetensors", metadata=names_as_metadata(theirs))
    checkpoint, model = load(tmp_path / "model.safetensors", classes=theirs[::-1])
    rows = {name: tensor.flip(0) for name, tensor in state.items() if name.startswith("head.")}
    assert_equal_states(model, {**state, **rows})
    assert "reordered by the names of the classes" in checkpoint.summary
    checkpoint, model = load(tmp_path / "model.safetensors", classes=["dog", *theirs[1:]])
    assert_equal_states(model, state)
    assert "other names (not dog): its rows are used by number" in checkpoint.summary
    for same in (theirs, ()):
        checkpoint, _ = load(tmp_path / "model.safetensors", classes=same)
        assert "rows" not in checkpoint.summary


def test_a_model_without_a_classifier_leaves_the_files_out(tmp_path):
    """A classifier's weights that --task mae cannot start from, because of a head that it has no use for."""
    save_file(timm_model(SPEC).state_dict(), tmp_path / "model.safetensors")
    spec = dataclasses.replace(SPEC, num_classes=0)
    checkpoint, model = load(tmp_path / "model.safetensors", spec)
    assert not any(name.startswith("head.") for name in timm_state_dict(model))
    assert re.match("30 of 30 tensors taken as they are; ignored: head.bias", checkpoint.summary)
