"""Names of tensors in open_clip's files and in those of transformers' `CLIPModel` and `SiglipModel`.

Here the image tower has timm's names and the text tower those of `tower.py` after `text.`. transformers 4 and 5 write
and read the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ds_vit.tasks.clip.tower import ContrastiveModel
from ds_vit.tasks.foreign_names import (
    ACTIVATIONS,
    CLASS_TOKEN,
    SCALAR,
    VECTOR,
    ForeignNames,
    Rule,
    Shapes,
    block_rules,
    matrix,
    module_rules,
    positions,
    translate,
)

_OPEN_CLIP_BLOCK = ("ln_1", "attn.in_proj_", "attn.out_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
OPEN_CLIP_TEXT = (
    Rule(("text.token_embed.weight",), ("text.token_embedding.weight",)),
    positions("text.pos_embed", "text.positional_embedding"),
    *block_rules("text.blocks", "text.transformer.resblocks", _OPEN_CLIP_BLOCK),
    *module_rules("text.norm", "text.ln_final"),
    Rule(("text.logit_scale",), ("logit_scale",), *SCALAR),
    Rule(("text.logit_bias",), ("logit_bias",), *SCALAR),
)
"""Of a `CustomTextCLIP`, without its text projection."""
OPEN_CLIP_PROJECTIONS = {
    False: (matrix("text.head.weight", "text.text_projection"),),
    True: tuple(module_rules("text.head", "text.text_projection")),
}
"""The text projection, by whether it has a bias."""
OPEN_CLIP_VISION = (
    Rule(("cls_token",), ("visual.class_embedding",), *CLASS_TOKEN),
    positions("pos_embed", "visual.positional_embedding"),
    Rule(("patch_embed.proj.weight",), ("visual.conv1.weight",)),
    *module_rules("norm_pre", "visual.ln_pre"),
    *block_rules("blocks", "visual.transformer.resblocks", _OPEN_CLIP_BLOCK),
    *module_rules("norm", "visual.ln_post"),
    matrix("head.weight", "visual.proj"),
)
"""Of open_clip's own `VisionTransformer`; that of a timm model is timm's, after `visual.trunk.`."""
OPEN_CLIP_TRUNK, OPEN_CLIP_PROJECTION = "visual.trunk.", "visual.head.proj.weight"
_HF_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkv")
_HF_BLOCK = ("layer_norm1", _HF_ATTENTION, "self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2")
_HF_SHARED = (
    Rule(("text.token_embed.weight",), ("text_model.embeddings.token_embedding.weight",)),
    positions("text.pos_embed", "text_model.embeddings.position_embedding.weight"),
    *block_rules("text.blocks", "text_model.encoder.layers", _HF_BLOCK),
    *module_rules("text.norm", "text_model.final_layer_norm"),
    positions("pos_embed", "vision_model.embeddings.position_embedding.weight"),
    Rule(("patch_embed.proj.weight",), ("vision_model.embeddings.patch_embedding.weight",)),
    *block_rules("blocks", "vision_model.encoder.layers", _HF_BLOCK),
    *module_rules("norm", "vision_model.post_layernorm"),
)
HF_CLIP = (
    *_HF_SHARED,
    Rule(("cls_token",), ("vision_model.embeddings.class_embedding",), *CLASS_TOKEN),
    *module_rules("norm_pre", "vision_model.pre_layrnorm"),
    Rule(("head.weight",), ("visual_projection.weight",)),
    Rule(("text.head.weight",), ("text_projection.weight",)),
    Rule(("text.logit_scale",), ("logit_scale",), *SCALAR),
)
"""Of transformers' `CLIPModel`."""
HF_SIGLIP = (
    *_HF_SHARED,
    Rule(("patch_embed.proj.bias",), ("vision_model.embeddings.patch_embedding.bias",)),
    Rule(("attn_pool.latent",), ("vision_model.head.probe",)),
    *module_rules(("attn_pool.q", "attn_pool.kv"), "vision_model.head.attention.in_proj_", rows=(1, 2)),
    *module_rules("attn_pool.proj", "vision_model.head.attention.out_proj"),
    *module_rules("attn_pool.norm", "vision_model.head.layernorm"),
    *module_rules("attn_pool.mlp.fc1", "vision_model.head.mlp.fc1"),
    *module_rules("attn_pool.mlp.fc2", "vision_model.head.mlp.fc2"),
    *module_rules("text.head", "text_model.head"),
    Rule(("text.logit_scale",), ("logit_scale",), *VECTOR),
    Rule(("text.logit_bias",), ("logit_bias",), *VECTOR),
)
"""Of transformers' `SiglipModel`."""


_OF_TEXT = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection")


def _from_foreign(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """As `ForeignNames.translate`, without the counters of positions, which files of old versions contain."""
    is_hf = "vision_model.embeddings.patch_embedding.weight" in tensors
    if not (is_hf or any(name.startswith(("visual.class_embedding", OPEN_CLIP_TRUNK)) for name in tensors)):
        return None
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".position_ids")}
    if is_hf:
        is_clip = "vision_model.embeddings.class_embedding" in tensors
        found, rest = translate(tensors, HF_CLIP if is_clip else HF_SIGLIP, give=False)
        return found | rest
    # The text transformer of open_clip's `CLIP`, which `CustomTextCLIP` has as its member `text`.
    tensors = {f"text.{name}" if name.startswith(_OF_TEXT) else name: tensor for name, tensor in tensors.items()}
    projection = OPEN_CLIP_PROJECTIONS["text.text_projection.weight" in tensors]
    found, rest = translate(tensors, (*OPEN_CLIP_TEXT, *projection, *OPEN_CLIP_VISION), give=False)
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


def _differences(model: nn.Module, shapes: Shapes, config_of: Callable[[str], dict[str, Any]]) -> Iterator[str]:
    """As `ForeignNames.differences`, of open_clip's and transformers' configs."""
    assert isinstance(model, ContrastiveModel)
    config, of_open_clip = config_of("config.json"), config_of("open_clip_config.json").get("model_cfg")
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


CLIP_NAMES = ForeignNames(
    r"visual\.(?:trunk\.|class_embedding$)|vision_model\.embeddings\.",
    _from_foreign,
    _differences,
    ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
)
