"""The weights that a path stands for: a run's final ones, one of its checkpoints, or a file; raw or averaged (EMA)."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from ds_vit.checkpoint import Damaged, marked, open_checkpoint
from ds_vit.config.run_folder import WEIGHTS, RunFolder, weights_in
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.weight_files import class_names
from ds_vit.tasks import TASKS
from ds_vit.tasks.classification import Classification

_POINTERS = ("latest", "best")  # text files in checkpoints/ that hold a folder's name


@dataclass(frozen=True)
class StoredWeights:
    """Weights on disk, in timm's names.

    Attributes:
        path: what `InitialCheckpoint` opens: a file, the index of a sharded one, or a folder of another tool.
        recipe: the config.yaml of the run that made them; None where they are no run's.
        folder: where what is found out about them is written by default.
        kind: "raw" or "ema".
    """

    path: Path
    recipe: Path | None
    folder: Path
    kind: str

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits, from the first that says them: the weights themselves,
        the state of the checkpoint that they lie in, the run's classes.json. Empty where none does."""
        if names := class_names(self.path):
            return names
        if (self.path.parent / "manifest.json").is_file():
            run = open_checkpoint(self.path.parent).state["run"]
            if TASKS[run.get("task", Classification.name)].has_classes:  # of before there were tasks: no task
                return tuple(run.get("class_names", ()))
        classes = RunFolder(self.recipe.parent).classes if self.recipe else None
        return tuple(json.loads(classes.read_text())) if classes and classes.is_file() else ()

    def verify(self) -> None:
        """Compare weights of a checkpoint with its manifest; others have none, and are taken as they are.

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


def _pointed_at(checkpoints: Path, pointer: str) -> Path | None:
    """The checkpoint folder that `checkpoints/latest` or `checkpoints/best` names; None without that file."""
    name = marked(checkpoints, pointer)
    if name is None:
        return None
    folder = checkpoints / name
    if not folder.is_dir():
        file = checkpoints / pointer
        raise UserError(f"{file} names {folder.name}, which does not exist; name a folder with --checkpoint")
    return folder


def _places(run: RunFolder, checkpoint: str) -> list[Path]:
    """The folders that `checkpoint` means in a run, the preferred one first."""
    if checkpoint in _POINTERS:
        folder = _pointed_at(run.checkpoints, checkpoint)
        if folder is None:
            raise UserError(f"--checkpoint {checkpoint}: there is no {run.checkpoints / checkpoint}")
        return [folder]
    if checkpoint:
        folders = [path for path in (run.checkpoints / checkpoint, Path(checkpoint)) if path.is_dir()]
        if not folders:
            there = sorted(path.name for path in run.checkpoints.glob("step-*"))
            raise UserError(
                f"--checkpoint {checkpoint}: no such folder, in {run.checkpoints} or by itself; "
                f"there {'are ' + ', '.join(there) if there else 'is none'}"
            )
        return folders[:1]
    latest = _pointed_at(run.checkpoints, "latest")
    return [run.path, *([latest] if latest else [])]


def _recipe_of(place: Path) -> Path | None:
    """The config.yaml of the run that a folder is, or is a checkpoint of."""
    run = place if RunFolder(place).config.is_file() else place.parent.parent
    return RunFolder(run).config if RunFolder(run).config.is_file() else None


def find_weights(source: str | Path, kind: str = "raw", checkpoint: str = "") -> StoredWeights:
    """Find weights on disk.

    Args:
        source: a run's output folder, one of its checkpoint folders, or a file or folder that `--initial-checkpoint`
            accepts.
        kind: "raw", or "ema" for the moving average.
        checkpoint: of a run: "latest", "best", the name of a folder in checkpoints/ or a path; empty for the final
            weights, or, where the run is not complete, the latest checkpoint's.

    Raises:
        UserError: there is nothing of that kind; says what there is.
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
        path = weights_in(place, kind)
        if path is not None:
            break
    else:
        where = " or ".join(str(place) for place in places)
        hint = "; it has raw weights" if kind == "ema" and any(weights_in(place, "raw") for place in places) else ""
        raise UserError(f"there is no {WEIGHTS[kind]}.safetensors (or its index.json) in {where}{hint}")
    return StoredWeights(path, _recipe_of(place), folder=source, kind=kind)


def add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a command line the arguments of `find_weights`."""
    parser.add_argument("source", metavar="RUN", help="a run's folder, a checkpoint, or a file of weights")
    parser.add_argument("--weights", choices=tuple(WEIGHTS), help="the weights, or their moving average [raw]")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="latest, best, a folder in the run's checkpoints/ or a path [the final weights, else latest]",
    )
