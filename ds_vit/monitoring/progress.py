"""The progress line of a terminal: activity, progress and remaining time; nothing in a file or a pipe.

Imports nothing heavy: the line exists before torch is imported.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TaskProgressColumn, TextColumn

T = TypeVar("T")
Counted = Callable[[Iterable[T]], Iterator[T]]
_RECENT_STEPS = 50  # for the means of loss and speed
_DONE = ("{task.completed:.0f}/{task.total:.0f}", "{task.elapsed:.0f} s")  # the second where the total is unknown
_ROOM_FOR_CTRL_C = 3  # the terminal writes ^C into the line, which must not wrap


class Line:
    """One line per activity. A finished activity leaves nothing on the screen, except training.

    Args:
        console: None, or a console that is no terminal, shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console if console is not None and console.is_terminal else None
        self._progress: _Progress | None = None
        self._training: _Training | None = None

    @contextlib.contextmanager
    def doing(self, what: str, total: int | None = None) -> Iterator[Counted]:
        """Show a line during the block.

        Args:
            what: the activity.
            total: the number of items, if known.

        Yields:
            A function that counts items as it passes them through.
        """
        if self._console is None:
            yield iter
            return
        progress = self._shown(self._console)
        task = progress.add_task(what, total=total, figures="")

        def counted(items: Iterable[T]) -> Iterator[T]:
            for item in items:
                progress.update(task, advance=1)
                yield item

        try:
            yield counted
        finally:
            progress.remove_task(task)
            if self._training:
                self._training.resume()
            else:
                self.close()

    @property
    def moves(self) -> bool:
        """Whether `step` shows anything."""
        return self._training is not None

    def train(self, total_steps: int, done: int) -> None:
        """Start the line of training, with `done` steps completed before."""
        if self._console is not None:
            task = self._shown(self._console).add_task("train", total=total_steps, completed=done, figures="")
            self._training = _Training(task, total_steps)

    def step(self, step: int, *, loss: float | None = None, images: int = 0, quality: str | None = None) -> None:
        """Show the progress of training.

        Args:
            step: completed steps.
            loss: of a step that was not shown yet.
            images: of the step; 0 if no step was taken (a rollback, an evaluation).
            quality: the result of an evaluation.
        """
        if self._training and self._progress:
            figures = self._training.figures(step, loss, images, quality)
            self._progress.update(self._training.task, completed=step, figures=figures)

    def skipped(self, images: int) -> None:
        """Set the number of training images that could not be decoded; the next `step` shows it."""
        if self._training:
            self._training.skipped_images = images

    def close(self) -> None:
        """Stop; the line of training stays on the screen."""
        if self._progress:
            self._progress.live.transient = self._training is None
            self._progress.stop()
            self._progress = None

    def _shown(self, console: Console) -> _Progress:
        if self._progress is None:
            columns = (
                TextColumn("{task.description}", "bold", markup=False),
                BarColumn(bar_width=None),
                TaskProgressColumn(*_DONE),
            )
            self._progress = _Progress(*columns, TextColumn("{task.fields[figures]}", markup=False), console=console)
            self._progress.start()
        return self._progress


@contextlib.contextmanager
def doing(what: str, *, shown: bool) -> Iterator[None]:
    """A line during the block, before a `Line` exists; `shown` on rank 0 only."""
    with Line(Console(file=sys.stdout) if shown else None).doing(what):
        yield


class _Training:
    """The text of training's line: means over the recent steps."""

    def __init__(self, task: TaskID, total_steps: int) -> None:
        self.task = task
        self._total = total_steps
        self._losses: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)  # seconds, images
        self._quality = ""
        self.skipped_images = 0
        self._began: float | None = None  # None: the first step warms up

    def resume(self) -> None:
        """Restart the clock: the time until now was not a step."""
        if self._began is not None:
            self._began = time.perf_counter()

    def figures(self, step: int, loss: float | None, images: int, quality: str | None) -> str:
        now = time.perf_counter()
        if images and self._began is not None:
            self._steps.append((now - self._began, images))
        if images:
            self._began = now
        if loss is not None:
            self._losses.append(loss)
        if quality is not None:
            self._quality = quality
        parts = [f"loss {sum(self._losses) / len(self._losses):.4f}"] if self._losses else []
        if self._steps:
            seconds = max(sum(seconds for seconds, _ in self._steps), 1e-9)
            parts.append(f"{sum(images for _, images in self._steps) / seconds:.0f} img/s")
        parts += [self._quality] if self._quality else []
        parts += [f"{self.skipped_images} images skipped"] if self.skipped_images else []
        if self._steps:
            parts.append(f"{format_seconds((self._total - step) * seconds / len(self._steps))} left")
        return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """`1m20s`, `24h31m`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


class _Progress(Progress):
    """rich's progress, narrower than the terminal."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        self._terminal = console  # asked for before rich's own `console` exists
        super().__init__(*columns, console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        table = self.make_tasks_table(self.tasks)
        table.width = max(1, self._terminal.width - _ROOM_FOR_CTRL_C)
        yield table
