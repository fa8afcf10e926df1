"""Several sources with weights: shares, order and keys as pure functions, and classes by name."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from picture_folders import made
from PIL import Image
from shards import write_shard

from ds_vit.config.parser import from_values
from ds_vit.data.sampler import SampleOrder
from ds_vit.data.sources.combined import mixed
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.training.resolve.data import _open_sources

MIXTURE = ((30, 49), (40, 21))  # images, rows of an epoch


def _epoch(order: SampleOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    indices, keys = zip(*(order.rows(step, range(order.global_batch)) for step in steps), strict=True)
    return np.concatenate(indices), np.concatenate(keys)


def test_each_source_gets_its_share_and_is_gone_through_whole():
    """Would catch a share that drifts, and images that come again before others have come at all."""
    order = SampleOrder(70, 7, 5, 0, MIXTURE)
    seen: Counter[int] = Counter()
    for epoch in range(8):
        indices, keys = _epoch(order, epoch)
        assert len(set(keys.tolist())) == 70
        assert Counter((indices >= 30).tolist()) == {False: 49, True: 21}
        seen.update(indices.tolist())
    for first, (images, rows) in zip((0, 30), MIXTURE, strict=True):
        assert {seen[n] for n in range(first, first + images)} == {8 * rows // images, -(-8 * rows // images)}


def test_copies_of_a_sample_have_keys_of_their_own():
    """Would catch repeated augmentation whose copies are alike, in a source that comes twice per epoch as well."""
    order = SampleOrder(70, 10, 5, 2, ((10, 60), (60, 10)))
    for epoch in range(3):
        indices, keys = _epoch(order, epoch)
        assert len(set(keys.tolist())) == 70
        assert all(count % 2 == 0 for count in Counter(indices.tolist()).values())


def test_any_step_of_14_million_samples_is_at_hand():
    """Would catch an order that is worked through from its beginning, and a mixture where there should be none."""
    equal = SampleOrder(70, 7, 5, 0, ((30, 30), (40, 40)))
    assert sorted(_epoch(equal, 1)[0].tolist()) == list(range(70))
    for mixture in ((), ((13_000_000, 9_800_000), (1_000_000, 4_200_000))):
        order = SampleOrder(14_000_000, 4096, 0, 0, mixture)
        indices, keys = order.rows(90 * order.steps_per_epoch + 17, range(256))
        assert len(np.unique(keys)) == 256
        assert indices.max() < 14_000_000


def _folder(root: Path, classes: str, count: int, splits: tuple[str, ...] = ("train", "val")) -> Path:
    for split, name, number in itertools.product(splits, classes, range(count)):
        path = made(root / split / name / f"{number}.png")
        Image.new("RGB", (8, 8), (ord(name), number, len(str(root)))).save(path)
    return root


def _config(*folders: Path, **more: object):
    values = {"deepspeed_config": "x.json", "data_dir": [str(folder) for folder in folders], **more}
    return from_values(values)


def test_the_only_validation_split_has_the_numbers_of_training(tmp_path):
    """Would catch validation labels counted over the classes of the one folder that has any."""
    first = _folder(tmp_path / "a", "abc", 3, ("train",))
    second = _folder(tmp_path / "second", "bc", 2)
    _, val, _ = _open_sources(_config(first, second))
    assert val.class_names == ("a", "b", "c")
    assert [val.target(number) for number in range(len(val))] == [1, 1, 2, 2]


def test_folders_are_mixed_and_classes_matched_by_name(tmp_path):
    """Would catch a class number that means another class in the second folder, or a split that is not mixed."""
    first, second = _folder(tmp_path / "a", "abc", 3), _folder(tmp_path / "second", "bc", 2, ("train",))
    config = _config(first, second, data_weights=(3, 1))
    train, val, _ = _open_sources(config)
    assert (len(train), train.class_names, train.mixture) == (13, ("a", "b", "c"), ((9, 10), (4, 3)))
    for number in range(13):
        assert train.image(number).getpixel((0, 0))[0] == ord("abc"[train.target(number)])
    assert [train.target(number) for number in range(9, 13)] == [1, 1, 2, 2]
    assert len(val) == 9
    assert not val.mixture
    plain, _, _ = _open_sources(_config(first, second))
    assert not plain.mixture
    assert len({train.fingerprint, plain.fingerprint, _open_sources(_config(first))[0].fingerprint}) == 3
    other, _, _ = _open_sources(_config(first, second, data_weights=(1, 1)))
    assert other.fingerprint != train.fingerprint
    again, _, _ = _open_sources(_config(first, second, data_weights=(6, 2)))
    assert again.fingerprint == train.fingerprint
    rest, held, _ = _open_sources(_config(first, second, val_fraction=0.34))
    assert (len(rest), len(held)) == (8, 5)


def test_kinds_are_mixed(tmp_path):
    """Would catch shards that cannot stand beside a folder."""
    folder = _folder(tmp_path / "a", "12", 3)
    files = {"x.png": (folder / "train" / "1" / "0.png").read_bytes(), "x.cls": b"2"}
    write_shard(tmp_path / "s" / "train.tar", files)
    (tmp_path / "s" / "classes.json").write_text('["0", "1", "2"]')
    with pytest.raises(UserError, match=r"has 1 classes that are not among the 2 of the first --data-dir: 0"):
        _open_sources(_config(folder, f"wds/{tmp_path}/s"))
    (tmp_path / "s" / "classes.json").write_text('["2", "1"]')
    write_shard(tmp_path / "s" / "train.tar", {**files, "x.cls": b"0"})
    train, _, _ = _open_sources(_config(folder, f"wds/{tmp_path}/s"))
    assert (len(train), train.target(6)) == (7, 1)


def test_flags_that_cannot_be(tmp_path):
    """Would catch weights without effect, too few of them, or one that is nothing."""
    folder = str(_folder(tmp_path / "a", "ab", 1))
    with pytest.raises(UserError, match="--data-weights has 1 numbers for the 2 folders"):
        _config(folder, folder, data_weights=(1,))
    with pytest.raises(UserError, match=r"--data-weights .*with one --data-dir"):
        _config(folder, data_weights=(1,))
    assert _config(folder).data_dir == folder  # a name stays a name in config.yaml
    with pytest.raises(UserError, match="--data-weights must be above 0 and at most 1,000,000,000, not 1 0"):
        _config(folder, folder, data_weights=(1, 0))
    source = open_source("", folder, "train")
    with pytest.raises(UserError, match="--data-weights 1 999: of 4 rows per epoch, source 1 would get none"):
        mixed([source, source], (1, 999))
