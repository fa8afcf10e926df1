"""Segments on ranks to whole tensors in files, without an engine: the answer is known in closed form."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ds_vit.checkpoint.gather import Gather
from ds_vit.checkpoint.load import read_range
from ds_vit.checkpoint.tensors import TensorSpec
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.parallel.tensor.slices import Segment, TensorSlice

SHAPES = {"a": (6, 4), "qkv": (12, 4), "proj": (4, 8), "bias": (7,), "big": (40, 40), "empty": (0, 3)}
# Which dimension of a tensor is cut, and its sections; the classes (7 over 2 ranks) do not divide.
CUTS = {"qkv": (0, (4, 4, 4)), "proj": (1, (8,)), "bias": (0, (7,))}
KINDS = ("model", "optimizer-exp_avg", "ema")


def whole(name: str, kind: str) -> torch.Tensor:
    """The tensor that must come out."""
    start = 1000.0 * list(SHAPES).index(name) + 1e5 * KINDS.index(kind)
    return torch.arange(start, start + math.prod(SHAPES[name])).reshape(SHAPES[name])


def held_by(rank: int, dp: int, tp: int) -> tuple[list[Segment], dict[str, list[torch.Tensor]]]:
    """What a rank holds: of its tensor slices of all parameters, laid end to end, the dp-th contiguous share."""
    dp_rank, tp_rank = divmod(rank, tp)
    slices = {}
    for name, shape in SHAPES.items():
        dim, sections = CUTS.get(name, (None, ())) if tp > 1 else (None, ())
        slices[name] = TensorSlice(shape, dim, sections, tp_rank, tp)
    total = sum(math.prod(s.local_shape) for s in slices.values())
    low, high = (-(-total // dp) * r for r in (dp_rank, dp_rank + 1))
    pieces, place = [], 0
    for name, tp_slice in slices.items():
        numel = math.prod(tp_slice.local_shape)
        first, last = max(low, place), min(high, place + numel)
        if first < last and (tp_slice.dim is not None or tp_rank == 0):
            pieces.append(Segment(name, tp_slice, first - place, last - first, 0, first - low))
        place += numel
    flats = {
        kind: [torch.cat([s.take(whole(name, kind)).flatten() for name, s in slices.items()])[low:high]]
        for kind in KINDS
    }
    return pieces, flats


def specs() -> dict[str, list[TensorSpec]]:
    return {kind: [TensorSpec(name, shape) for name, shape in SHAPES.items()] for kind in KINDS}


def exchange(dp: int, tp: int, folder: str, max_bytes: int, fail_rank: int = -1) -> tuple[list[str], str]:
    """On a rank: write the files, and name those that this rank wrote."""
    import torch.distributed as dist

    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    pieces, flats = held_by(rank, dp, tp)
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, pieces)
    plan = Gather(held, specs(), dict.fromkeys(KINDS, max_bytes), rank)
    target = Path(folder, "missing") if rank == fail_rank else Path(folder)
    entries, error = plan.run(flats, target, group)
    return [entry.name for entry in entries], error


@pytest.mark.parametrize("max_bytes", [10**6, 3000])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (3, 1), (2, 2), (1, 2)])
def test_whole_tensors_come_out(ranks, tmp_path, dp, tp, max_bytes):
    # Catches: a piece in another one's place, a slice in the wrong order, padding that reaches a file.
    results = ranks.run(dp * tp, exchange, dp, tp, str(tmp_path), max_bytes)
    assert [error for _, error in results] == [""] * (dp * tp)
    for kind in KINDS:
        read = {}
        for path in tmp_path.glob(f"{kind}*.safetensors"):
            read |= load_file(str(path))
        assert read.keys() == SHAPES.keys()
        assert all(torch.equal(read[name], whole(name, kind)) for name in SHAPES)
    written = [name for names, _ in results for name in names]
    assert sorted(written) == sorted(os.listdir(tmp_path))
    if dp * tp > 1:
        assert sum(bool(names) for names, _ in results) >= 2, "one rank wrote it all"


def test_a_rank_that_cannot_write_holds_nobody_up(ranks, tmp_path):
    # Catches: a hang, or an error that only the failing rank knows the words of.
    results = ranks.run(3, exchange, 3, 1, str(tmp_path), 10**6, 1)
    errors = [error for _, error in results]
    assert errors[0] == errors[2] == ""
    assert errors[1] == "optimizer-exp_avg.safetensors: No such file or directory"
    assert {name for names, _ in results for name in names} == {"model.safetensors", "ema.safetensors"}


def test_pieces_that_are_no_whole_are_refused():
    # Catches: a hole or an overlap that would be written as if it were data.
    held = [held_by(rank, 2, 2)[0] for rank in range(4)]
    Gather(held, specs(), dict.fromkeys(KINDS, 10**6), 0)
    for broken in (
        [held[0], [], *held[2:]],
        [[*held[0], held[0][0]], *held[1:]],
        [[replace(held[0][0], length=held[0][0].length - 1), *held[0][1:]], *held[1:]],
    ):
        with pytest.raises(ValueError, match="element") as error:
            Gather(broken, specs(), dict.fromkeys(KINDS, 10**6), 0)
        assert not isinstance(error.value, UserError), "a bug, not bad input"


def test_files_do_not_depend_on_the_layout(ranks, tmp_path):
    # Catches: a layout that shows in names, order or bytes of the files.
    contents = []
    for dp, tp in ((1, 1), (2, 2)):
        folder = tmp_path / f"{dp}{tp}"
        folder.mkdir()
        ranks.run(dp * tp, exchange, dp, tp, str(folder), 3000)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    header = json.loads(contents[0]["model-00002-of-00002.safetensors"][8:].split(b"}}")[0] + b"}}")
    assert list(header)[1] == "a"


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
def test_any_range_of_any_slice_is_read(dim):
    # Catches: a wrong element at the edge of a range, a section or the padding.
    shape = (6, 7, 5)
    full = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    generator = np.random.default_rng(0)
    sections = () if dim is None else ((3, 3) if dim == 0 else (shape[dim],))
    for size, rank in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        tp_slice = TensorSlice(shape, dim, sections, rank, size)
        flat = tp_slice.take(full).flatten().numpy()
        for _ in range(60):
            start = int(generator.integers(len(flat)))
            length = int(generator.integers(1, len(flat) - start + 1))
            assert np.array_equal(read_range(full.numpy(), tp_slice, start, length), flat[start : start + length])
