"""matplotlib figures, if it is installed; and gradients by power of two: what fp16 would lose, for `ds-vit gradients`.

Rows of kind "gradients" come from --grad-stats-interval (see `monitoring/gradient_health.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.report.record import Record, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The smallest fp16 number, and the smallest that fp16 holds with all its bits (IEEE 754 binary16).
SMALLEST, SMALLEST_NORMAL = -24, -14
_LOST, _COARSE, _WHOLE = "#c23b22", "#e8a33d", "#4a7fb5"


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


def read_gradients(run: Path, step: int | None = None) -> tuple[Row, str]:
    """The statistics of one step of a run, and a title of model, precision and step.

    Args:
        run: its output folder.
        step: None for the last with statistics.

    Raises:
        UserError: there are no statistics, or none of this step.
    """
    record = Record.read(run)
    rows = {row["step"]: row for row in record.rows.get("gradients", ())}
    if not rows:
        raise UserError(f"{run}: no gradient statistics; train with --grad-stats-interval 100")
    if step is None:
        step = max(rows)
    if step not in rows:
        nearest = min(rows, key=lambda other: abs(other - step))
        raise UserError(f"{run}: step {step} has no statistics; the nearest of {len(rows)} is {nearest}")
    about = ", ".join(record.summary[key] for key in ("model", "precision") if key in record.summary)
    return rows[step], f"{about or record.name}, step {step}"


def gradient_table(row: Row) -> list[tuple[str, ...]]:
    """Header and one line per layer, from the input to the classifier, then the whole model."""
    lines: list[tuple[str, ...]] = [
        ("layer", "norm", "largest", "zeros", "below 2^-24", "below 2^-14", "update / weight")
    ]
    for layer, figures in [*row["layers"].items(), ("all", row)]:
        shares = [f"{figures[key]:.2%}" for key in ("zeros", "below_2^-24", "below_2^-14")]
        lines.append(
            (layer, f"{figures['norm']:.3g}", f"{figures['max']:.3g}", *shares, f"{figures['update_to_weight']:.2e}")
        )
    return lines


def draw_gradients(row: Row, title: str) -> Figure:
    """Gradients by power of two: the whole model above, each layer below.

    Args:
        row: from `read_gradients`.
        title: of the picture.

    Raises:
        UserError: matplotlib is not installed.
    """
    lowest = row["histogram"]["lowest"]
    counts = {layer: np.asarray(c, dtype=float) for layer, c in row["histogram"]["counts"].items() if sum(c)}
    layers = list(counts)
    shares = np.stack([c / c.sum() for c in counts.values()])
    total = np.sum(list(counts.values()), axis=0)
    powers = lowest + np.arange(len(total))

    figure = new_figure(9, 2.6 + 0.24 * len(layers))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 0.24 * len(layers)])
    for kind, colour, label in (
        (powers >= SMALLEST_NORMAL, _WHOLE, "all bits in fp16"),
        (
            (powers >= SMALLEST) & (powers < SMALLEST_NORMAL),
            _COARSE,
            f"fewer bits, below $2^{{-14}}$: {row['below_2^-14'] - row['below_2^-24']:.1%}",
        ),
        (powers < SMALLEST, _LOST, f"zero in fp16, below $2^{{-24}}$: {row['below_2^-24']:.1%}"),
    ):
        above.bar(powers[kind] + 0.5, 100 * total[kind] / total.sum(), width=0.9, color=colour, label=label)
    above.legend(loc="upper left", fontsize=8)
    above.set_ylabel("% of gradients")
    above.set_title(title, fontsize=10, loc="left")
    extent = (powers[0], powers[-1] + 1, len(layers) - 0.5, -0.5)
    image = below.imshow(100 * shares, aspect="auto", cmap="Blues", extent=extent, interpolation="nearest")
    below.set_yticks(range(len(layers)), layers, fontsize=7)
    below.set_xlabel("power of two of a gradient (before clipping, without loss scale)")
    seen = lowest + np.flatnonzero(shares.max(axis=0) > 1e-3)  # ignores a few outliers
    below.set_xlim(min(seen[0], SMALLEST) - 1.5, max(seen[-1], SMALLEST_NORMAL) + 1.5)
    for axes in (above, below):
        for power, colour in ((SMALLEST, _LOST), (SMALLEST_NORMAL, _COARSE)):
            axes.axvline(power, color=colour, linewidth=1, linestyle="--")
    figure.colorbar(image, ax=below, label="% of the layer's", shrink=0.9)
    return figure
