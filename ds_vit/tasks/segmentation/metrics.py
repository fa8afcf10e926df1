"""Mean IoU and pixel accuracy, counted at the masks' own sizes; a table by class and pictures for the report.

All figures follow from one matrix of pixel counts, which adds up over images and ranks: whole numbers, so they are the
same in any layout. The mean of the IoU leaves out classes that no mask and no prediction has, as mmsegmentation does.

Shapes: B images, K windows, C classes, gh x gw of a window's logits, H x W of a mask.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torchvision.utils import make_grid

from ds_vit.config.run_folder import RunFolder, written_whole
from ds_vit.data.decode import Jpeg, open_image
from ds_vit.data.masks import IGNORED, default_palette
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.tasks.metrics import Batch, Figure, Metrics
from ds_vit.tasks.panels import Panel, class_name, table
from ds_vit.tasks.segmentation.windows import canvas_of, classes_at, stitched

FIGURES = (Figure("miou", "mIoU", "%"), Figure("pixel_accuracy", "pixel accuracy", "%"))
PICTURES: Mapping[str, str] = {
    "segmentation": "Images, their masks and the predicted classes at the last evaluation",
    "ema-segmentation": "The same with the moving average of the weights",
}
ABSENT = "absent"
_FILE = "iou.csv"
_HEADER = ("class", "iou", "accuracy", "share_of_pixels")
_PANEL = 192  # pixels across of a picture
_OUTSIDE = 255  # white: pixels that are ignored, and what is beside an image


class MeanIoU(Metrics):
    """Mean intersection over union and pixel accuracy in percent, of the pixels whose class is known.

    Args:
        num_classes: C.
        img_size: (h, w) of the model.
        stride: --slide-stride.
        device: where the sums are kept.
        source: of the evaluated samples, for the pictures; None for none.
        image: how the pictures' files are read.
    """

    num_shown = 8

    def __init__(
        self,
        num_classes: int,
        img_size: tuple[int, int],
        stride: int | None,
        device: torch.device,
        source: Source | None = None,
        image: ImageConfig | None = None,
    ) -> None:
        super().__init__(num_classes**2 + 1, device)  # pixels by class of the mask and predicted class; images
        self.num_classes, self._img_size, self._stride = num_classes, img_size, stride
        self._source, self._image = source, image or ImageConfig()
        self._shown: list[int] = []

    def expect(self, num_samples: int) -> None:
        """As `Metrics.expect`."""
        super().expect(num_samples)
        if self._source is None:
            return
        # From all over the split: a folder's images lie subject by subject.
        places = np.linspace(0, num_samples - 1, min(self.num_shown, num_samples)).round()
        self._shown = [int(place) for place in places]
        # An image, its mask and the prediction.
        self.pixels = self.sums.new_zeros(len(places), 3, 3, _PANEL, _PANEL, dtype=torch.float32)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Logits fp32 [B, K, C, gh, gw]; "masks" int32 [B, ...] and their "sizes" int64 [B, 2]."""
        places = iter(self.places(batch).tolist())
        for row, (valid, size) in enumerate(zip(batch["valid"].tolist(), batch["sizes"].tolist(), strict=True)):
            if not valid:
                continue
            canvas = canvas_of((size[0], size[1]), self._img_size, self._stride)
            scores = stitched(outputs[row, : len(canvas.starts)], canvas, self._img_size)
            predicted, mask = classes_at(scores, (size[0], size[1])), batch["masks"][row, : size[0], : size[1]]
            known = mask != IGNORED
            pairs = mask[known].long() * self.num_classes + predicted[known]
            self.sums[:-1] += torch.bincount(pairs, minlength=self.num_classes**2)
            self.sums[-1] += 1
            if (place := next(places)) in self._shown:
                self._show(place, mask, predicted)

    @property
    def counts(self) -> np.ndarray:
        """Pixels by their class (rows) and the predicted class (columns), float64 [C, C]."""
        return self.sums[:-1].view(self.num_classes, -1).cpu().numpy()

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`; both are NaN where all pixels are ignored."""
        counts = self.counts
        iou, _, _ = rates(counts)
        present, total = ~np.isnan(iou), counts.sum()
        return {
            "miou": float(iou[present].mean()) if present.any() else np.nan,
            "pixel_accuracy": float(100.0 * np.trace(counts) / total) if total else np.nan,
            "images": int(self.sums[-1]),
        }

    def _show(self, place: int, mask: torch.Tensor, predicted: torch.Tensor) -> None:
        """Draw a sample; only the rank that counts it does."""
        assert self._source is not None, "nothing is shown without a source"
        assert self.pixels is not None, "expect() was not called"
        has_colours = self._source.has("colours")
        palette = self._source.entry("colours", place) if has_colours else default_palette(self.num_classes)
        colours = np.full((self.num_classes + 1, 3), _OUTSIDE, dtype=np.uint8)
        colours[: len(palette)] = palette[: self.num_classes]  # the last one is of pixels that are ignored
        data, name = self._source.entry("image", place), self._source.describe(place)
        opened = open_image(data, name, exif_rotation=self._image.exif_rotation)
        image = opened.image() if isinstance(opened, Jpeg) else opened
        masks = [Image.fromarray(colours[classes.cpu().numpy()]) for classes in (mask, predicted)]
        for at, picture in enumerate((image.convert("RGB"), *masks)):
            self.pixels[self._shown.index(place), at] = torch.from_numpy(_fitted(picture, smooth=at == 0))

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


def _fitted(picture: Image.Image, *, smooth: bool) -> np.ndarray:
    """An RGB picture in the middle of a square, float32 [3, side, side]; class colours are not mixed."""
    scale = _PANEL / max(picture.size)
    width, height = (max(1, round(length * scale)) for length in picture.size)
    how = Image.Resampling.BILINEAR if smooth and scale < 1 else Image.Resampling.NEAREST
    square = Image.new("RGB", (_PANEL, _PANEL), (_OUTSIDE,) * 3)
    square.paste(picture.resize((width, height), how), ((_PANEL - width) // 2, (_PANEL - height) // 2))
    return np.asarray(square, dtype=np.float32).transpose(2, 0, 1)


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
    with (
        written_whole(folder.path / _FILE) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(_HEADER)
        for at, values in enumerate(zip(*rates(metrics.counts), strict=True)):
            iou, accuracy, share = ("" if np.isnan(value) else f"{value:.2f}" for value in values)
            writer.writerow((class_name(at, names), iou or ABSENT, accuracy, share))


def iou_panels(folder: RunFolder) -> list[Panel]:
    """The table of iou.csv, the lowest IoU first and absent classes last; none without the file."""
    rows: list[dict[str, str]] = []
    with (
        contextlib.suppress(OSError),
        (folder.path / _FILE).open(newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        rows = list(csv.DictReader(file))
    if not rows:
        return []
    rows.sort(key=lambda row: np.inf if row["iou"] == ABSENT else float(row["iou"]))

    def shown(value: str) -> str:
        return "-" if value in ("", ABSENT) else f"{value} %"

    lines = [(row["class"], *(shown(row[name]) for name in _HEADER[1:])) for row in rows]
    title = "IoU of the classes, the lowest first (-: in no mask and no prediction)"
    return [table(title, ("class", "IoU", "accuracy", "of the pixels"), lines)]
