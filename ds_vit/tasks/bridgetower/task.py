"""Fine-tuning of BridgeTower (Xu et al. 2022) on images with captions, with the loss over the global batch.

The model is transformers' `BridgeTowerForContrastiveLearning`, one opaque tower (`tower.py`); the seam of
coupled tasks is the one of CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ds_vit.config.schema import RunConfig
from ds_vit.data.text import Tokenizer, build_tokenizer
from ds_vit.models.layers import MAIN_TOWER
from ds_vit.models.zoo import ModelSpec
from ds_vit.tasks.bridgetower.flags import SETTINGS
from ds_vit.tasks.bridgetower.tower import BridgeTower, create_bridge_tower, model_folder
from ds_vit.tasks.bridgetower.weights import FORMATS
from ds_vit.tasks.clip.loss import BRIDGE_TOWER_LOSS
from ds_vit.tasks.clip.task import Contrastive
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import StepContext

_ONE_LAYER = "transformers' model is one layer here, which is not split"
_NO_BLOCKS = "transformers' model is one layer here, without timm's blocks"
_OF_FOLDER = "the config.json in the folder of --model describes the model"
_NO_FEATURES = "an embedding needs an image and a caption"
_CONTEXT_LENGTH = 50  # of the paper


class BridgeTowerTask(Contrastive):
    """`--task bridgetower`: texts with images, texts with both, images with both, over the global batch.

    A batch is that of CLIP. Dropout is keyed by the sample; attention dropout is set to 0.
    """

    name = "bridgetower"
    takes_pairs = True
    foreign_names = ()
    export_formats: ClassVar = FORMATS
    not_replayed = "transformers' model has not been captured"
    settings = SETTINGS
    refused_flags: ClassVar[Mapping[str, str]] = {
        **Contrastive.refused_flags,
        **dict.fromkeys(("tp", "pp"), f"{_ONE_LAYER}; ZeRO-3 partitions its parameters"),
        **dict.fromkeys(("grad_checkpointing", "compile", "drop_path", "layer_decay"), _NO_BLOCKS),
        **dict.fromkeys(("drop", "model_kwargs"), _OF_FOLDER),
        **dict.fromkeys(("eval_knn", "eval_linear_probe"), _NO_FEATURES),
    }
    feature_names = ("images", "texts", "both")
    logit_names = ("logit_scale",)
    shown_parameters: ClassVar = {"logit_scale": Contrastive.shown_parameters["text.logit_scale"]}
    loss = BRIDGE_TOWER_LOSS

    model: BridgeTower

    @property
    def notes(self) -> tuple[str, ...]:
        """As `Task.notes`."""
        if not self.model.attention_dropout:
            return ()
        rate = f"{self.model.attention_dropout:g}"
        return (
            f"attention dropout is 0, in place of {rate} in the folder's config.json: its draws cannot be keyed by "
            "sample",
        )

    @classmethod
    def _build_tokenizer(cls, config: RunConfig) -> Tokenizer:
        return build_tokenizer(config.tokenizer, config.context_length, _CONTEXT_LENGTH)

    # ---- the model -------------------------------------------------------------------------------------------------

    @classmethod
    def check_model_name(cls, name: str) -> None:
        """As `Task.check_model_name`."""
        model_folder(name)

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> BridgeTower:
        """As `Task.create_model`; see `create_bridge_tower`."""
        model = create_bridge_tower(spec.name)
        model.caption_length = cls._build_tokenizer(config).context_length
        return model

    def supports(self, model: nn.Module) -> str | None:
        """As `Task.supports`, for the size of images, the ids and the length of captions."""
        assert isinstance(model, BridgeTower)
        config, tokenizer, text = self.config, self.tokenizer, model.config.text_config
        side = model.patch_embed.img_size[0]
        if config.img_size not in (None, side):
            return f"--img-size {config.img_size}: {config.model} takes images of {side} pixels; drop the flag"
        if tokenizer.pad_id != text.pad_token_id or tokenizer.vocab_size > text.vocab_size:
            return (
                f"--tokenizer {config.tokenizer} has {tokenizer.vocab_size:,} ids and pads with {tokenizer.pad_id}; "
                f"{config.model} has {text.vocab_size:,} and pads with {text.pad_token_id}: pass the folder's "
                "tokenizer.json"
            )
        # Positions are counted from the padding id on.
        longest = text.max_position_embeddings - text.pad_token_id - 1
        if tokenizer.context_length > longest:
            length = f"--context-length {tokenizer.context_length}"
            return f"{length}: {config.model} takes captions of at most {longest} tokens"
        return super().supports(model)

    def further_texts(self) -> list[tuple[int, str]]:
        """As `Task.further_texts`: none, for a caption has no features without its image."""
        return []

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _features(self, context: StepContext, batch: Batch) -> dict[str, torch.Tensor]:
        """As `Contrastive`'s, with those of "both" together."""
        outputs = context.forward(MAIN_TOWER, [batch.get("images"), batch.get("texts")], batch)
        *features, logits = outputs.split((*(self.model.common_dim,) * 3, 1), dim=1)
        return self._normalised(features, logits)
