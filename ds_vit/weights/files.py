"""Finds weights on disk, of a run or of any tool, and opens them as a dictionary from timm's names to tensors.

Accepted are .safetensors, the index.json of a sharded one, torch files (.pth, .pt, .bin, .tar; read with
`weights_only=True`), and a folder that holds either: timm's own, one of Hugging Face's `ViTForImageClassification`,
`CLIPModel` or `SiglipModel`, or open_clip's. Foreign names are translated. As in timm, an EMA inside a training
checkpoint is preferred. The tensors are mapped into memory: only values that are used are read.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from timm.models import load_state_dict
from torch.utils.serialization import config as torch_config

from ds_vit.checkpoint.folder import Damaged, marked, open_checkpoint
from ds_vit.checkpoint.tensors import TensorFiles
from ds_vit.config import load_recipe
from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.models import MAIN_TOWER
from ds_vit.run_folder import WEIGHTS, RunFolder, weights_in
from ds_vit.tasks import task_of
from ds_vit.weights.hf_names import from_hf, is_hf
from ds_vit.weights.two_tower_names import from_two_towers, is_two_towers

_SAFETENSORS = (".safetensors", ".json")
_TORCH = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_IN_FOLDER = (
    "teacher.safetensors.index.json",
    "teacher.safetensors",
    "model.safetensors.index.json",
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
)
_TEXT = {"model": "text", "ema": "ema-text"}  # the text tower of a run, next to its image tower
_DEEPSPEED = ("*_optim_states.pt", "mp_rank_*_model_states.pt")


def read_torch(path: Path) -> dict[str, Any]:
    """The contents of a torch file as timm loads it: its EMA or state dict, without the prefixes of wrappers."""
    try:
        with torch_config.patch("load.mmap", True):
            return load_state_dict(str(path))
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return load_state_dict(str(path))  # written by torch < 1.6


def deepspeed_checkpoint(folder: Path) -> Path | None:
    """The folder of ranks' files of a checkpoint that DeepSpeed's own `save_checkpoint` wrote, or None.

    Args:
        folder: that folder, or the one around it with the file `latest`.
    """
    latest = folder / "latest"
    inner = folder / latest.read_text().strip() if latest.is_file() else folder
    return inner if any(True for pattern in _DEEPSPEED for _ in inner.glob(pattern)) else None


def _file_of(path: Path) -> Path:
    """The file to open for a path; UserError if there is none."""
    if path.is_dir():
        candidates = [path / name for name in _IN_FOLDER if (path / name).is_file()]
        if candidates:
            return candidates[0]
        if deepspeed_checkpoint(path):
            raise UserError(
                f"initial checkpoint {path} is one of DeepSpeed's own, which are pickles; if you trust it, convert it: "
                f"ds-vit import {path} --to weights.safetensors"
            )
        raise UserError(f"initial checkpoint {path} is a folder without model.safetensors or its index.json")
    if not path.is_file():
        raise UserError(f"initial checkpoint {path} does not exist")
    return path


def _shards(path: Path) -> list[Path]:
    """The files that a .safetensors or its index.json consists of.

    Averaged weights lack the frozen parameters: the raw weights in the same folder are read first. A text tower that
    a run wrote next to its image tower follows.
    """
    files = [path]
    if path.suffix == ".json":
        files = [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
    if path.name.startswith("ema.safetensors"):
        raw = [path.parent / name for name in _IN_FOLDER[2:4] if (path.parent / name).is_file()]
        files = [*(_shards(raw[0]) if raw else []), *files]
    if text := _TEXT.get(path.name.split(".")[0]):
        candidates = (path.with_name(f"{text}.safetensors{ending}") for ending in (".index.json", ""))
        files = [*files, *(file for found in candidates if found.is_file() for file in _shards(found))]
    return files


def open_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, under the names here where the file has Hugging Face's or open_clip's.

    Raises:
        UserError: it does not exist, cannot be read, or holds more than tensors.
    """
    path = _file_of(Path(path))
    if path.suffix not in _SAFETENSORS + _TORCH:
        kinds = ", ".join((".safetensors", ".safetensors.index.json", *_TORCH))
        raise UserError(f"initial checkpoint {path} cannot be read: its ending {path.suffix!r} is none of {kinds}")
    try:
        tensors = dict(TensorFiles(_shards(path))) if path.suffix in _SAFETENSORS else read_torch(path)
    except (AttributeError, EOFError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise UserError(
                f"initial checkpoint {path} holds more than tensors and is not loaded, because unpickling it could run "
                f"code; save its state dict as safetensors ({first_line(error.__cause__)})"
            ) from error
        why = "it is not a dictionary of tensors" if isinstance(error, AttributeError) else error
        raise UserError(f"initial checkpoint {path} cannot be read: {why}") from error
    if is_two_towers(tensors):
        return from_two_towers(tensors)
    return from_hf(tensors) if is_hf(tensors) else tensors


def names_as_metadata(class_names: Sequence[str], tokenizer: str = "") -> dict[str, str]:
    """Names for the header of a safetensors file, whose values are strings.

    Args:
        class_names: of the classes; the function of that name reads them.
        tokenizer: `Tokenizer.name` of a text tower; `tokenizer_name` reads it.
    """
    names = {"class_names": json.dumps(list(class_names))} if class_names else {}
    return {**names, "tokenizer": tokenizer} if tokenizer else names


def tokenizer_name(path: str | Path) -> str:
    """The name of the tokenizer that a text tower was trained with; empty if the weights do not say it."""
    file = _file_of(Path(path))
    return TensorFiles(_shards(file)).metadata.get("tokenizer", "") if file.suffix in _SAFETENSORS else ""


def class_names(path: str | Path) -> tuple[str, ...]:
    """The class names stored with weights, in the order of the logits; empty if there are none.

    From the header of the safetensors file, else from the config.json in its folder: timm's `label_names` or Hugging
    Face's `id2label`, unless that is its default (LABEL_0, LABEL_1, …).

    Raises:
        UserError: the weights or the config.json cannot be read.
    """
    file = _file_of(Path(path))
    header = TensorFiles(_shards(file)).metadata if file.suffix in _SAFETENSORS else {}
    if "class_names" in header:
        return tuple(json.loads(header["class_names"]))
    config = config_beside(file)
    numbered = config.get("id2label") or {}
    names = config.get("label_names") or [numbered[number] for number in sorted(numbered, key=int)]
    default = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return () if default else tuple(str(name) for name in names)


def config_beside(path: Path, name: str = "config.json") -> dict[str, Any]:
    """The config.json, or a file of another name, in the folder of weights; empty if there is none."""
    file = (path if path.is_dir() else path.parent) / name
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"initial checkpoint {path}: {file} is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}


_POINTERS = ("latest", "best")  # text files in checkpoints/ that hold a folder's name


@dataclass(frozen=True)
class StoredWeights:
    """Weights on disk, in timm's names.

    Attributes:
        path: for `open_weights`: a file, the index of a sharded one, or a folder of another tool.
        recipe: the config.yaml of the run that wrote them; None if no run did.
        folder: default for results.
        kind: "raw", "ema" or "teacher".
    """

    path: Path
    recipe: Path | None
    folder: Path
    kind: str

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits: the weights', else the run's classes.json, else none."""
        if names := class_names(self.path):
            return names
        classes = RunFolder(self.recipe.parent).classes if self.recipe else None
        return tuple(json.loads(classes.read_text())) if classes and classes.is_file() else ()

    def verify(self) -> None:
        """Compare the weights of a checkpoint with its manifest; other files have none.

        Raises:
            UserError: a file is missing or its bytes have changed.
        """
        folder = self.path if self.path.is_dir() else self.path.parent
        if not (folder / "manifest.json").is_file():
            return
        try:
            checkpoint = open_checkpoint(folder)
            checkpoint.verify([name for name in checkpoint.files if name.startswith(WEIGHTS[self.kind])])
        except Damaged as error:
            raise UserError(f"{folder} is damaged: {error}; name another one with --checkpoint") from None


def _places(run: RunFolder, checkpoint: str) -> list[Path]:
    """The folders that `checkpoint` means in a run, the preferred one first."""
    pointer = checkpoint or _POINTERS[0]
    if pointer not in _POINTERS:
        places = [path for path in (run.checkpoints / checkpoint, Path(checkpoint)) if path.is_dir()]
    else:
        name = marked(run.checkpoints, pointer)
        places = [run.checkpoints / name] if name else []
        if places and not places[0].is_dir():
            raise UserError(
                f"{run.checkpoints / pointer} names {name}, which does not exist; name a folder with --checkpoint"
            )
    if not checkpoint:
        return [run.path, *places]
    if not places:
        there = ", ".join(sorted(path.name for path in run.checkpoints.glob("step-*"))) or "none"
        raise UserError(f"--checkpoint {checkpoint}: not found; the checkpoints in {run.checkpoints} are: {there}")
    return places[:1]


def _recipe_of(place: Path) -> Path | None:
    """The config.yaml of the run in a folder, or around a checkpoint's folder."""
    configs = (RunFolder(run).config for run in (place, place.parent.parent))
    return next((config for config in configs if config.is_file()), None)


def _has_teacher(recipe: Path | None) -> bool:
    """Whether the run of a config.yaml evaluates a teacher."""
    return recipe is not None and task_of(load_recipe(str(recipe))).feature_tower != MAIN_TOWER


def find_weights(source: str | Path, kind: str = "raw", checkpoint: str = "") -> StoredWeights:
    """Find weights on disk.

    Args:
        source: a run's output folder, one of its checkpoint folders, or a file or folder that `--initial-checkpoint`
            accepts.
        kind: "raw", or "ema" for the moving average. The raw weights of a run with a teacher are the teacher's.
        checkpoint: of a run: "latest", "best", the name of a folder in checkpoints/ or a path; empty for the final
            weights, or the latest checkpoint's if the run is not complete.

    Raises:
        UserError: there is nothing of that kind; names what there is.
    """
    source = Path(source)
    if not source.exists():
        raise UserError(f"{source} does not exist; give a run's folder, a checkpoint or a file of weights")
    is_run = source.is_dir() and RunFolder(source).holds_run
    if checkpoint and not is_run:
        raise UserError(f"--checkpoint {checkpoint} has no effect: {source} is not a run's folder; drop it")
    if source.is_file() or not (is_run or weights_in(source, "raw")):
        if kind != "raw":
            raise UserError(f"--weights {kind} has no effect on {source}, which holds one set of weights; drop it")
        folder = source if source.is_dir() else source.parent
        recipe = _recipe_of(source.parent)
        of_run = recipe is not None and RunFolder(recipe.parent).deepspeed.is_file()  # others write a config.yaml too
        return StoredWeights(source, recipe if of_run else None, folder, kind)
    places = _places(RunFolder(source), checkpoint) if is_run else [source]
    for place in places:
        recipe = _recipe_of(place)
        # A teacher is the average of its student: in checkpoints, too.
        kinds = ("teacher", "ema") if kind == "raw" and _has_teacher(recipe) else (kind,)
        for found in kinds:
            if path := weights_in(place, found):
                return StoredWeights(path, recipe, folder=source, kind=found)
    where = " or ".join(str(place) for place in places)
    hint = "; it has raw weights" if any(weights_in(place, "raw") for place in places) else ""
    raise UserError(f"there is no {WEIGHTS[kind]}.safetensors (or its index.json) in {where}{hint}")


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `find_weights` to a command line."""
    parser.add_argument("source", metavar="RUN", help="a run's folder, a checkpoint, or a file of weights")
    parser.add_argument("--weights", choices=("raw", "ema"), help="the weights, or their moving average [raw]")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="latest, best, a folder in the run's checkpoints/ or a path [the final weights, else latest]",
    )
