"""A Hugging Face `BridgeTowerForContrastiveLearning` folder from the weights of `--task bridgetower`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ds_vit.checkpoint.tensors import save_weights
from ds_vit.data.settings import ImageConfig, resolve_pixels
from ds_vit.models.bridge_tower import BridgeTower, create_bridge_tower
from ds_vit.models.zoo import image_size
from ds_vit.weights import hf
from ds_vit.weights.files import StoredWeights
from ds_vit.weights.initial_checkpoint import InitialCheckpoint
from ds_vit.weights.source import Exported, Predict

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def load(weights: StoredWeights, values: Mapping[str, Any]) -> Exported:
    """Build transformers' model and load the weights; `values` are flags by their recipe names.

    Raises:
        UserError: the weights are damaged or do not fit the model, or its folder is gone.
    """
    weights.verify()
    torch.manual_seed(0)  # transformers draws initial values; all of them are overwritten
    model = create_bridge_tower(values["model"], device="cpu")
    InitialCheckpoint(weights.path, model).load(model)
    image = ImageConfig(image_size(model), **resolve_pixels(values, model))
    return Exported(model.eval(), image, (), weights)


def write(exported: Exported, folder: Path) -> None:
    """Write config.json and model.safetensors, and copy what prepares images and captions from the folder of --model.

    Attention dropout in config.json is what it was before training.
    """
    model = exported.model
    assert isinstance(model, BridgeTower)
    config = copy.deepcopy(model.config)
    config.text_config.attention_probs_dropout_prob = model.attention_dropout
    config.architectures, config.dtype = ["BridgeTowerForContrastiveLearning"], torch.float32
    config.save_pretrained(str(folder))
    state = model.state_dict()
    save_weights(folder, {name: value.view(()) if name in model.scalars else value for name, value in state.items()})
    source = Path(model.pretrained_cfg["file"])
    for name in (*_TEXT_FILES, *_IMAGE_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def read(folder: Path) -> Predict:
    """The folder as transformers loads it."""
    return predict(hf.read(folder, "BridgeTowerForContrastiveLearning"))


def predict(model: Any) -> Predict:
    """Images [B, 3, H, W] → the three embeddings next to each other [B, 3 E], with the same caption for each image."""
    text = model.config.text_config
    ids = torch.randint(text.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    ids[0, -2:] = text.pad_token_id

    def embed(images: torch.Tensor) -> torch.Tensor:
        own = ids.expand(len(images), -1)
        found = model(input_ids=own, attention_mask=own != text.pad_token_id, pixel_values=images)
        return torch.cat((found.image_embeds, found.text_embeds, found.cross_embeds), dim=1)

    return embed
