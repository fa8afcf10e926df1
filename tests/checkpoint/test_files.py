"""The format on disk, without an engine: other tools read it, and any damage to a file is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ds_vit.checkpoint.folder import (
    Damaged,
    checkpoints,
    commit,
    mark_best,
    marked,
    newest,
    open_checkpoint,
    partial_folder,
    prune,
    remove_leftovers,
)
from ds_vit.checkpoint.tensors import TensorSpec, TensorWriter, index_files, split_files

TENSORS = {
    "head.bias": torch.arange(5.0),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "blocks.0.weight": torch.randn(4, 3, 2),
    "index": torch.arange(6).reshape(2, 3),
}
SPECS = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in TENSORS.items()]


def write(parent: Path, step: int = 7, kinds=("model", "optimizer-exp_avg", "ema"), max_bytes=60, scale=1.0) -> Path:
    """A small checkpoint with sharded files."""
    folder = partial_folder(parent, step)
    folder.mkdir(parents=True)
    entries, texts = [], {"state.json": json.dumps({"step": step})}
    for kind in kinds:
        files = split_files(kind, SPECS, max_bytes)
        for name, specs in files.items():
            writer = TensorWriter(folder / name, specs)
            for spec in specs:
                writer.write(spec.name, TENSORS[spec.name] * scale)
            entries.append(writer.close())
        texts |= index_files({kind: files})
    return commit(parent, step, entries, texts)


def test_safetensors_reads_what_was_streamed(tmp_path):
    # Catches: a header, an offset or an alignment that is not the format's.
    writer = TensorWriter(tmp_path / "x.safetensors", SPECS)
    for spec in SPECS:
        writer.write(spec.name, TENSORS[spec.name])
    entry = writer.close()
    read = load_file(str(tmp_path / "x.safetensors"))
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) and read[name].dtype == TENSORS[name].dtype for name in TENSORS)
    assert entry.num_bytes == (tmp_path / "x.safetensors").stat().st_size
    digest = subprocess.run(["sha256sum", str(tmp_path / "x.safetensors")], capture_output=True, text=True, check=True)
    assert digest.stdout.split()[0] == entry.sha256


def test_a_writer_keeps_to_its_header(tmp_path):
    # Catches: values under another tensor's name.
    writer = TensorWriter(tmp_path / "x.safetensors", SPECS)
    with pytest.raises(ValueError, match="scalar"):
        writer.write("scalar", TENSORS["scalar"])
    with pytest.raises(ValueError, match=r"closed before head\.bias"):
        writer.close()
    writer.abandon()


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 200))
def test_split_files(sizes, max_bytes):
    # Catches: a tensor lost, doubled or moved, a file above the limit, an index that names another file, a name that is
    # read as a format.
    specs = [TensorSpec(f"t{i}", (size,)) for i, size in enumerate(sizes)]
    files = split_files("a{b}", specs, max_bytes)
    assert Counter(spec for part in files.values() for spec in part) == Counter(specs)
    assert all(list(part) == sorted(part, key=specs.index) for part in files.values())
    assert all(len(part) == 1 or sum(s.num_bytes for s in part) <= max_bytes for part in files.values())
    assert (list(files) == ["a{b}.safetensors"]) == (len(files) == 1)
    texts = index_files({"a{b}": files})
    assert bool(texts) == (len(files) > 1)
    for index in map(json.loads, texts.values()):
        assert set(index["weight_map"]) == {spec.name for spec in specs}
        assert index["metadata"]["total_size"] == 4 * sum(sizes)


def test_a_checkpoint_is_complete_when_it_has_its_name(tmp_path):
    # Catches: a file that is not in the manifest, a marker that is not set, a temporary name that stays.
    path = write(tmp_path)
    checkpoint, notes = newest(tmp_path)
    assert notes == []
    checkpoint.verify()
    assert checkpoint.path == path
    assert (checkpoint.step, checkpoint.kinds) == (7, ("ema", "model", "optimizer-exp_avg"))
    assert {p.name for p in path.iterdir()} == {*checkpoint.files, "manifest.json"}
    assert {p.name for p in tmp_path.iterdir()} == {"latest", path.name}
    with pytest.raises(ValueError, match="has no optimizer-exp_avg_sq; it has ema"):
        checkpoint.tensors("optimizer-exp_avg_sq")


KINDS = {
    "weights": "model-00003-of-*",
    "moments": "optimizer-exp_avg-00001-of-*",
    "average": "ema-00001-of-*",
    "index": "model.safetensors.index.json",
    "state": "state.json",
    "manifest": "manifest.json",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["truncated", "flipped", "deleted"])
def test_damage_to_each_kind_of_file(tmp_path, kind, how):
    # Catches: a damaged file that is accepted, a crash, a message without the file's name, another file that is damaged
    # where the one before it should be found.
    write(tmp_path, 7)
    newer = write(tmp_path, 8)
    (victim,) = newer.glob(KINDS[kind])
    data = bytearray(victim.read_bytes())
    data[len(data) - 3] ^= 4
    victim.write_bytes(data if how == "flipped" else data[:-5])
    if how == "deleted":
        victim.unlink()
    with pytest.raises(Damaged) as error:
        open_checkpoint(newer).verify()
    assert f"{newer.name}/{victim.name}" in str(error.value)
    words = {"deleted": "missing", "truncated": "bytes|JSON", "flipped": "checksum|JSON"}[how]
    assert any(word in str(error.value) for word in words.split("|"))
    checkpoint, _ = newest(tmp_path, skip=frozenset({newer.name}))
    assert checkpoint.step == 7
    checkpoint.verify()


def test_every_flipped_bit_is_found(tmp_path):
    # Catches: a part of a file that no checksum covers.
    path = write(tmp_path, 7, kinds=("model",), max_bytes=10**6)
    generator = np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for place in generator.choice(len(good), 25):
            data = bytearray(good)
            data[place] ^= 1 << int(generator.integers(8))
            file.write_bytes(data)
            with pytest.raises(Damaged, match=file.name):
                open_checkpoint(path).verify()
        file.write_bytes(good)
    open_checkpoint(path).verify()


@pytest.mark.parametrize("text", ["step-00000099\n", "", "nonsense/../..\n", None])
def test_latest_points_nowhere(tmp_path, text):
    # Catches: trust in `latest`.
    write(tmp_path, 7)
    write(tmp_path, 8)
    if text is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(text)
    checkpoint, notes = newest(tmp_path)
    assert checkpoint.step == 8
    assert len(notes) == 1
    assert "latest" in notes[0]
    assert "step-00000008" in notes[0]


def test_all_are_damaged(tmp_path):
    # Catches: the last candidate being used for want of a better one; an error where a run simply begins.
    assert newest(tmp_path / "checkpoints") == (None, [])
    for step in (7, 8):
        (write(tmp_path, step) / "state.json").unlink()
    checkpoint, notes = newest(tmp_path)
    assert checkpoint is None
    assert len(notes) == 2


def test_a_newer_format_is_refused(tmp_path):
    # Catches: a silent misreading of what a later release wrote.
    path = write(tmp_path)
    from ds_vit.checkpoint import folder

    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format"] = 2
    manifest.pop("sha256")
    manifest["sha256"] = folder._manifest_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="format 2"):
        open_checkpoint(path)


def test_keep_the_newest_and_the_best(tmp_path):
    # Catches: a best one that is removed, or a newest.
    for step in (1, 2, 3, 4):
        write(tmp_path, step, kinds=("model",))
    mark_best(tmp_path, "step-00000002")
    assert prune(tmp_path, 0) == []
    assert prune(tmp_path, 1) == ["step-00000003", "step-00000001"]
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000004", "step-00000002"]
    assert marked(tmp_path, "best") == "step-00000002"
    assert {p.name for p in tmp_path.iterdir()} == {"best", "latest", "step-00000002", "step-00000004"}


def test_files_with_names_of_checkpoints(tmp_path):
    # Catches: a file with the name of a checkpoint that blocks each save, or the start of a run; a rename onto a folder
    # that is there.
    (tmp_path / "step-00000007").write_text("no folder")
    assert newest(tmp_path) == (None, [])
    for scale in (1.0, 2.0):
        (tmp_path / ".step-00000007.old").write_text("no folder")
        write(tmp_path, scale=scale)
        assert newest(tmp_path)[0].tensors("ema")["head.bias"][1] == scale
        assert not list(tmp_path.glob(".*"))
    (tmp_path / ".step-00000008.partial").write_text("no folder")
    assert remove_leftovers(tmp_path) == [".step-00000008.partial"]
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "step-00000008").write_text("no folder")
    assert newest(tmp_path)[0].step == 7


def test_leftovers_of_killed_runs(tmp_path):
    # Catches: half a checkpoint that is taken for one, or that stays for ever.
    write(tmp_path, 7)
    shutil.copytree(tmp_path / "step-00000007", tmp_path / ".step-00000009.partial")
    shutil.copytree(tmp_path / "step-00000007", tmp_path / ".step-00000003.old")
    (tmp_path / ".latest.partial").write_text("step-0")
    assert newest(tmp_path)[0].step == 7
    assert remove_leftovers(tmp_path) == [".step-00000003.old", ".step-00000009.partial"]
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "step-00000007"}


def test_a_full_disk_is_an_error_with_words(tmp_path):
    # Catches: a short write that is taken for a whole one. (/dev/full takes nothing.)
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left"):
        TensorWriter(Path("/dev/full"), SPECS)
