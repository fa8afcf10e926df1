"""Mean IoU and pixel accuracy, counted at the masks' own sizes; a table by class and pictures for the report.

All figures follow from one matrix of pixel counts, which adds up over images and ranks: whole numbers, so they are the
same in any layout. The mean of the IoU leaves out classes that no mask and no prediction has, as mmsegmentation does.

Shapes: B images, K windows, C classes, gh x gw of a window's logits, H x W of a mask.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.utils import make_grid

from ds_vit.config.run_folder import RunFolder, written_whole
from ds_vit.data.decode import upright
from ds_vit.data.sources.masks import IGNORED
from ds_vit.data.sources.source import Source
from ds_vit.tasks.metrics import Batch, Figure, Metrics, spread
from ds_vit.tasks.panels import Panel, class_name, table
from ds_vit.tasks.segmentation.windows import Windows

FIGURES = (Figure("miou", "mIoU", "%"), Figure("pixel_accuracy", "pixel accuracy", "%"))
ABSENT = "absent"
_FILE = "iou.csv"
_PANEL = 192  # pixels across of a picture
_OUTSIDE = 255  # white: pixels that are ignored, and what surrounds an image


class MeanIoU(Metrics):
    """Mean intersection over union and pixel accuracy in percent, of the pixels whose class is known.

    Args:
        num_classes: C.
        windows: of the images.
        device: where the sums are kept.
        source: of the evaluated samples, for the pictures; None for none.
    """

    num_shown = 8

    def __init__(self, num_classes: int, windows: Windows, device: torch.device, source: Source | None = None) -> None:
        super().__init__(num_classes**2 + 1, device)  # pixels by class of the mask and predicted class; images
        self.num_classes, self._windows, self._source = num_classes, windows, source
        self._shown: list[int] = []

    def expect(self, num_samples: int) -> None:
        """As `Metrics.expect`."""
        super().expect(num_samples)
        if self._source is not None:
            self._shown = spread(self.num_shown, num_samples).tolist()
            # An image, its mask and the prediction.
            self.pixels: torch.Tensor = torch.zeros(len(self._shown), 3, 3, _PANEL, _PANEL, device=self.sums.device)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Logits fp32 [B, K, C, gh, gw]; "masks" int32 [B, ...] and their "sizes" int64 [B, 2]."""
        rows = batch["valid"].nonzero().flatten().tolist()
        for row, place in zip(rows, self.places(batch).tolist(), strict=True):
            height, width = batch["sizes"][row].tolist()
            predicted = self._windows.classes(outputs[row], (height, width))
            mask = batch["masks"][row, :height, :width]
            known = mask != IGNORED
            pairs = mask[known].long() * self.num_classes + predicted[known]
            self.sums[:-1] += torch.bincount(pairs, minlength=self.num_classes**2)
            self.sums[-1] += 1
            if self._source is not None and place in self._shown:
                self._show(self._source, place, mask, predicted)

    @property
    def counts(self) -> np.ndarray:
        """Pixels by their class (rows) and the predicted class (columns), float64 [C, C]."""
        return self.sums[:-1].view(self.num_classes, -1).cpu().numpy()

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`; both are NaN where all pixels are ignored."""
        iou, _, _ = rates(self.counts)
        with np.errstate(invalid="ignore"):
            miou = np.nansum(iou) / np.isfinite(iou).sum()
            accuracy = 100.0 * np.trace(self.counts) / self.counts.sum()
        return {"miou": float(miou), "pixel_accuracy": float(accuracy), "images": int(self.sums[-1])}

    def _show(self, source: Source, place: int, mask: torch.Tensor, predicted: torch.Tensor) -> None:
        """Draw a sample; only the rank that counts it does."""
        # The last colour is of pixels that are ignored.
        colours = np.full((self.num_classes + 1, 3), _OUTSIDE, dtype=np.uint8)
        known = source.entry("colours", 0)  # of the data's classes, of which the model may have more
        colours[: len(known)] = known
        image = source.image(place)
        drawn = [(upright(image) if self._windows.image.exif_rotation else image, Image.Resampling.BILINEAR)]
        drawn += [(Image.fromarray(colours[of.cpu().numpy()]), Image.Resampling.NEAREST) for of in (mask, predicted)]
        # In the middle of a square.
        tiles = [ImageOps.pad(picture, (_PANEL, _PANEL), how, color=(_OUTSIDE,) * 3) for picture, how in drawn]
        self.pixels[self._shown.index(place)] = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2)

    def pictures(self) -> dict[str, torch.Tensor]:
        """Image, mask and prediction of each sample, two samples a row."""
        if self.pixels is None:
            return {}
        grid = make_grid(self.pixels.flatten(0, 1), nrow=6, padding=4, pad_value=_OUTSIDE)
        return {"segmentation": grid.round().to(torch.uint8)}


def rates(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IoU, accuracy and share of the pixels of each class, in percent.

    Args:
        counts: pixels by class and predicted class, [C, C].

    Returns:
        Three arrays [C]; NaN for the IoU of a class in no mask and no prediction, the accuracy of one in no mask.
    """
    right, own, predicted = np.diag(counts), counts.sum(1), counts.sum(0)
    with np.errstate(invalid="ignore"):
        return 100.0 * right / (own + predicted - right), 100.0 * right / own, 100.0 * own / counts.sum()


# ---- the report: the IoU of each class -------------------------------------------------------------------------------


def write_iou(folder: RunFolder, metrics: MeanIoU, names: Sequence[str]) -> None:
    """Write iou.csv, a row per class in the order of the logits, in percent; the IoU of an absent class says so.

    Args:
        folder: of the run.
        metrics: of the last evaluation, over all ranks.
        names: of the classes, as far as they are known.

    Raises:
        OSError: the file cannot be written.
    """
    with written_whole(folder.path / _FILE) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "iou", "accuracy", "share_of_pixels"))
        for at, values in enumerate(zip(*rates(metrics.counts), strict=True)):
            iou, accuracy, share = ("" if np.isnan(value) else f"{value:.2f}" for value in values)
            writer.writerow((class_name(at, names), iou or ABSENT, accuracy, share))


def iou_panels(folder: RunFolder) -> list[Panel]:
    """The table of iou.csv, the lowest IoU first and absent classes last; none without the file."""
    with contextlib.suppress(OSError), (folder.path / _FILE).open(newline="", encoding="utf-8") as file:
        rows = sorted([*csv.reader(file)][1:], key=lambda row: np.inf if row[1] == ABSENT else float(row[1]))
        lines = [[name, *(f"{of} %" if of[:1].isdigit() else of or "-" for of in figures)] for name, *figures in rows]
        return [table("IoU at the last evaluation, lowest first", ("class", "IoU", "accuracy", "of the pixels"), lines)]
    return []
