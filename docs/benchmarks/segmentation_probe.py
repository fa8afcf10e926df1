"""A frozen backbone with the linear head of `--task segmentation` next to scikit-learn's LogisticRegression.

    python docs/benchmarks/segmentation_probe.py [--run runs/segmentation]

The backbone is that of a finished run of launch/segmentation.sh, without its head. It is trained on with
--freeze-backbone. Logits upsampled bilinearly are the same function of features upsampled bilinearly, so scikit-learn
solves the same convex problem: it is fitted on the features of random pixels of the training scenes. Its coefficients
then take the place of the head, and the same evaluation rates both: whole validation scenes, sliding windows.
The figures are written to docs/benchmarks/segmentation_probe.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from ds_vit.data.masks import crop_mask
from ds_vit.data.sources.masks import IGNORED
from ds_vit.tasks.segmentation.scenes import SceneSource
from ds_vit.tools.bench import device_name, versions

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_suffix(".json")
SIDE = 48  # of launch/recipes/scenes.yaml
PIXELS = 40  # of a training scene, for scikit-learn
CONFIG, RECIPE = "ds_configs/cpu_zero1_fp32.json", "launch/recipes/scenes.yaml"
RUN = ["train", "--deepspeed_config", CONFIG, "--recipe", RECIPE, "-b", 32]
TRAIN = [*RUN, "--freeze-backbone", "--scale-range", 1, 1, "--checkpoint-interval", 0]


def ds_vit(*words: object) -> None:
    """Run `ds-vit` in the clone, on the CPU."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "ds_vit.cli", *map(str, words)]
    subprocess.run(argv, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)


def figures(folder: Path) -> dict[str, float]:
    """The last evaluation of a run, in percent."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "eval"][-1]
    return {name: round(last[name], 2) for name in ("miou", "pixel_accuracy")}


@torch.no_grad()
def features_of_pixels(backbone: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, D] and classes [n] of random pixels of each training scene's centre, cropped to a square."""
    config, source, random = backbone.pretrained_cfg, SceneSource(train=True), np.random.default_rng(0)
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    features, classes = [], []
    for index in range(len(source)):
        image, side = source.image(index), min(source.image(index).size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        resized = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        pixels = (torch.from_numpy(np.asarray(resized).copy()).permute(2, 0, 1) / 255.0 - mean) / std
        tokens = backbone.forward_features(pixels[None])[:, backbone.num_prefix_tokens :]
        grid = tokens.transpose(1, 2).unflatten(2, backbone.patch_embed.grid_size)
        upsampled = F.interpolate(grid, (SIDE, SIDE), mode="bilinear")[0].flatten(1).T.numpy()
        mask = np.asarray(crop_mask(source.entry("mask", index), (top, left, side, side), (SIDE, SIDE))).ravel()
        chosen = random.permutation(np.flatnonzero(mask != IGNORED))[:PIXELS]
        features.append(upsampled[chosen])
        classes.append(mask[chosen])
    return np.concatenate(features), np.concatenate(classes)


def main() -> None:
    """Train the head both ways, evaluate both, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "segmentation", help="of launch/segmentation.sh")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "segmentation_probe", help="of what is written")
    parser.add_argument("--epochs", type=int, default=10, help="of the head")
    asked = parser.parse_args()
    from sklearn.linear_model import LogisticRegression  # takes seconds to import

    folder = asked.folder.resolve()
    if not (folder / "backbone").exists():
        ds_vit("export", asked.run.resolve(), "--to", "timm", "--output", folder / "backbone")
    start = ("--initial-checkpoint", folder / "backbone" / "model.safetensors")
    words = [*TRAIN, *start, "--epochs", asked.epochs, "--lr", 0.01, "--set", "optimizer.params.weight_decay=0"]
    if not (folder / "head" / "summary.json").exists():
        ds_vit(*words, "--output", folder / "head")

    backbone = timm.create_model(f"local-dir:{folder / 'backbone'}", pretrained=True).eval()
    features, classes = features_of_pixels(backbone)
    solved = LogisticRegression(C=1e4, max_iter=2000).fit(features.astype(np.float64), classes)
    state = load_file(folder / "head" / "model.safetensors")
    state["seg_head.weight"] = torch.from_numpy(solved.coef_).float().contiguous()
    state["seg_head.bias"] = torch.from_numpy(solved.intercept_).float()
    save_file(state, folder / "sklearn.safetensors")
    words = [*RUN, "--eval-only", "--initial-checkpoint", folder / "sklearn.safetensors"]
    ds_vit(*words, "--output", folder / "sklearn")

    found = {
        "date": datetime.date.today().isoformat(),
        "machine": device_name(torch.device("cpu")),
        "versions": versions(),
        "pixels": len(classes),
        "linear_head": figures(folder / "head"),
        "logistic_regression": figures(folder / "sklearn"),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
