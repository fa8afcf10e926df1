"""A pretrained folder of a tiny BridgeTower."""

from __future__ import annotations

from pathlib import Path

import torch

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}


def tiny_model(dropout: float, features: int = 16, **shape: int) -> torch.nn.Module:
    """A tiny BridgeTower with transformers' initial values, whose text side has the ids of the tokenizer `bytes`."""
    from transformers import BridgeTowerConfig, BridgeTowerForContrastiveLearning

    shape = {**SHAPE, "num_hidden_layers": 2, **shape}
    text = {"vocab_size": 259, "pad_token_id": 256, "max_position_embeddings": 300, "hidden_dropout_prob": dropout}
    config = BridgeTowerConfig(
        **shape,
        contrastive_hidden_size=features,
        logit_scale_init_value=2.6592,
        text_config={**shape, **text, "attention_probs_dropout_prob": 0.1},
        vision_config={"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": 16},
    )
    torch.manual_seed(0)
    return BridgeTowerForContrastiveLearning(config)


def write_folder(folder: Path, dropout: float = 0.0) -> Path:
    """A pretrained folder of a tiny random model."""
    model = tiny_model(dropout)
    for parameter in model.parameters():  # the constructor leaves most embeddings of one sample near those of another
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder
