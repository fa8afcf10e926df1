"""Images with masks: files, pairs, labels, their errors, and one geometry for an image and its mask."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from micro_batches import Loaded, load
from PIL import Image
from plain_segmenter import blocks, write_split
from shards import write_shard

from ds_vit.cli import main
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.config.schema import RunConfig
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.masks import MaskField, ScaleCrop, SceneImages, crop_mask
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.listing import NoSuchSplit
from ds_vit.data.sources.masks import Labels, decode_mask, default_palette, size_of_mask
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.segmentation.task import Segmentation
from ds_vit.tasks.segmentation.windows import Windows

WHOLE = Share(0, 1, 4)
COLOURS = np.array([[250, 10, 10], [10, 240, 20], [20, 30, 230], [240, 240, 0], [0, 0, 0]], dtype=np.uint8)
LABELS = "index,name,colour\n7,road,#804080\n0,sky,#4682b4\n2,tree,#6b8e23\n"
IMAGE = ImageConfig((24, 32), mean=(0.5, 0.25, 0.0))
AUGMENT = AugmentConfig(vflip=0.5, color_jitter=0.0)


def mask_of(number: int, values: tuple[int, ...] = (0, 1, 2)) -> np.ndarray:
    """A mask of blocks of 8 x 8 pixels, in three sizes."""
    return blocks((40, 56 + 8 * (number % 3)), number, values=values, side=8)


def write(folder: Path, form: str = "{split}/{kind}", values: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Images whose grey is that of the classes of their masks."""
    for split, first in (("train", 0), ("val", 10)):
        write_split(folder, split, [mask_of(first + n, values) for n in range(5)], form, noise=0)
    return folder


def opened(folder: Path | str, split: str = "train", **flags: object) -> Source:
    return Segmentation.open_source(RunConfig(**{"num_classes": 3, **flags}), str(folder), split)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data")


def test_both_layouts_hold_the_same_samples(tmp_path, monkeypatch):
    """Would catch a layout that pairs otherwise, an identity of places or of decoded masks, and a lost synonym."""
    both = [write(tmp_path / "a"), write(tmp_path / "b" / "c", "{kind}/{split}")]
    one, other = (opened(folder, "training") for folder in both)
    for number in range(5):
        assert np.array_equal(one.entry("mask", number), mask_of(int(one.describe(number)[-5])))
        assert np.array_equal(one.entry("mask", number), other.entry("mask", number))
        assert one.target(number).tolist() == [1, 1, 1]
    monkeypatch.setattr("ds_vit.data.sources.masks.decode_mask", None)
    assert one.fingerprint == other.fingerprint
    for flags in ({"num_classes": 4}, {"ignore_index": 9}, {"reduce_zero_label": True}):
        assert opened(both[0], **flags).fingerprint != one.fingerprint


def _saved(mask: np.ndarray, kind: str, palette: bytes = b"", **options: object) -> bytes:
    file, image = io.BytesIO(), Image.fromarray(mask)
    if palette:
        image.putpalette(palette)
    image.save(file, kind, **options)
    return file.getvalue()


def _npy(mask: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, mask)
    return file.getvalue()


FILES = {
    "palette png of 2 bits": lambda mask: _saved(mask, "png", palette=COLOURS.tobytes(), bits=2),
    "16-bit png": lambda mask: _saved(mask.astype(np.uint16) * 300, "png"),
    "palette tiff": lambda mask: _saved(mask, "tiff", palette=COLOURS.tobytes(), compression="tiff_lzw"),
    "npy": lambda mask: _npy(mask.astype(np.int64) * 300),
}


@pytest.mark.parametrize("kind", FILES)
def test_each_kind_of_file_has_its_values_and_a_header_with_its_size(kind):
    """Would catch colours read for numbers, 16 bits scaled to 8, and a size for which the pixels are read."""
    mask = mask_of(1)
    data, factor = FILES[kind](mask), 300 if "16" in kind or kind == "npy" else 1
    labels = Labels(["a", "b"], [0, factor], [2 * factor], "")
    assert np.array_equal(labels.classes(decode_mask(data, "m"), "m"), np.array([0, 1, -1])[mask])
    cut = data if "tiff" in kind else data[: len(data) - 60]  # a TIFF header may lie at the end
    assert size_of_mask(io.BytesIO(cut), "m") == mask.shape


def test_the_palette_is_pascal_vocs():
    """Would catch swapped bits or channels: the colours of aeroplane, bicycle, person and tv monitor are published."""
    expected = [[0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128]]
    assert default_palette(256)[[0, 1, 2, 15, 20]].tolist() == expected


def test_labels_name_values_and_colours(tmp_path):
    """Would catch classes in the order of their values, and colours that no wrapper forwards."""
    data = write(tmp_path, values=(0, 2, 7, 255))
    (data / "labels.csv").write_text(LABELS)
    source = opened(data, "train[:60%]", num_classes=None)
    assert (source.class_names, len(source), source.multi_label) == (("road", "sky", "tree"), 3, True)
    assert source.entry("values", 0).tolist() == [7, 0, 2]
    assert source.entry("colours", 0).tolist() == [[0x80, 0x40, 0x80], [0x46, 0x82, 0xB4], [0x6B, 0x8E, 0x23]]
    raw = np.asarray(Image.open(source.describe(0).replace("images", "masks")))
    for value, number in {7: 0, 0: 1, 2: 2, 255: -1}.items():
        assert np.array_equal(source.entry("mask", 0) == number, raw == value)
    second = write(tmp_path / "second", values=(1, 2, 3))
    (second / "labels.csv").write_text("index,name,colour\n1,road,#000000\n2,sky,\n3,tree,\n")
    assert opened(second, num_classes=None).entry("colours", 0).tolist() == default_palette(4)[1:].tolist()
    (second / "labels.csv").unlink()
    reduced = opened(second, reduce_zero_label=True)
    assert (reduced.class_names[0], reduced.entry("values", 0).tolist()) == ("class 0", [1, 2, 3])


def _add(path: str, pixels: np.ndarray | bytes | str) -> Callable[[Path], None]:
    def add(data: Path) -> None:
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(pixels, np.ndarray):
            return Image.fromarray(pixels).save(data / path)
        (data / path).write_bytes(pixels.encode() if isinstance(pixels, str) else pixels)

    return add


SMALL = np.full((8, 8), 9, dtype=np.uint8)
ERRORS: dict[str, tuple[Callable[[Path], object], dict[str, object], str]] = {
    "no image": (_add("train/masks/z.npy", b""), {}, r"^1 of 6 files of \S+masks have no partner in \S+images:"),
    "two masks": (_add("train/masks/n.2.tif", SMALL), {}, r"masks: n.2.png and n.2.tif have one path without e"),
    "value": (_add("train/masks/n.0.png", SMALL), {}, r"n.0.png: 64 of 64 pixels have values that .* 9 \(64\); "
              r"--num-classes 3 stands for 0 to 2: raise it, or pass --ignore-index VALUE$"),
    "negative": (_add("train/masks/n.0.png", _npy(np.full((2, 3), -1))), {}, r"n.0.png: 6 of 6 pixels .*: -1"),
    "listed value": (_add("labels.csv", "index,name\n0,a\n1,b\n"), {"num_classes": None}, "the 2 classes are those"),
    "colours": (_add("train/masks/n.0.png", COLOURS[mask_of(0)]), {}, r"n.0.png holds uint8 values"),
    "floats": (_add("train/masks/n.0.png", _npy(np.ones((2, 3)))), {}, r"holds float64 values in the shape \[2, 3\]; "),
    "no data": (lambda data: None, {"dataset": "digits"}, "^--dataset digits has no masks: pass --dataset scenes, h"),
    "nothing says": (lambda data: None, {"num_classes": None}, r"no labels.csv, .*: write one .* or pass --num-"),
    "listed": (_add("labels.csv", LABELS), {"ignore_index": 7}, r"value 7 is a class, .* --ignore-index -1 if"),
    "many": (lambda data: None, {"num_classes": 40000, "ignore_index": -1}, r"at most 32,767 classes, not 40,000$"),
    "empty": (_add("labels.csv", ""), {}, r"labels.csv must have the header 'index,name' or .*, then a row per class$"),
    "large": (_add("labels.csv", "index,name\n70000,a\n"), {}, r"line 2: a class has the pixel value \(0 to 65535\), "),
    "twice": (_add("labels.csv", "index,name\n1,a\n1,b\n"), {}, r"line 3: another row has the index 1 or the name b$"),
    "colour": (_add("labels.csv", "index,name,colour\n1,a,red\n"), {}, r"line 2: .* colour #rrggbb, not '1,a,red'$"),
    "no images": (lambda data: [file.unlink() for file in data.glob("train/images/**/*.png")], {}, "holds no images"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_file_the_numbers_and_the_way_out(data, case):
    """Would catch a pair, a table or a value that is silently dropped."""
    change, flags, message = ERRORS[case]
    change(data)
    with pytest.raises(UserError, match=message):
        [opened(data, **flags).entry("mask", number) for number in range(5)]


def test_a_folder_without_the_split_is_refused(data):
    """Would catch a missing split that callers cannot tell from other errors."""
    with pytest.raises(NoSuchSplit, match=r"has no test/images with test/masks .* train, val. The layouts are DIR/tra"):
        opened(data, "test")
    with pytest.raises(UserError, match=r"^scenes has no split 'test'; it has train and validation$"):
        opened("", "test", dataset="scenes")


def _fields(of_mask: AugmentConfig = AUGMENT) -> list:
    images, followed = (SceneImages("images", IMAGE, augment, (0.5, 2.0)) for augment in (AUGMENT, of_mask))
    return [images, MaskField("masks", followed)]


def _load(data: Path, fields: list, share: Share = WHOLE, **options: object) -> Loaded:
    return load(opened(data), share, image=IMAGE, augment=AUGMENT, fields=fields, stop=12, **options)


def _agreement(batches: Loaded) -> tuple[float, float]:
    """Of pixels around which the mask does not change, those with its class's colour; the share of padding."""
    right, padding = [], []
    colours = np.array([*([grey] * 3 for grey in (0, 40, 80)), [128, 64, 0]])
    for batch in batches:
        for pixels, mask in zip(batch.packed["images"].pixels, batch.packed["masks"].numpy(), strict=True):
            windows = np.lib.stride_tricks.sliding_window_view(mask, (3, 3)).reshape(22, 30, 9)
            same, inner = (windows == windows[..., :1]).all(-1), pixels.permute(1, 2, 0).numpy()[1:-1, 1:-1]
            right.append((inner[same] == colours[windows[same][:, 0]]).all(-1).mean())
            padding.append((mask < 0).mean())
    return float(np.mean(right)), float(np.mean(padding))


def test_image_and_mask_have_one_geometry_on_every_rank(data):
    """Would catch a crop, flip or padding of one of the two, planted as a missing flip, and draws by layout."""
    batches = _load(data, _fields())
    right, padding = _agreement(batches)
    assert (right, 0.03 < padding < 0.5) == (1.0, True)
    assert _agreement(_load(data, _fields(AUGMENT.model_copy(update={"hflip": 0.0}))))[0] < 0.9
    expected = batches.tensors()
    assert expected["masks"].dtype == torch.int64
    for share, workers in ((Share(0, 2, 2), 0), (Share(0, 1, 2, 2), 2)):
        found = _load(data, _fields(), share, num_workers=workers).tensors()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_mask_takes_the_nearest_pixel():
    """Would catch a bilinear mask (planted), a centre that is off by half a pixel, and a wrong range of scales."""
    crop, heights = ScaleCrop((24, 32), (0.5, 2.0), (0.0, 0.0, 0.0)), []
    for key in range(60):
        mask = (mask_of(key) * 2).astype(np.int16)
        box, _ = crop.draw(key, mask.shape)
        top, left, height, width = box
        heights.append(height * max(24 / mask.shape[0], 32 / mask.shape[1]) / 24)
        found = crop_mask(mask, box, (24, 32))
        rows, columns = top + (np.arange(24) + 0.5) * height / 24, left + (np.arange(32) + 0.5) * width / 32
        places = np.ix_(*(np.floor(of).astype(int) + 100 for of in (rows, columns)))
        assert np.array_equal(found, np.pad(mask, 100, constant_values=-1)[places])
    assert 0.5 <= min(heights) < 0.6 < 1.8 < max(heights) <= 2.05
    assert not {1, 3} & {*np.unique(found).tolist()}
    planted = Image.fromarray(mask_of(0) * 2).resize((32, 24), Image.Resampling.BILINEAR)
    assert {1, 3} & {*np.unique(planted).tolist()}


def test_a_damaged_mask_is_skipped_and_another_size_is_an_error(data):
    """Would catch a damaged mask that ends the run in spite of skip, and a mask that is stretched to its image."""
    path = data / "train/masks/n.2.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ImageDecodeError, match=r"masks/n.2.png: the image cannot be decoded"):
        _load(data, _fields())
    assert _load(data, _fields(), on_bad_image="skip").num_skipped
    Image.fromarray(mask_of(2).T.copy()).save(path)
    for fields in (_fields(), [Windows("images", IMAGE, None)]):
        with pytest.raises(UserError, match=r"n.2.png: the image has 40x72 .* and its mask 72x40; .*--exif-rot"):
            _load(data, fields)


@pytest.mark.parametrize("form", ["parquet", "wds"])
@pytest.mark.parametrize("name", ["label", "other"])
def test_rows_and_shards_with_masks(tmp_path, form, name):
    """Would catch the image read for its mask or named in its errors, masks of other samples or reported as not read,
    and labels taken for classes."""
    masks, images = [mask_of(number) for number in range(3)], [_saved(SMALL, "png")] * 5
    files = [*(_saved(mask, "png") for mask in masks), b"damaged"]
    if form == "parquet":
        datasets = pytest.importorskip("datasets")
        columns = {"image": images, name: [*files, None]}
        rows = {column: [{"bytes": file, "path": None} for file in of] for column, of in columns.items()}
        table = datasets.Dataset.from_dict(rows).cast(datasets.Features(dict.fromkeys(rows, datasets.Image())))
        table.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    else:
        first = {f"{number}.{name}.png": file for number, file in enumerate(files)}
        write_shard(tmp_path / "train-0.tar", first | {f"{number}.png": file for number, file in enumerate(images)})
    if name == "other":
        with pytest.raises(UserError, match=r"has the images image, other and none named mask, .*: (rename_|name the)"):
            opened(f"{form}/{tmp_path}")
        return
    given = (("", f"{form}/{tmp_path}"), (f"{form}/{tmp_path}", ""), (tmp_path, form))  # an index is read, loaded
    for source in (opened(folder, dataset=dataset) for folder, dataset in given):
        assert source.left_out == {}
        for number, mask in enumerate(masks):
            assert np.array_equal(source.entry("mask", number), mask)
            assert source.entry("mask_size", number) == mask.shape
    for number, reason in ((3, "not an image that Pillow knows"), (4, "its (row|sample) has no label")):
        with pytest.raises(ImageDecodeError, match=rf"(\[{number}\]|:{number}.png)\[label\]: .* \({reason}\); "):
            source.entry("mask", number)


def test_doctor_checks_masks(data, capsys):
    """Would catch a pair, a size or a value that training would stop at."""
    (data / "labels.csv").write_text("index,name\n0,a\n1,b\n2,c\n")
    _add("train/images/z.png", SMALL)(data)
    _add("val/masks/n.0.png", SMALL[:4])(data)
    Image.fromarray(mask_of(2).T.copy()).save(data / "train/masks/n.2.png")
    (data / "train/masks/n.4.png").write_bytes(b"nothing")
    assert main(["doctor", "--images", f"{data}/."]) == 65
    said = capsys.readouterr().out
    for part in ("11 images in", "4 need attention", "images: 1 of 6 files of", "masks/n.4.png: not an image",
                 "train/masks/n.2.png: ", "40x72 pixels", "val/masks/n.0.png: 32 of 32 pixels"):  # fmt: skip
        assert part in said
