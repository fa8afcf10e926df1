"""--rollback: back to the last checkpoint, past the samples that did it, and the same curve in every layout."""

import itertools
import json

import oracle
import pytest
from curves import assert_same_curve, read_rows, read_samples, train_rows
from zero_layouts import words

from ds_vit.data.sampler import SampleOrder

pytestmark = pytest.mark.slow

IMAGES, GLOBAL_BATCH = 160, 8
BAD_BATCH, INTERVAL, STEPS = 5, 3, 9  # batches count from 0: it belongs to step 6


def train_with_bad_batches(argv, bad=(), jump=None, write_seconds=0.0):
    """On a rank: train on data some batches of which are not finite; gives the exit code and stderr.

    Args:
        argv: of train.py.
        bad: numbers of the batches, in the order of the data.
        jump: (step, batches): leave out so many batches after this step, without any accident.
        write_seconds: what each checkpoint takes longer on the disk.
    """
    import time

    from accidents import spoil_batches
    from runs import run_quietly

    from ds_vit.checkpoint import snapshot
    from ds_vit.training.inputs import InputPipeline

    training = InputPipeline.training

    def jumping(self, *_):
        step, batches = jump
        feed = itertools.islice(training(self), step * self.run.share.accumulation)
        yield from itertools.chain(feed, training(self, step, batches))

    if jump is not None:
        InputPipeline.training = jumping
    spoil_batches(bad)
    commit = snapshot.folders.commit
    snapshot.folders.commit = lambda *args: (time.sleep(write_seconds), commit(*args))[1]
    code, _, error = run_quietly(argv)
    return code, error


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """A few images and random weights."""
    return oracle.cifar_with_weights(real_images, tmp_path_factory.mktemp("rollback"), IMAGES, **oracle.DEEP_KWARGS)


def run(ranks, cifar, folder, layout=(1, 1, 1, 1), *flags, **accident):
    """Train in a layout (pp, dp, tp, ZeRO stage): exit code, stderr and rows."""
    pp, dp, tp, stage = layout
    folder.mkdir(exist_ok=True)
    argv = [*words(cifar, stage, {}, folder / "config.json"), "--max-steps", STEPS, "-b", GLOBAL_BATCH // 2 // dp]
    argv += ["--grad-accum-steps", 2, "--log-interval", 1, "--lr", 1e-3, "--drop-path", 0.1, "--pp", pp, "--tp", tp]
    argv += ["--sched", "cosine", "--warmup-steps", 2, "--model-ema", "--log-samples", "--epochs", 1]
    argv += ["--output", folder / "run", *flags]
    results = ranks.run(pp * dp * tp, train_with_bad_batches, argv, **accident)
    assert len({code for code, _ in results}) == 1
    return results[0][0], results[0][1], read_rows(folder / "run")


SAVING = ("--checkpoint-interval", INTERVAL)


@pytest.fixture(scope="module")
def past_it(ranks, cifar, tmp_path_factory):
    """The course that is wanted: the same samples, without an accident."""
    folder = tmp_path_factory.mktemp("past")
    code, error, rows = run(ranks, cifar, folder, jump=(INTERVAL, BAD_BATCH + 1 - INTERVAL))
    assert code == 0, error
    return rows


LAYOUTS = [(1, 2, 1, 3), (2, 1, 2, 0)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_goes_back_and_past_the_samples(ranks, cifar, past_it, tmp_path, layout):
    """Weights, moments, average, schedule or samples that are not those of the course without the bad batch; a window
    of samples that is one batch off, on either side."""
    code, error, rows = run(ranks, cifar, tmp_path, layout, *SAVING, "--rollback", 1, bad=[BAD_BATCH])
    assert code == 0, error
    assert_same_curve(past_it, rows, rtol=1e-5)
    assert [row["lr"] for row in train_rows(rows)] == [row["lr"] for row in train_rows(past_it)]
    assert [row["step"] for row in train_rows(rows)] == list(range(1, STEPS + 1))
    (back,) = [row for row in rows if row["kind"] == "rollback"]
    assert {k: back[k] for k in ("step", "to_step", "skipped_batches", "number", "reason")} == {
        "step": BAD_BATCH + 1,
        "to_step": INTERVAL,
        "skipped_batches": BAD_BATCH + 1 - INTERVAL,
        "number": 1,
        "reason": "nonfinite",
    }
    assert back["layer"] == "embed"
    (skip,) = [row for row in rows if row["kind"] == "skip"]
    assert skip["step"] == BAD_BATCH + 1
    order = SampleOrder(IMAGES, GLOBAL_BATCH, seed=42)
    batches = [*range(INTERVAL), *range(BAD_BATCH + 1, STEPS + BAD_BATCH + 1 - INTERVAL)]
    wanted = {step: order.rows(batch, range(GLOBAL_BATCH))[0].tolist() for step, batch in enumerate(batches, start=1)}
    assert read_samples(tmp_path / "run") == wanted


def test_an_interrupted_run_remembers_what_it_left_out(ranks, cifar, past_it, tmp_path):
    """A resume that returns to the bad samples, or forgets how many rollbacks there were."""
    code, error, _ = run(
        ranks, cifar, tmp_path, (1, 2, 1, 1), *SAVING, "--rollback", 1, "--max-steps", 7, bad=[BAD_BATCH]
    )
    assert code == 0, error
    again = (*SAVING, "--rollback", 1, "--resume", "auto")
    code, error, rows = run(ranks, cifar, tmp_path, (2, 1, 1, 1), *again, bad=[BAD_BATCH])
    assert code == 0, error
    assert_same_curve(past_it, rows, rtol=1e-5)
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())
    assert state["skipped_batches"] == BAD_BATCH + 1 - INTERVAL
    assert state["history"]["rollbacks"] == 1


def test_not_more_often_than_allowed(ranks, cifar, tmp_path):
    """A run that goes back for ever; the second one falls back behind the first."""
    code, error, rows = run(ranks, cifar, tmp_path, (1, 1, 1, 1), *SAVING, "--rollback", 2, bad=[5, 7, 10])
    assert code == 3
    assert "the gradient is not finite" in error
    backs = [row for row in rows if row["kind"] == "rollback"]
    # Batch 5 at step 6; then step 4 is batch 6 and step 5 is batch 7; then step 4 is batch 8 and step 6 is batch 10.
    assert [(row["step"], row["to_step"], row["skipped_batches"]) for row in backs] == [(6, 3, 3), (5, 3, 5)]
    assert rows[-1]["kind"] == "skip"
    assert rows[-1]["step"] == 6


def test_an_end_by_an_error_waits_for_the_checkpoint(ranks, cifar, tmp_path):
    """A checkpoint that is lost, and left half-written, because the run ended while it was written."""
    each = ("--checkpoint-interval", BAD_BATCH, "--keep-checkpoints", 0)
    code, error, rows = run(ranks, cifar, tmp_path, (1, 2, 1, 1), *each, write_seconds=2.0, bad=[BAD_BATCH])
    assert code == 3, error
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*")] == [f"step-{BAD_BATCH:08d}"]
    assert [row["step"] for row in rows if row["kind"] == "checkpoint"] == [BAD_BATCH]
