"""Files, folders and values that timm, torch, json, yaml or the system refuse: one sentence, and code 2."""

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
    """Two images, and everything that is not what its name says."""
    folder = tmp_path_factory.mktemp("bad")
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / "data" / split / label).mkdir(parents=True)
            pixels = np.zeros((16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "data" / split / label / "0.png")
    for name in ("folder", "folder.json", "folder.yaml", "tars/train", "tars/val"):
        (folder / name).mkdir(parents=True)
    for name in ("file", "text.safetensors", "text.pth", "text.safetensors.index.json", "text.foo", "tars/train/a.tar"):
        (folder / name).write_text("none of the kind")
    for name in ("binary.json", "binary.yaml"):
        (folder / name).write_bytes(b"\xff\xfe\x00\x81")
    for name in ("empty.json", "empty.safetensors", "empty.pth"):
        (folder / name).touch()
    (folder / "list.json").write_text("[1, 2]")
    (folder / "endless.json").write_text("[" * 100_000)
    (folder / "digits.json").write_text('{"train_batch_size": ' + "9" * 5000 + "}")
    (folder / "flow.yaml").write_text("a: [1,\nb: }")
    (folder / "control.yaml").write_text("a: \x01\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "object.yaml").write_text("epochs: !!python/object/apply:os.system ['true']\n")
    (folder / "kwargs.yaml").write_text("model_kwargs: [1]\n")
    (folder / "list.safetensors.index.json").write_text("[1]")
    (folder / "gone.safetensors.index.json").write_text('{"weight_map": {"cls_token": "gone.safetensors"}}')
    save_file({"cls_token": torch.zeros(1, 1, 24, dtype=torch.int32)}, folder / "whole.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "whole.safetensors").read_bytes()[:-20])
    torch.save([1, 2, 3], folder / "list.pth")
    torch.save({"cls_token": torch.zeros(1, 1, 24, dtype=torch.int8)}, folder / "whole.pth")
    torch.save({"model": {"cls_token": 3}}, folder / "number.pth")
    return folder


JSON_FILES = {
    "folder.json": "Is a directory",
    "binary.json": "not UTF-8",
    "empty.json": "malformed JSON",
    "list.json": "one JSON object, not a list",
    "endless.json": "malformed JSON: maximum recursion depth",
    "digits.json": "malformed JSON: Exceeds the limit",
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}
BLOCKS = [
    ({"optimizer": "AdamW"}, '"optimizer" must be a block'),
    ({"optimizer": {**OPTIMIZER, "params": [1]}}, "optimizer.params must be a block"),
    ({"optimizer": {**OPTIMIZER, "params": {"lr": "fast"}}}, "lr"),
    ({"optimizer": {**OPTIMIZER, "params": {"lr": 1e-3, "betas": 0.9}}}, "betas must be two numbers"),
    ({"optimizer": {**OPTIMIZER, "params": {"lr": 1e-3, "betas": [0.9, 0.9, 0.9]}}}, "betas must be two numbers"),
    ({"optimizer": {**OPTIMIZER, "params": {"lr": 1e-3, "eps": "small"}}}, "params of AdamW"),
    ({"gradient_clipping": "a lot"}, "gradient_clipping must be a number"),
    ({"zero_optimization": None}, "must be a block"),
    ({"zero_optimization": {"stage": [1]}}, "stage [1] does not exist"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer"),
    ({"bf16": {"enabled": "maybe"}}, "bf16.enabled"),
    ({"scheduler": "WarmupLR"}, '"scheduler" must be a block'),
    ({"data_types": {"grad_accum_dtype": [1]}}, "data_types.grad_accum_dtype"),
    ({"torch_autocast": {"enabled": True, "lower_precision_safe_modules": 3}}, "must be a list"),
    ({"train_batch_size": 4.5}, "train_batch_size must be a whole number"),
    ({"steps_per_print": "often"}, "steps_per_print must be a number above 0"),
]
RECIPES = {
    "folder.yaml": "Is a directory",
    "binary.yaml": "not UTF-8",
    "flow.yaml": "malformed YAML",
    "control.yaml": "malformed YAML",
    "list.yaml": "a recipe is a table of flags, not a list",
    "object.yaml": "malformed YAML",
    "kwargs.yaml": "key=value pieces, not 1",
}
MODEL_KWARGS = {
    "patch_size=big": "timm cannot build",
    "patch_size=0": "timm cannot build",
    "embed_dim=0": "timm cannot build",
    "depth=-1": "timm cannot build",
    "depth=0": "depth must be 1 or more",
    "depth=1.5": "timm cannot build",
    "num_heads=7": "timm cannot build",
    "init_values=x": "timm cannot build",
    "global_pool=median": "timm cannot build",
    "norm_layer=foo": "timm cannot build",
    "in_chans=1": "in three colours",
    "patchsize=8": "nearest: 'patch_size'",
}
WEIGHTS = {
    "folder": "without model.safetensors",
    "text.safetensors": "no safetensors file",
    "empty.safetensors": "no safetensors file",
    "cut.safetensors": "no safetensors file",
    "whole.safetensors": "no floating-point numbers in 1 tensors (cls_token)",
    "whole.pth": "no floating-point numbers in 1 tensors (cls_token)",
    "text.safetensors.index.json": "cannot be read",
    "list.safetensors.index.json": "cannot be read",
    "gone.safetensors.index.json": "no safetensors file",
    "text.pth": "is not loaded",
    "empty.pth": "cannot be read",
    "list.pth": "not a dictionary of tensors",
    "number.pth": "is no state dict: it holds cls_token (int)",
    "text.foo": "its ending '.foo' is none of",
}
FLAGS = {
    "--output {folder}/file": "is not a folder that can be written to",
    "--output {folder}/file/run": "is not a folder that can be written to",
    f"--output {{folder}}/{'x' * 300}": "File name too long",
    "--data-dir {folder}/file": "file",
    f"--data-dir {'x' * 5000}": "",
    "--data-dir {folder}/tars": "a.tar",
    "--dataset torch/cifar10 --data-dir {folder}/folder": "cifar10",
    "--dataset wds/nothing --data-dir {folder}/folder": "",
    "--resume {folder}/file": "--resume",
    "--resume {folder}/folder": "--resume",
    "--aa rand-foo-m9": "rand-foo-m9",
    "--model local-dir:/nowhere": "local-dir:/nowhere",
    "--img-size 4": "img_size",
}
CASES = [
    *(pytest.param(["--deepspeed_config", f"{{folder}}/{name}"], said, id=name) for name, said in JSON_FILES.items()),
    *(pytest.param(block, said, id=json.dumps(block)) for block, said in BLOCKS),
    *(pytest.param(["--recipe", f"{{folder}}/{name}"], said, id=name) for name, said in RECIPES.items()),
    *(pytest.param(["--model-kwargs", *MODEL, word], said, id=word) for word, said in MODEL_KWARGS.items()),
    *(pytest.param(["--initial-checkpoint", f"{{folder}}/{name}"], said, id=name) for name, said in WEIGHTS.items()),
    *(pytest.param(words.split(), said, id=words[:40]) for words, said in FLAGS.items()),
]


@pytest.mark.filterwarnings("ignore")  # torch's, of tensors without elements
@pytest.mark.parametrize(("asked", "said"), CASES)
def test_one_sentence(capsys, tmp_path, folder, asked, said):
    # Catches: a library's exception that reaches the top as if it were a bug of ours, or a page in place of a sentence.
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CPU, **asked} if isinstance(asked, dict) else CPU))
    words = [] if isinstance(asked, dict) else [word.replace("{folder}", str(folder)) for word in asked]
    argv = [*TINY, "--max-steps", "2", "-b", "2", "--warmup-steps", "0", "--deepspeed_config", str(config)]
    for flag, value in (("--data-dir", folder / "data"), ("--output", tmp_path / "run")):
        argv += [] if flag in words else [flag, str(value)]
    assert main([*argv, *words]) == 2
    assert not dist.is_initialized()
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("train.py: error: ")
    assert said in lines[0]
