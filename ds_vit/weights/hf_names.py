"""The names of Hugging Face's `ViTForImageClassification` and timm's for the same tensors.

The names are those of its files (transformers 4 and 5 write and read the same ones). timm keeps query, key and value in
one matrix of three blocks of rows, Hugging Face in three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import TimmViT

_LAYER = "vit.encoder.layer.*"
# timm's module (`*` for the number of a block) → Hugging Face's module, or its three for query, key and value.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "cls_token": ("vit.embeddings.cls_token",),
    "pos_embed": ("vit.embeddings.position_embeddings",),
    "patch_embed.proj": ("vit.embeddings.patch_embeddings.projection",),
    "norm": ("vit.layernorm",),
    "head": ("classifier",),
    "blocks.*.norm1": (f"{_LAYER}.layernorm_before",),
    "blocks.*.norm2": (f"{_LAYER}.layernorm_after",),
    "blocks.*.attn.qkv": tuple(f"{_LAYER}.attention.attention.{name}" for name in ("query", "key", "value")),
    "blocks.*.attn.proj": (f"{_LAYER}.attention.output.dense",),
    "blocks.*.mlp.fc1": (f"{_LAYER}.intermediate.dense",),
    "blocks.*.mlp.fc2": (f"{_LAYER}.output.dense",),
}
_PARTS = {theirs: (ours, part) for ours, names in _MODULES.items() for part, theirs in enumerate(names)}
_MARK = "embeddings.patch_embeddings.projection.weight"
_PREFIXES = ("vit.", "deit.", "")  # of the whole classifier, DeiT's twin of it, and the bare encoder

# Hugging Face's `hidden_act` → the class of timm's activation.
ACTIVATIONS = {"gelu": "GELU", "gelu_pytorch_tanh": "GELUTanh", "quick_gelu": "QuickGELU"}


def _split(name: str) -> tuple[str, str, str]:
    """A tensor's module with `*` for a block's number, that number, and the rest: ".weight", ".bias" or ""."""
    number = re.search(r"\.(\d+)\.", name)
    general = name.replace(number[0], ".*.", 1) if number else name
    module = general.removesuffix(".weight").removesuffix(".bias")
    return module, number[1] if number else "", general.removeprefix(module)


def hf_names(name: str) -> tuple[str, ...]:
    """The names of a timm tensor in a Hugging Face file: one name, or three for query, key and value.

    Raises:
        KeyError: `ViTForImageClassification` has no such tensor.
    """
    module, number, kind = _split(name)
    return tuple(theirs.replace("*", number) + kind for theirs in _MODULES[module])


def has_counterpart(name: str) -> bool:
    """Whether a timm tensor has a place in a Hugging Face file."""
    return _split(name)[0] in _MODULES


def needed_names() -> set[str]:
    """The timm tensors that every Hugging Face ViT has, `*` for a block's number; only the bias of qkv is optional."""
    whole = {"cls_token", "pos_embed"}
    named = {f"{module}.{kind}" for module in _MODULES.keys() - whole for kind in ("weight", "bias")}
    return whole | named - {"blocks.*.attn.qkv.bias"}


def is_hf(names: Mapping[str, object]) -> bool:
    """Whether these are the names of Hugging Face's ViT or DeiT."""
    return any(prefix + _MARK in names for prefix in _PREFIXES)


def from_hf(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face file under timm's names; query, key and value are read and joined.

    The pooler of `ViTModel`, which no classifier uses, is left out; names without a counterpart in timm stay.
    """
    prefix = next(prefix for prefix in _PREFIXES if prefix + _MARK in tensors)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(f"{prefix}pooler."):
            continue
        whole = f"vit.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
        for theirs in (whole, name):
            module, number, kind = _split(theirs)
            if module in _PARTS:
                break
        ours, part = _PARTS.get(module, (module, 0))
        parts.setdefault(ours.replace("*", number) + kind, {})[part] = tensor
    return {
        ours: torch.cat([pieces[i] for i in sorted(pieces)]) if len(pieces) > 1 else pieces.popitem()[1]
        for ours, pieces in parts.items()
    }


def check_hf_config(config: Mapping[str, object], model: TimmViT) -> None:
    """Compare what a Hugging Face config.json says, and no tensor's shape shows, with a model.

    Raises:
        UserError: another number of heads or another activation.
    """
    heads, act = config.get("num_attention_heads"), config.get("hidden_act")
    if heads is not None and heads != (own := model.blocks[0].attn.num_heads):
        raise UserError(f"it has {heads} heads and the model {own}; give --model-kwargs num_heads={heads}")
    if act is not None and ACTIVATIONS.get(str(act)) != (
        own := type(getattr(model.blocks[0].mlp, "act", None)).__name__
    ):
        raise UserError(f"its hidden_act is {act} and the model's MLP has {own}")
