"""Weights on disk: safetensors with timm's names, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_weights(
    folder: Path, state: Mapping[str, torch.Tensor], max_shard_size: str | int = "5GB", name: str = "model"
) -> Path:
    """Write `<name>.safetensors`, or shards with Hugging Face's `<name>.safetensors.index.json` where it is larger.

    Each file is written under another name and then renamed, so a reader sees a whole file or none.

    Args:
        folder: an existing folder.
        state: timm names → CPU tensors.
        max_shard_size: bytes, or "5GB".
        name: of the file, without its suffix.

    Returns:
        The file that a reader opens: the weights, or the index.
    """
    import json

    split = split_torch_state_dict_into_shards(
        dict(state), filename_pattern=f"{name}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    for file, keys in split.filename_to_tensors.items():
        temporary = folder / f".{file}.partial"
        save_file({key: state[key].contiguous() for key in keys}, str(temporary), metadata={"format": "pt"})
        temporary.chmod(0o666 & ~_umask())  # safetensors makes files that nobody else can read
        os.replace(temporary, folder / file)
    if not split.is_sharded:
        return folder / f"{name}.safetensors"
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    temporary = folder / f".{name}.safetensors.index.json.partial"
    temporary.write_text(json.dumps(index, indent=1))
    os.replace(temporary, folder / f"{name}.safetensors.index.json")
    return folder / f"{name}.safetensors.index.json"
