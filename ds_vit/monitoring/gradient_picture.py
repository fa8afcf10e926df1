"""Gradients by power of two, as a table and a picture: what fp16 would lose.

Reads the rows of kind "gradients" that --grad-stats-interval writes (see `engine/gradient_statistics.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.figures import save_figure
from ds_vit.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The smallest fp16 number, and the smallest that fp16 holds with all its bits (IEEE 754 binary16).
SMALLEST, SMALLEST_NORMAL = -24, -14
_LOST, _COARSE, _WHOLE = "#c23b22", "#e8a33d", "#4a7fb5"


def read_row(run: Path, step: int | None = None) -> dict[str, Any]:
    """The statistics of one step of a run.

    Args:
        run: its output folder.
        step: None for the last with statistics.

    Raises:
        UserError: there are no statistics, or none of this step.
    """
    folder = RunFolder(run)
    if not folder.metrics.is_file():
        raise UserError(f"{run}: there is no metrics.jsonl; give a run's --output folder")
    rows = {row["step"]: row for row in folder.rows("gradients")}
    if not rows:
        raise UserError(f"{run}: no gradient statistics; train with --grad-stats-interval 100")
    if step is None:
        return rows[max(rows)]
    if step not in rows:
        nearest = min(rows, key=lambda other: abs(other - step))
        raise UserError(f"{run}: step {step} has no statistics; the nearest of {len(rows)} is {nearest}")
    return rows[step]


def table(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Header and one line per layer, from the input to the classifier, then the whole model."""
    header = ("layer", "norm", "largest", "zeros", "below 2^-24", "below 2^-14", "update / weight")
    lines: list[tuple[str, ...]] = [header]
    for layer, figures in [*row["layers"].items(), ("all", row)]:
        shares = [f"{figures[key]:.2%}" for key in ("zeros", "below_2^-24", "below_2^-14")]
        lines.append(
            (layer, f"{figures['norm']:.3g}", f"{figures['max']:.3g}", *shares, f"{figures['update_to_weight']:.2e}")
        )
    return lines


def draw(row: Mapping[str, Any], title: str) -> Figure:
    """Gradients by power of two: the whole model above, each layer below.

    Args:
        row: from `read_row`.
        title: of the picture.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UserError("a picture needs matplotlib: bash launch/setup.sh plot") from None
    import numpy as np

    lowest = row["histogram"]["lowest"]
    counts = {layer: np.asarray(c, dtype=float) for layer, c in row["histogram"]["counts"].items() if sum(c)}
    layers = list(counts)
    shares = np.stack([c / c.sum() for c in counts.values()])
    total = np.sum(list(counts.values()), axis=0)
    seen = np.flatnonzero(shares.max(axis=0) > 1e-3)  # ignores a few outliers
    left, right = min(lowest + seen[0], SMALLEST) - 1.5, max(lowest + seen[-1], SMALLEST_NORMAL) + 1.5
    powers = lowest + np.arange(len(total))

    figure = Figure(figsize=(9, 2.6 + 0.24 * len(layers)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 0.24 * len(layers)])
    colours = [_LOST if p < SMALLEST else _COARSE if p < SMALLEST_NORMAL else _WHOLE for p in powers]
    above.bar(powers + 0.5, 100 * total / total.sum(), width=0.9, color=colours)
    above.set_ylabel("% of gradients")
    above.set_title(title, fontsize=10, loc="left")
    legend = (
        (_WHOLE, "all bits in fp16"),
        (_COARSE, f"fewer bits, below $2^{{-14}}$: {row['below_2^-14'] - row['below_2^-24']:.1%}"),
        (_LOST, f"zero in fp16, below $2^{{-24}}$: {row['below_2^-24']:.1%}"),
    )
    above.legend(
        [Patch(color=colour) for colour, _ in legend], [text for _, text in legend], loc="upper left", fontsize=8
    )
    image = below.imshow(
        100 * shares,
        aspect="auto",
        cmap="Blues",
        extent=(powers[0], powers[-1] + 1, len(layers) - 0.5, -0.5),
        interpolation="nearest",
    )
    below.set_yticks(range(len(layers)), layers, fontsize=7)
    below.set_xlabel("power of two of a gradient (before clipping, without loss scale)")
    below.set_xlim(left, right)
    for axes in (above, below):
        for power, colour in ((SMALLEST, _LOST), (SMALLEST_NORMAL, _COARSE)):
            axes.axvline(power, color=colour, linewidth=1, linestyle="--")
    figure.colorbar(image, ax=below, label="% of the layer's", shrink=0.9)
    return figure


def save(row: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the picture in the format of the file's suffix (png, svg, pdf).

    Raises:
        UserError: matplotlib is not installed, unknown format, or the file cannot be written.
    """
    save_figure(draw(row, title), path)


def titles(run: Path, row: Mapping[str, Any]) -> str:
    """Model, precision and step, as far as the run's folder has them."""
    parts: Sequence[str] = [run.name]
    try:
        summary = RunFolder(run).read_summary()
        parts = [summary["model"], summary["precision"]]
    except (OSError, ValueError, KeyError):
        pass
    return ", ".join([*parts, f"step {row['step']}"])
