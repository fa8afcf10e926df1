"""Steps that would do harm are turned down on every rank and in every layout alike, and named."""

import contextlib
import itertools
import json
from functools import partial
from pathlib import Path
from unittest import mock

import oracle
import pytest
import torch
from curves import assert_same_curve, read_rows
from ranks import RankPool
from runs import pretend_fp16, run_quietly, unpredicted
from safetensors.torch import load_file
from zero_layouts import BF16, WRAPPER, words

from ds_vit.engine.step_guard import usual_before_spike

# Three more steps follow the bad one. A spike is one after ten usual steps.
BAD_STEP, SPIKE_STEP, ACCUMULATION = 4, 13, 2


def test_usual_before_spike():
    """A mean of too few values, or of another number than there are; a factor that is reached counts as exceeded."""
    assert usual_before_spike([1.0] * 9, 1e9, 3.0) is None, "nothing to compare with"
    values = [1.0, 3.0] * 5
    assert usual_before_spike(values, 6.0, 3.0) is None
    assert usual_before_spike(values, 6.1, 3.0) == 2.0


@contextlib.contextmanager
def accident(what, step):
    """On a rank: something goes wrong at one step."""
    from accidents import spoil_batches

    from ds_vit.tasks.classification.task import Classification
    from ds_vit.training import callbacks
    from ds_vit.training.step_log import StepLog

    make, calls = Classification.loss, itertools.count()

    def loud(self, tp):
        loss = make(self, tp)

        def fn(logits, batch):
            value = loss(logits, batch)
            return value * 50 if value.requires_grad and next(calls) // ACCUMULATION == step - 1 else value

        return fn

    with contextlib.ExitStack() as stack:
        stack.enter_context(unpredicted())
        if what.startswith("nan"):
            spoil_batches([step - 1])
        if what == "loss":
            stack.enter_context(mock.patch.object(Classification, "loss", loud))
        if what.endswith("in fp16"):  # which a CPU has to be talked into
            stack.enter_context(pretend_fp16())
        if what == "nan in fp16":
            # Of an overflow, many in a row have to come before anything is done.
            stack.enter_context(mock.patch.object(callbacks, "MAX_SKIPS", 1))
        if what == "nan read late":  # TensorBoard's points, which read each of so few steps
            stack.enter_context(mock.patch.object(StepLog, "needs_result", StepLog._is_row))
        yield


def run(
    ranks: RankPool, cifar32: Path, tmp_path: Path, world, stage, changes, flags, what, name="run", bad_step=BAD_STEP
):
    """A short run with an accident at `bad_step`; its codes, words and rows."""
    output = tmp_path / name
    argv = words(cifar32, stage, changes, tmp_path / f"{name}.json")
    argv[argv.index("--max-steps") + 1] = bad_step + 3
    dp = world // (int(flags[flags.index("--pp") + 1]) if "--pp" in flags else 1)
    dp //= int(flags[flags.index("--tp") + 1]) if "--tp" in flags else 1
    argv[argv.index("-b") + 1] = 8 // dp
    argv += ["--grad-accum-steps", ACCUMULATION, "--log-interval", 1, "--lr", 1e-3, "--output", output, *flags]
    argv += ["--sched", "constant", "--warmup-steps", 0]
    results = ranks.run(world, run_quietly, [str(word) for word in argv], partial(accident, what, bad_step))
    return [code for code, _, _ in results], results[0][2], read_rows(output), output


LAYOUTS = {
    "no ZeRO dp2": (2, 0, {}, []),
    "no ZeRO pp2 tp2": (4, 0, {}, ["--pp", 2, "--tp", 2]),
    "ZeRO-1 pp2 dp2": (4, 1, {}, ["--pp", 2]),
    "ZeRO-2 tp2": (2, 2, {}, ["--tp", 2]),
    "ZeRO-3 dp2": (2, 3, {}, []),
    "ZeRO-1 bf16": (2, 1, BF16, []),
    "BF16_Optimizer pp2": (2, 1, WRAPPER, ["--pp", 2]),
    "offloaded": (2, 1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_is_not_finite_is_skipped(ranks, cifar32, tmp_path, layout):
    """Weights that become NaN, a rank that decides otherwise, a skip that nobody counts or names."""
    world, stage, changes, flags = LAYOUTS[layout]
    skip = [*flags, "--on-nonfinite", "skip"]
    codes, _, rows, output = run(ranks, cifar32, tmp_path, world, stage, changes, skip, "nan")
    assert codes == [0] * world
    (skipped,) = [row for row in rows if row["kind"] == "skip"]
    assert skipped["step"] == BAD_STEP
    assert skipped["reason"] == "nonfinite"
    assert skipped["layer"] == "embed", "the images were spoilt: the first layer sees it first"
    after = [row for row in rows if row["kind"] == "train" and row["step"] > BAD_STEP]
    assert len(after) == 3
    assert all(row["loss"] is not None and row["loss"] < 3 for row in after)
    assert json.loads((output / "summary.json").read_text())["exit"] == "completed"


@pytest.mark.slow
def test_an_overflow_of_float16_autocast_is_a_skipped_step(ranks, cifar32, tmp_path):
    """torch's GradScaler leaves LAMB, which is not fused, out without a word: no layer named, and no way back.

    NaN that stays in the memory between gradients, for which a scaler skips all later steps in silence, or on one rank;
    a ZeRO stage that scales in another way.
    """
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}, "optimizer": oracle.BLOCKS["lamb"]}
    back = ["--checkpoint-interval", BAD_STEP - 1, "--rollback", 1]
    curves = []
    for stage, world, what, flags in (
        (0, 1, "nan in fp16", back),
        (2, 2, "nan once in fp16", []),
        (3, 2, "nan once in fp16", []),
    ):
        codes, _, rows, _ = run(ranks, cifar32, tmp_path, world, stage, autocast, flags, what, f"zero{stage}")
        assert codes == [0] * world
        (skipped,) = [row for row in rows if row["kind"] == "skip"]
        assert (skipped["step"], skipped["reason"], skipped["layer"]) == (BAD_STEP, "overflow", "embed")
        steps = [row["to_step"] for row in rows if row["kind"] == "rollback"]
        assert steps == ([BAD_STEP - 1] if flags else [])
        curve = [row for row in rows if row["kind"] == "train"]
        # A rollback restores the scale.
        scales = [row["loss_scale"] for row in curve if row["step"] > BAD_STEP]
        assert scales == [skipped["loss_scale"] / (1 if flags else 2)] * 3
        curves.append([row for row in curve if row["step"] < BAD_STEP])
    for curve in curves[1:]:
        assert_same_curve(curves[0], curve, rtol=4e-4, keys=("loss", "grad_norm"))


LATE = {
    "no ZeRO dp2": LAYOUTS["no ZeRO dp2"],
    "ZeRO-2 tp2": LAYOUTS["ZeRO-2 tp2"],
    "BF16_Optimizer dp2": (2, 1, WRAPPER, []),
}


AFTER = ("skip", "skip, watching for spikes", "go back", "stop")
# Each of them in two layouts, and all of them in all if asked for.
LATE_CASES = [
    pytest.param(layout, after, marks=() if (row + column) % 2 == 0 else pytest.mark.exhaustive)
    for row, layout in enumerate(LATE)
    for column, after in enumerate(AFTER)
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("layout", "after"), LATE_CASES)
def test_a_verdict_that_is_read_a_step_late_is_the_same(ranks, cifar32, tmp_path, layout, after):
    """An update that the device lets through, an average that is moved by a step that never was, rows that differ.

    Where spikes are watched for, the host decides: gradients are named before clipping by such a norm spoils them all.
    """
    world, stage, changes, flags = LATE[layout]
    bad_step = SPIKE_STEP if "spikes" in after else BAD_STEP
    flags = [*flags, "--model-ema", "--model-ema-decay", 0.7, "--checkpoint-interval", bad_step - 1]
    flags += {"go back": ["--rollback", 1], "stop": []}.get(after, ["--on-nonfinite", "skip"])
    flags += ["--spike-factor", 8] if "spikes" in after else []
    ends = []
    for name, interval in (("at once", 1), ("late", 100)):
        argv = [*flags, "--log-interval", interval]
        spoilt = ("nan read late", name, bad_step)
        codes, said, rows, output = run(ranks, cifar32, tmp_path, world, stage, changes, argv, *spoilt)
        kinds = [{**row, "wall_seconds": 0} for row in rows if row["kind"] in ("skip", "rollback")]
        line = [line.replace(str(output), "") for line in said.splitlines() if f"step {bad_step}" in line]
        weights = {path.name: load_file(path) for path in output.glob("*.safetensors")}
        ends.append((codes, kinds, line, weights))
    assert ends[0][0] == [3 if after == "stop" else 0] * world
    assert ends[0][:3] == ends[1][:3]
    if after == "stop":
        [line] = ends[0][2]
        assert f"step {bad_step}: the gradient is not finite" in line
        assert "largest in embed" in line
        assert "--on-nonfinite skip" in line
    assert [row["layer"] for row in ends[0][1]] == ["embed"] * (2 if after == "go back" else 1)
    at_once, late = ends[0][3], ends[1][3]
    assert at_once.keys() == late.keys()
    assert len(at_once) == (0 if after == "stop" else 2), "the weights and their average"
    for file in at_once:
        assert all(torch.equal(at_once[file][name], late[file][name]) for name in at_once[file]), file


@pytest.mark.parametrize("layout", ["no ZeRO dp2", "ZeRO-2 tp2"])
def test_a_first_step_that_is_turned_down_leaves_no_momentum(ranks, cifar32, tmp_path, layout):
    """torch's fused SGD keeps a momentum that its kernel, turned away by the flag, has not written."""
    world, stage, changes, flags = LAYOUTS[layout]
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}}
    skip = [*flags, "--on-nonfinite", "skip"]
    codes, _, rows, _ = run(ranks, cifar32, tmp_path, world, stage, {**changes, **sgd}, skip, "nan", bad_step=1)
    assert codes == [0] * world
    assert [row["step"] for row in rows if row["kind"] == "skip"] == [1]
    after = [row for row in rows if row["kind"] == "train" and row["step"] > 1]
    assert len(after) == 3
    assert all(row["loss"] is not None and row["loss"] < 3 and row["grad_norm"] < 100 for row in after)


def test_a_bad_step_is_named_where_a_rank_counts_nothing(ranks, cifar32, tmp_path):
    """A norm of nothing that is looked up by name on one rank while the other waits for it."""
    skip = ["--tp", 2, "--linear-probe", "--class-parallel", "off", "--on-nonfinite", "skip"]
    codes, said, rows, _ = run(ranks, cifar32, tmp_path, 2, 1, WRAPPER, skip, "nan")
    assert codes == [0, 0], said
    assert [(row["step"], row["layer"]) for row in rows if row["kind"] == "skip"] == [(BAD_STEP, "head")]


SPIKES = ["--on-nonfinite", "skip", "--spike-factor", 8]


@pytest.fixture(scope="module")
def plain_spike(ranks, cifar32, tmp_path_factory):
    """The curve of one rank with a spike that is skipped."""
    return run(ranks, cifar32, tmp_path_factory.mktemp("spike"), 1, 1, {}, SPIKES, "loss", bad_step=SPIKE_STEP)[2]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["no ZeRO pp2 tp2", "ZeRO-1 pp2 dp2", "ZeRO-3 dp2"])
def test_a_spike_is_skipped(ranks, cifar32, tmp_path, plain_spike, layout):
    """A loss and gradient of fifty times the usual, which clipping alone would let through; same curve everywhere."""
    world, stage, changes, flags = LAYOUTS[layout]
    watching = [*flags, *SPIKES]
    codes, _, rows, _ = run(ranks, cifar32, tmp_path, world, stage, changes, watching, "loss", bad_step=SPIKE_STEP)
    assert codes == [0] * world
    (skipped,) = [row for row in rows if row["kind"] == "skip"]
    assert (skipped["step"], skipped["reason"]) == (SPIKE_STEP, "spike")
    assert skipped["loss"] > 50
    assert skipped["layer_norm"] <= skipped["grad_norm"]
    assert_same_curve(plain_spike, rows, rtol=1e-5)
    (expected,) = [row for row in plain_spike if row["kind"] == "skip"]
    assert skipped["layer"] == expected["layer"]
    assert skipped["layer_norm"] == pytest.approx(expected["layer_norm"], rel=1e-4)
