"""DINO in a plain loop of lightly and timm, one process: the peer of launch/dino_cifar.sh.

    python docs/benchmarks/dino_lightly.py DATA [--seed 0] [flags]

DATA has the folders `train` and `test`, each with a folder of images per class. The images of training are those that
`--train-split 'train[:10%]'` gives. Augmentation, head, loss and momentum are lightly's, the ViT is timm's. It prints
one JSON object: the top-1 accuracy of k nearest neighbours on the teacher's features, before and after training.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms import DINOTransform
from lightly.utils.scheduler import cosine_schedule
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


def neighbours(model: nn.Module, train: ImageFolder, test: ImageFolder, workers: int, k: int = 20) -> float:
    """Top-1 in per cent of the weighted vote of k nearest neighbours (Caron et al. 2021), temperature 0.07."""
    model.eval()
    found = []
    with torch.no_grad():
        for split in (train, test):
            loader = DataLoader(split, 250, num_workers=workers)
            features, labels = zip(*((F.normalize(model(images)), of) for images, of in loader), strict=True)
            found.append((torch.cat(features), torch.cat(labels)))
    (bank, classes), (features, labels) = found
    similarities, places = (features @ bank.T).topk(k)
    votes = torch.zeros(len(labels), int(classes.max()) + 1)
    votes.scatter_add_(1, classes[places], (similarities / 0.07).exp())
    return 100.0 * float((votes.argmax(1) == labels).double().mean())


def _network(arguments: argparse.Namespace) -> nn.Sequential:
    """A ViT and its projection head."""
    backbone = timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=0,
        img_size=arguments.size,
        patch_size=arguments.patch_size,
        embed_dim=arguments.dim,
        depth=arguments.depth,
        num_heads=arguments.dim // 32,
        dynamic_img_size=True,
    )
    return nn.Sequential(backbone, DINOProjectionHead(arguments.dim, 512, 64, arguments.prototypes))


def train_dino(arguments: argparse.Namespace, images: list[int]) -> dict[str, float]:
    """Train, and rate the teacher before and after.

    Args:
        arguments: of the command line.
        images: numbers of the training images.
    """
    torch.manual_seed(arguments.seed)
    plain = Compose([ToTensor(), Normalize(MEAN, STD)])
    views = DINOTransform(
        global_crop_size=arguments.size,
        global_crop_scale=tuple(arguments.global_scale),
        local_crop_size=arguments.local_size,
        local_crop_scale=tuple(arguments.local_scale),
        n_local_views=arguments.locals,
        cj_strength=0.5,
        normalize={"mean": list(MEAN), "std": list(STD)},
    )
    folder = Path(arguments.data)
    seen = Subset(ImageFolder(str(folder / "train"), views), images)
    bank = Subset(ImageFolder(str(folder / "train"), plain), images)
    test = ImageFolder(str(folder / "test"), plain)
    student, teacher = _network(arguments), _network(arguments)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    loader = DataLoader(
        seen, arguments.batch, shuffle=True, drop_last=True, num_workers=arguments.workers, persistent_workers=True
    )
    decayed = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in student.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=arguments.lr)
    criterion = DINOLoss(arguments.prototypes)
    before = neighbours(teacher[0], bank, test, arguments.workers)
    total, step, started = arguments.epochs * len(loader), 0, time.perf_counter()
    for epoch in range(arguments.epochs):
        student.train()
        for crops, *_ in loader:
            warm = min(1.0, (step + 1) / (arguments.warmup_epochs * len(loader)))
            rate = arguments.lr * (warm if warm < 1 else 0.5 * (1 + math.cos(math.pi * step / total)))
            decay = cosine_schedule(step, total, 0.04, 0.4)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.param_groups[0]["weight_decay"] = decay
            taught = teacher(torch.cat(crops[:2])).chunk(2)
            given = [*student(torch.cat(crops[:2])).chunk(2)]
            if arguments.locals:
                given += student(torch.cat(crops[2:])).chunk(arguments.locals)
            loss = criterion(list(taught), given, teacher_temp=arguments.teacher_temp)
            optimizer.zero_grad()
            loss.backward()
            if epoch < 1:
                student[1].last_layer.weight_v.grad = None
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()
            update_momentum(student, teacher, cosine_schedule(step, total, arguments.momentum, 1.0))
            step += 1
        if arguments.verbose:
            now = neighbours(teacher[0], bank, test, arguments.workers)
            print(
                epoch + 1,
                f"loss {float(loss):.3f}",
                f"knn {now:.2f}",
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
    after = neighbours(teacher[0], bank, test, arguments.workers)
    return {"random": before, "trained": after, "seconds": time.perf_counter() - started, "loss": float(loss)}


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--local-size", type=int, default=16)
    parser.add_argument("--locals", type=int, default=4)
    parser.add_argument("--global-scale", type=float, nargs=2, default=(0.32, 1.0))
    parser.add_argument("--local-scale", type=float, nargs=2, default=(0.1, 0.32))
    parser.add_argument("--patch-size", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--prototypes", type=int, default=1024)
    parser.add_argument("--teacher-temp", type=float, default=0.04)
    parser.add_argument("--momentum", type=float, default=0.99)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    images = torch.randperm(50_000, generator=generator)[: arguments.images].tolist()
    print(json.dumps({**vars(arguments), **train_dino(arguments, images)}))


if __name__ == "__main__":
    main()
