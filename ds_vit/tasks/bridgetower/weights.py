"""A BridgeTower in a folder of transformers' `BridgeTowerForContrastiveLearning`."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from ds_vit.tasks.bridgetower.tower import BridgeTower
from ds_vit.tasks.exports import Exported, Format, Predict, Save, read_transformers

_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


def _write(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write config.json and the weights, and copy what prepares images and captions from the folder of --model.

    Attention dropout in config.json is what it was before training.
    """
    model = exported.model
    assert isinstance(model, BridgeTower)
    config = copy.deepcopy(model.config)
    config.text_config.attention_probs_dropout_prob = model.attention_dropout
    config.architectures, config.dtype = ["BridgeTowerForContrastiveLearning"], torch.float32
    config.save_pretrained(str(folder))
    source = Path(model.pretrained_cfg["file"])
    for name in (*_TEXT_FILES, *_IMAGE_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    state = model.state_dict()
    save(folder, {name: value.view(()) if name in model.scalars else value for name, value in state.items()})
    return ()


def _load(folder: Path) -> Predict:
    """The folder as transformers loads it."""
    return _embeddings(read_transformers(folder, "BridgeTowerForContrastiveLearning"))


def _embeddings(model: Any) -> Predict:
    """Images [B, 3, H, W] → the three embeddings next to each other [B, 3 E], with the same caption for each image."""
    text = model.config.text_config
    ids = torch.randint(text.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    ids[0, -2:] = text.pad_token_id

    def embed(images: torch.Tensor) -> torch.Tensor:
        own = ids.expand(len(images), -1)
        found = model(input_ids=own, attention_mask=own != text.pad_token_id, pixel_values=images)
        return torch.cat((found.image_embeds, found.text_embeds, found.cross_embeds), dim=1)

    return embed


FORMATS = {"hf": Format("transformers", ("transformers",), _write, _load, lambda exported: _embeddings(exported.model))}
