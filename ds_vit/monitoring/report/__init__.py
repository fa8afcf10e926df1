"""`report.html`: what a run's folder holds, as a page to look at; one file that fetches nothing.

A new panel is a function in `panels.py` (or a file of its own) that gives `Html`, and a line in `page.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_vit.config.run_folder import written_whole
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.report.page import render
from ds_vit.monitoring.report.record import Record, read_records


def write_report(records: Sequence[Record], path: Path) -> None:
    """Write the page of one run, or of several beside each other, whole or not at all.

    Raises:
        UserError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(render(records), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from None


__all__ = ["Record", "read_records", "write_report"]
