"""A run resumes by its own recipe on another number of ranks; test_layouts.py resumes in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from curves import assert_same_curve, read_rows, train_in, train_rows
from project import ROOT
from runs import DIGITS, run_quietly

RTOL = 1e-5
RECIPE = [
    *(*DIGITS, "--val-split", "", "--epochs", 1, "--warmup-steps", 2, "--log-interval", 1),
    *("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "--drop-path", 0.3, "--mixup", 0.8),
    *("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "--set", "optimizer.params.eps=1e-6"),
]


@pytest.mark.slow
def test_files_do_not_show_the_layout(ranks, tmp_path):
    # Catches: a layout in names, shapes or order of what is saved.
    names = []
    for world, layout in ((1, ()), (4, ("--pp", 2, "--tp", 2))):
        run = tmp_path / str(world)
        argv = [*RECIPE, "-b", 12 // world, "--grad-accum-steps", world, "--model-ema", *layout, "--max-steps", 1]
        train_in(ranks, world, [*argv, "--checkpoint-interval", 1, "--output", run])
        files = {path.name: path.read_bytes() for path in (run / "checkpoints" / "step-00000001").glob("*.safetensors")}
        names.append({name: data[: 8 + int.from_bytes(data[:8], "little")] for name, data in files.items()})  # headers
    assert names[0] == names[1]
    kinds = ("ema", "model", "optimizer-exp_avg", "optimizer-exp_avg_sq")
    assert sorted(names[0]) == [f"{kind}.safetensors" for kind in kinds]


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
        "gradient_accumulation_steps": "batch arithmetic",
        "optimizer.params.eps": "--set",
    }
    argv = ["--recipe", one_rank / "config.yaml", "--output", tmp_path / "new", "--max-steps", 2]
    [(code, said, wrong), _] = ranks.run(2, run_quietly, argv)
    assert code == 0, wrong
    assert "is kept: 12 = 2 ranks × 6 images × 1 micro-batch" in said
    assert_same_curve(train_rows(read_rows(one_rank))[:2], train_rows(read_rows(tmp_path / "new")), rtol=RTOL)
    assert batch_of(tmp_path / "new") == [12, 6, 1]
    [(code, _, wrong)] = ranks.run(1, run_quietly, [*argv, "--pp", 2, "--tp", 2])
    assert code == 2
    assert "start 4 ranks, or give --pp 1 --tp 1" in wrong


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
