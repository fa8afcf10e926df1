"""Names of tensors in the files of other tools: the rules that translate them, and transformers' names of a ViT.

Here a ViT has timm's names. The tools stack query, key and value in other ways, and leave out or add dimensions of
length 1. A task whose model has more parts than a ViT has the rules for them in its folder (`Task.foreign_names`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_vit.models.layers import MAIN_TOWER

# Hugging Face's `hidden_act` → the class of timm's activation.
ACTIVATIONS = {"gelu": "GELU", "gelu_pytorch_tanh": "GELUTanh", "quick_gelu": "QuickGELU"}

Reshape = Callable[[torch.Tensor], torch.Tensor]
Shapes = Mapping[str, torch.Size]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class Rule:
    """Tensors here and there that are the same rows, `*` for a block's number in each name.

    Attributes:
        ours: the names here; their rows follow each other.
        theirs: the names there, of as many rows each; their rows follow each other.
        give: reshapes ours into theirs.
        take: the inverse.
        rows: the relative numbers of rows of `ours`.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    give: Reshape = _same
    take: Reshape = _same
    rows: tuple[int, ...] = (1,)


def module_rules(
    ours: str | tuple[str, ...], theirs: str | tuple[str, ...], rows: tuple[int, ...] = (1,)
) -> list[Rule]:
    """The weight and the bias of a module; a name there that ends in "_" is that of the tensor."""
    mine, other = ((names,) if isinstance(names, str) else names for names in (ours, theirs))

    def named(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{name}{kind}" if name.endswith("_") else f"{name}.{kind}" for name in names)

    return [Rule(named(mine, kind), named(other, kind), rows=rows) for kind in ("weight", "bias")]


def positions(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), lambda t: t.squeeze(0), lambda t: t.unsqueeze(0))  # [1, S, D] and [S, D]


def matrix(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), lambda t: t.T.contiguous(), lambda t: t.T)


CLASS_TOKEN = (lambda t: t.flatten(), lambda t: t.reshape(1, 1, -1))
SCALAR = (lambda t: t.reshape(()), lambda t: t.reshape(1))
VECTOR = (_same, lambda t: t.reshape(1))


def block_rules(ours: str, theirs: str, names: Sequence[str | tuple[str, ...]]) -> list[Rule]:
    """Of the modules of the blocks, by their names there in the order of those here."""
    modules = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    found = []
    for mine, other in zip(modules, names, strict=True):
        others = (other,) if isinstance(other, str) else other
        found += module_rules(f"{ours}.*.{mine}", tuple(f"{theirs}.*.{name}" for name in others))
    return found


_VIT_ATTENTION = tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))
_VIT_MLP = ("intermediate.dense", "output.dense")
_VIT_BLOCK = ("layernorm_before", _VIT_ATTENTION, "attention.output.dense", "layernorm_after", *_VIT_MLP)
HF_VIT = (
    Rule(("cls_token",), ("vit.embeddings.cls_token",)),
    Rule(("pos_embed",), ("vit.embeddings.position_embeddings",)),
    *module_rules("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
    *block_rules("blocks", "vit.encoder.layer", _VIT_BLOCK),
    *module_rules("norm", "vit.layernorm"),
    *module_rules("head", "classifier"),
)
"""Of transformers' `ViTForImageClassification`."""


def general(name: str) -> str:
    """A tensor's name with `*` for the number of a block."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _number(name: str) -> str:
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else ""


def translate(
    tensors: Mapping[str, torch.Tensor], rules: Sequence[Rule], *, give: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors with a rule under the other side's names, and those without one under their own."""
    places = {name: (rule, place) for rule in rules for place, name in enumerate(rule.ours if give else rule.theirs)}
    groups: dict[tuple[Rule, str], dict[int, torch.Tensor]] = {}
    rest: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if general(name) in places:
            rule, place = places[general(name)]
            groups.setdefault((rule, _number(name)), {})[place] = tensor
        else:
            rest[name] = tensor
    found: dict[str, torch.Tensor] = {}
    for (rule, number), pieces in groups.items():
        source, target = (rule.ours, rule.theirs) if give else (rule.theirs, rule.ours)
        if len(pieces) < len(source):  # reported under the names of the file
            rest |= {source[place].replace("*", number): tensor for place, tensor in pieces.items()}
            continue
        whole = torch.cat([pieces[place] for place in sorted(pieces)]) if len(pieces) > 1 else pieces[0]
        whole = (rule.give if give else rule.take)(whole)
        rows = [1] * len(target) if give else [*rule.rows]
        parts = [whole]
        if len(target) > 1:
            unit = len(whole) // sum(rows)
            parts = [part.contiguous() for part in whole.split([unit * count for count in rows])]
        found |= {name.replace("*", number): part for name, part in zip(target, parts, strict=True)}
    return found, rest


def to_theirs(tensors: Mapping[str, torch.Tensor], rules: Sequence[Rule]) -> dict[str, torch.Tensor]:
    """Tensors under the names of `rules`' other side; each must have a rule."""
    found, rest = translate(tensors, rules, give=True)
    assert not rest, f"no counterpart: {sorted(rest)[:5]}"
    return found


@dataclass(frozen=True)
class ForeignNames:
    """How another tool names the tensors of a model.

    Attributes:
        marks: a regular expression of names, or of how they begin, that files of these models have.
        translate: the tensors of a file under the names here, and under their own those without a counterpart; None
            for a file of another kind.
        differences: of a task's model, the shapes of a file's tensors under the names here, and a function that gives
            the contents of a JSON file next to it (empty if there is none): where the tool's config says what no tensor
            shows and the model has otherwise, for people, each with the way out.
        files: of weights in a folder that the tool writes, if they are not called model.safetensors.
        tower: whose tensors they are, among those of several in a file.
        remark: of tensors under the names here, what their model has and the one here lacks, for people; else empty.
    """

    marks: str
    translate: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]
    differences: Callable[[nn.Module, Shapes, Callable[[str], dict[str, Any]]], Iterator[str]]
    files: tuple[str, ...] = ()
    tower: str = MAIN_TOWER
    remark: Callable[[Mapping[str, torch.Tensor]], str] = lambda _: ""


_VIT_PREFIXES = ("vit.", "deit.", "")  # of the whole classifier, DeiT's twin of it, and the bare encoder


def _from_vit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """As `ForeignNames.translate`, without the pooler of `ViTModel`, which no classifier uses."""
    for prefix in _VIT_PREFIXES:
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in tensors:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{prefix}pooler.")}
            encoder = (name for name in tensors if name.startswith(prefix) and not name.startswith("classifier."))
            names = {name: f"vit.{name.removeprefix(prefix)}" for name in encoder}
            found, rest = translate({names.get(name, name): tensors[name] for name in tensors}, HF_VIT, give=False)
            return found | rest
    return None


def _vit_differences(model: nn.Module, shapes: Shapes, config_of: Callable[[str], dict[str, Any]]) -> Iterator[str]:
    """As `ForeignNames.differences`: heads and activation."""
    config = config_of("config.json") if hasattr(model, "blocks") else {}
    heads, act = config.get("num_attention_heads"), config.get("hidden_act")
    if heads is not None and heads != (own := model.blocks[0].attn.num_heads):
        yield f"it has {heads} heads and the model {own}; give --model-kwargs num_heads={heads}"
    if act is not None and ACTIVATIONS.get(str(act)) != (
        own := type(getattr(model.blocks[0].mlp, "act", None)).__name__
    ):
        yield f"its hidden_act is {act} and the model's MLP has {own}"


VIT_NAMES = ForeignNames(
    r"(?:vit\.|deit\.)?embeddings\.patch_embeddings\.projection\.weight$",
    _from_vit,
    _vit_differences,
    ("pytorch_model.bin",),
)
