"""The folder of checkpoints on disk: what is in one, when it is complete, which one counts. No engine, no ranks.

checkpoints/latest                 name of the newest complete one
checkpoints/best                   name of the best one so far, by the task's first figure
checkpoints/step-00001000/         complete, or it would not have this name
    model.safetensors              weights, fp32, timm's names (or shards and model.safetensors.index.json)
    optimizer-exp_avg.safetensors  one for each state of the optimizer, the same names and shapes
    ema.safetensors                the moving average, where there is one
    state.json                     progress
    manifest.json                  size and SHA-256 of every other file, and of itself
checkpoints/.step-00002000.partial one that is being written, or was when its run was killed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.tensors import (
    FileEntry,
    replace_text,
    sha256_of,
    sync_folder,
    write_bytes,
)
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.weight_files import TensorFiles

FORMAT = 1
"""Version of the format; a newer one is refused."""

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|old)")


class Damaged(UserError):
    """A checkpoint that is not what its manifest says; the text names the file and what is wrong with it."""


def folder_name(step: int) -> str:
    """`step-00001000`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a folder's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def partial_folder(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies until it is complete."""
    return parent / f".{folder_name(step)}.partial"


def _manifest_checksum(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def commit(parent: Path, step: int, entries: Sequence[FileEntry], texts: Mapping[str, str]) -> Path:
    """Make the temporary folder of a step a checkpoint: all of it is on the disk before it has its name.

    Args:
        parent: the folder `checkpoints`.
        step: of the checkpoint.
        entries: the files that lie in `partial_folder(parent, step)`, written and read back.
        texts: name → contents of the small files that are still to be written (state.json, indices).

    Raises:
        OSError: the file system refuses; the checkpoint then does not exist.
    """
    temporary = partial_folder(parent, step)
    entries = [*entries, *(write_bytes(temporary / name, text.encode()) for name, text in texts.items())]
    for entry in entries:
        size = (temporary / entry.name).stat().st_size
        if size != entry.num_bytes:
            raise OSError(f"{entry.name} has {size} bytes, and {entry.num_bytes} were written")
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": {}}
    for entry in sorted(entries, key=lambda e: e.name):
        manifest["files"][entry.name] = {"bytes": entry.num_bytes, "sha256": entry.sha256}
        if entry.tensors:
            manifest["files"][entry.name]["tensors"] = list(entry.tensors)
    manifest["sha256"] = _manifest_checksum(manifest)
    write_bytes(temporary / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    sync_folder(temporary)
    final = parent / folder_name(step)
    old = parent / f".{folder_name(step)}.old"
    remove(old)
    if final.exists():  # the same step once more, from a run that went on from an earlier checkpoint
        os.replace(final, old)
    os.replace(temporary, final)
    sync_folder(parent)
    replace_text(parent / "latest", final.name + "\n")
    remove(old)
    return final


def make_empty(folder: Path) -> None:
    """Make a folder, and the ones above it; what is in it is removed."""
    remove(folder)
    folder.mkdir(parents=True)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file in its place, if it is there and as far as that can be."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def discard(parent: Path, step: int) -> None:
    """Remove what there is of a checkpoint that could not be written."""
    remove(partial_folder(parent, step))


def remove_leftovers(parent: Path) -> list[str]:
    """Remove what killed runs left half-written; their names."""
    names = [path.name for path in _list(parent) if _LEFTOVER.fullmatch(path.name)]
    for name in names:
        remove(parent / name)
    with contextlib.suppress(OSError):  # a folder that cannot be written to is told of by the first save
        for name in (".latest.partial", ".best.partial"):
            (parent / name).unlink(missing_ok=True)
    return names


def _list(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints in a folder in the order in which they count.

    First the one that `latest` names, then those before it, the newest first. Those of later steps come last: they
    belong to a course that was given up, when a run went on from an earlier checkpoint.
    """
    found = {step_of(path.name): path for path in _list(parent) if step_of(path.name) is not None and path.is_dir()}
    newest_first = sorted(found, key=lambda step: -int(step or 0))
    latest = step_of(marked(parent, "latest") or "")
    if latest in found:
        newest_first.sort(key=lambda step: int(step or 0) > int(latest or 0))
    return [found[step] for step in newest_first]


def prune(parent: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` checkpoints (0: keep all) and the best one; the removed ones' names."""
    if keep <= 0:
        return []
    best = marked(parent, "best")
    removed = []
    for path in checkpoints(parent)[keep:]:
        if path.name != best:
            # Under another name first: what is half removed must not look like a checkpoint.
            old = parent / f".{path.name}.old"
            remove(old)
            os.replace(path, old)
            remove(old)
            removed.append(path.name)
    return removed


def mark_best(parent: Path, name: str) -> None:
    """Let `best` name a checkpoint."""
    replace_text(parent / "best", name + "\n")


def forget_best_after(parent: Path, step: int) -> None:
    """Take the mark `best` away where it names a later step: of a course that is given up."""
    best = step_of(marked(parent, "best") or "")
    if best is not None and best > step:
        with contextlib.suppress(OSError):  # the next best one overwrites it
            (parent / "best").unlink()


def marked(parent: Path, marker: str) -> str | None:
    """What `latest` or `best` names; None where there is no such file."""
    try:
        return (parent / marker).read_text(errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, opened: its manifest fits and its files are there with their sizes.

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
        """What there are tensors of: "model", "ema", and the optimizer's states, such as "optimizer-exp_avg"."""
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
            try:
                found = sha256_of(self.path / name)
            except OSError as error:
                raise Damaged(f"{self.path.name}/{name} cannot be read: {error.strerror or error}") from None
            if found != self.files[name].sha256:
                raise Damaged(f"{self.path.name}/{name} does not have the checksum of the manifest: its bytes changed")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint: read the manifest and state.json, and compare the sizes of all files. Contents are not read.

    Raises:
        Damaged: names the file and what is wrong with it.
        UserError: it was written by a newer ds_vit.
    """
    manifest = _read_json(path, "manifest.json")
    checksum = manifest.pop("sha256", None)
    if checksum != _manifest_checksum(manifest):
        raise Damaged(f"{path.name}/manifest.json does not have its own checksum: its bytes changed")
    if manifest["format"] > FORMAT:
        raise UserError(f"checkpoint {path} has format {manifest['format']}, and this ds_vit reads up to {FORMAT}")
    files = {
        name: FileEntry(name, entry["bytes"], entry["sha256"], tuple(entry.get("tensors", ())))
        for name, entry in manifest["files"].items()
    }
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{path.name}/{name} is missing") from None
        except OSError as error:
            raise Damaged(f"{path.name}/{name} cannot be read: {error.strerror or error}") from None
        if size != entry.num_bytes:
            raise Damaged(f"{path.name}/{name} has {size} bytes in place of {entry.num_bytes}")
    state = path / "state.json"
    if "state.json" not in files or sha256_of(state) != files["state.json"].sha256:
        raise Damaged(f"{path.name}/state.json does not have the checksum of the manifest: its bytes changed")
    return Checkpoint(path, files, json.loads(state.read_text()))


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        data = json.loads((path / name).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path.name}/{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name}/{name} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise Damaged(f"{path.name}/{name} is not JSON: it is truncated, or its bytes changed") from None
    if not isinstance(data, dict) or not {"format", "step", "files"} <= set(data):
        raise Damaged(f"{path.name}/{name} lacks what a manifest has")
    return data


def newest(parent: Path, *, skip: frozenset[str] = frozenset()) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are all there with their sizes.

    Args:
        parent: the folder `checkpoints`.
        skip: names of folders that are known to be damaged.

    Returns:
        It, or None; and in plain words what was found wrong on the way.
    """
    notes: list[str] = []
    found = checkpoints(parent)
    latest = marked(parent, "latest")
    strangers = [path.name for path in _list(parent) if step_of(path.name) is not None and not path.is_dir()]
    if found and strangers:
        notes.append(
            f"{parent} has {', '.join(strangers)}: no folder, so no checkpoint; passed over, and replaced by a "
            "checkpoint of that step"
        )
    if found and latest != found[0].name:
        named = "is missing" if latest is None else f"names {latest!r}, which is not there"
        notes.append(f"{parent}/latest {named}; the newest complete checkpoint is {found[0].name}")
    for path in found:
        if path.name in skip:
            continue
        try:
            return open_checkpoint(path), notes
        except Damaged as error:
            notes.append(f"{error}; the checkpoint before it is tried")
    return None, notes
