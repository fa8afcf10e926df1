"""A run is interrupted in one layout and resumed in another: curve, samples, average and metrics do not show it."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
from curves import assert_same_curve, read_rows, read_samples, train_in, train_rows
from project import ROOT
from runs import DIGITS, run_quietly
from safetensors.torch import load_file

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
    "AdamW": {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.05},
    "Lamb": {"lr": 4e-3, "eps": 1e-6, "weight_decay": 0.05},
    # AdamW's states for the head and a block: parameters of a flat tensor have other states than their neighbours.
    "Muon": {"lr": 4e-3, "eps": 1e-6, "weight_decay": 0.05, "fallback_list": ["head.*", "blocks.1.*"]},
}
# 1,442 images are 90 steps of 16 an epoch: step 7 is in the middle of the first.
RUN = [
    *(*DIGITS, "--log-interval", 1),
    *("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=3", "num_heads=2", "init_values=0.1"),
    *("--epochs", 1, "--warmup-steps", 2, "--drop-path", 0.3, "--mixup", 0.8, "--layer-decay", 0.75),
    *("--model-ema", "--model-ema-decay", 0.9, "--validation-batch-size", 45, "--log-samples"),
]


@pytest.fixture(scope="module")
def train(ranks, tmp_path_factory):
    """Train with an optimizer in a layout, each once; the output folder."""

    @functools.cache
    def get(optimizer: str, layout: str, *words: object) -> Path:
        folder = tmp_path_factory.mktemp(f"{optimizer}-{layout}")
        world, pp, tp, stage = LAYOUTS[layout]
        data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
        data |= {"optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]}, "gradient_clipping": 1.0}
        data |= {"train_batch_size": 16, "gradient_accumulation_steps": pp}
        data["train_micro_batch_size_per_gpu"] = 16 // (world // (pp * tp)) // pp
        (folder / "config.json").write_text(json.dumps(data))
        argv = [*RUN, "--deepspeed_config", folder / "config.json", "--pp", pp, "--tp", tp, *words]
        train_in(ranks, world, [*argv, "--output", folder / "run"])
        return folder / "run"

    return get


WHOLE = ("--max-steps", 14, "--checkpoint-interval", 0)
STOPPED = ("--max-steps", 7, "--checkpoint-interval", 7)


# Each layout to one further on, with alternating optimizers; tests/parallel/test_layouts.py resumes many others in two.
NAMES = [*LAYOUTS]
PAIRS = [(name, NAMES[(i + 3) % len(NAMES)]) for i, name in enumerate(NAMES)]
CASES = [(*pair, optimizer) for pair, optimizer in zip(PAIRS, itertools.cycle(OPTIMIZERS), strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "optimizer"), CASES)
def test_each_layout_to_another(train, source, target, optimizer):
    # Catches: a piece of state that is lost, doubled or misplaced by some layout; a sample that is skipped or seen
    # twice; a schedule, an average or a draw that begins anew.
    whole, stopped = train(optimizer, "dp1", *WHOLE), train(optimizer, source, *STOPPED)
    output = train(optimizer, target, *WHOLE, "--resume", stopped)
    rows, later = read_rows(output), [row for row in read_rows(whole) if row["step"] > 7]
    assert [row["step"] for row in train_rows(rows)] == list(range(8, 15))
    assert_same_curve(later, rows, rtol=RTOL)
    expected = read_samples(whole)
    assert read_samples(output) == {step: expected[step] for step in range(8, 15)}
    for kind in ("eval", "eval_ema"):
        [a], [b] = ([row for row in r if row["kind"] == kind] for r in (later, rows))
        assert (b["top1"], b["top5"], b["images"]) == (a["top1"], a["top5"], a["images"])
        assert b["loss"] == pytest.approx(a["loss"], rel=RTOL)
    final, average = (load_file(str(path / "ema.safetensors")) for path in (whole, output))
    assert final.keys() == average.keys()
    for name, tensor in final.items():
        assert (average[name] - tensor).norm() <= RTOL * max(1.0, float(tensor.norm())), name


@pytest.mark.slow
def test_files_do_not_show_the_layout(train):
    # Catches: a layout in names, shapes or order of what is saved.
    names = []
    for layout in ("dp1", "tp2-pp2"):
        path = train("AdamW", layout, *STOPPED) / "checkpoints" / "step-00000007" / "manifest.json"
        files = json.loads(path.read_text())["files"]
        names.append({name: (e["bytes"], e.get("tensors")) for name, e in files.items() if "state" not in name})
    assert names[0] == names[1]
    kinds = ("ema", "model", "optimizer-exp_avg", "optimizer-exp_avg_sq")
    assert sorted(names[0]) == [f"{kind}.safetensors" for kind in kinds]


# ---- by the run's own recipe, on another number of ranks -------------------------------------------------------------

RECIPE = [
    *(*DIGITS, "--val-split", "", "--epochs", 1, "--warmup-steps", 2, "--log-interval", 1),
    *("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "--drop-path", 0.3, "--mixup", 0.8),
    *("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "--set", "optimizer.params.eps=1e-6"),
]


def batch_of(output: Path) -> list[int]:
    """Global batch, micro-batch and accumulation that a run wrote."""
    data = json.loads((output / "deepspeed.json").read_text())
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return [data[key] for key in keys]


@pytest.fixture(scope="module")
def one_rank(ranks, tmp_path_factory):
    """The output of six steps of 12 images on one rank."""
    output = tmp_path_factory.mktemp("one") / "run"
    train_in(ranks, 1, [*RECIPE, "-b", 12, "--max-steps", 6, "--output", output])
    return output


def test_a_recipe_of_one_rank_is_a_new_run_on_two(ranks, one_rank, tmp_path):
    # Catches: a file that fixes the batch of one rank, and a global batch that grows with the ranks; a number that
    # looks like the JSON's and is a flag's.
    derived = json.loads((one_rank / "deepspeed.derived.json").read_text())
    assert derived == {
        "train_batch_size": "batch arithmetic",
        "train_micro_batch_size_per_gpu": "--batch-size",
        "gradient_accumulation_steps": "default",
        "optimizer.params.eps": "--set",
    }
    argv = ["--recipe", one_rank / "config.yaml", "--output", tmp_path / "new", "--max-steps", 2]
    [(code, said, wrong), _] = ranks.run(2, run_quietly, [str(word) for word in argv])
    assert code == 0, wrong
    assert "is kept: 12 = 2 ranks × 6 images × 1 micro-batch" in said
    assert_same_curve(train_rows(read_rows(one_rank))[:2], train_rows(read_rows(tmp_path / "new")), rtol=RTOL)
    assert batch_of(tmp_path / "new") == [12, 6, 1]


@pytest.mark.slow
def test_a_run_of_four_ranks_resumes_by_its_own_recipe(ranks, one_rank, tmp_path):
    # Catches: a recipe that holds for one number of ranks, in the batch or in the bounds of its stages.
    layout = ["--pp", 2, "--tp", 2, "--pp-partition", "0,2,4", "-b", 6, "--grad-accum-steps", 2]
    stopped = tmp_path / "stopped"
    train_in(ranks, 4, [*RECIPE, *layout, "--max-steps", 3, "--checkpoint-interval", 3, "--output", stopped])
    for world, flags, batch in ((3, ["--pp", "1", "--tp", "1"], [12, 4, 1]), (2, ["--tp", "1"], [12, 6, 2])):
        run = tmp_path / f"on-{world}"
        shutil.copytree(stopped, run)
        argv = ["--recipe", run / "config.yaml", "--resume", "auto", "--output", run, "--max-steps", 6, *flags]
        rows = train_rows(train_in(ranks, world, argv))
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert_same_curve(train_rows(read_rows(one_rank)), rows, rtol=RTOL)
        assert batch_of(run) == batch
