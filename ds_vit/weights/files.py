"""Finds weights on disk, of a run or of any tool, and opens them as a dictionary from timm's names to tensors.

Accepted are .safetensors, the index.json of a sharded one, torch files (.pth, .pt, .bin, .tar; read with
`weights_only=True`), and a folder that holds either: timm's own, or one of another tool whose names a task knows
(`Task.foreign_names`). Those are translated. As in timm, an EMA inside a training
checkpoint is preferred. The tensors are mapped into memory: only values that are used are read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from timm.models import load_state_dict
from torch.utils.serialization import config as torch_config

from ds_vit.checkpoint.folder import Damaged, checkpoints, marked, open_checkpoint, step_of
from ds_vit.checkpoint.tensors import TensorFiles
from ds_vit.config.deepspeed_json import leaves
from ds_vit.config.parser import load_recipe
from ds_vit.config.run_folder import BEST, WEIGHTS, RunFolder, weights_in
from ds_vit.fault_tolerance.errors import UserError, first_line, read_object
from ds_vit.models.layers import MAIN_TOWER
from ds_vit.tasks.foreign_names import ForeignNames
from ds_vit.tasks.metrics import Figure
from ds_vit.tasks.registry import all_tasks, task_of

_SAFETENSORS = (".safetensors", ".json")
_TORCH = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_FILE_BEGINS = {"model": "", "ema": "ema-", BEST: f"{BEST}-", "teacher": "teacher_"}
"""The beginnings of the names of the towers' files, by the name of the main tower's."""
_UNREADABLE = (AttributeError, EOFError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)
_OF_TIMM = r"patch_embed\.proj\.weight$"  # a name that each of its models has
_AVERAGES = ("teacher", "ema", "target")
_ASKED = ("best", "last", "ema", "raw")
"""The words of --weights."""


def _foreign_names(tower: str = MAIN_TOWER) -> list[ForeignNames]:
    of_tasks = dict.fromkeys(names for task in all_tasks() for names in task.foreign_names)
    return [names for names in of_tasks if names.tower == tower]


def read_torch(path: Path) -> dict[str, Any]:
    """The contents of a torch file as timm loads it: its EMA or state dict, without the prefixes of wrappers."""
    try:
        with torch_config.patch("load.mmap", True):
            return load_state_dict(str(path))
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return load_state_dict(str(path))  # written by torch < 1.6


def _newest_of_deepspeed(path: Path, states: Sequence[Path]) -> Path:
    """The checkpoint that DeepSpeed's file `latest` names, else the one written last."""
    with contextlib.suppress(OSError):
        return path / (path / "latest").read_text().strip()
    return max(states, key=lambda file: file.stat().st_mtime).parent


def _file_of(path: Path) -> Path:
    """The file to open for a path; UserError if there is none."""
    if path.is_dir():
        ours = (weights_in(path, kind) for kind in (BEST, "teacher", "raw"))
        names = sorted((file for one in _foreign_names() for file in one.files), key=lambda name: Path(name).suffix)
        theirs = (path / name for name in names[::-1])  # .safetensors first
        if found := [file for file in (*ours, *theirs) if file and file.is_file()]:
            return found[0]
        if states := [*path.glob("*_states.pt"), *path.glob("*/*_states.pt")]:
            step = path if states[0].parent == path else _newest_of_deepspeed(path, states)
            raise UserError(
                f"initial checkpoint {path} is one of DeepSpeed's own, which are pickles; if you trust it, run python "
                f"{step.parent}/zero_to_fp32.py {step.parent} weights -t {step.name} --safe_serialization and give the "
                f"folder weights; without ZeRO give {step / 'mp_rank_00_model_states.pt'}"
            )
        raise UserError(f"initial checkpoint {path} is a folder without model.safetensors or its index.json")
    if not path.is_file():
        raise UserError(f"initial checkpoint {path} does not exist")
    return path


def _shards(path: Path) -> list[Path]:
    """The files that a .safetensors or its index.json consists of.

    Averaged weights lack the frozen parameters: the raw weights in the same folder are read first. What a run
    wrote next to its image tower follows: a text tower, a decoder, a projection head. A head that a JSON file describes
    is no tower: it is the one that `ds-vit export` takes out of a segmenter.
    """
    files = [path]
    if path.suffix == ".json":
        files = [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
    if path.name.startswith("ema.safetensors"):
        raw = weights_in(path.parent, "raw")
        files = [*(_shards(raw) if raw else []), *files]
    if (begin := _FILE_BEGINS.get(path.name.split(".")[0])) is not None:
        known = dict.fromkeys(tower for task in all_tasks() for tower in task.tower_files)
        towers = [tower for tower in known if not path.with_name(f"{tower}.json").is_file()]
        names = (f"{begin}{tower}.safetensors{ending}" for tower in towers for ending in (".index.json", ""))
        files += [file for name in names if path.with_name(name).is_file() for file in _shards(path.with_name(name))]
    return files


def _without_prefix(contents: Mapping[str, Any], path: Path, tower: str) -> tuple[dict[str, Any], str]:
    """The tensors of the one model in a file, without the prefix of their names, and that prefix.

    A dictionary in the file (`{"teacher": {...}}`) is a prefix too. Of several models an average is preferred, and of
    several averages the one called an EMA: a file of DINOv3 may have a fixed teacher too.

    Raises:
        UserError: there are several, none or more of them an average.
    """
    tensors = leaves(contents)
    marks = [*([_OF_TIMM] if tower == MAIN_TOWER else []), *(names.marks for names in _foreign_names(tower))]
    of_model = re.compile(rf"((?:[^.]+\.)*?)(?:{'|'.join(marks)})")
    prefixes = sorted({found[1] for name in tensors if (found := of_model.match(name))})
    if not prefixes or "" in prefixes:
        return dict(contents), ""
    chosen = [prefix for prefix in prefixes if any(word in prefix for word in _AVERAGES)] or prefixes
    if len(chosen) > 1:
        chosen = [prefix for prefix in chosen if "ema" in prefix] or chosen
    if len(chosen) > 1:
        several = f"{len(chosen)} models, whose names begin with {', '.join(chosen)}"
        raise UserError(f"initial checkpoint {path}: it holds {several}; save the state dict of one of them")
    below = {name.removeprefix(chosen[0]): tensors[name] for name in tensors if name.startswith(chosen[0])}
    return below, chosen[0]


def open_prefixed(path: str | Path, tower: str = MAIN_TOWER) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a checkpoint, under the names here where the file has another tool's.

    Args:
        path: of the file, or of a folder that holds one.
        tower: whose tensors, under their names in that tower.

    Returns:
        The tensors, and the prefix that their names have in the file and not here; "" for none.

    Raises:
        UserError: it does not exist, cannot be read, holds more than tensors, or several models.
    """
    path = _file_of(Path(path))
    if path.suffix not in _SAFETENSORS + _TORCH:
        kinds = ", ".join((".safetensors", ".safetensors.index.json", *_TORCH))
        raise UserError(f"initial checkpoint {path} cannot be read: its ending {path.suffix!r} is none of {kinds}")
    try:
        tensors = dict(TensorFiles(_shards(path))) if path.suffix in _SAFETENSORS else read_torch(path)
    except _UNREADABLE as error:
        if isinstance(error.__cause__, pickle.UnpicklingError):
            raise UserError(
                f"initial checkpoint {path} holds more than tensors and is not loaded, because unpickling it could run "
                f"code; save its state dict as safetensors ({first_line(error.__cause__)})"
            ) from error
        why = "it is not a dictionary of tensors" if isinstance(error, AttributeError) else error
        raise UserError(f"initial checkpoint {path} cannot be read: {why}") from error
    tensors, prefix = _without_prefix(tensors, path, tower)
    translated = (names.translate(tensors) for names in _foreign_names(tower))
    return next((found for found in translated if found is not None), tensors), prefix


def names_as_metadata(
    class_names: Sequence[str],
    tokenizer: str = "",
    figure: Figure | None = None,
    origin: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Names for the header of a safetensors file, whose values are strings.

    Args:
        class_names: of the classes; the function of that name reads them.
        tokenizer: `Tokenizer.name` of a text tower; `tokenizer_name` reads it.
        figure: decides which weights of the run are the best; `StoredWeights` reads it.
        origin: what the weights come from; `StoredWeights` reads it.
    """
    names = {"class_names": json.dumps(list(class_names))} if class_names else {}
    names |= {"figure": f"{figure.name} {figure.unit}"} if figure else {}
    names |= {"origin": json.dumps(origin)} if origin else {}
    return {**names, "tokenizer": tokenizer} if tokenizer else names


def _header(path: Path) -> dict[str, str]:
    """The entries of the header of weights; empty if they are not safetensors, or cannot be read."""
    file = _file_of(path)
    with contextlib.suppress(*_UNREADABLE):  # `open_prefixed` reports it
        return TensorFiles(_shards(file)).metadata if file.suffix in _SAFETENSORS else {}
    return {}


def tokenizer_name(path: str | Path) -> str:
    """The name of the tokenizer that a text tower was trained with; empty if the weights do not say it."""
    return _header(Path(path)).get("tokenizer", "")


def class_names(path: str | Path) -> tuple[str, ...]:
    """The class names stored with weights, in the order of the logits; empty if there are none.

    From the header of the safetensors file, else from the config.json in its folder: timm's `label_names` or Hugging
    Face's `id2label`, unless that is its default (LABEL_0, LABEL_1, …).

    Raises:
        UserError: the weights or the config.json cannot be read.
    """
    header = _header(Path(path))
    if "class_names" in header:
        return tuple(json.loads(header["class_names"]))
    config = config_beside(Path(path))
    numbered = config.get("id2label") or {}
    names = config.get("label_names") or [numbered[number] for number in sorted(numbered, key=int)]
    default = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return () if default else tuple(str(name) for name in names)


def config_beside(path: Path, name: str = "config.json") -> dict[str, Any]:
    """The config.json, or a file of another name, in the folder of weights; empty if there is none."""
    file = (path if path.is_dir() else path.parent) / name
    return read_object(file, f"initial checkpoint {path}: ") if file.is_file() else {}


@dataclass(frozen=True)
class StoredWeights:
    """Weights on disk, in timm's names.

    Attributes:
        path: for `open_prefixed`: a file, the index of a sharded one, or a folder of another tool.
        recipe: the config.yaml of the run that wrote them; None if no run did.
        folder: default for results.
        kind: "raw", "ema" or "teacher".
        note: why these and no others, for people.

    As a string: the file, and as far as the run says it, the step of the weights and how it was evaluated there.
    """

    path: Path
    recipe: Path | None
    folder: Path
    kind: str
    note: str = ""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits: the weights', else the run's classes.json, else none."""
        if names := class_names(self.path):
            return names
        return RunFolder(self.recipe.parent).read_classes() if self.recipe else ()

    @property
    def origin(self) -> dict[str, Any]:
        """The origin of the weights: `origin_of` the run and "step"; empty for a file without such a header."""
        header = _header(self.path)
        step = step_of(self.path.parent.name) or int(header.get("step", 0))
        return {**json.loads(header["origin"]), "step": step} if "origin" in header else {}

    def __str__(self) -> str:
        header = _header(self.path)
        text = f"{self.path}{' (the teacher)' * (self.kind == 'teacher')}{self.note}"
        if self.recipe is None or "figure" not in header:
            return text
        step = step_of(self.path.parent.name) or int(header.get("step", 0))
        text += f", step {step}" if step else ""
        name, unit = header["figure"].split(" ")
        with contextlib.suppress(OSError, ValueError):  # no file of rows, or a row that a killed run left incomplete
            rows = RunFolder(self.recipe.parent).rows("eval_ema" if self.kind == "ema" else "eval")
            values = [row[name] for row in rows if row["step"] == step and row.get(name) is not None]
            text += f", {name} {values[-1]:.4g} {unit}".rstrip() if values else ""
        return text

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
            stem = self.path.name.partition(".")[0]
            checkpoint.verify([name for name in checkpoint.files if name.startswith(stem)])
        except Damaged as error:
            raise UserError(f"{folder} is damaged: {error}; name another one with --checkpoint") from None


def _newest(parent: Path) -> str:
    """The newest checkpoint where the file `latest` is lost, as for a run that resumes; "" for none."""
    return next((path.name for path in checkpoints(parent)), "")


def _places(run: RunFolder, weights: str, checkpoint: str) -> Iterator[tuple[Path, str]]:
    """The folders to look into, each with the kind of its files (of `WEIGHTS`), the preferred one first.

    Args:
        run: the folder of a run, or another one that holds weights.
        weights, checkpoint: as for `find_weights`.
    """
    raw = "ema" if weights == "ema" else "raw"
    for asked in [checkpoint] if checkpoint else {"": [BEST, "latest"], BEST: [BEST]}.get(weights, ["latest"]):
        if not checkpoint:
            yield run.path, BEST if asked == BEST else raw
        if asked not in (BEST, "latest"):
            yield from ((place, raw) for place in (run.checkpoints / asked, Path(asked)) if place.is_dir())
        elif name := marked(run.checkpoints, asked) or (asked == "latest" and _newest(run.checkpoints)):
            if not (run.checkpoints / name).is_dir():
                raise UserError(
                    f"{run.checkpoints / asked} names {name}, which does not exist; name a folder with --checkpoint"
                )
            yield run.checkpoints / name, raw


def recipe_of(place: Path) -> Path | None:
    """The config.yaml of the run in a folder, or around a checkpoint's folder."""
    configs = (RunFolder(run).config for run in (place, place.parent.parent))
    return next((config for config in configs if config.is_file()), None)


def _lacks_tower(place: Path, towers: Iterable[str]) -> str:
    """A tower with a separate file that a folder's last weights have and its best ones lack; "" for none."""
    there = (tower for tower in towers if any(place.glob(f"{tower}.safetensors*")))
    return next((tower for tower in there if not any(place.glob(f"{BEST}-{tower}.s*"))), "")


def find_weights(source: str | Path, weights: str = "", checkpoint: str = "") -> StoredWeights:
    """Find weights on disk; everything that reads the weights of a run finds them here.

    Args:
        source: a run's output folder, one of its checkpoint folders, or a file or folder that `--initial-checkpoint`
            accepts.
        weights: "best" or "last" (also "raw"), or "ema" for the moving average at the end; empty for the best, or the
            last if there are no best. The weights of a run with a teacher are the teacher's. While a run is not
            complete, they are those of its checkpoints.
        checkpoint: of a run: "latest", "best", the name of a folder in checkpoints/ or a path.

    Raises:
        UserError: `weights` is none of these, or there is nothing of that kind; names what there is.
    """
    source = Path(source)
    if weights not in ("", *_ASKED):
        raise UserError(f"--weights {weights}: give {', '.join(_ASKED[:-1])} or {_ASKED[-1]}")
    if not source.exists():
        raise UserError(f"{source} does not exist; give a run's folder, a checkpoint or a file of weights")
    is_run = source.is_dir() and RunFolder(source).holds_run
    if checkpoint and not is_run:
        raise UserError(f"--checkpoint {checkpoint} has no effect: {source} is not a run's folder; drop it")
    if checkpoint and weights in ("best", "last"):
        raise UserError(f"--weights {weights} and --checkpoint {checkpoint} are both given; keep one")
    if source.is_file() or not (is_run or weights_in(source, "raw")):
        if weights not in ("", "raw"):
            raise UserError(f"--weights {weights} has no effect on {source}, which holds one set of weights; drop it")
        folder = source if source.is_dir() else source.parent
        recipe = recipe_of(source.parent)
        of_run = recipe is not None and RunFolder(recipe.parent).deepspeed.is_file()  # others write a config.yaml too
        stem = source.name.partition(".")[0]
        return StoredWeights(source, recipe if of_run else None, folder, "ema" if stem == "ema" else "raw")
    tried, note = [], ""
    for place, found in _places(RunFolder(source), weights, checkpoint):
        tried.append((place, found))
        recipe = recipe_of(place)
        # A teacher is the average of its student: in checkpoints, too.
        values = load_recipe(str(recipe)) if recipe and found != "ema" else {}
        task = task_of(values)
        of_teacher = task.feature_tower != MAIN_TOWER
        for stem in ("teacher", "ema") if of_teacher and found == "raw" else (found,):
            if path := weights_in(place, stem):
                if stem == BEST and (lacking := _lacks_tower(place, task.tower_files)):
                    note = f" ({path} lacks {BEST}-{lacking}.safetensors, its {task.tower_files[lacking]})"
                    continue
                kind = "teacher" if of_teacher else "ema" if stem == "ema" else "raw"
                return StoredWeights(path, recipe, source, kind, note)
    if not tried:
        there = ", ".join(sorted(path.name for path in RunFolder(source).checkpoints.glob("step-*"))) or "none"
        raise UserError(f"--checkpoint {checkpoint}: not found; the checkpoints in {source}/checkpoints are: {there}")
    where = " or ".join(dict.fromkeys(str(place) for place, _ in tried))
    hint = "; it has raw weights: drop --weights" if any(weights_in(place, "raw") for place, _ in tried) else ""
    raise UserError(f"there is no {WEIGHTS[tried[-1][1]]}.safetensors (or its index.json) in {where}{note}{hint}")


def weights_line(source: str | Path, weights: str = "", checkpoint: str = "", **_: Any) -> str:
    """The first line of what a command says: the weights that it reads; the arguments are its own."""
    return f"weights: {find_weights(source, weights, checkpoint)}"


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `find_weights` to a command line."""
    parser.add_argument("source", metavar="RUN", help="a run's folder, a checkpoint, or a file of weights")
    parser.add_argument(
        "--weights",
        choices=_ASKED,
        help="a run's best weights, its last (raw is the same), or their moving average [best, else last]",
    )
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="a run's checkpoint: latest, best, a folder in its checkpoints/ or a path"
    )
