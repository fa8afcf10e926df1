"""A run's config.yaml works on any number of ranks: the global batch is the run's, the rest follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from curves import assert_same_curve, read_rows, train_in, train_rows
from project import ROOT
from runs import DIGITS, run_quietly

RTOL = 1e-5
MODEL = [
    *(*DIGITS, "--val-split", ""),
    *("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "--drop-path", 0.3, "--mixup", 0.8),
    *("--epochs", 1, "--warmup-steps", 2, "--log-interval", 1),
    # eps 1e-6: at 1e-8 Adam scales rounding up to the learning rate (docs/numerics.md).
    *("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "--set", "optimizer.params.eps=1e-6"),
]
GLOBAL_BATCH = 12


def written(output: Path) -> tuple[dict, dict]:
    """What a run wrote of its DeepSpeed JSON, and where the values came from."""
    names = ("deepspeed.json", "deepspeed.derived.json")
    return tuple(json.loads((output / name).read_text()) for name in names)


def batch_of(data: dict) -> tuple[int, int, int]:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return tuple(data[key] for key in keys)


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    """The output of six steps on one rank."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train_in(ranks, 1, [*MODEL, "-b", GLOBAL_BATCH, "--max-steps", 6, "--output", output])
    return output


def test_a_recipe_of_one_rank_is_a_new_run_on_two(ranks, alone, tmp_path):
    # Catches: a file that fixes what belongs to the number of ranks, and a global batch that grows with them.
    argv = ["--recipe", alone / "config.yaml", "--output", tmp_path / "new", "--max-steps", 2]
    [(code, said, wrong), _] = ranks.run(2, run_quietly, [str(word) for word in argv])
    assert code == 0, wrong
    assert "is kept: 12 = 6 a micro-batch x 1 accumulated x 2 data-parallel" in said
    assert_same_curve(train_rows(read_rows(alone))[:2], train_rows(read_rows(tmp_path / "new")), rtol=RTOL)
    data, derived = written(tmp_path / "new")
    assert batch_of(data) == (GLOBAL_BATCH, 6, 1)
    assert derived["train_micro_batch_size_per_gpu"] == "batch arithmetic"


def test_what_was_written_says_where_it_came_from(alone):
    # Catches: a number that looks like the JSON's and is a flag's, and a recipe that says --set again.
    data, derived = written(alone)
    assert data["optimizer"]["params"]["eps"] == 1e-6
    assert derived == {
        "train_batch_size": "batch arithmetic",
        "train_micro_batch_size_per_gpu": "--batch-size",
        "gradient_accumulation_steps": "default",
        "optimizer.params.eps": "--set",
    }
    assert "set" not in yaml.safe_load((alone / "config.yaml").read_text())


def test_a_layout_that_does_not_fit_names_those_that_do(ranks, alone):
    # Catches: "choose another layout", with the flags left to the reader.
    [(code, _, wrong)] = ranks.run(1, run_quietly, ["--recipe", str(alone / "config.yaml"), "--pp", "2", "--tp", "2"])
    assert code == 2
    assert (
        "1 ranks cannot be cut into --pp 2 x --tp 2 = 4 ranks a replica; start 4 ranks, or give --pp 1 --tp 1" in wrong
    )


@pytest.fixture(scope="module")
def stopped(ranks, tmp_path_factory):
    """A run of 8 ranks that was saved at step 3."""
    output = tmp_path_factory.mktemp("eight") / "run"
    cut = ["--pp", 2, "--tp", 2, "--pp-partition", "0,2,4", "-b", 3, "--grad-accum-steps", 2]
    train_in(ranks, 8, [*MODEL, *cut, "--max-steps", 3, "--checkpoint-interval", 3, "--output", output])
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cut", "batch"),
    [
        (1, ["--pp", "1", "--tp", "1"], (3, 4)),
        (2, ["--tp", "1"], (3, 4)),
        (3, ["--pp", "1", "--tp", "1"], (2, 2)),
        (4, [], (3, 4)),
    ],
)
def test_a_run_of_eight_ranks_goes_on_by_its_own_recipe(ranks, alone, stopped, tmp_path, world, cut, batch):
    # Catches: a recipe that is of one number of ranks, in the batch or in the bounds of its stages.
    run = tmp_path / "run"
    shutil.copytree(stopped, run)
    argv = ["--recipe", run / "config.yaml", "--resume", "auto", "--output", run, "--max-steps", 6, *cut]
    rows = train_in(ranks, world, argv)
    assert [row["step"] for row in train_rows(rows)] == [1, 2, 3, 4, 5, 6]
    assert_same_curve(train_rows(read_rows(alone)), train_rows(rows), rtol=RTOL)
    assert batch_of(written(run)[0]) == (GLOBAL_BATCH, *batch)
