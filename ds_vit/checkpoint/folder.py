"""The folder of checkpoints on disk: its files, when a checkpoint is complete, which one is used. No engine, no ranks.

checkpoints/latest                 name of the newest complete one
checkpoints/best                   name of the best one so far, by the task's first figure
checkpoints/step-00001000/         complete, or it would not have this name
    model.safetensors              weights, fp32, timm's names (or shards and model.safetensors.index.json)
    optimizer-exp_avg.safetensors  one for each state of the optimizer, the same names and shapes
    ema.safetensors                the moving average, where there is one
    state.json                     progress
    manifest.json                  size and SHA-256 of every other file, and of itself
    evaluation.json                evaluations up to this step, if it was evaluated after the save
checkpoints/.step-00002000.partial being written, or left by a killed run
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.tensors import FileEntry, TensorFiles, remove, replace_text, sha256_of, sync_folder, write_text
from ds_vit.fault_tolerance.errors import UserError

FORMAT = 1
"""Version of the format; a newer one is refused."""

_FIGURES = "evaluation.json"  # in no manifest: it comes later, and without it a resumed run evaluates again

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|old)")


class Damaged(UserError):
    """A checkpoint that differs from its manifest; the text names the file and what is wrong with it."""


def folder_name(step: int) -> str:
    """`step-00001000`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def partial_folder(parent: Path, step: int) -> Path:
    """The folder that the checkpoint of a step is written to."""
    return parent / f".{folder_name(step)}.partial"


def _manifest_checksum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def commit(parent: Path, step: int, entries: Sequence[FileEntry], texts: Mapping[str, str]) -> Path:
    """Turn the temporary folder of a step into a checkpoint: all of it is on the disk before it has its name.

    Args:
        parent: the folder `checkpoints`.
        step: of the checkpoint.
        entries: the files that lie in `partial_folder(parent, step)`, written and read back.
        texts: name → contents of the small files that are still to be written (state.json, indices).

    Raises:
        OSError: the file system refuses; the checkpoint then does not exist.
    """
    temporary = partial_folder(parent, step)
    entries = [*entries, *(write_text(temporary / name, text) for name, text in texts.items())]
    for entry in entries:
        size = (temporary / entry.name).stat().st_size
        if size != entry.num_bytes:
            raise OSError(f"{entry.name} has {size} bytes, and {entry.num_bytes} were written")
    files = {e.name: {"bytes": e.num_bytes, "sha256": e.sha256} for e in sorted(entries, key=lambda e: e.name)}
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
    manifest["sha256"] = _manifest_checksum(manifest)
    write_text(temporary / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    sync_folder(temporary)
    final = parent / folder_name(step)
    old = parent / f".{folder_name(step)}.old"
    remove(old)
    if final.exists():  # from before the run resumed from an earlier checkpoint
        os.replace(final, old)
    os.replace(temporary, final)
    sync_folder(parent)
    replace_text(parent / "latest", final.name + "\n")
    remove(old)
    return final


def remove_leftovers(parent: Path) -> list[str]:
    """Remove the unfinished checkpoints that killed runs left; returns their names."""
    names = [path.name for path in _list(parent) if _LEFTOVER.fullmatch(path.name)]
    for name in names:
        remove(parent / name)
    with contextlib.suppress(OSError):  # the first save reports a folder that cannot be written to
        for name in (".latest.partial", ".best.partial"):
            (parent / name).unlink(missing_ok=True)
    return names


def _list(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints in a folder, in the order in which a resume tries them.

    First the one that `latest` names, then those before it, the newest first. Those of later steps come last: they
    were abandoned when a run resumed from an earlier checkpoint.
    """
    folders = [path for path in _list(parent) if path.is_dir()]
    by_step = {step: path for path in folders if (step := step_of(path.name)) is not None}
    latest = step_of(marked(parent, "latest") or "")
    last = math.inf if latest is None or latest not in by_step else latest
    return [by_step[step] for step in sorted(by_step, key=lambda step: (step > last, -step))]


def prune(parent: Path, keep: int, spare: str = "") -> list[str]:
    """Remove all checkpoints except the newest `keep` (0: keep all), the best one and `spare`; returns their names."""
    if keep <= 0:
        return []
    best = marked(parent, "best")
    removed = []
    for path in checkpoints(parent)[keep:]:
        if path.name not in (best, spare):
            # Renamed first: a half removed folder must not look like a checkpoint.
            old = parent / f".{path.name}.old"
            remove(old)
            os.replace(path, old)
            remove(old)
            removed.append(path.name)
    return removed


def mark_best(parent: Path, name: str) -> None:
    """Mark a checkpoint as the best one."""
    replace_text(parent / "best", name + "\n")


def forget_best_after(parent: Path, step: int) -> None:
    """Remove the mark `best` if it names a later step, which the run has abandoned."""
    best = step_of(marked(parent, "best") or "")
    if best is not None and best > step:
        with contextlib.suppress(OSError):  # the next best one overwrites it
            (parent / "best").unlink()


def marked(parent: Path, marker: str) -> str | None:
    """The checkpoint that `latest` or `best` names; None without that file."""
    try:
        return (parent / marker).read_text(errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, opened: its manifest is intact and its files have the right sizes.

    Attributes:
        path: its folder.
        files: name → entry of the manifest.
        state: state.json.
    """

    path: Path
    files: Mapping[str, FileEntry]
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return int(self.state["step"])

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors: "model", "ema", and the optimizer's states, such as "optimizer-exp_avg"."""
        stems = (re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", n) for n in self.files if n.endswith(".safetensors"))
        return tuple(dict.fromkeys(stems))

    def tensors(self, kind: str) -> TensorFiles:
        """The tensors of a kind, memory-mapped.

        Raises:
            UserError: there are none of this kind.
        """
        pattern = re.compile(re.escape(kind) + r"(-\d{5}-of-\d{5})?\.safetensors")
        names = [name for name in self.files if pattern.fullmatch(name)]
        if not names:
            raise UserError(f"checkpoint {self.path} has no {kind}; it has {', '.join(self.kinds)}")
        return TensorFiles(self.path / name for name in names)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read files and compare them with the manifest.

        Args:
            names: which of `files`; all of them by default.

        Raises:
            Damaged: names the first file that differs.
        """
        for name in self.files if names is None else names:
            _verify(self.path / name, self.files[name])


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise Damaged where a file of a checkpoint cannot be read."""
    name = f"{path.parent.name}/{path.name}"
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise Damaged(f"{name} is not JSON: it is truncated, or its bytes changed") from None


def _verify(path: Path, entry: FileEntry) -> None:
    with _reading(path):
        digest = sha256_of(path)
    if digest != entry.sha256:
        raise Damaged(f"{path.parent.name}/{path.name} does not have the checksum of the manifest: its bytes changed")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: read the manifest and state.json, and compare the sizes of all files. Contents are not read.

    Raises:
        Damaged: names the file and what is wrong with it.
        UserError: it was written by a newer ds_vit.
    """
    with _reading(path / "manifest.json"):
        manifest = json.loads((path / "manifest.json").read_bytes())
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _manifest_checksum(manifest):
        raise Damaged(f"{path.name}/manifest.json does not have its own checksum: its bytes changed")
    if manifest["format"] > FORMAT:
        raise UserError(f"checkpoint {path} has format {manifest['format']}, and this ds_vit reads up to {FORMAT}")
    files = {name: FileEntry(name, entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    for name, entry in files.items():
        with _reading(path / name):
            size = (path / name).stat().st_size
        if size != entry.num_bytes:
            raise Damaged(f"{path.name}/{name} has {size} bytes in place of {entry.num_bytes}")
    _verify(path / "state.json", files["state.json"])
    return Checkpoint(path, files, json.loads((path / "state.json").read_text()))


def write_figures(parent: Path, step: int, figures: Mapping[str, Any]) -> None:
    """Add the evaluations up to a step to the complete checkpoint of that step."""
    replace_text(parent / folder_name(step) / _FIGURES, json.dumps(figures) + "\n")


def read_figures(path: Path) -> dict[str, Any]:
    """The figures that `write_figures` wrote; empty if the file is missing or damaged."""
    try:
        return dict(json.loads((path / _FIGURES).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def newest(parent: Path, *, skip: frozenset[str] = frozenset()) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are all there with their sizes.

    Args:
        parent: the folder `checkpoints`.
        skip: names of folders known to be damaged.

    Returns:
        It, or None; and a line for people about each problem found.
    """
    notes: list[str] = []
    complete = checkpoints(parent)
    latest = marked(parent, "latest")
    if complete and latest != complete[0].name:
        named = "is missing" if latest is None else f"names {latest!r}, which is not there"
        notes.append(f"{parent}/latest {named}; the newest complete checkpoint is {complete[0].name}")
    for path in complete:
        if path.name in skip:
            continue
        try:
            return open_checkpoint(path), notes
        except Damaged as error:
            notes.append(f"{error}; the checkpoint before it is tried")
    return None, notes
