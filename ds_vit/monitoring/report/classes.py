"""What a classifier got right and wrong on the validation split: confusion matrix, figures a class, sure mistakes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_vit.monitoring.report.heat_map import heat_map
from ds_vit.monitoring.report.html import Html
from ds_vit.monitoring.report.record import Record
from ds_vit.monitoring.report.tables import table

MOST_IN_MATRIX = 200
MOST_PAIRS = 10
MOST_MISTAKES = 20
_LONGEST_IN_A_COLUMN = 24  # letters of a file, beside two classes and a share
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Confusion:
    """What was taken for what; C classes, of which 21,843 would make a matrix of gigabytes.

    Attributes:
        pairs: int64 [P, 2], a class and what its images were taken for, each pair once.
        counts: int64 [P], images.
        num_classes: C.
    """

    pairs: np.ndarray
    counts: np.ndarray
    num_classes: int

    @classmethod
    def of(cls, record: Record) -> Confusion:
        """From predictions.csv."""
        rows = record.predictions
        found = np.array([(int(row["class_number"]), int(row["predicted_number"])) for row in rows], dtype=np.int64)
        pairs, counts = np.unique(found.reshape(-1, 2), axis=0, return_counts=True)
        return cls(pairs, counts, max(len(record.classes), int(pairs.max(initial=-1)) + 1))

    @property
    def wrong(self) -> np.ndarray:
        """Which pairs are mistakes, bool [P]."""
        return self.pairs[:, 0] != self.pairs[:, 1]

    def images(self, side: int) -> np.ndarray:
        """How many images show each class (side 0) or were taken for it (side 1), int64 [C]."""
        return np.bincount(self.pairs[:, side], self.counts, minlength=self.num_classes).astype(np.int64)

    def figures(self) -> np.ndarray:
        """Precision, recall and F1 of each class in percent, float64 [C, 3]; nan where a class never came up."""
        right = np.bincount(self.pairs[~self.wrong, 0], self.counts[~self.wrong], minlength=self.num_classes)
        shown, taken = self.images(0), self.images(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return 100 * np.stack((right / taken, right / shown, 2 * right / (shown + taken)), axis=1)

    def matrix(self) -> np.ndarray:
        """int64 [C, C], rows by what an image shows."""
        matrix = np.zeros((self.num_classes, self.num_classes), dtype=np.int64)
        matrix[tuple(self.pairs.T)] = self.counts
        return matrix


def class_panels(record: Record) -> list[Html]:
    """The panels; none where the run wrote no predictions."""
    if not record.predictions:
        return []
    found = Confusion.of(record)
    names = [*record.classes, *(f"class {at}" for at in range(len(record.classes), found.num_classes))]
    shown, taken = found.images(0), found.images(1)
    panels = []
    if len(names) <= MOST_IN_MATRIX:
        shares = found.matrix() / np.maximum(shown[:, None], 1)
        panels.append(
            heat_map(
                "Confusion matrix, % of each class",
                names,
                names,
                100 * shares,
                of_columns="taken for",
                note="rows: what an image shows; columns: what it was taken for",
                numbers=True,
            )
        )
    pairs, counts = found.pairs[found.wrong], found.counts[found.wrong]
    mixed_up = [
        (names[a], names[b], str(count), f"{count / shown[a]:.1%}")
        for (a, b), count in ((pairs[at], counts[at]) for at in np.argsort(-counts, kind="stable")[:MOST_PAIRS])
    ]
    if mixed_up:
        panels.append(table("Most often mixed up", ("shows", "taken for", "images", "of the class"), mixed_up))
    judged = found.figures()
    order = [at for at in np.argsort(np.nan_to_num(judged[:, 2], nan=-1), kind="stable") if shown[at] or taken[at]]
    lines = [
        (names[at], str(shown[at]), *("-" if np.isnan(v) else f"{v:.1f} %" for v in judged[at]))
        for at in order[:MOST_CLASSES]
    ]
    title = "Each class, the hardest first"
    if len(order) > MOST_CLASSES:
        title = f"The {MOST_CLASSES:,} hardest of {len(order):,} classes"
    panels.append(table(title, ("class", "images", "precision", "recall", "F1"), lines))
    return [*panels, *_sure_mistakes(record)]


def _sure_mistakes(record: Record) -> list[Html]:
    wrong = [row for row in record.predictions if row["class_number"] != row["predicted_number"]]
    if not wrong:
        return []
    lines = [
        (row["image"], row["class"], row["predicted"], f"{100 * float(row['probability']):.1f} %")
        for row in wrong[:MOST_MISTAKES]
    ]
    images, mistakes = f"{len(record.predictions):,} images", f"{len(wrong):,} mistakes"
    if len(wrong) == 1:
        title = f"The one mistake in {images}"
    elif len(wrong) <= len(lines):
        title = f"The {mistakes} in {images}, the surest first"
    else:
        title = f"The {len(lines)} surest of {mistakes} in {images}"
    wide = max(len(cell) for line in lines for cell in line) > _LONGEST_IN_A_COLUMN
    return [table(title, ("image", "shows", "taken for", "probability"), lines, wide=wide)]
