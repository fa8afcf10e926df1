"""The papers' recipes: their commands are legal, their values the papers', and each trains on real images."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import oracle
import pytest
import timm
import yaml
from curves import read_rows, train_in, train_rows
from project import ROOT
from safetensors.torch import save_file
from timm.models import save_for_hf

from ds_vit import config

RECIPES = ROOT / "launch" / "recipes"
NAMES = ("deit3_small", "mae_finetune_base", "mae_pretrain_base", "bigvision_s16_90ep", "augreg")
NAMES += ("clip_vit_b16", "lit", "siglip_so400m", "deit_distilled", "feature_distillation")
NAMES += ("dino_vit_s16", "dinov2_vit_s14_own_data", "vit_lite_7_8_cifar10")
TINY = {"depth": 2, "embed_dim": 48, "num_heads": 3}

# The papers' rows: what the run must have resolved, in config.yaml and in the JSON that DeepSpeed gets.
ROWS = {
    "deit3_small": (
        {"epochs": 800, "drop_path": 0.05, "mixup": 0.8, "cutmix": 1.0, "aa": "3a", "color_jitter": 0.3}
        | {"aug_repeats": 3, "bce_loss": True, "bce_target_thresh": 0.0, "smoothing": 0.0, "lr": 0.004, "reprob": 0.0},
        ("Lamb", 0.05, 1.0, [0.9, 0.999]),
    ),
    "deit_distilled": (
        {"epochs": 300, "drop_path": 0.1, "mixup": 0.8, "cutmix": 1.0, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25}
        | {"kd_distill_type": "token", "kd_token_distill_type": "hard", "task_loss_weight": 0.5, "lr": 0.001},
        ("AdamW", 0.05, 0.0, [0.9, 0.999]),
    ),
    "feature_distillation": (
        {"epochs": 100, "kd_distill_type": "feature", "distill_loss_weight": 1.0, "lr": 0.0005},
        ("AdamW", 0.05, 3.0, [0.9, 0.999]),
    ),
    "dino_vit_s16": (
        {"task": "dino", "epochs": 100, "ibot_weight": 0.0, "koleo_weight": 0.0, "teacher_momentum": 0.996, "lr": 0.001}
        | {"global_crops_scale": [0.4, 1.0], "local_crops_scale": [0.05, 0.4], "weight_decay_end": 0.4},
        ("AdamW", 0.04, 3.0, [0.9, 0.999]),
    ),
    "dinov2_vit_s14_own_data": (
        {"task": "dino", "epochs": 100, "ibot_weight": 1.0, "koleo_weight": 0.1, "layer_decay": 0.9, "min_lr": 1e-6}
        | {"patch_embed_lr_mult": 0.2, "teacher_temp": 0.07, "warmup_teacher_temp_epochs": 30, "lr": 0.00283},
        ("AdamW", 0.04, 3.0, [0.9, 0.999]),
    ),
    "vit_lite_7_8_cifar10": (
        {"epochs": 300, "drop_path": 0.1, "mixup": 0.8, "cutmix": 1.0, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25}
        | {"mixup_off_epoch": 175, "smoothing": 0.1, "min_lr": 1e-5, "scale": [0.8, 1.0], "lr": 0.00055},
        ("AdamW", 0.06, 0.0, [0.9, 0.999]),
    ),
    "mae_finetune_base": (
        {"epochs": 100, "drop_path": 0.1, "mixup": 0.8, "cutmix": 1.0, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25}
        | {"layer_decay": 0.65, "smoothing": 0.1, "min_lr": 1e-6},
        ("AdamW", 0.05, 0.0, [0.9, 0.999]),
    ),
    "mae_pretrain_base": (
        {"task": "mae", "mask_ratio": 0.75, "norm_pix_loss": True, "epochs": 800, "scale": [0.2, 1.0], "drop_path": 0.0}
        | {"aa": "", "color_jitter": 0.0, "hflip": 0.5, "min_lr": 0.0, "train_interpolation": "bicubic"},
        ("AdamW", 0.05, 0.0, [0.9, 0.95]),
    ),
    "bigvision_s16_90ep": (
        {"epochs": 90, "drop_path": 0.0, "mixup": 0.2, "cutmix": 0.0, "aa": "rand-m10-n2-p1", "lr": 0.001}
        | {"smoothing": 0.0, "scale": [0.05, 1.0]},
        ("AdamW", 0.1, 1.0, [0.9, 0.999]),
    ),
    "augreg": (
        {"epochs": 300, "drop_path": 0.0, "mixup": 0.5, "cutmix": 0.0, "aa": "rand-m15-n2-p1-mmax15", "lr": 0.001}
        | {"smoothing": 0.0, "scale": [0.05, 1.0]},
        ("AdamW", 0.1, 1.0, [0.9, 0.999]),
    ),
    "clip_vit_b16": (
        {"task": "clip", "text_model": "clip_base_quickgelu", "epochs": 32, "lr": 0.0005, "drop_path": 0.0}
        | {"hflip": 0.0, "train_crop_mode": "rkrc", "color_jitter": 0.0, "min_lr": 0.0},
        ("AdamW", 0.2, 0.0, [0.9, 0.98]),
    ),
    "lit": (
        {"task": "siglip", "lock_image": True, "epochs": 22, "lr": 0.001, "aa": "rand-m10-n2-p1", "min_lr": 0.0},
        ("AdamW", 10.0, 1.0, [0.9, 0.999]),
    ),
    "siglip_so400m": (
        {"task": "siglip", "text_model": "siglip_so400m", "context_length": 64, "epochs": 100, "lr": 0.001}
        | {"hflip": 0.0, "color_jitter": 0.0, "min_lr": 0.0, "mean": [0.5, 0.5, 0.5]},
        ("AdamW", 0.1, 1.0, [0.9, 0.95]),
    ),
}


def command_of(name):
    """The words behind launch/train.py of the command in a recipe's first lines."""
    lines = [line.removeprefix("#").strip() for line in (RECIPES / f"{name}.yaml").read_text().splitlines()]
    [command] = [line for line in lines[:6] if line.startswith("deepspeed launch/train.py ")]
    return shlex.split(command)[2:]


def test_every_recipe_is_tested():
    """A recipe that nobody runs."""
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*NAMES, "digits", "glyphs", "mae_digits", "dino_cifar"}


@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_the_first_lines_is_legal(monkeypatch, name):
    """A flag that was renamed; a recipe that cannot be found from the project's root."""
    monkeypatch.chdir(ROOT)
    parsed, explicit = config.parse(command_of(name))
    assert {"model", "epochs", "deepspeed_config", "batch_size"} <= explicit
    assert Path(parsed.deepspeed_config).is_file()
    text = (RECIPES / f"{name}.yaml").read_text()
    assert re.search(r"arXiv \d{4}\.\d{5}", text.splitlines()[0]), "the paper"
    [batch] = re.findall(r"For a global batch of (\d+): on 8 GPUs", text)
    assert int(batch) == 8 * parsed.batch_size * (parsed.grad_accum_steps or 1)


@pytest.fixture(scope="module")
def cifar(real_images, tmp_path_factory):
    """A few CIFAR-10 JPEGs in class folders."""
    folder = tmp_path_factory.mktemp("cifar")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, 120, "train")
    oracle.cifar_folder(real_images / "cifar10" / "test.tar", folder, 20, "val")
    return folder


def on_cpu(name, folder):
    """A recipe's JSON in fp32 and with small buckets."""
    data = json.loads((RECIPES / config.load_recipe(str(RECIPES / f"{name}.yaml"))["deepspeed_config"]).read_text())
    for key in ("bf16", "data_types", "communication_data_type"):
        data.pop(key)
    data["zero_optimization"] |= {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    path = folder / "cpu.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_dry_run(ranks, cifar, tmp_path, name):
    """Two steps on two ranks of a model that is small in width and depth alone."""
    recipe = config.load_recipe(str(RECIPES / f"{name}.yaml"))
    has_text = recipe.get("task") in ("clip", "siglip")
    kwargs = {**recipe.get("model_kwargs", {}), **TINY}
    argv = ["--recipe", RECIPES / f"{name}.yaml", "--deepspeed_config", on_cpu(name, tmp_path)]
    argv += ["--dataset", "glyphs"] if has_text else ["--data-dir", cifar]
    argv += [*oracle.kwargs_words(kwargs), "--img-size", 32, "-b", 6, "--workers", 0, "--log-interval", 1]
    argv += ["--max-steps", 2, "--output", tmp_path / "run"]
    if "warmup_steps" in recipe:
        argv += ["--warmup-steps", 2]  # 10,000 are more than these few images have
    if name == "mae_finetune_base":
        argv += ["--initial-checkpoint", _pretrained(tmp_path, recipe["model"], kwargs)]
    if "kd_model_name" in recipe:
        argv += ["--kd-model-name", f"local-dir:{_teacher(tmp_path / 'teacher')}"]
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
    flags, (optimizer, decay, clip, betas) = ROWS[name]
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {key: resolved[key] for key in flags} == flags
    deepspeed = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    params = deepspeed["optimizer"]["params"]
    assert (deepspeed["optimizer"]["type"], params["weight_decay"], deepspeed["gradient_clipping"]) == (
        optimizer,
        decay,
        clip,
    )
    assert params["betas"] == betas
    if name.startswith("mae_"):
        assert params["lr"] == pytest.approx(
            {"mae_finetune_base": 0.0005, "mae_pretrain_base": 1.5e-4}[name] * 12 / 256
        )


def _teacher(folder):
    """A small ViT as timm saves a model, wider than the student."""
    kwargs = {**TINY, "embed_dim": 96, "img_size": 32}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **kwargs)
    save_for_hf(model, folder, safe_serialization=True, model_args=kwargs)
    return folder


def _pretrained(folder, model, kwargs):
    """What MAE's encoder file holds: everything but a classifier."""
    encoder = timm.create_model(model, num_classes=0, img_size=32, **kwargs)
    path = folder / "mae.safetensors"
    save_file(encoder.state_dict(), path)
    return path
