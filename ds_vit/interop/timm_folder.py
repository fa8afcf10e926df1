"""A folder that `timm.create_model("local-dir:PATH", pretrained=True)` reads, with nothing of ours in it."""

from __future__ import annotations

import json
from pathlib import Path

import timm
from timm.models._hub import save_config_for_hf

from ds_vit.checkpoint import save_weights
from ds_vit.interop.check import Predict
from ds_vit.interop.source import Exported
from ds_vit.models.weight_files import names_as_metadata

# What timm's registry says about its own weights of that name, and is not true of these.
_OF_OTHER_WEIGHTS = ("tag", "license", "origin_url", "paper_ids", "paper_name", "notes", "source_license")


def reader() -> str:
    """Which tool loads it back."""
    return f"timm {timm.__version__}"


def refuse(exported: Exported) -> None:
    """timm has a class for every model here."""


def write_config(exported: Exported, path: Path) -> None:
    """timm's description of the model and of how its images are prepared."""
    pixels = {name: value for name, value in exported.pixels.items() if value is not None}
    labels = {"label_names": list(exported.labels)} if exported.labels else {}
    save_config_for_hf(exported.model, str(path), model_config=labels, data_config=pixels)
    config = json.loads(path.read_text())
    for key in _OF_OTHER_WEIGHTS:
        config["pretrained_cfg"].pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def write(exported: Exported, folder: Path) -> None:
    """Write config.json and model.safetensors (one file, however large: timm reads no shards)."""
    metadata = names_as_metadata(exported.labels)
    save_weights(folder, exported.model.state_dict(), max_shard_size=2**62, metadata=metadata)
    write_config(exported, folder / "config.json")


def load(folder: Path) -> Predict:
    """The folder as timm loads it."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return model
