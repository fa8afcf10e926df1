"""Mean IoU of images of different sizes equals a count written out plainly, on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from micro_batches import loader_of
from plain_segmenter import CLASSES, blocks, rated, write_split
from sklearn.metrics import confusion_matrix, jaccard_score

from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import RunConfig
from ds_vit.data.field import finished
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.tasks.segmentation import windows as rating
from ds_vit.tasks.segmentation.metrics import MeanIoU, iou_panels, write_iou
from ds_vit.tasks.segmentation.task import Segmentation
from ds_vit.tasks.segmentation.windows import WholeMask, Windows, stitched

IMAGE = ImageConfig(img_size=(24, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
PATCH, BAD = 8, 4
SIZES = [(24, 32), (50, 33), (17, 71), (24, 90), (20, 20), (61, 64), (9, 7), (40, 52)]
IGNORED = {1: 0.3, 3: 1.0}  # number of an image → share of its pixels without a class


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of many sizes, one of them damaged; no pixel has the last class."""
    made = tmp_path_factory.mktemp("masks")
    masks = [blocks(size, at, IGNORED.get(at, 0.0), range(CLASSES - 1), 6) for at, size in enumerate(SIZES)]
    write_split(made, "val", masks, noise=150)
    (made / "val" / "images" / f"n.{BAD}.png").write_bytes(b"not an image")
    return made


def logits_of(windows):
    """A model: float32 [..., 3, h, w] → [..., C, h / 8, w / 8], each of its values on its own."""
    pooled = F.avg_pool2d(windows.flatten(0, -4), PATCH)
    weights = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    weights[1] = weights[0]  # of equal logits the first wins
    logits = sum(weights[:, at, None, None] * pooled[:, at, None] for at in range(3))
    return logits.view(*windows.shape[:-3], *logits.shape[1:])


def counted(folder, rank, world, stride):
    """The metrics of one rank, not yet added up, of data that have a class less than the model."""
    source = Segmentation.open_source(RunConfig(num_classes=CLASSES - 1), str(folder), "val")
    task = SimpleNamespace(image=IMAGE, validation=source, config=SimpleNamespace(slide_stride=stride))
    fields = Segmentation.fields(task, training=False)
    metrics = MeanIoU(CLASSES, fields[0], torch.device("cpu"), source)
    metrics.expect(len(source))
    rows = EvalRows(len(source), Share(rank, world, 1 + world))
    for read in loader_of(source, fields, rows, on_bad_image="skip"):
        batch = finished(fields, read, device="cpu")
        metrics.update(logits_of(batch["images"]), batch | {"valid": read.rows.valid, "keys": read.rows.keys})
    return metrics


def count_on_rank(folder, stride):
    """On a rank: the figures over all ranks, the sums, and the figures of this rank only."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    metrics = counted(folder, rank, world, stride)
    own = metrics.compute()
    torch.distributed.all_reduce(metrics.sums)
    return metrics.compute(), metrics.sums.tolist(), own


@pytest.fixture(scope="module", params=[None, 0, 5])
def plain(request, folder):
    """A stride, and of all pixels that count their classes and those of windows written out."""
    return request.param, *rated(logits_of, folder, IMAGE.img_size, request.param, skip=BAD)[0]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mean_iou_is_a_plain_count(ranks, folder, plain, world):
    """A padding or damaged row that counts, a window too many, the size of a neighbour, a mean over ranks."""
    stride, own, predicted = plain
    miou = 100 * jaccard_score(own, predicted, average="macro")
    found = ranks.run(world, count_on_rank, folder, stride)
    for figures, sums, _ in found:
        assert sums == [*confusion_matrix(own, predicted, labels=range(CLASSES)).flatten(), len(SIZES) - 1]
        assert figures["miou"] == pytest.approx(miou, abs=1e-12)
        assert figures["pixel_accuracy"] == pytest.approx(100 * np.mean(own == predicted), abs=1e-12)
    assert 5 < miou < 95
    if world > 1:  # the check can tell a mean of the ranks' figures
        assert np.mean([own["miou"] for *_, own in found]) != pytest.approx(miou, abs=0.01)


def doubled(logits, size, starts, img_size):
    """A planted error: at overlaps a window counts twice."""
    starts = [start for start in starts for _ in range(2)][:-1]
    return stitched(logits.repeat_interleave(2, 0)[:-1], size, starts, img_size)


def without_ignored(self, packed, rows, device, made=WholeMask.to_device):
    """A planted error: ignored pixels are of the first class."""
    return made(self, packed, rows, device).clamp(min=0)


@pytest.mark.parametrize("planted", [(rating, "stitched", doubled), (WholeMask, "to_device", without_ignored)])
def test_planted_errors_show(monkeypatch, folder, planted):
    """The comparison with the plain count can fail."""
    counts = counted(folder, 0, 1, None).counts
    monkeypatch.setattr(*planted)
    assert (counted(folder, 0, 1, None).counts != counts).any()


def test_absent_classes_are_left_out(tmp_path):
    """A class of no pixel in the mean; one that is only predicted left out, whose IoU is 0 in mmsegmentation.

    Without any pixel a division by zero, or a figure that looks like a measured one.
    """
    metrics = MeanIoU(4, Windows("images", IMAGE, None), torch.device("cpu"))
    assert np.isnan([metrics.compute()[name] for name in ("miou", "pixel_accuracy")]).all()
    metrics.sums += torch.tensor([6, 0, 0, 2, 1, 3, 0, 0, *[0] * 8, 1])
    assert metrics.compute() == pytest.approx(
        {"miou": 100 * (6 / 9 + 3 / 4 + 0) / 3, "pixel_accuracy": 100 * 9 / 12, "images": 1}
    )
    write_iou(RunFolder(tmp_path), metrics, ["sky", "road, wet", "sea"])
    assert (tmp_path / "iou.csv").read_text().splitlines() == [
        "class,iou,accuracy,share_of_pixels",
        "sky,66.67,75.00,66.67",
        '"road, wet",75.00,75.00,33.33',
        "sea,absent,,0.00",
        "class 3,0.00,,0.00",
    ]
    [panel] = iou_panels(RunFolder(tmp_path))
    assert [line[0] for line in panel["lines"]] == ["class 3", "sky", "road, wet", "sea"]
    assert panel["lines"][-1] == ["sea", "absent", "-", "0.00 %"]
