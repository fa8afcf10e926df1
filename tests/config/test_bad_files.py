"""Flags, files, folders and values that are invalid, or that a library or the system rejects: one line, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from project import ROOT
from safetensors.torch import save_file

from ds_vit.train import main

CPU = json.loads((ROOT / "ds_configs" / "cpu_zero1_fp32.json").read_text())
MODEL = ("patch_size=8", "embed_dim=24", "depth=1", "num_heads=2")
TINY = ["--model", "vit_tiny_patch16_224", "--model-kwargs", *MODEL, "--img-size", "16", "--workers", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four images, and files whose contents are not what their names say."""
    folder = tmp_path_factory.mktemp("bad")
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / "data" / split / label).mkdir(parents=True)
            Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / "data" / split / label / "0.png")
    for name in ("folder", "folder.json", "tars/train", "tars/val"):
        (folder / name).mkdir(parents=True)
    for name in ("file", "tars/train/a.tar"):
        (folder / name).write_text("none of the kind")
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00\x81")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    save_file({"cls_token": torch.zeros(1, 1, 24, dtype=torch.int32)}, folder / "whole.safetensors")
    return folder


TEXTS = {
    "endless.json": "[" * 100_000,
    "digits.json": '{"train_batch_size": ' + "9" * 5000 + "}",
    "control.yaml": "a: \x01\n",
    "object.yaml": "epochs: !!python/object/apply:os.system ['true']\n",
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}
BLOCKS = [
    ({"optimizer": "AdamW"}, '"optimizer" must be a block'),
    ({"optimizer": {**OPTIMIZER, "params": [1]}}, '"optimizer.params" must be a block'),
    ({"optimizer": {**OPTIMIZER, "params": {"lr": "fast"}}}, "lr"),
    ({"optimizer": {**OPTIMIZER, "params": {"lr": 1e-3, "eps": "small"}}}, "params of AdamW"),
    ({"zero_optimization": None}, '"zero_optimization" must be a block'),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "config.json: fp16.loss_scale must be >= 0"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer"),
    ({"data_types": {"grad_accum_dtype": [1]}}, "data_types.grad_accum_dtype"),
    ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": 3}}, "must be a list"),
]
LION = {"type": "Lion", "params": {"lr": 1e-3, "corrected_weight_decay": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
BOTH = [
    ("", {"train_batch_size": 10, "gradient_accumulation_steps": 1}, "10 is not micro-batch 2 x"),
    ("--layer-decay 0.7", {"optimizer": LION}, "--layer-decay does not work with corrected_weight_decay of Lion"),
    ("--sched linear", {"scheduler": WARMUP}, "WarmupLR"),
]
FLAGS = {
    "--model vit_tinny_patch16_224": "nearest are vit_tiny_patch16_224",
    "--model resnet50": "resnet50",
    "--task mae --model deit_tiny_distilled_patch16_224": "Distilled",
    "--model beit_base_patch16_224": "'beit' family",
    "--model-kwargs attn_drop_rate=0.1": "attn_drop",
    "--data-dir nowhere": "nowhere",
    "--batch-size 7": "7",
    "--mixup 0.8 --batch-size 1": "odd",
    "--eval-metric knn_top1": "top1, top5, loss",
    "--deepspeed_config {folder}/folder.json": "Is a directory",
    "--deepspeed_config {folder}/binary.json": "not UTF-8",
    "--deepspeed_config {folder}/endless.json": "malformed JSON: maximum recursion depth",
    "--deepspeed_config {folder}/digits.json": "malformed JSON: Exceeds the limit",
    "--recipe {folder}/control.yaml": "malformed YAML",
    "--recipe {folder}/object.yaml": "malformed YAML",
    "--model-kwargs patch_size=0": "timm cannot build",
    "--model-kwargs depth=0": "depth must be 1 or more",
    "--model-kwargs depth=1.5": "timm cannot build",
    "--model-kwargs in_chans=1": "in three colours",
    "--initial-checkpoint {folder}/whole.safetensors": "no floating-point numbers in 1 tensors (cls_token)",
    "--output {folder}/file": "is not a folder that can be written to",
    f"--output {{folder}}/{'x' * 300}": "File name too long",
    "--data-dir {folder}/file": "file",
    f"--data-dir {'x' * 5000}": "",
    "--data-dir {folder}/tars": "a.tar",
    "--dataset torch/cifar10 --data-dir {folder}/folder": "cifar10",
    "--dataset wds/nothing --data-dir {folder}/folder": "",
    "--resume {folder}/file": "--resume",
    "--resume {folder}/folder": "--resume",
    "--model local-dir:/nowhere": "local-dir:/nowhere",
    "--img-size 4": "img_size",
}
CASES = [
    *BOTH,
    *(("", block, message) for block, message in BLOCKS),
    *((words, {}, message) for words, message in FLAGS.items()),
]


@pytest.mark.filterwarnings("ignore")  # torch's, of tensors without elements
@pytest.mark.parametrize(("words", "changes", "message"), CASES, ids=lambda value: str(value)[:60])
def test_one_line(capsys, tmp_path, folder, words, changes, message):
    # Catches: a library's exception that looks like a bug of ours, or a page instead of a line.
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CPU, **changes}))
    words = [word.replace("{folder}", str(folder)) for word in words.split()]
    argv = [*TINY, "--max-steps", "2", "-b", "2", "--warmup-steps", "0", "--deepspeed_config", str(config)]
    for flag, value in (("--data-dir", folder / "data"), ("--output", tmp_path / "run")):
        argv += [] if flag in words else [flag, str(value)]
    if words[:1] == ["--model-kwargs"]:
        words[1:1] = MODEL
    assert main([*argv, *words]) == 2
    assert not dist.is_initialized()
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("train.py: error: ")
    assert message in lines[0]
