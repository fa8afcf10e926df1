"""What a classifier got right and wrong on the validation split: confusion matrix, figures a class, sure mistakes."""

from __future__ import annotations

import numpy as np

from ds_vit.monitoring.report.charts import heat_map
from ds_vit.monitoring.report.html import Html
from ds_vit.monitoring.report.record import Record
from ds_vit.monitoring.report.tables import table

MOST_IN_MATRIX = 200
MOST_PAIRS = 10


def confusion(record: Record) -> np.ndarray:
    """How many images of each class (rows) were taken for each class (columns), int64 [C, C]."""
    pairs = [(int(row["class_number"]), int(row["predicted_number"])) for row in record.predictions]
    size = max([len(record.classes), *(1 + number for pair in pairs for number in pair)])
    counts = np.zeros((size, size), dtype=np.int64)
    for pair in pairs:
        counts[pair] += 1
    return counts


def figures(counts: np.ndarray) -> np.ndarray:
    """Precision, recall and F1 of each class in percent, float64 [C, 3]; nan where a class never came up."""
    right = np.diag(counts).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision, recall = right / counts.sum(0), right / counts.sum(1)
        f1 = 2 * right / (counts.sum(0) + counts.sum(1))
    return 100 * np.stack((precision, recall, f1), axis=1)


def class_panels(record: Record) -> list[Html]:
    """The panels; none where the run wrote no predictions."""
    counts = confusion(record)
    if not counts.sum():
        return []
    names, panels = [*record.classes, *(f"class {at}" for at in range(len(record.classes), len(counts)))], []
    if len(names) <= MOST_IN_MATRIX:
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        panels.append(
            heat_map(
                "Confusion matrix, % of each class",
                names,
                names,
                100 * shares,
                of_columns="taken for",
                note="rows: what an image shows; columns: what it was taken for",
            )
        )
    wrong = counts - np.diag(np.diag(counts))
    pairs = [divmod(int(at), len(names)) for at in np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]]
    mixed_up = [
        (names[a], names[b], str(wrong[a, b]), f"{wrong[a, b] / counts[a].sum():.1%}") for a, b in pairs if wrong[a, b]
    ]
    if mixed_up:
        panels.append(table("Most often mixed up", ("shows", "taken for", "images", "of the class"), mixed_up))
    judged = figures(counts)
    order = np.argsort(np.nan_to_num(judged[:, 2], nan=-1), kind="stable")
    lines = [
        (names[at], str(counts[at].sum()), *("-" if np.isnan(v) else f"{v:.1f} %" for v in judged[at]))
        for at in order
        if counts[at].sum() or counts[:, at].sum()
    ]
    panels.append(table("Each class, the hardest first", ("class", "images", "precision", "recall", "F1"), lines))
    return [*panels, *_sure_mistakes(record)]


def _sure_mistakes(record: Record) -> list[Html]:
    wrong = [row for row in record.predictions if row["class_number"] != row["predicted_number"]]
    if not wrong:
        return []
    lines = [
        (row["image"], row["class"], row["predicted"], f"{100 * float(row['probability']):.1f} %") for row in wrong[:20]
    ]
    title = f"Surest mistakes, of {len(wrong)} among {len(record.predictions)} images"
    return [table(title, ("image", "shows", "taken for", "probability"), lines)]
