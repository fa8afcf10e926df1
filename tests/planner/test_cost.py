"""Seconds of a step: what travels beside the computing, what is sent again, and over which link."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_json import Checkpointing
from ds_vit.parallel.layout import Layout
from ds_vit.planner.cost import LayerTime, Machine, _by_stage, step_time
from ds_vit.planner.hardware import accelerator, link
from ds_vit.planner.memory import MemoryRules
from ds_vit.planner.search import Planned, json_at_stage


def machine(gpus, per_node=8):
    return Machine(accelerator("h100"), gpus, per_node, link("nvlink4"), link("ib400"))


def work():
    return SimpleNamespace(
        given=1000,
        tensors=1,
        forward=SimpleNamespace(seconds=lambda *_: 1.0, cheap=SimpleNamespace(seconds=lambda *_: 0.1)),
        backward=SimpleNamespace(seconds=lambda *_: 2.0),
    )


def step(told, stage, layout, checkpointing=None):
    json = json_at_stage(told, stage) if told is not None else {"zero_optimization": {"stage": stage}}
    rules = MemoryRules.of_json(
        json,
        pp=layout.pp,
        dp=layout.dp,
        tp=layout.tp,
        compute="bfloat16",
        autocast=False,
        average=False,
        whole_matrices=False,
        checkpointing=checkpointing or Checkpointing(),
    )
    batch = BatchSizes(layout.dp, 1, 1, layout.dp)
    return step_time(
        [work()], [2], [10**8], [True], (0, 1), machine(8), layout=layout, batch=batch, rules=rules, json=json
    )


@pytest.mark.parametrize(
    ("stage", "told", "overlaps"),
    [
        (0, {}, True),  # torch does it
        (0, {"gradient_accumulation_steps": 2}, False),
        (0, {"communication_data_type": "bf16"}, False),
        (1, {}, False),  # a bucket as large as DeepSpeed's own is full at the end alone
        (1, {"zero_optimization": {"reduce_bucket_size": 10**6}}, True),
        (1, {"zero_optimization": {"reduce_bucket_size": 10**6, "contiguous_gradients": False}}, False),
        (1, {"zero_optimization": {"overlap_comm": True}}, False),
        (2, {}, True),  # a planned JSON asks for it
        (2, None, False),
        (2, {"zero_optimization": {"overlap_comm": False}}, False),
        (3, None, True),
        (3, {"zero_optimization": {"overlap_comm": False}}, False),
    ],
)
def test_what_hides_gradients(stage, told, overlaps):
    # Catches: traffic that is free where DeepSpeed begins it after the backward pass.
    assert bool(step(told, stage, Layout(1, 8, 1)).hidden) == overlaps


def test_zero3_gathers_again_what_it_had_to_let_go():
    # Catches: weights that are kept for the backward pass and counted twice.
    def gathers(distance):
        limits = dict.fromkeys(("stage3_max_reuse_distance", "stage3_max_live_parameters"), distance)
        return step({"zero_optimization": limits}, 3, Layout(1, 8, 1))

    kept, let_go, half = gathers(10**9), gathers(1), gathers(10**8)
    extra = (let_go.data + let_go.hidden) - (kept.data + kept.hidden)
    assert extra > 0
    assert (half.data + half.hidden) - (kept.data + kept.hidden) == pytest.approx(extra / 2, rel=1e-6)


def test_sums_of_small_buckets_wait_more_often():
    # Catches: a latency for a step where each bucket has its own.
    def seconds(size):
        time = step({"zero_optimization": {"reduce_bucket_size": size, "overlap_comm": False}}, 2, Layout(1, 8, 1))
        return time.data + time.hidden

    more = seconds(10**6) - seconds(10**8)
    assert more == pytest.approx(99 * 2 * 7 * link("nvlink4").latency_seconds, rel=1e-6)


@pytest.mark.parametrize("selective", [False, True])
def test_recomputing_sends_a_blocks_first_sum_again(selective):
    # Catches: four sums of a block where five are sent.
    once = step({}, 1, Layout(1, 4, 2)).tensor
    again = step({}, 1, Layout(1, 4, 2), Checkpointing(1, selective=selective)).tensor
    assert again == pytest.approx(once * 5 / 4)


def test_the_slowest_stage_has_its_own_sums():
    # Catches: sums of layers that are not recomputed.
    layers = [LayerTime(1.0, 2.0, 4.0, first_sum=1.0)] * 2
    [stage] = _by_stage(layers, [True, False], (0, 2), Checkpointing(1))
    assert (stage.once, stage.again, stage.tensor) == (6.0, 1.0, 9.0)
    assert stage.forward == 2.0 + 8.0 / 2
    assert stage.whole == 16.0


@pytest.mark.parametrize(("gpus", "pp", "tp", "inside"), [(24, 3, 2, False), (24, 2, 4, True), (6, 3, 2, True)])
def test_replicas_that_cross_hosts(gpus, pp, tp, inside):
    # Catches: three replicas of six GPUs in hosts of eight, the second of which has two hosts.
    of = machine(gpus)
    assert (of.between_stages(Layout(pp, gpus // (pp * tp), tp)) is of.inside) == inside


def test_mfu_is_of_the_types_that_are_multiplied():
    # Catches: autocast measured against the peak of fp32, which gives more than 100 %.
    wishes = SimpleNamespace(machine=machine(1), compute="float32", autocast=True)
    found = SimpleNamespace(images_per_second=1.0)
    assert Planned(wishes, 1, 989 * 10**12, (), ()).mfu(found) == pytest.approx(1.0)
