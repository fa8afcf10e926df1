"""ZeRO-0's gradients summed by torch's reducer while the backward pass runs."""

from unittest import mock

import pytest
from curves import assert_same_curve, read_rows, train_main
from project import ROOT
from runs import ONE_BLOCK
from torch.nn.parallel import DistributedDataParallel

from ds_vit.config.deepspeed_rules import sums_going_back


def argv(tmp_path, *more):
    """Four steps on two ranks."""
    words = [*ONE_BLOCK, "--no-aug", "-b", "2", "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero0_fp32.json"]
    words += ["--max-steps", "4", "--log-interval", "1", "--val-split", "", "--clip-grad", "0.1", "--lr", "1e-2"]
    return [str(word) for word in [*words, "--warmup-steps", "0", "--sched", "constant", "--output", tmp_path, *more]]


def train(argv, loses_a_gradient=None, sends=True):
    """On a rank: how many buckets torch's reducer had in the end (None: there was none), and how many gradients are
    views of one.

    Args:
        argv: of the run.
        loses_a_gradient: the rank on which one parameter has none in the first step.
        sends: False to keep torch's reducer from summing over the ranks.
    """
    import torch.distributed as dist
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ds_vit.engine.patches.overlap import Overlap

    found = []
    reduce, take_step, begin = DeepSpeedEngine.allreduce_gradients, DeepSpeedEngine._take_model_step, Overlap.begin

    def lose(engine, *args, **kwargs):
        if dist.get_rank() == loses_a_gradient:
            next(engine.module.parameters()).grad = None
        reduce(engine, *args, **kwargs)

    def look(engine, *args, **kwargs):
        ddp = engine.module
        if isinstance(ddp, DistributedDataParallel):
            views = sum(p.grad._base is not None or p.grad.storage_offset() > 0 for p in ddp.parameters())
            # torch orders its buckets anew after its first pass
            sizes = ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
            found.append((len(sizes.split(",")), views))
        else:
            found.append(None)
        take_step(engine, *args, **kwargs)

    def begin_without_sums(overlap):
        begin(overlap)
        if isinstance(overlap._engine.module, DistributedDataParallel):
            overlap._engine.module.require_backward_grad_sync = sends

    with (
        mock.patch.multiple(DeepSpeedEngine, allreduce_gradients=lose, _take_model_step=look),
        mock.patch.object(Overlap, "begin", begin_without_sums),
    ):
        assert train_main(argv) == 0
    return found


def test_torch_sums_from_the_second_step_on(ranks, tmp_path):
    """Sums that are still DeepSpeed's, gradients that are copied, a bucket's size that nobody reads, another curve."""
    [whole, _] = ranks.run(2, train, argv(tmp_path / "whole"))
    assert whole[0] is None
    assert [buckets for buckets, _ in whole[1:]] == [1, 1, 1]
    [single, _] = ranks.run(2, train, argv(tmp_path / "single", "--set", "zero_optimization.reduce_bucket_size=1"))
    number = single[-1][0]
    assert number == 20, "a bucket a parameter"
    assert whole[-1][1] >= number - 1, "the first gradient lies at the beginning"
    ranks.run(1, train, argv(tmp_path / "one", "-b", "4"))
    for name in ("whole", "single"):
        assert_same_curve(read_rows(tmp_path / "one"), read_rows(tmp_path / name), rtol=1e-5)


def test_a_parameter_without_a_gradient_leaves_it_to_deepspeed(ranks, tmp_path):
    """A reducer that waits for a gradient that never comes; ranks that decide apart and wait for each other."""
    for found in ranks.run(2, train, argv(tmp_path), 1):
        assert found == [None] * 4


def train_compiled(argv):
    """On a rank: train and evaluate with compiled blocks."""
    with mock.patch("ds_vit.models.compiled.BACKEND", "eager"):
        return train(argv)


def test_compiled_blocks_are_evaluated_inside_of_it(ranks, tmp_path):
    """Blocks that are cut where a bucket ends, or an assertion of dynamo's about their sizes."""
    words = argv(tmp_path, "--compile", "--set", "zero_optimization.reduce_bucket_size=1", "--eval-interval", "1")
    [found, _] = ranks.run(2, train_compiled, [*words, "--val-split", "validation"], timeout=240)
    assert found[-1] is not None


def test_a_sum_that_is_left_out_is_seen(ranks, tmp_path):
    """The comparison must fail where each rank steps by its own gradients."""
    ranks.run(1, train, argv(tmp_path / "one", "-b", "4"))
    ranks.run(2, train, argv(tmp_path / "broken"), None, False)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(read_rows(tmp_path / "one"), read_rows(tmp_path / "broken"), rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "config", "overlaps"),
    [
        ((1, 2, 1), {}, True),
        ((1, 2, 1), {"communication_data_type": "fp32", "prescale_gradients": False}, True),
        ((1, 2, 1), {"communication_data_type": "bf16"}, False),
        ((1, 2, 1), {"prescale_gradients": True}, False),
        ((1, 2, 1), {"gradient_predivide_factor": 2.0}, False),
        ((1, 2, 1), {"zero_optimization": {"stage": 1}}, False),
        ((1, 2, 1), {"gradient_accumulation_steps": 2}, False),
        ((1, 1, 1), {}, False),
        ((1, 2, 2), {}, False),
        ((2, 2, 1), {}, False),
    ],
)
def test_only_plain_sums_of_data_parallel_ranks(layout, config, overlaps):
    """What torch's reducer would not do: it sums fp32 gradients of whole weights."""
    pp, dp, tp = layout
    assert sums_going_back(config, pp=pp, dp=dp, tp=tp) == overlaps
