"""Reports of a run: metrics.jsonl, TensorBoard, DeepSpeed's monitors, a progress bar or plain lines; and its speed.

Only rank 0 has a `Reporter`. Rows of metrics.jsonl are written one at a time; a row that a full disk rejects is lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from ds_vit.config.run_folder import LineLog, RunFolder, written_whole
from ds_vit.device import hardware_name
from ds_vit.engine.step_guard import HostScalar
from ds_vit.monitoring.progress import Line
from ds_vit.monitoring.sheets import TrainingSheet
from ds_vit.planner.hardware import accelerator_of_device
from ds_vit.tasks.metrics import Figure

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_WAITING_TOO_MUCH = 0.2  # of the time

# (name in TensorBoard and in the JSON's monitors, key of a row of kind "train").
_TRAINING = (
    *((f"train/{key}", key) for key in ("loss", "epoch_loss", "lr")),
    *(("grad/norm", "grad_norm"), ("grad/loss_scale", "loss_scale")),
    *((f"time/{key}", key) for key in ("images_per_second", "tflops_per_accelerator", "mfu", "data_wait_fraction")),
    ("memory/bytes", "memory_bytes"),
)

Listeners = Mapping[str, Callable[[Mapping[str, Any]], None]]
Events = Callable[[Sequence[tuple[str, float, int]]], None]


class Reporter:
    """Writes a run's metrics and shows them; exists on rank 0 only.

    Args:
        folder: of the run; metrics.jsonl and tensorboard/ are made in it.
        total_steps: where the progress bar ends.
        console: a terminal gets a progress line, anything else plain lines.
        stamp: step → keys that every row has: epoch, wall_seconds.
        listeners: kind of row → called with each row of that kind; a checkpoint's row has its "path" too.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        total_steps: int,
        console: Console,
        stamp: Callable[[int], Mapping[str, float]],
        listeners: Listeners = MappingProxyType({}),
    ) -> None:
        self.console = console
        self._stamp = stamp
        self._folder = folder
        self._total = total_steps
        self._listeners = listeners
        self._events: Events | None = None
        self._global_batch = 1  # an evaluation without training has seen no images
        self._rows = LineLog(folder.metrics, self.say)
        self._refused: set[Path] = set()  # files with a printed warning
        self._concerns: set[str] = set()  # names of printed warnings
        self._written: list[Path] = []  # files of the start
        self.line = Line(console)
        self.train_loss: float | None = None  # of the last row

    def start(self, first_step: int = 0, events: Events | None = None) -> None:
        """Open the files and the progress line; before that only `say` works.

        Args:
            first_step: steps that were done before (0 for a new run).
            events: DeepSpeed's monitors, `events([(name, value, images seen)])`; names are TensorBoard's.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._events = events
        self._num_rows = 0  # the first row includes the start of the loader
        self._folder.metrics.touch()
        files = (self._folder.config, self._folder.deepspeed, self._folder.metrics)
        self._written = [path for path in files if path.exists()]
        # Hide the points that an interrupted run drew after the step that this one resumes from.
        purge = {"purge_step": first_step + 1} if first_step else {}
        self._board: SummaryWriter | None = SummaryWriter(str(self._folder.tensorboard), **purge)
        threading.excepthook = _ignore_full_disk
        if self._total:
            self.line.train(self._total, first_step)

    def settings(self, values: Mapping[str, str | float], text: str, figures: Sequence[str]) -> None:
        """Write TensorBoard's hyper-parameters and text.

        Args:
            values: of the settings, by name.
            text: the layout.
            figures: the curves whose last values are shown with the settings.
        """
        from torch.utils.tensorboard.summary import hparams

        for part in hparams(dict(values), dict.fromkeys(figures)):
            self._on_board(lambda board, part=part: board.file_writer.add_summary(part))
        self._on_board(lambda board: board.add_text("layout", text, 0))

    def train(self, row: Mapping[str, Any], of_task: Mapping[str, float] = MappingProxyType({})) -> None:
        """A row of kind "train", and the values that the task adds to it."""
        self._write({"kind": "train", **row, **of_task})
        step, self.train_loss = row["step"], row["loss"]
        self.draw(row, of_task)
        if self._events:
            # DeepSpeed logs its own values by the images seen, and wandb drops points that go back.
            at, self._global_batch = row["images_seen"], row["images_seen"] // step
            self._events([(name, value, at) for name, value in _curves(row, of_task) if value is not None])
        self.line.skipped(row.get("skipped_images", 0))
        if not self.console.is_terminal:
            mean = "-" if row["epoch_loss"] is None else f"{row['epoch_loss']:.5f}"
            skipped = f"  skipped images {row['skipped_images']}" if row.get("skipped_images") else ""
            norm = "-" if row["grad_norm"] is None else f"{row['grad_norm']:.3f}"
            self.say(
                f"step {step}/{self._total}  epoch {self._stamp(step)['epoch']}  loss {row['loss']:.5f}  "
                f"lr {row['lr']:.3e}  "
                f"grad norm {norm}  {row['images_per_second']:.1f} img/s  data wait {row['data_wait_fraction']:.0%}  "
                f"epoch's mean loss {mean}{skipped}"
            )
        self._num_rows += 1
        if row["data_wait_fraction"] >= _WAITING_TOO_MUCH and self._num_rows > 1:
            self.warn({"waiting for data": _slow_loader(row["data_wait_fraction"], row["images_per_second"])})

    def warn(self, concerns: Mapping[str, str]) -> None:
        """Print warnings whose names are new (`Task.concerns`)."""
        for name, text in concerns.items():
            if name not in self._concerns:
                self._concerns.add(name)
                self.say(f"WARNING: {text}")

    def draw(self, row: Mapping[str, Any], of_task: Mapping[str, float] = MappingProxyType({})) -> None:
        """Draw a row of kind "train" in TensorBoard only; it may lack keys."""
        for name, value in _curves(row, of_task):
            self._scalar(name, value, row["step"])

    def eval(self, row: Mapping[str, Any], figures: Sequence[Figure], kind: str = "eval") -> None:
        """A row of kind "eval", or "eval_ema" for the moving average of the weights.

        Args:
            row: step, images, a value for each figure, and skipped_images.
            figures: the task's metrics; the progress bar shows the first.
            kind: as above.
        """
        self._write({"kind": kind, **row})
        names = [figure.name for figure in figures]
        for name in names:
            self._scalar(f"{kind}/{name}", row[name], row["step"])
        if self._events:
            at = row["step"] * self._global_batch
            self._events([(f"{kind}/{name}", row[name], at) for name in names if row[name] is not None])
        if kind == "eval":
            self.line.step(row["step"], quality=f"{figures[0].label} {figures[0].value(row)}")
        what = "eval" if kind == "eval" else "eval of the average"
        values = "  ".join(f"{figure.label} {figure.value(row)}" for figure in figures)
        skipped = f", {row['skipped_images']} skipped" if row.get("skipped_images") else ""
        self.say(f"{what} at step {row['step']}: {values}  over {row['images']} images{skipped}")

    def pictures(self, step: int, pictures: Mapping[str, torch.Tensor], kind: str = "eval") -> None:
        """Pictures of an evaluation: a file each in the run's folder, the newest, and TensorBoard.

        Args:
            step: that was evaluated.
            pictures: uint8 [3, height, width], by name.
            kind: as for `eval`.
        """
        for name, pixels in pictures.items():
            path = self._folder.picture(name if kind == "eval" else f"ema-{name}")
            with self._refusable(path, "without this picture"):
                save_picture(pixels, path)
            self._on_board(methodcaller("add_image", f"pictures/{path.stem}", pixels, step))

    def evaluated(self, write_files: Callable[[RunFolder], None]) -> None:
        """Write the task's files on the newest evaluation into the folder."""
        with self._refusable(self._folder.path, "without the report's files on the last evaluation"):
            write_files(self._folder)

    def training_images(self, sheet: TrainingSheet) -> None:
        """Save a sheet of training images."""
        with self._refusable(self._folder.augmented, "without it"):
            sheet.save(self._folder.augmented)

    def skip(self, row: Mapping[str, Any], why: str | None) -> None:
        """A row of kind "skip": a step that was not applied; `why` is printed unless it is None."""
        self._write({"kind": "skip", **row})
        self._scalar("train/skipped_steps", row["skipped_steps"], row["step"])
        if why:
            self.say(f"step {row['step']} was skipped: {why}")

    def rollback(self, row: Mapping[str, Any]) -> None:
        """A row of kind "rollback": step, reason, layer, to_step, skipped_batches, number."""
        self._write({"kind": "rollback", **row})
        self._scalar("train/rollbacks", row["number"], row["step"])
        self.say(
            f"step {row['step']}: back to step {row['to_step']}, {row['skipped_batches']} batches of samples are "
            f"skipped (rollback {row['number']})"
        )
        self.line.step(row["to_step"])

    def gradients(self, row: Mapping[str, Any]) -> None:
        """A row of kind "gradients", and in TensorBoard the histogram of each layer's powers of two."""
        self._write({"kind": "gradients", **row})
        step = row["step"]
        for key in ("norm", "max", "zeros", "below_2^-24", "below_2^-14", "update_to_weight"):
            self._scalar(f"gradients/{key.replace('^', '')}", row[key], step)
            for layer, figures in row["layers"].items():
                self._scalar(f"gradients_{key.replace('^', '')}/{layer}", figures[key], step)
        lowest = row["histogram"]["lowest"]
        for layer, counts in row["histogram"]["counts"].items():
            if sum(counts):
                self._histogram(f"gradients_log2/{layer}", lowest, counts, step)

    def _histogram(self, name: str, lowest: int, counts: Sequence[int], step: int) -> None:
        """Counts by power of two, the first of which is `lowest`."""
        powers = range(lowest, lowest + len(counts))
        histogram = {
            "min": lowest,
            "max": lowest + len(counts),
            "num": sum(counts),
            "sum": sum(power * count for power, count in zip(powers, counts, strict=True)),
            "sum_squares": sum(power**2 * count for power, count in zip(powers, counts, strict=True)),
            "bucket_limits": [power + 1 for power in powers],
            "bucket_counts": list(counts),
        }
        self._on_board(lambda board: board.add_histogram_raw(name, **histogram, global_step=step))

    def checkpoint(self, row: Mapping[str, Any]) -> None:
        """A row of kind "checkpoint": step, pause_seconds, write_seconds, bytes, and error where it failed."""
        self._write({"kind": "checkpoint", **row})
        self._scalar("time/checkpoint_pause_seconds", row["pause_seconds"], row["step"])

    def say(self, text: str) -> None:
        """Print a line."""
        say(self.console, text)

    @property
    def unwritten(self) -> set[Path]:
        """Files that lack their last part because the disk refused it."""
        return self._refused | ({self._folder.metrics} if self._rows.is_refused else set())

    @property
    def lacks_files(self) -> bool:
        """Whether metrics.jsonl lacks its last row, or a file of the start was removed."""
        return self._rows.is_refused or bool(self._removed())

    def _removed(self) -> list[str]:
        return [path.name for path in self._written if not path.exists()]

    def close(self) -> None:
        """Finish the bar and the files."""
        self.line.close()
        self._on_board(lambda board: board.close())
        if removed := self._removed():
            names = ", ".join(removed)
            self.say(f"WARNING: {self._folder.path} lacks {names}: the folder was removed while the run wrote to it")
        elif self._rows.num_lost:
            self.say(f"WARNING: {self._rows.num_lost} rows of {self._folder.metrics} are lost")

    def _write(self, row: Mapping[str, Any]) -> None:
        row = {**row, **self._stamp(row["step"])}
        self._rows.add(row)
        if row["kind"] in self._listeners and "error" not in row:
            path = {"path": self._folder.checkpoint(row["step"])} if row["kind"] == "checkpoint" else {}
            self._listeners[row["kind"]]({**row, **path})

    def _on_board(self, action: Callable[[SummaryWriter], None]) -> None:
        """Call TensorBoard; after a write error nothing more is sent to it."""
        board, self._board = self._board, None  # its thread is gone after an error
        if board is not None:
            with self._refusable(self._folder.tensorboard, "nothing more is drawn there"):
                action(board)
                self._board = board

    @contextlib.contextmanager
    def _refusable(self, path: Path, instead: str) -> Iterator[None]:
        """Warn once of a file that the disk refuses."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            if path not in self._refused:
                self.say(f"WARNING: {path} could not be written ({reason}); training continues, {instead}")
            self._refused.add(path)

    def _scalar(self, name: str, value: Any, step: int) -> None:
        if value is not None and math.isfinite(value):
            self._on_board(lambda board: board.add_scalar(name, value, step))


def _curves(row: Mapping[str, Any], of_task: Mapping[str, float]) -> list[tuple[str, Any]]:
    """The values of a row of kind "train" by their names in TensorBoard and in the JSON's monitors; None where it has
    none."""
    return [
        *((name, row.get(key)) for name, key in _TRAINING),
        *((f"train/{key}", value) for key, value in of_task.items()),
    ]


def _slow_loader(waiting: float, rate: float) -> str:
    """The warning about a loader that is slower than the model, at so many images per second."""
    takes = f"the model could take about {rate / (1.0 - waiting):.0f}" if waiting < 0.99 else "the model takes more"
    return (
        f"the loader is slower than the model: at {rate:.0f} images/s {waiting:.0%} of the time is spent waiting "
        f"for it, and {takes}; more --workers, --decode fast or shards may help, and `ds-vit bench data` with this "
        f"run's flags says which"
    )


def _ignore_full_disk(args: threading.ExceptHookArgs, hook: Any = threading.excepthook) -> None:
    """Keep TensorBoard's thread from printing a traceback of a full disk: the next call raises the same error."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__name__ == "_AsyncWriterThread"):
        hook(args)


def save_picture(pixels: torch.Tensor, path: Path) -> None:
    """Write uint8 [3, height, width] as a PNG, atomically."""
    with written_whole(path) as partial:
        Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).save(partial, format="png")


def make_console() -> Console:
    """The console of rank 0: a terminal with a bar, or 120 columns of plain text in a file or pipe.

    `ds-vit launch` copies what rank 0 draws to its terminal.
    """
    if sys.stdout.isatty() or os.environ.get("TTY_COMPATIBLE") == "1":
        return Console(file=sys.stdout, markup=False)
    return Console(file=sys.stdout, markup=False, width=120, soft_wrap=True)


def say(console: Console, *texts: str) -> None:
    """Print lines as they are."""
    for text in texts:
        console.print(text, highlight=False, soft_wrap=True)


def print_columns(console: Console, title: str, lines: Sequence[Sequence[str]]) -> None:
    """A table whose first line is its header: names left-aligned, numbers right-aligned."""
    header, *body = lines
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right")
    for line in body:
        table.add_row(*line)
    console.print(table)


def print_table(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A two-column table, such as the start table and the end table of a run."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


# ---- speed -----------------------------------------------------------------------------------------------------------

# Accelerators without a file in ds_vit/planner/data/: dense bf16/fp16 tensor-core peak and fp32 peak outside the tensor
# cores in TFLOP/s, from NVIDIA's datasheets. The longest name contained in the device's name counts.
_UNPLANNED_TFLOPS = {
    "H20": (148.0, 44.0),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Peak TFLOP/s of the accelerator for this precision, or None if unknown (CPUs, other GPUs)."""
    name = hardware_name(device)
    if planned := accelerator_of_device(name):
        return planned.fp32_tflops if precision == "fp32" else planned.bf16_tflops
    known = [key for key in _UNPLANNED_TFLOPS if key in name]
    if not known:
        return None
    half, single = _UNPLANNED_TFLOPS[max(known, key=len)]
    return single if precision == "fp32" else half


class Throughput:
    """Images per second and the share of time spent waiting for data, since the last call of `window`.

    Read it when the device is synchronised; exclude evaluation with `pause` and `resume`.
    """

    def __init__(self) -> None:
        self.total_images = 0
        self.total_seconds = 0.0
        self._paused = 0.0
        self.restart()

    def restart(self) -> None:
        """Start a new window and discard the old one."""
        self._start = time.perf_counter()
        self._waited = 0.0
        self._images = 0

    def waited(self, seconds: float) -> None:
        """Time that the training loop spent waiting for a batch."""
        self._waited += seconds

    def step(self, images: int) -> None:
        """An optimizer step over a global batch of `images` has been launched."""
        self._images += images

    def pause(self) -> None:
        """Time from here to `resume` is not training."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Resume the window."""
        self._start += time.perf_counter() - self._paused

    def window(self, *, count: bool = True) -> tuple[float, float]:
        """(images per second, share of time waiting for data) since the last call; starts a new window.

        Args:
            count: add the window to the run's totals (not done for the first step, which warms up).
        """
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate, waiting = self._images / seconds, min(1.0, self._waited / seconds)
        if count:
            self.total_images += self._images
            self.total_seconds += seconds
        self.restart()
        return rate, waiting


class Lagging:
    """A device scalar from a step or more ago, so that reading it does not synchronise."""

    def __init__(self) -> None:
        self._sent: HostScalar | None = None

    def exchange(self, figure: torch.Tensor) -> float | None:
        """Start copying a scalar tensor; returns the one copied before, or None.

        While that copy is in progress, the new scalar is ignored.
        """
        if self._sent is not None and not self._sent.arrived:
            return None
        before = self._sent.read() if self._sent is not None else None
        self._sent = HostScalar(figure)
        return before
