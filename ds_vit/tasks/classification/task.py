"""Classification: one label per image or several, softmax or binary cross-entropy, top-1 and top-5."""

from __future__ import annotations

import contextlib
import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ds_vit.config.run_folder import RunFolder, written_whole
from ds_vit.data.field import Field
from ds_vit.data.fields import LabelField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.tasks.classification.losses import build_loss, class_parallel_loss
from ds_vit.tasks.distillation.flags import SETTINGS
from ds_vit.tasks.metrics import Batch, Figure, Means, Metrics
from ds_vit.tasks.panels import Panel, class_name, heat_map, save_samples, sheet, table
from ds_vit.tasks.task import ChainTask, Loss

MAX_CLASSES_IN_MATRIX, MAX_PAIRS, MAX_MISTAKES, MAX_CLASSES = 200, 10, 20, 1000
_LONG_NAME = 24  # letters of a file name that need the page's whole width
_MOST_MISTAKES = 24


class Classification(ChainTask):
    """`--task classification`.

    A batch has "images" [B, 3, H, W] on the first stage and "targets" on the last: class numbers int64 [B], or
    float32 [B, C] where an image has several labels or labels are mixed.
    """

    name = "classification"
    peers = ("timm", "ddp", "fsdp2")
    with_teacher = "ds_vit.tasks.distillation.task:Distillation"
    not_replayed = ""
    settings = SETTINGS
    predict_flags = ("bce_loss",)
    figures: tuple[Figure, ...] = (
        Figure("top1", "top-1", "%"),
        Figure("top5", "top-5", "%"),
        Figure("loss", "loss", digits=5, higher_is_better=False, summed_up=False),
    )

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        if self.num_classes <= 5:  # every one is among the first five
            label = f"top-5 of {self.num_classes}"
            self.figures = tuple(replace(each, label=label) if each.name == "top5" else each for each in self.figures)

    def supports(self, model: nn.Module) -> str | None:
        """As `Task.supports`."""
        if self.source.multi_label and not self.config.bce_loss:
            return "this data set has several labels per image: softmax cannot fit them; add --bce-loss"
        return super().supports(model)

    def identity(self) -> dict[str, Any]:
        """As `Task.identity`: nothing, for its flags are those of distillation."""
        return {}

    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """As `Task.fields`."""
        mix = self.config if training else None
        labels = LabelField("targets", self.num_classes, multi_label=self.source.multi_label, mix=mix)
        return self.images(training=training), labels

    def loss(self, tp: TensorParallel | None) -> Loss:
        """As `Task.loss`; see `build_loss`."""
        loss = build_loss(self.config) if tp is None else class_parallel_loss(self.config, tp, self.num_classes)
        return lambda logits, batch: loss(logits, batch["targets"])

    def metrics(self, device: torch.device) -> Metrics:
        """As `Task.metrics`."""
        return Accuracy(device, bce=self.config.bce_loss, noted=not self.source.multi_label)

    def write_files(self, metrics: Metrics, folder: RunFolder, source: Source) -> None:
        """As `Task.write_files`: the predictions."""
        if metrics.by_sample is not None:
            write_predictions(folder, metrics.by_sample, source, self.class_names, self.image)

    @classmethod
    def panels(cls, folder: RunFolder) -> Mapping[str, Sequence[Panel]]:
        """As `Task.panels`: the predictions by class, and the most confident mistakes."""
        of_classes = class_panels(read_predictions(folder.predictions), folder.read_classes())
        mistakes = sheet(folder.mistakes, "The most confident mistakes of the last evaluation")
        return {"Classes": of_classes, "Images": mistakes}


class Accuracy(Means):
    """Top-1 and top-5 in percent and the mean loss, in nats: timm's, whatever the training loss is.

    It is the softmax cross-entropy of class numbers, without smoothing. timm has no multi-hot targets: theirs is the
    binary cross-entropy, averaged over classes, and an image counts as right at top-k when one of its labels is among
    the k highest logits.

    Args:
        device: where the sums are kept.
        bce: trained with binary cross-entropy: the probability is a sigmoid of the class's logit.
        noted: also keep each sample's prediction, in `by_sample` float64 [N, 2]: 1 + the class, its probability.
    """

    most_noted = 200_000

    def __init__(self, device: torch.device, *, bce: bool = False, noted: bool = False) -> None:
        super().__init__(device, "top1", "top5", "loss")
        self._bce = bce
        self._noted = noted

    def expect(self, num_samples: int) -> None:
        """As `Metrics.expect`."""
        super().expect(num_samples)
        if self._noted and num_samples <= self.most_noted:
            self.by_sample = self.sums.new_zeros(num_samples, 2)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Logits fp32 [B, C]; targets int64 [B] or multi-hot float32 [B, C]."""
        logits, targets = outputs, batch["targets"]
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
        if targets.dim() == 1:
            hits = ranked == targets[:, None]
            losses = F.cross_entropy(logits, targets, reduction="none")
        else:
            hits = targets.gather(1, ranked) > 0
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        if self.by_sample is not None:
            highest, predicted = logits.max(dim=1)
            sure = highest.sigmoid() if self._bce else (highest - logits.logsumexp(dim=1)).exp()
            self.by_sample[self.places(batch)] = torch.stack((predicted + 1.0, sure), 1)[batch["valid"]].double()
        self.count((100.0 * hits[:, 0], 100.0 * hits.any(1), losses), batch)


# ---- the report: the prediction of each validation image, and what is confused ---------------------------------------


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
    numbers = [(int(row["class_number"]), int(row["predicted_number"])) for row in predictions]
    pairs = Counter(numbers)
    shown, predicted = (Counter(side) for side in zip(*numbers, strict=True))
    num_classes = max(len(classes), 1 + max(map(max, pairs)))
    names = [class_name(at, classes) for at in range(num_classes)]
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
