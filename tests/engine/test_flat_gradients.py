"""ZeRO-1 writes gradients into flat memory and reduces them during the backward pass; BF16_Optimizer in place."""

import contextlib
import json
from unittest import mock

import pytest
from curves import read_rows, train_main, train_rows
from project import ROOT
from runs import ONE_BLOCK

SMALL = [*ONE_BLOCK, "--no-aug", "--batch-size", "5", "--max-steps", "2", "--val-split", "", "--log-interval", "1"]
SMALL += ["--lr", "1e-2", "--warmup-steps", "0"]


def train_both_ways(argv, config, folder, breaks=False):
    """On a rank: train with gradients put where they are stepped on, and as DeepSpeed does it.

    Args:
        argv: of a run.
        config: path of DeepSpeed's JSON.
        folder: for the two runs.
        breaks: whether to leave the sums out.

    Returns:
        Of each step of the first run: how many gradients had come, how many buckets were sent when the backward pass
        was over, and how many there are.
    """
    from ds_vit.engine import base
    from ds_vit.engine.patches import flat_gradients

    argv = [str(word) for word in [*argv, "--deepspeed_config", config, "--output"]]
    came = []

    class Watched(flat_gradients.FlatGradients):
        def take(self, parameter):
            if breaks:
                self._next = len(self._buckets)
            super().take(parameter)

        def finish(self):
            came.append((len(self._taken), self._next, len(self._buckets)))
            super().finish()

    with mock.patch.object(flat_gradients, "FlatGradients", Watched):
        assert train_main([*argv, str(folder / "ours")]) == 0
    with mock.patch.object(base, "write_gradients_in_place"):
        assert train_main([*argv, str(folder / "deepspeeds")]) == 0
    return came


def config_of(folder, **zero):
    """The path of the ZeRO-1 file with other settings of its block."""
    config = json.loads((ROOT / "ds_configs" / "cpu_zero1_fp32.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"zero_optimization": config["zero_optimization"] | zero}))
    return path


def curve(folder):
    """Loss and norm of each step."""
    return [(row["loss"], row["grad_norm"]) for row in train_rows(read_rows(folder))]


@pytest.mark.parametrize(
    ("world", "more", "zero"),
    [
        (1, [], {}),
        (2, [], {"reduce_bucket_size": 1000}),
        (2, ["--grad-checkpointing"], {"reduce_bucket_size": 1}),
        (2, ["--freeze", "blocks.0.attn"], {"reduce_bucket_size": 1000}),
    ],
)
def test_they_are_deepspeeds_to_the_last_bit(ranks, tmp_path, world, more, zero):
    """A gradient that is summed before it is whole, or not divided by the ranks."""
    found = ranks.run(world, train_both_ways, [*SMALL, *more], config_of(tmp_path, **zero), tmp_path)
    ours, deepspeeds = curve(tmp_path / "ours"), curve(tmp_path / "deepspeeds")
    assert len(ours) == 2
    assert ours == deepspeeds
    for taken, sent, buckets in found[0]:
        assert taken > 0, "while the backward pass runs"
        assert sent == buckets
        assert (buckets > 0) == (world > 1)


TO_ITS_RANK = {"use_multi_rank_bucket_allreduce": False}


@pytest.mark.parametrize(
    ("world", "more", "zero"),
    [(1, ["--grad-accum-steps", "2"], {}), (2, ["--pp", "2"], {}), (2, ["--tp", "2"], {}), (2, [], TO_ITS_RANK)],
)
def test_where_gradients_wait_deepspeed_goes_on(ranks, tmp_path, world, more, zero):
    """Gradients that add up beside the flat memory, twice the bytes of all of them; a sum that the JSON wants else."""
    assert ranks.run(world, train_both_ways, [*SMALL, *more], config_of(tmp_path, **zero), tmp_path)[0] == []


def test_a_sum_that_is_left_out_is_seen(ranks, tmp_path):
    """The comparison must fail where each rank steps by its own gradients."""
    ranks.run(2, train_both_ways, SMALL, config_of(tmp_path), tmp_path, True)
    assert curve(tmp_path / "ours") != curve(tmp_path / "deepspeeds")


def train_bf16_both_ways(argv, folder, breaks=False):
    """On a rank: train with BF16_Optimizer's gradients summed where they lie, and in DeepSpeed's copy.

    Returns:
        How often DeepSpeed's own way of summing a bucket was gone in the first run.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ds_vit.engine import base
    from ds_vit.engine.patches import zero

    own, seen = DeepSpeedEngine.allreduce_bucket, []

    def watched(engine, *args, **kwargs):
        seen.append(args)
        return own(engine, *args, **kwargs)

    with mock.patch.object(DeepSpeedEngine, "allreduce_bucket", watched):
        with mock.patch.object(zero.torch, "_foreach_mul_") if breaks else contextlib.nullcontext():
            assert train_main([*argv, str(folder / "ours")]) == 0
        in_copies = len(seen)
        with mock.patch.object(base, "reduce_flat_gradients_in_place"):
            assert train_main([*argv, str(folder / "deepspeeds")]) == 0
    assert len(seen) > in_copies
    return in_copies


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "more"), [(1, []), (2, ["--grad-accum-steps", "2"])])
def test_bf16_sums_are_deepspeeds_to_the_last_bit(ranks, tmp_path, world, more):
    """A sum that is not divided by the ranks, or divided on one rank; a group whose gradients are left out."""
    argv = [*SMALL, *more, "--deepspeed_config", ROOT / "ds_configs" / "zero1_bf16.json", "--output"]
    found = ranks.run(world, train_bf16_both_ways, [str(word) for word in argv], tmp_path)
    assert found == [0] * world
    assert curve(tmp_path / "ours") == curve(tmp_path / "deepspeeds")


def test_a_bf16_sum_that_is_no_mean_is_seen(ranks, tmp_path):
    """The comparison must fail where nothing is divided."""
    argv = [*SMALL, "--deepspeed_config", ROOT / "ds_configs" / "zero1_bf16.json", "--output"]
    ranks.run(2, train_bf16_both_ways, [str(word) for word in argv], tmp_path, True)
    assert curve(tmp_path / "ours") != curve(tmp_path / "deepspeeds")
