"""What the parity tool says on stderr while it works: a moving line on a terminal, a line a layout elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ds_vit.monitoring.progress import Line

_STEPS = "steps-done"


def note_step(folder: Path) -> None:
    """In the process that trains: one more step is done."""
    with (folder / _STEPS).open("ab") as file:
        file.write(b".")


class Progress:
    """Says what is under way, on rank 0.

    Args:
        console: where to; None on the other ranks.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console

    @classmethod
    def of_rank(cls, rank: int) -> Progress:
        """On rank 0's stderr: stdout holds the outcome alone."""
        return cls(Console(file=sys.stderr, soft_wrap=True) if rank == 0 else None)

    @contextlib.contextmanager
    def doing(self, what: str, folder: Path | None = None, steps: int | None = None) -> Iterator[Callable[[], None]]:
        """Say it for the block.

        Args:
            what: in a few words.
            folder: where the process that trains notes its steps.
            steps: how many there will be.

        Yields:
            What to call now and then: it moves the line to the steps that are done.
        """
        if self._console is None:
            yield lambda: None
            return
        if not self._console.is_terminal:
            self._console.print(f"parity.py: {what}", markup=False, highlight=False)
            yield lambda: None
            return
        noted = folder / _STEPS if folder is not None else None
        if noted is not None:
            noted.unlink(missing_ok=True)
        seen = 0
        with Line(self._console).doing(what, steps) as counted:

            def look() -> None:
                nonlocal seen
                done = noted.stat().st_size if noted is not None and noted.exists() else 0
                for _ in counted(range(done - seen)):
                    seen += 1

            yield look
