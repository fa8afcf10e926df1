"""The papers' recipes: their commands are legal, their values the papers', and each trains on real images."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import oracle
import pytest
from curves import read_rows, train_in, train_rows
from project import ROOT
from vits import write_teacher

from ds_vit.config import parser as config

RECIPES = ROOT / "launch" / "recipes"
NAMES = ("deit3_small", "mae_finetune_base", "mae_pretrain_base", "bigvision_s16_90ep", "augreg")
NAMES += ("clip_vit_b16", "lit", "siglip_so400m", "deit_distilled", "feature_distillation")
NAMES += ("dino_vit_s16", "dinov2_vit_s14_own_data", "vit_lite_7_8_cifar10")
NAMES += ("dinov3_vit_s16_own_data", "dinov3_continue_vit_b16", "dino_small_data")
TINY = {"depth": 2, "embed_dim": 48, "num_heads": 3}


def command_of(name):
    """The words behind launch/train.py of the command in a recipe's first lines."""
    lines = [line.removeprefix("#").strip() for line in (RECIPES / f"{name}.yaml").read_text().splitlines()]
    [command] = [line for line in lines[:6] if line.startswith("deepspeed launch/train.py ")]
    return shlex.split(command)[2:]


def test_every_recipe_is_tested():
    """A recipe that nobody runs."""
    small = {"digits", "glyphs", "mae_digits", "dino_cifar", "scenes"}
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*NAMES} | small


@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_the_first_lines_is_legal(monkeypatch, name):
    """A flag that was renamed; a recipe that cannot be found from the project's root."""
    monkeypatch.chdir(ROOT)
    parsed = config.parse(command_of(name))
    assert {"model", "epochs", "deepspeed_config", "batch_size"} <= parsed.model_fields_set
    assert Path(parsed.deepspeed_config).is_file()
    text = (RECIPES / f"{name}.yaml").read_text()
    assert re.search(r"arXiv \d{4}\.\d{5}", text.splitlines()[0]), "the paper"
    [(batch, gpus)] = re.findall(r"For a global batch of (\d+): on (8 GPUs|one GPU)", text)
    assert int(batch) == (1 if gpus == "one GPU" else 8) * parsed.batch_size * (parsed.grad_accum_steps or 1)


@pytest.fixture(scope="module")
def cifar(real_images, tmp_path_factory):
    """A few CIFAR-10 JPEGs in class folders."""
    return oracle.cifar_splits(real_images, tmp_path_factory.mktemp("cifar"), 120, 20)


def on_cpu(name, folder):
    """A recipe's JSON in fp32 and with small buckets."""
    data = json.loads((RECIPES / config.load_recipe(str(RECIPES / f"{name}.yaml"))["deepspeed_config"]).read_text())
    for key in ("bf16", "data_types", "communication_data_type"):
        data.pop(key)
    data["zero_optimization"] |= {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    path = folder / "cpu.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_dry_run(ranks, cifar, tmp_path, name):
    """Two steps on two ranks of a model that is small in width and depth alone."""
    recipe = config.load_recipe(str(RECIPES / f"{name}.yaml"))
    has_text = recipe.get("task") in ("clip", "siglip")
    kwargs = {**recipe.get("model_kwargs", {}), **TINY}
    json_file = on_cpu(name, tmp_path)
    argv = ["--recipe", RECIPES / f"{name}.yaml", "--deepspeed_config", json_file]
    argv += ["--dataset", "glyphs"] if has_text else ["--data-dir", cifar]
    argv += [*oracle.kwargs_words(kwargs), "--img-size", 32, "-b", 6, "--workers", 0, "--log-interval", 1]
    argv += ["--max-steps", 2, "--output", tmp_path / "run"]
    if "warmup_steps" in recipe:
        argv += ["--warmup-steps", 2]  # 10,000 are more than these few images have
    if "kd_model_name" in recipe:
        write_teacher(tmp_path / "teacher", **{**TINY, "embed_dim": 96, "img_size": 32})  # wider than the student
        argv += ["--kd-model-name", f"local-dir:{tmp_path / 'teacher'}"]
    if name == "mae_pretrain_base":
        argv += ["--decoder-dim", 64, "--decoder-depth", 1, "--decoder-heads", 2]
    if recipe.get("task") == "dino":
        patch = 14 if "patch14" in recipe["model"] else 16
        argv += ["--img-size", 2 * patch, "--local-crops-size", patch, "--prototypes", 64, "--head-hidden-dim", 32]
    if has_text:
        argv += ["--tokenizer", "bytes", "--text-width", 48, "--text-heads", 3, "--text-depth", 2]
    train_in(ranks, 2, argv)
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in train_rows(rows)] == [1, 2]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in train_rows(rows))
    assert next(row for row in reversed(rows) if row["kind"] == "eval")["images"] == (580 if has_text else 20)
    resolved = config.load_recipe(str(tmp_path / "run" / "config.yaml"))
    changed = {"warmup_steps", "tokenizer", "kd_model_name", "batch_size", "deepspeed_config", "img_size"}
    changed |= {"model_kwargs", "local_crops_size", "prototypes", "head_hidden_dim"}
    changed |= {"lr", "lr_scale_by_batch", "decoder_dim", "decoder_depth", "decoder_heads"}
    assert {key for key in recipe if key in resolved and resolved[key] != recipe[key]} <= changed
    told, asked = (json.loads(path.read_text())["optimizer"] for path in (tmp_path / "run/deepspeed.json", json_file))
    assert told["type"] == asked["type"]
    assert told["params"]["weight_decay"] == recipe["weight_decay"]
    scale = 2 * 6 / 256 if "lr_scale_by_batch" in recipe else 1
    assert told["params"]["lr"] == pytest.approx(recipe["lr"] * scale)
