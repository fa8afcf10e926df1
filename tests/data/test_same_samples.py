"""One data set in several forms: the same samples in the same order with the same draws, whoever reads them."""

from __future__ import annotations

import itertools
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise import cover
from PIL import Image
from tables import write_tables

from ds_vit.data import AugmentConfig, ImageConfig, MixConfig, SampleOrder, Share, Source, open_source, train_loader
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
IMAGE = ImageConfig(img_size=(16, 20))
EVERYTHING = AugmentConfig(aa="rand-m9-mstd0.5-inc1", reprob=0.5)
SHARES = (Share(0, 1, 6), Share(1, 2, 1, 3))


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> Path:
    """JPEG and PNG files in three classes, with names that sort otherwise as text, in every form."""
    root = tmp_path_factory.mktemp("forms")
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        kind = ("jpg", "PNG")[number % 2]
        path = root / "folder" / "train" / f"class{9 + number % 3}" / f"image.{number}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (18 + number % 5, 22, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    (root / "tar").mkdir()
    with tarfile.open(root / "tar" / "train.tar", "w") as tar:
        tar.add(root / "folder" / "train", arcname=".")
    made = make_shards(str(root / "folder"), str(root / "shards"), Packing(7), workers=1, line=Line(None))
    assert [split for split, _ in made] == ["train"]
    folder = open_source("", str(root / "folder"), "train")
    write_tables(root / "arrow" / "train", folder, "arrow")
    write_tables(root / "parquet" / "train", folder, "parquet")
    return root


def _open(forms: Path, form: str) -> Source:
    dataset, data_dir = FORMS[form]
    return open_source(dataset, data_dir.format(forms), "train")


def _load(source: Source, workers: int, start: int, share: Share) -> list:
    order = SampleOrder(len(source), 6, seed=3)
    options = {"order": order, "share": share, "image": IMAGE, "augment": EVERYTHING, "mix": MixConfig(mixup=0.8)}
    return list(train_loader(source, start_step=start, stop_step=6, num_workers=workers, **options))


@pytest.fixture(scope="module")
def by_key(forms) -> dict[int, tuple[bytes, bytes, int, int]]:
    """Of each sample key of six steps of the folder: pixels, boxes to erase, label, number."""
    found = {}
    for batch in _load(_open(forms, "folder"), 0, 0, SHARES[0]):
        for row, key in enumerate(batch.keys.tolist()):
            found[key] = _sample(batch, row)
    return found


def _sample(batch, row: int) -> tuple[bytes, bytes, int, int]:
    images, erase = batch.images[row].numpy().tobytes(), batch.erase[row].numpy().tobytes()
    return images, erase, batch.targets[row].item(), batch.indices[row].item()


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_folder(forms, form):
    """Would catch another numbering, class or pixel, or a run that cannot go on from one form in another."""
    source, folder = _open(forms, form), _open(forms, "folder")
    assert source.class_names == folder.class_names == ("class9", "class10", "class11")
    assert [source.target(n) for n in range(NUM_IMAGES)] == [folder.target(n) for n in range(NUM_IMAGES)]
    assert [source.encoded(n) for n in range(NUM_IMAGES)] == [folder.encoded(n) for n in range(NUM_IMAGES)]
    assert source.fingerprint == folder.fingerprint


CASES = [
    {"form": form, "workers": workers, "start": start, "share": share}
    for form, workers, start, share in itertools.product(FORMS, (0, 1, 4), (0, 5), (0, 1))
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("case", cover(CASES), ids=lambda case: "-".join(map(str, case.values())))
def test_samples_are_the_same_whoever_reads_them(forms, by_key, case):
    """Would catch order, draw or label that depends on the form of the data, workers, the rank or a resume."""
    share = SHARES[case["share"]]
    batches = _load(_open(forms, case["form"]), case["workers"], case["start"], share)
    assert len(batches) == (6 - case["start"]) * share.accumulation
    order = SampleOrder(NUM_IMAGES, 6, seed=3)
    for number, batch in enumerate(batches):
        step, micro_index = divmod(number, share.accumulation)
        indices, keys = order.rows(case["start"] + step, share.rows(micro_index))
        assert batch.keys[: batch.num_rows].tolist() == keys.tolist()
        assert batch.indices[: batch.num_rows].tolist() == indices.tolist()
        assert [_sample(batch, row) for row in range(len(batch.keys))] == [by_key[key] for key in batch.keys.tolist()]


def test_the_comparison_can_fail(forms, by_key):
    """Would catch a comparison of nothing."""
    assert len(by_key) == len({sample[0] for sample in by_key.values()}) == 36
    assert len({sample[3] for sample in by_key.values()}) > 20
    assert torch.is_tensor(_load(_open(forms, "tar"), 0, 0, SHARES[1])[0].images)
    other = _load(_open(forms, "folder"), 0, 0, SHARES[0])[0]
    assert _sample(other, 0) != by_key[other.keys[1].item()]
