"""--exif-rotation: files that EXIF asks viewers to turn, in all eight ways and by every way to decode."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from curves import read_rows, train_in
from micro_batches import fields_of, load, loader_of
from picture_folders import CPU, TINY, made, smooth_photo
from PIL import Image, PngImagePlugin
from runs import resolved

from ds_vit.api import export, predict
from ds_vit.cli import main
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.decode import Jpeg, open_image
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import as_source, open_source
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tools.predict import embed

UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}
"""By EXIF's orientation: how the stored pixels [H, W, 3] are turned (CIPA DC-008, section 4.6.4)."""
KINDS = {
    "jpeg": ("jpeg", {"quality": 95}),
    "4:4:4": ("jpeg", {"subsampling": "4:4:4"}),
    "progressive": ("jpeg", {"progressive": True}),
    "cmyk": ("jpeg", {"mode": "CMYK"}),
    "xmp": ("jpeg", {}),
    "mpo": ("mpo", {}),
    "png": ("png", {}),
    "late png": ("png", {}),
    "webp": ("webp", {"lossless": True}),
    "16 bits": ("png", {"mode": "I;16"}),
}
_XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def _exif(turn: int, *, damaged: bool = False) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = exif.tobytes()
    return data.replace(b"\x01\x12\x00\x03", b"\x01\x12\x00\xff") if damaged else data


def _file(turn: int, kind: str = "jpeg", seed: int = 0, **more: object) -> bytes:
    form, options = KINDS[kind]
    options = {**options, **more}
    image, mode, out = smooth_photo(40 + seed, 52, seed), options.pop("mode", "RGB"), io.BytesIO()
    if kind == "xmp":
        options["xmp"] = _XMP.format(turn).encode()
    elif kind != "late png":
        options.setdefault("exif", _exif(turn))
    image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257) if mode[0] == "I" else image
    (image if mode[0] == "I" else image.convert(mode)).save(out, form, **options)
    if kind != "late png":
        return out.getvalue()
    end = io.BytesIO()  # EXIF behind the pixels, as the format allows
    PngImagePlugin.putchunk(end, b"eXIf", _exif(turn).removeprefix(b"Exif\0\0"))
    return out.getvalue()[:-12] + end.getvalue() + out.getvalue()[-12:]


def _whole(image: Image.Image | Jpeg) -> np.ndarray:
    if isinstance(image, Jpeg) and image.fast:
        return image.scaled((0, 0, image.height, image.width), (image.height, image.width))[0].copy()
    return np.asarray(image.image() if isinstance(image, Jpeg) else image)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turn", UPRIGHT)
def test_pixels_are_those_of_the_file_turned_beforehand(kind, turn):
    """Would catch a mirror for a turn, EXIF that only some formats have read, and a file turned without the flag."""
    data, stored = _file(turn, kind), np.asarray(Image.open(io.BytesIO(_file(1, kind))).convert("RGB"))
    if kind == "16 bits":
        stored = np.asarray(smooth_photo(40, 52, 0).convert("L").convert("RGB"))
    for how in ("exact", "fast"):
        opened = open_image(data, "", how, exif_rotation=True)
        assert turn == 1 or isinstance(opened, Image.Image), "Pillow decodes what is turned"
        if turn > 1 or how == "exact":
            assert np.array_equal(_whole(opened), UPRIGHT[turn](stored)), how
    assert np.array_equal(_whole(open_image(data, "")), stored)


@pytest.mark.parametrize("turn", UPRIGHT)
def test_pillow_turns_tiff_files_itself(turn):
    """Would catch a TIFF file that is turned twice, or that is counted as ignored."""
    out, stored = io.BytesIO(), smooth_photo()
    stored.save(out, "tiff", exif=_exif(turn))
    for exif_rotation in (False, True):
        found = open_image(out.getvalue(), "", exif_rotation=exif_rotation)
        assert np.array_equal(_whole(found), UPRIGHT[turn](np.asarray(stored)))


@pytest.mark.parametrize("exif", [_exif(6, damaged=True), b"Exif\0\0nothing", _exif(0), _exif(9)])
def test_damaged_exif_turns_nothing(exif):
    """Would catch a sound image that is lost to its EXIF part."""
    data = _file(1, exif=exif)
    for how in ("exact", "fast"):
        assert np.array_equal(_whole(open_image(data, "", how, exif_rotation=True)), _whole(open_image(data, "", how)))


# ---- loaders and sources ---------------------------------------------------------------------------------------------

IMAGE = ImageConfig((24, 32), exif_rotation=True)
_PAIRS = [(turn, kind) for turn in UPRIGHT for kind in ("jpeg", "png")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Files that EXIF turns, and PNG files of the same pixels turned beforehand."""
    root = tmp_path_factory.mktemp("photos")
    for number, (turn, kind) in enumerate(_PAIRS):
        name, data = f"{'ab'[number % 2]}/{number:02}.{kind}", _file(turn, kind, number)
        made(root / "turned" / "train" / name).write_bytes(data)
        stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        upright = Image.fromarray(np.ascontiguousarray(UPRIGHT[turn](stored)))
        upright.save(made(root / "upright" / "train" / name), "png")
    return root / "turned", root / "upright"


def _pixels(source: Source, augment: AugmentConfig, workers: int = 0, **options: object) -> torch.Tensor:
    options = {"image": IMAGE, "mix": MixConfig(mixup=0.8), "augment": augment, "num_workers": workers, **options}
    return load(source, Share(0, 1, 4, 2), stop=2, **options).tensors()["images"]


@pytest.mark.parametrize(
    ("augment", "workers"),
    [
        (AugmentConfig(aa="rand-m9-mstd0.5-inc1"), 0),
        (AugmentConfig(), 1),
        (AugmentConfig(no_aug=True), 0),
        (AugmentConfig(train_crop_mode="rkrc"), 0),
        (AugmentConfig(augment_on="device"), 0),
    ],
    ids=str,
)
def test_training_on_turned_files_is_training_on_upright_ones(folders, augment, workers):
    """Would catch a crop that is drawn for the stored size, and a way of augmentation that reads around the flag."""
    turned, upright = (open_source("", str(folder), "train") for folder in folders)
    assert torch.equal(_pixels(turned, augment, workers), _pixels(upright, augment))
    off = ImageConfig(IMAGE.img_size)
    assert not torch.equal(_pixels(turned, augment, image=off), _pixels(upright, augment))


@pytest.mark.parametrize("augment_on", ["cpu", "device"])
@pytest.mark.parametrize("on_bad_image", ["error", "skip"])
def test_fast_decoding_agrees(folders, augment_on, on_bad_image):
    """Would catch a file that torchcodec turns against the setting, or once more; and simplejpeg, which never does."""
    pytest.importorskip("simplejpeg")
    if augment_on == "device":
        pytest.importorskip("torchcodec.decoders")
    fast, exact = (AugmentConfig(decode=how, augment_on=augment_on) for how in ("fast", "exact"))
    for folder, image in ((folders[0], IMAGE), (folders[0], ImageConfig(IMAGE.img_size)), (folders[1], IMAGE)):
        source = open_source("", str(folder), "train")
        found, expected = (_pixels(source, how, image=image, on_bad_image=on_bad_image) for how in (fast, exact))
        assert (found - expected).abs().mean() < 0.05, "two grey levels are 0.03"
    turned, upright = (open_source("", str(folder), "train") for folder in folders)
    assert (_pixels(turned, fast) - _pixels(upright, exact)).abs().mean() < 0.05


def test_evaluation_of_files_and_of_a_program(folders):
    """Would catch a source that decodes by itself and whose images stay turned."""
    turned, upright = (open_source("", str(folder), "train") for folder in folders)
    program = as_source([(Image.open(turned.describe(n)), turned.target(n)) for n in range(len(turned))])
    rows = EvalRows(16, Share(0, 1, 16))
    loaders = (loader_of(source, fields_of(source, IMAGE), rows) for source in (turned, program, upright))
    found, same, expected = (next(iter(loader)).packed["images"].pixels for loader in loaders)
    assert torch.equal(found, expected)
    assert torch.equal(same, expected)


# ---- what is said, and shards ----------------------------------------------------------------------------------------


def test_the_start_and_the_doctor_count_them_and_name_the_flag(folders, capsys):
    """Would catch photos that are turned in silence, and upright ones that are counted."""
    argv = [*TINY, "--deepspeed_config", CPU, "--val-split", "", "--data-dir"]
    said = "14 of 16 files of train drawn by key have an EXIF orientation other than 1"
    ignored = f"{said}, which is ignored; --exif-rotation on turns them upright"
    assert ignored in resolved([*argv, folders[0]]).notes
    assert said in resolved([*argv, folders[0], "--exif-rotation", "on"]).notes
    assert not [note for note in resolved([*argv, folders[1]]).notes if "EXIF" in note]
    assert main(["doctor", "--images", str(folders[0])]) == 0
    said = capsys.readouterr().out
    assert "14 are stored turned" in said
    assert "--exif-rotation on" in said
    assert main(["doctor", "--images", str(folders[1])]) == 0
    assert "all are sound" in capsys.readouterr().out


def test_shards_keep_the_orientation(folders, tmp_path):
    """Would catch a file that is encoded anew without the tag, which no flag can turn again."""
    words = ["shards", str(folders[0]), str(tmp_path), "--resize", "30", "--quality", "95"]
    assert main(words) == 0
    turned, packed = open_source("", str(folders[0]), "train"), open_source("wds/", str(tmp_path), "train")
    for number in range(len(turned)):
        turn, _ = _PAIRS[int(Path(turned.path(number)).stem)]
        image = open_image(packed.entry("image", number), packed.describe(number), exif_rotation=True)
        found, stored = _whole(image), turned.image(number)
        height, width = stored.size[::-1] if turn < 5 else stored.size
        assert found.shape[:2] == (round(30 * height / min(stored.size)), round(30 * width / min(stored.size)))
        expected = Image.fromarray(np.ascontiguousarray(UPRIGHT[turn](np.asarray(stored)))).resize(found.shape[1::-1])
        assert np.abs(found - np.asarray(expected).astype(float)).mean() < 10, "another turn is 40 off"


# ---- a whole run, and what reads it ----------------------------------------------------------------------------------


def evaluate_on_rank(run: str) -> dict[str, object]:
    """On a rank: what `ds-vit eval RUN` finds."""
    from ds_vit.api import evaluate

    return dict(evaluate(run))


def test_a_run_and_what_reads_it_follow_the_setting(ranks, folders, tmp_path):
    """Would catch training, evaluation, a picture, predict, embed or eval that reads photos in another way."""
    argv = [*TINY, "--deepspeed_config", CPU, "--val-split", "train", "--eval-interval", "1"]
    runs = [tmp_path / "turned", tmp_path / "upright"]
    for run, folder, more in zip(runs, folders, (["--exif-rotation", "on"], []), strict=True):
        train_in(ranks, 1, [*argv, "--data-dir", str(folder), "--output", str(run), *more])
    figures = [[(row["kind"], row["loss"]) for row in read_rows(run) if "loss" in row] for run in runs]
    assert figures[0] == figures[1]
    for picture in ("augmented.png", "mistakes.png"):
        assert (runs[0] / picture).read_bytes() == (runs[1] / picture).read_bytes(), picture
    evaluations = [ranks.run(1, evaluate_on_rank, str(run))[0] for run in runs]
    assert [evaluations[0][name] for name in ("top1", "loss")] == [evaluations[1][name] for name in ("top1", "loss")]

    files = [[str(path) for path in sorted(folder.rglob("*.*g"))] for folder in folders]
    features = [embed(run, of_run, device="cpu")["features"] for run, of_run in zip(runs, files, strict=True)]
    assert np.array_equal(*features)
    on, upright, off = (
        [image["classes"] for image in predict(run, of_run, **how)["images"]]
        for run, of_run, how in (
            (runs[0], files[0], {}),
            (runs[1], files[1], {}),
            (runs[0], files[0], {"exif_rotation": False}),
        )
    )
    assert on == upright != off
    with pytest.raises(UserError, match="--exif-rotation upright is none of on, off"):
        predict(runs[0], files[0], exif_rotation="upright")
    config = (runs[0] / "config.yaml").read_text()
    assert "exif_rotation: 'on'\n" in config
    (runs[0] / "config.yaml").write_text(config.replace("exif_rotation: 'on'\n", ""))
    old = [image["classes"] for image in predict(runs[0], files[0])["images"]]
    assert old == off, "a run from before the flag"
    (runs[0] / "config.yaml").write_text(config)
    [note] = export(runs[0], "timm").notes
    assert note.startswith("--exif-rotation on: ")
    assert export(runs[1], "timm").notes == ()
