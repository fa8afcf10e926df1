"""DINO with iBOT as a plain loop of timm and torch in one process, without DeepSpeed, and our run of the same.

The loop takes from our code what is random, which other tests check: the order of the samples, their crops, the draws
of drop-path, the masks and the initial weights. Losses are written out over whole matrices.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from curves import assert_same_curve, checkpoints_in_time, read_rows, train_rows
from picture_folders import made, smooth_photo
from project import write_config
from runs import unpredicted
from safetensors.torch import load_file, save_file

from ds_vit import randomness
from ds_vit.checkpoint.load import tensors_of_json
from ds_vit.config.schema import RunConfig
from ds_vit.data.augment.crops import MultiCrop, block_masks
from ds_vit.data.sampler import SampleOrder
from ds_vit.data.settings import CropConfig, ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.models.keyed_drop import KeyedDrop, replace_drops, sample_keys
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart_towers, tower_of
from ds_vit.models.zoo import ModelSpec
from ds_vit.tasks.dino.towers import create_self_distillation

MODEL = "vit_tiny_patch16_224"
KWARGS = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
SIZE, LOCAL, NUM_LOCAL = 16, 8, 2
HEAD = RunConfig(prototypes=48, head_hidden_dim=256, head_bottleneck_dim=16)
GLOBAL_BATCH, IMAGES, STEPS, EPOCHS = 48, 240, 20, 4
RTOL = 1e-5
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}
DECAY_END = 0.08
SPREAD, FACTORS = 0.15, {"patch_embed": 4.0, "qkv": 4.0, "cls_token": 0.1}
DROP_PATH, LAYER_DECAY, CLIP = 0.1, 0.9, 0.02
WORDS = [
    *("--task", "dino", "--img-size", SIZE, "--drop-path", DROP_PATH, "--workers", 0),
    *("--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", "", "--log-interval", 1, "--log-images", 0),
    *("--local-crops-size", LOCAL, "--local-crops-number", NUM_LOCAL, "--prototypes", HEAD.prototypes),
    *("--head-hidden-dim", HEAD.head_hidden_dim, "--head-bottleneck-dim", HEAD.head_bottleneck_dim),
    *("--sched", "constant", "--warmup-epochs", 0, "--epochs", EPOCHS, "--layer-decay", LAYER_DECAY),
    *("--weight-decay-end", DECAY_END, "--warmup-teacher-temp-epochs", 2, "--teacher-momentum", 0.9),
    *("--mask-ratio-min-max", 0.3, 0.6),
]
"""Flags of our run, without the model, the folder of images and --centering."""


class Variant(NamedTuple):
    """What is trained.

    Attributes:
        model: timm's name.
        kwargs: its arguments.
        words: further flags of our run.
        norms: final norms in addition to `norm`, which the file of weights has too.
        draws: shift, jitter and rescale of rotary coordinates.
        held_steps: steps in which the backbone stays where it is.
        factors: on the spread of the initial weights whose names have these parts.
    """

    model: str = MODEL
    kwargs: Mapping[str, Any] = KWARGS
    words: tuple[Any, ...] = ()
    norms: tuple[str, ...] = ()
    draws: tuple[float, float, float] = (0.0, 1.0, 1.0)
    held_steps: int = 0
    factors: Mapping[str, float] = FACTORS


PLAIN = Variant()
DINOV3 = Variant(
    "vit_small_patch16_dinov3",
    {**KWARGS, "global_pool": "token"},
    (
        *("--rope-shift-coords", 0.2, "--rope-jitter-coords", 1.3, "--rope-rescale-coords", 2),
        *("--untie-cls-and-patch-norms", "--untie-global-and-local-cls-norm", "--freeze-backbone-epochs", 0.6),
    ),
    ("patch_norm", "local_cls_norm"),
    (0.2, 1.3, 2.0),
    3,
    {"patch_embed": 4.0, "qkv": 2.0, "_token": 0.1},
)
"""DINOv3's rotary positions at drawn coordinates, its separate norms, and a backbone that begins to learn in step 4."""


class Plain(NamedTuple):
    """Loss and norm of each step; the teacher's tensors by our names, and the centres, at the end."""

    rows: list[dict[str, Any]]
    teacher: dict[str, torch.Tensor]
    centers: dict[str, torch.Tensor]


def write_images(folder: Path) -> Path:
    """Small smooth images of one class, and weights of each variant."""
    for number in range(IMAGES):
        smooth_photo(20, 24, number).save(made(folder / "train" / "all" / f"{number:03}.png"))
    for variant in (PLAIN, DINOV3):
        write_weights(folder, variant)
    return folder


def words_of(folder: Path, stage: int, output: Path, *words: Any, variant: Variant = PLAIN) -> list[str]:
    """The command line of our run; its JSON is written next to the output."""
    blocks = {"optimizer": {"type": "SGD", "params": SGD}, "gradient_clipping": CLIP}
    config = write_config(output.with_name(f"{output.name}.json"), stage, zero_optimization={"stage": stage}, **blocks)
    data = ("--data-dir", folder, "--initial-checkpoint", folder / f"{variant.model}.safetensors")
    kwargs = (f"{name}={value}" for name, value in variant.kwargs.items())
    model = ("--model", variant.model, *variant.words, "--model-kwargs", *kwargs)
    return [str(w) for w in (*model, *WORDS, *data, "--deepspeed_config", config, "--output", output, *words)]


def write_weights(folder: Path, variant: Variant = PLAIN) -> Path:
    """Random weights of the backbone, larger than timm's: KoLeo amplifies rounding where features are alike."""
    generator, file = torch.Generator().manual_seed(0), folder / f"{variant.model}.safetensors"
    shapes = timm.create_model(variant.model, num_classes=0, img_size=SIZE, **variant.kwargs).state_dict()
    shapes |= {f"{norm}.{kind}": shapes[f"norm.{kind}"] for norm in variant.norms for kind in ("weight", "bias")}
    state = {}
    for name, tensor in shapes.items():
        spread = SPREAD * next((factor for part, factor in variant.factors.items() if part in name), 1.0)
        is_scale = ("norm" in name and name.endswith("weight")) or "gamma" in name
        state[name] = float(is_scale) + spread * torch.randn(tensor.shape, generator=generator)
    save_file(state, str(file))
    return file


def initial_weights(folder: Path, variant: Variant) -> dict[str, torch.Tensor]:
    """Of all towers, by our names: the file's, and ours of heads and mask token."""
    spec = ModelSpec(variant.model, img_size=SIZE, drop_path_rate=DROP_PATH, model_kwargs=variant.kwargs)
    whole = create_self_distillation(spec, HEAD)
    found = {}
    for name, layers in take_apart_towers(whole).items():
        initialise(tower_of(whole, name), layers, seed=RunConfig().seed, device="cpu")
        found |= {layer.prefix + name: p.detach() for layer in layers for name, p in layer.named_parameters()}
    return found | load_file(str(folder / f"{variant.model}.safetensors"))


class Backbone(torch.nn.Module):
    """timm's ViT with a mask token, whose drop-path has our draws."""

    def __init__(self, drop_path: float, variant: Variant) -> None:
        super().__init__()
        self.vit = timm.create_model(
            variant.model,
            num_classes=0,
            img_size=SIZE,
            drop_path_rate=drop_path,
            **{"dynamic_img_size": True, **variant.kwargs},
        )
        replace_drops(self.vit)
        self.drops = [module for module in self.vit.modules() if isinstance(module, KeyedDrop)]
        self.mask_token = torch.nn.Parameter(torch.zeros(1, 1, self.vit.embed_dim))
        for norm in variant.norms:
            self.add_module(norm, copy.deepcopy(self.vit.norm))

    def forward(
        self,
        images: torch.Tensor,
        keys: torch.Tensor,
        masks: torch.Tensor | None = None,
        step: int = 0,
        variant: Variant = PLAIN,
    ) -> torch.Tensor:
        """Normed tokens; with a step, at the coordinates that it draws."""
        vit, size = self.vit, images.shape[-1]
        tokens = vit.patch_embed(images)
        rows = tokens.shape[1]
        if masks is not None:
            tokens = torch.where(masks.view(*tokens.shape[:3], 1), self.mask_token[None], tokens)
        with sample_keys(self.drops, keys):
            if not hasattr(vit, "rope"):
                return vit.norm(vit.blocks(vit.norm_pre(vit._pos_embed(tokens))))
            tokens, _ = vit._pos_embed(tokens)
            for number, block in enumerate(vit.blocks):
                width = vit.embed_dim // variant.kwargs["num_heads"]
                shift, factor = draw(variant, step, size, number) if step else ([0.0, 0.0], [1.0, 1.0])
                tokens = block(tokens, rope=rotary_table(rows, width, shift, factor))
        if not variant.norms:
            return vit.norm(tokens)
        of_prefix = self.local_cls_norm if step and size == LOCAL else vit.norm
        prefix = vit.num_prefix_tokens
        return torch.cat((of_prefix(tokens[:, :prefix]), self.patch_norm(tokens[:, prefix:])), dim=1)


def draw(variant: Variant, step: int, size: int, block: int) -> tuple[list[float], list[float]]:
    """The shift and the factor of each axis, in a block's pass over crops of a size."""
    name = randomness.name_key("rope")
    bits = [randomness.mix(RunConfig().seed, name, size, block, number, step) for number in range(5)]
    of_rows, of_columns, *stretches = (2 * ((value >> 40) & (2**24 - 1)) / 2**24 - 1 for value in bits)
    shift, jitter, rescale = variant.draws
    both = rescale ** stretches[2]
    return [shift * of_rows, shift * of_columns], [both * jitter**stretch for stretch in stretches[:2]]


def rotary_table(rows: int, width: int, shift: list[float], factor: list[float]) -> torch.Tensor:
    """DINOv3's sines and cosines of a grid's patches [N, 2 width]."""
    middles = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows * 2 - 1
    axes = torch.meshgrid(middles, middles, indexing="ij")
    periods = 100.0 ** (torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = [
        2 * math.pi * ((axis.flatten() + by) * times)[:, None] / periods
        for axis, by, times in zip(axes, shift, factor, strict=True)
    ]
    angles = torch.cat(angles, dim=1).repeat(1, 2)
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything else in fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class Head(torch.nn.Module):
    """DINO's head: logits of rows, prototypes normalised."""

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        linears = [torch.nn.Linear(*pair) for pair in itertools.pairwise((width, hidden, hidden, bottleneck))]
        gelu = torch.nn.GELU
        self.mlp = torch.nn.Sequential(linears[0], gelu(), linears[1], gelu(), linears[2])
        self.last_layer = torch.nn.Linear(bottleneck, prototypes, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.normalize(exact(self.mlp(rows)), dim=-1) @ F.normalize(exact(self.last_layer.weight), dim=-1).T


def sinkhorn(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Three iterations of Sinkhorn-Knopp, as in DINOv2's code."""
    q = (logits.double() / temperature).exp().T
    q /= q.sum()
    for _ in range(3):
        q /= q.sum(dim=1, keepdim=True) * len(q)
        q /= q.sum(dim=0, keepdim=True) * q.shape[1]
    return (q * q.shape[1]).T.float()


def koleo(features: torch.Tensor) -> torch.Tensor:
    """Minus the mean logarithm of the distance to the nearest row."""
    rows = F.normalize(features, dim=-1, eps=1e-8)
    nearest = (rows @ rows.T).detach().fill_diagonal_(-1.0).argmax(1)
    return -(F.pairwise_distance(rows, rows[nearest], eps=1e-8) + 1e-8).log().mean()


def terms(
    targets: torch.Tensor,
    patch_targets: torch.Tensor,
    of_globals: torch.Tensor,
    of_locals: torch.Tensor,
    of_patches: torch.Tensor,
    masks: torch.Tensor,
    classes: torch.Tensor,
) -> torch.Tensor:
    """The loss of DINO, iBOT and KoLeo.

    Args:
        targets, patch_targets: the teacher's assignments of global crops [2B, K] and masked patches [M, K].
        of_globals, of_locals, of_patches: the student's logits.
        masks: bool [2B, N].
        classes: the student's class tokens of global crops [2B, D].
    """
    crops = torch.cat((of_globals.unflatten(0, (-1, 2)), of_locals.unflatten(0, (-1, NUM_LOCAL))), dim=1)
    crops, targets = (crops / 0.1).log_softmax(-1), targets.unflatten(0, (-1, 2))
    pairs = [(u, v) for u in range(2) for v in range(2 + NUM_LOCAL) if u != v]
    dino = sum(-(targets[:, u] * crops[:, v]).sum(-1).mean() for u, v in pairs) / len(pairs)
    shares = ((1 / masks.sum(1).clamp(min=1))[:, None].expand(masks.shape)[masks] / len(masks)).to(crops.dtype)
    ibot = -(patch_targets * (of_patches / 0.1).log_softmax(-1)).sum(-1) @ shares
    return dino + ibot + 0.1 * sum(koleo(rows) for rows in classes.unflatten(0, (-1, 2)).unbind(1))


def _layer_of(name: str) -> int:
    """The number of a parameter of the backbone's layer, for --layer-decay; the heads are above the last one."""
    if name.startswith("vit.blocks."):
        return 1 + int(name.split(".")[2])
    stem = ("vit.cls_token", "vit.reg_token", "vit.pos_embed", "vit.patch_embed", "mask_token")
    in_stem = name.startswith(stem)
    return 0 if in_stem else KWARGS["depth"]  # the final norm counts with the last block, as in timm


def _groups(backbone: Backbone, head: Head, held_steps: int) -> list[dict[str, Any]]:
    """One group a parameter, with its learning rate, and the steps in which that is 0."""
    groups = []
    for name, parameter in backbone.named_parameters():
        factor = LAYER_DECAY ** (KWARGS["depth"] + 1 - _layer_of(name)) * (0.2 if "patch_embed" in name else 1.0)
        decays = parameter.ndim > 1 and not name.endswith(("_token", "pos_embed"))
        rate = SGD["lr"] * factor
        groups.append({"params": [parameter], "lr": rate, "rate": rate, "decays": decays, "held": held_steps})
    for name, parameter in head.named_parameters():
        held = IMAGES // GLOBAL_BATCH if "last_layer" in name else 0
        rate = SGD["lr"]
        groups.append({"params": [parameter], "lr": rate, "rate": rate, "decays": parameter.ndim > 1, "held": held})
    return groups


def _cosine(step: int, start: float, end: float) -> float:
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * (step - 1) / STEPS))


@functools.cache
def _batch(folder: Path, step: int) -> tuple[torch.Tensor, ...]:
    """Global crops [B, 2, ...], local crops [B, n, ...], keys of all crops [B, 2 + n] of a step, from 0."""
    source = open_source("", str(folder), "train")
    order = SampleOrder(len(source), GLOBAL_BATCH, RunConfig().seed)
    indices, keys = order.rows(step, range(GLOBAL_BATCH))
    image = ImageConfig((SIZE, SIZE), mean=(0.5,) * 3, std=(0.5,) * 3)
    crop = MultiCrop(image, CropConfig(LOCAL, NUM_LOCAL), RunConfig())
    views = [crop(source.image(int(index)), int(key)) for index, key in zip(indices, keys, strict=True)]
    large, small = (torch.stack(part).float().div(255).sub(0.5).div(0.5) for part in zip(*views, strict=True))
    of_samples = randomness.mix_tensor(torch.from_numpy(keys), randomness.name_key("view"))
    return large, small, randomness.mix_tensor(of_samples[:, None], torch.arange(2 + NUM_LOCAL))


def train(folder: Path, centering: str, rejected: int = 0, variant: Variant = PLAIN) -> Plain:
    """The plain loop.

    Args:
        folder: of images and weights.
        centering: "ema" or "sinkhorn".
        rejected: a step that changes nothing.
        variant: what is trained.
    """
    weights = initial_weights(folder, variant)
    student, head = (
        Backbone(DROP_PATH, variant),
        Head(KWARGS["embed_dim"], HEAD.head_hidden_dim, HEAD.head_bottleneck_dim, HEAD.prototypes),
    )
    student.load_state_dict(
        {
            name if name.startswith(("mask_token", *variant.norms)) else f"vit.{name}": tensor
            for name, tensor in weights.items()
            if not name.startswith(("teacher", "dino_head"))
        }
    )
    head.load_state_dict({n.removeprefix("dino_head."): t for n, t in weights.items() if n.startswith("dino_head.")})
    teacher, teacher_head = Backbone(0.0, variant), copy.deepcopy(head)
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.SGD(_groups(student, head, variant.held_steps), momentum=SGD["momentum"])
    centers = {"class": torch.zeros(HEAD.prototypes), "patch": torch.zeros(HEAD.prototypes)}
    steps_per_epoch, rows, first_patch = IMAGES // GLOBAL_BATCH, [], student.vit.num_prefix_tokens
    grid = SIZE // KWARGS["patch_size"]
    for step in range(1, STEPS + 1):
        if step == rejected:
            continue
        decay, momentum = _cosine(step, SGD["weight_decay"], DECAY_END), _cosine(step, 0.9, 1.0)
        warmup = 2 * steps_per_epoch
        temperature = 0.07 if step > warmup else float(np.linspace(0.04, 0.07, warmup)[step - 1])
        for group in optimizer.param_groups:
            group["weight_decay"] = decay if group["decays"] else 0.0
            group["lr"] = 0.0 if step <= group["held"] else group["rate"]
        large, small, keys = _batch(folder, step - 1)
        of_large, of_small = keys[:, :2].reshape(-1), keys[:, 2:].reshape(-1)
        masks = torch.from_numpy(block_masks(of_large.numpy(), (grid, grid), 0.5, (0.3, 0.6)))
        with torch.no_grad():
            tokens = teacher(large.flatten(0, 1), of_large, variant=variant)
            taught_tokens = tokens[:, 0]
            logits = {"class": teacher_head(tokens[:, 0]), "patch": teacher_head(tokens[:, first_patch:][masks])}
            if centering == "sinkhorn":
                targets = {part: sinkhorn(of_part, temperature) for part, of_part in logits.items()}
            else:
                targets = {
                    part: ((of_part - centers[part]) / temperature).softmax(1) for part, of_part in logits.items()
                }
                centers = {part: 0.9 * centers[part] + 0.1 * of_part.mean(0) for part, of_part in logits.items()}
        tokens = student(large.flatten(0, 1), of_large, masks, step, variant)
        of_locals = student(small.flatten(0, 1), of_small, None, step, variant)[:, 0]
        students = head(tokens[:, 0]), head(of_locals), head(tokens[:, first_patch:][masks])
        loss = terms(targets["class"], targets["patch"], *students, masks, tokens[:, 0])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*student.parameters(), *head.parameters()], CLIP)
        optimizer.step()
        with torch.no_grad():
            for theirs, ours in ((teacher, student), (teacher_head, head)):
                for mean, value in zip(theirs.parameters(), ours.parameters(), strict=True):
                    mean.mul_(momentum).add_(value, alpha=1 - momentum)
        features, assigned = F.normalize(taught_tokens, dim=-1), targets["class"].double()
        mean = assigned.mean(0)
        gauges = {
            "feature_std": float(features.std(0, unbiased=False).mean()) * math.sqrt(features.shape[1]),
            "teacher_entropy": -float(torch.xlogy(assigned, assigned).sum(1).mean()),
            "prototype_entropy": -float(torch.xlogy(mean, mean).sum()),
            "teacher_kl": float(torch.xlogy(mean, mean * HEAD.prototypes).sum()),
        }
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item(), **gauges})
    tensors = {f"teacher.{n.removeprefix('vit.')}": p for n, p in teacher.named_parameters() if n != "mask_token"}
    tensors |= {f"teacher_head.{n}": p for n, p in teacher_head.named_parameters()}
    state = {} if centering == "sinkhorn" else centers
    return Plain(rows, {name: p.detach() for name, p in tensors.items()}, state)


# ---- our run ---------------------------------------------------------------------------------------------------------


def train_ours(
    ranks: Any,
    folder: Path,
    output: Path,
    layout: tuple[int, int, int, int],
    *words: Any,
    variant: Variant = PLAIN,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[dict[str, Any]]:
    """The training rows of our run in a layout (dp, tp, ZeRO stage, micro-batches), within a context on each rank."""
    dp, tp, stage, accumulation = layout
    batch = ("-b", GLOBAL_BATCH // dp // accumulation, "--grad-accum-steps", accumulation, "--tp", tp)
    argv = words_of(folder, stage, output, *batch, *words, variant=variant)
    assert ranks.run(dp * tp, _train_on_rank, argv, within, timeout=400.0) == [0] * (dp * tp)
    return train_rows(read_rows(output))


def _train_on_rank(argv: list[str], within: Callable[[], AbstractContextManager[Any]]) -> int:
    from ds_vit.train import main

    with checkpoints_in_time(), unpredicted(), within():
        return main(argv)


def assert_same_run(plain: Plain, rows: list[dict[str, Any]], output: Path) -> None:
    """Loss, norm and gauges of each step; the teacher's tensors and the centres at the end."""
    assert_same_curve(plain.rows, rows, rtol=RTOL)
    for gauge in ("feature_std", "teacher_entropy", "prototype_entropy", "teacher_kl"):
        found = [row[gauge] for row in rows]
        assert found == pytest.approx([row[gauge] for row in plain.rows], rel=1e-4, abs=1e-6), gauge
    expected, found = plain.teacher | plain.centers, read_teacher(output) | read_centers(output)
    assert expected.keys() == found.keys()
    for name, theirs in expected.items():
        ours = found[name].float()
        if name.endswith("attn.qkv.bias"):  # softmax does not depend on the key's part: its gradient is rounding
            theirs, ours = (tensor.unflatten(0, (3, -1))[[0, 2]] for tensor in (theirs, ours))
        deviation = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
        assert deviation < RTOL, f"{name}, of the teacher or a centre, deviates by {deviation:.1e} of its norm"


def read_teacher(output: Path) -> dict[str, torch.Tensor]:
    """The teacher that a run has written, by our names."""
    backbone, head = (load_file(str(output / f"{name}.safetensors")) for name in ("teacher", "teacher_head"))
    of_head = {name.removeprefix("dino_head."): head.pop(name) for name in [*head] if name.startswith("dino_head.")}
    named = {f"teacher.{name}": tensor for name, tensor in (backbone | head).items()}
    return named | {f"teacher_head.{name}": tensor for name, tensor in of_head.items()}


def read_centers(output: Path) -> dict[str, torch.Tensor]:
    """The centres in the checkpoint of a run's end."""
    state = json.loads((output / "checkpoints" / f"step-{STEPS:08}" / "state.json").read_text())
    return tensors_of_json(state["task"])
