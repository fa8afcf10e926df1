"""Names of tensors in open_clip's files and in those of transformers' classes for ViT, CLIP and SigLIP.

Here the image tower has timm's names and the text tower those of `tasks/clip/tower.py` after `text.`. The tools stack
query, key and value in other ways, and leave out or add dimensions of length 1. transformers 4 and 5 write and read the
same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import TimmViT
from ds_vit.tasks.clip.tower import ContrastiveModel

# Hugging Face's `hidden_act` → the class of timm's activation.
ACTIVATIONS = {"gelu": "GELU", "gelu_pytorch_tanh": "GELUTanh", "quick_gelu": "QuickGELU"}

Reshape = Callable[[torch.Tensor], torch.Tensor]


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


def _rules(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], rows: tuple[int, ...] = (1,)) -> list[Rule]:
    """The weight and the bias of a module; a name there that ends in "_" is that of the tensor."""
    mine, other = ((names,) if isinstance(names, str) else names for names in (ours, theirs))

    def named(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{name}{kind}" if name.endswith("_") else f"{name}.{kind}" for name in names)

    return [Rule(named(mine, kind), named(other, kind), rows=rows) for kind in ("weight", "bias")]


def _positions(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), lambda t: t.squeeze(0), lambda t: t.unsqueeze(0))  # [1, S, D] and [S, D]


def _matrix(ours: str, theirs: str) -> Rule:
    return Rule((ours,), (theirs,), lambda t: t.T.contiguous(), lambda t: t.T)


_CLASS_TOKEN = (lambda t: t.flatten(), lambda t: t.reshape(1, 1, -1))
_SCALAR = (lambda t: t.reshape(()), lambda t: t.reshape(1))
_VECTOR = (_same, lambda t: t.reshape(1))


def _open_clip_blocks(ours: str, theirs: str) -> list[Rule]:
    """The blocks of open_clip's Transformer."""
    return [
        *_rules(f"{ours}.*.norm1", f"{theirs}.*.ln_1"),
        *_rules(f"{ours}.*.attn.qkv", f"{theirs}.*.attn.in_proj_"),
        *_rules(f"{ours}.*.attn.proj", f"{theirs}.*.attn.out_proj"),
        *_rules(f"{ours}.*.norm2", f"{theirs}.*.ln_2"),
        *_rules(f"{ours}.*.mlp.fc1", f"{theirs}.*.mlp.c_fc"),
        *_rules(f"{ours}.*.mlp.fc2", f"{theirs}.*.mlp.c_proj"),
    ]


OPEN_CLIP_TEXT = (
    Rule(("text.token_embed.weight",), ("text.token_embedding.weight",)),
    _positions("text.pos_embed", "text.positional_embedding"),
    *_open_clip_blocks("text.blocks", "text.transformer.resblocks"),
    *_rules("text.norm", "text.ln_final"),
    Rule(("text.logit_scale",), ("logit_scale",), *_SCALAR),
    Rule(("text.logit_bias",), ("logit_bias",), *_SCALAR),
)
"""Of a `CustomTextCLIP`, without its text projection."""
OPEN_CLIP_PROJECTIONS = {
    False: (_matrix("text.head.weight", "text.text_projection"),),
    True: tuple(_rules("text.head", "text.text_projection")),
}
"""The text projection, by whether it has a bias."""
OPEN_CLIP_VISION = (
    Rule(("cls_token",), ("visual.class_embedding",), *_CLASS_TOKEN),
    _positions("pos_embed", "visual.positional_embedding"),
    Rule(("patch_embed.proj.weight",), ("visual.conv1.weight",)),
    *_rules("norm_pre", "visual.ln_pre"),
    *_open_clip_blocks("blocks", "visual.transformer.resblocks"),
    *_rules("norm", "visual.ln_post"),
    _matrix("head.weight", "visual.proj"),
)
"""Of open_clip's own `VisionTransformer`; that of a timm model is timm's, after `visual.trunk.`."""
OPEN_CLIP_TRUNK, OPEN_CLIP_PROJECTION = "visual.trunk.", "visual.head.proj.weight"


def _hf_blocks(ours: str, theirs: str) -> list[Rule]:
    attention = f"{theirs}.*.self_attn"
    return [
        *_rules(f"{ours}.*.norm1", f"{theirs}.*.layer_norm1"),
        *_rules(f"{ours}.*.attn.qkv", tuple(f"{attention}.{name}_proj" for name in "qkv")),
        *_rules(f"{ours}.*.attn.proj", f"{attention}.out_proj"),
        *_rules(f"{ours}.*.norm2", f"{theirs}.*.layer_norm2"),
        *_rules(f"{ours}.*.mlp.fc1", f"{theirs}.*.mlp.fc1"),
        *_rules(f"{ours}.*.mlp.fc2", f"{theirs}.*.mlp.fc2"),
    ]


_HF_SHARED = (
    Rule(("text.token_embed.weight",), ("text_model.embeddings.token_embedding.weight",)),
    _positions("text.pos_embed", "text_model.embeddings.position_embedding.weight"),
    *_hf_blocks("text.blocks", "text_model.encoder.layers"),
    *_rules("text.norm", "text_model.final_layer_norm"),
    _positions("pos_embed", "vision_model.embeddings.position_embedding.weight"),
    Rule(("patch_embed.proj.weight",), ("vision_model.embeddings.patch_embedding.weight",)),
    *_hf_blocks("blocks", "vision_model.encoder.layers"),
    *_rules("norm", "vision_model.post_layernorm"),
)
HF_CLIP = (
    *_HF_SHARED,
    Rule(("cls_token",), ("vision_model.embeddings.class_embedding",), *_CLASS_TOKEN),
    *_rules("norm_pre", "vision_model.pre_layrnorm"),
    Rule(("head.weight",), ("visual_projection.weight",)),
    Rule(("text.head.weight",), ("text_projection.weight",)),
    Rule(("text.logit_scale",), ("logit_scale",), *_SCALAR),
)
"""Of transformers' `CLIPModel`."""
HF_SIGLIP = (
    *_HF_SHARED,
    Rule(("patch_embed.proj.bias",), ("vision_model.embeddings.patch_embedding.bias",)),
    Rule(("attn_pool.latent",), ("vision_model.head.probe",)),
    *_rules(("attn_pool.q", "attn_pool.kv"), "vision_model.head.attention.in_proj_", rows=(1, 2)),
    *_rules("attn_pool.proj", "vision_model.head.attention.out_proj"),
    *_rules("attn_pool.norm", "vision_model.head.layernorm"),
    *_rules("attn_pool.mlp.fc1", "vision_model.head.mlp.fc1"),
    *_rules("attn_pool.mlp.fc2", "vision_model.head.mlp.fc2"),
    *_rules("text.head", "text_model.head"),
    Rule(("text.logit_scale",), ("logit_scale",), *_VECTOR),
    Rule(("text.logit_bias",), ("logit_bias",), *_VECTOR),
)
"""Of transformers' `SiglipModel`."""


_VIT_LAYER = "vit.encoder.layer.*"
HF_VIT = (
    Rule(("cls_token",), ("vit.embeddings.cls_token",)),
    Rule(("pos_embed",), ("vit.embeddings.position_embeddings",)),
    *_rules("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
    *_rules("blocks.*.norm1", f"{_VIT_LAYER}.layernorm_before"),
    *_rules("blocks.*.attn.qkv", tuple(f"{_VIT_LAYER}.attention.attention.{n}" for n in ("query", "key", "value"))),
    *_rules("blocks.*.attn.proj", f"{_VIT_LAYER}.attention.output.dense"),
    *_rules("blocks.*.norm2", f"{_VIT_LAYER}.layernorm_after"),
    *_rules("blocks.*.mlp.fc1", f"{_VIT_LAYER}.intermediate.dense"),
    *_rules("blocks.*.mlp.fc2", f"{_VIT_LAYER}.output.dense"),
    *_rules("norm", "vit.layernorm"),
    *_rules("head", "classifier"),
)
"""Of transformers' `ViTForImageClassification`."""


def general(name: str) -> str:
    """A tensor's name with `*` for the number of a block."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _number(name: str) -> str:
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else ""


def _translate(
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
    found, rest = _translate(tensors, rules, give=True)
    assert not rest, f"no counterpart: {sorted(rest)[:5]}"
    return found


_OF_TEXT = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection")
_VIT_PREFIXES = ("vit.", "deit.", "")  # of the whole classifier, DeiT's twin of it, and the bare encoder


def from_foreign(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file of another tool under the names here; those without a counterpart keep theirs.

    Counters of positions, which files of old versions contain, and the pooler of `ViTModel`, which no classifier uses,
    are left out. A file that is of none of these tools stays as it is.
    """
    for prefix in _VIT_PREFIXES:
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in tensors:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{prefix}pooler.")}
            encoder = (name for name in tensors if name.startswith(prefix) and not name.startswith("classifier."))
            names = {name: f"vit.{name.removeprefix(prefix)}" for name in encoder}
            found, rest = _translate({names.get(name, name): tensors[name] for name in tensors}, HF_VIT, give=False)
            return found | rest
    is_hf = "vision_model.embeddings.patch_embedding.weight" in tensors
    if not (is_hf or any(name.startswith(("visual.class_embedding", OPEN_CLIP_TRUNK)) for name in tensors)):
        return tensors
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".position_ids")}
    if is_hf:
        is_clip = "vision_model.embeddings.class_embedding" in tensors
        found, rest = _translate(tensors, HF_CLIP if is_clip else HF_SIGLIP, give=False)
        return found | rest
    # The text transformer of open_clip's `CLIP`, which `CustomTextCLIP` has as its member `text`.
    tensors = {f"text.{name}" if name.startswith(_OF_TEXT) else name: tensor for name, tensor in tensors.items()}
    projection = OPEN_CLIP_PROJECTIONS["text.text_projection.weight" in tensors]
    found, rest = _translate(tensors, (*OPEN_CLIP_TEXT, *projection, *OPEN_CLIP_VISION), give=False)
    if OPEN_CLIP_PROJECTION in rest:
        rest["head.weight"] = rest.pop(OPEN_CLIP_PROJECTION)
    return found | {name.removeprefix(OPEN_CLIP_TRUNK): tensor for name, tensor in rest.items()}


# What transformers leaves out of a config.json: heads and activation of the text and of the image tower.
_HF_DEFAULTS = {"clip": (8, 12, "quick_gelu"), "siglip": (12, 12, "gelu_pytorch_tanh")}


# Vocabulary → what published SigLIP and SigLIP 2 pad with, which their configs do not say: big_vision's `pad_value`
# for c4_en and mc4, and that of Gemma's tokenizer.
_SIGLIP_PADDING = {32_000: 1, 250_000: 1, 256_000: 0}


def _facts_of_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says and no tensor's shape shows: heads and activation of both towers, mask, end and padding.

    Values that it does not say are None.
    """
    kind = config["model_type"]
    text_heads, image_heads, act = _HF_DEFAULTS[kind]
    text, image = (config.get(f"{tower}_config") or {} for tower in ("text", "vision"))
    end_id = text.get("eos_token_id", 49407) if kind == "clip" else None
    if end_id == 2:  # written by transformers before 4.31: the highest id is meant
        end_id = text.get("vocab_size", 49408) - 1
    text_act, image_act = (tower.get("hidden_act", act) for tower in (text, image))
    pad_id = text.get("pad_token_id")
    if kind == "siglip" and pad_id in (None, 1):  # 1 is the default of transformers, with whatever tokenizer
        pad_id = _SIGLIP_PADDING.get(text.get("vocab_size", 32_000))
    return {
        "text_heads": text.get("num_attention_heads", text_heads),
        "image_heads": image.get("num_attention_heads", image_heads),
        "text_act": ACTIVATIONS.get(text_act, text_act),
        "image_act": ACTIVATIONS.get(image_act, image_act),
        "causal": kind == "clip",
        "end_id": end_id,
        "pad_id": pad_id,
    }


def _facts_of_open_clip(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the "model_cfg" of an open_clip_config.json."""
    text, image = config["text_cfg"], config["vision_cfg"]

    def act(tower: Mapping[str, Any]) -> str:
        if config.get("quick_gelu"):
            return "QuickGELU"
        return "GELUTanh" if (tower.get("act_kwargs") or {}).get("approximate") == "tanh" else "GELU"

    pool = text.get("pool_type", "argmax")
    of_end = {"argmax": text.get("vocab_size", 49408) - 1, "eos": text.get("eos_id", 2)}
    own = "timm_model_name" not in image
    return {
        "text_heads": text.get("heads", 8),
        "image_heads": image.get("width", 768) // image.get("head_width", 64) if own else None,
        "text_act": act(text),
        "image_act": act(image) if own else None,
        "causal": not text.get("no_causal_mask", False),
        "end_id": of_end.get(pool),
        "pad_id": text.get("pad_id", _SIGLIP_PADDING.get(text.get("vocab_size", 49408)) if pool == "last" else None),
    }


def tower_differences(
    model: ContrastiveModel,
    shapes: Mapping[str, torch.Size],
    config: Mapping[str, Any],
    of_open_clip: Mapping[str, Any],
) -> Iterator[str]:
    """Differences between a model and the text that weights were trained on, or what no shape shows.

    Args:
        model: the description of both towers.
        shapes: of the file's tensors under the names here.
        config: the config.json next to the file, {} if there is none.
        of_open_clip: the "model_cfg" of the open_clip_config.json next to it, {} if there is none.

    Yields:
        Another vocabulary, context length, end or padding token, mask, activation, or number of heads; and the remedy.
    """
    settings, block = model.text.settings, model.blocks[0]
    if (words := shapes.get("text.token_embed.weight")) and words[0] != settings.vocab_size:
        yield (
            f"its text tower has a vocabulary of {words[0]} tokens and the run's tokenizer {settings.vocab_size}; "
            "give the --tokenizer that it was trained with (49408: clip)"
        )
    if (places := shapes.get("text.pos_embed")) and places[1] != settings.context_length:
        yield (
            f"its captions have {places[1]} tokens and the run's {settings.context_length}; "
            f"give --context-length {places[1]}"
        )
    if of_open_clip:
        facts = _facts_of_open_clip(of_open_clip)
    elif config.get("model_type") in _HF_DEFAULTS:
        facts = _facts_of_hf(config)
    else:
        return
    image_act = type(getattr(block.mlp, "act", None)).__name__
    for what, key, ours, way_out in (
        ("heads of the text tower", "text_heads", settings.heads, "--text-heads {}"),
        ("activation of the text tower", "text_act", settings.activation.__name__, "another --text-model"),
        ("causal mask", "causal", settings.causal, "another --text-model"),
        ("heads", "image_heads", block.attn.num_heads, "--model-kwargs num_heads={}"),
        ("activation", "image_act", image_act, "a --model with it (CLIP's QuickGELU: vit_…_clip_quickgelu_…)"),
    ):
        theirs = facts[key]
        if theirs is not None and theirs != ours:
            yield f"{what}: {theirs} in its config and {ours} in the model; give {way_out.format(theirs)}"
    end_id, pad_id = facts["end_id"], facts["pad_id"]
    if settings.pool == "end" and end_id is not None and end_id != settings.end_id:
        yield f"its end token has the id {end_id} and the tokenizer's {settings.end_id}; give its --tokenizer"
    if settings.reads_padding and pad_id is not None and pad_id != settings.pad_id:
        yield (
            f"its captions are padded with the id {pad_id} and the tokenizer pads with {settings.pad_id}; give "
            "its tokenizer.json in a folder with its tokenizer_config.json"
        )


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
