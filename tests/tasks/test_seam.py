"""The task seam in every layout: several towers with a coupled loss, a teacher, and a task with state."""

import contextlib
import functools

import pytest
from curves import assert_same_curve, read_rows, train_rows
from project import write_config
from runs import DIGITS

RTOL = 1e-5
WORDS = [
    *DIGITS,
    *("--model-kwargs", "patch_size=4", "embed_dim=24", "depth=4", "num_heads=2", "--drop-path", 0.2),
    *("--epochs", 3, "--max-steps", 6, "--log-interval", 1, "--val-split", "", "--clip-grad", 0.05),
    *("--lr", 0.5, "--warmup-steps", 2),
]
# Ranks, micro-batch, accumulation, ZeRO stage, further flags: of one global batch of 16.
LAYOUTS = {
    "accumulation": (1, 4, 4, 1),
    "dp 2, ZeRO-0, accumulation": (2, 4, 2, 0),
    "dp 2, ZeRO-2, accumulation": (2, 4, 2, 2),
    "dp 2, ZeRO-3, accumulation": (2, 4, 2, 3),
    "tp 2, accumulation": (2, 4, 4, 1, "--tp", 2),
    "dp 2, recomputed": (2, 8, 1, 1, "--grad-checkpointing", 1),
}


PIPELINES = {
    "pp 3, recomputed": (3, 4, 4, 0, "--pp", 3, "--grad-checkpointing", 1),
    "pp 2 x dp 2, accumulation": (4, 4, 2, 1, "--pp", 2),
    "pp 2 x tp 2": (4, 8, 2, 0, "--pp", 2, "--tp", 2),
}
# A task, and the layouts before and after its interruption.
RESUMED = [
    ("with-state", (1, 16, 1, 0), (2, 4, 2, 3)),
    ("with-teacher", (2, 8, 1, 3), (2, 8, 2, 1, "--tp", 2)),
    ("with-teacher", (2, 4, 2, 2), (1, 16, 1, 1)),
    ("two-towers", (1, 16, 1, 0), (2, 4, 2, 3)),
]
TASKS = ("two-towers", "with-teacher", "with-state")


def train_on_rank(argv, breaks=None):
    """On a rank: the exit code of a run with the tasks of `seam_tasks`; `breaks` names one of its breakages."""
    import seam_tasks

    from ds_vit.train import main

    with getattr(seam_tasks, breaks)() if breaks else contextlib.nullcontext():
        return main([str(word) for word in argv])


def train(ranks, folder, task, world, micro_batch, accumulation, stage, *words, breaks=None):
    """The rows of kind "train"."""
    argv = [*WORDS, "--task", task, "-b", micro_batch, "--grad-accum-steps", accumulation, *words]
    sgd = {"type": "SGD", "params": {"lr": "auto", "weight_decay": "auto", "momentum": 0.9}}
    argv += ["--deepspeed_config", write_config(folder.with_suffix(".json"), stage, optimizer=sgd), "--output", folder]
    assert ranks.run(world, train_on_rank, argv, breaks) == [0] * world
    return train_rows(read_rows(folder))


@pytest.fixture(scope="module")
def references(ranks, tmp_path_factory):
    """Of each task: one process without accumulation and ZeRO, where torch differentiates the whole batch at once."""
    folder = tmp_path_factory.mktemp("references")
    return functools.cache(lambda task: train(ranks, folder / task, task, 1, 16, 1, 0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_alike_in_each_layout(ranks, tmp_path, references, task, layout):
    # Catches: a loss over the samples of one rank or micro-batch, a gather without gradient, a factor of dp, a teacher
    # that lags or differs between ranks, a second forward pass of a tower that ZeRO does not see.
    rows = train(ranks, tmp_path / "run", task, *LAYOUTS[layout])
    assert_same_curve(references(task), rows, rtol=RTOL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", PIPELINES)
def test_two_towers_in_a_pipeline(ranks, tmp_path, references, layout):
    # Catches: drop-path that is off in the pass that collects, pieces of another micro-batch, a loss that is a share.
    rows = train(ranks, tmp_path / "run", "two-towers", *PIPELINES[layout])
    assert_same_curve(references("two-towers"), rows, rtol=RTOL)


@pytest.mark.parametrize("layout", ["dp 2, ZeRO-3, accumulation", "pp 2 x dp 2, accumulation"])
def test_the_main_tower_is_evaluated(ranks, tmp_path, layout):
    # Catches: another tower's outputs, or its input, in evaluation.
    words = ("--val-split", "validation", "--max-steps", 2)
    found = []
    for name, at in {"one": (1, 16, 1, 0), "many": (LAYOUTS | PIPELINES)[layout]}.items():
        train(ranks, tmp_path / name, "two-towers", *at, *words)
        rows = [row for row in read_rows(tmp_path / name) if row["kind"] == "eval"]
        found.append([(row["step"], row["top1"], row["images"], pytest.approx(row["loss"], rel=RTOL)) for row in rows])
    assert found[0] == found[1] != []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("task", "first", "second"), RESUMED, ids=str)
def test_a_task_resumes_in_another_layout(ranks, tmp_path, references, task, first, second):
    # Catches: a teacher or a task's state that a checkpoint lacks or rounds.
    resumed(ranks, tmp_path / "run", task, first, second)
    assert_same_curve(references(task), read_rows(tmp_path / "run"), rtol=RTOL)


def resumed(ranks, folder, task, first, second, breaks=None):
    """Three steps in one layout, and the rest in another."""
    train(ranks, folder, task, *first, "--max-steps", 3, "--checkpoint-interval", 3)
    train(ranks, folder, task, *second, "--resume", "auto", "--checkpoint-interval", 3, breaks=breaks)


BREAKAGES = {
    "gather_without_gradient": "two-towers",
    "loss_of_each_rank": "two-towers",
    "teacher_before_the_step": "with-teacher",
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_broken_is_seen(ranks, tmp_path, references, breakage):
    task = BREAKAGES[breakage]
    rows = train(ranks, tmp_path / "run", task, 2, 8, 1, 1, breaks=breakage)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(references(task), rows, rtol=RTOL)


def test_a_state_that_is_not_restored_is_seen(ranks, tmp_path, references):
    resumed(ranks, tmp_path / "run", "with-state", (2, 8, 1, 1), (2, 8, 1, 1), breaks="state_not_restored")
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(references("with-state"), read_rows(tmp_path / "run"), rtol=RTOL)
