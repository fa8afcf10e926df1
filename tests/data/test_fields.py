"""Fields that the package does not have: a mask and boxes that follow their image, and a table of numbers beside it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch
from micro_batches import Loaded, load, loader_of
from PIL import Image

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.decode import ImageDecodeError, undecodable
from ds_vit.data.field import Derived, Field, RaggedField, Sample, finished
from ds_vit.data.fields import ImageField, LabelField
from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.reader import Reader
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError

IMAGE, MOST = ImageConfig((16, 20)), 3
AUGMENT = AugmentConfig(scale=(0.3, 1.0), vflip=0.5, color_jitter=0.0, train_interpolation="bilinear")
MIX = MixConfig(mixup=0.8, cutmix=1.0)
BROKEN = {3, 10, 17}
WHOLE = Share(0, 1, 12)
OTHERS = [(Share(0, 2, 3, 2), {"num_workers": 2}), (Share(0, 4, 1, 3), {}), (Share(0, 1, 6, 2), {"num_workers": 1})]


class Scenes(Source):
    """24 black images with 0 to 3 bright squares, which are their mask and their boxes; numbers, every fifth lost.

    Images of `broken` cannot be decoded.
    """

    class_names = ("few", "many")
    entries = ("image", "target", "mask", "boxes", "numbers")

    def __init__(self, broken: Collection[int] = ()) -> None:
        corners, self.opened, self.broken = np.random.default_rng(0).integers(0, 28, (24, MOST, 2)), 0, broken
        self.corners = [corners[number, : number % (MOST + 1)] for number in range(24)]

    def __len__(self) -> int:
        return len(self.corners)

    def image(self, index: int) -> Image.Image:
        self.opened += 1
        if index in self.broken:
            raise undecodable(self.describe(index), ValueError("broken"))
        return Image.merge("RGB", [self.entry("mask", index).point(lambda value: 255 * value)] * 3)

    def target(self, index: int) -> int:
        return int(len(self.corners[index]) > 1)

    def describe(self, index: int) -> str:
        return f"scene {index}"

    def entry(self, name: str, index: int) -> object:
        if name == "mask":
            pixels = np.zeros((40, 48), dtype=np.uint8)
            for top, left in self.corners[index]:
                pixels[top : top + 12, left : left + 12] = 1
            return Image.fromarray(pixels)
        if name == "boxes":
            return np.float32([(left, top, left + 12, top + 12) for top, left in self.corners[index]]).reshape(-1, 4)
        return np.float32([index, index % 5 or np.nan]) if name == "numbers" else super().entry(name, index)


class Mask(Field):
    """Which pixels are bright, uint8 [B, H, W]."""

    def __init__(self, follows: ImageField, flips: bool = True) -> None:
        super().__init__("mask", follows.image.img_size, torch.uint8, stage="last", entry="mask")
        self.follows, self.flips = follows, flips

    def read(self, sample: Sample) -> np.ndarray:
        (top, left, height, width), _, operations = self.follows.geometry(sample)
        box = (left, top, left + width, top + height)
        pixels = np.array(sample["mask"].resize(self.shape[::-1], Image.Resampling.NEAREST, box))
        for operation in operations if self.flips else ():
            pixels = pixels[:, ::-1] if operation.name == "hflip" else pixels[::-1]
        return np.ascontiguousarray(pixels)

    def resized(self, side: int) -> Mask:
        return Mask(self.follows.resized(side), self.flips)


class Boxes(RaggedField):
    """(left, top, right, bottom) of the squares as far as they are in the crop, float32 [B, most, 4]; -1: none."""

    padding = -1.0

    def __init__(self, follows: ImageField, most: int = MOST) -> None:
        super().__init__("boxes", (most, 4), torch.float32, stage="last", entry="boxes")
        self.follows = follows

    def read(self, sample: Sample) -> np.ndarray:
        (top, left, height, width), _, operations = self.follows.geometry(sample)
        high, wide = self.follows.image.img_size
        boxes = (sample["boxes"] - [left, top] * 2) * ([wide / width, high / height] * 2)
        boxes = boxes.clip(0, [wide, high] * 2)
        for operation in operations:
            at, size = ([0, 2], wide) if operation.name == "hflip" else ([1, 3], high)
            boxes[:, at] = size - boxes[:, at[::-1]]
        return boxes[(boxes[:, 2:] - boxes[:, :2]).min(1) > 0.5].astype(np.float32)


class Numbers(Field):
    """Two numbers of each image, float32 [B, 2]."""

    def __init__(self) -> None:
        super().__init__("numbers", (2,), torch.float32, stage="last", entry="numbers")

    def read(self, sample: Sample) -> np.ndarray:
        numbers = super().read(sample)
        if np.isnan(numbers).any():
            raise sample.damaged("a number is missing")
        return numbers


def _load(fields: list[Field], share: Share = WHOLE, source: Source | None = None, **options) -> Loaded:
    source = Scenes() if source is None else source
    return load(source, share, image=IMAGE, augment=AUGMENT, fields=fields, stop=4, **options)


@pytest.mark.parametrize("flips", [True, False], ids=["with flips", "planted: without"])
@pytest.mark.parametrize("how", ["cpu", "device", "sizes"])
def test_a_mask_follows_its_image(how, flips):
    """Would catch a crop, flip or size that is drawn for the mask alone, in any layout or on the device."""
    augment = AUGMENT.model_copy(update={"augment_on": "device"} if how == "device" else {})
    images = ImageField("images", IMAGE, augment)
    options = {"sizes": ImageSizes((12, 16), firsts=(0, 2))} if how == "sizes" else {}
    batches = _load([images, Mask(images, flips)], Share(0, 1, 6, 2), **options)
    agreed = []
    for batch, mask in zip(batches, (batch.packed["mask"] for batch in batches), strict=True):
        pixels = batches.fields[0].to_device(batch.packed["images"], batch.rows, torch.device("cpu")).mean(1)
        assert pixels.shape == mask.shape
        agreed.append(((pixels > 0) == (mask == 1)).double().mean())
    assert np.mean(agreed) > 0.98 if flips else np.mean(agreed) < 0.95


def test_ragged_boxes_are_padded_to_their_declared_number():
    """Would catch boxes of another row, another crop or another process, and a row whose places were not filled."""
    images = ImageField("images", IMAGE, AUGMENT)
    fields = [images, Boxes(images)]
    expected = _load(fields).tensors()
    boxes = expected["boxes"].flatten(0, 1)
    assert boxes.shape == (48, MOST, 4)
    counts = (boxes >= 0).all(-1).sum(1)
    assert {*counts.tolist()} == {0, 1, 2, 3}
    for share, options in OTHERS:
        for name, found in _load(fields, share, **options).tensors().items():
            assert torch.equal(found, expected[name]), name
    for pixels, own, count in zip(expected["images"].flatten(0, 1).mean(1), boxes, counts, strict=True):
        assert (own[count:] == -1).all()
        inside = torch.zeros_like(pixels, dtype=torch.bool)
        for left, top, right, bottom in own[:count].round().int().tolist():
            inside[top:bottom, left:right] = True
        assert ((pixels > 0) == inside).double().mean() > 0.9
    with pytest.raises(UserError, match=r"boxes has room for 2 items of a sample, and scene \d+ has 3; "):
        _load([images, Boxes(images, most=2)])


@pytest.mark.parametrize("mode", ["center", "squash", "border", "no_aug"])
def test_a_follower_finds_the_place_of_evaluations_pixels(mode):
    """Would catch a box that is off by the crop's margin: each pixel of a ramp says where it was."""
    high, wide = 90, 140
    rows, columns = np.mgrid[:high, :wide]
    ramp = Image.fromarray(np.stack([rows, columns, 0 * rows], axis=2).astype(np.uint8))
    augment, crop_mode = (AugmentConfig(no_aug=True), None) if mode == "no_aug" else (None, mode)
    images = ImageField("images", ImageConfig((30, 40), crop_pct=0.75, crop_mode=crop_mode), augment)
    found = images.transform(ramp, 0).double()
    sample = Sample(Scenes(), 0, 0)
    sample.once((images.entry, "exact", False, False), lambda: ramp)
    (top, left, height, width), size, operations = images.geometry(sample)
    assert (size, operations) == ((high, wide), ())
    for pixels, first, length in ((found[0].mean(1), top, height), (found[1].mean(0), left, width)):
        places = first + (torch.arange(len(pixels)) + 0.5) * length / len(pixels) - 0.5
        assert (pixels - places)[5:-5].abs().max() < 1.5


def test_an_image_is_opened_once_for_all_that_follow_it():
    """Would catch a file that is read for the image, and again for each field that asks for its geometry."""
    images, source = ImageField("images", IMAGE, AUGMENT), Scenes()
    _load([images, Mask(images), Boxes(images)], source=source)
    assert source.opened == 4 * 12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reads", [None, ["targets"], ["images"], ["numbers"]], ids=str)
def test_a_damaged_member_replaces_the_whole_sample_on_every_rank(reads):
    """Would catch an image with the label or the numbers of another: a stage that keeps one of them must skip too."""
    fields = [ImageField("images", IMAGE, AUGMENT), LabelField("targets", 2, mix=MIX), Numbers()]
    options, lost = {"source": Scenes(BROKEN), "mix": MIX, "on_bad_image": "skip"}, {*BROKEN, 0, 5, 10, 15, 20}
    whole = _load(fields, **options)
    expected = whole.tensors()
    num_lost = sum(index in lost for index in expected["indices"].flatten().tolist())
    assert whole.num_skipped == num_lost > 8
    assert {reason for batch in whole for _, reason in batch.skipped} > {"a number is missing"}
    for batch in whole:
        read = batch.packed["numbers"][:, 0].long().tolist()
        assert not lost & {*read}
        assert batch.packed["targets"].tolist() == [Scenes().target(index) for index in read]
    for share, more in OTHERS:
        found = _load(fields, share, reads=reads, **options, **more)
        assert found.num_skipped == num_lost
        for name, tensor in found.tensors().items():
            assert torch.equal(tensor, expected[name]), name
    seen = [*loader_of(options["source"], fields, EvalRows(24, WHOLE), reads=reads, on_bad_image="skip")]
    assert torch.cat([batch.rows.valid for batch in seen]).tolist() == [index not in lost for index in range(24)]
    assert {index for batch in seen for index, _ in batch.skipped} == lost
    with pytest.raises(ImageDecodeError, match=r"^scene \d+: a number is missing; repair it, or pass --on-bad-image"):
        _load(fields)
    with pytest.raises(
        ImageDecodeError, match=r"^scene \d+: broken; 16 other samples, .* are damaged too; repair the data$"
    ):
        _load(fields[:1], source=Scenes(range(24)), on_bad_image="skip")


class Table(Source):
    """Five samples, whose only entry is one of some values."""

    def __init__(self, *values: object) -> None:
        self.values, self.reads = values, 0

    def __len__(self) -> int:
        return 5

    def target(self, index: int) -> int:
        return 0

    def describe(self, index: int) -> str:
        return f"row {index}"

    def entry(self, name: str, index: int) -> object:
        self.reads += 1
        return self.values[index % len(self.values)]


def _evaluated(values: list[object], *fields: Field, **processes) -> list[dict[str, torch.Tensor]]:
    """The tensors of batches of 3 and of 2 and padding."""
    batches = loader_of(Table(*values), fields, EvalRows(5, Share(0, 1, 3)), **processes)
    return [finished(fields, batch, device="cpu") for batch in batches]


@pytest.mark.parametrize("dtype", [None, torch.int64], ids=str)
@pytest.mark.parametrize("value", [7, np.uint8(7), 7.0], ids=repr)
def test_padding_has_the_type_of_its_field(value, dtype):
    """Would catch a blank and values of two types, which stack in training and not beside padding."""
    *_, last = _evaluated([value], Field("x", dtype=dtype, entry="x"))
    assert last["x"].tolist() == [7, 7, 0]
    assert last["x"].dtype == (dtype or torch.float32)


def test_batches_without_an_item_and_in_shared_memory():
    """Would catch an empty list that has no item's shape, and items that have no room in the slots."""
    field = RaggedField("x", (2000, 4), entry="x")
    assert (_evaluated([[]], field)[0]["x"] == 0).all()
    items = np.float32(np.random.default_rng(0).random((2000, 4)))
    found = _evaluated([items, []], field, num_workers=1)
    assert torch.equal(found[0]["x"][2], torch.from_numpy(items))
    assert Reader(Table(), [field], EvalRows(5, Share(0, 1, 3))).most_bytes == 3 * items.nbytes


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            RaggedField("x", (5, 4), entry="x"),
            np.ones((2, 1)),
            r"x: row 0 has items \[2, 1\], which must be \[n, \*\[4\]\]",
        ),
        (RaggedField("x", (5, 4), entry="x"), 1.0, r"x: row 0 has items \[\], which must be"),
        (Field("x"), None, "the field x reads no values: give it an entry, or override read or collate"),
        (Field("x", (3,), entry="x"), np.ones(2), r"the field x made \[3, 2\] on cpu, not \[3, 3\] on cpu"),
        (
            Derived("y", Field("x", (3,), entry="x"), lambda x: x[:, : 2 - int(x.sum() > 0)]),
            np.ones(3),
            r"the field y made \[3, 1\] on cpu, not \[3, 2\] on cpu",
        ),
    ],
)
def test_values_that_do_not_fit_a_field(field, value, message):
    """Would catch items that broadcast, and a shape that a tensor-parallel rank waits for in vain."""
    with pytest.raises(UserError, match=message):
        _evaluated([value], field)


def test_a_derived_field_has_the_shape_of_its_function():
    """Would catch the other field's shape, by which ranks that do not load receive it; and its own."""
    of = ImageField("x", IMAGE, AUGMENT)
    field = Derived("sum", of, lambda pixels: pixels.sum(1))
    assert (field.shape, field.resized(8).shape, Derived("same", of).shape) == ((16, 20), (8, 8), of.shape)
    with pytest.raises(UserError, match="the field b is derived from sum, which is itself: derive it from x"):
        Derived("b", field)


def test_an_entry_is_read_once_for_all_fields_of_it():
    """Would catch a file that each field reads for itself."""
    table = Table(1.0)
    [*loader_of(table, [Field("x", entry="x"), Field("y", entry="x")], EvalRows(5, Share(0, 1, 5)))]
    assert table.reads == 5


@pytest.mark.parametrize("options", [{}, {"mix": MIX}, {"multi_label": True}], ids=str)
def test_examples_of_labels_have_their_fields_shape(options):
    """Would catch class numbers where a benchmark's loss takes soft targets."""
    field = LabelField("targets", 5, **options)
    example = field.example(3, torch.bfloat16, torch.device("cpu"))
    assert (example.shape, example.dtype) == ((3, *field.shape), field.dtype)
