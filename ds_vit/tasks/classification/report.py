"""The part of the report on classes: the prediction of each validation image, and what is confused."""

from __future__ import annotations

import contextlib
import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ds_vit.config.run_folder import RunFolder, written_whole
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.tasks.panels import Panel, class_name, heat_map, save_samples, table

MAX_CLASSES_IN_MATRIX, MAX_PAIRS, MAX_MISTAKES, MAX_CLASSES = 200, 10, 20, 1000
_LONG_NAME = 24  # letters of a file name that need the page's whole width
_MOST_MISTAKES = 24


def write_predictions(
    folder: RunFolder, by_sample: torch.Tensor, source: Source, classes: Sequence[str], image: ImageConfig
) -> None:
    """Write predictions.csv, in the order of the split, and the sheet of the most confident mistakes.

    Probabilities have four digits, so layouts that differ by rounding almost always write the same bytes.

    Args:
        folder: of the run.
        by_sample: float64 [N, 2] of the split: 1 + the predicted class (0: not counted), and its probability.
        source: the split.
        classes: class names.
        image: how the split's images are read.

    Raises:
        OSError: a file cannot be written.
    """
    taken_for, probability = by_sample.cpu().numpy().T
    probability = probability.round(4)
    targets = {int(at): int(source.target(int(at))) for at in np.flatnonzero(taken_for > 0)}
    predicted = taken_for.astype(int) - 1
    names = {at: (class_name(own, classes), class_name(predicted[at], classes)) for at, own in targets.items()}
    with (
        written_whole(folder.predictions) as partial,
        # Names of files need not be UTF-8.
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(("image", "class", "predicted", "probability", "class_number", "predicted_number"))
        for at, target in targets.items():
            writer.writerow((source.describe(at), *names[at], f"{probability[at]:.4f}", target, predicted[at]))
    mistakes = sorted(
        (at for at, target in targets.items() if target != predicted[at]), key=lambda at: -probability[at]
    )
    captioned = [
        (at, f"{names[at][0]}, predicted {names[at][1]} ({probability[at]:.0%})") for at in mistakes[:_MOST_MISTAKES]
    ]
    save_samples(source, captioned, folder.mistakes, image)


def read_predictions(path: Path) -> list[dict[str, str]]:
    """The rows of predictions.csv, one per validation image, the most confident first; none without the file."""
    with contextlib.suppress(OSError), path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return sorted(csv.DictReader(file), key=lambda row: -float(row["probability"]))
    return []


def class_panels(predictions: Sequence[Mapping[str, str]], classes: Sequence[str]) -> list[Panel]:
    """Confusion matrix, confused pairs, scores of each class, most confident mistakes; none without predictions.

    Args:
        predictions: of `read_predictions`.
        classes: names, as far as they are known.
    """
    if not predictions:
        return []
    # Only pairs that occur are stored: the matrix of 21,843 classes would take gigabytes.
    pairs = Counter((int(row["class_number"]), int(row["predicted_number"])) for row in predictions)
    shown, predicted = Counter[int](), Counter[int]()
    for (own, taken_for), count in pairs.items():
        shown[own] += count
        predicted[taken_for] += count
    num_classes = max(len(classes), 1 + max(map(max, pairs)))
    names = [*classes, *(f"class {at}" for at in range(len(classes), num_classes))]
    panels: list[Panel | None] = []
    if num_classes <= MAX_CLASSES_IN_MATRIX:
        shares = np.zeros((num_classes, num_classes))
        for (own, taken_for), count in pairs.items():
            shares[own, taken_for] = 100 * count / shown[own]
        note = "rows: the class of an image; columns: its prediction"
        title = "Confusion matrix, % of each class"
        panels.append(heat_map(title, names, names, shares, column_kind="prediction", note=note, numbers=True))
    wrong = [(pair, count) for pair, count in pairs.items() if pair[0] != pair[1]]
    wrong.sort(key=lambda item: (-item[1], item[0]))
    confused = [
        (names[own], names[taken_for], str(count), f"{count / shown[own]:.1%}")
        for (own, taken_for), count in wrong[:MAX_PAIRS]
    ]
    if confused:
        panels.append(table("Most often confused", ("class", "predicted", "images", "of the class"), confused))
    scores = []
    for at in sorted({*shown, *predicted}):
        right, images = pairs[at, at], (predicted[at], shown[at], (predicted[at] + shown[at]) / 2)
        scores.append((at, [100 * right / number if number else math.nan for number in images]))
    scores.sort(key=lambda score: score[1][2])
    lines = [
        (names[at], str(shown[at]), *("-" if math.isnan(value) else f"{value:.1f} %" for value in figures))
        for at, figures in scores
    ]
    title = "Classes, the hardest first"
    if len(lines) > MAX_CLASSES:
        title = f"The {MAX_CLASSES:,} hardest of {len(lines):,} classes"
    panels.append(table(title, ("class", "images", "precision", "recall", "F1"), lines[:MAX_CLASSES]))
    mistakes = [row for row in predictions if row["class_number"] != row["predicted_number"]]
    if mistakes:
        lines = [
            (row["image"], row["class"], row["predicted"], f"{100 * float(row['probability']):.1f} %")
            for row in mistakes[:MAX_MISTAKES]
        ]
        title = f"The {len(lines)} most confident of {len(mistakes):,} mistakes in {len(predictions):,} images"
        wide = max(len(cell) for line in lines for cell in line) > _LONG_NAME
        panels.append(table(title, ("image", "class", "predicted", "probability"), lines, wide=wide))
    return [panel for panel in panels if panel]
