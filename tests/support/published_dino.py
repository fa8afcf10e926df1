"""Files as facebookresearch/dinov2 and facebookresearch/dinov3 publish them, with random values, and their forward.

The names, shapes and the order of operations are those of dinov2/models/vision_transformer.py and
dinov3/models/vision_transformer.py and of their layers, written anew in float64.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import layer_norm, linear

WIDTH, DEPTH, HEADS, PATCH, GRID = 48, 2, 2, 4, 4
SIDE = PATCH * GRID
KWARGS = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "patch_size": PATCH}
"""timm's arguments of the same sizes."""

State = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """What the published modules differ in.

    Attributes:
        generation: 2 or 3.
        registers: of them.
        hidden: width of the MLP.
        gated: whether it is a SwiGLU.
        bias: of query, key and value: "none", "zero" or "random".
    """

    generation: int
    registers: int
    hidden: int
    gated: bool
    bias: str


def kind_of(name: str) -> Kind:
    """The published module of one of timm's names."""
    generation = 3 if "dinov3" in name else 2
    gated = any(part in name for part in ("giant", "plus", "7b"))
    # SwiGLUFFNFused and SwiGLUFFN: two thirds of ratio * width, rounded up to a multiple of 8 (64 in the 7B).
    ratio, multiple = {"giant": (4, 8), "plus": (6, 8), "7b": (3, 64)}[
        next(part for part in ("giant", "plus", "7b") if part in name) if gated else "giant"
    ]
    hidden = math.ceil(WIDTH * ratio * 2 / 3 / multiple) * multiple if gated else 4 * WIDTH
    bias = "random" if generation == 2 or "qkvb" in name else "none" if "7b" in name else "zero"
    return Kind(generation, 4 if generation == 3 or "reg4" in name else 0, hidden, gated, bias)


def backbone(kind: Kind, seed: int = 0, untied: Sequence[str] = ()) -> State:
    """The state dict of a DinoVisionTransformer.

    Args:
        kind: of the module.
        seed: of its values.
        untied: further norms, of "cls_norm" and "local_cls_norm".
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, spread: float = 0.15) -> torch.Tensor:
        return spread * torch.randn(shape, generator=generator)

    def pair(name: str, *shape: int) -> State:
        return {f"{name}.weight": drawn(*shape), f"{name}.bias": drawn(shape[0])}

    def norm(name: str) -> State:
        return {f"{name}.weight": 1 + drawn(WIDTH), f"{name}.bias": drawn(WIDTH)}

    state = {"cls_token": drawn(1, 1, WIDTH), "mask_token": drawn(1, WIDTH)}
    if kind.generation == 2:
        state["pos_embed"] = drawn(1, GRID * GRID + 1, WIDTH)
    else:
        periods = 100.0 ** (2 * torch.arange(WIDTH // HEADS // 4) / (WIDTH // HEADS // 2))
        state["rope_embed.periods"] = periods
    if kind.registers:
        state["register_tokens" if kind.generation == 2 else "storage_tokens"] = drawn(1, kind.registers, WIDTH)
    state |= pair("patch_embed.proj", WIDTH, 3, PATCH, PATCH)
    for number in range(DEPTH):
        block = f"blocks.{number}"
        state |= norm(f"{block}.norm1") | norm(f"{block}.norm2") | pair(f"{block}.attn.proj", WIDTH, WIDTH)
        state |= {f"{block}.ls{side}.gamma": 1 + drawn(WIDTH) for side in (1, 2)}
        qkv = pair(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        if kind.bias == "none":
            del qkv[f"{block}.attn.qkv.bias"]
        elif kind.generation == 3:  # LinearKMaskedBias: what the key's third holds has no effect
            mask = torch.ones(3 * WIDTH)
            mask[WIDTH : 2 * WIDTH] = 0.0
            qkv[f"{block}.attn.qkv.bias_mask"] = mask
            if kind.bias == "zero":
                qkv[f"{block}.attn.qkv.bias"] *= 1 - mask
        state |= qkv
        if not kind.gated:
            state |= pair(f"{block}.mlp.fc1", kind.hidden, WIDTH) | pair(f"{block}.mlp.fc2", WIDTH, kind.hidden)
            continue
        for name in ("w12",) if kind.generation == 2 else ("w1", "w2"):
            state |= pair(f"{block}.mlp.{name}", kind.hidden * (2 if name == "w12" else 1), WIDTH)
        state |= pair(f"{block}.mlp.w3", WIDTH, kind.hidden)
    for name in ("norm", *untied):
        state |= norm(name)
    return state


def head(generation: int, prototypes: int, hidden: int, bottleneck: int, seed: int = 1) -> State:
    """The state dict of a DINOHead: weight-normalised prototypes in DINOv2, a plain linear map in DINOv3."""
    generator = torch.Generator().manual_seed(seed)
    sizes, state = (WIDTH, hidden, hidden, bottleneck), {}
    for number, (width, out) in enumerate(itertools.pairwise(sizes)):
        state[f"mlp.{2 * number}.weight"] = 0.15 * torch.randn(out, width, generator=generator)
        state[f"mlp.{2 * number}.bias"] = 0.15 * torch.randn(out, generator=generator)
    rows = torch.randn(prototypes, bottleneck, generator=generator)
    if generation == 3:
        return state | {"last_layer.weight": rows}
    return state | {"last_layer.weight_g": 0.5 + torch.rand(prototypes, 1), "last_layer.weight_v": rows}


def below(prefix: str, state: Mapping[str, torch.Tensor]) -> State:
    """The tensors under a prefix."""
    return {prefix + name: tensor for name, tensor in state.items()}


def training_file(kind: Kind, sizes: tuple[int, int, int], wrapper: str) -> dict[str, Any]:
    """What training writes: {"teacher": …}, or {"model": …} with the student and the losses' state.

    The student's values are others than the teacher's.
    """

    def of(seed: int) -> State:
        heads = {name: head(kind.generation, *sizes, seed=seed + place) for place, name in enumerate(HEADS_THERE, 1)}
        return below("backbone.", backbone(kind, seed)) | {
            name: tensor for part, state in heads.items() for name, tensor in below(f"{part}.", state).items()
        }

    if wrapper == "teacher":
        return {"teacher": of(0)}
    state = below("student.", of(10)) | below("teacher.", of(0)) | {"dino_loss.center": torch.zeros(1, sizes[0])}
    if wrapper == "model, EMA":  # DINOv3 registers the teacher twice
        state |= below("model_ema.", of(0))
    return {"model": state, "iteration": 3, "optimizer": {"state": {}}}


HEADS_THERE = ("dino_head", "ibot_head")


def in_chunks(state: Mapping[str, torch.Tensor]) -> State:
    """The names of DINOv2's blocks in chunks of one (`block_chunks`): `blocks.CHUNK.NUMBER.…`."""
    return {re.sub(r"blocks\.(\d+)\.", r"blocks.\1.\1.", name): tensor for name, tensor in state.items()}


def tokens(
    kind: Kind, state: Mapping[str, torch.Tensor], images: torch.Tensor, masks: torch.Tensor | None = None
) -> torch.Tensor:
    """x_norm_clstoken, register tokens and x_norm_patchtokens, float64 [B, 1 + registers + N, WIDTH].

    Args:
        kind: of the module.
        state: of `backbone`.
        images: [B, 3, SIDE, SIDE].
        masks: bool [B, N].
    """
    p = {name: tensor.double() for name, tensor in state.items()}
    eps = 1e-6 if kind.generation == 2 else 1e-5  # "layernorm", "layernormbf16"
    x = F.conv2d(images.double(), p["patch_embed.proj.weight"], p["patch_embed.proj.bias"], stride=PATCH)
    x = x.flatten(2).transpose(1, 2)
    if masks is not None:
        x = torch.where(masks[..., None], p["mask_token"][None], x)
    batch = len(x)
    x = torch.cat([p["cls_token"].expand(batch, -1, -1), x], dim=1)
    if kind.generation == 2:
        x = x + p["pos_embed"]
    registers = p.get("register_tokens", p.get("storage_tokens"))
    if registers is not None:
        x = torch.cat([x[:, :1], registers.expand(batch, -1, -1), x[:, 1:]], dim=1)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"], eps)

    def mapped(name: str, x: torch.Tensor) -> torch.Tensor:
        bias = p.get(f"{name}.bias")
        return linear(x, p[f"{name}.weight"], bias * p.get(f"{name}.bias_mask", 1.0) if bias is not None else None)

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        qkv = mapped(f"{name}.qkv", x).reshape(batch, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if kind.generation == 3:
            q, k = rotated(q), rotated(k)
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return mapped(f"{name}.proj", (weights @ v).transpose(1, 2).reshape(batch, -1, WIDTH))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        centres = 2 * (torch.arange(GRID).double() + 0.5) / GRID - 1
        places = torch.stack(torch.meshgrid(centres, centres, indexing="ij"), dim=-1).flatten(0, 1)
        angles = (2 * math.pi * places[:, :, None] / p["rope_embed.periods"]).flatten(1).tile(2)
        prefix, patches = x[:, :, : 1 + kind.registers], x[:, :, 1 + kind.registers :]
        first, second = patches.chunk(2, dim=-1)
        turned = patches * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
        return torch.cat([prefix, turned], dim=2)

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        if not kind.gated:
            return mapped(f"{name}.fc2", F.gelu(mapped(f"{name}.fc1", x)))
        if kind.generation == 2:
            gate, value = mapped(f"{name}.w12", x).chunk(2, dim=-1)
        else:
            gate, value = mapped(f"{name}.w1", x), mapped(f"{name}.w2", x)
        return mapped(f"{name}.w3", F.silu(gate) * value)

    for number in range(DEPTH):
        block = f"blocks.{number}"
        x = x + p[f"{block}.ls1.gamma"] * attention(f"{block}.attn", norm(f"{block}.norm1", x))
        x = x + p[f"{block}.ls2.gamma"] * mlp(f"{block}.mlp", norm(f"{block}.norm2", x))
    prefix, patches = x[:, : 1 + kind.registers], x[:, 1 + kind.registers :]
    of_prefix = "cls_norm" if "cls_norm.weight" in p else "norm"
    return torch.cat([norm(of_prefix, prefix), norm("norm", patches)], dim=1)


def cosines(state: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Cosines of a head's bottleneck features with its prototypes, float64 [R, K]."""
    p = {name: tensor.double() for name, tensor in state.items()}
    x = rows.double()
    for number in (0, 2, 4):
        x = linear(F.gelu(x) if number else x, p[f"mlp.{number}.weight"], p[f"mlp.{number}.bias"])
    weight = p.get("last_layer.weight_v", p.get("last_layer.weight"))
    return F.normalize(x, dim=-1) @ F.normalize(weight, dim=-1).T
