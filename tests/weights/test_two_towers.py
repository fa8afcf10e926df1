"""Image and text towers of `--task clip` and `--task siglip` in open_clip's and transformers' files, and back."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from typing import NamedTuple

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import yaml
from curves import train_in
from PIL import Image
from project import write_config
from runs import refusal
from safetensors.torch import load_file, save_file
from token_files import write_tokenizer
from vits import shake

from ds_vit import cli
from ds_vit.config.schema import RunConfig
from ds_vit.data.text import FileTokenizer, build_tokenizer
from ds_vit.models.keyed_init import initialise, materialise
from ds_vit.models.layers import take_apart_towers, tower_of
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.tasks.clip.export import example_captions, pairs
from ds_vit.tasks.clip.loss import CLIP_LOSS, SIGLIP_LOSS
from ds_vit.tasks.clip.task import Clip
from ds_vit.tasks.clip.tower import create_contrastive_model
from ds_vit.tasks.registry import task_of
from ds_vit.weights.export import export
from ds_vit.weights.initial_checkpoint import InitialCheckpoint

_SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3}
_TEXT = {"text_width": 24, "text_depth": 2, "text_heads": 2, "context_length": 9, "embed_dim": 16}
_SIGLIP_TEXT = {name: value for name, value in _TEXT.items() if name != "embed_dim"}
RECIPES = {
    "CLIP": {"task": "clip", "model": "vit_base_patch16_clip_224", "img_size": 32, "model_kwargs": _SMALL, **_TEXT},
    "CLIP with QuickGELU": {
        "task": "clip",
        "model": "vit_base_patch16_clip_quickgelu_224",
        "img_size": 32,
        "model_kwargs": _SMALL,
        "text_model": "clip_base_quickgelu",
        **_TEXT,
    },
    "SigLIP": {
        "task": "siglip",
        "model": "vit_base_patch16_siglip_224",
        "img_size": 32,
        "model_kwargs": {**_SMALL, "act_layer": "gelu_tanh"},
        **_SIGLIP_TEXT,
    },
    "plain ViT": {"task": "clip", "model": "vit_tiny_patch16_224", "img_size": 32, "model_kwargs": _SMALL, **_TEXT},
    "timm's name": {"task": "clip", "model": "test_vit", **_TEXT},
    "timm's name without projection": {"task": "siglip", "model": "test_vit3", **_SIGLIP_TEXT},
}


class Run(NamedTuple):
    """A run's folder, and the towers that it trained."""

    folder: object
    model: torch.nn.Module

    def images(self, number=4):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(number, 3, *self.model.patch_embed.img_size, generator=generator)


def described(recipe):
    """The model of a recipe, on the meta device."""
    names = {
        "name": recipe["model"],
        "img_size": recipe.get("img_size"),
        "model_kwargs": recipe.get("model_kwargs", {}),
    }
    return task_of(recipe).create_model(ModelSpec(**names), RunConfig(**recipe), for_training=False)


def run_of(folder, kind, **more):
    """What a run leaves of its model: config.yaml, model.safetensors and text.safetensors."""
    recipe = RECIPES[kind] | more
    whole = described(recipe)
    torch.manual_seed(0)
    names = (recipe["model"], 0, recipe.get("img_size"), None, recipe.get("model_kwargs", {}))
    model = create_contrastive_model(
        ModelSpec(*names), whole.text.settings, whole.text.initial_logits, for_training=False
    ).eval()
    materialise(model, torch.device("cpu"))
    model.init_weights()
    for tower in (model.text, model.head):
        for parameter in tower.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    shake(model)
    with torch.no_grad():
        model.text.logit_scale.fill_(1.5)
    folder.mkdir()
    state = model.state_dict()
    save_file({name: t for name, t in state.items() if not name.startswith("text.")}, folder / "model.safetensors")
    save_file({name: t for name, t in state.items() if name.startswith("text.")}, folder / "text.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump({**recipe, "deepspeed_config": "x.json", "data_dir": "x"}))
    (folder / "deepspeed.json").write_text("{}")
    return Run(folder, model)


@torch.no_grad()
def features(run):
    """Normalised features of four images and four captions, and the logits of the pairs."""
    width = run.model.common_dim
    return pairs(run)(run.images()).split((width, width, 4), dim=1)


def close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def loaded(source, recipe):
    """The towers that a run starts with from a file, whole."""
    whole = described(recipe)
    checkpoint = InitialCheckpoint(source, whole, task=task_of(recipe))
    state = {}
    for name, layers in take_apart_towers(whole).items():
        initialise(tower_of(whole, name), layers, seed=0, device="cpu", checkpoint=checkpoint)
        state |= {layer.prefix + local: t for layer in layers for local, t in layer.state_dict().items()}
    return checkpoint, state


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(state[name], expected[name])]


@pytest.mark.parametrize("kind", ["CLIP", "CLIP with QuickGELU", "SigLIP"])
def test_transformers_computes_the_same(tmp_path, kind):
    # Catches: towers exchanged, query and key exchanged, another pooling, mask, activation, eps or end token.
    transformers = pytest.importorskip("transformers")
    run = run_of(tmp_path / "run", kind)
    found = export(run.folder, "hf")
    model = transformers.AutoModel.from_pretrained(found.folder).eval()
    assert type(model).__name__ == ("SiglipModel" if kind == "SigLIP" else "CLIPModel")
    ids = example_captions(run.model.text.settings)
    with torch.no_grad():
        out = model(input_ids=ids, pixel_values=run.images(), return_loss=True)
    images, texts, logits = features(run)
    close(out.image_embeds, images)
    close(out.text_embeds, texts)
    close(out.logits_per_image, logits)
    state = run.model.state_dict()
    own = torch.cat([state[name] for name in ("text.logit_scale", "text.logit_bias") if name in state])
    loss = SIGLIP_LOSS if kind == "SigLIP" else CLIP_LOSS
    close(out.loss, loss((images, texts), own, lambda rows: rows, 0))
    # And back, to the same values.
    checkpoint, again = loaded(found.folder, RECIPES[kind])
    assert_same(again, state)
    assert f"{len(state)} of {len(state)} tensors taken as they are" in checkpoint.summary


@pytest.mark.parametrize(("mode", "crop_pct"), [("center", 32 / 36), ("center", 1.0), ("squash", 0.8)])
def test_transformers_prepares_images_as_timm_does(tmp_path, mode, crop_pct):
    """Pixels of another crop, filter or scale: a model that is right and an accuracy that is not.

    The margins are even: of an odd one torchvision cuts the larger half before the crop, transformers behind it.
    """
    transformers = pytest.importorskip("transformers")
    pixels = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}
    pixels |= {"crop_pct": crop_pct, "crop_mode": mode}
    found = export(run_of(tmp_path / "run", "CLIP", **pixels).folder, "hf")
    processor = transformers.AutoImageProcessor.from_pretrained(found.folder, use_fast=False)
    noise = np.random.default_rng(0).integers(0, 256, (90, 131, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((200, 150), Image.Resampling.BILINEAR)
    given = processor(image, return_tensors="pt").pixel_values[0]
    transform = timm.data.create_transform((3, 32, 32), **pixels)
    torch.testing.assert_close(given, transform(image), rtol=0, atol=1e-5)


TOKENIZERS = {
    "clip": ("CLIP", "clip", "CLIPTokenizer"),
    "a file": ("CLIP", "<s> $A </s>", "TokenizersBackend"),
    "a file, the last token": ("SigLIP", "$A </s>", "TokenizersBackend"),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_transformers_reads_texts_alike(tmp_path, what):
    # Catches: another end token or length, padding that a bidirectional tower sees, a text that is not cut.
    transformers = pytest.importorskip("transformers")
    kind, form, expected = TOKENIZERS[what]
    if form == "clip":
        pytest.importorskip("open_clip")
    tokenizer = form if form == "clip" else write_tokenizer(tmp_path / "tokenizer.json", form)
    run = run_of(tmp_path / "run", kind, tokenizer=tokenizer)
    found = export(run.folder, "hf")
    assert found.notes == ()
    processor = transformers.AutoProcessor.from_pretrained(found.folder)
    assert type(processor.tokenizer).__name__ == expected
    model = transformers.AutoModel.from_pretrained(found.folder).eval()
    texts = ["a small cat", "A  dog!", "", "a small dog " * 9]
    given = processor(text=texts, padding="max_length", truncation=True, return_tensors="pt")
    assert given["input_ids"].shape == (4, 9)
    ids = torch.from_numpy(np.stack([build_tokenizer(tokenizer, 9).encode(text) for text in texts]))
    with torch.no_grad():
        close(model.get_text_features(given["input_ids"]).pooler_output, model.get_text_features(ids).pooler_output)
    assert torch.equal(given["input_ids"], ids) or form == "clip"


@pytest.mark.parametrize(
    ("kind", "tokenizer", "reason"),
    [
        ("CLIP", "bytes", "transformers has no counterpart of --tokenizer bytes"),
        ("SigLIP", "clip", "this text tower sees the padding of --tokenizer clip, id 0"),
        ("CLIP", "other ids", r"transformers reads '' as \[2, 1\], and the run as \[0, 1\]"),
    ],
)
def test_a_folder_without_tokenizer_says_why(tmp_path, capsys, monkeypatch, kind, tokenizer, reason):
    # Catches: a tokenizer whose ids mean other words to the text tower.
    pytest.importorskip("transformers")
    if tokenizer == "clip":
        pytest.importorskip("open_clip")
    if tokenizer == "other ids":
        tokenizer = write_tokenizer(tmp_path / "tokenizer.json", "<s> $A </s>")
        other = write_tokenizer(tmp_path / "other.json", "<pad> $A </s>")
        monkeypatch.setattr(FileTokenizer, "save", lambda _, path: shutil.copy(other, path))
    run = run_of(tmp_path / "run", kind, tokenizer=tokenizer)
    assert cli.main(["export", str(run.folder), "--to", "hf"]) == 0
    [note] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert re.match(f"note: the folder has no tokenizer: {reason}", note), note
    assert not [*(run.folder / "export-hf").glob("*token*")]


@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "SigLIP"])
def test_open_clip_computes_the_same(tmp_path, kind):
    # Catches: as above; a projection that is not transposed, positions without the bias of the patches.
    open_clip = pytest.importorskip("open_clip")
    run = run_of(tmp_path / "run", kind)
    found = export(run.folder, "open_clip", output=tmp_path / "out")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{found.folder}")
    model.eval()
    ids = example_captions(run.model.text.settings)
    with torch.no_grad():
        outputs = model(run.images(), ids)
        given = model.get_logits(run.images(), ids)[0]
    images, texts, logits = features(run)
    close(outputs[0], images)
    close(outputs[1], texts)
    close(given, logits)
    assert transform.transforms[0].size == run.model.patch_embed.img_size[0]
    assert ("timm_model_name" in (found.folder / "open_clip_config.json").read_text()) == kind.startswith("timm")
    _, state = loaded(found.folder, RECIPES[kind])
    if kind != "plain ViT":  # where the bias of the patches is in the positions
        assert_same(state, run.model.state_dict())
    run.model.load_state_dict(state)
    close(features(run)[0], images)


def test_weights_of_open_clip_start_a_run(tmp_path):
    # Catches: the text transformer of `CLIP`, whose names have no prefix, and a checkpoint of open_clip's trainer.
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    vision = {"layers": 2, "width": 24, "head_width": 8, "patch_size": 16, "image_size": 32}
    text = {"context_length": 9, "vocab_size": 259, "width": 24, "heads": 2, "layers": 2}
    theirs = open_clip.CLIP(16, vision, text).eval()
    state = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save({"epoch": 1, "name": "x", "state_dict": state}, tmp_path / "epoch_1.pt")
    run = run_of(tmp_path / "run", "CLIP")
    _, own = loaded(tmp_path / "epoch_1.pt", RECIPES["CLIP"])
    run.model.load_state_dict(own)
    ids = example_captions(run.model.text.settings)
    with torch.no_grad():
        expected = theirs(run.images(), ids)
    images, texts, _ = features(run)
    close(images, expected[0])
    close(texts, expected[1])


def test_a_run_and_its_average_give_both_towers(tmp_path):
    # Catches: a text tower that stays random, averaged weights of one tower with raw ones of the other.
    run = run_of(tmp_path / "run", "CLIP")
    state = run.model.state_dict()
    assert_same(loaded(run.folder / "model.safetensors", RECIPES["CLIP"])[1], state)
    average = {name: tensor + 1.0 for name, tensor in state.items()}
    of_text = {name for name in state if name.startswith("text.")}
    save_file({name: average[name] for name in state if name not in of_text}, run.folder / "ema.safetensors")
    save_file({name: average[name] for name in of_text}, run.folder / "ema-text.safetensors")
    assert_same(loaded(run.folder / "ema.safetensors", RECIPES["CLIP"])[1], average)


def test_timm_gives_the_image_tower_only(tmp_path):
    # Catches: a classifier of ImageNet's classes taken for a projection, a text tower without values.
    spec = ModelSpec("vit_base_patch16_clip_224", 16, 32, None, _SMALL)
    torch.manual_seed(0)
    model = create_model(spec, for_training=False, device="cpu")
    shake(model)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    checkpoint, state = loaded(tmp_path / "timm.safetensors", RECIPES["CLIP"])
    new = {"head.weight"} | {name for name in state if name.startswith("text.")}
    assert new == {*checkpoint.newly_initialised}
    assert "ignored: head.bias (16,), head.weight (16, 24)" in checkpoint.summary
    assert_same(
        {name: tensor for name, tensor in state.items() if name not in new},
        {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")},
    )
    assert float(state["text.logit_scale"]) == pytest.approx(2.6593, abs=1e-4)


@pytest.mark.parametrize("tool", ["timm", "onnx"])
@pytest.mark.parametrize("kind", ["CLIP", "SigLIP"])
def test_the_image_tower_alone(tmp_path, tool, kind):
    # Catches: an export without its projection.
    if tool == "onnx":
        pytest.importorskip("onnxruntime")
    run = run_of(tmp_path / "run", kind)
    found = export(run.folder, tool)
    assert found.within
    if tool == "timm":
        model = timm.create_model(f"local-dir:{found.folder}", pretrained=True).eval()
        with torch.no_grad():
            close(F.normalize(model(run.images())), features(run)[0])
        if kind == "CLIP":  # timm's folder starts a run with its projection
            _, state = loaded(found.folder, RECIPES[kind])
            assert torch.equal(state["head.weight"], run.model.head.weight)


def test_a_classifier_starts_from_the_image_tower(tmp_path):
    # Catches: a projection to 16 features that is taken for a classifier, or whose missing bias is an error.
    pytest.importorskip("transformers")
    run = run_of(tmp_path / "run", "CLIP")
    export(run.folder, "hf")
    # As many classes as the projection has columns, too: its rows are no classes.
    for source, classes in itertools.product((run.folder, run.folder / "export-hf"), (10, 16)):
        whole = create_model(ModelSpec("vit_base_patch16_clip_224", classes, 32, None, _SMALL))
        checkpoint = InitialCheckpoint(source, whole)
        assert checkpoint.newly_initialised == ("head.bias", "head.weight")
        assert {*checkpoint.left_out} == {name for name in run.model.state_dict() if name.startswith("text.")}


CHANGED = {
    "vocabulary": (
        {"tokenizer": "bytes"},
        {"vocab_size": 300},
        r"a vocabulary of 300 tokens and the run's tokenizer 259; give the --tokenizer",
    ),
    "context length": ({"context_length": 12}, {}, "captions have 9 tokens and the run's 12; give --context-length 9"),
    "heads": (
        {"text_heads": 3},
        {},
        "heads of the text tower: 2 in its config and 3 in the model; give --text-heads 2",
    ),
    "activation": ({"text_model": "clip_base_quickgelu"}, {}, "activation of the text tower: GELU in its config"),
    "end token": ({}, {"eos_token_id": 7}, "its end token has the id 7 and the tokenizer's 258"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_text_of_another_kind_is_refused(tmp_path, change):
    # Catches: pretrained weights whose token ids mean other words, or that compute something else.
    pytest.importorskip("transformers")
    run = run_of(tmp_path / "run", "CLIP")
    folder = export(run.folder, "hf").folder
    ours, theirs, message = CHANGED[change]
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= theirs
    (folder / "config.json").write_text(json.dumps(config))
    if "vocab_size" in theirs:
        tensors = load_file(folder / "model.safetensors")
        tensors["text_model.embeddings.token_embedding.weight"] = torch.zeros(300, 24)
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"does not fit vit_base_patch16_clip_224: .*{message}"):
        InitialCheckpoint(folder, described(RECIPES["CLIP"] | ours), task=Clip)


@pytest.mark.parametrize(("tool", "published"), [("hf", False), ("hf", True), ("open_clip", False)], ids=str)
def test_another_padding_is_refused(tmp_path, tool, published):
    # Catches: SigLIP's features, which are those of the last token, of captions that are padded with another one.
    pytest.importorskip({"hf": "transformers"}.get(tool, tool))
    kind = "SigLIP" if tool == "hf" else "timm's name without projection"
    run = run_of(tmp_path / "run", kind)
    folder = export(run.folder, tool).folder
    model, task = described(RECIPES[kind]), task_of(RECIPES[kind])
    assert not InitialCheckpoint(folder, model, task=task).newly_initialised
    file = folder / {"hf": "config.json", "open_clip": "open_clip_config.json"}[tool]
    config = json.loads(file.read_text())
    text = config["text_config"] if tool == "hf" else config["model_cfg"]["text_cfg"]
    assert text.pop({"hf": "pad_token_id", "open_clip": "pad_id"}[tool]) == 256
    text |= {"vocab_size": 32_000} if published else {{"hf": "pad_token_id", "open_clip": "pad_id"}[tool]: 7}
    file.write_text(json.dumps(config))
    expected = f"padded with the id {1 if published else 7} and the tokenizer pads with 256; give its tokenizer.json"
    with pytest.raises(ValueError, match=expected):
        InitialCheckpoint(folder, model, task=task)


@pytest.mark.parametrize(
    ("kind", "more", "tool", "message"),
    [
        ("plain ViT", {}, "hf", r"CLIPModel has no counterpart of no norm_pre \(timm's vit_…_clip_… have that norm\)"),
        ("CLIP", {"model": "vit_base_patch16_rpn_224"}, "hf", "no counterpart of the block ResPostBlock"),
        ("CLIP", {"model": "vit_giant_patch14_dinov2"}, "hf", "the MLP GluMlp; .*reg_token|the MLP GluMlp"),
        ("CLIP", {"model": "eva02_tiny_patch14_224"}, "hf", "no counterpart of timm's class Eva"),
        ("CLIP", {"model_kwargs": {**_SMALL, "act_layer": "relu"}}, "hf", "the activation ReLU"),
        ("CLIP", {"model_kwargs": {**_SMALL, "qk_norm": True}}, "hf", r"blocks\.\*\.attn\.q_norm"),
        ("CLIP", {"text_pool": "last"}, "hf", "CLIPModel has no counterpart of --text-pool last"),
        ("SigLIP", {"model": "vit_base_patch16_224"}, "hf", "SiglipModel has no counterpart of global_pool 'token'"),
        ("SigLIP", {"text_pool": "map"}, "hf", "no counterpart of --text-pool map; text.attn_pool"),
        ("SigLIP", {"text_pool": "map"}, "open_clip", r"no counterpart of text\.attn_pool"),
        (
            "SigLIP",
            {},
            "open_clip",
            "images of 32 x 32; its own ViT has no counterpart of global_pool 'map'; attn_pool",
        ),
        ("CLIP", {"text_model": "clip_base_quickgelu"}, "open_clip", "the activations gelu and quick_gelu of the two"),
        ("CLIP", {"interpolation": "nearest"}, "open_clip", "--interpolation nearest: open_clip knows bicubic"),
    ],
)
def test_what_a_tool_cannot_represent_is_named(tmp_path, kind, more, tool, message):
    # Catches: another function under the same names.
    pytest.importorskip("open_clip" if tool == "open_clip" else "transformers")
    run = run_of(tmp_path / "run", kind, **more)
    with pytest.raises(ValueError, match=message):
        export(run.folder, tool)
    assert not (run.folder / f"export-{tool}").exists()


def test_the_command(tmp_path, capsys):
    # Catches: a run without its text tower exported as if it were whole; notes that nobody sees.
    pytest.importorskip("open_clip")
    run = run_of(tmp_path / "run", "CLIP")
    assert cli.main(["export", str(run.folder), "--to", "open_clip"]) == 0
    out = capsys.readouterr().out
    assert "note: the folder has no tokenizer: this text tower takes the ids of --tokenizer bytes" in out
    assert "load it with open_clip.create_model_and_transforms('local-dir:" in out
    (run.folder / "text.safetensors").unlink()
    assert cli.main(["export", str(run.folder), "--to", "open_clip", "--output", str(tmp_path / "x")]) == 2
    assert "text.safetensors in the same folder" in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", ["", "clip"])
def test_a_run_starts_from_both_towers(ranks, tmp_path, capsys, tokenizer):
    # Catches: a text tower, or the stage that has it, that starts from random values; ids of another tokenizer.
    run = run_of(tmp_path / "run", "CLIP")
    text = run.folder / "text.safetensors"
    save_file(load_file(text), text, metadata={"tokenizer": tokenizer or "bytes"})
    recipe = {**RECIPES["CLIP"], "deepspeed_config": str(write_config(tmp_path / "ds.json", 1))}
    recipe |= {"dataset": "glyphs", "val_split": "", "workers": 0, "lr": 0.0, "batch_size": 8, "max_steps": 1}
    recipe |= {"initial_checkpoint": str(run.folder), "warmup_epochs": 0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    argv = ["--recipe", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "next")]
    if tokenizer:
        assert "was trained with --tokenizer clip, but this run has bytes" in refusal(capsys, argv)
        return
    train_in(ranks, 2, [*argv, "--pp", "2"])
    written = load_file(tmp_path / "next" / "model.safetensors") | load_file(tmp_path / "next" / "text.safetensors")
    assert_same(written, run.model.state_dict())
