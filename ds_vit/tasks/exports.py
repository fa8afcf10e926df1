"""The parts of an export: the model, the form of another tool, and the functions that write and load it."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models._hub import save_config_for_hf

from ds_vit.data.settings import PIXEL_FLAGS, ImageConfig
from ds_vit.models.zoo import ModelSpec, TimmViT

Predict = Callable[[torch.Tensor], torch.Tensor]
"""A model: images [B, 3, H, W] → logits [B, C]."""
Save = Callable[..., None]
"""`ds_vit.checkpoint.tensors.save_weights`."""
# Entries of timm's registry that describe timm's weights of that name, and no others.
_OF_OTHER_WEIGHTS = ("tag", "license", "origin_url", "paper_ids", "paper_name", "notes", "source_license")


@dataclass(frozen=True)
class TextTower:
    """The text tower of a model that compares images with texts.

    Attributes:
        tower: (ids int64 [M, L], keys int64 [M]) → features [M, E], and next to them in each row the logit scale (its
            logarithm) and, of a sigmoid loss, the logit bias.
        context_length: L.
        width: E, of the images' features too.
    """

    tower: torch.nn.Module
    context_length: int
    width: int


@dataclass(frozen=True)
class ArrayPredictor:
    """The functions with which `ds-vit predict` reads an image and writes its prediction, an array of classes.

    Attributes:
        classes: (bytes of an image's file, its name, the model on the device for any number of normalised images on the
            CPU) → class numbers of the image's size, int64 [H, W] on the CPU; ImageDecodeError for a damaged image.
        write: (path of an image, what `classes` gave as numpy's, folder to write into, path of the files below their
            folders without an ending) → the path of its file. OSError where it cannot.
    """

    classes: Callable[[bytes, str, Predict], torch.Tensor]
    write: Callable[[str, np.ndarray, Path, str], Path]


@dataclass(frozen=True)
class Exported:
    """A model with its weights, and what another tool has to know about it.

    Attributes:
        model: timm's, or the whole one of a task, on the CPU in fp32, in evaluation mode.
        image: how evaluation prepares its input.
        labels: the classes' names, one for each logit; empty where nothing says them.
        path: where the weights come from.
        spec: how timm builds the main tower.
        bce: trained with binary cross-entropy: each logit is for its class only.
        tokenizer: of a task with text: --tokenizer.
        predictor: of `Task.predictor`; None where the model gives the logits of classes, or features.
        pipeline_tag: of `Task.pipeline_tag`; "" for a model of timm's.
        head: parameters of a task with a teacher that timm's model lacks, under the names of the task.
    """

    model: TimmViT
    image: ImageConfig
    labels: tuple[str, ...]
    path: Path
    spec: ModelSpec
    bce: bool = False
    tokenizer: str = ""
    predictor: TextTower | ArrayPredictor | None = None
    pipeline_tag: str = ""
    head: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A form of a model that another tool reads.

    Attributes:
        reader: the package that loads it.
        packages: needed in addition to the required ones.
        write: writes a model into an empty folder, its tensors by `Save`, and gives lines for people. It raises
            UserError for a model that the tool cannot represent, before it writes anything.
        load: that folder as the tool loads it.
        predict: the model with the outputs that `load` gives.
        extra: of `launch/setup.sh`, which installs the packages.
        loaded_with: the call for people, with {} for the folder; "" for none.
    """

    reader: str
    packages: tuple[str, ...]
    write: Callable[[Exported, Path, Save], tuple[str, ...]]
    load: Callable[[Path], Predict]
    predict: Callable[[Exported], Predict] = lambda exported: exported.model
    extra: str = "export"
    loaded_with: str = ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Other libraries log and warn of steps that succeed."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def read_transformers(folder: Path, kind: str) -> Any:
    """The model in a folder as a class of transformers loads it; a tensor missing or left over is an error."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, info = getattr(transformers, kind).from_pretrained(str(folder), output_loading_info=True)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    assert not wrong, wrong
    return model.eval()


def write_timm_config(exported: Exported, path: Path) -> None:
    """timm's description of the model and of how its images are prepared."""
    pixels = {name: value for name in PIXEL_FLAGS if (value := getattr(exported.image, name)) is not None}
    labels = {"label_names": list(exported.labels)} if exported.labels else {}
    cfg = exported.model.pretrained_cfg
    exported.model.pretrained_cfg = {name: cfg[name] for name in cfg if name not in _OF_OTHER_WEIGHTS}
    save_config_for_hf(exported.model, str(path), model_config=labels, data_config=pixels)
    config = json.loads(path.read_text())
    # transformers passes the num_classes next to it, and fails on a second one.
    config.get("model_args", {}).pop("num_classes", None)
    path.write_text(json.dumps(config, indent=2))
