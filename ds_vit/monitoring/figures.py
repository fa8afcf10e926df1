"""matplotlib figures, if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_vit.fault_tolerance.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a picture needs matplotlib: bash launch/setup.sh plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a file in the format of its suffix (png, svg, pdf).

    Raises:
        UserError: unknown format, or the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: unknown suffix
        raise UserError(f"--output {path}: {getattr(error, 'strerror', None) or error}") from None
