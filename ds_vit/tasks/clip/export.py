"""An image and a text tower as an open_clip folder, or as transformers' `CLIPModel` or `SiglipModel`.

Any other architecture would compute something else under the same names, and is rejected with the parts that the tool
has no counterpart of.

Shapes: B images, N captions, L tokens of a caption, E common width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import DEFAULT_CROP_PCT
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import take_apart
from ds_vit.models.zoo import ModelSpec, create_model, image_size
from ds_vit.tasks.clip import hugging_face as hf
from ds_vit.tasks.clip import weights as names
from ds_vit.tasks.clip.hugging_face import activation, write_tokenizer
from ds_vit.tasks.clip.tower import ContrastiveModel, TextSettings
from ds_vit.tasks.exports import Exported, Format, Predict, Save, quiet, read_transformers
from ds_vit.tasks.foreign_names import Rule, general, to_theirs

_OPEN_CLIP_INTERPOLATIONS = ("bicubic", "bilinear")
_RESIZE_MODES = {"center": "shortest", "squash": "squash", "border": "longest"}
_NUM_CAPTIONS = 4


# ---- the towers ----------------------------------------------------------------------------------------------------


def _of(exported: Exported) -> ContrastiveModel:
    assert isinstance(exported.model, ContrastiveModel)
    return exported.model


def example_captions(settings: TextSettings) -> torch.Tensor:
    """Token ids int64 [N, L] of captions of several lengths, the end token after each."""
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_CAPTIONS, settings.context_length)
    ids = torch.randint(0, settings.vocab_size - 1, shape, generator=generator)
    ids += ids >= settings.end_id  # every id but that one
    lengths = torch.linspace(1, settings.context_length - 1, _NUM_CAPTIONS).long()
    ids[torch.arange(_NUM_CAPTIONS), lengths] = settings.end_id
    return ids


def _similarities(
    images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | float
) -> torch.Tensor:
    """Normalised features [B, E] and [N, E] -> [B, 2E + N]: both towers' features and the logits of each pair."""
    return torch.cat((images, texts[: len(images)], scale * images @ texts.T + bias), dim=1)


def pairs(exported: Exported) -> Predict:
    """Images [B, 3, H, W] -> [B, 2E + N], as `_similarities`, with `example_captions`."""
    model = _of(exported)
    layers = take_apart(model.text)
    ids = example_captions(model.text.settings)

    def predict(images: torch.Tensor) -> torch.Tensor:
        value: Any = (ids, torch.zeros(len(ids), dtype=torch.int64))
        for layer in layers:
            value = layer.eval()(value)
        texts, logits = value.tensor_split((model.common_dim,), dim=1)
        scale, *bias = logits[0]
        return _similarities(F.normalize(model(images)), F.normalize(texts), scale.exp(), bias[0] if bias else 0.0)

    return predict


# ---- what a tool can represent -------------------------------------------------------------------------------------


def _without_counterpart(who: str, missing: Sequence[str], to: str, otherwise: str = "") -> UserError:
    """The error for people about a model that a tool cannot represent."""
    lacks = f"{who} has no counterpart of {'; '.join(missing)}: this model cannot be exported to {to}"
    return UserError(f"{lacks}; {otherwise}--to timm and --to onnx take the image tower")


def _text_obstacles(settings: TextSettings, *, causal: bool, pool: str) -> Iterator[str]:
    if settings.causal != causal:
        yield f"a text tower {'with' if settings.causal else 'without'} causal mask"
    if settings.pool != pool:
        yield f"--text-pool {settings.pool}"
    if settings.pool == "end" and settings.end_id == 2 < settings.vocab_size - 1:
        yield "an end token of id 2, by which it means the highest id"


# ---- transformers --------------------------------------------------------------------------------------------------


def _is_siglip(model: ContrastiveModel) -> bool:
    return hasattr(model.text, "logit_bias")


def _refuse_hf(exported: Exported) -> None:
    model = _of(exported)
    siglip = _is_siglip(model)
    # CLIPModel adds no bias to its patches: ours is added to their positions.
    rules, optional = (names.HF_SIGLIP, ()) if siglip else (names.HF_CLIP, ("patch_embed.proj.bias",))
    name = "SiglipModel" if siglip else "CLIPModel"
    missing = [
        *_text_obstacles(model.text.settings, causal=not siglip, pool="last" if siglip else "end"),
        *hf.obstacles(model, "map" if siglip else "token", rules, optional),
    ]
    if siglip and model.attn_pool is not None and model.attn_pool.num_heads != model.blocks[0].attn.num_heads:
        missing.append(f"attention pooling with {model.attn_pool.num_heads} heads")
    if missing:
        raise _without_counterpart(f"transformers' {name}", missing, "hf", "--to open_clip may take it, and ")
    hf.refuse_images(exported.image)


def _with_bias_in_positions(state: dict[str, torch.Tensor], num_prefix_tokens: int) -> dict[str, torch.Tensor]:
    """The state of a model whose patches have no bias: it is added to their positions."""
    state = dict(state)
    if (bias := state.pop("patch_embed.proj.bias", None)) is not None:
        positions = state["pos_embed"].clone()
        positions[:, num_prefix_tokens:] += bias
        state["pos_embed"] = positions
    return state


def _write_hf(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write the model, preprocessor_config.json and the tokenizer's files, or note why there is no tokenizer.

    Raises:
        UserError: neither class represents the model or its images; nothing is written.
    """
    from transformers import CLIPConfig, SiglipConfig

    _refuse_hf(exported)
    model = _of(exported)
    settings, siglip = model.text.settings, _is_siglip(model)
    text = {
        **hf.tower_config(model.text, settings.width),
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": settings.context_length,
        "eos_token_id": settings.end_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    vision = hf.tower_config(model, model.embed_dim)
    vision |= {"image_size": exported.image.img_size[0], "patch_size": model.patch_embed.patch_size[0]}
    state = hf.with_all_positions(model)
    if siglip:
        text |= {"projection_size": model.common_dim, "pad_token_id": settings.pad_id}
        config = SiglipConfig(text_config=text, vision_config=vision, architectures=["SiglipModel"])
    else:
        towers = {"text_config": text, "vision_config": vision}
        towers = {name: {**tower, "projection_dim": model.common_dim} for name, tower in towers.items()}
        config = CLIPConfig(**towers, projection_dim=model.common_dim, architectures=["CLIPModel"])
        state = _with_bias_in_positions(state, 1)
    config.save_pretrained(str(folder))
    hf.write_processor(exported, folder)
    missing = write_tokenizer(exported.tokenizer, settings, folder)
    save(folder, to_theirs(state, names.HF_SIGLIP if siglip else names.HF_CLIP))
    return (missing,) if missing else ()


def _load_hf(folder: Path) -> Predict:
    """The folder as transformers loads it, as `pairs`; a tensor that is missing or left over is an error."""
    model = read_transformers(folder, "AutoModel")
    text = model.config.text_config
    end_id = text.eos_token_id
    ids = example_captions(TextSettings(text.vocab_size, text.max_position_embeddings, end_id))
    bias = getattr(model, "logit_bias", 0.0)

    def predict(images: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=ids, pixel_values=images)
        return _similarities(out.image_embeds, out.text_embeds, model.logit_scale.exp(), bias)

    return predict


# ---- open_clip -----------------------------------------------------------------------------------------------------


def _is_timms_own(spec: ModelSpec, model: ContrastiveModel) -> bool:
    """Whether timm builds the image tower from its name without further arguments."""
    if spec.model_kwargs or {":", "/"}.intersection(spec.name):
        return False
    if not timm.models.model_entrypoint(model.pretrained_cfg["architecture"]).__module__.startswith("timm."):
        return False
    return image_size(create_model(ModelSpec(spec.name), for_training=False)) == image_size(model)


def _timm_vision(model: ContrastiveModel, spec: ModelSpec) -> dict[str, Any]:
    """The vision_cfg of a timm model by its name."""
    projects = isinstance(model.head, nn.Linear)
    return {
        "timm_model_name": spec.name,
        "timm_model_pretrained": False,
        "timm_pool": "" if projects else model.global_pool,
        "timm_proj": "linear" if projects else "none",
    }


def _own_vision(model: ContrastiveModel) -> dict[str, Any]:
    """The vision_cfg of open_clip's own `VisionTransformer`."""
    width, mlp = model.embed_dim, model.blocks[0].mlp
    return {
        "layers": len(model.blocks),
        "width": width,
        "head_width": width // model.blocks[0].attn.num_heads,
        "mlp_ratio": (mlp.fc1.out_features + 0.5) / width,  # open_clip rounds down
        "patch_size": list(model.patch_embed.patch_size),
        "no_ln_pre": isinstance(model.norm_pre, nn.Identity),
        "norm_kwargs": {"eps": model.norm.eps},
        **_act_kwargs(model),
    }


def _act_kwargs(tower: nn.Module) -> dict[str, Any]:
    return {"act_kwargs": {"approximate": "tanh"}} if activation(tower) == "gelu_pytorch_tanh" else {}


def _refuse_own_vision(exported: Exported) -> None:
    """Raise UserError if open_clip represents the image tower neither by its name nor as its own class."""
    model = _of(exported)
    optional = ("patch_embed.proj.bias", "norm_pre.weight", "norm_pre.bias")
    of_text = [Rule((general(name),), ("",)) for name in model.state_dict() if name.startswith("text.")]
    missing = [*hf.obstacles(model, "token", (*names.OPEN_CLIP_VISION, *of_text), optional)]
    if not missing and "quick_gelu" in (acts := (activation(model), activation(model.text))) and acts[0] != acts[1]:
        missing = [f"the activations {acts[0]} and {acts[1]} of the two towers"]
    if missing:
        spec = exported.spec
        arguments = [f"{key}={value}" for key, value in spec.model_kwargs.items()]
        height, width = exported.image.img_size
        has = " ".join([*arguments, f"images of {height} x {width}"])
        built = f"open_clip builds {spec.name} without --model-kwargs and for timm's image size, and this one has {has}"
        raise _without_counterpart(f"{built}; its own ViT", missing, "open_clip")


def _write_open_clip(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write open_clip_config.json and open_clip_model.safetensors.

    The image tower is timm's by its name where that gives the same model, else open_clip's own ViT.

    Raises:
        UserError: open_clip cannot represent the model or its images; nothing is written.
    """
    model, image = _of(exported), exported.image
    settings = model.text.settings
    if settings.pool == "map":
        raise _without_counterpart("open_clip's text tower", ["text.attn_pool (--text-pool map)"], "open_clip")
    if image.interpolation not in _OPEN_CLIP_INTERPOLATIONS:
        raise UserError(
            f"--interpolation {image.interpolation}: open_clip knows {' and '.join(_OPEN_CLIP_INTERPOLATIONS)}"
        )
    state = model.state_dict()
    rules: tuple[Rule, ...] = (*names.OPEN_CLIP_TEXT, *names.OPEN_CLIP_PROJECTIONS[settings.projection_bias])
    if _is_timms_own(exported.spec, model):
        vision = _timm_vision(model, exported.spec)
        trunk = {name: state.pop(name) for name in [*state] if not name.startswith("text.")}
        named = {f"{names.OPEN_CLIP_TRUNK}{name}": tensor for name, tensor in trunk.items()}
        if (head := named.pop(f"{names.OPEN_CLIP_TRUNK}head.weight", None)) is not None:
            named[names.OPEN_CLIP_PROJECTION] = head
    else:
        _refuse_own_vision(exported)
        vision, named, rules = _own_vision(model), {}, (*rules, *names.OPEN_CLIP_VISION)
        state = _with_bias_in_positions(hf.with_all_positions(model), 1)
    config = {
        "embed_dim": model.common_dim,
        "custom_text": True,
        "quick_gelu": activation(model.text) == "quick_gelu",  # of open_clip's own ViT too, which has the same
        "vision_cfg": {**vision, "image_size": list(image.img_size)},
        "text_cfg": open_clip_text(model),
        **({"init_logit_bias": model.text.initial_logits[1]} if _is_siglip(model) else {}),
    }
    pixels = {
        "mean": list(image.mean),
        "std": list(image.std),
        "interpolation": image.interpolation,
        "resize_mode": _RESIZE_MODES[image.crop_mode or "center"],
    }
    text = json.dumps({"model_cfg": config, "preprocess_cfg": pixels}, indent=2)
    (folder / "open_clip_config.json").write_text(text + "\n")
    save(folder, named | to_theirs(state, rules), max_bytes=2**62, name="open_clip_model")
    return tuple(_notes(exported))


def open_clip_text(model: ContrastiveModel) -> dict[str, Any]:
    """The text_cfg of open_clip's text tower."""
    settings = model.text.settings
    return {
        "context_length": settings.context_length,
        "vocab_size": settings.vocab_size,
        "width": settings.width,
        "heads": settings.heads,
        "layers": settings.depth,
        "mlp_ratio": settings.mlp_ratio,
        "no_causal_mask": not settings.causal,
        "pool_type": {"end": "eos", "last": "last"}[settings.pool],
        "eos_id": settings.end_id,
        "pad_id": settings.pad_id,
        "proj_bias": settings.projection_bias,
        "norm_kwargs": {"eps": settings.eps},
        **_act_kwargs(model.text),
    }


def _load_open_clip(folder: Path) -> Predict:
    """The folder as open_clip loads it, as `pairs`."""
    import open_clip

    with quiet():
        model = open_clip.create_model(f"local-dir:{folder}").eval()
    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    ids = example_captions(TextSettings(config["vocab_size"], config["context_length"], config["eos_id"]))
    bias = 0.0 if model.logit_bias is None else model.logit_bias

    def predict(images: torch.Tensor) -> torch.Tensor:
        features = (model.encode_image(images, normalize=True), model.encode_text(ids, normalize=True))
        return _similarities(*features, model.logit_scale.exp(), bias)

    return predict


def _notes(exported: Exported) -> Iterator[str]:
    """Lines for people: what open_clip does in another way than this model's run."""
    image = exported.image
    if exported.tokenizer != "clip":
        yield f"the folder has no tokenizer: this text tower takes the ids of --tokenizer {exported.tokenizer}"
    pct = image.crop_pct or DEFAULT_CROP_PCT
    if pct != 1.0 and image.crop_mode != "squash":
        yield f"open_clip's images have no margin to crop; the run evaluates with --crop-pct {pct:g}"


_OPEN_CLIP = "open_clip.create_model_and_transforms('local-dir:{}')"
FORMATS = {
    "hf": Format("transformers", ("transformers",), _write_hf, _load_hf, pairs),
    "open_clip": Format(
        "open_clip_torch", ("open_clip",), _write_open_clip, _load_open_clip, pairs, "text", _OPEN_CLIP
    ),
}
