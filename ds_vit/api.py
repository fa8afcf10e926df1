"""ds_vit from Python: what the command line does, as often as a program likes (docs/api.md).

from ds_vit.api import train
result = train(deepspeed_config="ds_configs/cpu_zero1_fp32.json", dataset="digits", epochs=1,
               model="vit_tiny_patch16_224", img_size=16, model_kwargs={"patch_size": 4})
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ds_vit.config import parser as flags
from ds_vit.config.outside import pass_class
from ds_vit.config.run_folder import RunFolder, weights_in
from ds_vit.config.schema import PROGRAM_DATASET
from ds_vit.launching.process import discover

if TYPE_CHECKING:
    from ds_vit.data.sources.source import Source
    from ds_vit.tasks.task import Task
    from ds_vit.weights.export import Difference

Row = Mapping[str, Any]
Listener = Callable[[Row], None]


class TrainResult(dict[str, Any]):
    """What summary.json holds, on every rank, and where the run's files lie.

    Attributes:
        folder: of the run; `folder.path` is its path, `folder.metrics` its metrics.jsonl, and so on.
    """

    def __init__(self, summary: Mapping[str, Any], folder: RunFolder) -> None:
        super().__init__(summary)
        self.folder = folder

    @property
    def completed(self) -> bool:
        """Whether the run came to its end and everything is saved; else `self["exit"]` says what happened."""
        return self["exit"] == "completed"

    @property
    def weights(self) -> Path | None:
        """The weights of the end, or the index of their shards; None where there are none."""
        return weights_in(self.folder.path, "raw")

    @property
    def checkpoints(self) -> tuple[Path, ...]:
        """The folders of the checkpoints that are complete, oldest first."""
        return tuple(sorted(self.folder.checkpoints.glob("step-*")))


class EvaluationResult(dict[str, Any]):
    """What eval.json holds, on every rank.

    Attributes:
        written_to: that file.
    """

    def __init__(self, figures: Mapping[str, Any], written_to: Path) -> None:
        super().__init__(figures)
        self.written_to = written_to


def train(
    *,
    recipe: str | Path | None = None,
    task: str | type[Task] | None = None,
    train_data: Any = None,
    val_data: Any = None,
    on_step: Listener | None = None,
    on_evaluation: Listener | None = None,
    on_checkpoint: Listener | None = None,
    quiet: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train as `launch/train.py` does.

    Every rank calls it. A process group that exists already is used and stays; one that is made here stays until
    the process ends.

    Args:
        recipe: a YAML file of flags; `settings` have the last word over it.
        task: as `--task`, or the class of a task of the program's own.
        train_data: images of the program's own, in place of `dataset` and `data_dir`: an `ds_vit.data.Source`, or a
            torch `Dataset` of (image, class number) without a transform (`DatasetSource` says what it must have).
        val_data: the same for evaluation; None for none.
        on_step: is called with each row of kind "train" of metrics.jsonl; `log_interval=1` makes that every step.
        on_evaluation: with each row of kind "eval" and "eval_ema".
        on_checkpoint: with each row of kind "checkpoint" whose checkpoint is complete, and its "path".
        quiet: print no tables and no progress, only warnings (on stderr); every file is written as ever.
        settings: the command line's flags, underscores for dashes; `deepspeed_config` is a path, or the file's
            contents.

    Callbacks are called only on rank 0, between two steps; what they raise ends the run.

    Raises:
        UserError: an unknown setting (the nearest is named), or anything that the command line would refuse.
    """
    from ds_vit.train import train as carry_out

    if task is not None:
        settings["task"] = task if isinstance(task, str) else pass_class(task)
    sources = None
    if train_data is not None or val_data is not None:
        sources = _sources(train_data, val_data, settings)
    given = {"train": on_step, "eval": on_evaluation, "eval_ema": on_evaluation, "checkpoint": on_checkpoint}
    listeners = {kind: listener for kind, listener in given.items() if listener is not None}
    if quiet:
        listeners = {kind: _printing(listener, sys.stdout) for kind, listener in listeners.items()}
    config = flags.from_values(settings, str(recipe) if recipe else None)
    with contextlib.redirect_stdout(_Warnings()) if quiet else contextlib.nullcontext():
        summary, folder = carry_out(config, discover(), again=True, sources=sources, listeners=listeners)
    return TrainResult(summary, folder)


def _printing(listener: Listener, stdout: TextIO) -> Listener:
    """A callback of a quiet run that prints to the program's own stdout."""

    def call(row: Row) -> None:
        with contextlib.redirect_stdout(stdout):
            listener(row)

    return call


class _Warnings(io.StringIO):
    """A stdout that passes warnings to stderr and drops the rest."""

    def write(self, text: str) -> int:
        if text.lower().startswith("warning") or "[WARNING]" in text:
            print(text.rstrip("\n"), file=sys.stderr, flush=True)
        return len(text)


def _sources(train_data: Any, val_data: Any, settings: dict[str, Any]) -> tuple[Source, Source | None]:
    """The program's data, and the settings that say so."""
    from ds_vit.data.sources.datasets import as_source
    from ds_vit.fault_tolerance.errors import UserError

    if train_data is None:
        raise UserError("val_data without train_data: give both, or name the data by dataset or data_dir")
    for name in ("dataset", "data_dir", "train_split", "val_split"):
        if settings.get(name):
            raise UserError(f"train_data and {name} are both given; keep one")
    source = as_source(train_data)
    val = as_source(val_data, source.class_names) if val_data is not None else None
    if val is not None and val.class_names != source.class_names:
        raise UserError(
            f"val_data has {val.num_classes} classes and train_data {source.num_classes}, or others in another order"
        )
    settings["dataset"] = PROGRAM_DATASET
    if val is None:
        settings["val_split"] = ""
    return source, val


def evaluate(source: str | Path, data: Any = None, **settings: Any) -> EvaluationResult:
    """Exact accuracy of a run's weights, a checkpoint or a file, as `launch/eval.py`; every rank calls it.

    Args:
        source: a run's output folder, a checkpoint folder, or a file.
        data: images of the program's own in place of the run's, as `train`'s `val_data`.
        settings: `weights`, `checkpoint` and `output`, and flags that have the last word over the run's config.yaml.

    Raises:
        UserError: anything that the command line would refuse.
    """
    from ds_vit.tools import evaluate as tool

    if data is not None:
        from ds_vit.data.sources.datasets import as_source

        given = as_source(data)
        settings |= {"dataset": PROGRAM_DATASET, "sources": (given, given)}
    return EvaluationResult(*tool.evaluate_weights(source, again=True, **settings))


def predict(source: str | Path, images: str | Path | Sequence[str | Path], **settings: Any) -> dict[str, Any]:
    """The most probable classes of images, with names and probabilities, as `ds-vit predict`.

    Args:
        source: a run's output folder, a checkpoint folder, or a file.
        images: a file or a folder of them, or several.
        settings: `top_k`, `weights`, `checkpoint`, `labels`, `batch_size`, `workers` and `device` as of
            `ds_vit.tools.predict.predict_each`, and flags of the model and its pixels.

    Returns:
        What `ds-vit predict --json` writes: "images", rows as `ds_vit.tools.predict.Row` describes them, and
        "unreadable". No file is written.

    Raises:
        UserError: anything that the command line would refuse.
    """
    from ds_vit.tools import predict as tool

    paths = [images] if isinstance(images, str | Path) else images
    return tool.collect(*tool.predict_each(source, paths, **settings))


def export(source: str | Path, to: str, **settings: Any) -> Difference:
    """Write weights for another tool, as `ds-vit export`.

    Args:
        source: a run's output folder, a checkpoint folder, or a file.
        to: "timm", "hf" or "onnx".
        settings: `weights`, `checkpoint`, `output` and `labels`, and flags of the model and its pixels.

    Returns:
        An `weights.export.Difference`: the folder, and the largest difference of logits to the source. Where it is not
        `within` the tolerance, nothing is kept.

    Raises:
        UserError: anything that the command line would refuse.
    """
    from ds_vit.weights.export import export as write

    return write(source, to, **settings)
