"""The files of a run's output folder (`--output`), and how they are read. No engine, no ranks.

config.yaml, deepspeed.json     all settings, resolved: enough to run again, on any number of ranks
deepspeed.derived.json          the origin of each value of deepspeed.json that no file has
metrics.jsonl, tensorboard/     what was measured
summary.json                    the results
classes.json                    the names of the classes, a list in the order of the logits; not with --task mae
checkpoints/                    see ds_vit/checkpoint/folder.py
model.safetensors               the final weights; ema.safetensors their average (or shards and an index);
                                with --task mae the encoder's, and decoder.safetensors next to it
best.safetensors                those of the best checkpoint; its text tower or decoder in best-text.safetensors, …
profile/                        traces of some steps and torch's tables (--profile-steps)
samples/                        the samples of each step, a file for each rank (--log-samples)
eval.json                       what `ds-vit eval` measured
report.html                     all of this as a page (`ds-vit report`)
.lock                           the process that writes here now, while there is one
starts.jsonl                    its processes: from which step, when, on what, with which versions and learning rates
predictions.csv                 the predicted class of each validation image at the last evaluation
augmented.png, mistakes.png     images for the report, each with a .json that says what they show
pairs.png, similarities.json    with --task clip and siglip: the most and least similar pairs of the last evaluation,
                                and similarities of some images and captions
reconstruction.png              with --task mae: images, hidden patches and their reconstruction, at the last evaluation
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

BEST = "best"
"""Prefix of the files of the best checkpoint's weights."""
WEIGHTS = {"raw": "model", "ema": "ema", "teacher": "teacher", BEST: BEST}
"""Kind of weights → prefix of its files, here and in a checkpoint's folder."""


class _Entry:
    """A file or folder of a run; as an attribute of a `RunFolder` it is the path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The output folder of a run, which need not exist yet.

    Attributes:
        path: of the folder.
    """

    path: Path

    config = _Entry("config.yaml")  # the flags, as a recipe
    deepspeed = _Entry("deepspeed.json")  # the JSON that DeepSpeed got
    lock = _Entry(".lock")  # there while a run writes here
    metrics = _Entry("metrics.jsonl")  # one JSON object per line
    tensorboard = _Entry("tensorboard")  # a folder of events
    summary = _Entry("summary.json")  # written at the end
    classes = _Entry("classes.json")  # the names of the classes; absent where the task has none
    profile = _Entry("profile")  # traces of some steps and torch's tables of them
    checkpoints = _Entry("checkpoints")  # the folder around the checkpoints
    samples = _Entry("samples")  # the folder of --log-samples
    skipped = _Entry("skipped_images.jsonl")  # images that could not be decoded, each once
    evaluation = _Entry("eval.json")  # written by `ds-vit eval`
    report = _Entry("report.html")  # for the browser
    starts = _Entry("starts.jsonl")  # a JSON object per line, one per process that worked on the run
    predictions = _Entry("predictions.csv")  # the predicted class of each validation image, where each has one class
    augmented = _Entry("augmented.png")  # images of the first step as the model saw them; captions in the .json
    pairs = _Entry("pairs.png")  # the most and least similar pairs of validation; captions in the .json
    similarities = _Entry("similarities.json")  # of some images and captions of validation
    mistakes = _Entry("mistakes.png")  # the most confident mistakes of validation; captions in the .json

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"

    def picture(self, name: str) -> Path:
        """A picture of an evaluation, by its name."""
        return self.path / f"{name}.png"

    @property
    def holds_run(self) -> bool:
        """Whether a run has written here, or a checkpoint of one lies here."""
        return self.config.is_file() or self.checkpoints.is_dir()

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, as written: those of these kinds, or all.

        Raises:
            OSError: there is no such file.
        """
        rows = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [row for row in rows if not kinds or row["kind"] in kinds]

    def read_classes(self) -> tuple[str, ...]:
        """The names in classes.json; none without a whole file."""
        with contextlib.suppress(OSError, ValueError):
            return tuple(map(str, json.loads(self.classes.read_text())))
        return ()


def weights_in(folder: Path, kind: str) -> Path | None:
    """The weights of a kind in a run's or a checkpoint's folder: the index where they are sharded, else the file.

    Args:
        folder: to look into.
        kind: of `WEIGHTS`.
    """
    stem = WEIGHTS[kind]
    candidates = (folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors")
    return next((path for path in candidates if path.is_file()), None)


class LineLog:
    """Appends lines to a file of the run; a line that the disk refuses is dropped, with one warning.

    Args:
        path: of the file; its folder is made with the first line, and half a line of a killed run is removed.
        warn: prints the warning; by default to stderr.

    Attributes:
        num_lost: lines that were dropped.
        is_refused: whether the last line was.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._warn = warn or partial(print, file=sys.stderr, flush=True)
        self._file: io.FileIO | None = None
        self.num_lost = 0
        self.is_refused = False

    def add(self, contents: Mapping[str, Any]) -> None:
        """Append a JSON object."""
        line = to_json(contents).encode() + b"\n"
        try:
            if self._file is None:
                self._file = self._open()
            size = self._file.seek(0, os.SEEK_END)
            if self._file.write(line) < len(line):
                self._file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.is_refused = False
        except OSError as error:
            if not self.num_lost:
                why = error.strerror or error
                self._warn(f"WARNING: {self._path} could not be written ({why}); lines that do not fit are lost")
            self.num_lost += 1
            self.is_refused = True

    def _open(self) -> io.FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(self._path, "a+")
        file.seek(0)
        data = file.readall()
        file.truncate(data.rfind(b"\n") + 1)
        return file


def to_json(contents: Mapping[str, Any] | Sequence[Any], indent: int | None = None) -> str:
    """JSON text of plain data; JSON has no nan or infinity: they become null."""
    return json.dumps(_without_nan(contents), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def written_whole(path: Path, unique: str = "") -> Iterator[Path]:
    """A temporary file in the same folder, which replaces the file at the end of the block.

    Args:
        path: of the file.
        unique: part of its name, where other processes may write the same file.
    """
    partial = path.with_name(f".{path.name}{unique}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, contents: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a small file that a reader sees whole or not at all, as `to_json` has it."""
    with written_whole(path) as partial:
        partial.write_text(to_json(contents, indent=2) + "\n")
