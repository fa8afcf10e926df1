"""Any layout to any layout: a run that is stopped goes on elsewhere, and nothing shows it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from curves import assert_same_curve, read_rows, train_main
from project import ROOT
from runs import DIGITS
from safetensors.torch import load_file

from ds_vit.checkpoint.load import read_range
from ds_vit.parallel.tensor import TensorSlice

RTOL = 1e-5
# name → ranks, --pp, --tp, ZeRO stage
LAYOUTS = {
    "dp1": (1, 1, 1, 1),
    "dp4-zero1": (4, 1, 1, 1),
    "dp2-zero2": (2, 1, 1, 2),
    "dp4-zero3": (4, 1, 1, 3),
    "tp2-dp2": (4, 1, 2, 1),
    "pp2-dp2": (4, 2, 1, 1),
    "tp2-pp2": (4, 2, 2, 1),
}
# eps 1e-6: at 1e-8 Adam scales rounding up to the learning rate (docs/numerics.md).
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.05}},
    "Lamb": {"type": "Lamb", "params": {"lr": 4e-3, "eps": 1e-6, "weight_decay": 0.05}},
    # A head and a block of their own kind: parameters of a flat tensor have not the states of their neighbours.
    "Muon": {
        "type": "Muon",
        "params": {"lr": 4e-3, "eps": 1e-6, "weight_decay": 0.05, "fallback_list": ["head.*", "blocks.1.*"]},
    },
}
# 1,442 images are 90 steps of 16 an epoch: step 7 is in the middle of the first.
RUN = [
    *(*DIGITS, "--log-interval", 1),
    *("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=3", "num_heads=2", "init_values=0.1"),
    *("--epochs", 1, "--warmup-steps", 2, "--drop-path", 0.3, "--mixup", 0.8, "--layer-decay", 0.75),
    *("--model-ema", "--model-ema-decay", 0.9, "--validation-batch-size", 45),
]


def command(folder: Path, optimizer: str, layout: str, output: Path, *words: object) -> tuple[int, list[str]]:
    """Number of ranks, and the command line that trains in a layout."""
    world, pp, tp, stage = LAYOUTS[layout]
    dp = world // (pp * tp)
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    data |= {"optimizer": OPTIMIZERS[optimizer], "gradient_clipping": 1.0, "train_batch_size": 16}
    data |= {"train_micro_batch_size_per_gpu": 16 // dp // pp, "gradient_accumulation_steps": pp}
    path = folder / f"{optimizer}-{layout}.json"
    path.write_text(json.dumps(data))
    argv = [*RUN, "--deepspeed_config", path, "--pp", pp, "--tp", tp, "--output", output, "--log-samples"]
    argv += ["--checkpoint-interval", 0, *words]
    return world, [str(word) for word in argv]


def train(ranks, folder: Path, optimizer: str, layout: str, output: Path, *words: object) -> list[dict]:
    """Train in a layout, and give the rows of metrics.jsonl."""
    world, argv = command(folder, optimizer, layout, output, *words)
    codes = ranks.run(world, train_main, argv, timeout=300.0)
    assert codes == [0] * world
    return read_rows(output)


def samples(output: Path) -> dict[int, list[int]]:
    """Step → the samples of its global batch, in the order of its rows."""
    rows: dict[int, dict[int, list[int]]] = {}
    for path in (output / "samples").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            rows.setdefault(line["step"], {})[line["first_row"]] = line["samples"]
    return {step: [sample for first in sorted(parts) for sample in parts[first]] for step, parts in rows.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(ranks, folder):
    """The uninterrupted run of an optimizer, on one rank."""
    made = {}

    def get(optimizer):
        if optimizer not in made:
            output = folder / f"whole-{optimizer}"
            train(ranks, folder, optimizer, "dp1", output, "--max-steps", 14)
            made[optimizer] = output
        return made[optimizer]

    return get


@pytest.fixture(scope="module")
def stopped(ranks, folder):
    """A run that was saved at step 7 in a layout: its folder."""
    made = {}

    def get(optimizer, layout):
        if (optimizer, layout) not in made:
            output = folder / f"stopped-{optimizer}-{layout}"
            train(ranks, folder, optimizer, layout, output, "--max-steps", 7, "--checkpoint-interval", 7)
            made[optimizer, layout] = output
        return made[optimizer, layout]

    return get


def check_goes_on(ranks, folder, whole, stopped, optimizer, source, target):
    """Resume at step 7, and compare everything with the run that was never stopped."""
    output = folder / f"resumed-{optimizer}-{source}-{target}"
    path = stopped(optimizer, source)
    rows = train(ranks, folder, optimizer, target, output, "--max-steps", 14, "--resume", path)
    reference = read_rows(whole(optimizer))
    later = [row for row in reference if row["step"] > 7]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(8, 15))
    assert_same_curve(later, rows, rtol=RTOL)
    expected = samples(whole(optimizer))
    assert samples(output) == {step: expected[step] for step in range(8, 15)}
    for kind in ("eval", "eval_ema"):
        [a], [b] = ([row for row in r if row["kind"] == kind] for r in (later, rows))
        assert (b["top1"], b["top5"], b["images"]) == (a["top1"], a["top5"], a["images"])
        assert b["loss"] == pytest.approx(a["loss"], rel=RTOL)
    final, average = (load_file(str(p / "ema.safetensors")) for p in (whole(optimizer), output))
    assert final.keys() == average.keys()
    for name, tensor in final.items():
        assert (average[name] - tensor).norm() <= RTOL * max(1.0, float(tensor.norm())), name


def around(distance: int) -> list[tuple[str, str]]:
    """Each layout with the one that is so many places further on, around the end."""
    names = [*LAYOUTS]
    return [(name, names[(i + distance) % len(names)]) for i, name in enumerate(names)]


PAIRS = [*itertools.permutations(LAYOUTS, 2)]
ALL = [(source, target, optimizer) for source, target in PAIRS for optimizer in ("AdamW", "Lamb")]
# Each layout to the next with both optimizers, and to one further on with one of them; Muon where its states lie apart.
SOME = [(source, target, optimizer) for source, target in around(1) for optimizer in ("AdamW", "Lamb")]
SOME += [(*pair, optimizer) for pair, optimizer in zip(around(3), itertools.cycle(("AdamW", "Lamb")), strict=False)]
SOME += [("pp2-dp2", "dp4-zero3", "Muon"), ("dp4-zero3", "tp2-pp2", "Muon"), ("tp2-pp2", "dp2-zero2", "Muon")]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "optimizer"), SOME)
def test_each_layout_to_two_others(ranks, folder, whole, stopped, source, target, optimizer):
    # Catches: a piece of state that is lost, doubled or put in another place by some way of cutting the model; a
    # sample that is skipped or seen twice; a schedule, an average or a draw that begins anew.
    check_goes_on(ranks, folder, whole, stopped, optimizer, source, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "target", "optimizer"), [item for item in ALL if item not in SOME])
def test_any_layout_to_any_other(ranks, folder, whole, stopped, source, target, optimizer):
    # Catches: what the test above does, for the other pairs.
    check_goes_on(ranks, folder, whole, stopped, optimizer, source, target)


@pytest.mark.slow
def test_files_do_not_show_the_layout(stopped):
    # Catches: a layout in names, shapes or order of what is saved.
    names = []
    for layout in ("dp1", "tp2-pp2"):
        path = stopped("AdamW", layout) / "checkpoints" / "step-00000007"
        manifest = json.loads((path / "manifest.json").read_text())
        names.append(
            {name: (e["bytes"], e.get("tensors")) for name, e in manifest["files"].items() if "state" not in name}
        )
    assert names[0] == names[1]
    assert sorted(names[0]) == [
        *("ema.safetensors", "model.safetensors", "optimizer-exp_avg.safetensors", "optimizer-exp_avg_sq.safetensors")
    ]


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
def test_any_range_of_any_slice_is_read(dim):
    # Catches: a wrong element at the edge of a range, a section or the padding.
    shape = (6, 7, 5)
    full = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    generator = np.random.default_rng(0)
    for size in (1, 2, 3):
        for rank in range(size):
            sections = () if dim is None else ((3, 3) if dim == 0 else (shape[dim],))
            tp_slice = TensorSlice(shape, dim, sections, rank, size)
            flat = tp_slice.take(full).flatten().numpy()
            for _ in range(60):
                start = int(generator.integers(len(flat)))
                length = int(generator.integers(1, len(flat) - start + 1))
                got = read_range(full.numpy(), tp_slice, start, length)
                assert np.array_equal(got, flat[start : start + length])
