"""`report.html`: a run's folder as one offline page.

`record.py` reads the folder, `panels.py` makes panels, `page.py` and `page.html` draw them, next to each other too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_vit.config.run_folder import written_whole
from ds_vit.fault_tolerance.errors import written
from ds_vit.monitoring.report.page import render
from ds_vit.monitoring.report.record import Record, read_records


def write_report(records: Sequence[Record], path: Path) -> None:
    """Write the page of one run, or of several side by side, atomically.

    Raises:
        UserError: the file cannot be written.
    """
    with written(f"{path} could not be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(render(records), encoding="utf-8", errors="replace")


__all__ = ["Record", "read_records", "write_report"]
