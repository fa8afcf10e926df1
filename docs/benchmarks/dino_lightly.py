"""DINO in a plain loop of lightly and timm, one process: the peer of launch/dino_cifar.sh.

    python docs/benchmarks/dino_lightly.py --data-dir DIR --batch-size 64 [--seed 42]

Its images, sizes, rates, losses and number of steps are those of launch/recipes/dino_cifar.yaml. Augmentation, head,
losses and momentum are lightly's, the ViT is timm's. It prints one JSON object: the top-1 accuracy of k nearest
neighbours on the teacher's features, before and after training.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
import yaml
from lightly.loss import DINOLoss, KoLeoLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms import DINOTransform
from lightly.utils.scheduler import cosine_schedule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source

RECIPE = Path(__file__).parents[2] / "launch" / "recipes" / "dino_cifar.yaml"


class Images(Dataset):
    """A source's images with a transform, and their classes."""

    def __init__(self, source: Source, transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.source.image(index)), int(self.source.target(index))


def neighbours(model: nn.Module, train: Dataset, test: Dataset, k: int) -> float:
    """Top-1 in per cent of the weighted vote of k nearest neighbours (Caron et al. 2021), temperature 0.07."""
    model.eval()
    found = []
    with torch.no_grad():
        for split in (train, test):
            batches = [(F.normalize(model(images)), classes) for images, classes in DataLoader(split, 250)]
            found.append([torch.cat(parts) for parts in zip(*batches, strict=True)])
    (bank, classes), (features, labels) = found
    similarities, places = (features @ bank.T).topk(k)
    votes = torch.zeros(len(labels), int(classes.max()) + 1)
    votes.scatter_add_(1, classes[places], (similarities / 0.07).exp())
    return 100.0 * float((votes.argmax(1) == labels).double().mean())


def network(recipe: dict[str, Any]) -> nn.Sequential:
    """A ViT and its projection head."""
    size, kwargs = recipe["img_size"], recipe["model_kwargs"]
    backbone = timm.create_model(recipe["model"], num_classes=0, img_size=size, dynamic_img_size=True, **kwargs)
    widths = kwargs["embed_dim"], recipe["head_hidden_dim"], recipe["head_bottleneck_dim"]
    return nn.Sequential(backbone, DINOProjectionHead(*widths, recipe["prototypes"], freeze_last_layer=1))


def crops(recipe: dict[str, Any]) -> DINOTransform:
    """The two global views of an image."""
    return DINOTransform(
        global_crop_size=recipe["img_size"],
        global_crop_scale=tuple(recipe["global_crops_scale"]),
        n_local_views=0,
        normalize={"mean": recipe["mean"], "std": recipe["std"]},
    )


def parameter_groups(student: nn.Sequential, weight_decay: float) -> list[dict[str, Any]]:
    """With weight decay, and without: biases, norms, positions and the class token."""
    free = {f"0.{name}" for name in student[0].no_weight_decay()}
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            groups[parameter.ndim <= 1 or name in free]["params"].append(parameter)
    return groups


def train_dino(recipe: dict[str, Any], train: Source, test: Source, batch_size: int, seed: int) -> dict[str, float]:
    """Train, and rate the teacher before and after."""
    torch.manual_seed(seed)
    plain = Compose([ToTensor(), Normalize(recipe["mean"], recipe["std"])])
    views = Images(train, crops(recipe))
    loader = DataLoader(views, batch_size, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True)
    bank, held_out = Images(train, plain), Images(test, plain)
    student, teacher = network(recipe), network(recipe)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(parameter_groups(student, recipe["weight_decay"]), lr=recipe["lr"])
    criterion, koleo = DINOLoss(recipe["prototypes"]), KoLeoLoss()
    before = neighbours(teacher[0], bank, held_out, recipe["eval_knn"])
    total, warmup = recipe["epochs"] * len(loader), recipe["warmup_epochs"] * len(loader)
    step, started = 0, time.perf_counter()
    for epoch in range(recipe["epochs"]):
        student.train()
        for images, _ in loader:
            share = step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = recipe["lr"] * share
            features = student[0](torch.cat(images))
            taught, given = teacher(torch.cat(images)), student[1](features)
            loss = criterion([*taught.chunk(2)], [*given.chunk(2)], teacher_temp=recipe["teacher_temp"])
            loss = loss + recipe["koleo_weight"] * sum(koleo(of_crop) for of_crop in features.chunk(2))
            optimizer.zero_grad()
            loss.backward()
            student[1].cancel_last_layer_gradients(epoch)
            nn.utils.clip_grad_norm_(student.parameters(), recipe["clip_grad"])
            optimizer.step()
            update_momentum(student, teacher, cosine_schedule(step, total, recipe["teacher_momentum"], 1.0))
            step += 1
    seconds = time.perf_counter() - started
    after = neighbours(teacher[0], bank, held_out, recipe["eval_knn"])
    return {"random": before, "trained": after, "seconds": seconds, "loss": float(loss)}


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="with the folders train and test, or where torch/cifar10 is")
    parser.add_argument("--dataset", default="", help="as of training")
    parser.add_argument("--dataset-download", action="store_true", help="as of training")
    parser.add_argument("--batch-size", type=int, required=True, help="images of a step")
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)
    recipe = yaml.safe_load(RECIPE.read_text())
    validation = "validation" if arguments.dataset else "test"
    sources = [
        open_source(arguments.dataset, arguments.data_dir, split, download=arguments.dataset_download)
        for split in (recipe["train_split"], validation)
    ]
    torch.set_num_threads(1)  # the loader has the other core
    figures = train_dino(recipe, *sources, arguments.batch_size, arguments.seed)
    print(json.dumps({"seed": arguments.seed, **figures}))


if __name__ == "__main__":
    main()
