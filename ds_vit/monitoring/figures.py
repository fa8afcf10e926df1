"""matplotlib, where it is installed: an empty figure, and a figure in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_vit.fault_tolerance.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches wide and high.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a picture needs matplotlib: bash launch/setup.sh plot") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Draw into a file, in the format of its suffix (png, svg, pdf).

    Raises:
        UserError: matplotlib cannot write this format, or the disk refuses.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror}") from None
    except ValueError as error:  # matplotlib's word for a suffix that it does not know
        raise UserError(f"--output {path}: {error}") from None
