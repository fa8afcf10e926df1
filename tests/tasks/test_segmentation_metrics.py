"""Mean IoU of images of different sizes equals a count written out plainly, on any number of ranks."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from ds_vit.config.run_folder import RunFolder
from ds_vit.data.field import Field, finished
from ds_vit.data.reader import Reader
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.masks import default_palette
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.segmentation import windows as rating
from ds_vit.tasks.segmentation.metrics import MeanIoU, iou_panels, write_iou
from ds_vit.tasks.segmentation.windows import Canvas, WholeMask, Windows, classes_at, extent, stitched

HALF = (0.5, 0.5, 0.5)
IMAGE = ImageConfig(img_size=(24, 32), mean=HALF, std=HALF)
CLASSES, PATCH, BAD = 5, 8, 4
SIZES = [(24, 32), (50, 33), (17, 71), (24, 90), (20, 20), (61, 64), (9, 7), (40, 52)]
IGNORED = {1: 0.3, 3: 1.0}  # sample → share of its pixels without a class
STRIDES = [None, 0, 5]


class Pairs(Source):
    """Images of colours in blocks, and masks that follow them here and there; no pixel has the last class."""

    class_names = tuple("abcde")
    entries = ("image", "mask", "mask_size", "colours")

    def __len__(self):
        return len(SIZES)

    def target(self, index):
        return np.ones(CLASSES, dtype=np.float32)

    def describe(self, index):
        return f"image {index}"

    def encoded(self, index):
        if index == BAD:
            return b"not an image"
        (height, width), file = SIZES[index], io.BytesIO()
        blocks = np.random.default_rng(index).integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC).save(file, "png")
        return file.getvalue()

    def entry(self, name, index):
        (height, width), generator = SIZES[index], np.random.default_rng(index)
        if name in ("mask_size", "colours"):
            return (height, width) if name == "mask_size" else default_palette(CLASSES)
        if name == "image":
            return super().entry(name, index)
        blocks = generator.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
        classes = (blocks.argmax(2) + (blocks[..., 0] > 180)).astype(np.int16)
        mask = classes.repeat(6, 0).repeat(6, 1)[:height, :width]
        mask[generator.random(mask.shape) < IGNORED.get(index, 0.0)] = -1
        return mask


def logits_of(windows):
    """A model: float32 [..., 3, h, w] → [..., C, h / 8, w / 8], each of its values on its own."""
    pooled = F.avg_pool2d(windows.flatten(0, -4), PATCH)
    weights = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    logits = sum(weights[:, at, None, None] * pooled[:, at, None] for at in range(3))
    return logits.view(*windows.shape[:-3], *logits.shape[1:])


def counted(rank, world, stride):
    """The metrics of one rank, not yet added up."""
    source = Pairs()
    most, height, width = extent(source, IMAGE.img_size, stride)
    sizes = Field("sizes", (2,), torch.int64, stage="last", entry="mask_size")
    fields = [Windows("images", IMAGE, stride, most), WholeMask("masks", (height, width)), sizes]
    reader = Reader(source, fields, EvalRows(len(source), Share(rank, world, 1 + world)), on_bad_image="skip")
    metrics = MeanIoU(CLASSES, IMAGE, stride, torch.device("cpu"))
    metrics.expect(len(source))
    for number in range(len(reader.rows)):
        read = reader.read(reader.rows.at(number))
        batch = finished(fields, read, device="cpu")
        assert batch["images"].shape[1] == most
        batch |= {"valid": read.rows.valid, "keys": read.rows.keys}
        metrics.update(logits_of(batch["images"]), batch)
    return metrics


def count_on_rank(stride):
    """On a rank: the figures over all ranks, the sums, and the figures of this rank only."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    metrics = counted(rank, world, stride)
    own = metrics.compute()
    torch.distributed.all_reduce(metrics.sums)
    return metrics.compute(), metrics.sums.tolist(), own


def lengths_of(stride, size, window):
    """The canvas, and where windows begin on it, written out."""
    if stride == 0:
        return window, [[0], [0]]
    cover = max(window[0] / size[0], window[1] / size[1])
    canvas = max(window[0], round(size[0] * cover)), max(window[1], round(size[1] * cover))
    starts = []
    for length, side in zip(canvas, window, strict=True):
        along, at = [], 0
        while at + side < length:
            along.append(at)
            at += stride or {24: 16, 32: 21}[side]
        starts.append([*along, length - side])
    return canvas, starts


def expected_counts(stride):
    """[C][C] pixels by class and prediction, and the number of images."""
    source, counts, images = Pairs(), np.zeros((CLASSES, CLASSES), dtype=int), 0
    h, w = window = IMAGE.img_size
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGE.mean, IMAGE.std))
    for index, size in enumerate(SIZES):
        if index == BAD:
            continue
        images += 1
        (high, wide), (tops, lefts) = lengths_of(stride, size, window)
        image = Image.open(io.BytesIO(source.entry("image", index))).resize((wide, high), Image.Resampling.BILINEAR)
        pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - mean) / std
        total, times = torch.zeros(CLASSES, high, wide), torch.zeros(high, wide)
        for top in tops:
            for left in lefts:
                logits = logits_of(pixels[None, :, top : top + h, left : left + w])
                total[:, top : top + h, left : left + w] += F.interpolate(logits, window, mode="bilinear")[0]
                times[top : top + h, left : left + w] += 1
        assert times.min() >= 1
        assert stride == 0 or index not in (2, 3) or times.max() > 1, "no windows overlap"
        predicted = F.interpolate((total / times)[None], size, mode="bilinear")[0].argmax(0).numpy()
        for own, taken_for in zip(source.entry("mask", index).flat, predicted.flat, strict=True):
            if own != -1:
                counts[own, taken_for] += 1
    return counts, images


def mean_iou(counts):
    """In percent, over the classes that occur."""
    found = []
    for at in range(len(counts)):
        union = sum(counts[at]) + sum(row[at] for row in counts) - counts[at][at]
        found += [counts[at][at] / union] if union else []
    return 100 * sum(found) / len(found)


@pytest.fixture(scope="module", params=STRIDES)
def plain(request):
    """A stride, and the count written out."""
    return request.param, *expected_counts(request.param)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mean_iou_is_a_plain_count(ranks, plain, world):
    """A padding or damaged row that counts, a window too many, the size of a neighbour, a mean over ranks."""
    stride, counts, images = plain
    found = ranks.run(world, count_on_rank, stride)
    for figures, sums, _ in found:
        assert sums == [*counts.flatten().tolist(), images]
        assert figures["miou"] == pytest.approx(mean_iou(counts), abs=1e-12)
        assert figures["pixel_accuracy"] == pytest.approx(100 * np.trace(counts) / counts.sum(), abs=1e-12)
        assert figures["images"] == images == len(SIZES) - 1
    assert 5 < mean_iou(counts) < 95
    if world > 1:  # the check can tell a mean of the ranks' figures
        assert np.mean([own["miou"] for *_, own in found]) != pytest.approx(mean_iou(counts), abs=0.1)


def overwritten(logits, canvas, img_size):
    """A planted error: the last window wins."""
    scores = torch.zeros(logits.shape[1], *canvas.size)
    for window, (top, left) in zip(logits, canvas.starts, strict=True):
        part = F.interpolate(window[None], img_size, mode="bilinear")[0]
        scores[:, top : top + img_size[0], left : left + img_size[1]] = part
    return scores


def doubled(logits, canvas, img_size):
    """A planted error: at overlaps a window counts twice."""
    starts = [start for start in canvas.starts for _ in range(2)][:-1]
    return stitched(logits.repeat_interleave(2, 0)[:-1], Canvas(canvas.size, starts), img_size)


def nearest(scores, size):
    """A planted error: classes of the canvas, enlarged."""
    return F.interpolate(scores.argmax(0)[None, None].float(), size)[0, 0].long()


def without_ignored(self, packed, rows, device, made=WholeMask.to_device):
    """A planted error: ignored pixels are of the first class."""
    return made(self, packed, rows, device).clamp(min=0)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (rating, "stitched", overwritten),
        (rating, "stitched", doubled),
        (rating, "classes_at", nearest),
        (WholeMask, "to_device", without_ignored),
    ],
)
def test_planted_errors_show(monkeypatch, owner, name, planted):
    """The comparison with the plain count can fail."""
    counts, _ = expected_counts(None)
    assert (counted(0, 1, None).counts == counts).all()
    monkeypatch.setattr(owner, name, planted)
    assert (counted(0, 1, None).counts != counts).any()


@pytest.mark.parametrize("size", [(75, 91), (13, 200), (32, 48)])
def test_classes_are_those_of_the_whole_array(size):
    """Another grid than that of F.interpolate, or the last of equal logits."""
    for scores in (torch.randn(7, 32, 48), torch.randn(7, 32, 48).round(), torch.zeros(7, 32, 48)):
        whole = F.interpolate(scores[None], size, mode="bilinear", align_corners=False)[0]
        assert torch.equal(classes_at(scores, size), whole.argmax(0))


def metrics_of(counts):
    """Metrics that have counted a matrix of one image."""
    metrics = MeanIoU(len(counts), IMAGE, None, torch.device("cpu"))
    metrics.sums = torch.tensor([*np.ravel(counts), 1], dtype=torch.float64)
    return metrics


def test_absent_classes_are_left_out(tmp_path):
    """A class of no pixel in the mean; one that is only predicted left out, whose IoU is 0 in mmsegmentation."""
    metrics = metrics_of([[6, 0, 0, 2], [1, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
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


def test_no_pixel_with_a_class():
    """A division by zero, or a figure that looks like a measured one."""
    figures = metrics_of(np.zeros((2, 2))).compute()
    assert np.isnan([figures["miou"], figures["pixel_accuracy"]]).all()
    assert figures["images"] == 1


def test_pictures_are_of_the_counted_samples():
    """Mask and prediction of another sample, another palette, ignored pixels in the colour of a class.

    A class of the model that the data does not have.
    """
    source = Pairs()
    metrics = MeanIoU(CLASSES + 2, IMAGE, 0, torch.device("cpu"), source)
    metrics.expect(len(source))
    mask = torch.from_numpy(source.entry("mask", 1))
    metrics._show(2, torch.from_numpy(source.entry("mask", 2)), torch.full(SIZES[2], CLASSES + 1))
    assert metrics.pixels[2][2, :, 96, 96].tolist() == [255, 255, 255]
    metrics._show(1, mask, torch.full(SIZES[1], 2))
    image, mask, predicted = metrics.pixels[1].round().to(torch.uint8)
    colours = {tuple(colour) for colour in mask.flatten(1).T.tolist()}
    assert colours == {(0, 0, 0), (128, 0, 0), (0, 128, 0), (255, 255, 255)}
    assert predicted[:, 96, 96].tolist() == [0, 128, 0]
    assert len(image.unique()) > 50
    assert metrics.pictures()["segmentation"].shape == (3, 4 * 196 + 4, 6 * 196 + 4)


def test_an_image_of_another_size_than_its_mask(monkeypatch):
    """Pixels and classes that do not belong together."""
    source, rows = Pairs(), EvalRows(1, Share(0, 1, 1))
    entry = source.entry
    monkeypatch.setattr(source, "entry", lambda name, at: (32, 24) if name == "mask_size" else entry(name, at))
    with pytest.raises(UserError, match=r"image 0: the image has 24x32 pixels .* and its mask 32x24"):
        Reader(source, [Windows("images", IMAGE, None, 9)], rows).read(rows.at(0))
