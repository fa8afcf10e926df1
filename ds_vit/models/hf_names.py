"""The names of Hugging Face's `ViTForImageClassification` and timm's for the same tensors.

The names are those of its files (transformers 4 and 5 write and read the same ones). timm keeps query, key and value in
one matrix of three blocks of rows, Hugging Face in three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import TimmViT

_WHOLE = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_QKV = tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))
_MARK = "embeddings.patch_embeddings.projection.weight"
_PREFIXES = ("vit.", "deit.", "")  # of the whole classifier, DeiT's twin of it, and the bare encoder

# Hugging Face's `hidden_act` → the class of timm's activation.
ACTIVATIONS = {"gelu": "GELU", "gelu_pytorch_tanh": "GELUTanh"}


def hf_names(name: str) -> tuple[str, ...]:
    """Where a timm tensor lies in a Hugging Face file: one name, or three for query, key and value.

    Raises:
        KeyError: `ViTForImageClassification` has no such tensor.
    """
    if name in _WHOLE:
        return (_WHOLE[name],)
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return (f"{_WHOLE[stem]}.{kind}",)
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", stem)
    if match is None:
        raise KeyError(name)
    layer = f"vit.encoder.layer.{match[1]}"
    pieces = _QKV if match[2] == "attn.qkv" else (_BLOCK[match[2]],)
    return tuple(f"{layer}.{piece}.{kind}" for piece in pieces)


def _timm_name(name: str) -> tuple[str, int]:
    """timm's name of a Hugging Face tensor (prefix `vit.`), and which of its three parts it is."""
    stem, _, kind = name.rpartition(".")
    for ours, theirs in _WHOLE.items():
        if theirs in (name, stem):
            return (ours if theirs == name else f"{ours}.{kind}"), 0
    match = re.fullmatch(r"vit\.encoder\.layer\.(\d+)\.(.+)", stem)
    if match is not None:
        if match[2] in _QKV:
            return f"blocks.{match[1]}.attn.qkv.{kind}", _QKV.index(match[2])
        for ours, theirs in _BLOCK.items():
            if theirs == match[2]:
                return f"blocks.{match[1]}.{ours}.{kind}", 0
    return name, 0


def is_hf(names: Mapping[str, object]) -> bool:
    """Whether these are the names of Hugging Face's ViT or DeiT."""
    return any(prefix + _MARK in names for prefix in _PREFIXES)


class TensorsFromHF(Mapping[str, torch.Tensor]):
    """A Hugging Face file under timm's names; a tensor is read when it is asked for.

    The pooler of `ViTModel`, which no classifier uses, is left out; names that timm has no counterpart of stay.

    Args:
        tensors: under Hugging Face's names.
        shape: the shape of one of them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], shape: Callable[[str], torch.Size]) -> None:
        prefix = next(prefix for prefix in _PREFIXES if prefix + _MARK in tensors)
        parts: dict[str, dict[int, str]] = {}
        for name in tensors:
            if name.startswith(f"{prefix}pooler."):
                continue
            inner = "vit." + name.removeprefix(prefix) if name.startswith(prefix) else name
            ours, part = _timm_name(name if inner.startswith("vit.classifier") else inner)
            parts.setdefault(ours, {})[part] = name
        self._parts = {ours: [found[part] for part in sorted(found)] for ours, found in parts.items()}
        self._tensors = tensors
        self._shape = shape

    def __getitem__(self, name: str) -> torch.Tensor:
        pieces = [self._tensors[piece] for piece in self._parts[name]]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def __delitem__(self, name: str) -> None:
        """Leave a tensor out of the mapping; the file keeps it."""
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, without reading it."""
        shapes = [self._shape(piece) for piece in self._parts[name]]
        return torch.Size((sum(shape[0] for shape in shapes), *shapes[0][1:])) if len(shapes) > 1 else shapes[0]


def check_hf_config(config: Mapping[str, object], model: TimmViT) -> None:
    """Hold what a Hugging Face config.json says, and no tensor's shape shows, against a model.

    Raises:
        UserError: another number of heads or another activation.
    """
    heads, own = config.get("num_attention_heads"), model.blocks[0].attn.num_heads
    if heads not in (None, own):
        raise UserError(f"it has {heads} heads and the model {own}; give --model-kwargs num_heads={heads}")
    act, own_act = config.get("hidden_act"), type(getattr(model.blocks[0].mlp, "act", None)).__name__
    if act is not None and ACTIVATIONS.get(str(act)) != own_act:
        raise UserError(f"its hidden_act is {act} and the model's MLP has {own_act}")
