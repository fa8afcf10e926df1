"""One data set in several forms: the same samples in the same order with the same draws, whoever reads them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from picture_folders import made
from PIL import Image
from tables import write_tables

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.loader import train_loader
from ds_vit.data.sampler import SampleOrder, Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source
from ds_vit.monitoring.progress import Line
from ds_vit.tools.shards import Packing, make_shards

NUM_IMAGES = 26
FORMS = {
    "folder": ("", "{}/folder"),
    "tar": ("", "{}/tar"),
    "shards": ("wds/", "{}/shards"),
    "arrow": ("hfds/arrow", "{}"),
    "parquet": ("hfds/parquet", "{}"),
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Path:
    """JPEG and PNG files in three classes, with names that sort otherwise as text, in every form."""
    root = tmp_path_factory.mktemp("forms")
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        kind = ("jpg", "PNG")[number % 2]
        path = made(root / "folder" / "train" / f"class{9 + number % 3}" / f"image.{number}.{kind}")
        pixels = rng.integers(0, 256, (18 + number % 5, 22, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    (root / "tar").mkdir()
    with tarfile.open(root / "tar" / "train.tar", "w") as tar:
        tar.add(root / "folder" / "train", arcname=".")
    packed = make_shards(str(root / "folder"), str(root / "shards"), Packing(7), workers=1, line=Line(None))
    assert [split for split, _ in packed] == ["train"]
    folder = open_source("", str(root / "folder"), "train")
    write_tables(root / "arrow" / "train", folder, "arrow")
    write_tables(root / "parquet" / "train", folder, "parquet")
    return root


def _open(forms: Path, form: str) -> Source:
    dataset, data_dir = FORMS[form]
    return open_source(dataset, data_dir.format(forms), "train")


def _load(source: Source, workers: int) -> list:
    order = SampleOrder(len(source), 6, seed=3)
    options = {"order": order, "share": Share(0, 1, 6), "image": ImageConfig(img_size=(16, 20)), "stop_step": 6}
    augment = AugmentConfig(aa="rand-m9-mstd0.5-inc1", reprob=0.5)
    return list(train_loader(source, augment=augment, mix=MixConfig(mixup=0.8), num_workers=workers, **options))


def _samples(batch) -> list[tuple[bytes, bytes, int, int]]:
    """Pixels, boxes to erase, label and number of each row."""
    rows = zip(batch.images, batch.erase, batch.targets.tolist(), batch.indices.tolist(), strict=True)
    return [(image.numpy().tobytes(), erase.numpy().tobytes(), *of_row) for image, erase, *of_row in rows]


@pytest.fixture(scope="module")
def expected(forms) -> list[list[tuple[bytes, bytes, int, int]]]:
    """The samples of the folder, read without workers."""
    return [_samples(batch) for batch in _load(_open(forms, "folder"), 0)]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_folder_in_workers_too(forms, expected, form):
    """Would catch another numbering, class or pixel, and open files, offsets or mapped tables that no worker shares."""
    source, folder = _open(forms, form), _open(forms, "folder")
    assert source.class_names == folder.class_names == ("class9", "class10", "class11")
    assert [source.encoded(n) for n in range(NUM_IMAGES)] == [folder.encoded(n) for n in range(NUM_IMAGES)]
    assert source.fingerprint == folder.fingerprint, "a run of one form resumes on another"
    assert [_samples(batch) for batch in _load(source, 2)] == expected
    assert len({sample for batch in expected for sample in batch}) == 36  # else nothing was compared
