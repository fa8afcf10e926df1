"""BridgeTower (Xu et al. 2022, https://arxiv.org/abs/2206.08657) as one opaque tower: transformers' model in one layer.

Names, initial values and arithmetic are those of transformers' `BridgeTowerForContrastiveLearning`; nothing in it is
split. The layer keys its dropout and gathers its outputs. Its 4-D mask is the one that transformers would make, without
waiting for the device to see whether a caption is padded. Parameters without dimensions, such as the logit scale, have
one dimension here: DeepSpeed broadcasts the bytes of parameters, and torch has no view of these as bytes.

Shapes: B samples, L tokens of a caption, E common width of the embeddings.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, first_line, read_object, require_package
from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import Layer, TokenCount, take_apart

_SOURCE = "local-dir:"
_PUBLISHED = "BridgeTower/bridgetower-large-itm-mlm-itc"
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, as a preprocessor_config.json has them


class BridgeTower(nn.Module):
    """Mixed in before transformers' class: the description of a run's model, with the members that timm's ViTs have.

    Attributes:
        attention_dropout: the rate in the folder's config.json; in the model it is 0.
        caption_length: L; set by the task.
        common_dim: E.
        scalars: names of the parameters that have no dimensions in transformers.
        embed_dim, in_chans, patch_embed, pretrained_cfg: as timm's, as far as others read them.
    """

    attention_dropout: float
    caption_length: int
    common_dim: int
    embed_dim: int
    in_chans = 3
    patch_embed: SimpleNamespace
    pretrained_cfg: dict[str, Any]
    scalars: frozenset[str]

    def init_weights(self, needs_reset: bool = True) -> None:
        """transformers' initial values, and those that only its constructors set."""
        self.initialize_weights()
        for module in self.modules():
            for name, value in (("scaled_factor", 1.0), ("beta", 0.5)):
                if name in module._parameters:
                    nn.init.constant_(module._parameters[name], value)

    def no_weight_decay(self) -> set[str]:
        """No names: its authors' code and transformers' `Trainer` decay its position embeddings."""
        return set()

    def get_classifier(self) -> nn.Module:
        """None of classes."""
        return nn.Identity()


class _Positions(nn.Module):
    """Mixed in before transformers' embeddings, whose fixed tables no file has."""

    def init_non_persistent_buffers(self) -> None:
        """Compute them (timm's name for this, which `initialise` calls)."""
        self.position_ids.copy_(torch.arange(self.position_ids.shape[-1]))
        if hasattr(self, "token_type_ids"):
            self.token_type_ids.zero_()


def model_folder(name: str) -> Path:
    """The folder of `--model local-dir:FOLDER`.

    Raises:
        UserError: another kind of name, or no config.json of a BridgeTower with contrastive heads in it.
    """
    if not name.startswith(_SOURCE):
        raise UserError(
            f"--model {name}: --task bridgetower takes local-dir:FOLDER, a folder with the files of {_PUBLISHED} on "
            "the Hugging Face Hub or of a fine-tuned one"
        )
    folder = Path(name.removeprefix(_SOURCE))
    path = folder / "config.json"
    values = read_object(path, f"--model {name}: ")
    if values.get("model_type") != "bridgetower":
        raise UserError(f"--model {name}: model_type is {values.get('model_type')!r} in {path}, not 'bridgetower'")
    if missing := [key for key in ("contrastive_hidden_size", "logit_scale_init_value") if key not in values]:
        raise UserError(
            f"--model {name}: {path} has no {' and no '.join(missing)}, so no heads of a contrastive loss; take the "
            f"files of {_PUBLISHED}"
        )
    return folder


def create_bridge_tower(name: str) -> BridgeTower:
    """The description of the model in a folder, on the meta device without memory.

    Args:
        name: as for `model_folder`.

    Raises:
        UserError: as `model_folder`; transformers is not installed, or does not take the config.json.
    """
    folder = model_folder(name)
    with require_package("transformers", "--task bridgetower", " (version 5 or later)"):
        from transformers import BridgeTowerConfig, BridgeTowerForContrastiveLearning
    try:
        config = BridgeTowerConfig.from_pretrained(str(folder))
        attention_dropout = config.text_config.attention_probs_dropout_prob
        config.text_config.attention_probs_dropout_prob = 0.0
        with torch.device("meta"):
            model = BridgeTowerForContrastiveLearning(config)
    except (AssertionError, AttributeError, KeyError, NotImplementedError, OSError, TypeError, ValueError) as error:
        raise UserError(f"--model {name}: transformers cannot build it: {first_line(error)}") from error
    vision = config.vision_config
    side, patch = vision.image_size, vision.patch_size
    mix_in(model, BridgeTower)
    model.attention_dropout = attention_dropout
    model.common_dim, model.embed_dim = config.contrastive_hidden_size, config.hidden_size
    model.patch_embed = SimpleNamespace(
        img_size=(side, side), patch_size=(patch, patch), grid_size=(side // patch, side // patch)
    )
    model.pretrained_cfg = _pretrained_cfg(folder, side)
    visual, text = model.bridgetower.vision_model.visual, model.bridgetower.text_model
    model.scalars = frozenset(name for name, parameter in model.named_parameters() if parameter.ndim == 0)
    for path in model.scalars:
        owner, _, member = path.rpartition(".")
        setattr(model.get_submodule(owner), member, nn.Parameter(model.get_parameter(path).detach().view(1)))
    for embeddings in (visual.embeddings, text.embeddings):
        mix_in(embeddings, _Positions)
    for unused in (text.pooler, getattr(visual, "ln_separate", None)):
        if unused is not None:
            unused.requires_grad_(False)
    return model


def _pretrained_cfg(folder: Path, side: int) -> dict[str, Any]:
    """The preprocessing of images in timm's terms, from preprocessor_config.json where the folder has one."""
    path = folder / "preprocessor_config.json"
    given = read_object(path, "") if path.is_file() else {}
    return {
        "architecture": "BridgeTower",
        "source": "local-dir",
        "file": str(folder),
        "input_size": (3, side, side),
        "mean": tuple(given.get("image_mean", OPENAI_CLIP_MEAN)),
        "std": tuple(given.get("image_std", OPENAI_CLIP_STD)),
        "interpolation": _FILTERS.get(given.get("resample", 3), "bicubic"),
        "crop_pct": 1.0,
        "crop_mode": "center",
    }


class BridgeTowerLayer(Layer):
    """Mixed in before the class of a `BridgeTower` that is taken apart: the whole model as one layer.

    The outputs are the normalised embeddings of images, texts and both together, and the logarithm of the logit scale,
    the same in each row: so the loss reads it through the forward pass of its owner, around which ZeRO-3 gathers it.
    """

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """As `Layer.example`: images, and ids of captions, int64 [B, L]."""
        size = (samples, self.in_chans, *self.patch_embed.img_size)
        images = torch.empty(size, dtype=self.logit_scale.dtype, device="meta")
        return images, torch.empty(samples, self.caption_length, dtype=torch.int64, device="meta")

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(images [B, 3, height, width], keys int64 [B], ids int64 [B, L]) -> [B, 3 E + 1]."""
        images, _, ids = inputs
        dtype = self.logit_scale.dtype
        mask = torch.zeros(ids.shape, dtype=dtype, device=ids.device)
        mask = mask.masked_fill(ids == self.config.text_config.pad_token_id, torch.finfo(dtype).min)
        found = super().forward(input_ids=ids, attention_mask=mask[:, None, None], pixel_values=images)
        embeddings = (found.image_embeds, found.text_embeds, found.cross_embeds)
        return torch.cat((*embeddings, self.logit_scale.expand(len(ids), 1)), dim=1)


@take_apart.register
def _(model: BridgeTower) -> list[Layer]:
    """One `BridgeTowerLayer`."""
    mix_in(model, BridgeTowerLayer)
    rows, columns = model.patch_embed.grid_size
    model.num_tokens = TokenCount(1, rows * columns)
    return [model]
