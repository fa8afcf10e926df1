"""Where a run's weights begin: `--pretrained` from a cache without a network, and what is said of each file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch
from curves import assert_same_curve, train_in
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from project import ROOT
from runs import refusal, resolved
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

from ds_vit.config.parser import parse
from ds_vit.models import hub

NAME = "vit_tiny_patch16_224"
TAGGED = f"{NAME}.augreg_in21k_ft_in1k"  # timm's default weights of the name
KWARGS = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
WORDS = [
    *("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "--dataset", "digits", "--img-size", 16),
    *("--model-kwargs", *(f"{key}={value}" for key, value in KWARGS.items())),
    *("--workers", 0, "--max-steps", 1, "-b", 4, "-vb", 60, "--warmup-steps", 0),
]


def words(*more: object) -> list[str]:
    return [str(word) for word in (*WORDS, *more)]


def weights(path: Path, **kwargs: object) -> dict[str, torch.Tensor]:
    """A tiny file for images of 32 x 32 pixels and ImageNet's 1,000 classes."""
    torch.manual_seed(3)
    state = timm.create_model(NAME, img_size=32, **{**KWARGS, **kwargs}).state_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)
    return state


def in_cache(home: Path, revision: str) -> Path:
    """Where the Hub's client looks for a file of timm's."""
    return home / "hub" / f"models--timm--{TAGGED}" / "snapshots" / revision / "model.safetensors"


def notes(argv: list[str]) -> str:
    """What a run on one rank would say before it starts."""
    return "\n".join(resolved(argv).notes)


@pytest.mark.slow
def test_pretrained_from_a_cache_without_a_network(tmp_path):
    # Catches: a network that is asked though the file is there, weights of another name, a new head that nobody hears
    # of, pixels normalised for other weights.
    state = weights(in_cache(tmp_path, "0123456789abcdef"))
    refs = in_cache(tmp_path, "main").parents[2] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123456789abcdef")
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    environ.pop("HF_HUB_CACHE", None)
    argv = words("--model", NAME, "--pretrained", "--lr", 0, "--output", tmp_path / "run", "--eval-interval", 0)
    command = [sys.executable, ROOT / "launch" / "train.py", *argv]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"weights from {TAGGED} (timm/{TAGGED}, revision 0123456789ab): 17 of 20 tensors taken as they are; resampled: "
        "pos_embed (1, 17, 24) in the file to (1, 5, 24); newly initialised: head.bias, head.weight; "
        "ignored: head.bias (1000,), head.weight (1000, 24)\n"
    ) in done.stdout
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(trained["blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "pretrained: true" in config
    assert re.search(r"^mean:\n- 0.5\n- 0.5\n- 0.5\n", config, re.MULTILINE), "not the tag's own"


def _no_network(*words, **more):
    raise LocalEntryNotFoundError("not in the cache") from OSError("no route to host")


def test_pretrained_that_is_not_here(tmp_path, monkeypatch, capsys):
    # Catches: a traceback of the Hub's client, a sentence whose file and place do not help.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    argv = words("--model", TAGGED, "--pretrained", "--output", tmp_path / "run")
    line = refusal(capsys, argv)
    place = in_cache(tmp_path, "main")
    assert "cannot be downloaded (" in line
    assert f"download https://huggingface.co/timm/{TAGGED}/resolve/main/model.safetensors to {place}" in line
    monkeypatch.setattr(hub, "hf_hub_download", _no_network)
    assert "cannot be downloaded (no route to host)" in refusal(capsys, [*argv, "--dry-run"])
    monkeypatch.setattr(hub, "hf_hub_download", mock.Mock(side_effect=HTTPError("proxy: 407")))
    assert "cannot be downloaded (proxy: 407)" in refusal(capsys, [*argv, "--dry-run"])
    weights(place)
    assert f"weights from {TAGGED} (timm/{TAGGED}, revision main): 17 of 20 tensors taken" in notes(argv)


@pytest.mark.slow
def test_a_model_in_a_folder_or_a_repository(ranks, tmp_path, monkeypatch, capsys):
    # Catches: saved arguments that are passed over, other weights, a network that is asked, a layout that needs a name.
    folder = tmp_path / "tiny"
    torch.manual_seed(3)
    save_for_hf(timm.create_model(NAME, img_size=16, num_classes=10, **KWARGS), folder)
    named = train_in(ranks, 1, words("--model", NAME, "--initial-checkpoint", folder, "--max-steps", 3))
    argv = words("--model-kwargs", "--pretrained", "--max-steps", 3, "--model")  # without arguments
    for layout in ("--tp", "--pp"):
        found = train_in(ranks, 2, [*argv, f"local-dir:{folder}", layout, "2"])
        assert_same_curve(named, found, rtol=1e-5)
    assert "starts from random" in notes([*argv, f"local-dir:{folder}", "--no-pretrained"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_model = f"hf-hub:timm/{TAGGED}"
    assert "its config.json is not in the Hugging Face cache" in refusal(capsys, [*argv, hub_model])
    in_cache(tmp_path, "main").parent.parent.mkdir(parents=True)
    folder.rename(in_cache(tmp_path, "main").parent)
    assert f"(timm/{TAGGED}, revision main): 20 of 20 tensors taken as they are" in notes([*argv, hub_model])
    in_cache(tmp_path, "main").with_name("config.json").write_text('{"architectures": ["ViT"]}')
    assert "it names no timm architecture; `ds-vit import`" in refusal(capsys, [*argv, hub_model])


def test_names_without_weights(capsys):
    # Catches: a name whose weights are silently those of another, or of nothing.
    assert "timm has no weights of vit_base_patch32_plus_256" in refusal(
        capsys, words("--model", "vit_base_patch32_plus_256", "--pretrained")
    )


def test_a_tag_that_is_not_loaded():
    # Catches: somebody who believes to fine-tune and trains from nothing.
    said = f"--model {TAGGED} names weights, and training starts from random ones: add --pretrained"
    assert said in notes(words("--model", TAGGED))
    assert "starts from random" not in notes(words("--model", NAME))


def test_two_places_to_start_from(tmp_path, capsys):
    weights(tmp_path / "w.safetensors")
    argv = words("--model", NAME, "--initial-checkpoint", tmp_path / "w.safetensors")
    assert "are both given; keep one" in refusal(capsys, [*argv, "--pretrained"])
    (tmp_path / "recipe.yaml").write_text("pretrained: true\nmodel: vit_base_patch32_plus_256\n")
    assert not parse([*argv, "--recipe", str(tmp_path / "recipe.yaml")]).pretrained
    (tmp_path / "recipe.yaml").write_text(f"initial_checkpoint: {tmp_path / 'w.safetensors'}\n")
    kept = parse(words("--model", NAME, "--no-pretrained", "--recipe", tmp_path / "recipe.yaml"))
    assert kept.initial_checkpoint == str(tmp_path / "w.safetensors")


def test_another_patch_size(tmp_path, capsys):
    # Catches: kernels that are resampled without a word, a request that is passed over.
    weights(tmp_path / "w.safetensors", patch_size=16)
    argv = words("--model", NAME, "--initial-checkpoint", tmp_path / "w.safetensors")
    line = refusal(capsys, argv)
    assert "it is of patches of 16 x 16 pixels, and the model's are 8 x 8; give --model-kwargs patch_size=16" in line
    said = notes([*argv, "--resample-patch-embed"])
    assert "patch_embed.proj.weight (24, 3, 16, 16) in the file to (24, 3, 8, 8)" in said
    assert "--resample-patch-embed has no effect without --pretrained" in refusal(
        capsys, words("--model", NAME, "--resample-patch-embed")
    )
    weights(tmp_path / "w.safetensors")
    assert "nothing is resampled" in notes([*argv, "--resample-patch-embed"])


def test_foreign_names_keep_their_patch_size(tmp_path, capsys):
    # Catches: a kernel under a foreign name that is resampled unseen; what a translation leaves out.
    state = timm.create_model(NAME, img_size=32, **{**KWARGS, "patch_size": 16}).state_dict()
    foreign = {f"module.visual.trunk.{name}": tensor for name, tensor in state.items()}
    save_file({**foreign, "module.logit_scale": torch.zeros(1)}, tmp_path / "clip.safetensors")
    argv = words("--model", NAME, "--initial-checkpoint", tmp_path / "clip.safetensors")
    assert "it is of patches of 16 x 16 pixels" in refusal(capsys, argv)
    said = notes([*argv, "--resample-patch-embed"])
    assert 'names begin with "module." in the file, which is cut off' in said
    assert "has a text tower of 1 tensor, which is not loaded" in said
    assert "blocks.0" not in said.split("ignored: ")[1]


def test_pixels_outside_all_patches():
    # Catches: the edges of every image cut off in silence; "1 patch of 30 x 30" for a patch of 16.
    wanted = "no patch of 8 x 8, 6 at the bottom and 6 on the right: use --img-size 32 or"
    assert wanted in notes(words("--model", NAME, "--img-size", 38))
